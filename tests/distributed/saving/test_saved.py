"""Checkpoints between ranks and a single device, consolidated ones too."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.checkpointing.saving import CompleteFiles
from tests.distributed.support.fits import failure, plan_for, shared_folder, trainer
from tests.distributed.support.models import OddMLP
from tests.distributed.support.split_models import AtStart, SplitNet, consolidate, differing, split_plan, unequal
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


OPTIMIZERS = {
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "plain_sgd": (torch.optim.SGD, {"lr": 0.05}),
}
"""Optimizers with parameter groups that are not in the model's order, and frozen parameters in one."""


class Saved(SplitNet):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.save_hyperparameters()

    def configure_optimizers(self):
        kind, options = OPTIMIZERS[self.optimizer_name]
        groups = super().configure_optimizers().param_groups
        return kind([{key: group[key] for key in ("params", "weight_decay")} for group in groups], **options)


def save(folder, names):
    """Three steps in slices and whole, with each of these optimizers; saved as a file and as shards."""
    for index, name in enumerate(names):
        module = Saved(name)
        plan = split_plan("whole" if index % 2 else "four", module, dist.get_world_size(), is_shifted=True)
        fit = trainer(OSDPStrategy(plan=plan, batch_size="keep"), max_steps=3)
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        fit.save_checkpoint(Path(folder) / f"{name}.ckpt")
        fit.strategy._state_dict_type = "sharded"
        fit.save_checkpoint(Path(folder) / name)


def on_one_device(folder, names):
    """Returns what a single device finds otherwise than in the file, resumed from it and from consolidated shards."""
    wrong = {}
    for name in names:
        consolidate(Path(folder) / name)
        expected = torch.load(Path(folder) / f"{name}.ckpt", weights_only=True)
        for path in (Path(folder) / f"{name}.ckpt", Path(folder) / f"{name}.consolidated"):
            found = wrong[path.name] = []
            loaded = Saved.load_from_checkpoint(path)
            found += [
                key for key, value in loaded.state_dict().items() if not torch.equal(value, expected["state_dict"][key])
            ]
            found += [] if loaded.optimizer_name == name else [loaded.optimizer_name]
            if path.name == "plain_sgd.consolidated":  # has no "state", which torch.optim needs
                continue

            def compare(trainer, found=found, expected=expected):
                found += unequal(trainer._checkpoint_connector.dump_checkpoint(weights_only=False), expected)

            fit = trainer("auto", max_steps=5, callbacks=[AtStart(compare)])
            fit.fit(loaded, loaded.loader(0, 1), ckpt_path=path)
            found += [] if fit.global_step == 5 else [f"stopped at step {fit.global_step}"]
    return wrong


def back_again(folder, names):
    """Returns what ranks that resume from consolidated shards find otherwise than in the file."""
    wrong = {}
    for name in names:
        path, module = Path(folder) / f"{name}.consolidated", Saved(name)
        expected = torch.load(Path(folder) / f"{name}.ckpt", weights_only=True)

        def compare(trainer, path=path, expected=expected):
            wrong[path.name] = differing(trainer, expected)

        plan = split_plan("three", module, dist.get_world_size())
        fit = trainer(OSDPStrategy(plan=plan, batch_size="keep"), max_steps=4, callbacks=[AtStart(compare)])
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=path)
    return wrong


@pytest.mark.parametrize("names", [("fused", "plain_sgd"), slow(("foreach", "momentum"))])
def test_a_single_device_and_ranks_go_on_with_each_others_checkpoints(ranks, tmp_path, names):
    given = {"folder": str(tmp_path), "names": names}
    ranks(2).run(save, **given)
    files = [f"{name}.{kind}" for name in names for kind in ("ckpt", "consolidated")]
    assert ranks(1).run(on_one_device, **given)[0] == {file: [] for file in files}
    assert ranks(2).run(back_again, **given)[0] == {f"{name}.consolidated": [] for name in names}


def started(**options):
    """A Trainer that trains a small model under a plan, and the arguments of its fit."""
    module = OddMLP()
    plan = plan_for(module, "mixed", world_size=dist.get_world_size())
    kind = options.pop("state_dict_type", "full")
    fit = trainer(OSDPStrategy(plan=plan, batch_size="keep", state_dict_type=kind), **options)
    return fit, (module, module.loader(dist.get_rank(), dist.get_world_size()))


def remote():
    """A step after two that were saved on another file system, and errors of shards there, or of nothing."""
    fit, given = started(max_steps=2)
    fit.fit(*given)
    fit.save_checkpoint("memory://run/two.ckpt")
    expected = fit.strategy.whole_state_dict(on_all_ranks=True)
    again, given = started(max_steps=3, callbacks=[AtStart(lambda trainer: states.append(whole(trainer)))])
    states = []

    def whole(trainer):
        return trainer.strategy.whole_state_dict(on_all_ranks=True)

    again.fit(*given, ckpt_path="memory://run/two.ckpt")
    sharded, given = started(state_dict_type="sharded", max_steps=1)
    sharded.fit(*given)
    keeper = ModelCheckpoint(dirpath="memory://run")
    keeping, with_keeper = started(state_dict_type="sharded", enable_checkpointing=True, callbacks=[keeper])
    missing, without = started()
    return {
        "steps": again.global_step,
        "same": all(torch.equal(states[0][name], value) for name, value in expected.items()),
        "sharded": failure(lambda: sharded.save_checkpoint("memory://run/shards")),
        "keeper": failure(lambda: keeping.fit(*with_keeper)),
        "missing": failure(lambda: missing.fit(*without, ckpt_path="memory://run/none.ckpt")),
    }


class Slow(AsyncCheckpointIO):
    """Has not begun to write when it is asked to end."""

    def save_checkpoint(self, *args, **kwargs):
        self._ensure_setup()
        self._executor.submit(time.sleep, 0.5)
        super().save_checkpoint(*args, **kwargs)


def written_behind():
    """Tells if a checkpoint that is written beside training is there after it, and if `CompleteFiles` wrote it."""
    io, folder = Slow(), shared_folder()
    keeper = ModelCheckpoint(dirpath=folder, filename="one", save_on_train_epoch_end=True)
    fit, given = started(max_steps=2, plugins=[io], enable_checkpointing=True, callbacks=[keeper])
    fit.fit(*given)
    dist.barrier()
    return (folder / "one.ckpt").exists(), type(io.checkpoint_io) is CompleteFiles


def test_a_full_checkpoint_on_another_file_system_is_resumed_from_and_shards_are_refused(ranks):
    for found in ranks(2).run(remote):
        assert found["steps"] == 3
        assert found["same"]
        for name in ("sharded", "keeper"):
            kind, text = found[name]
            assert kind == "ConfigurationError"
            assert text.startswith('Expected a local path with state_dict_type="sharded", got ')
        assert "Expected a checkpoint, one file, at 'memory://run/none.ckpt', but" in found["missing"][1]


def test_training_ends_when_what_is_written_beside_it_is_there(ranks):
    assert ranks(2).run(written_behind) == [(True, True)] * 2
