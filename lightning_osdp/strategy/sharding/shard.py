"""From a LightningModule to units: sharded as planned, or found as another Trainer left them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler import Census
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.batching.first_batch import BatchWatch
from lightning_osdp.strategy.checkpointing import averaging, saving
from lightning_osdp.strategy.options import Options, Setup
from lightning_osdp.strategy.planning.parameter_groups import Group, check_same_groups, groups_of
from lightning_osdp.strategy.planning.publish import publish, tell_of_unfreezing
from lightning_osdp.strategy.planning.which_plan import chosen, given_division, planned_by_hand, separated, sharded
from lightning_osdp.strategy.runtime.all_ranks import on_all_ranks
from lightning_osdp.strategy.runtime.out_of_memory import explain_shortage
from lightning_osdp.strategy.runtime.ranks import RanksStrategy
from lightning_osdp.strategy.sharding.dtensor_errors import explain_unread
from lightning_osdp.strategy.sharding.model_summary import show_whole, whole_summaries
from lightning_osdp.strategy.sharding.recompute_policy import named_by_policy
from lightning_osdp.strategy.sharding.resharding import reshard_before_hooks
from lightning_osdp.strategy.sharding.wrapping import Wrapping, wrapping_of


class UnitsStrategy(RanksStrategy):
    """Training over the units of a plan, through all stages of all Trainers that have the module.

    Args:
        options: what the plan may be.
        **kwargs: of `RanksStrategy`.

    Attributes:
        census: what was alive when fit began, on CPU, where what is alive is counted; None elsewhere.
    """

    # Not FSDPStrategy's: torch's wrap() in configure_model leaves modules as they are, for the plan shards them.
    model_sharded_context = Strategy.model_sharded_context

    def __init__(self, options: Options, **kwargs: Any) -> None:
        self._options = options
        self._plan: Plan | None = None
        self.census: Census | None = None
        self._division = Division()
        self._is_for_training = False
        self._wrapping: Wrapping | None = None
        self._setting_up = ExitStack()
        self._batches: BatchWatch | None = None
        # of the whole model's optimizers, until there are those of the sharded one
        self._groups: Sequence[Group] | None = None
        super().__init__(**kwargs)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before setup, and where a model is evaluated that no plan was made for."""
        return self._plan if self._wrapping is None else self._wrapping.plan

    @override
    def setup_environment(self) -> None:
        is_fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        self.census = Census("cpu") if is_fitting and self.root_device.type == "cpu" else None
        super().setup_environment()
        module = self.lightning_module
        assert module is not None
        if module.trainer.state.fn == TrainerFn.FITTING:
            averaging.check_averaging(module.trainer, self._state_dict_type)
            if wrapping_of(module) is not None:
                self._setting_up.enter_context(averaging.no_copies_of(module))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._setting_up.close()
        assert self.model is not None
        if is_overridden("configure_sharded_model", self.lightning_module):
            raise ConfigurationError(
                "Expected configure_model, got configure_sharded_model, after which Lightning leaves sharding to the"
                " module itself. Rename it: the plan shards."
            )
        found = wrapping_of(self.model)
        if found is not None:
            # Before anything converts shards to another precision.
            found.check_settings(self._settings())
            found.check_parameters()
        with torch.inference_mode(mode=False):  # whatever the caller is in: what is sharded may be trained later
            super().setup(trainer)

    @property
    @override
    def _has_states(self) -> bool:
        return self._wrapping is not None

    @override
    def on_exception(self, exception: BaseException) -> None:
        sharded = None if self._wrapping is None else self._wrapping.sharded
        try:
            explain_shortage(exception, self, sharded)
            explain_unread(exception, sharded)
        finally:
            super().on_exception(exception)  # the others wait to be told

    @override
    def teardown(self) -> None:
        self._setting_up.close()
        super().teardown()

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, pl.LightningModule)
        is_fitting = model.trainer.state.fn == TrainerFn.FITTING
        found = wrapping_of(model)
        if found is not None and found.sharded.is_whole and is_fitting:
            found.undo()  # it was evaluated first, when there was nothing to plan for
            found = None
        if found is None:
            summaries = whole_summaries(model.trainer, model)
            found = self._wrap(model)
            found.summaries = summaries
            found.hold()
        elif found is not self._wrapping:
            self._take_over(found)
        self._wrapping = found
        if is_fitting:
            if found.plan is not None and not self._is_for_training:
                self._prepare_training(found, model.trainer)
            self._division.begin(model.trainer)
            saving.tell_of_incomplete(model.trainer)
            show_whole(model.trainer, found.summaries)
            averaging.average_shards(model.trainer, found.sharded, self.root_device)
        reshard_before_hooks(model.trainer, found.sharded)
        found.sharded.reshard()
        return found.sharded.module

    def _take_over(self, found: Wrapping) -> None:
        """Goes on with the units that another strategy sharded the model in."""
        self._is_for_training = False
        rank_zero_info("OSDP: another Trainer has sharded this model already, and its units are used as they are.")

    def _prepare_training(self, found: Wrapping, trainer: pl.Trainer) -> None:
        """Trains, for the first time, units that were there before."""
        assert found.plan is not None
        found.check_wishes(self._options)
        self._forget_division(trainer)
        self._division = given_division(trainer, found.plan, self._options)
        publish(trainer, found.plan)
        self._is_for_training = True

    def _forget_division(self, trainer: pl.Trainer) -> None:
        """Before one is chosen, from loaders and a Trainer as the user has them."""
        self._division.end(trainer)
        self._division = Division()

    def _settings(self) -> dict[str, str]:
        """What units are made with besides a plan."""
        return {
            "precision": str(self.precision_plugin.precision),
            "arguments": f"{self.kwargs}, {self._activation_checkpointing_kwargs}",
        }

    @property
    @override
    def mixed_precision_config(self) -> MixedPrecision | None:
        """None where everything is computed and reduced in the parameters' own dtype."""
        config = super().mixed_precision_config
        return None if config == MixedPrecision() else config

    @property
    def _fsdp_kwargs(self) -> dict[str, Any]:
        """What the user gave for sharding itself."""
        return {**self.kwargs, "mixed_precision": self.mixed_precision}

    def _wrap(self, module: pl.LightningModule) -> Wrapping:
        kwargs = {**self._fsdp_kwargs, "mixed_precision": self.mixed_precision_config}
        options = replace(self._options, recomputed=named_by_policy(module, self._activation_checkpointing_kwargs))
        self._forget_division(module.trainer)
        setup = Setup(
            device=self.root_device,
            num_nodes=self.num_nodes,
            local_ranks=self.num_processes,
            precision=str(self.precision_plugin.precision),
            mixed_precision=self.mixed_precision_config,
            state_dict_type=self._state_dict_type,
        )
        choose = chosen if module.automatic_optimization else planned_by_hand
        found = choose(module, options, setup, known=self.plan)
        if isinstance(found, str):
            self._plan = None
            return self._finished(separated(module, found, options, setup, **kwargs))
        self._plan, self._division, estimate, self._groups, self._batches = found
        self._is_for_training = module.trainer.state.fn == TrainerFn.FITTING
        if self._plan is not None and self._is_for_training:
            tell_of_unfreezing(module.trainer)
        if self._plan is not None:
            publish(module.trainer, self._plan, estimate, setup)
        return self._finished(sharded(module, self._plan, options, setup, **kwargs))

    def _finished(self, found: ShardedModel) -> Wrapping:
        _move_torchmetrics_to_device(found.module, self.root_device)
        return Wrapping(found, self._settings())

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        whole, self._groups = self._groups, None
        on_all_ranks(lambda: self._check_optimizers(whole))

    def _check_optimizers(self, whole: Sequence[Group] | None) -> None:
        if whole is not None:
            check_same_groups(whole, groups_of(self.optimizers, self._sharded.names_by_group))
        self._sharded.check_optimizers(self.optimizers)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._batches is not None:
            self._batches.look(args[0], self.global_rank)
        return self._sharded.run(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._sharded.evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._sharded.evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._sharded.evaluate(super().predict_step, *args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._sharded.before_backward()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Reduces gradients in every micro-batch but of units with ``sync="last"``: Lightning would keep all whole."""
        with self._sharded.accumulating():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """The training loader with the plan's micro-batch; any other loader as it is."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if trainer is None or not trainer.training:
            return dataloader
        loader = self._division.loader(dataloader)
        # A resumed fit begins with an iterator that Lightning makes before it tells the sampler its epoch.
        epochs: Any = trainer.fit_loop.epoch_progress.current
        _set_sampler_epoch(loader, epochs.processed)
        return loader

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            # Of a child that ran without a backward, optimizers would see gathered parameters.
            self._sharded.reshard()
        with self._sharded.stepping(optimizer):
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._sharded.after_optimizer_step()
        return result

    @property
    def _sharded(self) -> ShardedModel:
        if self._wrapping is None:
            raise ConfigurationError(
                "Expected a sharded model, but setup has not been yet, or has failed. Ask for weights, and save them,"
                " from on_fit_start on."
            )
        return self._wrapping.sharded
