"""The training step, run for its cost alone: on real tensors or on fake ones, with as many samples as one likes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils._pytree import tree_map, tree_map_only

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.step.snapshot import untouched

TrialRun: TypeAlias = "AbstractContextManager[tuple[Callable[[], Any], Any]]"
"""Gives what runs forward once, and its batch; on exit everything is as before."""

_MAX_NAMED = 3


@dataclass(frozen=True)
class StepRunner:
    """Runs a training step on the batch that it is profiled on.

    Every trial run starts from the same state, random numbers included, and so takes the same path through the model.
    """

    module: nn.Module
    batch: Any
    batch_size: int
    run: Callable[[Any], Any]
    """Forward: takes a batch, returns the loss or a mapping with it."""
    device: torch.device
    """Where the model trains."""
    blocks: frozenset[nn.Module] | None = None
    """Modules that may be blocks; None: repeated ones."""
    changed: set[nn.Parameter] = field(default_factory=set)
    """Parameters that a trial run on fake tensors has seen the step write to."""

    @property
    def is_meta(self) -> bool:
        """Whether some parameter has no values."""
        return any(parameter.is_meta for parameter in self.module.parameters())

    @contextmanager
    def on_real_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """A trial run with so many samples."""
        with untouched(self.module, changed=self.changed), torch.enable_grad():
            yield self._trial(self.batch, size)

    @contextmanager
    def on_fake_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """A trial run that allocates and computes nothing.

        What a step reads of a model on the meta device, such as a loss that it logs, is taken as one.
        """
        faking = faked(self.module, self.batch, self.device, assumes_ones=self.is_meta, changed=self.changed)
        with faking as fake_batch:
            yield self._trial(fake_batch, size)

    def _trial(self, batch: Any, size: int) -> tuple[Callable[[], Any], Any]:
        sized = batch if size == self.batch_size else resized(batch, self.batch_size, size)
        if sized is None:
            raise ProfileError(f"no tensor of the batch has {self.batch_size} samples first")
        return lambda: self.run(_fresh(sized)), sized


def _fresh(batch: Any) -> Any:
    """The same tensors in containers of their own, from which a step may take them."""
    return tree_map(
        lambda leaf: copy.copy(leaf) if isinstance(leaf, (MutableMapping, MutableSequence)) else leaf, batch
    )


def another_size(batch_size: int) -> int:
    """A second micro-batch to measure: half of the first, which fits wherever that one does; two where it is one."""
    return batch_size // 2 if batch_size > 1 else 2


def resized(batch: Any, batch_size: int, new_size: int) -> Any | None:
    """The batch with its first samples, or repeated ones, in every tensor whose first dimension is the batch size.

    Returns:
        None where no tensor has that dimension, so that the batch cannot be resized.
    """
    return samples_of(batch, batch_size, [index % batch_size for index in range(new_size)])


def samples_of(batch: Any, batch_size: int, samples: Sequence[int]) -> Any | None:
    """The batch with these of its samples; None as above."""
    found = False

    def resize(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.dim() == 0 or tensor.shape[0] != batch_size:
            return tensor
        found = True
        return tensor[torch.tensor(samples).to(tensor.device)]

    changed = tree_map_only(Tensor, resize, batch)
    return changed if found else None


def loss_in(returned: Any) -> Tensor:
    """The loss among what a training step returns."""
    loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
    return loss


def check_loss(returned: Any) -> None:
    """Raises a `ProfileError` if there is no loss that can be trained on; its value is not looked at."""
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
    """Within it, nothing is compiled, and nothing that is runs, where a part of the model is compiled.

    Hooks by which a model is profiled would be compiled, too, or would not run at all.
    """
    with torch.compiler.set_stance("force_eager") if _compiled(module) else nullcontext():
        yield


def note_on_compiled(module: nn.Module) -> str | None:
    """What a plan says of a model of which a part is compiled, ``torch.compile(net)`` of Lightning's being the root."""
    names = _compiled(module)
    if not names:
        return None
    named = ", ".join(repr(name) if name else "the whole model" for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (
        f"{named}{more}: profiled as eager code, so that times and memory are not those of compiled code; each unit"
        " inside a compiled module breaks its graph in two places"
    )


def _compiled(module: nn.Module) -> list[str]:
    """Names of compiled modules: by ``torch.compile(module)``, in place, or by Lightning."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, OptimizedModule)
        or getattr(child, "_compiled_call_impl", None) is not None
        or getattr(child, "_compiler_ctx", None) is not None
    ]
