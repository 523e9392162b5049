"""Trains the adder from a YAML file, then prints how many held-out sums it gets right, and a few of them.

.. code-block:: bash

    python examples/addition/train.py fit --config examples/addition/configs/osdp_cpu.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from typing_extensions import override

# run as a script, Python looks for modules beside this file only, in every rank
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning_osdp  # noqa: F401 -- registers the strategy "osdp"
from examples.addition.data import PROMPT_LENGTH, AdditionDataModule, to_text
from examples.addition.module import Adder
from examples.mingpt.train import decay_steps

NUM_SHOWN = 5


class AdditionCLI(LightningCLI):
    """The learning rate falls until the last step; the run ends with a report."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("trainer.max_steps", "model.decay_steps", compute_fn=decay_steps)

    def after_fit(self) -> None:
        """Prints the report on rank 0, which needs none of the other ranks for it."""
        if self.trainer.is_global_zero:
            print(report(self.trainer, self.datamodule))


def report(trainer: Trainer, datamodule: AdditionDataModule) -> str:
    """Returns the held-out accuracy, a few sums and the checkpoint's path of a finished fit, as text."""
    checkpoint = trainer.checkpoint_callback
    if not isinstance(checkpoint, ModelCheckpoint) or not checkpoint.best_model_path:
        return "No checkpoint was written (fast_dev_run writes none), so there is nothing to add with."
    path = Path(checkpoint.best_model_path)
    if not path.is_file():
        return f"Checkpoint: {path}\nIt is sharded: to add with it, train with the strategy's state_dict_type: full."
    digits = datamodule.held_out_sums.digits
    # loaded on one CPU, whatever trained it
    module = Adder.load_from_checkpoint(path, map_location="cpu").eval()
    sums = module.add(digits[:, :PROMPT_LENGTH])
    is_right = (sums == digits[:, PROMPT_LENGTH:]).all(dim=1)
    share = float(is_right.double().mean())
    return "\n".join(
        [
            f"Held-out sums: {int(is_right.sum()):,} of {len(digits):,} are right, {share:.2%}",
            *_shown(digits, sums, is_right),
            f"Checkpoint: {path}",
        ]
    )


def _shown(digits: Tensor, sums: Tensor, is_right: Tensor) -> list[str]:
    """Returns a few sums as the model has them, wrong ones first."""
    answered = torch.cat((digits[:, :PROMPT_LENGTH], sums), dim=1)
    order = is_right.int().argsort(stable=True)[:NUM_SHOWN].tolist()
    return [f"  {to_text(answered[index])}  {'right' if is_right[index] else 'WRONG'}" for index in order]


def main(arguments: list[str] | None = None) -> None:
    """Runs a subcommand of the Trainer.

    Args:
        arguments: Of the command line; those of this process by default.
    """
    AdditionCLI(
        Adder,
        AdditionDataModule,
        args=arguments,
        auto_configure_optimizers=False,  # the module brings its own
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
