"""Precisions: planned, trained, and close to full precision."""

import dataclasses
import itertools

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.apply import local
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from tests.distributed.support.fits import plan_for, trainer, without_measuring
from tests.distributed.support.models import WideMLP, build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


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
    """Returns, for each step in float16, if it has changed weights, and the scale after it."""
    module = Overflows("sgd")
    module.steps = []
    plan = plan_for(module, "mixed", world_size=dist.get_world_size())
    if in_nodes:
        turns = zip(plan.units, itertools.cycle(["HDP", "ZDP", "HSDP"]), strict=False)
        units = tuple(unit.in_modes(mode) for unit, mode in turns)
        plan = dataclasses.replace(plan, units=units, node_size=2)
    strategy = OSDPStrategy(plan=plan, node_size=plan.node_size)
    fit = trainer(strategy, precision="16-mixed", max_steps=4, gradient_clip_val=clip, callbacks=[Steps()])
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return module.steps


NUM_ELEMENTS = sum(p.numel() for p in WideMLP().parameters())


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize(
    ("precision", "bytes_per_element", "kept"),
    [
        slow("32-true", 4, "float32"),
        ("bf16-mixed", 2, "float32"),
        slow("bf16-true", 2, "bfloat16"),
        slow("16-mixed", 2, "float32"),
    ],
)
def test_training_is_planned_and_close_to_full_precision(ranks, precision, bytes_per_element, kept, world_size):
    found = ranks(world_size).run(trains_in, precision=precision)[0]
    assert found["gathered_bytes"] == bytes_per_element * NUM_ELEMENTS
    assert found["dtypes"][1] == [f"torch.{kept}"]
    assert found["losses"] == pytest.approx(found["ddp"], rel=1e-6 if precision == "32-true" else 5e-2)
    assert found["losses"] != [found["losses"][0]] * 8
    assert found["predicted"] == pytest.approx(found["counted"], rel=2e-3)


@pytest.mark.parametrize(("world_size", "in_nodes"), [slow(2, False), (4, True)])
@pytest.mark.parametrize("clip", [slow(None), 0.5])
def test_all_ranks_leave_out_a_step_in_float16_whose_gradients_overflow_on_one(ranks, clip, world_size, in_nodes):
    for steps in ranks(world_size).run(overflows, clip=clip, in_nodes=in_nodes):
        assert steps == [(True, 65536.0), (False, 32768.0), (True, 32768.0), (True, 32768.0)]
