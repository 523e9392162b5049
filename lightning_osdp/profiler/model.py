"""Profiles a whole model: runs its own training step on a real batch, and leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.progress import Progress, silent
from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.activations import trace_activations
from lightning_osdp.profiler.affine import another_size, resized
from lightning_osdp.profiler.assemble import Timing, assemble
from lightning_osdp.profiler.calls import recorded_calls
from lightning_osdp.profiler.operators import Operator, check_parameters, find_operators
from lightning_osdp.profiler.optimizer import profile_optimizers
from lightning_osdp.profiler.snapshot import untouched
from lightning_osdp.profiler.tensors import tensors_in
from lightning_osdp.profiler.timing import time_operators, time_step

_log = logging.getLogger(__name__)


def profile_model(
    module: nn.Module,
    batch: Any,
    *,
    batch_size: int | None = None,
    training_step: Callable[[Any], Any] | None = None,
    configure_optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None = None,
    compute_dtype: torch.dtype | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    progress: Progress = silent,
) -> ModelProfile:
    """Bytes and seconds of every operator of a model, from running its training step on one batch.

    The step runs several times, forward and backward; parameters, buffers, attributes, gradients and random number
    generators are as before when it returns. Nothing is profiled that the batch does not make the model run.

    Args:
        module: the model, with real parameters on the device that it will train on.
        batch: one batch of its training data, on that device.
        batch_size: samples in the batch; None: the size of the first dimension of its first tensor.
        training_step: takes the batch and returns the loss, or a mapping with it under ``"loss"``; None: the
            module's own ``training_step(batch, 0)``.
        configure_optimizers: returns the optimizers of the module that it is given; None: the module's own method,
            which must return an optimizer or a list of them.
        compute_dtype: dtype of gathered parameters under mixed precision; None: as they are.
        context: makes the context that forward runs in, such as autocast.
        progress: called with each stage as it begins, and how far it has come.

    Raises:
        ProfileError: no loss, a loss without gradient or not finite, no parameters, or an optimizer that cannot be
            run on a copy.
    """
    check_parameters(module)
    if training_step is None:
        training_step = lambda batch: module.training_step(batch, 0)  # type: ignore[operator]  # noqa: E731
    if batch_size is None:
        batch_size = _first_dimension(batch)

    batch = _cast(batch, compute_dtype)

    def run_step(of: Any = batch) -> Any:
        with context():
            return training_step(of)

    progress("tracing the model", "")
    # Every run starts from the same state, random numbers included, and so takes the same path through the model.
    with _computing_in(module, compute_dtype):
        with _rehearsal(module), recorded_calls(module) as calls:
            _check_loss(run_step())
        operators = find_operators(module, calls)
        called = {operator.name for operator in operators}
        last = next((name for name in reversed(calls.ended) if name in called), "")
        with _rehearsal(module):
            static = [*tensors_in([vars(m) for m in module.modules()]), *tensors_in(batch)]
            activations = trace_activations(module, operators, run_step, _loss_in, static, last=last)
        first = _time(module, operators, run_step, batch_size, progress=progress)
        second = _time_at_another_size(module, operators, run_step, batch, batch_size, progress=progress)
    progress("profiling the optimizer", "")
    with untouched(module):
        device = next(module.parameters()).device
        optimizers = profile_optimizers(module, configure_optimizers or _plain_optimizers, device)
    return assemble(
        module,
        operators,
        activations=activations,
        timings=[first, second] if second else [first],
        optimizers=optimizers,
        batch=batch,
        batch_size=batch_size,
        compute_dtype=compute_dtype,
    )


def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point inputs as FSDP's root casts them under mixed precision."""
    if dtype is None:
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


@contextmanager
def _computing_in(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters are in the dtype that FSDP gathers them in, so that autocast makes no copies that training lacks."""
    whole = {p: p.data for p in module.parameters() if dtype is not None and p.is_floating_point() and p.dtype != dtype}
    try:
        for parameter in whole:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in whole.items():
            parameter.data = data


@contextmanager
def _rehearsal(module: nn.Module) -> Iterator[None]:
    with untouched(module), torch.enable_grad():
        yield


def _time(
    module: nn.Module, operators: Sequence[Operator], run_step: Callable[[], Any], size: int, *, progress: Progress
) -> Timing:
    device = next(module.parameters()).device
    stage = f"timing {size} {'sample' if size == 1 else 'samples'}"
    with _rehearsal(module):
        seconds = time_operators(operators, device, run_step, stage=stage, progress=progress)
    progress(stage, "whole step")
    with _rehearsal(module):
        step = time_step(module, device, lambda: _loss_in(run_step()))
    return Timing(size, seconds, step)


def _time_at_another_size(
    module: nn.Module,
    operators: Sequence[Operator],
    run_step: Callable[[Any], Any],
    batch: Any,
    batch_size: int,
    *,
    progress: Progress,
) -> Timing | None:
    """The same for a second size; None, said in the log, where the batch or the model does not allow one."""
    size = another_size(batch_size)
    other = resized(batch, batch_size, size)
    if other is None:
        _log.warning("OSDP: no tensor of the batch has %d samples first: time is taken as proportional.", batch_size)
        return None
    try:
        return _time(module, operators, partial(run_step, other), size, progress=progress)
    except Exception as error:
        _log.warning("OSDP: the model does not run on %d samples (%r): time is taken as proportional.", size, error)
        return None


def _loss_in(returned: Any) -> Tensor:
    loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
    return loss


def _check_loss(returned: Any) -> None:
    advice = "Return the loss, a scalar tensor, or a dict with it under 'loss', from training_step."
    if isinstance(returned, Mapping) and "loss" not in returned:
        raise ProfileError(f"Expected training_step to return a dict with 'loss', got the keys {[*returned]}. {advice}")
    loss = _loss_in(returned)
    if not isinstance(loss, Tensor):
        raise ProfileError(f"Expected training_step to return a loss on the profiling batch, got {loss!r}. {advice}")
    if not loss.requires_grad or loss.numel() != 1:
        raise ProfileError(
            f"Expected the loss to be a scalar that depends on trainable parameters, got shape {list(loss.shape)},"
            f" requires_grad={loss.requires_grad}. {advice}"
        )
    if not torch.isfinite(loss).all():
        raise ProfileError(
            f"Expected a finite loss on the profiling batch, got {loss.item()!r}."
            " Look for NaN in the first training batch, or for a loss that overflows in this precision."
        )


def _first_dimension(batch: Any) -> int:
    tensor = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0), None)
    if tensor is None:
        raise ProfileError(
            f"Cannot tell how many samples the batch holds: found no tensor in {type(batch).__name__}."
            " Pass batch_size to profile_model."
        )
    return int(tensor.shape[0])


def _plain_optimizers(module: nn.Module) -> Sequence[Optimizer]:
    configured = module.configure_optimizers()  # type: ignore[operator]
    optimizers = [configured] if isinstance(configured, Optimizer) else configured
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ProfileError(
            f"Expected configure_optimizers to return an optimizer or a list of optimizers, got {configured!r}."
            " Pass configure_optimizers to profile_model."
        )
    return optimizers
