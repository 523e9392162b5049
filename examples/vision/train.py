"""Trains the vision transformer from a YAML file, then prints how many shapes it names rightly.

.. code-block:: bash

    python examples/vision/train.py fit --config examples/vision/configs/osdp_cpu.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

# run as a script, Python looks for modules beside this file only, in every rank
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning_osdp  # noqa: F401 -- registers the strategy "osdp"
from examples.mingpt.train import decay_steps
from examples.vision.data import SHAPES, ShapesDataModule
from examples.vision.module import ShapeClassifier


class VisionCLI(LightningCLI):
    """Sizes that must agree are given once; the run ends with a report."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"model.num_classes": len(SHAPES)})
        parser.link_arguments("data.image_size", "model.image_size")
        parser.link_arguments("trainer.max_steps", "model.decay_steps", compute_fn=decay_steps)

    def after_fit(self) -> None:
        """Prints the report on rank 0, which needs none of the other ranks for it."""
        if self.trainer.is_global_zero:
            print(report(self.trainer))


def report(trainer: Trainer) -> str:
    """Returns the accuracy and the checkpoint's path of a finished fit, as text."""
    accuracy = trainer.callback_metrics.get("val_accuracy")
    checkpoint = trainer.checkpoint_callback
    path = checkpoint.best_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
    return "\n".join(
        [
            "Validation accuracy: "
            + ("not measured" if accuracy is None else f"{accuracy:.2%}")
            + f"; of guessing one of {len(SHAPES)} shapes ({', '.join(SHAPES)}): {1 / len(SHAPES):.2%}",
            f"Checkpoint: {path or 'none was written (fast_dev_run writes none)'}",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs a subcommand of the Trainer.

    Args:
        arguments: Of the command line; those of this process by default.
    """
    VisionCLI(
        ShapeClassifier,
        ShapesDataModule,
        args=arguments,
        auto_configure_optimizers=False,  # the module brings its own
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
