"""Machines that are not here, and models of the sizes that are trained on them, as numbers and names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.families.stages import Stages
from lightning_osdp import Machine


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine, and the precision in which it trains."""

    name: str
    spec: str
    """As `Machine.parse` reads it."""
    precision: str

    @property
    def machine(self) -> Machine:
        """With its rates and links."""
        return Machine.parse(self.spec)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer, by its sizes."""

    family: str
    layers: str
    """Blocks and their width, such as ``8 x 1024 + 4 x 2048``."""
    sequence_length: int
    """Tokens of a sample."""
    vocabulary_size: int

    @property
    def widths(self) -> list[int]:
        """Of each block."""
        stages = [stage.split(" x ") for stage in self.layers.split(" + ")]
        return [int(width) for num, width in stages for _ in range(int(num))]

    def on_meta(self) -> Stages:
        """The model without memory."""
        with torch.device("meta"):
            return Stages(self.widths, vocabulary_size=self.vocabulary_size, sequence_length=self.sequence_length)


TITANS = Place(name="8 TITAN RTX, PCIe 3.0", spec="8 titan-rtx", precision="32-true")
"""The paper's. These cards reach each other through the host's memory."""
