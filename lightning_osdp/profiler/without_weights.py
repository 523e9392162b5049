"""Models that are only described: built on the meta device, and profiled by the rates of a device."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.nearest import nearest
from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.model import TrainingStep, own_step, profile_model
from lightning_osdp.profiler.precision import ComputePrecision

PRECISIONS: Mapping[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""Lightning's names -> dtype that units are gathered, computed and reduced in; parameters at rest are float32."""
_SETTINGS = "Give what it takes as settings."
_DATA = "Give as data a function that takes a number of samples and returns a batch of them."
_NUM_SAMPLES = 2
"""That are traced; what grows with samples is affine in them."""


@dataclass(frozen=True, kw_only=True)
class DescribedModel:
    """A model on the meta device, with what it takes to run its training step."""

    module: nn.Module
    batch: Any
    run: Callable[[Any], Any]
    """Takes the batch, returns the loss."""
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None = None
    """None: the module's own."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def profile(
        self, rates: DeviceRates, *, precision: str = "bf16-mixed", progress: Progress = silent
    ) -> ModelProfile:
        """What it takes on a device that one does not have.

        Operations are those that torch runs on CPU: kernels of CUDA, such as those of attention, save other bytes.

        Raises:
            ConfigurationError: no such precision, or the device has no rate for it.
            ProfileError: the training step does not run without values.
        """
        if precision not in PRECISIONS:
            raise ConfigurationError(f"precision must be one of {tuple(PRECISIONS)}, got {precision!r}.")
        dtype = PRECISIONS[precision]
        computes_in = str(dtype or torch.float32).removeprefix("torch.")
        if computes_in not in rates.flops_per_s:
            raise ConfigurationError(
                f"Expected a precision in which the device computes, {', '.join(rates.flops_per_s)}, got"
                f" {precision!r}, which computes in {computes_in}."
            )

        def run(batch: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype, enabled="mixed" in precision):
                return self.run(batch)

        # Lightning reduces in the dtype that it computes in
        step = TrainingStep(run, self.optimizers, ComputePrecision(dtype, reduce_dtype=dtype))
        return profile_model(self.module, self.batch, step, rates=rates, progress=progress)


def described(model: str, *, settings: Mapping[str, Any], sequence_length: int, data: str | None) -> DescribedModel:
    """A model from its description, without memory for its weights.

    Args:
        model: import path of a LightningModule or of a function that returns one, ``package.module:Name``; or a
            configuration of ``transformers``: the path of its JSON file or the name of its class.
        settings: arguments of the module, or entries of the configuration that are to be others.
        sequence_length: tokens of a sample, for a configuration.
        data: import path of a function of the number of samples that returns a batch, for a LightningModule; None: its
            own ``train_dataloader`` has one.

    Raises:
        ConfigurationError: there is no such thing, or it cannot be built.
    """
    if ":" in model:
        return _lightning_module(model, settings, data)
    if data is not None:
        raise ConfigurationError(
            f"Expected data with a LightningModule, got {data!r} with the configuration {model!r}. Leave data out: its"
            " batches are of sequence tokens."
        )
    return _language_model(model, settings, sequence_length)


def _lightning_module(model: str, settings: Mapping[str, Any], data: str | None) -> DescribedModel:
    make = _imported(model)
    with torch.device("meta"):
        module = _built(f"model {model!r}", _SETTINGS, make, **settings)
    if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
        raise ConfigurationError(
            f"Expected {model!r} to make a LightningModule, got {type(module).__name__}. Name its class, or a function"
            " that returns one."
        )
    if hasattr(module, "configure_model"):
        with torch.device("meta"):
            _built(f"model {model!r}", _SETTINGS, module.configure_model)  # type: ignore[arg-type]

    def first_batch() -> Any:
        return next(iter(module.train_dataloader()))  # type: ignore[operator]

    if data is not None:
        batch = _built(f"data {data!r}", _DATA, _imported(data), _NUM_SAMPLES)
    else:
        batch = _built(f"a batch of {model!r}.train_dataloader", _DATA, first_batch)
    return DescribedModel(module=module, batch=batch, run=partial(own_step, module))


def _language_model(model: str, settings: Mapping[str, Any], sequence_length: int) -> DescribedModel:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"Expected transformers for the configuration {model!r}, but it is not installed: pip install transformers."
        ) from error
    config = _configuration(transformers, model, settings)
    config.use_cache = False
    with torch.device("meta"):
        module = _built(f"configuration {model!r}", _SETTINGS, transformers.AutoModelForCausalLM.from_config, config)
    module.train()

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = module(**batch).loss
        return loss

    tokens = torch.zeros(_NUM_SAMPLES, sequence_length, dtype=torch.long)
    return DescribedModel(
        module=module,
        batch={"input_ids": tokens, "labels": tokens.clone()},
        run=run,
        optimizers=lambda module: [AdamW(module.parameters())],
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
        return _built(f"configuration {model!r}", _SETTINGS, transformers.AutoConfig.for_model, name, **entries)
    kind = getattr(transformers, model, None) if model.endswith("Config") else None
    if kind is None:
        names = [name for name in dir(transformers) if name.endswith("Config")]
        hint = nearest(model, names, "Its name ends in Config.")
        raise ConfigurationError(
            "Expected the name of a configuration of transformers, the path of its .json, or package.module:Name, got"
            f" {model!r}. {hint}"
        )
    return _built(f"configuration {model!r}", _SETTINGS, kind, **settings)


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"Expected {path!r} to be package.module:Name, but {error}. Modules of the current folder are found by"
            " `python -m lightning_osdp`."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        hint = nearest(name, dir(module), "Name one that it has.")
        raise ConfigurationError(f"Expected a class or a function {name!r} in {module_name!r}, got {found!r}. {hint}")
    made: Callable[..., Any] = found
    return made


def _built(what: str, advice: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return make(*args, **kwargs)
    except Exception as error:  # it may do anything
        raise ConfigurationError(f"Expected {what} to be built, but it failed: {error!r}. {advice}") from error
