"""Whether gradients add up over smaller micro-batches: the loss of a batch is the mean of its halves' losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_osdp.profiler.step.run_step import as_eager, loss_in, samples_of
from lightning_osdp.profiler.step.snapshot import untouched

_DROPOUTS = frozenset(
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
        *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
    )
)
_ROUNDING = 64
"""Machine epsilons of the loss's dtype by which kernels of different batch sizes may differ."""


def why_not_mean(module: nn.Module, run: Callable[[Any], Any], batch: Any, *, batch_size: int) -> str | None:
    """Why the loss of this batch is not, or may not be, the mean of the losses of its halves; None if it is.

    Runs the step without gradients and leaves the module as it was. Dropout is off, and batch statistics are not.
    """
    with as_eager(module):
        return next(_obstacles(module, run, batch, batch_size), None)


def _obstacles(module: nn.Module, run: Callable[[Any], Any], batch: Any, batch_size: int) -> Iterator[str]:
    """Reasons against it; each holds only if none before it does."""
    if batch_size < 2:
        yield "batches of one sample do not show whether the loss of more is their mean"
    if any(parameter.is_meta for parameter in module.parameters()):
        yield "a model without values does not show whether the loss of a batch is the mean over its samples"
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and child.training:
            yield f"{name} normalises over the samples of a micro-batch"
    samples, middle = range(batch_size), batch_size // 2
    halves = [samples[:middle], samples[middle:], samples[::2], samples[1::2]]
    try:
        parts = [samples_of(batch, batch_size, half) for half in halves]
        if any(part is None for part in parts):
            yield f"no tensor of the batch has {batch_size} samples first"
        whole, again = _loss(module, run, batch, seed=0), _loss(module, run, batch, seed=1)
        losses = [_loss(module, run, part, seed=0) for part in parts]
    except Exception as error:
        yield f"half a batch cannot be run without gradients ({type(error).__name__}: {error})"
        raise
    if not whole.dtype.is_floating_point or torch.finfo(whole.dtype).bits < 32:
        yield f"a loss in {whole.dtype} is too coarse to be compared with the mean of its halves"
    if not torch.equal(whole, again):
        yield "the loss is random, and not by dropout alone, so that it cannot be compared with that of its halves"
    scale = max(abs(float(loss)) for loss in (whole, *losses))
    weighted = [float(loss) * len(half) / batch_size for loss, half in zip(losses, halves, strict=True)]
    for mean in (sum(weighted[:2]), sum(weighted[2:])):
        if abs(float(whole) - mean) > _ROUNDING * torch.finfo(torch.float32).eps * scale:
            yield f"the loss of a batch is not the mean of its halves' losses ({float(whole):.7g}, not {mean:.7g})"


def _loss(module: nn.Module, run: Callable[[Any], Any], batch: Any, *, seed: int) -> torch.Tensor:
    """Without dropout: torch's functions drop nothing, and modules below that may drop something evaluate."""
    with untouched(module), torch.no_grad(), _NothingDropped():
        for child in module.modules():
            if child is not module and _may_drop(child):
                child.training = False
        torch.manual_seed(seed)
        return loss_in(run(batch)).detach().clone()


def _may_drop(module: nn.Module) -> bool:
    """Whether it may be a dropout: a module without tensors, or with a number whose name has "drop" in it."""
    has_tensors = any(True for _ in chain(module.parameters(), module.buffers()))
    return not has_tensors or any("drop" in name and isinstance(value, float) for name, value in vars(module).items())


class _NothingDropped(TorchFunctionMode):
    """Switches dropout off, also inside of attention, which takes a probability."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return func(**{**named, **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)
