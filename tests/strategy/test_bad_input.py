"""Errors of fits before training, on one rank: each error is ours, and says what to do."""

import dataclasses
import logging
import os
import re
import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import ConfigurationError, OSDPError, OSDPStrategy, PlanFormatError, ProfileError
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.profiler import ComputePrecision
from tests.support.this_cpu import LOW, refused_lstm
from tests.support.tiers import slow

pytestmark = [
    pytest.mark.usefixtures("one_rank", "quiet"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Net(L.LightningModule):
    """Two layers."""

    def __init__(self, num_outputs=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, num_outputs))

    def training_step(self, batch, batch_idx):
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Deeper(Net):
    """Net with a layer more."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)


class WithoutParameters(Net):
    def __init__(self):
        super().__init__()
        self.body = nn.Identity()


@pytest.fixture
def quiet(monkeypatch, stated_links):
    """Logs nothing but warnings; links are stated."""
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


@pytest.fixture
def fit(tmp_path):
    def run(module, loader=..., *, strategy=None, ckpt_path=None, max_steps=1, **options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            strategy=strategy or OSDPStrategy(memory_limit="1GiB"),
            accelerator="cpu",
            devices=1,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            max_steps=max_steps,
            **{**quiet, **options},
        )
        trainer.fit(module, loader_of(torch.randn(8, 4)) if loader is ... else loader, ckpt_path=ckpt_path)
        return trainer

    return run


def loader_of(samples):
    return DataLoader(TensorDataset(samples), batch_size=2)


def with_methods(**methods):
    return type("Bad", (Net,), methods)()


def two_optimizers(module):
    return [torch.optim.SGD(layer.parameters(), 1e-3) for layer in (module.body[0], module.body[2])]


@pytest.mark.parametrize(
    ("method", "returned", "text"),
    [
        ("training_step", None, "to return a loss on the profiling batch, got None. Return the loss"),
        ("training_step", {"los": 1.0}, "to return a dict with 'loss', got the keys ['los']. Return the loss"),
        ("training_step", {"loss": None}, "to return a loss on the profiling batch, got None. Return the loss"),
        ("training_step", 1.0, "to return a loss on the profiling batch, got 1.0. Return the loss"),
        ("configure_optimizers", None, "configure_optimizers to return an optimizer, got None. Return one"),
        ("configure_optimizers", [], "configure_optimizers to return an optimizer, got []. Return one"),
        ("train_dataloader", None, "Expected training dataloaders that can be iterated over, got None"),
    ],
)
def test_what_a_method_must_return(fit, method, returned, text):
    module = with_methods(**{method: lambda *_: returned})
    with pytest.raises(ProfileError) as refused:
        fit(module, *([None] if method == "train_dataloader" else []))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (None, "Expected a training dataloader to profile the model on, got none"),
        (3, "Expected training dataloaders that can be iterated over, got 3"),
        ([], "the dataloader is empty"),
        (loader_of(torch.empty(0, 4)), "the dataloader is empty"),
        (loader_of(torch.full((8, 4), float("nan"))), "Expected a finite loss on the profiling batch, got nan"),
    ],
)
def test_what_loaders_must_give(fit, loader, text):
    with pytest.raises(ProfileError) as refused:
        fit(Net(), loader)
    assert text in str(refused.value)


class Recurrent(Net):
    """Gives its LSTM inputs in another precision than that of autocast, if none is named."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.lstm, self.dtype_of_inputs = nn.LSTM(4, 4), dtype

    def training_step(self, batch, batch_idx):
        x, _ = self.lstm(batch[0][None].to(self.dtype_of_inputs))
        return self.body(x).float().square().mean()


def test_an_lstm_that_this_cpu_lacks(fit):
    refused = {precision: told for precision in LOW if (told := refused_lstm(precision))}
    if not refused:
        pytest.skip("this CPU has LSTMs in every precision")
    for precision, told in refused.items():
        with pytest.raises(RuntimeError) as found:
            fit(Recurrent(), precision=precision)
        assert str(found.value) == (
            f"{told}\nOSDP: torch has no LSTM for float32 inputs in the lower precision of autocast on this CPU, which"
            " lacks instructions for it. Give the LSTM inputs in that precision, as in self.lstm(x.bfloat16()) for"
            ' precision="bf16-mixed", or train with precision="32-true".'
        )
        fit(Recurrent(LOW[precision]), precision=precision)
    fit(Recurrent(), precision="32-true")


class TakesIterator(Net):
    """Model whose step takes the loader's iterator; it optimizes manually if asked."""

    def __init__(self, *, is_manual=False):
        super().__init__()
        self.automatic_optimization = not is_manual

    def training_step(self, dataloader_iter):
        raise AssertionError("nothing runs")


@pytest.mark.parametrize("is_manual", [False, True])
def test_a_step_must_take_a_batch(fit, is_manual):
    with pytest.raises(ConfigurationError, match=r"got one that takes dataloader_iter, .* pass plan="):
        fit(TakesIterator(is_manual=is_manual))


def test_a_model_must_have_parameters(fit):
    with pytest.raises(ProfileError, match="Expected WithoutParameters to have parameters to shard, but it has none"):
        fit(WithoutParameters())


def test_an_error_before_the_first_step_is_told_as_it_is(fit):
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        fit(with_methods(configure_optimizers=two_optimizers))


def test_a_fit_of_no_steps_ends_without_a_word(fit):
    assert fit(Net(), limit_train_batches=0).global_step == 0


class Executed:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Paths of checkpoints by kind, each of which the first test that asks for it saves."""
    return {kind: tmp_path_factory.mktemp("saved") / f"{kind}.ckpt" for kind in ("full", "sharded")}


@pytest.fixture
def resumed(fit, saved, tmp_path):
    """Resumes with a checkpoint of one kind after it was changed."""

    def run(kind, change, module=None):
        path = tmp_path / "last.ckpt"
        if not saved[kind].exists():
            strategy = OSDPStrategy(memory_limit="1GiB", state_dict_type=kind)
            fit(Net(), strategy=strategy).save_checkpoint(saved[kind])
        (shutil.copytree if saved[kind].is_dir() else shutil.copy)(saved[kind], path)
        change(path)
        fit(module or Net(), ckpt_path=path, max_steps=2)

    return run


def leave(path):
    pass


def remove(path):
    path.rename(path.with_name("away"))


def cut(path):
    file = next(path.glob("*.distcp")) if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:100])


def zero(path):
    """Writes zeros into the middle of what is pickled."""
    file = path / ".metadata" if path.is_dir() else path
    content = bytearray(file.read_bytes())
    content[300:600] = bytes(300)
    file.write_bytes(content)


def without_weights(path):
    torch.save({"epoch": 1}, path)


def a_list(path):
    torch.save([1, 2], path)


def in_two_groups(module):
    return torch.optim.AdamW([{"params": module.body[0].parameters()}, {"params": module.body[2].parameters()}])


@pytest.mark.parametrize(
    ("kind", "change", "module", "texts"),
    [
        ("full", leave, Net(7), ["size mismatch for body.2.weight", "[3, 8]", "[7, 8]", "Load it into the model"]),
        slow(
            "sharded", leave, Net(7), ["Size mismatch", "[3, 8]", "[7, 8]", "body.2.weight", "Load it into the model"]
        ),
        slow("full", leave, Deeper(), ['Missing key(s) in state_dict: "head.weight", "head.bias"', "Load it into the"]),
        ("sharded", leave, Deeper(), ['Missing key(s) in state_dict: "head.weight", "head.bias"', "Load it into the"]),
        ("full", remove, None, ["Expected a checkpoint at ", "Found neither"]),
        slow("sharded", remove, None, ["Expected a checkpoint at ", "Found neither"]),
        ("full", cut, None, ["Expected a complete checkpoint at ", "its file ends too early", "Delete it"]),
        ("sharded", cut, None, ["Expected a complete checkpoint of this model at ", "rank 0 found: "]),
        slow("full", zero, None, ["Expected a checkpoint at ", "cannot be read", "Use another one."]),
        slow("sharded", zero, None, ["Expected a checkpoint at ", "cannot be read", "Use another one."]),
        ("full", without_weights, None, ["with weights under 'state_dict', got one without", "load bare weights"]),
        slow("full", a_list, None, ["Expected a dict in checkpoint ", "got list"]),
        slow("full", leave, with_methods(configure_optimizers=in_two_groups), ["has 2 parameter groups", "got 1"]),
        ("sharded", leave, with_methods(configure_optimizers=in_two_groups), ["has 2 parameter groups", "got 1"]),
    ],
)
def test_a_checkpoint_must_be_whole_and_of_this_model(resumed, kind, change, module, texts):
    with pytest.raises(OSDPError) as refused:
        resumed(kind, change, module)
    for text in texts:
        assert text in str(refused.value)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_executes_nothing(resumed, tmp_path, kind):
    written = tmp_path / "written"

    def spoil(path):
        file = path / "meta.pt" if kind == "sharded" else path
        torch.save({**torch.load(file, weights_only=True), "callbacks": Executed(written)}, file)

    with pytest.raises(ConfigurationError, match=r"plain values only in checkpoint .* got posix.mkdir, and loading"):
        resumed(kind, spoil)
    assert not written.exists()


def test_a_limit_above_what_is_free_is_warned_of(fit):
    with pytest.warns(UserWarning, match=r"OSDP: memory_limit is 64\.0 GiB, more than 16\.0 GiB, the rank's share"):
        fit(Net(), strategy=OSDPStrategy(memory_limit="64GiB"))


@pytest.mark.filterwarnings("error:You called:UserWarning")
def test_a_fit_without_loggers_says_nothing_of_the_measurements_that_it_does_not_log(fit):
    fit(Net(), max_steps=8, loader=loader_of(torch.randn(32, 4)))  # a warning would be an error


def test_a_quick_run_leaves_no_files(fit, tmp_path):
    fit(Net(), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_throughput_can_be_monitored(fit, tmp_path):
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    loader = loader_of(torch.randn(32, 4))
    fit(Net(), loader, logger=CSVLogger(tmp_path), callbacks=[monitor], max_steps=8, log_every_n_steps=2)
    (path,) = tmp_path.glob("**/metrics.csv")
    assert "train/batches" in path.read_text()


def test_rates_and_dtypes_of_another_kind_are_refused_with_what_is_meant():
    with pytest.raises(ConfigurationError, match=r"Expected flops_per_s by dtype, got 200000000000000\.0"):
        DeviceRates(flops_per_s=200e12, bytes_per_s=1e12)
    with pytest.raises(ConfigurationError, match=r"a dtype such as torch.bfloat16, got 'bfloat16'"):
        ComputePrecision(dtype="bfloat16")


def test_a_plan_is_checked_as_its_file_is(fit, tmp_path):
    path = tmp_path / "plan.json"
    plan = dataclasses.replace(fit(Net()).strategy.plan, blocks=Block.recomputing(["body", "body.0"]))
    plan.save(path)
    for given, name in ((plan, "the plan of plan="), (path, f"plan file {str(path)!r}")):
        text = f"Expected no block of {name} inside another, and not the root, got block 'body.0'"
        with pytest.raises(PlanFormatError, match=f"^{re.escape(text)}"):
            fit(Net(), strategy=OSDPStrategy(plan=given))
