"""A sharded model as every Trainer that it is given to finds it again, and what Lightning printed when it was whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_osdp.apply import ShardedModel, do_nothing, refuse_copy
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing.entries import read_plan
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero

_PRINTED = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops")
"""What `ModelSummary` prints of Lightning's summary below its rows."""


class ReusableModel:
    """A sharded module, which holds this as a hook of its own ``state_dict()``, as long as it is sharded.

    Its ``state_dict()`` and those of modules inside it raise wherever they would give this rank's shards; its own
    ``load_state_dict()`` takes whole tensors, on all ranks.
    """

    def __init__(
        self, sharded: ShardedModel, settings: Mapping[str, str], summaries: Mapping[int, SimpleNamespace]
    ) -> None:
        self.sharded, self._settings, self._summaries = sharded, settings, summaries
        self._given_up: list[Plan] = []  # plans with the same units that did not fit in a dry run
        module = sharded.module
        having = (child for child in module.modules() if any(True for _ in child.parameters()))
        self._handles = [child.register_state_dict_pre_hook(self) for child in having]
        self._handles.append(module._register_load_state_dict_pre_hook(partial(_take, self)))

    def give_up_plan(self, lower: Plan) -> None:
        """Goes on under another plan with the same units; it may have other micro-batches."""
        given_up = self.sharded.plan
        assert given_up is not None
        self.sharded.use(lower, may_divide=True)
        self._given_up.append(given_up)

    def show_summaries(self, trainer: pl.Trainer) -> None:
        """Has a Trainer's callbacks print what they would of the whole model, where there is one of their depth."""
        for callback in _summaries_of(trainer):
            if callback._max_depth in self._summaries:
                summary = self._summaries[callback._max_depth]
                vars(callback)["_summary"] = lambda *_, summary=summary: summary

    def undo(self) -> None:
        """Gives a module that was sharded for want of a plan whole parameters again. Call it on all ranks."""
        self.sharded.undo()
        for handle in self._handles:
            handle.remove()

    def check(self, settings: Mapping[str, str]) -> None:
        """Returns if units of another strategy would be made in the same way, of the parameters that there are now.

        Raises:
            ConfigurationError: they would not, or there are new parameters, which no rank would share with another.
        """
        if not self.sharded.shares_world:
            raise _disagree("the process group that it was sharded over", "another one")
        for name, own in self._settings.items():
            if settings[name] != own:
                raise _disagree(f"{name} {own}", settings[name])
        self.sharded.reshard()
        new = [name for name, parameter in self.sharded.module.named_parameters() if not isinstance(parameter, DTensor)]
        if new:
            raise ConfigurationError(
                f"Expected the model as it was sharded, but its parameter {new[0]!r} is new. Lightning calls"
                " configure_model before every stage: make modules there only where there are none yet, as in"
                " `if self.layers is None: self.layers = ...`, and add none to a model that is sharded."
            )

    def check_wishes(self, options: Options) -> None:
        """Raises a `ConfigurationError`, on all ranks, if these options name another plan or limit."""
        plan, given, memory_limit_bytes = self.sharded.plan, options.plan, options.memory_limit_bytes
        assert plan is not None
        if isinstance(given, Path):
            path = given
            given = on_rank_zero(lambda: read_plan(path))
        if given is not None and given not in (plan, *self._given_up):
            raise _disagree("the plan that it was sharded by", "another plan=")
        if given is None and memory_limit_bytes not in (None, plan.memory_limit_bytes):
            raise _disagree(
                f"memory_limit {format_bytes(plan.memory_limit_bytes)}", format_bytes(memory_limit_bytes or 0)
            )

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before ``state_dict()`` of the module or one inside: raises a `ConfigurationError` if it gives shards."""
        del module, prefix, keep_vars
        if not self.sharded.is_opened:
            raise ConfigurationError(
                "Expected the whole weights to be asked of the strategy, got state_dict() of a module, which has only"
                " this rank's shards. On all ranks, call trainer.strategy.whole_state_dict(), or save within `with"
                " trainer.strategy.gathered(): ...`, as save_pretrained() can; or load a checkpoint."
            )

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        """In a copy of whole parameters nothing is sharded; raises a `ConfigurationError` if they are shards."""
        if not self.sharded.is_opened:
            refuse_copy()
        return do_nothing


def found_in(module: nn.Module) -> ReusableModel | None:
    """What this module was sharded as, by whichever strategy."""
    hooks = [hook for hook in module._state_dict_pre_hooks.values() if isinstance(hook, ReusableModel)]
    return next((hook for hook in hooks if hook.sharded.module is module), None)


def whole_summaries(trainer: pl.Trainer, module: pl.LightningModule) -> dict[int, SimpleNamespace]:
    """What Lightning's summaries say of a module that is about to be sharded, by depth, for its Trainer's callbacks."""
    found: dict[int, SimpleNamespace] = {}
    for callback in _summaries_of(trainer):
        summary = callback._summary(trainer, module)
        numbers = {name: getattr(summary, name) for name in _PRINTED}
        rows = summary._get_summary_data()
        found[callback._max_depth] = SimpleNamespace(_get_summary_data=lambda rows=rows: rows, **numbers)
    return found


def _summaries_of(trainer: pl.Trainer) -> list[ModelSummary]:
    return [callback for callback in callbacks_of(trainer, ModelSummary) if callback._max_depth]


def _take(model: object, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Runs before the module loads a state dict, which goes into shards; nothing in a copy of the module."""
    del state_dict
    if isinstance(model, ReusableModel) and not prefix:
        model.sharded.reshard()


def _disagree(expected: str, got: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected a strategy that goes on with the units of this model, which another Trainer sharded: {expected}, got"
        f" {got}. Leave it as it was, or load trainer.strategy.whole_state_dict(on_all_ranks=True) of that Trainer into"
        " a new model."
    )
