"""`OSDPStrategy`, which plans in setup, shards the model as planned and then leaves training to Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply import ShardedModel, fully_shard_arguments
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler import Census
from lightning_osdp.strategy.checkpointing import averaging, entries, load, saving
from lightning_osdp.strategy.checkpointing.entries import Generators
from lightning_osdp.strategy.dry_run import plan_that_fits
from lightning_osdp.strategy.longer_batches import LongerBatches, longer_batches_of
from lightning_osdp.strategy.options import Options, check_fsdp_kwargs, pop_cpu_offload, pop_prefetch
from lightning_osdp.strategy.planning.updates_ahead import why_updates_wait
from lightning_osdp.strategy.precision import OSDPPrecision
from lightning_osdp.strategy.racing import Racing, race_of
from lightning_osdp.strategy.runtime.all_ranks import on_all_ranks, on_rank_zero
from lightning_osdp.strategy.runtime.error_texts import explain_step_error
from lightning_osdp.strategy.runtime.launcher import GatheringLauncher, StartMethod, check_interactive
from lightning_osdp.strategy.runtime.ranks import RanksTogether
from lightning_osdp.strategy.sharding.resharding import runs_after_backward, writes_between_steps
from lightning_osdp.strategy.sharding.units import Units, reusable_model


class OSDPStrategy(FSDPStrategy):
    """Fully sharded data parallel training in which every operator is sharded only as far as memory demands.

    At the start of fit the model's own training step is profiled on a batch of its training data, the fastest plan
    under the memory limit is searched, and torch's ``fully_shard`` shards the model as planned. The plan is printed
    and written to ``osdp_plan.json`` in the trainer's log directory. When fit ends, measured numbers are printed beside
    the plan's. From setup on, the attribute `plan` is the plan; `gathered` and `whole_state_dict` give whole weights.

    ``Trainer(strategy="osdp")`` has all options at their defaults::

        strategy = OSDPStrategy(memory_limit="8GiB", batch_size="keep")
        trainer = Trainer(strategy=strategy, accelerator="gpu", devices=8)
        trainer.fit(model, datamodule)

    Args:
        memory_limit: bytes that tensors of one rank may take in every phase of a step, as an int or a text such as
            ``"8GiB"`` (2^30) or ``"500MB"`` (10^6): parameters, gathered copies, gradients, optimizer state,
            activations, buffers and the batch. A percentage such as ``"90%"`` is of nine tenths of what is free on the
            GPU, or of the rank's share of the machine's available memory on CPU; None: all of that, with
            ``batch_size="scale"`` 95%.
        host_memory_limit: bytes of the host's memory, as an int or a text, that a rank may take for optimizer states
            that are there, with copies of shards and gradients, for shards of units, and for activations that
            blocks offload; None: the rank's share of what is free on its machine.
        plan: a `Plan`, or the path of one or of a checkpoint that was trained under one, that is used as it is:
            nothing is profiled, `search`, `search_space` and `cost_model` have no effect, and the other options must
            agree with it.
        batch_size: ``"auto"`` keeps exactly the global batch that the user configured and may divide it into other
            micro-batches, where that is shown to train the same; ``"divide"`` does so wherever the loss is a mean over
            samples, whatever else happens in each micro-batch; ``"keep"`` leaves the loader alone; ``"scale"`` chooses
            the micro-batch with the best predicted samples/s; an int is that micro-batch. A new size rebuilds the
            training loader only.
        search: ``"depth_first"`` (the paper's, exact), ``"greedy"`` (near-instant; its gap may be larger) or
            ``"exhaustive"`` (for a few operators).
        search_space: limits on what the plan may choose; None: the defaults of `SearchSpace`.
        global_batch_size: samples of all ranks in an optimizer step; None: those that loaders and
            ``accumulate_grad_batches`` make. Not with ``batch_size="scale"``.
        accumulate_in_fp32: True has gradients accumulate in float32 under mixed precision: each micro-batch then
            reduces them.
        profile_batch: the batch that is profiled, for which the memory limit is kept. None: the first batch of the
            training data; ``"longest"``: the batch with most elements among the first 100 of all ranks; a batch as the
            loader gives it; or a function that takes the loader's batches, as an iterator, and returns one. Where
            batches differ, give the largest.
        dry_run: True has training begin with a memory dry run, an optimizer step that each rank takes alone; where the
            step does not fit, all ranks change to a plan with less memory. ``"auto"``: on GPUs.
        race: True has plans that the module can change to take turns in the first optimizer steps, all of which train
            the same up to rounding; the fastest goes on. They race again when steps have become slower. ``"auto"``:
            where predictions leave open which is fastest, among plans that add up nothing in another order, for a tenth
            of the fit's steps at most. Not with ``Trainer(deterministic=True)`` nor with `plan`.
        longer_batches: True has all ranks change to a plan with less memory before a batch that is too long for the one
            in use, and back for shorter ones; an error says so before the step if none has room for it. In fits that
            are planned for, in automatic optimization, on GPUs and wherever `memory_limit` is given.
        node_size: ranks of a node, between which links are faster than between nodes; None: as the ranks were started,
            by ``LOCAL_WORLD_SIZE`` or the Trainer's ``devices``. Plans are made for nodes of this size.
        cost_model: ``"simulate"`` (a step as ``fully_shard`` runs it) or ``"paper"`` (equation 1 of the paper).
        start_method: ``"popen"`` runs the script once per rank; ``"spawn"``, ``"forkserver"`` and, for notebooks,
            ``"fork"`` start workers, after which this process has the trained weights. Unused under torchrun.
        **fsdp_kwargs: arguments of Lightning's ``FSDPStrategy``, as far as ``fully_shard`` has a counterpart.
            ``cpu_offload=True`` has the host update all that is trained, with optimizer states in the host's memory,
            and shards with their gradients but of units that are trained in part.

    Raises:
        ConfigurationError: an option cannot be used, or the plan decides what one of ``fsdp_kwargs`` asks for.
    """

    strategy_name = "osdp"
    # Lightning's accelerator connector refuses CPU for the names in FSDPStrategy's own list.
    _registered_strategies: list[str] = []  # noqa: RUF012 (Lightning's declaration)
    # FSDPStrategy's has torch's wrap() shard modules in configure_model; here the plan shards them later.
    model_sharded_context = Strategy.model_sharded_context

    def __init__(
        self,
        memory_limit: int | str | None = None,
        plan: Plan | str | Path | None = None,
        batch_size: int | Literal["auto", "divide", "keep", "scale"] = "auto",
        search: str = "depth_first",
        search_space: SearchSpace | None = None,
        *,
        host_memory_limit: int | str | None = None,
        global_batch_size: int | None = None,
        accumulate_in_fp32: bool = False,
        profile_batch: Any = None,
        dry_run: bool | Literal["auto"] = "auto",
        race: bool | Literal["auto"] = "auto",
        longer_batches: bool = True,
        node_size: int | None = None,
        cost_model: str = "simulate",
        start_method: StartMethod = "popen",
        **fsdp_kwargs: Any,
    ) -> None:
        check_fsdp_kwargs(fsdp_kwargs)
        if search_space is None:
            search_space = SearchSpace()
        if isinstance(search_space, SearchSpace):  # else it is refused below
            search_space = pop_cpu_offload(fsdp_kwargs, search_space)
        options = Options(
            memory_limit=memory_limit,
            host_memory_limit=host_memory_limit,
            plan=plan,
            batch_size=batch_size,
            search=search,
            search_space=search_space,
            cost_model=cost_model,
            global_batch_size=global_batch_size,
            accumulate_in_fp32=accumulate_in_fp32,
            profile_batch=profile_batch,
            dry_run=dry_run,
            race=race,
            longer_batches=longer_batches,
            node_size=node_size,
            start_method=start_method,
            engine=pop_prefetch(fsdp_kwargs),
        ).checked()
        self._units = Units(self, options)
        self._ranks, self._generators = RanksTogether(self), Generators()
        self._setting_up = ExitStack()
        self._racing: Racing | None = None  # None before a fit, and in one without a race
        self._longer: LongerBatches | None = None  # None before a fit, and in one that keeps its plan for any batch
        self._may_write = True  # code of users runs between two steps, beside hooks
        self._agrees_late = True  # it runs between backward and the optimizer's step
        self._loading: load.Loading | None = None  # the checkpoint that the Trainer restores
        self.census: Census | None = None  # tensors alive when fit began, on CPU, where live tensors are counted
        # LightningCLI leaves out arguments that are given here: the plan decides them.
        super().__init__(auto_wrap_policy=None, sharding_strategy="FULL_SHARD", device_mesh=None, **fsdp_kwargs)
        fully_shard_arguments({**self.kwargs, "mixed_precision": self.mixed_precision})  # raises before any setup

    @property
    def plan(self) -> Plan | None:
        """Plan in use; None before setup, and where a model is evaluated without a plan."""
        if self._units.model is not None:
            return self._units.model.sharded.plan
        return self._launcher.plan if isinstance(self._launcher, GatheringLauncher) else None

    @property
    def is_racing(self) -> bool:
        """True while plans take turns in a race: `plan` is then the one whose turn it is."""
        return self._racing is not None and not self._racing.is_over

    @property
    def has_longer_batches(self) -> bool:
        """True while a plan is in use that was made for longer batches than the profiled one."""
        return self._longer is not None and self._longer.number > 0

    @property
    def racer(self) -> int | None:
        """Number, in the line that began the latest race, of the plan that has its turn or has won; None before one."""
        return None if self._racing is None else self._racing.number

    @property
    def profile(self) -> ModelProfile | None:
        """Profile of the model that this rank measured; None before a fit, and where the plan was given."""
        return self._units.choice.profile

    @property
    def cluster(self) -> Cluster | None:
        """Ranks and links as this rank measured them; None before a fit, and where the plan was given."""
        return self._units.choice.cluster

    @property
    def _sharded(self) -> ShardedModel:
        return self._units.sharded

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None  # the Trainer connects it before any hook
        return self.lightning_module.trainer

    @property
    @override
    def precision_plugin(self) -> FSDPPrecision:
        return OSDPPrecision() if self._precision_plugin is None else super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if type(precision_plugin) is FSDPPrecision:
            precision_plugin = OSDPPrecision(precision_plugin.precision)
        FSDPStrategy.precision_plugin.fset(self, precision_plugin)  # type: ignore[attr-defined]

    @property
    @override
    def mixed_precision_config(self) -> MixedPrecision | None:
        """Mixed precision of units; None where everything is computed and reduced in the parameters' own dtype."""
        config = super().mixed_precision_config
        return None if config == MixedPrecision() else config

    # processes

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        start_method = self._units.options.start_method
        if start_method == "popen":
            super()._configure_launcher()
        elif self.cluster_environment.creates_processes_externally:
            rank_zero_warn(f"OSDP: start_method={start_method!r} is ignored, the ranks have been started already.")
        else:
            self._launcher = GatheringLauncher(self, start_method)
        check_interactive(self._launcher, start_method)

    @override
    def setup_environment(self) -> None:
        trainer = self._trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.census = Census() if is_fitting and self.root_device.type == "cpu" else None
        super().setup_environment()
        self._ranks.begin(has_states=lambda: self._units.model is not None)
        if is_fitting:
            averaging.check_averaging(trainer, self._state_dict_type)
            if reusable_model(trainer.lightning_module) is not None:
                self._setting_up.enter_context(averaging.no_copies_of(trainer.lightning_module))
        # Lightning causes this one, and Python repeats it after each catch_warnings
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        if self._checkpoint_io is None:
            self._checkpoint_io = saving.CompleteFiles()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = saving.CompleteFiles()  # ignored if the user wraps another one
        if isinstance(self.precision_plugin, OSDPPrecision):
            self.precision_plugin.use_device(self.root_device)

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            turn = "" if self._racing is None else self._racing.turn
            explain_step_error(exception, self, None if self._units.model is None else self._sharded, turn=turn)
        finally:
            self._ranks.report(exception)  # even then: the other ranks wait in collectives

    @override
    def teardown(self) -> None:
        if self._units.model is not None and self.optimizers and isinstance(self._launcher, GatheringLauncher):
            # Teardown moves the weights to the CPU, where an NCCL group cannot gather them.
            self._launcher.whole_state = self._sharded.whole_state(on_all_ranks=self.num_nodes > 1)
        self._setting_up.close()
        for changing in (self._racing, self._longer):
            if changing is not None:
                changing.end(self._trainer)  # an error has ended the fit before it could
        try:
            super().teardown()
            self.checkpoint_io.teardown()  # waits for asynchronous writes; FSDPStrategy does not call it
        finally:
            self._ranks.end()

    # from a model to units

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._setting_up.close()
        assert self.model is not None
        self._units.check(self.model)  # before the precision plugin converts shards of another strategy
        if trainer.state.fn == TrainerFn.FITTING:
            saving.check_folders(trainer, self._state_dict_type)
        with torch.inference_mode(mode=False):  # the caller may be in it, and shards may be trained later
            super().setup(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, pl.LightningModule)
        return self._units.set_up(model, previous=self.plan)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self._units.division.as_given(trainer):
            super().setup_optimizers(trainer)
        on_all_ranks(lambda: self._units.check_optimizers(self.optimizers))

    # steps

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Gives the training loader the plan's micro-batch size; other loaders stay as they are."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        if trainer is None or not trainer.training:
            return dataloader
        loader = self._units.division.loader(dataloader)
        # In a resumed fit Lightning makes the iterator before it tells the sampler the epoch.
        epochs: Any = trainer.fit_loop.epoch_progress.current
        _set_sampler_epoch(loader, epochs.processed)
        return loader

    @override
    def on_train_start(self) -> None:
        host = self._sharded.host
        why_wait = why_updates_wait(self._trainer, self.optimizers) if len(host) else None
        self._sharded.begin_fit(updates_ahead=why_wait is None)
        if isinstance(self.precision_plugin, OSDPPrecision):
            # updates that have begun in backward are not taken once gradients are written to, by a factor of 1 as well
            self.precision_plugin.writes_always = why_wait is not None or not len(host)
        is_manual = not self._trainer.lightning_module.automatic_optimization
        found = (is_manual or runs(self._trainer) for runs in (writes_between_steps, runs_after_backward))
        self._may_write, self._agrees_late = map(bool, self._sharded.largest([*map(int, found)]))
        if why_wait is not None and any(map(host.held_in, self.optimizers)):
            rank_zero_info(f"OSDP: the host updates in the optimizer's step alone, not beside backward: {why_wait}.")
        if self._units.model is not None:
            self._units.model.come_back()
        dry_run = self._units.options.dry_run
        if dry_run == "auto":
            dry_run = self.root_device.type != "cpu"
        # In manual optimization training_step updates weights and states itself, so a dry run would train.
        if dry_run and self.plan is not None and self._trainer.lightning_module.automatic_optimization:
            plan_that_fits(self._trainer, self._units)
        self._racing = race_of(self._trainer, self._units, runs_dry=bool(dry_run))
        self._longer = longer_batches_of(self._trainer, self._units, self._racing)
        if self._longer is not None:
            self._longer.begin(self._trainer)
        if self._racing is not None:
            self._racing.begin(self._trainer)
        self._sharded.carry_hooks()  # hooks of the Trainer may have registered hooks on modules
        self._generators.begin(self.root_device)

    @override
    def on_train_end(self) -> None:
        self._sharded.end_fit()
        if self._longer is not None:
            self._longer.go_back()
            self._longer.end(self._trainer)
        if self._racing is not None:
            self._racing.break_off(self._trainer)
            self._racing.end(self._trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._units.choice.watch is not None:
            self._units.choice.watch.look(args[0], self.global_rank)
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
        self._sharded.before_backward(is_followed=not self._agrees_late)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._sharded.reaching_alike(closure_loss) as loss:
            return super().backward(loss, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Has units reduce gradients as planned; Lightning's own would keep all gradients whole until the last one."""
        with self._sharded.accumulating():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if not self._trainer.lightning_module.automatic_optimization:
            # A child that ran without backward is still unsharded, and optimizers update shards.
            self._sharded.reshard()
        with self._sharded.stepping(optimizer):
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        # a child that is still unsharded would run its next forward with old weights
        self._sharded.reshard(may_write=self._may_write)
        return result

    # weights and states

    def whole_state_dict(self, *, on_all_ranks: bool = False) -> dict[str, Any] | None:
        """Gathers whole weights under the names of the user's own model; all ranks must call it.

        Args:
            on_all_ranks: True gives the weights to every rank, which then holds all of them; False gives them to rank
                0 and None to other ranks.
        """
        return self._sharded.whole_state(on_all_ranks=on_all_ranks)

    @contextmanager
    def gathered(self, module: nn.Module | None = None, *, write_back: bool = False) -> Iterator[None]:
        """Keeps parameters whole on every rank inside the ``with`` block, to generate, copy or export.

        All ranks must enter the block. Inside, forward runs without collectives, on one rank alone if need be, so that
        ``if trainer.is_global_zero: net.save_pretrained(folder)`` works. Backward is impossible inside. Parameters have
        the dtype in which they are stored, not that of mixed precision.

        Args:
            module: the LightningModule, which None stands for, or a module inside it.
            write_back: True keeps changes of parameters. Each rank keeps its own rows, so all ranks must make the same
                changes.

        Raises:
            ConfigurationError: the model is not sharded yet, or does not have this module.
        """
        root = self._sharded.module
        module = root if module is None else module
        if not any(child is module for child in root.modules()):
            raise ConfigurationError(
                "Expected the LightningModule that is trained or a module inside it, got another one. Pass self, or"
                " one of its attributes."
            )
        with self._sharded.gathered(module, writes=write_back):
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if callbacks_of(self._trainer, WeightAveraging):
            # views of unsharded parameters in the state dict would change when the average takes their place
            self._sharded.reshard()
        return self._with_values(self._sharded.model_state(self._state_dict_type))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return self._with_values(self._sharded.optimizer_state(optimizer, self._state_dict_type))

    def _with_values(self, state: dict[str, Any]) -> dict[str, Any]:
        """Empties a full state on ranks without values, as FSDPStrategy does, unless hooks will read names."""
        has_values = self._state_dict_type == "sharded" or self.global_rank == 0
        return state if has_values or saving.is_collecting_checkpoint(walk_stack(None)) else {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        on_all_ranks(lambda: entries.check_whole(checkpoint))
        self._units.division.save(checkpoint)
        self._generators.save(checkpoint, self.root_device)
        model = self._units.model
        plan, is_raced = (self.plan, False) if model is None else (model.planned, model.is_raced)
        entries.store_plan(plan, checkpoint, is_raced=is_raced)
        path, write = self.broadcast(filepath), self.checkpoint_io.save_checkpoint
        if self._state_dict_type == "full":
            on_rank_zero(lambda: write(checkpoint, path, storage_options=storage_options))
        else:
            saving.save_shards(checkpoint, path, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        trainer = self._trainer
        with load.local_checkpoint(self.broadcast(checkpoint_path), self) as given:
            path = on_rank_zero(lambda: load.complete_checkpoint(given, trainer))
            self._loading = load.Loading(path, trainer, weights_only=weights_only)
        loaded = self._loading.content
        if trainer.state.fn == TrainerFn.FITTING:
            self._units.division.resume(trainer, entries.stored_division(loaded))
            self._generators.resume(loaded, self.root_device)
        return loaded

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """Leaves the order of loading to Lightning, unlike FSDPStrategy, so that hooks see the checkpoint first."""
        return True

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self._loading is not None
        self._loading.load_model(checkpoint, self._sharded, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._loading is not None
        self._loading.load_optimizers(checkpoint, self._sharded, self._trainer)
        self._loading = None
