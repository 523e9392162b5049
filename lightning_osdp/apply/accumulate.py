"""Gradients of an accumulation window: which units reduce them in every micro-batch, and which in the last only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_osdp.core.plan import Plan


def units_reduced_last(root: FullyShardedDataParallel, plan: Plan) -> tuple[FullyShardedDataParallel, ...]:
    """Units of a wrapped model whose gradients the plan reduces in the last micro-batch only."""
    modules = [root.module.get_submodule(unit.name) for unit in plan.units if unit.sync == "last"]
    # of a split operator, its slices are units
    return tuple(
        unit
        for module in modules
        for unit in ([module] if isinstance(module, FullyShardedDataParallel) else module.modules())
        if isinstance(unit, FullyShardedDataParallel)
    )


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
