"""Inputs of models of transformers, from the parameters of their forward and their configurations."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.without_weights.model import NUM_SAMPLES

DATA_ADVICE = "Write a LightningModule of it, and name that as package.module:Name with --data."
_TOKENS = 2048
_PIXELS = 224
_KNOWN = ("input_ids", "pixel_values", "input_values", "input_features")
_LABELS_OF_TOKENS = ("CausalLM", "MaskedLM", "Seq2SeqLM", "SpeechSeq2Seq", "TokenClassification")
_LABELS_OF_SAMPLES = ("SequenceClassification", "ImageClassification", "AudioClassification")
_POSITIONS = re.compile(r"(^|\.)(wpe|(\w+_)?positions?(_embeddings?)?)$")
"""Names of embeddings of positions."""
_NO_TEXT_POSITIONS = re.compile("relative|vision|visual|audio")
"""Names of embeddings of distances between positions, which have no end, and of positions in pictures and sounds."""


def batch_for(module: nn.Module, task: str, sequence_length: int | None) -> dict[str, Any]:
    """Batch of zeros, with labels for the task.

    Args:
        module: a model of transformers.
        task: the task of its class.
        sequence_length: tokens of a text, or values of a sound; None: 2048 tokens.

    Raises:
        ConfigurationError: the model takes inputs that cannot be made, takes a sound and no length is given, takes no
            sequence and a length is given, or has fewer positions.
    """
    takes = inspect.signature(module.forward).parameters
    title, spectrogram = type(module).__name__, _spectrogram(module.config)
    has_text = "input_ids" in takes or task in _LABELS_OF_TOKENS
    has_sound = "input_values" in takes and spectrogram is None
    if ("input_features" in takes and spectrogram is None) or not {*takes} & {*_KNOWN}:
        raise ConfigurationError(
            f"Expected {title} to take inputs that can be made ({', '.join(_KNOWN)} of known sizes), got"
            f" {', '.join(takes)}. {DATA_ADVICE}"
        )
    if has_sound and sequence_length is None:
        raise ConfigurationError(
            f"Expected a sequence for {title}: values of a sound, as in --sequence 160000 for ten seconds at 16 kHz."
        )
    if sequence_length is not None and not (has_text or has_sound):
        raise ConfigurationError(f"Expected no sequence for {title}, which takes none, got {sequence_length}.")
    length = _TOKENS if sequence_length is None else sequence_length
    most = _positions(module) if has_text else None
    if length < 1 or (most is not None and length > most):
        learned = "" if most is None else f", and at most {most}, which is how many positions {title} knows"
        raise ConfigurationError(f"Expected a sequence of at least 1{learned}, got {length}: --sequence {most or 1}.")
    zeros, numbers = partial(torch.zeros, NUM_SAMPLES), partial(torch.zeros, NUM_SAMPLES, dtype=torch.long)
    batch: dict[str, Any] = {}
    if "input_ids" in takes:
        batch["input_ids"] = numbers(length)
    if "pixel_values" in takes:
        batch["pixel_values"] = zeros(*_picture(module.config))
    if "input_values" in takes or "input_features" in takes:
        name = "input_values" if "input_values" in takes else "input_features"
        batch[name] = zeros(*(spectrogram or (length,)))
    if task in _LABELS_OF_TOKENS:
        batch["labels"] = numbers(length)
    elif task in _LABELS_OF_SAMPLES:
        batch["labels"] = numbers()
    elif task == "QuestionAnswering":
        batch |= {"start_positions": numbers(), "end_positions": numbers()}
    elif "return_loss" in takes:
        batch["return_loss"] = True
    return batch


def _spectrogram(config: Any) -> tuple[int, int] | None:
    """Sizes of a spectrogram for Whisper, or for audio spectrogram transformers; None for other models."""
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if bins is None:
        return None
    positions = getattr(config, "max_source_positions", None)
    if positions is not None:
        return bins, 2 * positions  # the encoder's convolution makes one position of two frames
    return None if frames is None else (frames, bins)


def _picture(config: Any) -> tuple[int, ...]:
    of_pictures = getattr(config, "vision_config", config)
    size = getattr(of_pictures, "image_size", None) or _PIXELS
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    return getattr(of_pictures, "num_channels", 3), *sides


def _positions(module: nn.Module) -> int | None:
    """Least number of text positions that are learned or in a table; a model without values would not fail beyond."""
    sizes = [
        child.num_embeddings - getattr(child, "offset", 0 if child.padding_idx is None else child.padding_idx + 1)
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding) and _POSITIONS.search(name) and not _NO_TEXT_POSITIONS.search(name)
    ]
    return min(sizes, default=None)
