"""A step that optimizes manually, for the profiler: one forward, and one backward of the sum of its losses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_osdp.apply import called_children
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.strategy.planning.training_step import configured_optimizers, step_arguments, training_step


def check_in_children(module: pl.LightningModule) -> None:
    """Returns if every parameter is in a child that is called, and so is gathered anew for every backward.

    Raises:
        ConfigurationError: one is the module's own.
    """
    children = [name for name, _ in called_children(module)]
    for name, _ in module.named_parameters():
        if not any(name.startswith(f"{child}.") for child in children):
            raise ConfigurationError(
                f"Expected every parameter inside a child that training_step calls in manual optimization, where each"
                f" is sharded by itself, but {name!r} is in none. Put it into a module that is called."
            )


def in_children(profile: ModelProfile) -> ModelProfile:
    """The profile with no operator that may join the root unit, which the first backward of a step would free."""
    return dataclasses.replace(
        profile,
        children_apart=True,
        operators=tuple(
            dataclasses.replace(operator, stands_alone=True) if len(operator.enclosing) == 2 else operator
            for operator in profile
        ),
    )


def summed_step(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[Any], Tensor]:
    """``module.training_step`` as a function of the batch that returns the sum of its losses, and updates nothing.

    All graphs are alive at once then, and every parameter gets all of its gradients: no step of the user's takes more.
    """
    stand_ins = _stand_ins(trainer, module)

    def step(batch: Any) -> Tensor:
        losses: list[Tensor] = []
        with _replaced(
            module,
            manual_backward=lambda loss, *_, **__: losses.append(loss),
            **_given(lambda: stand_ins),
            toggle_optimizer=_nothing,
            untoggle_optimizer=_nothing,
            clip_gradients=_nothing,
        ):
            module.training_step(*step_arguments(module, batch))
        if not losses:
            raise ProfileError(
                "Expected training_step to call self.manual_backward(loss) with automatic_optimization=False, but it"
                " did not on the profiling batch."
            )
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    return step


def automatic_step(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[Any], Any]:
    """``module.training_step`` as a function of the batch, with optimizers and schedules to look at if it asks.

    Raises:
        ConfigurationError: it takes the loader's iterator itself.
    """
    run, stand_ins = training_step(module), cache(partial(_stand_ins, trainer, module))

    def step(batch: Any) -> Any:
        with _replaced(module, **_given(stand_ins)):
            return run(batch)

    return step


def _stand_ins(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[list[_Idle], list[_Idle]]:
    """What is there in place of the optimizers and schedules that are yet to be configured."""
    schedules: list[Any] = []
    optimizers = configured_optimizers(trainer, schedules)(copy.copy(module))
    module.trainer = trainer  # of modules inside it, too, which the copy has in common with it
    schedulers = [_Idle(each["scheduler"] if isinstance(each, dict) else each) for each in schedules]
    return [_Idle(optimizer) for optimizer in optimizers], schedulers


def _given(stand_ins: Callable[[], tuple[list[_Idle], list[_Idle]]]) -> dict[str, Callable[..., Any]]:
    """Methods that give them as Lightning's do."""

    def lr_schedulers() -> Any:
        schedulers = stand_ins()[1]
        return _as_lightning_gives(schedulers) if schedulers else None

    return {"optimizers": lambda *_, **__: _as_lightning_gives(stand_ins()[0]), "lr_schedulers": lr_schedulers}


class _Idle:
    """An optimizer or a learning-rate schedule that is asked to do something, and does not."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """Runs the closure alone."""
        return closure() if callable(closure) else None

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Leaves gradients alone."""

    @contextmanager
    def toggle_model(self, **_: Any) -> Iterator[None]:
        """Leaves what is trained as it is."""
        yield


def _as_lightning_gives(found: Sequence[Any]) -> Any:
    return found[0] if len(found) == 1 else list(found)


@contextmanager
def _replaced(module: pl.LightningModule, **methods: Callable[..., Any]) -> Iterator[None]:
    for name, method in methods.items():
        vars(module)[name] = method
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


def _nothing(*_: Any, **__: Any) -> None:
    return None
