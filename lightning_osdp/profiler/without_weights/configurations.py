"""Configurations of transformers as models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from lightning_osdp.core.text.nearest import nearest
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.without_weights.imported import SETTINGS, built
from lightning_osdp.profiler.without_weights.model import NUM_SAMPLES, DescribedModel


def from_configuration(model: str, settings: Mapping[str, Any], sequence_length: int) -> DescribedModel:
    """The model of a configuration, by its class or its file, and a batch of so many tokens a sample."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"Expected transformers for the configuration {model!r}, but it is not installed: pip install transformers."
        ) from error
    config = _configuration(transformers, model, settings)
    config.use_cache = False
    with torch.device("meta"):
        module = built(f"configuration {model!r}", SETTINGS, transformers.AutoModelForCausalLM.from_config, config)
    module.train()

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = module(**batch).loss
        return loss

    tokens = torch.zeros(NUM_SAMPLES, sequence_length, dtype=torch.long)
    return DescribedModel(
        module=module,
        batch={"input_ids": tokens, "labels": tokens.clone()},
        run=run,
        optimizers=lambda module: [AdamW(module.parameters())],
        tokens=sequence_length,
    )


def _configuration(transformers: ModuleType, model: str, settings: Mapping[str, Any]) -> Any:
    if model.endswith(".json"):
        try:
            entries = json.loads(Path(model).read_text(encoding="utf-8"))
            name = entries["model_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"Expected a configuration of transformers at {model!r}, with its model_type, but it cannot be read:"
                f" {error!r}."
            ) from error
        entries = {**{key: value for key, value in entries.items() if key != "model_type"}, **settings}
        return built(f"configuration {model!r}", SETTINGS, transformers.AutoConfig.for_model, name, **entries)
    kind = getattr(transformers, model, None) if model.endswith("Config") else None
    if kind is None:
        names = [name for name in dir(transformers) if name.endswith("Config")]
        hint = nearest(model, names, "Its name ends in Config.")
        raise ConfigurationError(
            "Expected the name of a configuration of transformers, the path of its .json, or package.module:Name, got"
            f" {model!r}. {hint}"
        )
    return built(f"configuration {model!r}", SETTINGS, kind, **settings)
