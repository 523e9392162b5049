"""Tensors alive in a fit beside what its plan predicts: none that setup left, and those that users keep."""

import dataclasses
import gc
import time

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from lightning_osdp.callbacks.peak import COUNTED_STEPS, WARM_UP_STEPS, unplanned_tensors
from lightning_osdp.errors import OSDPError
from lightning_osdp.report.tables import render
from tests.distributed.support.fits import plan_for, trainer
from tests.distributed.support.models import WideMLP
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


KEPT_BYTES = 2**20
PATIENCE = 50
"""Looks, a tenth of a second apart."""


class Quiet(WideMLP):
    """Keeps nothing and logs nothing."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def batches(self):
        """A loader of batches that are alive already."""
        return DataLoader(list(self.loader(dist.get_rank(), dist.get_world_size())), batch_size=None)


class Looks(L.Callback):
    """Search for tensors beside the plan's after setup, once gloo's threads have let go of the last collective."""

    reads_parameters = False

    def __init__(self):
        self.found = None

    def on_train_start(self, trainer, pl_module):
        for _ in range(PATIENCE):
            self.found = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in unplanned_tensors(trainer)]
            if not self.found:
                break
            time.sleep(0.1)


class Keeps(L.Callback):
    """Keeps a tensor through training."""

    reads_parameters = False

    def on_fit_start(self, trainer, pl_module):
        self.kept = torch.zeros(KEPT_BYTES // 4)


class Hoards(L.Callback):
    """Keeps what the first layer returns in every step."""

    reads_parameters = False

    def __init__(self):
        self.outs = []

    def on_train_start(self, trainer, pl_module):
        pl_module.layers[0].register_forward_hook(lambda _, __, out: self.outs.append(out.detach()))


def planned(modes="mixed", **options):
    plan = plan_for(WideMLP("adamw"), modes, world_size=dist.get_world_size())
    return dataclasses.replace(plan, **options)


def fitted(plan, *callbacks, max_steps=WARM_UP_STEPS + COUNTED_STEPS, dry_run=False):
    module = Quiet("adamw")
    fit = trainer(OSDPStrategy(plan=plan, dry_run=dry_run), max_steps=max_steps, callbacks=list(callbacks))
    loader = module.batches() if plan else module.loader(dist.get_rank(), dist.get_world_size())
    fit.fit(module, loader)
    return fit


def left_behind(*, plans, dry_run, averages):
    """Returns shapes of what is alive beside the plan's after setup, where no garbage is collected meanwhile."""
    looks, plan = Looks(), None if plans else planned()
    averaging = [EMAWeightAveraging()] if averages else []
    gc.collect()
    gc.disable()
    try:
        fitted(plan, looks, *averaging, max_steps=1, dry_run=dry_run)
    finally:
        gc.enable()
    return looks.found


def kept(name):
    """Peak, other bytes and table of a fit in which nothing is kept and of one in which something is; bytes kept."""
    callback, plan = {"tensor": Keeps, "outputs": Hoards}[name](), planned()
    found = []
    for callbacks in ([], [callback]):
        monitor = fitted(plan, *callbacks).callbacks[0]
        found.append((monitor.measured.peak_bytes, monitor.measured.other_bytes, render(monitor.comparison())))
    return found, [out.untyped_storage().nbytes() for out in getattr(callback, "outs", [])]


def dry_runs():
    """Notes, or the error, of dry runs under a limit that the plan's own tensors fit, and with a kept one do not."""
    plan = planned("zdp")
    counted_bytes = fitted(plan).callbacks[0].measured.peak_bytes
    plan = dataclasses.replace(plan, memory_limit_bytes=counted_bytes + KEPT_BYTES // 2)
    return [_dry_run_of(plan, *callbacks) for callbacks in ([], [Keeps()])]


def _dry_run_of(plan, *callbacks):
    try:
        fit = fitted(plan, *callbacks, max_steps=1, dry_run=True)
    except OSDPError as error:
        return str(error)
    return fit.strategy.plan.notes


LOGGED_BYTES = 256
"""A number or two for each value that Lightning logs, whose times differ."""


@pytest.mark.parametrize(
    "options",
    [
        slow({"plans": True, "dry_run": False, "averages": False}),
        {"plans": False, "dry_run": True, "averages": False},
        {"plans": False, "dry_run": False, "averages": True},
    ],
    ids=["planned", "dry run", "averaged"],
)
def test_setup_leaves_nothing_beside_what_the_plan_predicts(ranks, options):
    assert ranks(2).run(left_behind, **options) == [[], []]


def test_a_tensor_that_a_callback_keeps_is_told_beside_the_peak(ranks):
    for ((peak, before, quiet), (same, other, table)), _ in ranks(2).run(kept, name="tensor"):
        assert other - before == pytest.approx(KEPT_BYTES, abs=LOGGED_BYTES)
        assert same == peak
        assert "other tensors" not in quiet
        assert " ".join(table.splitlines()[-1].split()) == "other tensors of yours not in the plan 1.00 MiB -"


def test_outputs_that_are_kept_in_a_list_are_counted(ranks):
    for ((_, before, _), (_, other, _)), outs in ranks(2).run(kept, name="outputs"):
        assert len(set(outs)) == 1
        # when the last counted step begins, those of all before it are alive
        assert other - before == pytest.approx((len(outs) - 1) * outs[0], abs=LOGGED_BYTES)


def test_what_users_keep_counts_against_the_limit_of_a_dry_run(ranks):
    for fits, error in ranks(2).run(dry_runs):
        assert fits == ()
        assert "ran out of memory" in error
