"""Described models: on the meta device, with a batch, a training step and optimizers to profile them by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.core.axes import DEFAULT_ACTIVATIONS
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.model import TrainingStep, configured_optimizers, profile_model
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.without_weights.imported import built

PRECISIONS: Mapping[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""Lightning's names -> dtype in which units are gathered, computed and reduced, and where it is true, at rest, too."""
_OPTIMIZERS = "Let configure_optimizers need no Trainer and no values, or name an optimizer."
NUM_SAMPLES = 2
"""Samples that are traced; bytes and seconds are affine in the number of samples."""


@dataclass(frozen=True, kw_only=True)
class DescribedModel:
    """Model on the meta device, with its batch, training step and optimizers."""

    module: nn.Module
    batch: Any
    run: Callable[[Any], Any]
    """Takes the batch and returns the loss."""
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None = None
    """Takes the module and returns its optimizers; None: the module's own ``configure_optimizers``."""
    tokens: int = 0
    """Tokens of a sample; 0 where they are not known."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def document(self) -> dict[str, Any]:
        """Class, number of parameters, and sizes of a sample's tensors by name, for JSON."""
        named = self.batch if isinstance(self.batch, dict) else {}
        inputs = {name: list(value.shape[1:]) for name, value in named.items() if isinstance(value, Tensor)}
        return {"class": type(self.module).__name__, "num_parameters": self.num_parameters, "inputs": inputs}

    def profile(
        self,
        rates: DeviceRates,
        *,
        precision: str = "bf16-mixed",
        activations: Sequence[str] = DEFAULT_ACTIVATIONS,
        exchanges: bool = False,
        on_host: bool = False,
        progress: Progress = silent,
    ) -> ModelProfile:
        """Profile of the model by the rates of a device, see `profile_model`.

        Operations are those that torch runs on CPU: kernels of CUDA, such as those of attention, save other bytes.

        Raises:
            ConfigurationError: there is no such precision, or the device has no rate for it.
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
        optimizers = partial(built, "optimizers of the model", _OPTIMIZERS, self.optimizers or configured_optimizers)
        step = TrainingStep(run, optimizers, ComputePrecision(dtype, reduce_dtype=dtype))
        with _at_rest(self.module, dtype if "true" in precision else None):
            return profile_model(
                self.module,
                self.batch,
                step,
                rates=rates,
                activations=activations,
                exchanges=exchanges,
                on_host=on_host,
                progress=progress,
            )


@contextmanager
def _at_rest(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Casts parameters and buffers within the context, as Lightning casts a model that is to have one dtype."""
    whole = [(each, each.data) for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
    for each, data in whole:
        each.data = data.to(dtype)
    try:
        yield
    finally:
        for each, data in whole:
            each.data = data
