"""Options of `OSDPStrategy`, checked before anything runs."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision

from lightning_osdp.core.plans.document import shown
from lightning_osdp.core.plans.plan import COST_MODELS, Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.text.byte_size import format_bytes, parse_bytes
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.engine import AUTO, FSDP2
from lightning_osdp.planner.scheduler import ANY_PREFETCH
from lightning_osdp.planner.search import SOLVERS
from lightning_osdp.strategy.runtime.launcher import StartMethod

_BATCH_SIZES = ("auto", "divide", "keep", "scale")
_PERCENT = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?)\s*%\s*")
_LEAST_BYTES = 2**20
"""Least int that is taken for bytes; a smaller one was probably meant as GiB."""
_SCALE_SHARE = 0.95
"""Share of the free memory that plans with ``batch_size="scale"`` may fill: later batches may be larger."""

_STATE_DICT_TYPES = ("full", "sharded")

_PLANNED = {
    "sharding_strategy": "the plan chooses it per operator; limit the choice with search_space=SearchSpace(modes=...)",
    "auto_wrap_policy": "the plan's units say what is sharded together; pass a plan of your own with plan=",
    "device_mesh": "the plan shards over all ranks",
    "process_group": "the plan shards over all ranks",
    "ignored_modules": "the plan covers every parameter",
    "ignored_states": "the plan covers every parameter",
    "device_id": "the strategy uses each rank's own device",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of `OSDPStrategy` under their own names."""

    memory_limit: int | str | None = None
    host_memory_limit: int | str | None = None
    plan: Plan | str | Path | None = None
    batch_size: int | str = "auto"
    search: str = "depth_first"
    search_space: SearchSpace = field(default_factory=SearchSpace)
    cost_model: str = "simulate"
    global_batch_size: int | None = None
    accumulate_in_fp32: bool = False
    profile_batch: Any = None
    dry_run: bool | Literal["auto"] = "auto"
    race: bool | Literal["auto"] = "auto"
    longer_batches: bool = True
    node_size: int | None = None
    start_method: StartMethod = "popen"
    engine: FSDP2 = ANY_PREFETCH
    """FSDP2 with the user's settings of prefetching; the plan chooses settings that are ``"auto"``."""
    recomputed: tuple[str, ...] = ()
    """Modules that are checkpointed whatever the plan is, by ``activation_checkpointing_policy``; set in setup."""

    def checked(self) -> Options:
        """Checks all values and makes the path of a plan a `Path`; raises a `ConfigurationError` for a wrong value."""
        sizes, optional, methods = f"one of {_BATCH_SIZES} or at least 1", "None or at least 1", get_args(StartMethod)
        for name, is_fine, expected in (
            ("search", self.search in tuple(SOLVERS), f"one of {tuple(SOLVERS)}"),
            ("cost_model", self.cost_model in COST_MODELS, f"one of {COST_MODELS}"),
            ("batch_size", _is_positive(self.batch_size) or self.batch_size in _BATCH_SIZES, sizes),
            ("global_batch_size", self.global_batch_size is None or _is_positive(self.global_batch_size), optional),
            ("node_size", self.node_size is None or _is_positive(self.node_size), optional),
            ("dry_run", isinstance(self.dry_run, bool) or self.dry_run == "auto", "True, False or 'auto'"),
            ("race", isinstance(self.race, bool) or self.race == "auto", "True, False or 'auto'"),
            ("longer_batches", isinstance(self.longer_batches, bool), "True or False"),
            ("start_method", self.start_method in methods, f"one of {methods}"),
            ("plan", self.plan is None or isinstance(self.plan, (Plan, str, Path)), "a Plan or the path of one"),
            ("search_space", isinstance(self.search_space, SearchSpace), "None or a SearchSpace"),
            ("accumulate_in_fp32", isinstance(self.accumulate_in_fp32, bool), "True or False"),
            (
                "profile_batch",
                not isinstance(self.profile_batch, str) or self.profile_batch == "longest",
                "None, 'longest', a batch, or a function that takes the batches of the training loader and returns one",
            ),
        ):
            if not is_fine:
                raise ConfigurationError(f"{name} must be {expected}, got {shown(getattr(self, name))}.")
        if self.global_batch_size is not None and self.batch_size == "scale":
            raise ConfigurationError(
                "Expected batch_size='auto' or a micro-batch with global_batch_size, got batch_size='scale', which"
                " chooses the global batch. Leave out one of the two."
            )
        _ = self.memory_limit_bytes, self.host_memory_limit_bytes  # raises if a limit cannot be parsed
        if self.plan is None or isinstance(self.plan, Plan):
            return self
        path = Path(self.plan)
        # Where ranks have been started, rank 0 reads the file in setup; it need not be on other nodes.
        if _get_rank() is None and "NODE_RANK" not in os.environ and not path.exists():
            raise ConfigurationError(
                f"Expected plan= to be the path of a plan or of a checkpoint, got {str(self.plan)!r}, which does not"
                " exist. Plans are written to osdp_plan.json in the Trainer's log directory."
            )
        return replace(self, plan=path)

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory limit in bytes; None where the limit is a share of the free memory, `memory_share`."""
        share = _percent(self.memory_limit)
        return None if self.memory_limit is None or share is not None else _num_bytes("memory_limit", self.memory_limit)

    @property
    def host_memory_limit_bytes(self) -> int | None:
        """Limit of the host's memory in bytes; None where it is what is free."""
        limit = self.host_memory_limit
        return None if limit is None else _num_bytes("host_memory_limit", limit)

    @property
    def memory_share(self) -> float:
        """Share of the free memory that is the limit, where none in bytes is given."""
        percent = _percent(self.memory_limit)
        if percent is not None:
            return percent / 100
        return _SCALE_SHARE if self.batch_size == "scale" else 1.0

    def offers_host_last(self, device: torch.device) -> bool:
        """True if states may be on a GPU's host where nothing fits else: nobody has named their places."""
        return device.type == "cuda" and self.search_space.states == SearchSpace().states and self.cost_model != "paper"

    @property
    def profiled_choices(self) -> dict[str, Any]:
        """Arguments of `profile_model` for what a plan may choose."""
        activations = ("keep", "recompute") if self.recomputed else self.search_space.activations
        return {
            "activations": ("keep",) if self.cost_model == "paper" else activations,
            "blocks": self.recomputed or None,
            "exchanges": self.search_space.may_move,
            "on_host": "host" in self.search_space.states,
        }


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _num_bytes(name: str, limit: int | str) -> int:
    """Bytes of a limit; raises a `ConfigurationError` for an int that was probably meant as GiB."""
    num_bytes = parse_bytes(limit)
    if isinstance(limit, int) and num_bytes < _LEAST_BYTES:
        raise ConfigurationError(
            f"{name}={limit} is {format_bytes(num_bytes)}, a number without a unit being bytes."
            f' Pass a text such as "{limit}GiB", or "{limit}B" if that is meant.'
        )
    return num_bytes


def _percent(memory_limit: int | str | None) -> float | None:
    match = _PERCENT.fullmatch(memory_limit) if isinstance(memory_limit, str) else None
    if match is None:
        return None
    percent = float(match["number"])
    if not 0 < percent <= 100:
        raise ConfigurationError(
            f"memory_limit must be more than 0% and at most 100% of the free memory, got {memory_limit!r}."
        )
    return percent


def check_fsdp_kwargs(fsdp_kwargs: dict[str, Any]) -> None:
    """Removes arguments that the plan decides; raises a `ConfigurationError` if one is set, wrong or unknown."""
    kinds = (FSDPStrategy, FullyShardedDataParallel)
    known = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    unknown = sorted(fsdp_kwargs.keys() - _PLANNED.keys() - known)
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


def pop_cpu_offload(fsdp_kwargs: dict[str, Any], search_space: SearchSpace) -> SearchSpace:
    """Removes ``cpu_offload``; where it is set, all states and shards are to be on the host.

    Raises:
        ConfigurationError: it is wrong, or the search space says something else of the host.
    """
    value = fsdp_kwargs.pop("cpu_offload", None)
    if not isinstance(value, (bool, CPUOffload, type(None))):
        raise ConfigurationError(f"cpu_offload must be None, True, False or a CPUOffload, got {value!r}.")
    if not (value.offload_params if isinstance(value, CPUOffload) else value):
        return search_space
    if "host" in (*search_space.states, *search_space.shards):
        raise ConfigurationError(
            "Expected cpu_offload=True, which has all states of optimizers and shards of units on the host, or"
            " 'host' in SearchSpace(states=..., shards=...), which has there what memory_limit asks for, got both."
            " Leave one of them out."
        )
    return replace(search_space, states=("host",), shards=("host",))


def pop_prefetch(fsdp_kwargs: dict[str, Any]) -> FSDP2:
    """Removes the prefetch settings and gives an engine with them; raises a `ConfigurationError` if one is wrong."""
    backward = fsdp_kwargs.pop("backward_prefetch", AUTO)
    names = {BackwardPrefetch.BACKWARD_PRE: "pre", None: "none", AUTO: AUTO}
    if backward == BackwardPrefetch.BACKWARD_POST:
        raise ConfigurationError(
            "OSDPStrategy cannot take BackwardPrefetch.BACKWARD_POST: fully_shard gathers ahead before a unit's"
            " backward, or not at all. Pass BackwardPrefetch.BACKWARD_PRE or None, or leave it out."
        )
    if backward not in tuple(names):
        raise ConfigurationError(f"backward_prefetch must be a BackwardPrefetch or None, got {backward!r}.")
    engine = replace(ANY_PREFETCH, backward_prefetch=names[backward])
    if "forward_prefetch" not in fsdp_kwargs:
        return engine
    forward = fsdp_kwargs.pop("forward_prefetch")
    if not isinstance(forward, bool):
        raise ConfigurationError(f"forward_prefetch must be True or False, got {forward!r}.")
    return replace(engine, forward_prefetch=forward)
