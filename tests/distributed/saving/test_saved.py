"""Checkpoints between ranks and a single device, consolidated ones too."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fits import trainer
from split_models import AtStart, SplitNet, consolidate, differing, split_plan, unequal

from lightning_osdp import OSDPStrategy

pytestmark = pytest.mark.distributed


OPTIMIZERS = {
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "plain_sgd": (torch.optim.SGD, {"lr": 0.05}),
}
"""Of parameter groups that are not in the model's order, with frozen parameters in one."""


class Saved(SplitNet):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.save_hyperparameters()

    def configure_optimizers(self):
        kind, options = OPTIMIZERS[self.optimizer_name]
        groups = super().configure_optimizers().param_groups
        return kind([{key: group[key] for key in ("params", "weight_decay")} for group in groups], **options)


def save(folder):
    """Three steps in slices and whole, with each optimizer; saved as a file and as shards."""
    for index, name in enumerate(OPTIMIZERS):
        module = Saved(name)
        plan = split_plan("whole" if index % 2 else "four", module, dist.get_world_size(), is_shifted=True)
        fit = trainer(OSDPStrategy(plan=plan, batch_size="keep"), max_steps=3)
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        fit.save_checkpoint(Path(folder) / f"{name}.ckpt")
        fit.strategy._state_dict_type = "sharded"
        fit.save_checkpoint(Path(folder) / name)


def on_one_device(folder):
    """What is not as in the file where a single device resumes from it and from the consolidated shards, and loads."""
    wrong = {}
    for name in OPTIMIZERS:
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


def back_again(folder):
    """What is not as in the file where ranks resume from consolidated shards."""
    wrong = {}
    for name in OPTIMIZERS:
        path, module = Path(folder) / f"{name}.consolidated", Saved(name)
        expected = torch.load(Path(folder) / f"{name}.ckpt", weights_only=True)

        def compare(trainer, path=path, expected=expected):
            wrong[path.name] = differing(trainer, expected)

        plan = split_plan("three", module, dist.get_world_size())
        fit = trainer(OSDPStrategy(plan=plan, batch_size="keep"), max_steps=4, callbacks=[AtStart(compare)])
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=path)
    return wrong


def test_a_single_device_and_ranks_go_on_with_each_others_checkpoints(ranks, tmp_path):
    ranks(2).run(save, folder=str(tmp_path))
    names = [f"{name}.{kind}" for name in OPTIMIZERS for kind in ("ckpt", "consolidated")]
    assert ranks(1).run(on_one_device, folder=str(tmp_path))[0] == {name: [] for name in names}
    consolidated = {f"{name}.consolidated": [] for name in OPTIMIZERS}
    assert ranks(2).run(back_again, folder=str(tmp_path))[0] == consolidated
