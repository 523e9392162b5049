"""What the ranks run: each function is called on all ranks at once, and returns what can be pickled."""

import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parent))

from models import BATCH_SIZE, WideMLP, build

from lightning_osdp import (
    Cluster,
    DeviceRates,
    OSDPPrecision,
    OSDPStrategy,
    PlanMethod,
    SearchSpace,
    make_plan,
    profile_model,
)
from lightning_osdp.apply import local
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Link
from lightning_osdp.errors import UntraceableError
from lightning_osdp.simulation import simulate
from lightning_osdp.strategy.planning import plan_fit

EVERYTHING = SearchSpace(min_unit_bytes=0, share_units=False)


def stated_cluster(world_size):
    """Ranks whose links and memory are as stated here."""
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    return Cluster(world_size=world_size, all_gather=link, reduce_scatter=link, memory_bytes=2**34)


def _stated(*_, **__):
    return stated_cluster(dist.get_world_size())


STATED_RATES = DeviceRates(flops_per_s={"float32": 1e10, "float64": 1e10}, bytes_per_s=1e10)


without_measuring = mock.patch.object(plan_fit, "measure_cluster", new=_stated)
"""For cases that plan but are not about links: measuring takes longer than all the rest, on four ranks seconds."""


_profiles = {}


def profile_of(module):
    """Of one of this folder's models, profiled once and by rank 0: its class, optimizer and dtype say all of it.

    Times are stated, so that plans are the same on every machine and however busy it is.
    """
    key = type(module), module.optimizer_name, next(module.parameters()).dtype
    if key not in _profiles:
        found = [_profiled(module) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        _profiles[key] = found[0]
    return _profiles[key]


def _profiled(module):
    batch = next(iter(module.loader(0, 1)))
    try:
        profile = profile_model(module, batch, rates=STATED_RATES)
    except UntraceableError:  # it reads values, so it is timed
        profile = profile_model(module, batch)
    return dataclasses.replace(profile, optimizer=dataclasses.replace(profile.optimizer, s_per_element=1e-9))


def plan_for(module, modes, *, world_size, micro_batch_size=BATCH_SIZE, num_micro_batches=1, space=EVERYTHING):
    """A plan of this module with "zdp", "dp" or "mixed" modes: every other unit DP."""
    plan = make_plan(
        profile_of(module),
        stated_cluster(world_size),
        memory_limit_bytes=2**40,
        micro_batch_size=BatchPolicy.fixed(micro_batch_size, num_micro_batches),
        method=PlanMethod(search="greedy"),
        search_space=space,
    )
    chosen = {"zdp": ["ZDP"], "dp": ["DP"], "mixed": ["DP", "ZDP"]}[modes]
    units = [
        unit if unit.name == "" else dataclasses.replace(unit, modes=(chosen[index % len(chosen)],))
        for index, unit in enumerate(plan.units)
    ]
    return dataclasses.replace(plan, units=tuple(units))


def trainer(strategy, **options):
    """A quiet Trainer on this pool's ranks."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"enable_checkpointing": False, "max_steps": 5, "use_distributed_sampler": False, "limit_val_batches": 0}
    if dist.get_rank() == 0:
        options.setdefault("default_root_dir", tempfile.mkdtemp())
    return L.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), **{**quiet, **defaults, **options}
    )


def trained(strategy, name, optimizer, dtype, **options):
    """Whole state dict (rank 0) and this rank's losses after training."""
    plugins = [OSDPPrecision("64-true")] if dtype == "float64" and isinstance(strategy, OSDPStrategy) else None
    if dtype == "float64" and plugins is None:
        options["precision"] = "64-true"
    module = build(name, optimizer, dtype)
    fit = trainer(strategy, plugins=plugins, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    state = fit.strategy.lightning_module_state_dict()
    return {key: value.detach().cpu().clone() for key, value in state.items()}, module.losses, fit


def reference(name, optimizer, dtype, *, world_size, steps=5, num_micro_batches=1, clip=None):
    """The same training in one process with plain torch at the same global batch."""
    module = build(name, optimizer, dtype)
    loaders = [iter(module.loader(rank, world_size)) for rank in range(world_size)]
    configured = module.configure_optimizers()
    for _ in range(steps):
        configured.zero_grad()
        for _ in range(num_micro_batches):
            for loader in loaders:
                (module.loss(next(loader)) / world_size / num_micro_batches).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        configured.step()
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def largest_difference(found, expected):
    """Largest absolute difference over all entries; the names must be equal, in order."""
    assert list(found) == list(expected), (list(found), list(expected))
    return max(float((found[key] - expected[key]).abs().max()) for key in expected)


def equivalence(name, optimizer, dtype, modes, num_micro_batches=1, clip=None, shares=False):
    """Differences of weights after five steps from DDP's and from one process's, for each of these modes (rank 0)."""
    world_size, found = dist.get_world_size(), {}
    space = dataclasses.replace(EVERYTHING, share_units=shares)
    options = {"accumulate_grad_batches": num_micro_batches, "gradient_clip_val": clip}
    ddp, _, _ = trained(DDPStrategy(process_group_backend="gloo"), name, optimizer, dtype, **options)
    start = build(name, optimizer, dtype)
    if dist.get_rank() == 0:
        plain = reference(name, optimizer, dtype, world_size=world_size, num_micro_batches=num_micro_batches, clip=clip)
        moved = largest_difference(plain, {key: start.state_dict()[key] for key in plain})
    for each in modes:
        plan = plan_for(start, each, world_size=world_size, num_micro_batches=num_micro_batches, space=space)
        osdp, _, fit = trained(OSDPStrategy(plan=plan), name, optimizer, dtype, **options)
        if dist.get_rank() == 0:
            found[each] = {
                "ddp": largest_difference(osdp, ddp),
                "plain": largest_difference(osdp, plain),
                "moved": moved,
                "modes": sorted({unit.modes[0] for unit in fit.strategy.plan.units if unit.name}),
                "units": [unit.name for unit in fit.strategy.plan.units],
            }
    return found


def predicted_and_counted_peak(name, optimizer, modes, num_micro_batches=1, prefetch="pre"):
    """Bytes that the simulator says a plan takes, and the peak that training steps were counted to take."""
    module, world_size = build(name, optimizer), dist.get_world_size()
    space = SearchSpace(min_unit_bytes=1024, share_units=False)
    plan = plan_for(module, modes, world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    plan = dataclasses.replace(plan, backward_prefetch=prefetch)
    predicted = simulate(plan, profile_of(module), stated_cluster(world_size)).peak
    strategy = OSDPStrategy(plan=plan)
    fit = trainer(strategy, accumulate_grad_batches=num_micro_batches)
    module = build(name, optimizer)
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return predicted.peak_bytes, check.measured.peak_bytes, predicted.phase


@without_measuring
def trains_in(precision):
    """Losses and peak of a plan made and run in this precision, and DDP's losses in bf16-mixed or full."""
    space = SearchSpace(min_unit_bytes=1024, share_units=False)
    strategy = OSDPStrategy(search_space=space)
    module = build("wide_mlp", "sgd")
    before = {name: p.dtype for name, p in module.named_parameters()}
    fit = trainer(strategy, precision=precision, max_steps=8)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    reference_module = build("wide_mlp", "sgd")
    ddp = trainer(DDPStrategy(process_group_backend="gloo"), max_steps=8)
    ddp.fit(reference_module, reference_module.loader(dist.get_rank(), dist.get_world_size()))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return {
        "losses": module.losses,
        "ddp": reference_module.losses,
        "predicted": strategy.plan.peak_bytes,
        "counted": check.measured.peak_bytes,
        "gathered_bytes": sum(unit.parameter_bytes for unit in strategy.plan.units),
        "dtypes": (sorted({str(d) for d in before.values()}), sorted({str(p.dtype) for p in module.parameters()})),
    }


class Overflows(WideMLP):
    """Has a gradient that is not finite on one rank alone, in its second step."""

    num_backwards = 0

    def on_after_backward(self):
        self.num_backwards += 1
        if self.num_backwards == 2 and dist.get_rank() == 1:
            rows = next(local(p.grad) for p in self.parameters() if local(p.grad).numel())
            rows.view(-1)[0] = float("inf")


class Steps(L.Callback):
    """The scale of the loss after each step, and whether the step has changed this rank's rows."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rows = [local(p).clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = [local(p) for p in pl_module.parameters()]
        moved = not all(torch.equal(a, b) for a, b in zip(self.rows, now, strict=True))
        pl_module.steps.append((moved, trainer.precision_plugin.scaler.get_scale()))


def overflows(clip=None, in_nodes=False):
    """Of each step in float16: whether it has changed weights, and the scale after it."""
    module = Overflows("sgd")
    module.steps = []
    plan = plan_for(module, "mixed", world_size=dist.get_world_size())
    if in_nodes:
        turns = zip(plan.units, itertools.cycle(["HDP", "ZDP", "HSDP"]), strict=False)
        units = tuple(dataclasses.replace(unit, modes=(mode,)) for unit, mode in turns)
        plan = dataclasses.replace(plan, units=units, node_size=2)
    strategy = OSDPStrategy(plan=plan, node_size=plan.node_size)
    fit = trainer(strategy, precision="16-mixed", max_steps=4, gradient_clip_val=clip, callbacks=[Steps()])
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return module.steps
