"""Profiles of fits: the batches that they are made on, and that profiling leaves nothing of itself."""

import random

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy, ProfileError, SearchSpace
from lightning_osdp.strategy.planning import plan_request, profile_fit
from tests.strategy.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("one_rank")

A_GPU = torch.device("cpu", 0)
"""Device that stands for a GPU: not equal to the CPU that ranks here train on."""


class Net(L.LightningModule):
    """Two layers; `seen` has what a test notes while it trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path, stated_links):
    """Fits a module for two steps; links are stated."""

    def run(module, **options):
        trainer = quiet_trainer(
            OSDPStrategy(batch_size="keep", **options),
            max_steps=2,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, DataLoader(torch.ones(8, 4), batch_size=4))
        assert trainer.global_step == 2
        return module

    return run


class TooLarge(Net):
    """Does not fit on its device whole, which Lightning has told it before."""

    was_tried = False

    def setup(self, stage):
        self._device = A_GPU

    def to(self, *args, **kwargs):
        if args and not self.was_tried:  # and not of another dtype
            self.was_tried = True
            raise torch.OutOfMemoryError("no room")
        return super().to(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        self.seen.append(self.device)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:OSDP. TooLarge does not fit on one device whole")
def test_a_model_that_does_not_fit_on_its_device_keeps_to_be_told_which_that_is(fit):
    assert fit(TooLarge()).seen == [A_GPU, A_GPU]


class Augmenting(Net):
    """Net whose batches are random and counted; `calls` says what happens in setup, `begins` what fit begins with."""

    def __init__(self, calls, *, is_random=True):
        super().__init__()
        self.on_call, self.is_random = calls.append, is_random

    def to(self, *args, **kwargs):
        if args:
            self.on_call("moved")
        return super().to(*args, **kwargs)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.on_call("transferred")
        self.seen.append(len(batch))
        return batch * torch.rand(()) * random.random() if self.is_random else batch

    def on_fit_start(self):
        self.begins = list(self.seen), torch.get_rng_state().tolist(), random.getstate()


def test_hooks_of_a_batchs_transfer_find_the_model_on_its_device_and_leave_nothing(fit):
    begins = []
    for is_random in (True, False):
        calls = []
        torch.manual_seed(1)
        random.seed(1)
        begins.append(fit(Augmenting(calls, is_random=is_random)).begins)
        assert calls.index("moved") < calls.index("transferred")
    assert begins[0] == begins[1]
    assert begins[0][0] == []


class Whitening(Net):
    """Net whose batches are made with a tensor of its own, which has no values before it is sharded."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.whiten = nn.Linear(4, 4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.whiten(batch)


def test_hooks_of_a_batchs_transfer_cannot_use_a_model_that_is_not_on_its_device(fit):
    expected = r"^Expected the hooks of a batch's transfer to run without the model's tensors, .* pass plan=\.$"
    with pytest.raises(ProfileError, match=expected):
        fit(Whitening())


class Ramp(nn.Module):
    """A buffer that is computed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self):
        self.values.copy_(torch.arange(8))

    def forward(self, x):
        return x * self.values


class PartlyThere(Net):
    """Net with parts on the meta device, and a real head."""

    def __init__(self, *, layer, buffer):
        super().__init__()
        with torch.device("meta" if layer else "cpu"):
            self.first = nn.Linear(4, 8)
        with torch.device("meta" if buffer else "cpu"):
            self.ramp = Ramp()

    def training_step(self, batch, batch_idx):
        return self.second(self.ramp(self.first(batch))).square().mean()


@pytest.mark.parametrize("there", [{"layer": True, "buffer": False}, {"layer": False, "buffer": True}], ids=str)
def test_a_model_that_is_partly_on_the_meta_device_is_profiled_without_any_values(fit, monkeypatch, there):
    found, profile_model = set(), profile_fit.profile_model

    def noted(module, *args, **options):
        found.update(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        return profile_model(module, *args, **options)

    monkeypatch.setattr(profile_fit, "profile_model", noted)
    module = PartlyThere(**there)
    before = module.second.weight.detach().clone()
    fit(module)
    assert found == {True}
    assert module.ramp.values.tolist() == list(range(8))
    assert not torch.equal(module.second.weight.to_local(), before)


def test_exchanges_are_profiled_where_the_search_space_names_them(fit, monkeypatch):
    asked, profile_model = [], profile_fit.profile_model

    def noted(*args, **options):
        asked.append(options["exchanges"])
        return profile_model(*args, **options)

    monkeypatch.setattr(profile_fit, "profile_model", noted)
    fit(Net())
    fit(Net(), search_space=SearchSpace(modes=("ZDP", "stationary")))
    assert asked == [False, True]


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ByRows(Net):
    """Its optimizer knows shards in rows."""

    def configure_optimizers(self):
        return type("Own", (torch.optim.SGD,), {})(self.parameters(), lr=0.1)


@pytest.fixture
def may_move(monkeypatch):
    """For each plan, whether any operators may move activations."""
    found, make_plan = [], plan_request.make_plan

    def noted(profile, *args, **options):
        found.append(bool(profile.exchanges))
        return make_plan(profile, *args, **options)

    monkeypatch.setattr(plan_request, "make_plan", noted)
    return found


@pytest.mark.parametrize(("make", "may"), [(Net, True), (ByHand, False), (ByRows, False)])
def test_operators_may_move_activations_unasked_in_automatic_optimization_by_elements(fit, may_move, make, may):
    fit(make())
    fit(make(), search_space=SearchSpace(modes=("ZDP", "stationary")))
    assert may_move == [may, True]


def test_operators_that_some_rank_does_not_run_move_no_activations(fit, may_move, monkeypatch):
    in_step = profile_fit.in_step

    def beside_another(work, *, stage):
        found = in_step(work, stage=stage)
        return [*found, set()] if stage == "comparing operators" else found

    monkeypatch.setattr(profile_fit, "in_step", beside_another)
    fit(Net(), search_space=SearchSpace(modes=("ZDP", "stationary")))
    assert may_move == [False]


def test_metrics_of_a_model_that_is_not_on_its_device_are_there_while_it_is_profiled(fit, monkeypatch):
    moved, profile_model = [], profile_fit.profile_model

    class Noted(torchmetrics.SumMetric):
        def to(self, *args, **kwargs):
            moved.append(args)
            return super().to(*args, **kwargs)

    def noted(*args, **options):
        assert moved == [(torch.device("cpu"),)]
        return profile_model(*args, **options)

    monkeypatch.setattr(profile_fit, "profile_model", noted)
    module = PartlyThere(layer=True, buffer=False)
    module.total = Noted()
    fit(module)
    assert moved
