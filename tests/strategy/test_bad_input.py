"""What a fit is refused for before it trains, on one rank: each error is ours, and says what to do."""

import logging

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import Cluster, OSDPStrategy, ProfileError
from lightning_osdp.core.cluster import Link
from lightning_osdp.strategy import planning

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


class WithoutParameters(Net):
    def __init__(self):
        super().__init__()
        self.body = nn.Identity()


@pytest.fixture
def quiet(monkeypatch):
    """Links are stated; nothing is logged but warnings."""
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    stated = Cluster(world_size=1, all_gather=link, reduce_scatter=link, memory_bytes=2**34)
    monkeypatch.setattr(planning, "measure_cluster", lambda *_, **__: stated)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


@pytest.fixture
def fit(tmp_path):
    def run(module, loader=..., *, strategy=None, **options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            strategy=strategy or OSDPStrategy(memory_limit="1GiB"),
            accelerator="cpu",
            devices=1,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            max_steps=1,
            **{**quiet, **options},
        )
        trainer.fit(module, loader_of(torch.randn(8, 4)) if loader is ... else loader)
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


def test_a_model_must_have_parameters(fit):
    with pytest.raises(ProfileError, match="Expected WithoutParameters to have parameters to shard, but it has none"):
        fit(WithoutParameters())


def test_an_error_before_the_first_step_is_told_as_it_is(fit):
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        fit(with_methods(configure_optimizers=two_optimizers))


def test_a_fit_of_no_steps_ends_without_a_word(fit):
    assert fit(Net(), limit_train_batches=0).global_step == 0


def test_a_limit_above_what_is_free_is_warned_of(fit):
    with pytest.warns(UserWarning, match=r"OSDP: memory_limit is 64\.0 GiB, more than 16\.0 GiB, the rank's share"):
        fit(Net(), strategy=OSDPStrategy(memory_limit="64GiB"))
