"""What becomes of arguments of Lightning's ``FSDPStrategy`` and of ``FullyShardedDataParallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_osdp.errors import ConfigurationError

_TAKEN = ("mixed_precision", "param_init_fn", "sync_module_states")
_REFUSED = {
    "limit_all_gathers": "fully_shard frees what it gathered in the order of computing, with no limit to switch off",
    "use_orig_params": "fully_shard never makes flat parameters",
    "forward_prefetch_limit": "fully_shard has no such option",
}
_DEFAULTS = {"limit_all_gathers": True, "use_orig_params": True}
"""Values that ask for what ``fully_shard`` does anyway."""


def fully_shard_arguments(fsdp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those that ``fully_shard`` has a counterpart of.

    Raises:
        ConfigurationError: it has none of one that is given.
    """
    found = {name: value for name, value in fsdp_kwargs.items() if name in _TAKEN}
    for name, value in fsdp_kwargs.items():
        if name not in _TAKEN and value is not None and value != _DEFAULTS.get(name):
            why = _REFUSED.get(name, "fully_shard has no such option")
            raise ConfigurationError(f"OSDPStrategy cannot take {name}={value!r}: {why}. Leave it out.")
    precision = found.get("mixed_precision")
    if precision is not None and precision.keep_low_precision_grads:
        raise ConfigurationError(
            "OSDPStrategy cannot take MixedPrecision(keep_low_precision_grads=True): fully_shard gives reduced"
            " gradients the dtype of the parameters. Leave it out."
        )
    return found
