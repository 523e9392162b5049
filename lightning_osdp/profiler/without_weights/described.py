"""Models from descriptions: import paths of LightningModules, and configurations of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.model import module_step
from lightning_osdp.profiler.without_weights.configurations import from_configuration
from lightning_osdp.profiler.without_weights.imported import SETTINGS_ADVICE, built, imported
from lightning_osdp.profiler.without_weights.model import NUM_SAMPLES, DescribedModel

_LORA = 'Give as lora what peft.LoraConfig takes, as in {"r": 16, "target_modules": ["q_proj", "v_proj"]}.'
_DATA = "Give as data a function that takes a number of samples and returns a batch of them."


def described(
    model: str,
    *,
    settings: Mapping[str, Any],
    sequence_length: int | None,
    data: str | None,
    task: str | None,
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None,
    lora: Mapping[str, Any] | None,
) -> DescribedModel:
    """Model from its description, without memory for its weights.

    Args:
        model: import path of a LightningModule or of a function that returns one, ``package.module:Name``; or a
            configuration of ``transformers``: the path of its JSON file or the name of its class.
        settings: arguments of the module, or entries that replace those of the configuration.
        sequence_length: tokens of a sample, or values of a sound, for a configuration; None: 2048 tokens.
        data: import path of a function that takes a number of samples and returns a batch, for a LightningModule; None:
            the module's own ``train_dataloader`` gives the batch.
        task: task of the configuration's model, as in ``transformers.AutoModelFor...``; None: that of the
            configuration's architectures, or its first one.
        optimizers: takes the module and returns its optimizers; None: the LightningModule's own, or AdamW.
        lora: arguments of peft's ``LoraConfig``, whose adapters alone are then trained; None: the model as it is.

    Raises:
        ConfigurationError: there is no such model, data or task, peft is not there, or building something fails.
    """
    if ":" in model:
        for option, value in (("sequence", sequence_length), ("task", task)):
            if value is not None:
                raise ConfigurationError(f"Expected {option} with a configuration, got {value!r} with {model!r}.")
        described_model = _lightning_module(model, settings, data)
    elif data is None:
        described_model = from_configuration(model, settings, sequence_length, task)
    else:
        raise ConfigurationError(
            f"Expected data with a LightningModule, got {data!r} with the configuration {model!r}. Leave data out: its"
            " batches are made."
        )
    if lora is not None:
        _add_adapters(described_model.module, lora)
    return described_model if optimizers is None else replace(described_model, optimizers=optimizers)


def _add_adapters(module: nn.Module, lora: Mapping[str, Any]) -> None:
    """Adds peft's LoRA adapters to a module in place, and freezes all else."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigurationError("Expected peft for lora, but it is not installed: pip install peft.") from error
    config = built("LoraConfig of lora", _LORA, LoraConfig, **lora)
    with torch.device("meta"):
        built(f"adapters of {type(module).__name__}", _LORA, inject_adapter_in_model, config, module)


def _lightning_module(model: str, settings: Mapping[str, Any], data: str | None) -> DescribedModel:
    make = imported(model)
    with torch.device("meta"):
        module = built(f"model {model!r}", SETTINGS_ADVICE, make, **settings)
    if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
        raise ConfigurationError(
            f"Expected {model!r} to make a LightningModule, got {type(module).__name__}. Name its class, or a function"
            " that returns one."
        )
    if hasattr(module, "configure_model"):
        with torch.device("meta"):
            built(f"model {model!r}", SETTINGS_ADVICE, module.configure_model)  # type: ignore[arg-type]

    def first_batch() -> Any:
        return next(iter(module.train_dataloader()))  # type: ignore[operator]

    if data is not None:
        batch = built(f"data {data!r}", _DATA, imported(data), NUM_SAMPLES)
    else:
        batch = built(f"a batch of {model!r}.train_dataloader", _DATA, first_batch)
    return DescribedModel(module=module, batch=batch, run=partial(module_step, module))
