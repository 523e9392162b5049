"""Checks of two ranks: each on a GPU of its own with NCCL, both on one with gloo, or on CPU with gloo.

Two ranks on one GPU show what is computed, not how long it takes; on CPU the checks check themselves.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, Strategy

from benchmarks.families import Family, build
from benchmarks.measures.gpu.finding import Check, Finding
from benchmarks.measures.gpu.models import batch_on, made, num_samples_on, unit_names
from benchmarks.measures.gpu.one_device import losses_of
from benchmarks.measures.gpu.plans import DECISIONS, mixed_plan
from benchmarks.rank_faults import Case, Launcher, make_plan, outcome
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.step import Step, time_in_turns
from benchmarks.testbed.training import SharedGPU, StartedRanks
from lightning_osdp import Cluster, ModelProfile, OSDPStrategy, TrainingStep, measure_cluster, profile_model
from lightning_osdp.apply import sharded
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.planner.scheduler import make_plan as search
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.profiler.machine.overlap import LEAST_HIDDEN, begin_reduce_scatter, beside_products, hidden_share
from lightning_osdp.strategy.runtime.all_ranks import in_step

NUM_RANKS = 2
_NUM_MEASURED, _MOST_APART = 5, 1.25
_REDUCED_BYTES = 16 * 2**20
_NUM_ROUNDS, _NEAR = 10, 0.03
_NUM_STEPS = {"cuda": 200, "cpu": 3}
_MOST_SAMPLES = {"cuda": None, "cpu": 4}
FAULTS: tuple[tuple[Launcher, Case], ...] = (
    ("popen", Case("kill", ("--fault", "kill"), r"(?i)rank: 1|rank +: 1|Rank 1")),
    ("popen", Case("exception", ("--fault", "raise"), r"(?i)Rank 1 failed: ValueError: this rank has failed")),
    ("popen", Case("SIGTERM", (), "Rank 1 received SIGTERM", ("pid-1",))),
    # one that is stopped cannot end itself: its launcher does
    ("torchrun", Case("SIGSTOP", ("--fault", "stop", "--timeout_s", "30"), "Rank 1 stalled", bound_s=120.0)),
)


def _on_ranks(device: torch.device, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
    """Results of a function on each rank; where a rank fails, the next check has other processes."""
    try:
        backend = "nccl" if device.type == "cuda" and not _is_shared(device.type) else "gloo"
        return local_ranks(NUM_RANKS, backend).run(function, kind=device.type, **kwargs)
    except Exception:
        local_ranks.cache_clear()
        raise


def _is_shared(kind: str) -> bool:
    """True for more ranks than devices, which NCCL refuses."""
    return kind == "cuda" and torch.cuda.device_count() < NUM_RANKS


def _own(kind: str) -> torch.device:
    """Device of this rank."""
    return torch.device(kind, dist.get_rank() % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)


def _losses_of(module: Family, kind: str, **options: Any) -> list[float]:
    """`losses_of` on started ranks.

    On a shared GPU optimizers are not tried on shards first: ``DTensor.full_tensor`` ends the process by a
    segmentation fault where gloo gathers tensors of a GPU. [Seen in torch 2.11.]
    """
    options |= {"devices": NUM_RANKS, "plugins": [StartedRanks()]}
    if not _is_shared(kind):
        return losses_of(module, _own(kind), **options)
    with patch.object(sharded, "try_optimizer"):
        return losses_of(module, _own(kind), accelerator=SharedGPU(), **options)


def _cluster(kind: str) -> Cluster:
    return measure_cluster(_own(kind), local_ranks=NUM_RANKS)


def _measured(*, kind: str) -> list[dict[str, Any]]:
    found = []
    for _ in range(_NUM_MEASURED):
        cluster = _cluster(kind)
        found.append(
            {
                "gather_ms": cluster.all_gather.ring_s(16 * 2**20, NUM_RANKS) * 1e3,
                "reduce_ms": cluster.reduce_scatter.ring_s(16 * 2**20, NUM_RANKS) * 1e3,
                "step_us": cluster.all_gather.latency_s * 1e6,
                "unit_us": sum(part.fixed_s for part in cluster.unit_overhead.values()) * 1e6,
                "overlaps": cluster.overlaps,
                "computing_x": cluster.contention.computing,
                "collectives_x": cluster.contention.collectives,
            }
        )
    return found


def _reductions_hidden(*, kind: str) -> float:
    """Share of reduce-scatters and matrix products, the shorter of both, that the other hides."""
    device, width = _own(kind), {"cuda": 4096, "cpu": 256}[kind]
    whole = torch.ones(_REDUCED_BYTES // 4, device=device)
    shard = torch.empty(whole.numel() // NUM_RANKS, device=device)
    return hidden_share(beside_products(partial(begin_reduce_scatter, whole, shard), device, width=width))


def links(device: torch.device) -> Iterator[Finding]:
    """Links five times: each time about the same; and reductions beside computing, which no fit tries on GPUs."""
    found = _on_ranks(device, _measured)[0]
    for name in ("gather_ms", "reduce_ms"):
        values = [each[name] for each in found]
        numbers = {"16_MiB_ms": [round(value, 4) for value in values], "apart": max(values) / min(values)}
        yield Finding(f"links: {name[:-3]}", numbers["apart"] <= _MOST_APART or device.type == "cpu", numbers)
    hidden = _on_ranks(device, _reductions_hidden)[0]
    overlaps = {each["overlaps"] for each in found}
    numbers = {"hidden": round(hidden, 3), "all_gathers_overlap": sorted(overlaps)}
    # plans take reductions to overlap where all-gathers do; on CPU both are tried before a fit
    yield Finding("links: reductions", device.type == "cpu" or overlaps == {hidden >= LEAST_HIDDEN}, numbers)
    numbers = {"overlaps": sorted(overlaps)} | {
        name: [round(each[name], 2) for each in found]
        for name in ("step_us", "unit_us", "computing_x", "collectives_x")
    }
    yield Finding("links: overlap", len(overlaps) == 1 or device.type == "cpu", numbers)


def _losses(*, strategy: str, kind: str) -> list[float]:
    device = _own(kind)
    made_of: dict[str, Any] = {
        "osdp": OSDPStrategy(plan=mixed_plan(made("gpt"), NUM_RANKS, num_samples_on(device)), batch_size="keep"),
        "ddp": "ddp",
        "fsdp": FSDPStrategy(auto_wrap_policy={type(made("gpt").get_submodule(unit_names(made("gpt"))[0]))}),
    }
    chosen: Strategy | str = made_of[strategy]
    return _losses_of(made("gpt"), kind, strategy=chosen)


def losses(device: torch.device) -> Iterator[Finding]:
    """Losses beside those of Lightning's own strategies."""
    ours = _on_ranks(device, _losses, strategy="osdp")[0]
    for name in ("ddp", "fsdp") if device.type == "cuda" else ("ddp",):
        theirs = _on_ranks(device, _losses, strategy=name)[0]
        apart = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
        yield Finding(f"losses: {name}", apart <= 1e-4, {"apart": apart, "steps": len(ours), "last": theirs[-1]})


_RACE_STEPS = 60


def _decided(*, name: str, model: str, window: int, kind: str) -> list[float]:
    """Losses of a model under the plan that decides so, plans in turns ("race"), or DDP ("ddp")."""
    device, module = _own(kind), build(model)
    options: dict[str, Any] = {"strategy": "ddp"}
    if name == "race":
        options |= {"strategy": OSDPStrategy(race=True, batch_size="keep"), "max_steps": _RACE_STEPS}
    elif name in DECISIONS:
        plan = DECISIONS[name][1](module, NUM_RANKS, num_samples_on(device))
        options["strategy"] = OSDPStrategy(plan=plan, batch_size="keep")
    options["accumulate_grad_batches"] = window
    return _losses_of(module, kind, **options)


def decisions(device: torch.device) -> Iterator[Finding]:
    """Losses under plans of each kind of decision beside those of DDP."""
    asked = {
        name: (model, make(build(model), NUM_RANKS, num_samples_on(device)).num_micro_batches)
        for name, (model, make) in DECISIONS.items()
    }
    asked["race"] = ("mingpt", 1)
    by_ddp = {
        (model, window): _on_ranks(device, _decided, name="ddp", model=model, window=window)[0]
        for model, window in dict.fromkeys(asked.values())
    }
    for name, (model, window) in asked.items():
        ours = _on_ranks(device, _decided, name=name, model=model, window=window)[0]
        theirs = by_ddp[model, window]
        apart = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=False))
        numbers = {"apart": apart, "steps": len(ours), "last": ours[-1]}
        yield Finding(f"decisions: {name}", apart <= 1e-4 and len(ours) >= len(theirs), numbers)


def faults(device: torch.device) -> Iterator[Finding]:
    """A rank that ends in any way: all end soon, and say which."""
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder))
        for launcher, case in FAULTS:
            found = outcome(case, launcher, plan, on_gpus=device.type == "cuda")
            numbers = {"seconds": found.seconds, "exit_code": found.exit_code, "orphans": len(found.orphans)}
            is_good = found.told is not None and not found.orphans and found.exit_code not in {0, signal.SIGKILL}
            yield Finding(f"faults: {case.name}", is_good, numbers | {"told": (found.told or found.output)[-200:]})


def _profiled(kind: str) -> ModelProfile:
    device, module = _own(kind), made("gpt")
    module.to(device)
    training = TrainingStep(module.loss, batch_size=num_samples_on(device))
    return profile_model(module, batch_on(device, module), training, together=in_step)


def _ordered(*, kind: str) -> list[dict[str, Any]]:
    device, names = _own(kind), unit_names(made("gpt"))
    cluster, profile = _cluster(kind), _profiled(kind)
    modes = {
        "ZDP": dict.fromkeys(names, "ZDP"),
        "DP": dict.fromkeys(names, "DP"),
        "both": {name: ("ZDP", "DP")[index % 2] for index, name in enumerate(names)},
    }
    num_samples = num_samples_on(device)
    plans = {
        name: plan_of(made("gpt"), of, world_size=NUM_RANKS, micro_batch_size=num_samples) for name, of in modes.items()
    }
    steps = {name: Step(made("gpt"), plan, device=device) for name, plan in plans.items()}
    measured = time_in_turns(steps, num_rounds=_NUM_ROUNDS, device=device)
    return [
        {
            "plan": name,
            "predicted_s": simulate(plan, profile, cluster).time_s,
            "measured_s": in_slowest(min(measured[name]), device),
        }
        for name, plan in plans.items()
    ]


def in_slowest(seconds: float, device: torch.device) -> float:
    """Seconds of the slowest rank."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def order(device: torch.device) -> Iterator[Finding]:
    """Three plans: no two whose steps differ are predicted the other way around."""
    rows = _on_ranks(device, _ordered)[0]
    wrong = [
        f"{one['plan']}, {other['plan']}"
        for one, other in combinations(rows, 2)
        if abs(one["measured_s"] / other["measured_s"] - 1) > _NEAR
        and (one["measured_s"] - other["measured_s"]) * (one["predicted_s"] - other["predicted_s"]) < 0
    ]
    numbers = {f"{row['plan']}_{what}_ms": row[f"{what}_s"] * 1e3 for row in rows for what in ("predicted", "measured")}
    yield Finding("order of plans", not wrong or device.type == "cpu", numbers | {"wrong": wrong})


def _filled(*, kind: str) -> dict[str, Any]:
    device = _own(kind)
    cluster, profile = _cluster(kind), _profiled(kind)
    limit_bytes = cluster.memory_bytes
    assert limit_bytes is not None
    policy = BatchPolicy.scale(_MOST_SAMPLES[kind])
    plan = search(profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=policy)
    chosen = [plan]
    dist.broadcast_object_list(chosen, src=0, device=device)
    (plan,) = chosen  # rank 0's
    step = Step(made("gpt"), plan, device=device)
    for _ in range(_NUM_STEPS[kind]):
        step()
    found = {
        "samples": plan.micro_batch_size,
        "predicted_MiB": plan.peak_bytes / 2**20,
        "limit_MiB": limit_bytes / 2**20,
    }
    if kind == "cuda":
        torch.cuda.synchronize(device)
        found["real_MiB"] = torch.cuda.max_memory_allocated(device) / 2**20
    return found


def largest(device: torch.device) -> Iterator[Finding]:
    """The largest micro-batch under the default limit, for many steps."""
    for rank, found in enumerate(_on_ranks(device, _filled)):
        steps = {"steps": _NUM_STEPS[device.type]}
        yield Finding(f"largest micro-batch: rank {rank}", is_good=True, numbers=found | steps)


def _resumed(*, kind: str, folder: str) -> list[list[float]]:
    device = _own(kind)
    plan = mixed_plan(made("gpt"), NUM_RANKS, num_samples_on(device))

    def run(**options: Any) -> list[float]:
        strategy = OSDPStrategy(plan=plan, batch_size="keep", state_dict_type="sharded")
        return _losses_of(made("gpt"), kind, strategy=strategy, **options)

    whole = run(max_steps=6)
    before = run(max_steps=3, saves_to=folder)
    after = run(max_steps=6, ckpt_path=folder)
    return [whole, before + after]


def resuming(device: torch.device) -> Iterator[Finding]:
    """A run that was saved as shards and resumed against one that went through."""
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = _on_ranks(device, _resumed, folder=str(Path(folder) / "saved"))[0]
    apart = max((abs(one - other) / abs(one) for one, other in zip(whole, resumed, strict=False)), default=1.0)
    is_good = len(whole) == len(resumed) == 6 and apart <= 1e-5
    yield Finding("checkpoint and resume", is_good, {"apart": apart, "steps": len(resumed)})


ON_SHARED: Mapping[str, Check] = {"losses": losses, "decisions": decisions, "resuming": resuming}
"""Checks of what two ranks compute, which one GPU is enough for."""

ON_TWO: Mapping[str, Check] = {
    **ON_SHARED,
    "links": links,
    "faults": faults,
    "order": order,
    "largest": largest,
}
