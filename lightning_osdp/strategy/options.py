"""Options of `OSDPStrategy`, checked before anything runs."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision

from lightning_osdp.core.plans.document import shown
from lightning_osdp.core.plans.plan import COST_MODELS, Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.text.byte_size import format_bytes, parse_bytes
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.search import SOLVERS

BATCH_SIZES = ("auto", "keep", "scale")

LONGEST = "longest"
"""Value of ``profile_batch``."""

_PERCENT = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?)\s*%\s*")
_LEAST_BYTES = 2**20
"""Below it, an int is one that somebody took for GiB."""
_SCALE_SHARE = 0.95
"""Of the free memory, where the micro-batch is to fill it: batches are not all of one size."""

_STATE_DICT_TYPES = ("full", "sharded")

_PLANNED = {
    "sharding_strategy": "the plan chooses it per operator; limit the choice with search_space=SearchSpace(modes=...)",
    "auto_wrap_policy": "the plan's units say what is sharded together; pass a plan of your own with plan=",
    "device_mesh": "the plan shards over all ranks",
    "process_group": "the plan shards over all ranks",
    "cpu_offload": "plans keep all states on the device; leave it out, a lower memory_limit shards more",
    "ignored_modules": "the plan covers every parameter",
    "ignored_states": "the plan covers every parameter",
    "device_id": "the strategy uses each rank's own device",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for, in the planner's units."""

    memory_limit_bytes: int | None
    memory_share: float
    """Of the memory that is free, where no limit in bytes is given."""
    plan: Plan | Path | None
    batch_size: int | str
    search: str
    search_space: SearchSpace
    cost_model: str
    global_batch_size: int | None
    accumulate_in_fp32: bool
    profile_batch: Any = None
    """See `OSDPStrategy`."""
    recomputed: tuple[str, ...] = ()
    """Modules that recompute what they save whatever a plan would choose; known once there is a model."""

    @classmethod
    def checked(
        cls,
        *,
        memory_limit: int | str | None,
        plan: Plan | str | Path | None,
        batch_size: int | str,
        search: str,
        search_space: SearchSpace | None,
        cost_model: str,
        global_batch_size: int | None,
        accumulate_in_fp32: bool,
        profile_batch: Any = None,
    ) -> Options:
        """Options from the strategy's arguments.

        Raises:
            ConfigurationError: one of them cannot be used.
        """
        if search not in tuple(SOLVERS):
            raise ConfigurationError(f"search must be one of {tuple(SOLVERS)}, got {search!r}.")
        if cost_model not in COST_MODELS:
            raise ConfigurationError(f"cost_model must be one of {COST_MODELS}, got {cost_model!r}.")
        is_size = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1
        if not is_size and batch_size not in BATCH_SIZES:
            raise ConfigurationError(f"batch_size must be one of {BATCH_SIZES} or at least 1, got {batch_size!r}.")
        _check_global_batch_size(global_batch_size, batch_size)
        if plan is not None and not isinstance(plan, (Plan, str, Path)):
            raise ConfigurationError(f"plan must be a Plan or the path of one, got {shown(plan)}.")
        if search_space is not None and not isinstance(search_space, SearchSpace):
            raise ConfigurationError(f"search_space must be None or a SearchSpace, got {search_space!r}.")
        if not isinstance(accumulate_in_fp32, bool):
            raise ConfigurationError(f"accumulate_in_fp32 must be True or False, got {accumulate_in_fp32!r}.")
        if isinstance(profile_batch, str) and profile_batch != LONGEST:
            raise ConfigurationError(
                f"profile_batch must be None, {LONGEST!r}, a batch, or a function that takes the batches of the"
                f" training loader and returns one, got {profile_batch!r}."
            )
        share = _share(memory_limit)
        memory_limit_bytes = _limit_bytes(memory_limit) if memory_limit is not None and share is None else None
        share = (_SCALE_SHARE if batch_size == "scale" else 1.0) if share is None else share
        return cls(
            memory_limit_bytes=memory_limit_bytes,
            memory_share=share,
            plan=_existing(plan) if isinstance(plan, (str, Path)) else plan,
            profile_batch=profile_batch,
            batch_size=batch_size,
            search=search,
            search_space=search_space or SearchSpace(),
            cost_model=cost_model,
            global_batch_size=global_batch_size,
            accumulate_in_fp32=accumulate_in_fp32,
        )


def _share(memory_limit: int | str | None) -> float | None:
    """What part of the free memory was asked for; None where that was not."""
    match = _PERCENT.fullmatch(memory_limit) if isinstance(memory_limit, str) else None
    if match is None:
        return None
    percent = float(match["number"])
    if not 0 < percent <= 100:
        raise ConfigurationError(
            f"memory_limit must be more than 0% and at most 100% of the free memory, got {memory_limit!r}."
        )
    return percent / 100


def _existing(plan: str | Path) -> Path:
    """The path, which must be there unless this process is one of several ranks: rank 0 then reads it, in setup."""
    path = Path(plan)
    if _get_rank() is None and "NODE_RANK" not in os.environ and not path.exists():
        raise ConfigurationError(
            f"Expected plan= to be the path of a plan or of a checkpoint, got {str(plan)!r}, which does not exist."
            " Plans are written to osdp_plan.json in the Trainer's log directory."
        )
    return path


def _limit_bytes(memory_limit: int | str) -> int:
    num_bytes = parse_bytes(memory_limit)
    if isinstance(memory_limit, int) and num_bytes < _LEAST_BYTES:
        raise ConfigurationError(
            f"memory_limit={memory_limit} is {format_bytes(num_bytes)}, a number without a unit being bytes. Pass a"
            f' text such as "{memory_limit}GiB", or "{memory_limit}B" if that is meant.'
        )
    if num_bytes >= 2**63:
        raise ConfigurationError(f"memory_limit must be less than 2^63 bytes (8 EiB), got {shown(memory_limit)}.")
    return num_bytes


def _check_global_batch_size(global_batch_size: object, batch_size: object) -> None:
    if global_batch_size is None:
        return
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise ConfigurationError(f"global_batch_size must be None or at least 1, got {global_batch_size!r}.")
    if batch_size == "scale":
        raise ConfigurationError(
            "Expected batch_size='auto' or a micro-batch with global_batch_size, got batch_size='scale', which chooses"
            " the global batch. Leave out one of the two."
        )


@dataclass(frozen=True)
class Prefetch:
    """Settings of prefetching, which decide how many units are gathered at once."""

    backward: str = "auto"
    forward: bool | Literal["auto"] = "auto"


def check_fsdp_kwargs(fsdp_kwargs: dict[str, Any]) -> None:
    """Returns if no argument for FSDP contradicts the plan; takes out those that are left to it.

    Raises:
        ConfigurationError: one does, is unknown to FSDP, or cannot be used.
    """
    unknown = sorted(fsdp_kwargs.keys() - _PLANNED.keys() - _known_to_fsdp())
    if unknown:
        raise ConfigurationError(
            f"Expected options of OSDPStrategy, Lightning's FSDPStrategy or FullyShardedDataParallel, got"
            f" {unknown[0]!r}, which is none of them. Look for a spelling mistake, or leave it out."
        )
    for name, why in _PLANNED.items():
        value = fsdp_kwargs.pop(name, None)
        if value is not None and value is not False:
            raise ConfigurationError(f"OSDPStrategy cannot take {name}={value!r}: {why}.")
    if fsdp_kwargs.get("use_orig_params", True) is not True:
        raise ConfigurationError(
            "OSDPStrategy needs use_orig_params=True (its default): fully_shard has no flat parameters, and"
            " configure_optimizers sees the parameters under their own names. Leave use_orig_params out."
        )
    if fsdp_kwargs.get("state_dict_type", "full") not in _STATE_DICT_TYPES:
        raise ConfigurationError(
            f"state_dict_type must be one of {_STATE_DICT_TYPES}, got {fsdp_kwargs['state_dict_type']!r}."
        )
    precision = fsdp_kwargs.get("mixed_precision")
    if precision is not None and not isinstance(precision, MixedPrecision):
        raise ConfigurationError(
            f"mixed_precision must be None or a MixedPrecision of torch.distributed.fsdp, got {precision!r}."
            " To train in mixed precision, use precision= of the Trainer."
        )


def _known_to_fsdp() -> set[str]:
    kinds = (FSDPStrategy, FullyShardedDataParallel)
    return {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}


def pop_prefetch(fsdp_kwargs: dict[str, Any]) -> Prefetch:
    """Takes prefetch settings out of FSDP's arguments: they belong to the plan, which chooses what is not said.

    Raises:
        ConfigurationError: one cannot be used.
    """
    backward = fsdp_kwargs.pop("backward_prefetch", "auto")
    names = {BackwardPrefetch.BACKWARD_PRE: "pre", None: "none", "auto": "auto"}
    if backward == BackwardPrefetch.BACKWARD_POST:
        raise ConfigurationError(
            "OSDPStrategy cannot take BackwardPrefetch.BACKWARD_POST: fully_shard gathers ahead before a unit's"
            " backward, or not at all. Pass BackwardPrefetch.BACKWARD_PRE or None, or leave it out."
        )
    if backward not in tuple(names):
        raise ConfigurationError(f"backward_prefetch must be a BackwardPrefetch or None, got {backward!r}.")
    if "forward_prefetch" not in fsdp_kwargs:
        return Prefetch(backward=names[backward])
    forward = fsdp_kwargs.pop("forward_prefetch")
    if not isinstance(forward, bool):
        raise ConfigurationError(f"forward_prefetch must be True or False, got {forward!r}.")
    return Prefetch(backward=names[backward], forward=forward)
