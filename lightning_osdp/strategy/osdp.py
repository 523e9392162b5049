"""`OSDPStrategy`: plans in setup, shards the model as planned, then leaves training to Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply import fully_shard_arguments
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.strategy import averaging, checkpoint, saving, stored
from lightning_osdp.strategy.agreement import on_rank_zero
from lightning_osdp.strategy.complete import to_load
from lightning_osdp.strategy.launcher import GatheringLauncher, StartMethod
from lightning_osdp.strategy.options import Options, check_fsdp_kwargs, pop_prefetch
from lightning_osdp.strategy.precision import OSDPPrecision
from lightning_osdp.strategy.rehearsing import RehearsingStrategy
from lightning_osdp.strategy.rng import Generators


class OSDPStrategy(RehearsingStrategy):
    """Fully sharded data parallel training in which every operator is sharded only as far as memory demands.

    At the start of fit the model's own training step is profiled on a batch of its training data, the fastest plan
    under the memory limit is searched, and the model is sharded as the plan says, by torch's
    ``fully_shard``. The plan is printed, written to
    ``osdp_plan.json`` in the trainer's log directory, and compared with what was measured when fit ends.

    Args:
        memory_limit: bytes that tensors of one rank may take in every phase of a step, as an int or a text such as
            ``"8GiB"`` (2^30) or ``"500MB"`` (10^6): parameters, gathered copies, gradients, optimizer state,
            activations, buffers and the batch. None: what is free on the GPU, or the rank's share of the machine's
            available memory on CPU.
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
        rehearse: bool | Literal["auto"] = "auto",
        cost_model: str = "simulate",
        start_method: StartMethod = "popen",
        **fsdp_kwargs: Any,
    ) -> None:
        check_fsdp_kwargs(fsdp_kwargs)
        options = Options.checked(
            memory_limit=memory_limit,
            plan=plan,
            batch_size=batch_size,
            search=search,
            search_space=search_space,
            cost_model=cost_model,
            global_batch_size=global_batch_size,
            accumulate_in_fp32=accumulate_in_fp32,
        )
        prefetch = pop_prefetch(fsdp_kwargs)
        self._generators = Generators()
        self._whole_state: dict[str, Any] | None = None
        # What the plan decides is given here, so that LightningCLI does not offer it.
        super().__init__(
            options,
            prefetch,
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

    def take_whole_state(self) -> dict[str, Any] | None:
        """Weights as they were when fit ended, for the main process; the strategy forgets them."""
        state, self._whole_state = self._whole_state, None
        return state

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
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
        stored.store(self.plan, checkpoint)
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
        loaded = checkpoint.load(
            on_rank_zero(lambda: to_load(path, module.trainer)),
            self._sharded,
            self.optimizers if is_fitting else [],
            strict=module.strict_loading,
            weights_only=weights_only,
            keeps_weights=is_fitting and averaging.is_averaging(module.trainer),
        )
        if is_fitting:
            self._division.resume(module.trainer, loaded)
            self._generators.resume(loaded, self.root_device)
            stored.tell_of_change(self.plan, loaded)
        return loaded
