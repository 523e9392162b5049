"""Where torch's rules for fake tensors say something else than its kernels allocate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_log = logging.getLogger(__name__)


class AsAllocated(TorchDispatchMode):
    """Gives the results of operations on fake tensors the storages that the kernels allocate.

    To be entered inside a ``FakeTensorMode``. Each rule was found by comparing fake with real results, with torch 2.13
    on CPU.

    Args:
        assumes_ones: whether a value that is read (``.item()``) is one, where it else cannot be.

    Attributes:
        written: storages that operations have written to, by address.
    """

    def __init__(self, *, assumes_ones: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._assumes_ones = assumes_ones
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and corrects its result."""
        if self._assumes_ones and func is aten._local_scalar_dense.default:
            _log.info("OSDP: the training step reads a value, which a fake tensor does not have; it is taken as 1.")
            return _one(args[0].dtype)
        if func._schema.is_mutable:
            self.written |= {tensor.untyped_storage()._cdata for tensor in _written_by(func, args, kwargs or {})}
        result = func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        return result if rule is None else rule(result, *args)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Arguments that an operation in place changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


def _one(dtype: torch.dtype) -> complex | float | int | bool:
    """As ``.item()`` of a one of this dtype."""
    with unset_fake_temporarily():
        return torch.ones((), dtype=dtype).item()


def _keeps_all_elements(result: Tensor, input: Tensor, target: Tensor, *_: Any) -> Tensor:  # noqa: A002
    """A loss that is reduced in place: its storage has room for every element's loss as long as it lives."""
    elements = torch.broadcast_shapes(input.shape, target.shape).numel() if result.dim() == 0 else result.numel()
    result.untyped_storage().resize_(elements * result.element_size())
    return result


def _statistics_like_weight(result: Any, _: Tensor, *options: Any) -> Any:
    """On CPU the statistics of a normalisation have the weight's dtype, which autocast leaves alone."""
    output, mean, deviation = result
    weight = next((option for option in options if isinstance(option, Tensor)), None)
    if weight is None or weight.device.type != "cpu" or weight.dtype == mean.dtype:
        return result
    return output, torch.empty_like(mean, dtype=weight.dtype), torch.empty_like(deviation, dtype=weight.dtype)


def _only_wanted(result: Any, *args: Any) -> Any:
    """No gradient of an input that needs none."""
    wanted = args[-1]
    return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(result, wanted, strict=True))


def _with_workspace(result: Any, *args: Any) -> Any:
    """The workspace that oneDNN keeps for backward, whose size only a call tells."""
    with unset_fake_temporarily():
        real = tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), args)
        workspace = aten.mkldnn_rnn_layer(*real)[-1]
    # without gradients there is none
    return *result[:-1], None if workspace is None else torch.empty(workspace.shape, dtype=workspace.dtype)


def _contiguous_input_gradient(result: Any, *_: Any) -> Any:
    """The kernel makes its inputs contiguous first, and so its gradient is."""
    gradient, *others = result
    return None if gradient is None else torch.empty_like(gradient, memory_format=torch.contiguous_format), *others


def _two_biases(result: Any, *_: Any) -> Any:
    """The gradients of a recurrent layer's two biases are two tensors."""
    return *result[:4], torch.empty_like(result[4]), *result[5:]


_RULES: dict[Any, Callable[..., Any]] = {
    aten.mse_loss.default: _keeps_all_elements,
    aten.smooth_l1_loss.default: _keeps_all_elements,
    aten.soft_margin_loss.default: _keeps_all_elements,
    aten.binary_cross_entropy.default: _keeps_all_elements,
    aten.native_layer_norm.default: _statistics_like_weight,
    aten.native_group_norm.default: _statistics_like_weight,
    aten.native_batch_norm.default: _statistics_like_weight,
    aten.native_layer_norm_backward.default: _contiguous_input_gradient,
    aten.native_batch_norm_backward.default: _only_wanted,
    aten.mkldnn_rnn_layer.default: _with_workspace,
    aten.mkldnn_rnn_layer_backward.default: _two_biases,
}
