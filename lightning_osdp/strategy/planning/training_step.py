"""The user's training step and optimizers as the profiler runs them: on a real batch, without logs and updates.

A step with manual optimization is run as one forward and one backward of the sum of its losses.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.apply import called_children, do_nothing
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import ComputePrecision, TrainingStep, untouched
from lightning_osdp.strategy.batching.loaders import unread_loaders

_SCHEDULED_OPTIONS = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"}
"""Options of parameter groups that schedules change."""
_IGNORED_OPTIONS = {"params", "param_names", *_SCHEDULED_OPTIONS}
_COMPARED_TYPES = (bool, int, float, str, tuple, type(None))


def training_step(module: pl.LightningModule, index: Any = 0) -> Callable[[Any], Any]:
    """Makes a function of a batch that runs ``module.training_step`` with this ``batch_idx``."""
    return lambda batch: module.training_step(*step_arguments(module, batch, index))


def summed_step(module: pl.LightningModule) -> Callable[[Any], Tensor]:
    """Makes a function of a batch that runs a manual ``module.training_step`` and returns the sum of its losses.

    The graphs of all losses are alive at once, and every parameter gets all of its gradients: the user's own step needs
    no more memory.
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


def as_trained(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None,
    num_samples: int,
) -> TrainingStep:
    """The step of a module, as the Trainer's strategy and precision have it, on a batch of so many samples."""
    strategy = trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    config, precision = strategy.mixed_precision_config, ComputePrecision()
    if config is not None:
        left_out = tuple(config._module_classes_to_ignore)
        precision = ComputePrecision(config.param_dtype, left_out, config.reduce_dtype)
    step = (training_step if module.automatic_optimization else summed_step)(module)

    def run(batch: Any) -> Any:
        with trainer.precision_plugin.train_step_context():
            return step(batch)

    return TrainingStep(run, optimizers, precision, num_samples, strategy.root_device)


def step_arguments(module: pl.LightningModule, batch: Any, index: Any = 0) -> tuple[Any, ...]:
    """Arguments of ``training_step``; raises a `ConfigurationError` if it takes an iterator."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "Expected training_step to take a batch, got one that takes dataloader_iter, which cannot be profiled."
            " Take a batch, or pass plan=."
        )
    with_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, index) if with_index else (batch,)


def to_device(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """Moves a batch of the loader to the device as for ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


@contextmanager
def mute_logging(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Discards whatever the module logs or prints inside."""
    loggers = trainer.loggers
    trainer.loggers = [cast(Logger, _SilentLogger(logger)) for logger in loggers]
    try:
        with _replace_methods(module, log=do_nothing, log_dict=do_nothing, print=do_nothing):
            yield
    finally:
        trainer.loggers = loggers


class _SilentLogger:
    """Logger with the class and attributes of another, whose methods and experiment do nothing."""

    def __init__(self, logger: Any) -> None:
        self._logger, self.experiment = logger, DummyLogger().experiment

    @property  # type: ignore[misc]  # isinstance reads it
    def __class__(self) -> Any:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._logger, name)
        return do_nothing if callable(value) else value


@contextmanager
def as_in_training(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    loaders: CombinedLoader,
    optimizers: Optimizers,
    resumed: Mapping[str, Any],
) -> Iterator[None]:
    """Has a step in setup read the same attributes of Trainer and module as in training.

    Nothing is logged, no loader gives a batch, and optimizers and schedules do not step. Attributes that validation
    sets are not there yet, as in training before the first validation. Epochs
    and steps are counted from the state of the loop that is ``resumed``, if it has one.
    """
    strategy = trainer.strategy
    before = strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs
    with unread_loaders(trainer, loaders), mute_logging(trainer, module), _counting_from(trainer, resumed):
        strategy.optimizers, strategy.lr_scheduler_configs = list(optimizers.optimizers), list(optimizers.schedules)
        for optimizer in strategy._lightning_optimizers:
            _idle(optimizer, toggle_model=lambda **_: nullcontext())
        try:
            yield
        finally:
            strategy._optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs = before


@contextmanager
def _counting_from(trainer: pl.Trainer, resumed: Mapping[str, Any]) -> Iterator[None]:
    """Has ``current_epoch`` and ``global_step`` be those of the first step after the loop of fitting is resumed."""
    loop = trainer.fit_loop
    steps = loop.epoch_loop
    counted: list[tuple[str, Any, str]] = [
        ("", loop, "epoch_progress"),
        ("epoch_loop.automatic_optimization.", steps.automatic_optimization, "optim_progress"),
        ("epoch_loop.manual_optimization.", steps.manual_optimization, "optim_step_progress"),
    ]
    before = [(holder, name, getattr(holder, name)) for _, holder, name in counted]
    for prefix, holder, name in counted:
        if prefix + name in resumed:
            setattr(holder, name, type(getattr(holder, name)).from_state_dict(resumed[prefix + name]))
    if resumed:
        epochs: Any = loop.epoch_progress
        batches = resumed.get("epoch_loop.batch_progress", {})
        is_over = batches.get("is_last_batch", False) and epochs.total.processed < epochs.total.started
        epochs.current.completed = epochs.current.processed + is_over  # as Lightning does where it begins to run
    try:
        yield
    finally:
        for holder, name, progress in before:
            setattr(holder, name, progress)


class Optimizers(NamedTuple):
    """Optimizers and schedules of ``configure_optimizers``, as Lightning keeps them."""

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
        warnings.simplefilter("ignore")  # Lightning will warn again when it configures its own
        optimizers, schedules, monitor = _configure_optimizers(returned)
        if replica.automatic_optimization:
            return Optimizers(optimizers, _configure_schedulers_automatic_opt(schedules, monitor))
        return Optimizers(optimizers, _configure_schedulers_manual_opt(schedules))


def idle_optimizers(trainer: pl.Trainer, module: pl.LightningModule) -> Optimizers:
    """Makes optimizers and schedules of the module's own parameters whose steps do nothing."""
    with untouched(module):
        made = make_optimizers(trainer, copy.copy(module))
    module.trainer = trainer  # also sets it on child modules, for which the copy has set it to None
    for optimizer in made.optimizers:
        _idle(optimizer)
    for schedule in made.schedules:
        vars(schedule.scheduler).update(step=do_nothing)
    return made


def _idle(optimizer: Any, **methods: Callable[..., Any]) -> None:
    def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    vars(optimizer).update(step=step, zero_grad=do_nothing, **methods)


def check_in_children(module: pl.LightningModule) -> None:
    """Raises a ConfigurationError unless every parameter is in a child, which each manual backward gathers anew."""
    children = [name for name, _ in called_children(module)]
    for name, _ in module.named_parameters():
        if not is_inside(name, children):
            raise ConfigurationError(
                f"Expected every parameter inside a child that training_step calls in manual optimization, where each"
                f" is sharded by itself, but {name!r} is in none. Put it into a module that is called."
            )


def in_children(profile: ModelProfile) -> ModelProfile:
    """Keeps all operators out of the root unit of a profile: the first manual backward would reshard it."""
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
    """Parameter group of an optimizer, with names of parameters in the user's own module."""

    optimizer: str
    names: frozenset[str]
    options: Mapping[str, Any]


def groups_of(
    optimizers: Iterable[Optimizer], names: Callable[[Optimizer], Sequence[Sequence[str]]]
) -> tuple[ParameterGroup, ...]:
    """Groups of all optimizers, in order; ``names`` gives the names of parameters by group of one optimizer."""
    groups = []
    for optimizer in optimizers:
        for group, group_names in zip(optimizer.param_groups, names(optimizer), strict=True):
            options = {k: v for k, v in group.items() if k not in _IGNORED_OPTIONS and isinstance(v, _COMPARED_TYPES)}
            groups.append(ParameterGroup(type(optimizer).__name__, frozenset(group_names), options))
    return tuple(groups)


def names_by_group_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of parameters by group of an optimizer, for a module that is not sharded; foreign parameters have none."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


def check_same_groups(whole: Sequence[ParameterGroup], sharded: Sequence[ParameterGroup]) -> None:
    """Raises a `ConfigurationError` unless ``configure_optimizers`` made equal groups for whole and sharded model."""
    for index, (expected, actual) in enumerate(zip_longest(whole, sharded)):
        if expected != actual:
            raise ConfigurationError(
                "Expected configure_optimizers to make the same parameter groups of the sharded model as of the whole"
                f" one, but group {index} {_difference(expected, actual)}. Tell parameters apart by what sharding"
                " leaves as it is: their names, p.ndim, attributes that you set on them, and isinstance(module,"
                " nn.Linear) rather than type(module)."
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
    name, (value, other) = next((name, values) for name, values in both.items() if values[0] != values[1])
    return f"has {name}={value!r} of the whole one and {other!r} of the sharded one"


def _names_text(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:3])) + f" and {len(ordered) - 3} more" * (len(ordered) > 3)


@contextmanager
def _replace_methods(module: pl.LightningModule, **methods: Callable[..., Any]) -> Iterator[None]:
    vars(module).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]
