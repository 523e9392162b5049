"""The FSDP units of a wrapped model, by the names that a plan has for them."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._init_utils import SHARDING_STRATEGY_MAP

from lightning_osdp.apply.fsdp1.wrap import STRATEGIES
from lightning_osdp.core.plan import Plan, Unit

_BACKWARD = (HandleTrainingState.BACKWARD_PRE, HandleTrainingState.BACKWARD_POST)


def units_of(root: FullyShardedDataParallel, unit: Unit) -> list[FullyShardedDataParallel]:
    """What wraps a plan's unit: one FSDP unit, or one for each slice."""
    module = root.module.get_submodule(unit.name)
    if isinstance(module, FullyShardedDataParallel):
        return [module]
    return [child for child in module.modules() if isinstance(child, FullyShardedDataParallel)]


def use_modes(root: FullyShardedDataParallel, plan: Plan) -> None:
    """Changes the modes of a wrapped model, between two steps, to those of a plan with the same units and slices."""
    if root.world_size == 1:
        return  # nothing is sharded
    for unit in plan.units:
        if unit.name == "":
            continue
        for wrapped, mode in zip(units_of(root, unit), unit.modes, strict=True):
            wrapped.sharding_strategy = STRATEGIES[mode]
            if wrapped._handle is not None:
                wrapped._handle._sharding_strategy = SHARDING_STRATEGY_MAP[STRATEGIES[mode]]


def place_in_step(root: FullyShardedDataParallel, plan: Plan) -> str:
    """Where in a step the model is: ``forward of 'layers.2'``, ``backward of 'layers.2'``, or nothing outside of both.

    FSDP's own states say so, and stay as they are when an error leaves a step.
    """
    states = {unit.name: state for unit in plan.units for state in _states(root, unit)}
    running = [name for name, state in states.items() if state is HandleTrainingState.FORWARD]
    # backward goes from the last unit to the first, and keeps the root from its beginning to its end
    reached = [name for name, state in states.items() if name and state in _BACKWARD]
    if getattr(root, "_post_backward_callback_queued", False):  # known from the first forward on
        return f"backward of {_told(reached[0] if reached else '')}"
    if running or root.training_state is TrainingState.FORWARD_BACKWARD:
        return f"forward of {_told(running[-1] if running else '')}"
    return ""


def _states(root: FullyShardedDataParallel, unit: Unit) -> Iterator[HandleTrainingState]:
    """Of slices, that of one which is in use, if any is."""
    wrapped = units_of(root, unit) if unit.name else [root]
    states = [each._handle._training_state for each in wrapped if each._handle is not None]
    yield from sorted(states, key=lambda state: state is not HandleTrainingState.IDLE)[-1:]


def _told(name: str) -> str:
    return repr(name) if name else "the root unit"
