"""`OSDPStrategy`: plans in setup, shards the model as planned, then leaves training to Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply import fully_shard_arguments
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing import averaging, load, saving, stored_plan
from lightning_osdp.strategy.checkpointing.generators import Generators
from lightning_osdp.strategy.dry_run.rehearsing import RehearsingStrategy
from lightning_osdp.strategy.options import Options, check_fsdp_kwargs, pop_prefetch
from lightning_osdp.strategy.precision import OSDPPrecision
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero
from lightning_osdp.strategy.runtime.launcher import GatheringLauncher, StartMethod


class OSDPStrategy(RehearsingStrategy):
    """Fully sharded data parallel training in which every operator is sharded only as far as memory demands.

    At the start of fit the model's own training step is profiled on a batch of its training data, the fastest plan
    under the memory limit is searched, and the model is sharded as the plan says, by torch's
    ``fully_shard``. The plan is printed, written to
    ``osdp_plan.json`` in the trainer's log directory, and compared with what was measured when fit ends.

    Args:
        memory_limit: bytes that tensors of one rank may take in every phase of a step, as an int or a text such as
            ``"8GiB"`` (2^30) or ``"500MB"`` (10^6): parameters, gathered copies, gradients, optimizer state,
            activations, buffers and the batch. A percentage such as ``"90%"`` is of what is free on the GPU, or of the
            rank's share of the machine's available memory on CPU; None: all of that, with ``batch_size="scale"`` 95%.
        plan: a `Plan`, or the path of one or of a checkpoint that was trained under one, that is used as it is:
            nothing is profiled, `search`, `search_space` and `cost_model` have no effect, and the other options must
            agree with it.
        batch_size: ``"auto"`` keeps exactly the global batch that the user configured and may divide it into other
            micro-batches; ``"keep"`` leaves the loader alone; ``"scale"`` chooses the micro-batch with the best
            predicted samples/s; an int is that micro-batch. A new size rebuilds the training loader only.
        search: ``"depth_first"`` (the paper's, exact), ``"greedy"`` (near-instant, certified gap) or ``"exhaustive"``.
        search_space: limits on what the plan may choose; None: everything.
        global_batch_size: samples of all ranks in an optimizer step; None: those that loaders and
            ``accumulate_grad_batches`` make. Not with ``batch_size="scale"``.
        accumulate_in_fp32: whether gradients add up in float32 under mixed precision, too: each micro-batch then
            reduces them.
        profile_batch: what is profiled, and so what the limit is kept for. None: the first batch of the training data;
            ``"longest"``: of its first 100, and of those of all ranks, the one with most elements; a batch as the
            loader gives it; or a function that takes the loader's batches, as an iterator, and returns one. Where
            batches differ, it should be the largest.
        rehearse: whether each rank takes a step alone before the first one, to see that memory suffices; where it does
            not, all change to a plan with less memory. ``"auto"``: on GPUs.
        cost_model: ``"simulate"`` (a step as ``fully_shard`` runs it) or ``"paper"`` (the sums of equation 1).
        start_method: ``"popen"`` runs the script once per rank; ``"spawn"``, ``"forkserver"`` and, for notebooks,
            ``"fork"`` start workers, after which this process has the trained weights. Unused under torchrun.
        **fsdp_kwargs: arguments of Lightning's ``FSDPStrategy``, as far as ``fully_shard`` has a counterpart.

    Raises:
        ConfigurationError: an option cannot be used, or one of ``fsdp_kwargs`` is what the plan decides.
    """

    strategy_name = "osdp"
    # Lightning's accelerator connector refuses CPU for the names in FSDPStrategy's own list.
    _registered_strategies: list[str] = []  # noqa: RUF012 (Lightning's declaration)

    def __init__(
        self,
        memory_limit: int | str | None = None,
        plan: Plan | str | Path | None = None,
        batch_size: int | Literal["auto", "keep", "scale"] = "auto",
        search: str = "depth_first",
        search_space: SearchSpace | None = None,
        *,
        global_batch_size: int | None = None,
        accumulate_in_fp32: bool = False,
        profile_batch: Any = None,
        rehearse: bool | Literal["auto"] = "auto",
        cost_model: str = "simulate",
        start_method: StartMethod = "popen",
        **fsdp_kwargs: Any,
    ) -> None:
        check_fsdp_kwargs(fsdp_kwargs)
        options = Options(
            memory_limit=memory_limit,
            plan=plan,
            batch_size=batch_size,
            search=search,
            search_space=SearchSpace() if search_space is None else search_space,
            cost_model=cost_model,
            global_batch_size=global_batch_size,
            accumulate_in_fp32=accumulate_in_fp32,
            profile_batch=profile_batch,
            engine=pop_prefetch(fsdp_kwargs),
        ).checked()
        self._generators = Generators()
        self._whole_state: dict[str, Any] | None = None
        # What the plan decides is given here, so that LightningCLI does not offer it.
        super().__init__(
            options,
            start_method=start_method,
            rehearse=rehearse,
            cpu_offload=None,
            auto_wrap_policy=None,
            sharding_strategy="FULL_SHARD",
            device_mesh=None,
            **fsdp_kwargs,
        )
        fully_shard_arguments(self._fsdp_kwargs)  # what it cannot take is said now

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

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Lightning's own, told of anew whenever somebody catches warnings
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        if self._checkpoint_io is None:
            self._checkpoint_io = saving.CompleteFiles()
        if isinstance(self.precision_plugin, OSDPPrecision):
            self.precision_plugin.use_device(self.root_device)

    @override
    def teardown(self) -> None:
        if self._wrapping is not None and self.optimizers and isinstance(self._launcher, GatheringLauncher):
            # The weights are about to move to the CPU, out of the process group's reach.
            self._whole_state = self._sharded.whole_state(on_all_ranks=self.num_nodes > 1)
        super().teardown()

    def whole_state_dict(self, *, on_all_ranks: bool = False) -> dict[str, Any] | None:
        """Whole weights under the names of the user's own model, to save or to load into it; all ranks must call it.

        Args:
            on_all_ranks: whether every rank gets them, and holds all of them; otherwise rank 0 does, the others None.
        """
        return self._sharded.whole_state(on_all_ranks=on_all_ranks)

    @contextmanager
    def gathered(self, module: nn.Module | None = None, *, write_back: bool = False) -> Iterator[None]:
        """Within it, parameters are whole on every rank: to generate, to copy, to export; all ranks must enter it.

        The module runs forward without collectives, and on one rank alone if need be, so that
        ``if trainer.is_global_zero: net.save_pretrained(folder)`` may stand inside. There is no backward inside, and
        parameters have the dtype in which they are kept, not that of mixed precision.

        Args:
            module: the LightningModule, which None stands for, or a module inside it.
            write_back: whether changes of parameters are kept: each rank keeps its rows, so all must change them alike.

        Raises:
            ConfigurationError: the model is not sharded yet, or the module is not in it.
        """
        if self._wrapping is None:
            raise ConfigurationError(
                "Expected a sharded model, of which there are parameters to gather, but setup has not been yet. Call"
                " gathered() from on_fit_start on."
            )
        root = self._wrapping.module
        module = root if module is None else module
        if not any(child is module for child in root.modules()):
            raise ConfigurationError(
                "Expected the LightningModule that is trained or a module inside it, got another one. Pass self, or"
                " one of its attributes."
            )
        with self._sharded.gathered(module, writes=write_back):
            yield

    def take_whole_state(self) -> dict[str, Any] | None:
        """Weights as they were when fit ended, for the main process; the strategy forgets them."""
        state, self._whole_state = self._whole_state, None
        return state

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._sharded.carry_hooks()  # of what has been registered in hooks of the Trainer
        self._generators.begin(self.root_device)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if averaging.is_averaging(self.lightning_module.trainer):
            self._sharded.reshard()  # the state dict would have views of what is gathered, where the average goes next
        return self._sharded.model_state(self._state_dict_type)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return self._sharded.optimizer_state(optimizer, self._state_dict_type)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        self._division.save(checkpoint)
        self._generators.save(checkpoint, self.root_device)
        stored_plan.store(self.plan, checkpoint)
        saving.save(
            checkpoint,
            self.broadcast(filepath),
            state_dict_type=self._state_dict_type,
            checkpoint_io=self.checkpoint_io,
            storage_options=storage_options,
        )

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        path = Path(self.broadcast(checkpoint_path))
        loaded = load.load(
            on_rank_zero(lambda: load.to_load(path, module.trainer)),
            self._sharded,
            self.optimizers if is_fitting else [],
            strict=module.strict_loading,
            weights_only=weights_only,
            keeps_weights=is_fitting and averaging.is_averaging(module.trainer),
            trainer=module.trainer,
        )
        if is_fitting:
            self._division.resume(module.trainer, loaded)
            self._generators.resume(loaded, self.root_device)
            stored_plan.tell_of_change(self.plan, loaded)
        return loaded
