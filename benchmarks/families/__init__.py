"""Models of many kinds for measuring: none is downloaded, each has a few to tens of megabytes of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.families.base import OPTIMIZERS, Batch, Family
from benchmarks.families.dense import OddMLP
from benchmarks.families.shapes import SHAPES
from benchmarks.families.text import Encoder, EncoderDecoder, LargeVocabulary, LlamaLayer, MinGPT, TiedGPT
from benchmarks.families.vision import Convolutional, HierarchicalTransformer
from examples.mingpt.model import Block as GPTBlock
from examples.vision.model import Block as ViTBlock

FAMILIES: dict[str, type[Family]] = {
    "mingpt": MinGPT,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
    "hierarchical_vit": HierarchicalTransformer,
    "convolutional": Convolutional,
    "odd_mlp": OddMLP,
    "tied": TiedGPT,
    "large_vocabulary": LargeVocabulary,
}
"""Every family by name."""

BLOCKS = (GPTBlock, LlamaLayer, ViTBlock)
"""Modules that people make units of, or checkpoint."""


def build(name: str, *, optimizer: str = "adamw", seed: int = 0) -> Family:
    """The named family with the weights of a seed, whatever was drawn before.

    Args:
        name: of `FAMILIES` or `SHAPES`.
        optimizer: name of `OPTIMIZERS` that it trains with.
        seed: of its weights.

    Raises:
        ValueError: there is no such family or optimizer.
    """
    families: dict[str, Callable[[str], Family]] = {**FAMILIES, **SHAPES}
    for what, given, known in (("family", name, families), ("optimizer", optimizer, OPTIMIZERS)):
        if given not in known:
            raise ValueError(f"Expected {what} to be one of {tuple(known)}, got {given!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return families[name](optimizer)


__all__ = ["BLOCKS", "FAMILIES", "OPTIMIZERS", "SHAPES", "Batch", "Family", "build"]
