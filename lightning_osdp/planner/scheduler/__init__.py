"""The Scheduler of the paper: chooses the micro-batch size, has modes assigned for it, and writes the plan.

(Lightning uses the word for learning rates; here it always means the choice of the micro-batch size.)
"""

from lightning_osdp.planner.scheduler.by_hand import BY_HAND, HandMade, made_by_hand
from lightning_osdp.planner.scheduler.fallback import freeable_bytes, in_micro_batches, recomputing, with_less_memory
from lightning_osdp.planner.scheduler.planning import (
    ANY_PREFETCH,
    WORTH_MOVING_ACTIVATIONS,
    PlanMethod,
    judge_plan,
    make_plan,
    method_of,
    moving_operators,
)
from lightning_osdp.planner.scheduler.replanning.candidates import (
    Racer,
    are_close,
    candidates,
    room_for_longer,
    thriftier,
    thriftiest,
)
from lightning_osdp.planner.scheduler.replanning.correcting import correction_of
from lightning_osdp.planner.scheduler.replanning.known_batches import (
    KnownBatch,
    KnownBatches,
    Room,
    RunBatches,
    Shapes,
    times_longer,
)
from lightning_osdp.planner.scheduler.replanning.pace import ALIKE, STEPS_APART, WATCHED_STEPS, Pace
from lightning_osdp.planner.scheduler.replanning.race import Race, Turn

__all__ = [
    "ALIKE",
    "ANY_PREFETCH",
    "BY_HAND",
    "STEPS_APART",
    "WATCHED_STEPS",
    "WORTH_MOVING_ACTIVATIONS",
    "HandMade",
    "KnownBatch",
    "KnownBatches",
    "Pace",
    "PlanMethod",
    "Race",
    "Racer",
    "Room",
    "RunBatches",
    "Shapes",
    "Turn",
    "are_close",
    "candidates",
    "correction_of",
    "freeable_bytes",
    "in_micro_batches",
    "judge_plan",
    "made_by_hand",
    "make_plan",
    "method_of",
    "moving_operators",
    "recomputing",
    "room_for_longer",
    "thriftier",
    "thriftiest",
    "times_longer",
    "with_less_memory",
]
