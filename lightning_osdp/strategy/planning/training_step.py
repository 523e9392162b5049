"""The user's training step and optimizers as the profiler runs them: muted, on the real batch, updating nothing.

A step that optimizes manually is run as one forward, and one backward of the sum of its losses.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.apply import called_children, do_nothing
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import untouched
from lightning_osdp.strategy.batching.loaders import unread_loaders

_SCHEDULED_OPTIONS = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"}
"""Options that schedules move; which of them a group has, its parameters tell."""
_IGNORED_OPTIONS = {"params", "param_names", *_SCHEDULED_OPTIONS}
_COMPARED_TYPES = (bool, int, float, str, tuple, type(None))


def training_step(module: pl.LightningModule, index: Any = 0) -> Callable[[Any], Any]:
    """``module.training_step`` as a function of the batch, which has this index."""
    return lambda batch: module.training_step(*step_arguments(module, batch, index))


def summed_step(module: pl.LightningModule) -> Callable[[Any], Tensor]:
    """A manual ``module.training_step`` as a function of the batch that returns the sum of its losses.

    All graphs are alive at once then, and every parameter gets all of its gradients: no step of the user's takes more.
    """

    def step(batch: Any) -> Tensor:
        losses: list[Tensor] = []
        with _replace_methods(
            module,
            manual_backward=lambda loss, *_, **__: losses.append(loss),
            toggle_optimizer=do_nothing,
            untoggle_optimizer=do_nothing,
            clip_gradients=do_nothing,
        ):
            module.training_step(*step_arguments(module, batch))
        if not losses:
            raise ProfileError(
                "Expected training_step to call self.manual_backward(loss) with automatic_optimization=False, but it"
                " did not on the profiling batch."
            )
        return sum(losses[1:], start=losses[0])

    return step


def step_arguments(module: pl.LightningModule, batch: Any, index: Any = 0) -> tuple[Any, ...]:
    """What ``training_step`` is called with; raises a `ConfigurationError` if it takes an iterator."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "Expected training_step to take a batch, got one that takes dataloader_iter, which cannot be profiled."
            " Take a batch, or pass plan=."
        )
    with_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, index) if with_index else (batch,)


def to_device(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """A batch of the loader as ``training_step`` gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


@contextmanager
def mute_logging(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Whatever the module logs meanwhile goes nowhere."""
    loggers = trainer.loggers
    trainer.loggers = [cast(Logger, _SilentLogger(logger)) for logger in loggers]
    try:
        with _replace_methods(module, log=do_nothing, log_dict=do_nothing, print=do_nothing):
            yield
    finally:
        trainer.loggers = loggers


class _SilentLogger:
    """A logger to read of, of its own kind, whose methods and experiment do nothing."""

    def __init__(self, logger: Any) -> None:
        self._logger, self.experiment = logger, DummyLogger().experiment

    @property  # type: ignore[misc]  # which isinstance asks
    def __class__(self) -> Any:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._logger, name)
        return do_nothing if callable(value) else value


@contextmanager
def as_in_training(
    trainer: pl.Trainer, module: pl.LightningModule, loaders: CombinedLoader, optimizers: Optimizers
) -> Iterator[None]:
    """Within it, a step reads of a Trainer in setup and of its module what it will read in training.

    Neither does anything: nothing is logged, no loader gives a batch, and optimizers and schedules do not step. What
    validation sets up is not there yet, as in training before the first.
    """
    strategy = trainer.strategy
    before = strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs
    with unread_loaders(trainer, loaders), mute_logging(trainer, module):
        strategy.optimizers, strategy.lr_scheduler_configs = list(optimizers.optimizers), list(optimizers.schedules)
        for optimizer in strategy._lightning_optimizers:
            _idle(optimizer, toggle_model=lambda **_: nullcontext())
        try:
            yield
        finally:
            strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs = before


class Optimizers(NamedTuple):
    """What ``configure_optimizers`` makes, as Lightning keeps it."""

    optimizers: Sequence[Optimizer]
    schedules: Sequence[LRSchedulerConfig]


def make_optimizers(trainer: pl.Trainer, replica: pl.LightningModule) -> Optimizers:
    """Runs ``configure_optimizers`` of a copy of the LightningModule, in every form that Lightning accepts."""
    replica.trainer = trainer
    try:
        returned = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=replica)
    finally:
        replica.trainer = None
    if returned is None or returned == []:
        raise ProfileError(
            f"Expected configure_optimizers to return an optimizer, got {returned}."
            " Return one, or use another strategy: there is nothing to plan without training."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns when it configures its own
        optimizers, schedules, monitor = _configure_optimizers(returned)
        if replica.automatic_optimization:
            return Optimizers(optimizers, _configure_schedulers_automatic_opt(schedules, monitor))
        return Optimizers(optimizers, _configure_schedulers_manual_opt(schedules))


def idle_optimizers(trainer: pl.Trainer, module: pl.LightningModule) -> Optimizers:
    """Those of the module's own parameters, which do nothing."""
    with untouched(module):
        found = make_optimizers(trainer, copy.copy(module))
    module.trainer = trainer  # of modules inside it, too, which the copy has in common with it
    for optimizer in found.optimizers:
        _idle(optimizer)
    for schedule in found.schedules:
        vars(schedule.scheduler).update(step=do_nothing)
    return found


def _idle(optimizer: Any, **others: Callable[..., Any]) -> None:
    vars(optimizer).update(step=_call, zero_grad=do_nothing, **others)


def _call(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
    return None if closure is None else closure()


def check_in_children(module: pl.LightningModule) -> None:
    """Raises a ConfigurationError unless every parameter is in a child, which each manual backward gathers anew."""
    children = [name for name, _ in called_children(module)]
    for name, _ in module.named_parameters():
        if not any(name.startswith(f"{child}.") for child in children):
            raise ConfigurationError(
                f"Expected every parameter inside a child that training_step calls in manual optimization, where each"
                f" is sharded by itself, but {name!r} is in none. Put it into a module that is called."
            )


def in_children(profile: ModelProfile) -> ModelProfile:
    """The profile with no operator that may join the root unit, which the first manual backward would free."""
    return dataclasses.replace(
        profile,
        children_apart=True,
        operators=tuple(
            dataclasses.replace(operator, stands_alone=True) if len(operator.enclosing) == 2 else operator
            for operator in profile
        ),
    )


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """A parameter group: names of its parameters in the user's own module, and its options."""

    optimizer: str
    names: frozenset[str]
    options: Mapping[str, Any]


def groups_of(
    optimizers: Iterable[Optimizer], names: Callable[[Optimizer], Sequence[Sequence[str]]]
) -> tuple[ParameterGroup, ...]:
    """Groups of all optimizers, in order; `names` gives those of the parameters in each group of one."""
    found = []
    for optimizer in optimizers:
        for group, own in zip(optimizer.param_groups, names(optimizer), strict=True):
            options = {k: v for k, v in group.items() if k not in _IGNORED_OPTIONS and isinstance(v, _COMPARED_TYPES)}
            found.append(ParameterGroup(type(optimizer).__name__, frozenset(own), options))
    return tuple(found)


def names_by_group_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters in each group of an optimizer of a module that is not sharded; others have none."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


def check_same_groups(whole: Sequence[ParameterGroup], sharded: Sequence[ParameterGroup]) -> None:
    """Raises a ConfigurationError unless the user's code made the same of the whole and of the sharded model."""
    for index in range(max(len(whole), len(sharded))):
        expected, found = (groups[index] if index < len(groups) else None for groups in (whole, sharded))
        if expected != found:
            raise ConfigurationError(
                "Expected configure_optimizers to make the same parameter groups of the sharded model as of the whole"
                f" one, but group {index} {_difference(expected, found)}. Tell parameters apart by what sharding leaves"
                " as it is: their names, p.ndim, attributes that you set on them, and isinstance(module, nn.Linear)"
                " rather than type(module)."
            )


def _difference(whole: ParameterGroup | None, sharded: ParameterGroup | None) -> str:
    if whole is None or sharded is None:
        there, group = ("sharded", sharded) if whole is None else ("whole", whole)
        assert group is not None
        return f"is of the {there} one alone, with {_names_text(group.names)}"
    if whole.optimizer != sharded.optimizer:
        return f"is {whole.optimizer}'s of the whole one and {sharded.optimizer}'s of the sharded one"
    if whole.names != sharded.names:
        only = {"whole": whole.names - sharded.names, "sharded": sharded.names - whole.names}
        return "has " + " and ".join(
            f"{_names_text(names)} of the {one} one only" for one, names in only.items() if names
        )
    both = {name: (whole.options.get(name), sharded.options.get(name)) for name in {**whole.options, **sharded.options}}
    name, (own, other) = next((name, values) for name, values in both.items() if values[0] != values[1])
    return f"has {name}={own!r} of the whole one and {other!r} of the sharded one"


def _names_text(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(map(repr, found[:3])) + f" and {len(found) - 3} more" * (len(found) > 3)


@contextmanager
def _replace_methods(module: pl.LightningModule, **methods: Callable[..., Any]) -> Iterator[None]:
    vars(module).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]
