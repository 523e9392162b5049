"""Numbers that people see of a training while it runs."""

import csv

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_osdp import ConfigurationError, OSDPStrategy, PlanMonitor
from lightning_osdp.callbacks.peak import COUNTED_STEPS, WARM_UP_STEPS
from tests.distributed.support.fits import largest_difference, plan_for, shared_folder, trainer
from tests.distributed.support.models import BATCH_SIZE, GPT
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


STEPS = WARM_UP_STEPS + COUNTED_STEPS + 3


class Recorder(L.Callback):
    """Record of what the monitor told after each batch, and of what the progress bar was given."""

    def __init__(self):
        self.told, self.in_bar = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.told.append(next(c for c in trainer.callbacks if isinstance(c, PlanMonitor)).latest)
        self.in_bar.append({k: v for k, v in trainer.progress_bar_metrics.items() if k.startswith("osdp/")})


class Silent(TQDMProgressBar):
    def init_train_tqdm(self):
        bar = super().init_train_tqdm()
        bar.disable = True
        return bar


def fit_watched(*callbacks, plan, folder, log_every_n_steps=2, num_micro_batches=1, **options):
    recorder = Recorder()
    fit = trainer(
        OSDPStrategy(plan=plan),
        max_steps=STEPS,
        logger=CSVLogger(folder, name="", version="logs"),
        log_every_n_steps=log_every_n_steps,
        accumulate_grad_batches=num_micro_batches,
        enable_progress_bar=True,
        callbacks=[Silent(), recorder, *callbacks],
        default_root_dir=folder,
        **options,
    )
    module = GPT("sgd")
    torch.manual_seed(5)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return fit, module, recorder


def watched_fit(num_micro_batches=1):
    """Returns everything that one watched fit tells, by way of every channel."""
    folder, world_size = shared_folder(), dist.get_world_size()
    plan = plan_for(GPT("sgd"), "mixed", world_size=world_size, num_micro_batches=num_micro_batches)
    keeper = ModelCheckpoint(dirpath=folder, filename="end", save_last=False, every_n_train_steps=STEPS)
    fit, _, recorder = fit_watched(
        keeper, plan=plan, folder=folder, num_micro_batches=num_micro_batches, enable_checkpointing=True
    )
    found = {
        "plan": plan,
        "told": recorder.told,
        "in_bar": [{k: float(v) for k, v in told.items()} for told in recorder.in_bar],
        "first": type(fit.callbacks[0]).__name__,
        "measured": fit.callbacks[0].measured,
        "batch_samples": BATCH_SIZE * num_micro_batches * world_size,
    }
    if dist.get_rank() == 0:
        checkpoint = torch.load(folder / "end.ckpt", weights_only=False)
        found["in_checkpoint"] = [key for key in checkpoint["callbacks"] if "PlanMonitor" in key]
        found["checkpoint_text"] = "osdp/" in str({k: v for k, v in checkpoint.items() if k != "state_dict"})
        with (folder / "logs" / "metrics.csv").open() as file:
            found["rows"] = list(csv.DictReader(file))
    return found


class Blind(PlanMonitor):
    """Does nothing: training as if nobody watched."""

    on_train_start = on_train_batch_start = on_train_batch_end = on_fit_end = lambda *_: None


def watching_changes_nothing():
    """Weights, losses and the next random numbers with a monitor, and with one that does nothing."""
    plan = plan_for(GPT("sgd"), "mixed", world_size=dist.get_world_size())
    ends = []
    for monitor in (PlanMonitor(), Blind()):
        fit, module, _ = fit_watched(monitor, plan=plan, folder=shared_folder())
        state = {k: v.detach().clone() for k, v in fit.strategy.lightning_module_state_dict().items()}
        ends.append((state, module.losses, torch.rand(3).tolist(), fit.callbacks[0] is monitor))
    (state, losses, drawn, is_used), (expected, expected_losses, expected_drawn, _) = ends
    return {
        "difference": largest_difference(state, expected) if dist.get_rank() == 0 else 0.0,
        "losses": losses == expected_losses,
        "drawn": drawn == expected_drawn,
        "is_used": is_used,
    }


def configured():
    """Names that reach the logger and the progress bar under either option."""
    found = {}
    plan = plan_for(GPT("sgd"), "mixed", world_size=dist.get_world_size())
    for option in ("progress_bar", "logger"):
        fit, _, _ = fit_watched(PlanMonitor(**{option: False}), plan=plan, folder=shared_folder())
        found[option] = sorted(fit.progress_bar_metrics), sorted(fit.logged_metrics)
    return found


def without_a_plan():
    """The error under a strategy that has no plan."""
    from lightning.pytorch.strategies import DDPStrategy

    fit = trainer(DDPStrategy(process_group_backend="gloo"), callbacks=[PlanMonitor()])
    module = GPT("sgd")
    try:
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    except ConfigurationError as error:
        return str(error)
    return None


STEP, SAMPLES, PEAK = "osdp/step_time_s", "osdp/samples_per_s", "osdp/peak_bytes"
RATIOS = {"osdp/step_time_ratio", "osdp/peak_ratio"}

both_sizes = pytest.mark.parametrize("world_size", [2, slow(4)])


@pytest.fixture(scope="module", params=[slow((2, 1)), (2, 2), slow((4, 2))], ids=["2, 1", "2, 2", "4, 2"])
def watched(request, ranks):
    """Returns what rank 0 found, and the number of micro-batches of an optimizer step."""
    world_size, num_micro_batches = request.param
    return ranks(world_size).run(watched_fit, num_micro_batches=num_micro_batches)[0], num_micro_batches


def test_the_monitor_the_logger_and_the_progress_bar_tell_the_same(watched):
    found, num_micro_batches = watched
    assert found["first"] == "PlanMonitor"
    told = found["told"][num_micro_batches - 1 :: num_micro_batches]
    assert [*map(set, told[:WARM_UP_STEPS])] == [set()] * WARM_UP_STEPS
    assert set(told[-1]) == {STEP, SAMPLES, PEAK} | RATIOS
    # every second step is logged, in the row that has the user's own metrics
    rows = {int(row["step"]): row for row in found["rows"] if row["train_loss"]}
    assert sorted(rows) == [1, 3, 5, 7]
    assert rows[1][STEP] == ""
    for step in (5, 7):
        for name, value in told[step].items():
            assert float(rows[step][name]) == pytest.approx(value, rel=1e-6)
    shown = {name: value for name, value in told[-1].items() if name != PEAK}
    assert found["in_bar"][-1] == pytest.approx(shown, rel=1e-6)


def test_numbers_agree_with_each_other_and_with_the_plan(watched):
    found, _ = watched
    last, plan, measured = found["told"][-1], found["plan"], found["measured"]
    assert last[STEP] * last[SAMPLES] == pytest.approx(found["batch_samples"], rel=1e-5)
    assert last["osdp/step_time_ratio"] == pytest.approx(last[STEP] / plan.step_time_s)
    assert last["osdp/peak_ratio"] == pytest.approx(last[PEAK] / plan.peak_bytes)
    assert last[PEAK] == measured.peak_bytes
    assert measured.step_time_s * measured.samples_per_s == pytest.approx(found["batch_samples"])


def test_nothing_of_it_is_in_checkpoints(watched):
    found, _ = watched
    assert found["in_checkpoint"] == []
    assert not found["checkpoint_text"]


@both_sizes
def test_watching_changes_neither_weights_nor_losses_nor_random_numbers(ranks, world_size):
    for found in ranks(world_size).run(watching_changes_nothing):
        assert found == {"difference": 0.0, "losses": True, "drawn": True, "is_used": True}


@pytest.mark.slow
def test_the_progress_bar_and_the_logger_can_be_left_out(ranks):
    found = ranks(2).run(configured)[0]
    in_bar, logged = found["progress_bar"]
    assert not any(name.startswith("osdp/") for name in in_bar)
    assert {STEP, SAMPLES, PEAK} | RATIOS <= {*logged}
    in_bar, logged = found["logger"]
    assert {STEP, SAMPLES} | RATIOS <= {*in_bar}
    assert not any(name.startswith("osdp/") for name in logged)


@both_sizes
def test_a_monitor_needs_a_plan(ranks, world_size):
    expected = (
        "Expected a strategy with a plan, whose predictions PlanMonitor checks, got DDPStrategy."
        " Train with strategy='osdp', or without PlanMonitor."
    )
    assert ranks(world_size).run(without_a_plan) == [expected] * world_size
