"""A step reads of its Trainer and module the same while it is profiled and compared as in training."""

import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from tests.support.tiers import in_turn, slow

pytestmark = pytest.mark.usefixtures("one_rank")

LEFT_OUT = {"val_dataloaders", "num_val_batches", "num_sanity_val_batches", "should_stop"}
"""Names that may differ: validation sets three, before the first step in training, too; `Reader` writes the last."""
OURS = ("lightning_osdp.callbacks", "lightning_osdp.strategy.runtime", "lightning_osdp.strategy.sharding")
"""Packages whose callbacks the strategy adds; these look at nothing but training."""
PLAIN = (bool, int, float, str, type(None), torch.device, torch.dtype)


def told(value):
    """Returns the parts of a value that can be compared where two objects have one."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return "tensor"  # whole, fake or a shard
    if isinstance(value, (list, tuple)):
        return [told(each) for each in value if not type(each).__module__.startswith(OURS)]
    if isinstance(value, dict):
        return {key: told(each) for key, each in value.items()}
    read = [value.__class__.__name__.removeprefix("FSDP")]
    for name in ("param_groups", "batch_size", "log_dir", "name", "version", "interval", "frequency", "base_lrs"):
        found = getattr(value, name, None)
        read.append(found if isinstance(found, (int, str)) else told(found) if isinstance(found, list) else "")
    if isinstance(value, DataLoader):
        read.append(len(value))
    return read


def public(holder):
    """Returns all that can be read of an object by public names, without a call."""
    names = {*dir(type(holder)), *vars(holder)}
    found = {}
    for name in sorted(name for name in names if not name.startswith("_")):
        try:
            value = getattr(holder, name)
        except (RuntimeError, AttributeError) as error:  # Lightning refuses to tell some outside of where they are
            value = repr(error)
        if not inspect.isroutine(value):
            found[name] = value
    return found


class Reader(L.LightningModule):
    """Notes in each step what it can read; what it writes to its Trainer while it is profiled is forgotten."""

    def __init__(self, note, *, is_manual=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.automatic_optimization, self.note, self.is_training = not is_manual, note, False

    def on_train_batch_start(self, batch, batch_idx):
        self.is_training = True

    def training_step(self, batch, batch_idx):
        own = {name: value for name, value in public(self).items() if name not in vars(self)}
        called = {
            "optimizers()": self.optimizers(),
            "optimizers(raw)": self.optimizers(use_pl_optimizer=False),
            "lr_schedulers()": self.lr_schedulers(),
            "optimizer": isinstance(self.optimizers(), torch.optim.Adam) and self.optimizers().optimizer,
            "last lr": self.lr_schedulers().get_last_lr(),
            "logger": isinstance(self.logger, CSVLogger),
        }
        read = {"Trainer": public(self.trainer), "module": own, "called": called}
        self.note((self.is_training, {whose: {k: told(v) for k, v in found.items()} for whose, found in read.items()}))
        if not self.is_training:
            self.trainer.should_stop = True
        self.logger.log_metrics({"x": 1.0})
        self.logger.experiment.log_metrics({"x": 1.0})
        loss = self.second(self.first(batch)).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def validation_step(self, batch, batch_idx):
        pass


class Counting(Reader):
    """Has asked for the length of its training before there is a plan."""

    def setup(self, stage):
        self.trainer.estimated_stepping_batches  # noqa: B018 (reading makes the loaders)

    def training_step(self, batch, batch_idx):
        self.note(len(batch))
        return self.first(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.first.parameters(), lr=0.1)


class Scheduled(L.LightningModule):
    """Notes in each step where training is, and takes another layer from the second epoch on."""

    def __init__(self, note, *, is_manual=False):
        super().__init__()
        self.first, self.second, self.note, self.is_training = nn.Linear(4, 8), nn.Linear(4, 8), note, False
        self.automatic_optimization = not is_manual

    def on_train_batch_start(self, batch, batch_idx):
        self.is_training = True

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        counts = trainer.current_epoch, trainer.global_step, self.current_epoch, self.global_step
        self.note((self.is_training, counts))
        loss = (self.second if self.current_epoch else self.first)(batch).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path, stated_links):
    """Fits a module for three steps of each epoch; links are stated."""

    def run(module, *, max_epochs=1, callbacks=(), ckpt_path=None, **options):
        trainer = L.Trainer(
            strategy=OSDPStrategy(**options),
            accelerator="cpu",
            devices=1,
            max_epochs=max_epochs,
            callbacks=[*callbacks],
            limit_train_batches=3,
            logger=CSVLogger(tmp_path),
            log_every_n_steps=1,
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        loaders = DataLoader(torch.ones(28, 4), batch_size=7), DataLoader(torch.ones(8, 4))
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
        assert trainer.global_step == 3 * max_epochs
        return trainer

    return run


@pytest.mark.parametrize(("batch_size", "is_manual"), in_turn(["divide", 3], [False, True]))
def test_all_that_a_step_can_read_is_what_it_reads_in_training(fit, caplog, batch_size, is_manual):
    seen = []
    fit(Reader(seen.append, is_manual=is_manual), batch_size=batch_size)
    assert "micro-batches stay" not in caplog.text  # nor is there a reason not to divide them
    (_, expected), *_ = [each for each in seen if each[0]]
    found = [read for is_training, read in seen if not is_training]
    assert any(read["Trainer"]["num_training_batches"] == 3 for read in found)
    for read in found:
        for whose, names in expected.items():
            differing = {
                name: (read[whose].get(name), value)
                for name, value in names.items()
                if name not in LEFT_OUT and read[whose].get(name) != value
            }
            assert differing == {}


def test_loaders_that_a_hook_has_asked_for_are_made_anew_as_planned(fit):
    sizes = []
    plan = fit(Counting(sizes.append), batch_size=3).strategy.plan
    assert (plan.micro_batch_size, sizes[-3:]) == (3, [3, 3, 3])
    sizes.clear()
    fit(Counting(sizes.append), plan=plan)
    assert sizes == [3, 3, 3]


BEGUN = {f"in-{step}": (step // 3, step) for step in range(1, 7)} | {
    "after-0": (1, 3),
    "after-1": (2, 6),
    "end": (2, 6),
}
"""Epochs and optimizer steps in which runs go on, by checkpoints: in epochs, after them, and at the end."""


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization and every_n_train_steps")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.parametrize(
    ("is_manual", "names"),
    [
        (False, ("after-0", "end", "in-2", "in-4", "in-6")),
        (True, ("after-1", "in-1", "in-3", "in-5")),
        *(slow(is_manual, tuple(BEGUN)) for is_manual in (False, True)),
    ],
)
def test_a_step_of_a_resumed_run_reads_where_training_goes_on(fit, tmp_path, is_manual, names):
    folder, named = tmp_path / "saved", {"auto_insert_metric_name": False, "save_top_k": -1}
    callbacks = [
        ModelCheckpoint(folder, filename="in-{step}", every_n_train_steps=1, **named),
        ModelCheckpoint(folder, filename="after-{epoch}", save_on_train_epoch_end=True, **named),
    ]
    trainer = fit(Scheduled(lambda _: None, is_manual=is_manual), max_epochs=2, callbacks=callbacks)
    trainer.save_checkpoint(folder / "end.ckpt")
    assert {path.stem for path in folder.glob("*.ckpt")} == set(BEGUN)
    for name in names:
        seen = []
        trainer = fit(Scheduled(seen.append, is_manual=is_manual), max_epochs=3, ckpt_path=folder / f"{name}.ckpt")
        first = next(place for place, (is_training, _) in enumerate(seen) if is_training)
        assert first > 1
        assert {counts for _, counts in seen[: first + 1]} == {seen[first][1]}, name
        assert seen[first][1][:2] == BEGUN[name], name
        assert (trainer.current_epoch, trainer.global_step) == (3, 9)
