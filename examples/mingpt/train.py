"""Trains minGPT from a YAML file, then prints how well it did and what it writes.

.. code-block:: bash

    python examples/mingpt/train.py fit --config examples/mingpt/configs/osdp_cpu.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

# run as a script, Python looks for modules beside this file only, in every rank
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning_osdp  # noqa: F401 -- registers the strategy "osdp"
from examples.mingpt.data import VOCABULARY_SIZE, TextDataModule
from examples.mingpt.module import MinGPT

PROMPT = b"    def __init__(self"
NUM_SAMPLED_BYTES = 400
TEMPERATURE = 0.8
SEED = 1


class MinGPTCLI(LightningCLI):
    """Sizes that must agree are given once; the run ends with a report."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"model.vocabulary_size": VOCABULARY_SIZE})
        parser.link_arguments("data.sequence_length", "model.sequence_length")
        parser.link_arguments("trainer.max_steps", "model.decay_steps", compute_fn=decay_steps)

    def after_fit(self) -> None:
        """Prints the report on rank 0, which needs none of the other ranks for it."""
        if self.trainer.is_global_zero:
            print(report(self.trainer, self.datamodule))


def decay_steps(max_steps: int) -> int | None:
    """Returns where the learning rate ends its fall: at the last step, if there is one."""
    return max_steps if max_steps > 0 else None


def report(trainer: Trainer, datamodule: TextDataModule) -> str:
    """Returns validation loss, a sample and the checkpoint's path of a finished fit, as text."""
    validation_loss = trainer.callback_metrics.get("val_loss")
    lines = [
        "Validation loss: "
        + ("not measured" if validation_loss is None else f"{validation_loss:.3f} nats a byte")
        + f"; of a model that knows byte frequencies only: {datamodule.byte_frequency_loss():.3f}"
    ]
    checkpoint = trainer.checkpoint_callback
    if not isinstance(checkpoint, ModelCheckpoint) or not checkpoint.best_model_path:
        return "\n".join([*lines, "No checkpoint was written (fast_dev_run writes none), so there is no sample."])
    path = Path(checkpoint.best_model_path)
    if path.is_file():
        lines += ["Sample:", sample(path)]
    else:
        lines += ["The checkpoint is sharded: for a sample, train with the strategy's state_dict_type: full."]
    return "\n".join([*lines, f"Checkpoint: {path}"])


def sample(checkpoint_path: Path) -> str:
    """Returns text by the model in a checkpoint, loaded on one CPU whatever trained it."""
    module = MinGPT.load_from_checkpoint(checkpoint_path, map_location="cpu").eval()
    prompt = torch.tensor([list(PROMPT)])  # (1, T)
    generator = torch.Generator().manual_seed(SEED)
    tokens = module.model.generate(prompt, NUM_SAMPLED_BYTES, temperature=TEMPERATURE, generator=generator)
    return bytes(tokens[0].tolist()).decode("ascii", errors="backslashreplace")


def main(arguments: list[str] | None = None) -> None:
    """Runs a subcommand of the Trainer.

    Args:
        arguments: Of the command line; those of this process by default.
    """
    MinGPTCLI(
        MinGPT,
        TextDataModule,
        args=arguments,
        auto_configure_optimizers=False,  # the module brings its own
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
