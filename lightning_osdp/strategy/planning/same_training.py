"""Checks that other micro-batches train the same: hooks per batch, batch indices, logged reductions, and collating."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_osdp.callbacks.peak import all_callbacks

_BATCH_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
)
"""Hooks of modules and callbacks that run once for each micro-batch."""
HARMLESS = frozenset(
    f"lightning.pytorch.callbacks.{name}"
    for name in (
        "callback.Callback",
        "device_stats_monitor.DeviceStatsMonitor",
        "lr_monitor.LearningRateMonitor",
        "model_checkpoint.ModelCheckpoint",
        "progress.rich_progress.RichProgressBar",
        "progress.tqdm_progress.TQDMProgressBar",
        "throughput_monitor.ThroughputMonitor",
        "timer.Timer",
        "weight_averaging.WeightAveraging",
    )
)
"""Classes whose hooks per batch show, save or stop, or act once in an optimizer step, and leave training the same."""
_MEANS = ("mean", torch.mean)
_PLAIN_METHODS = ("__new__", "__getattribute__", "__getnewargs__")
"""Special methods that `BatchIndex` does not take over from `int`."""


def why_hooks_count(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Names a hook that runs in each micro-batch and is not known to be harmless; None if there is none."""
    hook = unknown_hook(trainer, module, _BATCH_HOOKS, ("backward",))
    return None if hook is None else f"{hook} runs once for each micro-batch"


def unknown_hook(
    trainer: pl.Trainer, module: pl.LightningModule, hooks: Sequence[str], of_module: Sequence[str]
) -> str | None:
    """Names one of these hooks, some of the module alone, that is not known to be harmless; None if there is none."""
    for holder in (*all_callbacks(trainer), module):
        for hook in (*hooks, *(of_module if holder is module else ())):
            owner = next((base for base in type(holder).__mro__ if hook in vars(base)), object)
            is_own = owner.__module__.startswith(("lightning_osdp.", "lightning.pytorch.core."))
            if hook in vars(holder) or not (is_own or f"{owner.__module__}.{owner.__qualname__}" in HARMLESS):
                return f"{hook} of {type(holder).__name__}"
    return None


class BatchIndex:
    """Number of a batch that notes whether user code has read it."""

    def __init__(self, value: int) -> None:
        self.value, self.is_read = value, False

    def __getattr__(self, name: str) -> Any:
        self.is_read = True
        return getattr(self.value, name)


def _noting(name: str) -> Callable[..., Any]:
    def method(self: BatchIndex, *args: Any) -> Any:
        self.is_read = True
        return getattr(self.value, name)(*args)

    return method


# operators look up their methods on the class, where __getattr__ is not asked
for _name, _attribute in vars(int).items():
    if _name.startswith("__") and callable(_attribute) and _name not in _PLAIN_METHODS:
        setattr(BatchIndex, _name, _noting(_name))


class LoggedReductions:
    """Replacement of ``log`` and ``log_dict`` that notes a value of an epoch which is not reduced by its mean."""

    why_not: str | None = None
    """Text that names the value; None if there is none."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of ``log`` or ``log_dict``."""
        values = kwargs.get("dictionary", args[0] if args else None)
        method = pl.LightningModule.log_dict if isinstance(values, Mapping) else pl.LightningModule.log
        given = inspect.signature(method).bind(None, *args, **kwargs).arguments
        reduction = given.get("reduce_fx", "mean")
        names = list(values) if isinstance(values, Mapping) else [given["name"]]
        if names and given.get("on_epoch") and reduction not in _MEANS:
            shown = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", repr(reduction))
            call = f"self.log({names[0]!r}, reduce_fx={shown})"
            self.why_not = self.why_not or f"{call} reduces values of micro-batches, not by their mean"


class Parts(NamedTuple):
    """Batch of some samples, and batches of parts of these samples."""

    whole: Any
    parts: list[Any]


class PartCollate:
    """Collate function that makes a batch of all samples and one of each part.

    Args:
        collate: collate function of the loader.
        parts_of: gives the indices of samples in each part, for a number of samples.
    """

    def __init__(self, collate: Callable[[Any], Any], parts_of: Callable[[int], Sequence[Sequence[int]]]) -> None:
        self._collate, self._parts_of = collate, parts_of

    def __call__(self, samples: Sequence[Any]) -> Parts:
        """Collates a list of samples."""
        parts = [[samples[index] for index in part] for part in self._parts_of(len(samples))]
        # copies, because a collate function may change samples
        return Parts(self._collate(copy.deepcopy(samples)), [self._collate(copy.deepcopy(part)) for part in parts])


def split_batch(batch: Any) -> Iterator[Any]:
    """Yields the whole of a batch that has `Parts` in it, then each part."""

    def is_parts(value: Any) -> bool:
        return isinstance(value, Parts)

    (first,) = filter(is_parts, tree_leaves(batch, is_leaf=is_parts))
    yield tree_map(lambda leaf: leaf.whole, batch, is_leaf=is_parts)
    for place in range(len(first.parts)):
        yield tree_map(lambda leaf, place=place: leaf.parts[place], batch, is_leaf=is_parts)


def is_part(whole: Any, part: Any, samples: Sequence[int], size: int) -> bool:
    """Tells whether ``part`` has exactly the samples at these indices of ``whole``, a batch of ``size`` samples."""
    if isinstance(whole, Tensor):
        expected = whole[list(samples)] if whole.dim() and len(whole) == size else whole
        return isinstance(part, Tensor) and expected.shape == part.shape and torch.equal(expected, part)
    if isinstance(whole, Mapping):
        return whole.keys() == part.keys() and all(is_part(whole[key], part[key], samples, size) for key in whole)
    if isinstance(whole, (list, tuple)):
        expected_items = [whole[index] for index in samples] if len(whole) == size != len(part) else whole
        pairs = zip(expected_items, part, strict=False)
        return len(expected_items) == len(part) and all(is_part(item, other, samples, size) for item, other in pairs)
    if type(whole) is not type(part):
        return False
    return is_part(vars(whole), vars(part), samples, size) if hasattr(whole, "__dict__") else bool(whole == part)
