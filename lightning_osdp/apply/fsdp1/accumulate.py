"""Gradients of an accumulation window: which units reduce them in every micro-batch, and which in the last only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _reduce_grad, _reshard

from lightning_osdp.apply.fsdp1.units import units_of
from lightning_osdp.core.plan import Plan


def units_reduced_last(root: FullyShardedDataParallel, plan: Plan) -> tuple[FullyShardedDataParallel, ...]:
    """Units of a wrapped model whose gradients the plan reduces in the last micro-batch only."""
    return tuple(wrapped for unit in plan.units if unit.sync == "last" for wrapped in units_of(root, unit))


def reduce_left_over(units: Iterable[FullyShardedDataParallel]) -> None:
    """Reduces whole gradients of units that ran in an earlier micro-batch of a window, but not in its last forward.

    Backward does not come to them, and FSDP would miss their reduced gradients. Call it on all ranks before backward;
    they must have left out the same units. Within `without_reducing` it does nothing.
    """
    for unit in units:
        handle = unit._handle
        if handle is None or not handle.uses_sharded_strategy or not unit._sync_gradients:
            continue
        flat, gradient = handle.flat_param, handle.flat_param.grad
        if gradient is None or gradient.size() != flat._unpadded_unsharded_size:
            continue
        if hasattr(flat, "_post_backward_hook_state"):  # set in its forward: backward comes to it
            continue
        unit.training_state, handle._training_state = TrainingState.FORWARD_BACKWARD, HandleTrainingState.BACKWARD_POST
        _reshard(unit, handle, free_unsharded_flat_param=True)
        gradient.data = gradient.to(handle._reduce_dtype)
        _reduce_grad(unit, handle)
        unit.training_state, handle._training_state = TrainingState.IDLE, HandleTrainingState.IDLE


@contextmanager
def without_reducing(units: Iterable[FullyShardedDataParallel]) -> Iterator[None]:
    """Within it, backward adds up gradients of these units where they are, whole; DP units among them stay gathered.

    Never for the root: only if it synchronises, backward waits on CUDA for the stream in which the others reduce.
    """
    units = tuple(units)
    _set_reducing(units, False)
    try:
        yield
    finally:
        _set_reducing(units, True)


def _set_reducing(units: Iterable[FullyShardedDataParallel], reduces: bool) -> None:
    for unit in units:
        unit._sync_gradients = reduces  # type: ignore[assignment]  # a bool, of which FSDP's annotations do not know
