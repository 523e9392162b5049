"""Users' code that calls, copies, loads and generates with a model that trains: as under DDP, or told what to do."""

import copy
import tempfile
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.distributed.fsdp.wrap import wrap

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.runtime import failure, ranks
from tests.distributed.support.fits import without_measuring
from tests.distributed.support.ranks import RankPool
from tests.distributed.support.user_runs import Chain, check, differences, fitted, plan_with, refusal
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


EPOCHS = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}


def gathered(module):
    """Returns a context within which a module has whole parameters, under each strategy."""
    strategy = module.trainer.strategy
    return strategy.gathered() if isinstance(strategy, OSDPStrategy) else nullcontext()


class Calling(Chain):
    """Calls itself, or a layer, in a hook; what comes out changes what it learns."""

    def __init__(self, optimizer="adamw", *, with_grad=False, only_layer=False):
        super().__init__(optimizer)
        self.with_grad, self.only_layer, self.seen = with_grad, only_layer, 0.0

    def forward(self, x):
        return self.last(self.norm(self.features(x))) * self.scale

    def look(self):
        x = torch.linspace(-1, 1, 14, dtype=self.scale.dtype).view(2, 7)
        with torch.set_grad_enabled(self.with_grad):
            y = (torch.tanh(self.first(x)) if self.only_layer else self(x)).sum()
        self.seen = y.item()
        self.found.append(y.detach().clone())

    def loss(self, batch):
        return super().loss(batch) * (1 + 0.1 * self.seen)


def calls_in_hooks():
    """Differences from DDP."""
    found = {}
    for hook, with_grad, only_layer in (
        ("on_train_epoch_end", False, False),
        ("on_validation_end", True, False),
        ("on_train_batch_end", True, True),
    ):
        kind = type("CallingIn", (Calling,), {hook: lambda self, *_: self.look()})
        make = partial(kind, with_grad=with_grad, only_layer=only_layer)
        found[f"{hook} {with_grad} {only_layer}"] = differences(make, ("mixed",), **EPOCHS)
    return found


class Loading(Chain):
    """Begins with other weights, which it loads, or a layer does, when training starts."""

    def __init__(self, optimizer="adamw", *, layer=None):
        super().__init__(optimizer)
        self.layer = layer

    def on_train_start(self):
        module = self if self.layer is None else getattr(self, self.layer)
        torch.manual_seed(3)
        state = {name: torch.randn_like(value) for name, value in Chain().double().state_dict().items()}
        prefix = "" if self.layer is None else f"{self.layer}."
        module.load_state_dict({n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)})


class Copying(Chain):
    """Has an average of itself, or of a layer, that is a copy."""

    def __init__(self, optimizer="adamw", *, layer=None, gathers=True):
        super().__init__(optimizer)
        self.layer, self.gathers, self.average = layer, gathers, ()

    def own(self):
        return self if self.layer is None else getattr(self, self.layer)

    def on_train_start(self):
        with gathered(self) if self.gathers else nullcontext():
            self.average = (copy.deepcopy(self.own()).requires_grad_(False),)

    def on_train_batch_end(self, *_):
        (average,) = self.average
        with torch.no_grad(), gathered(self):
            for mean, now in zip(average.parameters(), self.own().parameters(), strict=True):
                mean.lerp_(now, 0.5)
        average.load_state_dict(average.state_dict())
        x = torch.linspace(-1, 1, 14, dtype=self.scale.dtype).view(2, 7)
        run = average.features if self.layer is None else average
        self.found.append(run(x).sum())
        assert average.training
        if self.layer is None:
            assert type(average) is Copying
            assert type(average.first) is nn.Linear


def loads_and_copies():
    """Differences from DDP."""
    return {
        "loads": differences(Loading, max_steps=3),
        "loads a layer": differences(lambda: Loading(layer="second"), max_steps=3),
        "copies": differences(Copying, ("mixed", "dp"), max_steps=3),
        "copies a layer": differences(lambda: Copying(layer="first"), max_steps=3),
    }


def copies_of_shards():
    """Returns errors where the model, a unit or a module without parameters is copied outside of `gathered`."""
    plan, found = plan_with(Chain, "mixed"), []
    for layer in (None, "first"):
        module = Copying(layer=layer, gathers=False)
        found.append(refusal(partial(fitted, OSDPStrategy(plan=plan), module)))
    found.append(refusal(partial(copy.deepcopy, module.last)))
    return found


class Wrapped(Chain):
    """Chain that wraps layers as Lightning's pages on FSDP show it."""

    def configure_model(self):
        self.first = wrap(self.first)
        self.second = wrap(self.second)


def wraps():
    """Differences from DDP."""
    return {"wrap()": differences(Wrapped)}


def profiles():
    """Returns, by profiler, the files that it writes."""
    plan, found = plan_with(Chain, "mixed"), {}
    for name in ("simple", "advanced", "pytorch"):
        folder = Path(tempfile.mkdtemp())
        fitted(OSDPStrategy(plan=plan), Chain(), profiler=name, default_root_dir=folder)
        found[name] = sorted(path.suffixes[-2:] for path in folder.iterdir() if path.suffix == ".json")
    return found


class Generating(Chain):
    """Chain whose validation runs a layer again and again, from some step on more often on the last rank."""

    def __init__(self, optimizer="adamw", *, uneven_from=10**9, gathers=False):
        super().__init__(optimizer)
        self.uneven_from, self.gathers = uneven_from, gathers

    def sample(self, x, count):
        for _ in range(count):
            x = torch.tanh(self.third(torch.tanh(self.second(x))))
        return x

    def validation_step(self, batch, batch_idx):
        more = dist.get_rank() if self.global_step >= self.uneven_from else 0
        with gathered(self) if self.gathers else nullcontext():
            y = self.sample(torch.tanh(self.first(batch[0].to(self.scale.dtype))), 2 + more).sum()
        self.found.append(y)
        self.log("val_loss", y, sync_dist=True)


def generates():
    """Differences from DDP."""
    options = {"max_steps": 8, "val_check_interval": 2, "limit_val_batches": 2}
    return {
        "evenly": differences(Generating, ("mixed", "zdp"), **options),
        "whole": differences(lambda: Generating(uneven_from=4, gathers=True), **options),
    }


def generates_apart(kind):
    """Returns the error where one rank generates for longer, long after training has begun."""
    strategy = OSDPStrategy(plan=plan_with(Generating, kind))
    options = {"max_steps": 8, "val_check_interval": 2, "limit_val_batches": 2}
    return refusal(lambda: fitted(strategy, Generating(uneven_from=6), **options))


def transformers_generate():
    """Differences from DDP of GPT-2 whose validation generates: of other lengths on each rank, and on one alone."""
    from tests.distributed.support.hf.hf_models import GPT2  # an optional dependency

    class Writing(GPT2):
        units = ("model.transformer.h.0", "model.transformer.h.1")

        def write(self, tokens, count):
            return self.model.generate(tokens[:, :2], max_new_tokens=count, do_sample=False, pad_token_id=0)

        def validation_step(self, batch, batch_idx):
            written = self.write(batch[0], 1 + dist.get_rank()).double().sum()
            with gathered(self):
                if self.trainer.is_global_zero:
                    written += self.write(batch[0], 3).double().sum()
            self.found.append(written)

    options = {"dtype": "float32", "limit_val_batches": 2, "val_check_interval": 2}
    return {"GPT-2": differences(Writing, ("mixed", "zdp"), **options)}


class Failing(Chain):
    """Raises in the middle of a step, on these ranks."""

    def __init__(self, optimizer="adamw", *, on_ranks=(), at=2):
        super().__init__(optimizer)
        self.on_ranks, self.at = on_ranks, at

    def features(self, x):
        x = super().features(x)
        if self.global_step == self.at and dist.get_rank() in self.on_ranks:
            raise ValueError("of the user")
        return x


def fails(on_ranks, at=2):
    """Returns the error of a fit with checkpoints on exceptions, and the checkpoints that are there."""
    folders = [[tempfile.mkdtemp(), tempfile.mkdtemp()]]
    dist.broadcast_object_list(folders)
    first, second = map(Path, folders[0])
    last = second / "last.ckpt"
    callbacks = [
        OnExceptionCheckpoint(first),
        ModelCheckpoint(second, save_last="link", save_on_exception=True, every_n_train_steps=1, filename="{step}"),
    ]
    strategy = OSDPStrategy(plan=plan_with(Chain, "mixed"))
    soon = partial(failure.FailureWatch, grace_s=0.5)
    with mock.patch.object(failure, "MEETING_S", 2.0), mock.patch.object(ranks, "FailureWatch", soon):
        try:
            fitted(strategy, Failing(on_ranks=on_ranks, at=at), callbacks=callbacks, enable_checkpointing=True)
        except ValueError as error:
            states = [
                path.name for path in first.iterdir() if torch.load(path, weights_only=False)["global_step"] == at
            ]
            return str(error), states, last.exists() or not last.is_symlink()
    return None


@without_measuring
def fails_in_setup():
    """Returns the error of a step that is profiled, with a checkpoint on exceptions."""
    try:
        callbacks = [OnExceptionCheckpoint(tempfile.mkdtemp())]
        fitted(OSDPStrategy(), Failing(on_ranks=(0, 1), at=0), callbacks=callbacks, enable_checkpointing=True)
    except ValueError as error:
        return str(error)
    return None


def test_a_model_is_called_in_hooks(ranks):
    check(ranks(2).run(calls_in_hooks)[0])


@pytest.mark.slow
def test_weights_are_loaded_and_copied_in_hooks(ranks):
    check(ranks(2).run(loads_and_copies)[0])


def test_a_copy_of_shards_is_refused_with_what_to_do(ranks):
    for told in ranks(2).run(copies_of_shards)[0]:
        assert told.startswith("ConfigurationError: Expected whole parameters to copy")
        assert "trainer.strategy.gathered()" in told


def test_wrap_of_torch_leaves_it_to_the_plan_what_a_unit_is(ranks):
    check(ranks(2).run(wraps)[0])


@pytest.mark.slow
def test_profilers_of_lightning_write_their_traces(ranks):
    found = ranks(2).run(profiles)[0]
    assert [".trace", ".json"] not in found["simple"] + found["advanced"]
    assert [".trace", ".json"] in [suffixes[-2:] for suffixes in found["pytorch"]]


@pytest.mark.slow
def test_what_is_generated_in_validation(ranks):
    check(ranks(2).run(generates)[0])


@pytest.mark.parametrize("kind", ["zdp", "mixed"])
def test_ranks_that_generate_for_different_lengths_end_with_what_to_do(ranks, kind):
    for told in ranks(2).run(generates_apart, kind=kind):
        assert told.startswith("RanksApartError: Expected every rank to run the same modules in the same order")
        assert "trainer.strategy.gathered()" in told


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: python -m pip install --group models"
)
def test_transformers_generate_on_all_ranks_and_on_one(ranks):
    check(ranks(2).run(transformers_generate)[0], tolerance=1e-5)


def test_an_exception_on_all_ranks_is_saved_and_reaches_the_user(ranks):
    for told, saved, has_last in ranks(2).run(fails, on_ranks=(0, 1)):
        assert told == "of the user"
        assert saved == ["on_exception.ckpt"]
        assert has_last


def test_an_exception_before_there_is_a_model_to_save_reaches_the_user(ranks):
    assert ranks(2).run(fails_in_setup) == ["of the user"] * 2


@pytest.mark.parametrize("rank", [0, slow(1)])  # 0 has the store
def test_an_exception_on_one_rank_is_not_saved_and_reaches_the_user(rank):
    pool = RankPool(2)  # the other rank is ended in its collective
    try:
        with pytest.raises(AssertionError, match=rf"(?s)Rank {1 - rank} died.*\('of the user', \[\], True\)"):
            pool.run(fails, on_ranks=(rank,))
    finally:
        pool.close()
