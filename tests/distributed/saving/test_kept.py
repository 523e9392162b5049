"""`ModelCheckpoint` keeps and removes whole checkpoints, and fit, validate and test find the best and the last."""

from math import isclose
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.checkpointing.load import why_incomplete
from tests.distributed.support.fits import shared_folder, trainer
from tests.distributed.support.models import OddMLP
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


SCORES = (3.0, 1.0, 2.0, 2.5, 4.0)
"""Scores of the epochs; the smallest is the best."""


class Scored(OddMLP):
    """Model of stated scores, which notes the loss of validation after every epoch, and the epochs that it trained."""

    def __init__(self):
        super().__init__("sgd")
        self.validated, self.trained = [], []

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.validated.append(float(loss))
        self.log("score", SCORES[self.current_epoch])
        self.log("loss", loss)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def on_train_epoch_start(self):
        self.trained.append(self.current_epoch)


class Removals:
    """The epoch that is removed, each time, and those that are complete then; on rank 0, which changes the folder."""

    def __init__(self, fit, folder):
        self.remove, self.folder, self.found = fit.strategy.remove_checkpoint, folder, []
        fit.strategy.remove_checkpoint = self

    def __call__(self, path):
        if dist.get_rank() == 0:
            self.found.append((Path(path).stem, names(self.folder, lambda entry: why_incomplete(entry) is None)))
        self.remove(path)


def names(folder, has=lambda _: True):
    return sorted(entry.name.removesuffix(".ckpt") for entry in folder.iterdir() if has(entry))


def is_same(loss, other):
    """Tells if losses are equal but for the rounding of Lightning's mean."""
    return isclose(loss, other, rel_tol=1e-6)


def _trainer(folder, kind, max_epochs, **options):
    named = {"filename": "{epoch}", "auto_insert_metric_name": False}
    module = Scored()
    plan = plan_of(module, {"layers": "ZDP", "last": "DP"}, world_size=dist.get_world_size(), micro_batch_size=4)
    fit = trainer(
        OSDPStrategy(plan=plan, batch_size="keep", state_dict_type=kind),
        max_steps=-1,
        max_epochs=max_epochs,
        limit_train_batches=1,
        limit_val_batches=1,
        limit_test_batches=1,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, monitor="score", **named, **options)],
    )
    return fit, module


def keeps(kind, **options):
    """Returns what is kept of four epochs, when what was removed, and what the best and the last one give."""
    folder = shared_folder()
    fit, module = _trainer(folder, kind, 4, **options)
    removals = Removals(fit, folder)
    train, held = module.loader(dist.get_rank(), dist.get_world_size()), DataLoader(module.dataset(), batch_size=80)
    fit.fit(module, train, held)
    dist.barrier()
    found = {
        "kept": names(folder),
        "incomplete": names(folder, lambda entry: why_incomplete(entry) is not None),
        "links": names(folder, Path.is_symlink),
        "removed": removals.found if dist.get_rank() == 0 else [],
    }
    losses = module.validated.copy()
    for name in ("best", "last") if options["save_top_k"] else ("last",):
        validated = fit.validate(module, held, ckpt_path=name, verbose=False)[0]["loss"]
        tested = fit.test(module, held, ckpt_path=name, verbose=False)[0]["loss"]
        found[name] = [epoch for epoch, loss in enumerate(losses) if is_same(loss, validated) and is_same(loss, tested)]
    again, module = _trainer(folder, kind, 5, **options)
    again.fit(module, train, held, ckpt_path="last")
    return {**found, "resumed": module.trained}


def weights_alone(kind):
    """Returns the error of a fit from a checkpoint of weights alone, and if validation and a new model load them."""
    folder = shared_folder()
    fit, module = _trainer(folder, kind, 1, save_weights_only=True)
    train, held = module.loader(dist.get_rank(), dist.get_world_size()), DataLoader(module.dataset(), batch_size=80)
    fit.fit(module, train, held)
    other, new = _trainer(folder, kind, 2)
    validated = other.validate(new, held, ckpt_path=folder / "0.ckpt", verbose=False)[0]["loss"]
    other, new = _trainer(folder, kind, 2)
    text = ""
    try:
        other.fit(new, train, held, ckpt_path=folder / "0.ckpt")
    except KeyError as error:
        text = str(error)
    same = is_same(validated, module.validated[-1])
    if kind == "full":
        loaded = Scored.load_from_checkpoint(folder / "0.ckpt")
        same &= is_same(validated, float(loaded.loss(next(iter(held)))))
    return text, same


@pytest.mark.parametrize(
    ("options", "kept", "removed", "last"),
    [
        slow({"save_top_k": 0, "save_last": True}, ["last"], [], 3),
        ({"save_top_k": 1, "save_last": "link"}, ["1", "last"], [("0", ["0", "1", "last"])], 1),
        slow({"save_top_k": 2, "save_last": True}, ["1", "2", "last"], [("0", ["0", "1", "2", "last"])], 2),
        slow({"save_top_k": -1, "save_last": "link"}, ["0", "1", "2", "3", "last"], [], 3),
    ],
    ids=["none", "best", "two", "all"],
)
@pytest.mark.parametrize("kind", [slow("full"), "sharded"])
def test_the_best_and_the_last_are_kept_whole(ranks, kind, options, kept, removed, last):
    found = ranks(2).run(keeps, kind=kind, **options)
    assert found[0].pop("removed") == removed
    best = {"best": [1]} if options["save_top_k"] else {}
    links = ["last"] if options["save_last"] == "link" else []
    del found[1]["removed"]
    for one in found:
        assert one == {
            "kept": kept,
            "incomplete": [],
            "links": links,
            **best,
            "last": [last],
            "resumed": list(range(last + 1, 5)),
        }


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_weights_alone_are_evaluated_and_not_resumed_from(ranks, kind):
    for text, same in ranks(2).run(weights_alone, kind=kind):
        assert "checkpoint contains only the model. This is probably due to `ModelCheckpoint.save_weights_only`" in text
        assert same
