"""Whole fits under the strategy on two and four ranks: what users get, and what they are told."""

import contextlib
import io
import json
import warnings
from dataclasses import replace
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy, SearchSpace, simulate
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.report.picture import save_picture
from lightning_osdp.strategy.planning import profile_fit, publish
from tests.distributed.support.fits import (
    SPACE,
    failure,
    fitted,
    largest_difference,
    measuring_briefly,
    plan_for,
    shared_folder,
    trainer,
    without_measuring,
)
from tests.distributed.support.models import BATCH_SIZE, GPT, NUM_SAMPLES, Base, TiedGPT, WideMLP, build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


@measuring_briefly
def plans_itself():
    """Measures links, plans under a limit between what all-ZDP and all-DP need, trains, and reports."""
    free = fitted(OSDPStrategy(search_space=SPACE, memory_limit="1GiB"), WideMLP("sgd"), max_steps=1).strategy.plan
    limit = (free.peak_bytes + free.all_zdp_peak_bytes) // 2
    folder, text = shared_folder(), io.StringIO()
    module = WideMLP("sgd")
    with contextlib.redirect_stdout(text), mock.patch.object(publish, "save_picture", save_picture):
        fit = trainer(OSDPStrategy(search_space=SPACE, memory_limit=f"{limit}B"), max_steps=8, default_root_dir=folder)
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    ddp = WideMLP("sgd")
    fitted(DDPStrategy(process_group_backend="gloo"), ddp, max_steps=8)
    plan = fit.strategy.plan
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return {
        "free_modes": {unit.modes[0] for unit in free.units if unit.name},
        "modes": {unit.modes[0] for unit in plan.units if unit.name},
        "limit": limit,
        "plan": plan,
        "again": simulate(plan, fit.strategy.profile, fit.strategy.cluster).peak.peak_bytes,
        "counted": check.measured.peak_bytes,
        "step_time_s": check.measured.step_time_s,
        "text": text.getvalue(),
        "losses": (module.losses, ddp.losses),
        "saved": json.loads((folder / "osdp_plan.json").read_text()),
        "picture": (folder / "osdp_plan.svg").read_text(),
        "logged": dict(fit.callback_metrics),
    }


class Restless(Base):
    """Dropout, batch statistics, a counter and a list: whatever profiling might leave changed."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.layers = nn.Sequential(nn.Linear(7, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
        self.num_calls = 0

    def loss(self, batch):
        self.num_calls += 1
        return nn.functional.mse_loss(self.layers(batch[0].float()), batch[1].float())

    def dataset(self):
        return build("odd_mlp").dataset()


def leaves_no_trace():
    """Training after profiling against training by the same plan without profiling."""

    def run(**options):
        L.seed_everything(7, verbose=False)
        module = Restless()
        fit = fitted(OSDPStrategy(**options), module)
        state = fit.strategy.lightning_module_state_dict()
        return fit.strategy.plan, module, {key: value.detach().clone() for key, value in state.items()}

    plan, profiled, found = run(search_space=SearchSpace(min_unit_bytes=0))
    _, given, expected = run(plan=plan)
    return {
        "difference": largest_difference(found, expected) if dist.get_rank() == 0 else 0.0,
        "num_calls": (profiled.num_calls, given.num_calls),
        "num_losses": (len(profiled.losses), len(given.losses)),
        "equal_losses": profiled.losses == given.losses,
    }


class HardCoded(L.LightningDataModule):
    """Data with a batch size in both loaders, and an attribute that nobody may write."""

    batch_size = BATCH_SIZE

    def __init__(self, module):
        super().__init__()
        self.module = module

    def train_dataloader(self):
        return DataLoader(self.module.dataset(), batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.module.dataset(), batch_size=5)


class Counting(WideMLP):
    """Remembers batch sizes, and asks for the number of steps while its optimizer is configured."""

    def __init__(self):
        super().__init__()
        self.train_sizes, self.val_sizes, self.stepping_batches = set(), set(), []

    def training_step(self, batch, batch_idx):
        self.train_sizes.add(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.val_sizes.add(len(batch[0]))

    def configure_optimizers(self):
        self.stepping_batches.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


@without_measuring
def batch_sizes(batch_size):
    """Returns what training and validation see under this option."""
    module = Counting()
    data = HardCoded(module)
    strategy = OSDPStrategy(batch_size=batch_size, memory_limit="64MiB", search_space=SPACE)
    fit = trainer(strategy, max_steps=-1, max_epochs=1, limit_val_batches=1.0, use_distributed_sampler=True)
    fit.fit(module, datamodule=data)
    return {
        "planned": strategy.plan.micro_batch_size,
        "train": module.train_sizes,
        "val": module.val_sizes,
        "stepping_batches": module.stepping_batches,
        "steps": fit.global_step,
        "attribute": data.batch_size,
        "samples_per_rank": NUM_SAMPLES // dist.get_world_size(),
    }


def too_small():
    return failure(lambda: fitted(OSDPStrategy(memory_limit="1MiB", search_space=SPACE), WideMLP()))


class FailsOnRankOne(WideMLP):
    def loss(self, batch):
        if dist.get_rank() == 1:
            raise ValueError("no loss on rank one")
        return super().loss(batch)


class FailsWhileTimed(WideMLP):
    """Raises an error on rank 1 where the step runs on real tensors with so many samples, before it is sharded."""

    def __init__(self, error, num_samples):
        super().__init__()
        self.error, self.num_samples = error, num_samples

    def loss(self, batch):
        is_timed = torch.is_grad_enabled() and not any(isinstance(m, FSDPModule) for m in self.modules())
        is_real = not isinstance(batch[0], FakeTensor)
        if dist.get_rank() == 1 and is_timed and is_real and len(batch[0]) == self.num_samples:
            raise self.error
        return super().loss(batch)


def one_rank_fails(num_samples=None):
    """Returns the error where one rank fails while it traces the model, or times the step with so many samples."""
    module = (
        FailsOnRankOne() if num_samples is None else FailsWhileTimed(ValueError("no loss on rank one"), num_samples)
    )

    def work():
        fitted(OSDPStrategy(search_space=SPACE), module)

    try:
        return failure(work)
    except ValueError as error:
        return type(error).__name__, str(error)


def one_rank_lacks_memory():
    """Returns the steps that are trained where one rank lacks memory to time half the batch, then the whole one."""
    steps = []
    for num_samples in (BATCH_SIZE // 2, BATCH_SIZE):
        fit = fitted(OSDPStrategy(search_space=SPACE), FailsWhileTimed(torch.OutOfMemoryError("no room"), num_samples))
        steps.append(fit.global_step)
    return steps


class Captioned(WideMLP):
    """Model with text beside the tensors: its batches cannot be made larger than they are."""

    def loss(self, batch):
        *tensors, texts = batch
        assert len(texts) == len(tensors[0])
        return super().loss(tensors)

    def dataset(self):
        return [(*tensors, "text") for tensors in super().dataset()]


def a_far_micro_batch_that_cannot_be_profiled():
    """Optimizer steps, and what was warned of, where loaders give 4 and 16 are asked for."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit = fitted(OSDPStrategy(search_space=SPACE, batch_size=16), Captioned(), max_steps=1)
    return fit.global_step, [str(each.message) for each in warned if "cannot be profiled" in str(each.message)]


def profiled_sizes():
    """Samples of the batches that fits profile, where loaders give 4, by the micro-batch that is asked for."""
    found, profile_model = {}, profile_fit.profile_model

    def noted(module, batch, step, **options):
        sizes.append(step.batch_size)
        return profile_model(module, batch, step, **options)

    with mock.patch.object(profile_fit, "profile_model", noted):
        for size in (8, 16):
            sizes = []
            fitted(OSDPStrategy(search_space=SPACE, batch_size=size), WideMLP(), max_steps=1)
            found[size] = sizes
        with mock.patch.object(profile_fit, "unsharded_bytes", return_value=2**60 * dist.get_rank()):
            sizes = []
            fitted(OSDPStrategy(search_space=SPACE, batch_size=16), WideMLP(), max_steps=1)
            found["without memory"] = sizes
    return found


def given_plans():
    """A plan by value and by path, and those that belong to something else."""
    world_size, folder = dist.get_world_size(), shared_folder()
    plan = plan_for(WideMLP(), "mixed", world_size=world_size)
    if dist.get_rank() == 0:
        plan.save(folder / "plan.json")
    dist.barrier()
    wrong = plan_for(WideMLP(), "mixed", world_size=world_size + 1)
    return {
        "by_value": fitted(OSDPStrategy(plan=plan), WideMLP()).strategy.plan == plan,
        "by_path": fitted(OSDPStrategy(plan=str(folder / "plan.json")), WideMLP()).strategy.plan == plan,
        "made_of": [
            getattr(fitted(OSDPStrategy(plan=plan), WideMLP()).strategy, name) for name in ("profile", "cluster")
        ],
        "missing": failure(lambda: fitted(OSDPStrategy(plan=folder / "none.json"), WideMLP())),
        "world_size": failure(lambda: fitted(OSDPStrategy(plan=wrong), WideMLP())),
        "model": failure(lambda: fitted(OSDPStrategy(plan=plan), GPT())),
        "batch_size": failure(lambda: fitted(OSDPStrategy(plan=plan, batch_size=3), WideMLP())),
        "global_batch_size": failure(
            lambda: fitted(OSDPStrategy(plan=plan, global_batch_size=7 * world_size), WideMLP())
        ),
        "memory_limit": failure(
            lambda: fitted(OSDPStrategy(plan=plan, memory_limit=f"{plan.peak_bytes - 1}B"), WideMLP())
        ),
        "host_memory_limit": failure(
            lambda: fitted(OSDPStrategy(plan=replace(plan, host_bytes=9), host_memory_limit="8B"), WideMLP())
        ),
        "accumulated": _accumulated(world_size),
    }


def _accumulated(world_size):
    """Micro-batches of a step, where plan and ``global_batch_size`` say that there are two, and loaders nothing."""
    plan = plan_for(WideMLP(), "mixed", world_size=world_size, num_micro_batches=2)
    strategy = OSDPStrategy(
        plan=plan, global_batch_size=2 * BATCH_SIZE * world_size, memory_limit=f"{plan.peak_bytes}B"
    )
    return fitted(strategy, WideMLP()).accumulate_grad_batches


def modes_of(fit):
    return [unit.modes for unit in fit.strategy.plan.units]


def checkpoints(state_dict_type):
    """Two epochs of three steps at once, against one, saved, and one more from the checkpoint under another plan."""
    folder, world_size = shared_folder(), dist.get_world_size()

    def strategy(modes):
        plan = plan_for(GPT(), modes, world_size=world_size)
        return OSDPStrategy(plan=plan, state_dict_type=state_dict_type)

    epochs = {"max_steps": -1, "limit_train_batches": 3}
    whole = fitted(strategy("mixed"), GPT(), max_epochs=2, **epochs)
    keeper = ModelCheckpoint(dirpath=folder, filename="one", save_on_train_epoch_end=True)
    fitted(strategy("mixed"), GPT(), max_epochs=1, enable_checkpointing=True, callbacks=[keeper], **epochs)
    kept = OSDPStrategy(plan=folder / "one.ckpt", state_dict_type=state_dict_type)
    fits, states = [whole], []
    for chosen in (strategy("dp"), kept):
        module = GPT()
        fits.append(trainer(chosen, max_epochs=2, **epochs))
        fits[-1].fit(module, module.loader(dist.get_rank(), world_size), ckpt_path=str(folder / "one.ckpt"))
    for fit in fits:
        fit.strategy._state_dict_type = "full"
        states.append({k: v.detach().clone() for k, v in fit.strategy.lightning_module_state_dict().items()})
    result = {
        "global_steps": [fit.global_step for fit in fits],
        "kept": [modes_of(fit) == modes_of(whole) for fit in fits],
    }
    if dist.get_rank() == 0:
        result["difference"] = max(largest_difference(states[0], state) for state in states[1:])
        if state_dict_type == "full":
            plain = GPT.load_from_checkpoint(folder / "one.ckpt", map_location="cpu")
            result["names"] = list(plain.state_dict()) == list(GPT().state_dict())
    return result


@without_measuring
def validates_without_plan_and_after_fit():
    module = GPT()
    fit = trainer(OSDPStrategy(search_space=SPACE), limit_val_batches=1.0)
    loader = DataLoader(module.dataset(), batch_size=40)
    first = fit.validate(module, loader, verbose=False)[0]["val_loss"]
    with_plan = trainer(OSDPStrategy(search_space=SPACE), limit_val_batches=1.0)
    module = GPT()
    with_plan.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), loader)
    after_fit = with_plan.validate(module, loader, verbose=False)[0]["val_loss"]
    plain = GPT()
    expected = float(plain.loss(TensorDataset(*plain.dataset().tensors)[:]))
    return first, expected, after_fit, float(with_plan.callback_metrics["val_loss"])


class NoLoss(WideMLP):
    def training_step(self, batch, batch_idx):
        return None


class NotANumber(WideMLP):
    def loss(self, batch):
        return super().loss(batch) * float("nan")


class NoOptimizer(WideMLP):
    def configure_optimizers(self):
        return None


class OnMeta(Base):
    """Two tied layers, a normalisation with buffers and an unseeded start; ``scale`` cannot initialise itself."""

    bad = False
    rank_zero_device = "meta"

    def configure_model(self):
        if hasattr(self, "body"):
            return
        with torch.device(self.rank_zero_device if self.global_rank == 0 else "meta"):
            self.body = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 7))
            self.body[2].weight = self.body[0].weight
            if self.bad:
                self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(7, 3)

    def loss(self, batch):
        return nn.functional.mse_loss(self.last(self.body(batch[0].float())), batch[1].float())

    def dataset(self):
        return build("odd_mlp").dataset()


class OnMetaBesideRankZero(OnMeta):
    rank_zero_device = "cpu"


class OnMetaWithoutReset(OnMeta):
    bad = True


class Normalised(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


@without_measuring
def models_on_the_meta_device(is_everywhere=True):
    """Weights at the start and after training of a model that exists only from configure_model on."""
    kind = OnMeta if is_everywhere else OnMetaBesideRankZero
    torch.manual_seed(dist.get_rank())
    module = kind()
    torch.manual_seed(dist.get_rank())
    fit = trainer(OSDPStrategy(search_space=SearchSpace(min_unit_bytes=0)))
    fit.fit(module, OnMeta().loader(dist.get_rank(), dist.get_world_size()))
    state = fit.strategy.lightning_module_state_dict()
    given = kind()
    again = trainer(OSDPStrategy(plan=fit.strategy.plan))
    again.fit(given, OnMeta().loader(dist.get_rank(), dist.get_world_size()))
    return {
        "tied": bool(state) and torch.equal(state["body.0.weight"], state["body.2.weight"]),
        "finite": all(bool(torch.isfinite(value).all()) for value in state.values()),
        "losses": module.losses,
        "steps": (fit.global_step, again.global_step),
    }


@without_measuring
def bad_models():
    """Error of each model that cannot be planned."""
    found = {}
    for kind in (NoLoss, NotANumber, NoOptimizer, OnMetaWithoutReset):
        module = kind()
        loader = module.loader(dist.get_rank(), dist.get_world_size())
        fit = trainer(OSDPStrategy(search_space=SPACE))
        found[kind.__name__] = failure(lambda fit=fit, module=module, loader=loader: fit.fit(module, loader))
    fit = trainer(OSDPStrategy(search_space=SPACE), sync_batchnorm=True)
    found["sync_batchnorm"] = failure(
        lambda fit=fit: fit.fit(Normalised(), WideMLP().loader(dist.get_rank(), dist.get_world_size()))
    )
    fit = trainer(OSDPStrategy(search_space=SPACE))
    empty = DataLoader(TensorDataset(torch.empty(0, 256), torch.empty(0, 64)))
    found["empty"] = failure(lambda: fit.fit(WideMLP(), empty))
    return found


@without_measuring
def plain_dataset_is_kept():
    """A loader that batches by itself is left alone, with the reason."""
    module = WideMLP()
    batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]] * 4
    loader = DataLoader(module.dataset(), batch_sampler=batches)
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer(OSDPStrategy(batch_size=2, search_space=SPACE))
        fit.fit(module, loader)
    return fit.strategy.plan.micro_batch_size, [str(w.message) for w in caught if "OSDP" in str(w.message)]


class PartlyFrozen(TiedGPT):
    """GPT with tied weights and frozen parameters."""

    def __init__(self):
        super().__init__()
        self.norm.requires_grad_(False)


@without_measuring
def fits_after_evaluating():
    """Fits of a model that was evaluated before there was a plan, and of one that was not."""
    found, states = {}, []
    for name in ("first", "evaluated"):
        module, strategy = PartlyFrozen(), OSDPStrategy(search_space=SPACE)
        fit = trainer(strategy, limit_val_batches=1.0)
        loader = DataLoader(module.dataset(), batch_size=8)
        if name == "evaluated":
            before = fit.validate(module, loader, verbose=False)[0]["val_loss"]
            found["plan_before"] = strategy.plan
            found["same"] = fit.validate(module, loader, verbose=False)[0]["val_loss"] == before
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        states.append({k: v.detach().clone() for k, v in strategy.lightning_module_state_dict().items()})
        found[name] = fit.global_step, [unit.name for unit in strategy.plan.units]
        found["frozen"] = [n for n, p in module.named_parameters() if not p.requires_grad]
    if dist.get_rank() == 0:
        found["difference"] = largest_difference(*states)
    return found


@without_measuring
def whole_weights():
    """Whole weights after fit, as the strategy gives them and as parameters do; the module gives no state dict."""
    module, world_size = GPT(), dist.get_world_size()
    plan = plan_for(GPT(), "mixed", world_size=world_size)
    fit = trainer(OSDPStrategy(plan=plan, state_dict_type="sharded"))
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    refused = failure(module.state_dict)
    everywhere = fit.strategy.whole_state_dict(on_all_ranks=True)
    gathered = {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}
    plain = GPT()
    plain.load_state_dict(everywhere)
    own = fit.strategy.whole_state_dict()
    return {
        "refused": refused,
        "own": None if own is None else largest_difference(own, everywhere),
        "plain": largest_difference(plain.state_dict(), everywhere),
        "gathered": largest_difference(gathered, everywhere),
        "moved": largest_difference(everywhere, GPT().state_dict()),
    }


both_sizes = pytest.mark.parametrize("world_size", [2, slow(4)])


@both_sizes
def test_plans_itself_under_a_limit_that_forces_a_mix(ranks, world_size):
    first, *others = ranks(world_size).run(plans_itself)
    assert "DP" in first["free_modes"]  # units whose gathers hide behind computing need not be kept
    assert first["modes"] == {"DP", "ZDP"}
    assert [other["plan"] for other in others] == [first["plan"]] * (world_size - 1)
    assert first["plan"].peak_bytes <= first["limit"]
    assert first["again"] == first["plan"].peak_bytes  # by the profile and the cluster that the strategy has
    assert first["counted"] <= first["limit"]
    assert first["counted"] == pytest.approx(first["plan"].peak_bytes, rel=2e-3)
    assert first["step_time_s"] > 0
    ours, ddps = first["losses"]
    assert len(ours) == 8
    assert ours == pytest.approx(ddps, rel=1e-5)
    assert first["saved"]["world_size"] == world_size
    assert {d["modes"][0] for d in first["saved"]["decisions"] if d["unit"]} == {"DP", "ZDP"}
    assert {name for name in first["logged"] if not name.startswith("osdp/")} == {"train_loss"}
    assert "Memory of one rank over a step" in first["picture"]
    for said in ("OSDP plan", "keeping it would save", "predicted and measured"):
        assert said in first["text"]
    # where a plan that is free takes less than plain FSDP, the limit between the two leaves no room for plain FSDP
    gains = ("more samples/s than plain FSDP", "plain FSDP does not fit: it takes at least")
    assert [gain in first["text"] for gain in gains].count(True) == 1
    assert {other["text"] for other in others} == {""}


@both_sizes
def test_profiling_leaves_no_trace_in_training(ranks, world_size):
    for found in ranks(world_size).run(leaves_no_trace):
        assert found["difference"] == 0.0
        assert found["num_calls"] == (5, 5)
        assert found["num_losses"] == (5, 5)
        assert found["equal_losses"]


@pytest.mark.parametrize(
    ("batch_size", "world_size", "expected"),
    [
        slow("auto", 2, 4),
        slow("keep", 2, 4),
        slow(10, 2, 10),
        slow("scale", 2, 80),
        slow(10, 4, 10),
        slow("scale", 4, 40),
    ],
)
def test_batch_size_rebuilds_the_training_loader_only(ranks, batch_size, world_size, expected):
    found = ranks(world_size).run(batch_sizes, batch_size=batch_size)[0]
    assert found["planned"] == expected
    assert found["train"] == {expected}
    assert found["val"] == {5}
    assert found["attribute"] == 4
    assert found["steps"] == found["samples_per_rank"] // expected
    # The first answer is given on the copy that is profiled, the last one is what training is configured with.
    assert found["stepping_batches"] == [found["steps"]]


@both_sizes
def test_no_feasible_plan_is_an_error_on_all_ranks(ranks, world_size):
    first, *others = ranks(world_size).run(too_small)
    assert others == [first] * (world_size - 1)
    name, text = first
    assert name == "InfeasibleError"
    assert "the limit is 1.00 MiB per rank" in text
    assert "Largest contributors: " in text
    assert "Nearest remedy: " in text


@both_sizes
@pytest.mark.parametrize(
    ("num_samples", "kind"),
    [(None, "RanksApartError"), (BATCH_SIZE, "OSDPError")],  # the others are at their first run when it traces
    ids=["tracing", "timing"],
)
def test_a_rank_that_cannot_profile_stops_all_ranks_with_its_text(ranks, world_size, num_samples, kind):
    first, failed, *others = ranks(world_size).run(one_rank_fails, num_samples=num_samples)
    assert failed == ("ValueError", "no loss on rank one")
    assert first == (kind, "Rank 1 failed, so every rank stops: ValueError: no loss on rank one")
    assert others == [first] * (world_size - 2)


@both_sizes
def test_a_rank_that_lacks_memory_for_timing_has_all_ranks_time_operations(ranks, world_size):
    found = ranks(world_size).run(one_rank_lacks_memory)
    assert all(steps > 0 for steps in found[0])
    assert found == [found[0]] * world_size


@pytest.mark.slow
def test_a_micro_batch_that_is_far_from_the_profiled_one_is_profiled_itself(ranks):
    found = ranks(2).run(profiled_sizes)
    assert found[0] == {8: [4], 16: [4, 16], "without memory": [4]}
    assert found[1] == found[0]


def test_a_micro_batch_that_cannot_be_profiled_is_planned_from_the_one_that_was(ranks):
    found = ranks(2).run(a_far_micro_batch_that_cannot_be_profiled)
    assert [steps for steps, _ in found] == [1, 1]
    (text,) = found[0][1]
    assert text.startswith("OSDP: a micro-batch of 16 samples cannot be profiled (")
    assert text.endswith("What is planned of it follows from 4.")


@both_sizes
def test_given_plans_are_used_or_refused(ranks, world_size):
    found = ranks(world_size).run(given_plans)[0]
    assert found["by_value"]
    assert found["by_path"]
    assert found["made_of"] == [None, None]
    assert found["missing"][0] == "PlanFormatError"
    assert "none.json' but it cannot be read" in found["missing"][1].replace("',", "'")
    assert found["world_size"][0] == found["model"][0] == "PlanMismatchError"
    assert f"the plan is for {world_size + 1} ranks, this run has {world_size}" in found["world_size"][1]
    assert "parameter 'layers.0.weight': planned float32[384, 256], found not there" in found["model"][1]
    assert found["batch_size"][0] == "ConfigurationError"
    assert "got batch_size=3 and a plan for a micro-batch of 4" in found["batch_size"][1]
    assert found["global_batch_size"][0] == found["memory_limit"][0] == "ConfigurationError"
    told = f"a plan for {4 * world_size} samples: 1 micro-batches of 4 on each of {world_size} ranks"
    assert told in found["global_batch_size"][1]
    assert "Expected a plan that fits memory_limit=" in found["memory_limit"][1]
    assert "Expected a plan that fits host_memory_limit=8 B, got one that is" in found["host_memory_limit"][1]
    assert found["accumulated"] == 2


@pytest.mark.parametrize(("state_dict_type", "world_size"), [slow("full", 4), slow("sharded", 2)])
def test_training_resumed_under_another_plan_equals_the_uninterrupted_run(ranks, state_dict_type, world_size):
    found = ranks(world_size).run(checkpoints, state_dict_type=state_dict_type)[0]
    assert found["global_steps"] == [6, 6, 6]
    assert found["kept"] == [True, False, True]
    assert found["difference"] < 1e-6
    assert found.get("names", True)


@both_sizes
def test_validation_without_a_plan_and_after_fit(ranks, world_size):
    first, expected, after_fit, last_in_fit = ranks(world_size).run(validates_without_plan_and_after_fit)[0]
    assert first == pytest.approx(expected, rel=1e-5)
    assert after_fit < expected
    assert after_fit == pytest.approx(last_in_fit, rel=1e-5)


@both_sizes
def test_models_that_cannot_be_planned_are_refused_before_training(ranks, world_size):
    found = ranks(world_size).run(bad_models)[0]
    assert found["NoLoss"][0] == found["NotANumber"][0] == found["NoOptimizer"][0] == "ProfileError"
    assert "to return a loss on the profiling batch, got None" in found["NoLoss"][1]
    assert "Expected a finite loss on the profiling batch, got nan" in found["NotANumber"][1]
    assert "Expected configure_optimizers to return an optimizer, got None" in found["NoOptimizer"][1]
    assert "reset_parameters(), which initialises it, but the model itself" in found["OnMetaWithoutReset"][1]
    assert "Expected a GPU for synchronised batch normalisation" in found["sync_batchnorm"][1]
    assert "the dataloader is empty" in found["empty"][1]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_loader_that_cannot_be_rebuilt_is_kept_with_the_reason(ranks, world_size):
    micro_batch_size, warnings = ranks(world_size).run(plain_dataset_is_kept)[0]
    assert micro_batch_size == 3
    assert any("batch_size=2 is ignored" in text and "a list, has no batch_size" in text for text in warnings)


@both_sizes
@pytest.mark.parametrize("is_everywhere", [slow(True), slow(False)], ids=["on meta", "real on rank 0"])
def test_a_model_on_the_meta_device_starts_equal_on_all_ranks_and_trains(ranks, world_size, is_everywhere):
    found = ranks(world_size).run(models_on_the_meta_device, is_everywhere=is_everywhere)
    assert found[0]["tied"]
    assert all(each["finite"] and each["steps"] == (5, 5) for each in found)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.slow
def test_a_model_that_was_evaluated_before_fit_is_planned_and_trains_as_one_that_was_not(ranks):
    found = ranks(2).run(fits_after_evaluating)[0]
    assert found["plan_before"] is None
    assert found["same"]
    assert found["evaluated"] == found["first"]
    assert found["first"][0] == 5
    assert len(found["first"][1]) > 1
    assert len(found["frozen"]) == 2
    assert found["difference"] < 1e-6


def test_whole_weights_come_from_the_strategy_and_shards_from_nowhere(ranks):
    first, second = ranks(2).run(whole_weights)
    for found in (first, second):
        name, text = found["refused"]
        assert name == "ConfigurationError"
        assert "On all ranks, call trainer.strategy.whole_state_dict()" in text
        assert found["plain"] == found["gathered"] == 0.0
        assert found["moved"] > 1e-3
    assert (first["own"], second["own"]) == (0.0, None)
