"""Checks of one device; most of them run on CPU, too, where they check themselves."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Optimizer

from benchmarks.families import Batch, Family, build
from benchmarks.measures.gpu.finding import Check, Finding, Peak, peak_of
from benchmarks.measures.gpu.models import NAMES, NUM_TIMED, batch_on, made, num_samples_on, unit_names
from benchmarks.measures.gpu.plans import ON_DEVICE, as_profiled, mixed_plan
from benchmarks.measures.gpu.rates import rates
from benchmarks.rank_faults import Case, make_plan, outcome
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.step import Step
from benchmarks.testbed.training import quiet
from lightning_osdp import Cluster, OSDPStrategy, profile_model, simulate
from lightning_osdp.apply import local
from lightning_osdp.apply.activations.blocks import BlockForwards
from lightning_osdp.core.axes import LEVELS, Treatment
from lightning_osdp.core.cluster import CUDA_HEADROOM, Link
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.planner.engine import effects_of
from lightning_osdp.profiler import LiveBytes, TrainingStep, is_out_of_memory
from lightning_osdp.profiler.machine.stopwatch import between_s, fastest_s, mark, synchronize
from lightning_osdp.profiler.optimizer import profile_optimizers
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.step.run_step import StepRunner
from lightning_osdp.profiler.step.snapshot import tensors_in, untouched
from lightning_osdp.profiler.timing.operation_time import estimate_step, replayed_s
from lightning_osdp.profiler.timing.step_time import time_step
from lightning_osdp.profiler.tracing.trace import trace_step

_FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
_MIB = 2**20
GROUPS = (1, 8, 64)
SYNC_STEPS = 20
_OPTIMIZERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "loop": partial(AdamW, lr=1e-3, foreach=False),
    "foreach": partial(AdamW, lr=1e-3, foreach=True),
    "fused": partial(AdamW, lr=1e-3, fused=True),
}
_KINDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_HALF_ONLY = ("flash", "cudnn")
"""Kinds of attention that CUDA has in half precision alone."""
_NUM_LOSSES = 5


def environment(device: torch.device) -> Iterator[Finding]:
    """Checks the device and its libraries, and that it computes at all."""
    numbers: dict[str, Any] = {"torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        numbers |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_devices": torch.cuda.device_count(),
            "total_GiB": total / 2**30,
            "free_GiB": free / 2**30,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        }
    ones = torch.ones(64, 64, device=device)
    yield Finding("environment", is_good=bool((ones @ ones == 64).all()), numbers=numbers)


def stopwatch(device: torch.device) -> Iterator[Finding]:
    """Events against the wall clock where the device is busy, and where launching is what takes time."""
    width, number = (4096, 100) if device.type == "cuda" else (256, 200)
    matrix, small = torch.randn(width, width, device=device), torch.ones(16, device=device)

    def busy() -> None:
        for _ in range(number):
            matrix @ matrix

    busy()
    synchronize(device)
    before, start = time.perf_counter(), mark(device)
    busy()
    end = mark(device)
    synchronize(device)
    wall_s = time.perf_counter() - before
    ratio = between_s(start, end) / wall_s
    yield Finding("stopwatch: busy", is_good=abs(ratio - 1) < 0.05, numbers={"wall_s": wall_s, "ratio": ratio})

    def launches() -> None:
        for _ in range(100):
            small.add_(1)

    launches()
    synchronize(device)
    before = time.perf_counter()
    launches()
    synchronize(device)
    wall_s = time.perf_counter() - before
    device_s = fastest_s(launches, device, repeats=5)
    numbers = {"wall_us": wall_s * 1e4, "device_us": device_s * 1e4}
    # on CPU both are the same clock
    yield Finding("stopwatch: launches", is_good=0 < device_s < wall_s * 1.1 or device.type == "cpu", numbers=numbers)


def peaks(device: torch.device) -> Iterator[Finding]:
    """Compares the memory of a step on fake tensors and on real ones."""
    precisions: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "float32": nullcontext,
        "bf16": partial(torch.autocast, device.type, dtype=torch.bfloat16),
    }
    for name in NAMES:
        kinds = (_KINDS if device.type == "cuda" else ("math", "flash")) if name == "gpt" else ("",)
        for precision, context in precisions.items():
            for kind in kinds:
                if device.type == "cuda" and kind in _HALF_ONLY and precision == "float32":
                    continue
                chosen = partial(sdpa_kernel, _KINDS[kind]) if kind else nullcontext
                fake, real = _fake_and_real(made(name).to(device), device, context, chosen)
                numbers = {"fake_MiB": fake / _MIB, "real_MiB": real / _MIB, "ratio": fake / real}
                # what is more than predicted must be within what a limit leaves alone
                is_good = real <= fake * (1 + CUDA_HEADROOM) and fake <= real * 1.02 + _MIB
                yield Finding(f"peaks: {' '.join(filter(None, (name, kind, precision)))}", is_good, numbers)


def _fake_and_real(
    module: Family,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
    kind: Callable[[], AbstractContextManager[Any]],
) -> tuple[int, int]:
    """Peaks beside parameters and batch."""
    batch = batch_on(device, module)
    for parameter in module.parameters():  # no recurrent layer has its weights in one buffer, as when all-gathered
        parameter.data = parameter.data.clone()

    def step(batch: Batch) -> None:
        with kind():
            with precision():
                loss = module.loss(batch)
            loss.backward()

    with faked(module, batch, device) as fake_batch, LiveBytes(device.type) as live:
        static = live.track([*module.parameters(), *module.buffers(), *tensors_in(fake_batch)])
        step(fake_batch)
        fake = live.peak_bytes - static
    with untouched(module):
        step(batch)  # libraries' own buffers come with their first call
        module.zero_grad()
        with peak_of(device, *module.parameters(), *module.buffers(), *batch) as real:
            step(batch)
    return fake, real.num_bytes


def replays(device: torch.device) -> Iterator[Finding]:
    """A step's operations one by one against the step."""
    for name in NAMES:
        module = made(name).to(device)
        num_samples = NUM_TIMED[device.type]
        batch = batch_on(device, module, num_samples)
        runner = StepRunner(module, batch, num_samples, module.loss, device)
        trace = trace_step(runner)
        with runner.on_real_tensors(num_samples) as (run, _):
            whole = time_step(module, trace.calls, device, run)
        assert whole is not None, "a step that fits"
        sums = estimate_step(runner, trace.short, num_samples, cache(partial(replayed_s, device=device)))
        ratio = sums.total_s / whole.total_s
        numbers = {"step_ms": whole.total_s * 1e3, "replayed_ms": sums.total_s * 1e3, "ratio": ratio}
        yield Finding(f"replays: {name}", 0.7 <= ratio <= 1.3 or device.type == "cpu", numbers)


def optimizers(device: torch.device) -> Iterator[Finding]:
    """Compares what is predicted of an optimizer's step with its step on the whole model."""
    for name, make in _OPTIMIZERS.items():
        module = made("gpt").to(device)
        profile, _ = profile_optimizers(module, lambda m, make=make: [make(m.parameters())], device)  # type: ignore[misc]
        parameters = list(module.parameters())
        predicted_s = profile.fixed_s + profile.s_per_element * sum(p.numel() for p in parameters)
        largest = max(p.nbytes for p in parameters)
        predicted = max((largest * (x + y) for x, y in profile.temporaries), default=0.0)
        predicted += profile.foreach_temporaries * sum(p.nbytes for p in parameters)
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        with peak_of(device, *parameters, *gradients, *tensors_in(list(optimizer.state.values()))) as real:
            optimizer.step()
        measured_s = fastest_s(optimizer.step, device, repeats=5)
        numbers = {
            "predicted_ms": predicted_s * 1e3,
            "measured_ms": measured_s * 1e3,
            "fixed_ms": profile.fixed_s * 1e3,
            "predicted_MiB": predicted / _MIB,
            "measured_MiB": real.num_bytes / _MIB,
        }
        is_timed = 0.7 <= predicted_s / measured_s <= 1.4 or device.type == "cpu"
        yield Finding(f"optimizer: {name}", is_timed and real.num_bytes <= predicted * 1.05 + _MIB, numbers)


def offload(device: torch.device) -> Iterator[Finding]:
    """Blocks that recompute, all or all but some results, or offload: gradients of blocks that keep, fewer bytes."""
    found: dict[str, tuple[list[Tensor], int, int]] = {}
    for choice in ("keep", "offload", "recompute", "recompute_offload", LEVELS[0]):
        module = made("gpt").to(device)
        batch, forwards = batch_on(device, module), BlockForwards(module, device)
        kept_results = (0, 1) if choice in LEVELS else ()  # of the first two heavy operations
        chosen = [Block(name=name, treatment=Treatment(saves=choice), kept=kept_results) for name in unit_names(module)]
        forwards.choose(chosen if choice != "keep" else [], units=())
        module.loss(batch).backward()
        module.zero_grad()
        with peak_of(device, *module.parameters(), *module.buffers(), *batch) as peak:  # the end of forward has it
            loss = module.loss(batch)
        loss.backward()
        gradients = [p.grad.cpu() for p in module.parameters() if p.grad is not None]
        assert not forwards.refused, "blocks whose operations return the same again"
        found[choice] = gradients, peak.num_bytes, forwards.memory.peak_bytes
    kept, kept_bytes, _ = found.pop("keep")
    for choice, (gradients, num_bytes, host_bytes) in found.items():
        apart = max(float((one - other).abs().max()) for one, other in zip(kept, gradients, strict=True))
        scale = max(float(gradient.abs().max()) for gradient in kept)
        numbers = {
            "gradients_apart": apart / scale,
            "forward_MiB": num_bytes / _MIB,
            "kept_MiB": kept_bytes / _MIB,
            "host_MiB": host_bytes / _MIB,
        }
        is_there = host_bytes > 0 or "offload" not in choice
        yield Finding(f"blocks: {choice}", apart <= 1e-5 * scale and num_bytes < kept_bytes and is_there, numbers)


def host_updates(device: torch.device) -> Iterator[Finding]:
    """Steps with states, and shards, on the host, updated there beside backward or after, against none there."""
    found: dict[tuple[str, str, bool], _Taken] = {}
    on_host = [("host", shard, is_ahead) for shard in ("device", "host") for is_ahead in (False, True)]
    for place, shard_place, is_ahead in (("device", "device", False), *on_host):
        plan = mixed_plan(made("gpt"), 1, num_samples_on(device))
        plan = replace(plan, units=tuple(unit.treated(states=place, shard=shard_place) for unit in plan.units))
        with fake_group(1), peak_of(device) as peak:
            step = Step(made("gpt"), plan, device=device)
            peak.leave_out(tensors_in([*step.sharded.host.tensors(())]))
            step.sharded.begin_fit(updates_ahead=is_ahead)
            step_s = _third_s(step, peak, device)
            weights = [local(shard).detach().cpu() for shard in step.sharded.shards]
        found[place, shard_place, is_ahead] = weights, peak.num_bytes, step_s
    on_device = found["device", "device", False]
    states_bytes = 2 * sum(weight.nbytes for weight in on_device[0])
    for place, shard_place, is_ahead in on_host:
        what = "states" if shard_place == "device" else "states and shards"
        what += f" on the host{', updated beside backward' if is_ahead else ''}"
        yield _on_host(what, found[place, shard_place, is_ahead], on_device, states_bytes, share=0.95)


def host_shards(device: torch.device) -> Iterator[Finding]:
    """Steps with shards of frozen units on the host, copied for each all-gather, against none there."""
    name, plan_for = ON_DEVICE["resident"]
    found, frozen_bytes = {}, 0
    for place in ("device", "host"):
        plan = plan_for(build(name), 1, num_samples_on(device))
        frozen = {unit.name for unit in plan.units if effects_of(unit.treatments[0]).is_resident}
        units = (unit.treated(keep="nothing", shard=place) if unit.name in frozen else unit for unit in plan.units)
        with fake_group(1), peak_of(device) as peak:
            step = Step(build(name), replace(plan, units=tuple(units)), device=device)
            peak.leave_out(tensors_in([*step.sharded.host.tensors(())]))
            step_s = _third_s(step, peak, device)
            weights = [local(shard).detach().cpu() for shard in step.sharded.shards]
            frozen_bytes = sum(local(shard).nbytes for shard in step.sharded.shards if not shard.requires_grad)
        found[place] = weights, peak.num_bytes, step_s
    yield _on_host("shards on the host", found["host"], found["device"], frozen_bytes, share=0.8)


_Taken: TypeAlias = tuple[list[Tensor], int, float]
"""Weights after steps, the peak of one in bytes, and its seconds."""


def _on_host(what: str, ours: _Taken, on_device: _Taken, there_bytes: int, *, share: float) -> Finding:
    """Steps with so many bytes on the host: the weights of steps without, and a share of these bytes freed."""
    (weights, own_bytes, own_s), (others, device_bytes, device_s) = ours, on_device
    apart = max(float((one - other).abs().max()) for one, other in zip(weights, others, strict=True))
    numbers = {
        "weights_apart": apart,
        "peak_MiB": own_bytes / _MIB,
        "device_MiB": device_bytes / _MIB,
        f"{what.split(maxsplit=1)[0]}_MiB": there_bytes / _MIB,
        "more_ms": (own_s - device_s) * 1e3,
    }
    return Finding(what, apart <= 1e-5 and device_bytes - own_bytes >= share * there_bytes, numbers)


def _third_s(step: Step, peak: Peak, device: torch.device) -> float:
    """Seconds of the third step, which alone the peak is of."""
    for _ in range(2):
        step()
    peak.restart()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


_Made: TypeAlias = Callable[[], Family]


def _planned(made_anew: _Made, plan: Plan, device: torch.device) -> tuple[Plan, int]:
    """The plan with the levels that blocks have on this device, and the predicted peak of one rank over its step."""
    module = made_anew().to(device)
    training = TrainingStep(module.loss, batch_size=plan.micro_batch_size)
    profile = profile_model(module, batch_on(device, module), training, exchanges=any(u.exchange for u in plan.units))
    cluster = Cluster(
        world_size=plan.world_size, all_gather=_FREE, reduce_scatter=_FREE, overlaps=True, reduce_scatter_copies=False
    )
    plan = as_profiled(plan, profile)
    return plan, simulate(plan, profile, cluster).peak.peak_bytes


def _on_one_of(world_size: int, device: torch.device) -> Iterator[tuple[str, _Made, Plan]]:
    """Names of further decisions, models that are made anew, and plans that decide so, for one rank of so many."""
    for name, (model, make) in ON_DEVICE.items():
        made_anew = partial(build, model)
        yield name, made_anew, make(made_anew(), world_size, num_samples_on(device))


def fake_groups(device: torch.device) -> Iterator[Finding]:
    """Predicted peaks of one rank of N against its peak beside ranks that do not exist."""
    cases: list[tuple[str, _Made, Plan]] = [
        (f"{name}, {world_size} ranks", partial(made, name), mixed_plan(made(name), world_size, num_samples_on(device)))
        for name, world_size in product(("gpt", "cnn"), GROUPS)
    ]
    for name, made_anew, written in (*cases, *_on_one_of(8, device)):
        plan, predicted = _planned(made_anew, written, device)
        with fake_group(plan.world_size), peak_of(device) as real:
            step = Step(made_anew(), plan, device=device)
            for _ in range(2):
                step()
            real.restart()  # what comes before training is no part of a step
            step()
            synchronize(device)
            del step
        ratio = predicted / real.num_bytes
        numbers = {"predicted_MiB": predicted / _MIB, "real_MiB": real.num_bytes / _MIB, "ratio": ratio}
        yield Finding(f"fake group: {name}", 1 / (1 + CUDA_HEADROOM) <= ratio <= 1.1, numbers)


def sync_debug(device: torch.device) -> Iterator[Finding]:
    """Steps in which the host never waits for the device."""
    make: _Made = partial(made, "gpt")
    mixed = "units kept by turns", make, mixed_plan(make(), 8, num_samples_on(device))
    for name, made_anew, plan in (mixed, *_on_one_of(8, device)):
        with fake_group(8):
            step = Step(made_anew(), plan, device=device)
            for _ in range(3):
                step()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(SYNC_STEPS):
                    step()
            except RuntimeError as error:  # the other plans' steps are still to be seen
                told = {"error": f"{error}"[:400]}
            else:
                told = {}
            finally:
                torch.cuda.set_sync_debug_mode("default")
        yield Finding(f"sync debug mode: {name}", is_good=not told, numbers={"steps": SYNC_STEPS} | told)


def memory_fraction(device: torch.device) -> Iterator[Finding]:
    """A step lives where the allocator has what was predicted and the headroom, and what is too much is told."""
    plan = mixed_plan(made("gpt"), 8, num_samples_on(device))
    plan, predicted = _planned(partial(made, "gpt"), plan, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.memory_reserved(device) + predicted / (1 - CUDA_HEADROOM)
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
        with fake_group(8):
            step = Step(made("gpt"), plan, device=device)
            for _ in range(3):
                step()
            synchronize(device)
        reserved = torch.cuda.max_memory_reserved(device)
        numbers: dict[str, Any] = {
            "allowed_MiB": allowed / _MIB,
            "predicted_MiB": predicted / _MIB,
            "reserved_MiB": reserved / _MIB,
        }
        yield Finding("memory fraction: a plan's own", is_good=True, numbers=numbers)
        try:
            torch.empty(int(2 * allowed), dtype=torch.uint8, device=device)
        except Exception as error:  # which one is the question
            numbers = {"error": f"{type(error).__name__}: {error}"[:200]}
            yield Finding("memory fraction: too much", is_good=is_out_of_memory(error), numbers=numbers)
        else:
            yield Finding("memory fraction: too much", is_good=False, numbers={"error": "none"})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def precisions(device: torch.device) -> Iterator[Finding]:
    """Losses of one rank under OSDP against those of a plain Trainer, with clipping."""
    bounds = {"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 2e-2}
    if device.type == "cuda":
        bounds["16-mixed"] = 2e-2
    for precision, bound in bounds.items():
        planned = made("gpt").to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
        plan = mixed_plan(planned, 1, num_samples_on(device))
        ours, theirs = (
            losses_of(made("gpt"), device, strategy=strategy, precision=precision, gradient_clip_val=0.5)
            for strategy in (OSDPStrategy(plan=plan, batch_size="keep"), "auto")
        )
        apart = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
        numbers = {"apart": apart, "bound": bound, "first": theirs[0], "last": theirs[-1]}
        yield Finding(f"precision: {precision}, clipped", apart <= bound and len(ours) == _NUM_LOSSES, numbers)


def losses_of(
    module: Family, device: torch.device, *, ckpt_path: str | None = None, saves_to: str | None = None, **options: Any
) -> list[float]:
    """Losses of a Trainer's steps on one batch, by default of one rank.

    Args:
        module: trained in place.
        device: of this rank.
        ckpt_path: resumed from.
        saves_to: where a checkpoint is saved at the end.
        **options: of the Trainer.
    """
    losses: list[float] = []

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if saves_to is not None:
                trainer.save_checkpoint(saves_to)

    is_alone = not dist.is_initialized()
    # a Trainer leaves its port, which processes that are started later would take for theirs
    with tempfile.TemporaryDirectory() as folder, quiet(), patch.dict(os.environ):
        settings: dict[str, Any] = {
            "accelerator": "gpu" if device.type == "cuda" else "cpu",
            "devices": 1,
            "max_steps": _NUM_LOSSES,
            "default_root_dir": folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "callbacks": [Notes()],
        }
        trainer = pl.Trainer(**(settings | options))
        loader = module.loader(num_samples_on(device), num_batches=trainer.max_steps * trainer.accumulate_grad_batches)
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
    if is_alone and dist.is_initialized():
        dist.destroy_process_group()
    return losses


def device_assert(device: torch.device) -> Iterator[Finding]:
    """An index beyond the end of a table: the error that a user sees says so, and not that memory ran out."""
    told = "device-side assert" if device.type == "cuda" else "index out of range"
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder))
    case = Case("index", ("--fault", "index", "--rank", "0"), told, num_ranks=1)
    found = outcome(case, "popen", plan, on_gpus=device.type == "cuda")
    is_good = found.told is not None and found.exit_code != 0 and "Out of memory" not in found.output
    yield Finding("device assert", is_good, {"exit_code": found.exit_code, "told": (found.told or found.output)[-400:]})


ON_ANY_DEVICE: Mapping[str, Check] = {
    "environment": environment,
    "stopwatch": stopwatch,
    "peaks": peaks,
    "replays": replays,
    "optimizers": optimizers,
    "offload": offload,
    "host_updates": host_updates,
    "host_shards": host_shards,
    "fake_groups": fake_groups,
    "precisions": precisions,
    "device_assert": device_assert,
}
ON_CUDA: Mapping[str, Check] = {"sync_debug": sync_debug, "memory_fraction": memory_fraction, "rates": rates}
