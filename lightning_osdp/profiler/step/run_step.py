"""Trial runs of the training step on real or fake tensors, with any number of samples; and checks of its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_osdp.errors import ProfileError
from lightning_osdp.operations.splitting import compiled
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.step.snapshot import tensors_in, untouched

TrialRun: TypeAlias = "AbstractContextManager[tuple[Callable[[], Any], Any]]"
"""Yields a function that runs forward once, and its batch; on exit the module is as before."""

_MAX_NAMED = 3
"""Most compiled modules that a note names."""
_WEIGHTS_ONLY = ", and moves weights, for the compiler knows no exchanges of activations"
"""End of a note on compiled modules where other operators may move activations."""
_DROPOUTS = frozenset(
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
        *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
    )
)
_ROUNDING = 64
"""Machine epsilons of the loss's dtype by which kernels of different batch sizes may differ."""


@dataclass(frozen=True)
class StepRunner:
    """Trial runs of a training step on the profiling batch.

    Every trial run starts from one state, random numbers included, and so takes one path through the model.
    """

    module: nn.Module
    batch: Any
    batch_size: int
    run: Callable[[Any], Any]
    """Forward: takes a batch, returns the loss or a mapping with it."""
    device: torch.device
    """Device on which the model trains."""
    blocks: frozenset[nn.Module] | None = None
    """Modules that may be blocks; None: repeated modules."""
    has_one_size: bool = False
    """True where no other number of samples is asked about: bytes and seconds are then taken as proportional to it."""
    changed: set[nn.Parameter] = field(default_factory=set)
    """Parameters that the step has written to in trial runs on fake tensors."""

    @property
    def is_meta(self) -> bool:
        """True if some parameter has no values."""
        return any(parameter.is_meta for parameter in self.module.parameters())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples to follow the step with, its own first."""
        return (self.batch_size,) if self.has_one_size else (self.batch_size, another_size(self.batch_size))

    @contextmanager
    def on_real_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """Trial run with ``size`` samples; raises a `ProfileError` if the step computes from tensors without values."""
        with untouched(self.module, changed=self.changed), torch.enable_grad():
            run, batch = self._trial(self._sized(size))
            yield lambda: _real(run()), batch

    @contextmanager
    def on_fake_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """Trial run with ``size`` samples that allocates and computes nothing.

        Values that a step reads from a model on the meta device, such as a loss that it logs, are taken as one.
        """
        batch = self._sized(size)
        faking = faked(self.module, batch, self.device, assumes_ones=self.is_meta, changed=self.changed)
        with faking as fake_batch:
            yield self._trial(fake_batch)

    def _sized(self, size: int) -> Any:
        sized = self.batch if size == self.batch_size else resized(self.batch, self.batch_size, size)
        if sized is None:
            raise ProfileError(f"no tensor or list of the batch has {self.batch_size} samples first")
        return sized

    def _trial(self, batch: Any) -> tuple[Callable[[], Any], Any]:
        def fresh(leaf: Any) -> Any:
            """Copy of a container, from which a step may take tensors."""
            return copy.copy(leaf) if isinstance(leaf, (MutableMapping, MutableSequence)) else leaf

        return lambda: self.run(tree_map(fresh, batch)), batch


def another_size(batch_size: int) -> int:
    """Second micro-batch size to measure: half of the first, which fits wherever the first does; two after one."""
    return batch_size // 2 if batch_size > 1 else 2


def resized(batch: Any, batch_size: int, new_size: int) -> Any | None:
    """Batch with its first samples, or repeated ones, in all tensors and lists that have an entry for each sample.

    Entries of a tensor are its rows.

    Returns:
        None where no tensor or list has them, so that the batch cannot be resized.
    """
    return samples_of(batch, batch_size, [index % batch_size for index in range(new_size)])


def samples_of(batch: Any, batch_size: int, samples: Sequence[int]) -> Any | None:
    """Batch with these samples in all tensors and lists as above; None without any."""
    found = False

    def is_whole(value: Any) -> bool:
        return isinstance(value, PackedSequence) or _is_by_sample(value, batch_size)

    def resize(value: Any) -> Any:
        nonlocal found
        if isinstance(value, PackedSequence):
            return value
        if _is_by_sample(value, batch_size):
            found = True
            return type(value)(value[index] for index in samples)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != batch_size:
            return value
        found = True
        return value[torch.tensor(samples).to(value.device)]

    changed = tree_map(resize, batch, is_leaf=is_whole)
    return changed if found else None


def samples_in(batch: Any, expected: Sequence[int] = ()) -> int:
    """Number of samples in a batch: the first candidate that all of its tensors and lists agree with.

    Candidates are the ``expected`` numbers, the rows of the first tensor, and the lengths of lists whose tensors have
    different numbers of rows. Where tensors and lists agree with none, it is an expected number that such a list has,
    or the rows of the first tensor; 1 without any.
    """
    first = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)
    lengths = [len(value) for value in _uneven_lists_in(batch)]
    agreed = (number for number in (*expected, first, *lengths) if _agrees(batch, number))
    return next(agreed, next((number for number in expected if number in lengths), first))


def _is_by_sample(value: Any, number: int) -> bool:
    """Tells whether a list, or a tuple with tensors in it, has an entry of one kind for each sample.

    Where all tensors in it have as many rows, each tensor is of all samples.
    """
    if type(value) not in (list, tuple) or len(value) != number:
        return False
    tensors = [*tensors_in(value)]
    kinds = {(type(each), (each.dtype, each.dim()) if isinstance(each, Tensor) else None) for each in value}
    is_of_one_kind = len(kinds) == 1 and bool(tensors or isinstance(value, list))
    return is_of_one_kind and not (tensors and all(each.dim() and len(each) == number for each in tensors))


def _agrees(value: Any, number: int) -> bool:
    if _is_by_sample(value, number):
        return True
    if isinstance(value, (Mapping, list, tuple)):
        return all(_agrees(each, number) for each in (value.values() if isinstance(value, Mapping) else value))
    return all(not tensor.dim() or len(tensor) == number for tensor in tensors_in(value))


def _uneven_lists_in(value: Any) -> Iterator[list[Any]]:
    """Lists of tensors with different numbers of rows, which have an entry for each sample."""
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        rows = {len(one) for one in each if isinstance(one, Tensor) and one.dim()} if isinstance(each, list) else ()
        if len(rows) > 1:
            yield each
        yield from _uneven_lists_in(each)


def _real(returned: Any) -> Any:
    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(returned)):
        raise ProfileError(
            "Expected training_step to compute from its batch and its module, but a global variable or the like has"
            " kept a tensor of a run before, in which there were no values. Keep it in the module, in a global dict or"
            " under functools.lru_cache, or pass plan=."
        )
    return returned


def loss_in(returned: Any) -> Tensor:
    """Loss among the results of a training step."""
    loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
    return loss


def check_loss(returned: Any) -> None:
    """Raises a `ProfileError` if there is no loss that can be trained on, whatever its value."""
    advice = "Return the loss, a scalar tensor, or a dict with it under 'loss', from training_step."
    if isinstance(returned, Mapping) and "loss" not in returned:
        raise ProfileError(f"Expected training_step to return a dict with 'loss', got the keys {[*returned]}. {advice}")
    loss = loss_in(returned)
    if not isinstance(loss, Tensor):
        raise ProfileError(f"Expected training_step to return a loss on the profiling batch, got {loss!r}. {advice}")
    if not loss.requires_grad or loss.numel() != 1:
        raise ProfileError(
            f"Expected the loss to be a scalar that depends on trainable parameters, got shape {list(loss.shape)},"
            f" requires_grad={loss.requires_grad}. {advice}"
        )


def check_finite(loss: Tensor) -> None:
    """Raises a `ProfileError` if the loss is infinite or not a number."""
    if not torch.isfinite(loss).all():
        raise ProfileError(
            f"Expected a finite loss on the profiling batch, got {loss.item()!r}."
            " Look for NaN in the first training batch, or for a loss that overflows in this precision."
        )


@contextmanager
def as_eager(module: nn.Module) -> Iterator[None]:
    """Runs a model of which a part is compiled as eager code while it is active.

    Compiled code would compile the profiler's hooks, too, or leave them out.
    """
    with torch.compiler.set_stance("force_eager") if compiled(module) else nullcontext():
        yield


def note_on_compiled(module: nn.Module, *, exchanges: bool) -> str | None:
    """Note of a plan for a model of which a part is compiled; Lightning's ``torch.compile(net)`` compiles the root.

    With ``exchanges`` it says that nothing inside moves activations, which other operators may.
    """
    names = compiled(module)
    if not names:
        return None
    named = ", ".join(repr(name) if name else "the whole model" for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (
        f"{named}{more}: profiled as eager code, so that times and memory are not those of compiled code; each unit"
        f" inside a compiled module breaks its graph in two places{_WEIGHTS_ONLY if exchanges else ''}"
    )


def why_not_mean(module: nn.Module, run: Callable[[Any], Any], batch: Any, *, batch_size: int) -> str | None:
    """Reason why the loss of this batch is not, or may not be, the mean of the losses of its halves; None if it is.

    Runs the step without gradients and leaves the module as it was. Dropout is off, and batch statistics are on.
    """
    with as_eager(module):
        return next(_obstacles(module, run, batch, batch_size), None)


def _obstacles(module: nn.Module, run: Callable[[Any], Any], batch: Any, batch_size: int) -> Iterator[str]:
    """Reasons against a mean loss; each holds only if none before it does."""
    if batch_size < 2:
        yield "batches of one sample do not show whether the loss of more is their mean"
    if any(parameter.is_meta for parameter in module.parameters()):
        yield "a model without values does not show whether the loss of a batch is the mean over its samples"
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and child.training:
            yield f"{name} normalises over the samples of a micro-batch"
    halves = halves_of(batch_size)
    try:
        parts = [samples_of(batch, batch_size, half) for half in halves]
        if any(part is None for part in parts):
            yield f"no tensor or list of the batch has {batch_size} samples first"
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


def halves_of(batch_size: int) -> list[range]:
    """Samples of four halves: the first and the second, and those with even and with odd numbers."""
    samples, middle = range(batch_size), batch_size // 2
    return [samples[:middle], samples[middle:], samples[::2], samples[1::2]]


def _loss(module: nn.Module, run: Callable[[Any], Any], batch: Any, *, seed: int) -> torch.Tensor:
    with dropping_nothing(module, seed=seed):
        return loss_in(run(batch)).detach().clone()


@contextmanager
def dropping_nothing(module: nn.Module, *, seed: int) -> Iterator[None]:
    """Runs steps without gradients and dropout while it is active; afterwards the module is as it was.

    Torch's functions drop nothing, and children that may be dropouts are in evaluation mode.
    """
    with untouched(module), torch.no_grad(), _NothingDropped():
        for child in module.modules():
            if child is not module and _may_drop(child):
                child.training = False
        torch.manual_seed(seed)
        yield


def _may_drop(module: nn.Module) -> bool:
    """Tells if a module may be a dropout: it has no tensors, or a number whose name has "drop" in it."""
    has_tensors = any(True for _ in chain(module.parameters(), module.buffers()))
    return not has_tensors or any("drop" in name and isinstance(value, float) for name, value in vars(module).items())


class _NothingDropped(TorchFunctionMode):
    """Mode without dropout, also inside of attention, which takes a probability."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            return func(**{**named, **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)
