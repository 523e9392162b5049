"""What a unit's parameters are views of once FSDP1 has gathered it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp._flat_param import FlatParamHandle

_ATTRIBUTES = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


def gathered_tensors(handle: FlatParamHandle) -> list[Tensor]:
    """Tensors of a unit's flat parameter that have storage only while it is gathered."""
    found = (getattr(handle.flat_param, name, None) for name in _ATTRIBUTES)
    return [tensor for tensor in found if tensor is not None]
