"""Units of a LightningModule: sharded as planned, or taken over from an earlier Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_osdp.apply import (
    ShardedModel,
    called_children,
    do_nothing,
    fully_shard_arguments,
    refuse_copy,
    sharded_as,
)
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.core.units import SMALL_UNIT_BYTES
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.batching.division import Division, check_agrees
from lightning_osdp.strategy.batching.loaders import forget_loaders
from lightning_osdp.strategy.checkpointing import averaging, entries, saving
from lightning_osdp.strategy.checkpointing.entries import read_plan
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.choose_plan import (
    check_accumulates_in_fp32,
    choose_manual_plan,
    choose_plan,
    divide_plan,
)
from lightning_osdp.strategy.planning.gpu_notes import warn_of_gpu
from lightning_osdp.strategy.planning.plan_fit import Choice
from lightning_osdp.strategy.planning.publish import publish, warn_of_unfreezing
from lightning_osdp.strategy.planning.training_step import check_same_groups, groups_of
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero, ranks_of_node
from lightning_osdp.strategy.sharding.resharding import reshard_before_hooks

_SUMMARY_FIELDS = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops")
"""Attributes of Lightning's summary that `ModelSummary` prints below the rows."""


class Units:
    """Units of a strategy's model through all stages of all Trainers, and the division of their optimizer steps.

    Attributes:
        options: the strategy's options.
        model: the sharded model, which has the plan; None before setup.
        division: the micro-batches of an optimizer step.
        choice: the plan that units were made by, with what planning measured.
    """

    def __init__(self, strategy: FSDPStrategy, options: Options) -> None:
        self.options, self._strategy = options, strategy
        self.model: ReusableModel | None = None
        self.division = Division()
        self.choice = Choice(None, self.division)
        self._is_for_training = False

    @property
    def sharded(self) -> ShardedModel:
        """Sharded model; raises a `ConfigurationError` if there is none yet."""
        if self.model is None:
            raise ConfigurationError(
                "Expected a sharded model, but setup has not been yet, or has failed. Ask for weights, save them, and"
                " call gathered() from on_fit_start on."
            )
        return self.model.sharded

    def check(self, module: nn.Module) -> None:
        """Raises a `ConfigurationError` if this module shards itself, or has units made with other settings."""
        if is_overridden("configure_sharded_model", module):
            raise ConfigurationError(
                "Expected configure_model, got configure_sharded_model, after which Lightning leaves sharding to the"
                " module itself. Rename it: the plan shards."
            )
        model = reusable_model(module)
        if model is not None:
            model.check(self._settings())

    def set_up(self, module: pl.LightningModule, *, previous: Plan | None) -> nn.Module:
        """Shards the module, or takes over its units, for the stage that its Trainer begins; returns the module.

        ``previous`` is the plan of the model that the strategy had before.

        Raises:
            OSDPError: no plan fits, the given plan does not fit, or the module cannot be sharded.
        """
        trainer = module.trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        resumed = entries.read_resumed(trainer) if is_fitting else None
        model = reusable_model(module)
        if model is not None and model.sharded.is_whole and is_fitting:
            model.undo()  # the model was evaluated before, without a plan
            model = None
        is_new = model is None
        if model is None:
            model = self._shard(module, previous, resumed)
        elif model is not self.model:
            self._is_for_training = False
            rank_zero_info("OSDP: another Trainer has sharded this model already, and its units are used as they are.")
        self.model = model
        if is_fitting:
            self._begin_fit(trainer, model, resumed, is_new=is_new)
        reshard_before_hooks(trainer, model.sharded)
        model.sharded.free()
        return model.sharded.module

    def _shard(
        self, module: pl.LightningModule, previous: Plan | None, resumed: entries.Resumed | None
    ) -> ReusableModel:
        """Chooses a plan and shards the module by it; where there is no plan, each child and block is a unit."""
        strategy, trainer = self._strategy, module.trainer
        summaries = summaries_by_depth(trainer, module)
        options = replace(
            self.options,
            node_size=ranks_of_node(strategy, self.options.node_size),
            recomputed=_checkpointed_modules(strategy._activation_checkpointing_kwargs, module),
        )
        arguments = fully_shard_arguments({**strategy.kwargs, "mixed_precision": strategy.mixed_precision_config})
        arguments["device"] = strategy.root_device
        self._forget_division(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            warn_of_gpu(module, strategy.root_device)
        choose = choose_plan if module.automatic_optimization else choose_manual_plan
        choice = choose(module, options, previous=previous, resumed=resumed)
        if isinstance(choice, str):
            sharded = shard_children(module, choice, options, **arguments)
            choice = Choice(None, Division())
        else:
            sharded = shard_as_planned(module, choice.plan, options, **arguments)
            if sharded.plan is not None:
                if trainer.state.fn == TrainerFn.FITTING:
                    warn_of_unfreezing(trainer)
                state_dict_type = strategy._state_dict_type
                publish(trainer, sharded.plan, choice.profile, choice.cluster, state_dict_type=state_dict_type)
        self.division, self.choice = choice.division, choice
        self._is_for_training = trainer.state.fn == TrainerFn.FITTING
        _move_torchmetrics_to_device(module, strategy.root_device)
        plans = [plan for plan in (choice.plan, choice.given_plan) if plan is not None]
        return ReusableModel(sharded, self._settings(), summaries, plans, is_raced=choice.is_raced)

    def _begin_fit(
        self, trainer: pl.Trainer, model: ReusableModel, resumed: entries.Resumed | None, *, is_new: bool
    ) -> None:
        planned = model.planned
        if planned is not None and not is_new:
            if not self._is_for_training:
                model.check_options(self.options)
                check_agrees(planned, self.options)
            self._forget_division(trainer)
            plan, self.division = divide_plan(trainer, planned, self.options, resumed)
            is_away = model.lasting is not None
            if is_away:
                model.lasting = plan  # comes into use once training begins, with nothing left of a broken step
            elif plan != planned:
                model.use(plan)
            if is_away or plan != planned or not self._is_for_training:
                publish(trainer, plan)
            self._is_for_training = True
        self.division.begin(trainer)
        saving.warn_of_incomplete(trainer)
        model.show_summaries(trainer)
        averaging.average_shards(trainer, model.sharded, self._strategy.root_device)

    def _forget_division(self, trainer: pl.Trainer) -> None:
        """Restores the user's own loaders and options of the Trainer, from which a division is chosen."""
        self.division.end(trainer)
        self.division = Division()
        forget_loaders(trainer)  # a hook may have built them by reading estimated_stepping_batches

    def _settings(self) -> dict[str, str]:
        """Settings of units besides the plan, as text."""
        strategy = self._strategy
        return {
            "precision": str(strategy.precision_plugin.precision),
            "arguments": f"{strategy.kwargs}, {strategy._activation_checkpointing_kwargs}",
        }

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises a `ConfigurationError` if optimizers cannot update shards, or if their groups have changed."""
        groups = self.choice.groups
        self.choice = self.choice._replace(groups=None)  # a later fit may have other optimizers
        if groups is not None:
            check_same_groups(groups, groups_of(optimizers, self.sharded.names_by_group))
        self.sharded.check_optimizers(optimizers)


def shard_as_planned(module: pl.LightningModule, plan: Plan | None, options: Options, **arguments: Any) -> ShardedModel:
    """Shards a module as planned; without a plan, its children and blocks are units."""
    if plan is None:
        return ShardedModel.unplanned(module, **arguments)
    sharded = ShardedModel.planned(module, plan, recomputed=options.recomputed, **arguments)
    precision = str(module.trainer.precision)
    sharded.check_options = lambda plan: check_accumulates_in_fp32(plan, options, precision)
    return sharded


def shard_children(module: pl.LightningModule, why: str, options: Options, **arguments: Any) -> ShardedModel:
    """Shards each child of a module by itself, for manual optimization without a plan; logs why there is none.

    Raises:
        ConfigurationError: the user gives a plan, or a parameter is in no child.
    """
    if options.plan is not None:
        raise ConfigurationError(
            f"Expected no plan= with automatic_optimization=False here, for {why}. Leave it out, or use automatic"
            " optimization."
        )
    blocks = Block.recomputing(options.recomputed)
    size = options.search_space.min_unit_bytes
    smallest = SMALL_UNIT_BYTES if size is None else size
    names = ", ".join(name for name, _ in called_children(module))
    sharded = ShardedModel.separated(module, blocks, min_unit_bytes=smallest, **arguments)
    rank_zero_info(
        f"OSDP: nothing is planned in manual optimization, for {why}: {names} are sharded each by itself, in"
        f" {sharded.num_units} ZDP units (plain FSDP). memory_limit and batch_size have no effect."
    )
    return sharded


def _checkpointed_modules(policy: Mapping[str, Any], module: nn.Module) -> tuple[str, ...]:
    """Names of the modules that ``activation_checkpointing_policy`` chooses, without modules inside of others."""
    if not policy:
        return ()
    if any(isinstance(child, CheckpointWrapper) for child in module.modules()):
        rank_zero_warn(
            "OSDP: the model has checkpointed layers of its own; activation_checkpointing_policy is ignored."
        )
        return ()
    chosen: set[nn.Module] = set()

    def note(child: nn.Module, **_: Any) -> nn.Module:
        chosen.add(child)
        return child

    apply_activation_checkpointing(module, checkpoint_wrapper_fn=note, **policy)
    names: list[str] = []
    for name, child in module.named_modules():
        if child in chosen and not is_inside(name, names):
            names.append(name)
    return tuple(names)


class ReusableModel:
    """Sharded model that later Trainers find through its module.

    ``state_dict()`` of the module, and of modules inside, raises where it would give this rank's shards;
    ``load_state_dict()`` of the module takes whole tensors, on all ranks.

    Attributes:
        sharded: the module.
        lasting: plan that training comes back to while it is under another: after a race, that of the winner or, as
            long as none has won, the one before it; after longer batches, the usual one. None where it is in use.
        is_raced: True once its plan has won a race, in this fit or before the checkpoint that the plan is from.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        settings: Mapping[str, str],
        summaries: Mapping[int, SimpleNamespace],
        plans: Iterable[Plan],
        *,
        is_raced: bool,
    ) -> None:
        self.sharded, self._settings, self._summaries = sharded, settings, summaries
        self.lasting: Plan | None = None
        self.is_raced = is_raced
        self._earlier_plans = [*plans]  # plans of the same units that were given, or did not fit in a dry run
        sharded.reusable = self
        module = sharded.module
        with_parameters = (child for child in module.modules() if any(True for _ in child.parameters()))
        self._handles = [child.register_state_dict_pre_hook(self) for child in with_parameters]
        self._handles.append(module._register_load_state_dict_pre_hook(partial(_reshard_before_load, self)))

    @property
    def planned(self) -> Plan | None:
        """Plan in use or, in a race and for longer batches, the one that training comes back to."""
        return self.lasting or self.sharded.plan

    def use(self, plan: Plan) -> None:
        """Changes to another plan with the same units, and perhaps other micro-batches, which lasts from now on."""
        before = self.sharded.plan
        assert before is not None
        self.sharded.use(plan, may_divide=True)
        self._earlier_plans.append(before)
        self.lasting = None

    def begin_race(self) -> None:
        """Notes the plan in use, before others take turns."""
        self.lasting = self.sharded.plan
        assert self.lasting is not None
        self._earlier_plans.append(self.lasting)

    def come_back(self) -> None:
        """Changes to the plan that lasts, where a fit ended under another; micro-batches may be others by now."""
        if self.lasting is not None:
            self.sharded.use(self.lasting, may_divide=True)
        self.lasting = None

    def show_summaries(self, trainer: pl.Trainer) -> None:
        """Has a Trainer's `ModelSummary` print the summary of the whole model, where there is one of its depth."""
        for callback in _summaries_of(trainer):
            if callback._max_depth in self._summaries:
                summary = self._summaries[callback._max_depth]
                vars(callback)["_summary"] = lambda *_, summary=summary: summary

    def undo(self) -> None:
        """Makes parameters whole again in a module that was sharded without a plan. Call it on all ranks."""
        self.sharded.undo()
        for handle in self._handles:
            handle.remove()

    def check(self, settings: Mapping[str, str]) -> None:
        """Raises a `ConfigurationError` if units would be made with other settings, or if parameters are new."""
        if not self.sharded.shares_world:
            raise _disagree("the process group that it was sharded over", "another one")
        for name, setting in self._settings.items():
            if settings[name] != setting:
                raise _disagree(f"{name} {setting}", settings[name])
        self.sharded.reshard()
        new = [name for name, parameter in self.sharded.module.named_parameters() if not isinstance(parameter, DTensor)]
        if new:
            raise ConfigurationError(
                f"Expected the model as it was sharded, but its parameter {new[0]!r} is new. Lightning calls"
                " configure_model before every stage: make modules there only where there are none yet, as in"
                " `if self.layers is None: self.layers = ...`, and add none to a model that is sharded."
            )

    def check_options(self, options: Options) -> None:
        """Raises a `ConfigurationError`, on all ranks, if these options have another plan or memory limit."""
        plan, given, memory_limit_bytes = self.planned, options.plan, options.memory_limit_bytes
        assert plan is not None
        if isinstance(given, Path):
            path = given
            given = on_rank_zero(lambda: read_plan(path))
        if given is not None and given not in (plan, *self._earlier_plans):
            raise _disagree("the plan that it was sharded by", "another plan=")
        if given is None and memory_limit_bytes not in (None, plan.memory_limit_bytes):
            raise _disagree(
                f"memory_limit {format_bytes(plan.memory_limit_bytes)}", format_bytes(memory_limit_bytes or 0)
            )

    def __call__(self, *_: object) -> None:
        """Hook before ``state_dict()``: raises a `ConfigurationError` if it would give shards."""
        if not self.sharded.is_opened:
            raise ConfigurationError(
                "Expected the whole weights to be asked of the strategy, got state_dict() of a module, which has only"
                " this rank's shards. On all ranks, call trainer.strategy.whole_state_dict(), or save within `with"
                " trainer.strategy.gathered(): ...`, as save_pretrained() can; or load a checkpoint."
            )

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        """Hook of a copy of the module, which does nothing; raises a `ConfigurationError` if parameters are shards."""
        if not self.sharded.is_opened:
            refuse_copy()
        return do_nothing


def reusable_model(module: nn.Module) -> ReusableModel | None:
    """Finds the sharded model of this module, whichever strategy sharded it; None if it is not sharded."""
    sharded = sharded_as(module)
    model = None if sharded is None else sharded.reusable
    return model if isinstance(model, ReusableModel) else None


def summaries_by_depth(trainer: pl.Trainer, module: pl.LightningModule) -> dict[int, SimpleNamespace]:
    """Lightning's summaries of a module that is about to be sharded, by depth, for the Trainer's `ModelSummary`."""
    summaries: dict[int, SimpleNamespace] = {}
    for callback in _summaries_of(trainer):
        summary = callback._summary(trainer, module)
        numbers = {name: getattr(summary, name) for name in _SUMMARY_FIELDS}
        rows = summary._get_summary_data()
        summaries[callback._max_depth] = SimpleNamespace(_get_summary_data=lambda rows=rows: rows, **numbers)
    return summaries


def _summaries_of(trainer: pl.Trainer) -> list[ModelSummary]:
    return [callback for callback in callbacks_of(trainer, ModelSummary) if callback._max_depth]


def _reshard_before_load(model: object, _: dict[str, Any], prefix: str, *__: object) -> None:
    """Reshards before the module loads a state dict, which goes into shards; does nothing in a copy of the module."""
    if isinstance(model, ReusableModel) and not prefix:
        model.sharded.reshard()


def _disagree(expected: str, got: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected a strategy that goes on with the units of this model, which another Trainer sharded: {expected}, got"
        f" {got}. Leave it as it was, or load trainer.strategy.whole_state_dict(on_all_ranks=True) of that Trainer into"
        " a new model."
    )
