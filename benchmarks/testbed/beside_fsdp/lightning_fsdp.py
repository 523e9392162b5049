"""Rivals of OSDP, as a user would give them to the Trainer: ``fully_shard``, and Lightning's strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, ParallelStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from typing_extensions import override

from benchmarks.families import BLOCKS, Family
from benchmarks.testbed.by_hand import gather_ahead, scatter_in_flight
from benchmarks.testbed.plans import plan_of
from lightning_osdp.core.axes import ANYTHING, DP, HDP, HPZ, HSDP, NAMED_MODES, RESIDENT, ZDP, Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.planner.engine import effects_of

_SHARDINGS = {"FULL_SHARD": ZDP, "SHARD_GRAD_OP": DP, "HYBRID_SHARD": HSDP, "HYBRID_SHARD_ZERO2": HDP}
PARALLELIZED = "parallelize_module"
"""Tensor parallelism as users write it: all ranks train on the samples of all."""
SPARSE = "DDP, sparse gradients"
"""DDP that all-gathers the rows of embeddings which have gradients; by SGD, for AdamW takes none."""
UNSHARDED = frozenset({"DDP", SPARSE, PARALLELIZED})
"""Ways to train in which nothing is gathered or reduce-scattered."""
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    **dict.fromkeys(("gate", "up", "mlp.expand", "mlp.0", "layers.0"), ColwiseParallel),
    **dict.fromkeys(("down", "mlp.proj", "mlp.2", "layers.1"), RowwiseParallel),
    **dict.fromkeys(
        ("tokens", "token_embedding", "head", "layers.2"), partial(ColwiseParallel, output_layouts=Replicate())
    ),
}
"""Styles of the modules whose names end so. All else is whole on each rank."""
_STYLES_OF_HEADS: Mapping[str, Callable[[], ParallelStyle]] = {
    **dict.fromkeys(("query", "key", "value"), ColwiseParallel),
    "output": RowwiseParallel,
}
"""Likewise for attention whose heads, those of keys and values, too, ranks divide. It is whole on each rank elsewhere:
where queries, keys and values are of one Linear, or heads are fewer."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train without OSDP."""

    sharding: str
    """``FULL_SHARD``, ``SHARD_GRAD_OP``; ``HYBRID_SHARD`` or ``HYBRID_SHARD_ZERO2``, over the ranks of a node, of which
    torch calls the second ``_HYBRID_SHARD_ZERO2``; one of `UNSHARDED`, and then none of the others. Or modes of OSDP,
    one for each slice of an operator, such as ``hpZ`` or ``ZDP DP``: a plan by hand."""
    is_fully_shard: bool = False
    """True where ``fully_shard`` shards, as users of ``ModelParallelStrategy`` call it, and not ``FSDPStrategy``."""
    by_operator: bool = False
    """True where every Linear is a unit, as the paper's baseline has it; else every block is."""
    inside: str | None = None
    """Part of a name that all operators in these modes have, for a plan by hand; others are whole and ZDP."""
    is_ahead: bool = False
    """True where ``fully_shard`` gathers the next unit ahead, forward and backward, asynchronously."""
    recomputes: bool = False
    """True where blocks are checkpointed. Lightning does so inside of the units that are blocks, which is torch's best
    order, and around the units that are inside of blocks, which is the paper's."""

    @property
    def name(self) -> str:
        """Name for people, which tells one way from the others."""
        sharding = f"fully_shard {self.sharding}" if self.is_fully_shard else self.sharding
        if self._is_by_hand and " " in sharding:
            sharding = " + ".join(f"{number} {mode}" for mode, number in Counter(sharding.split()).items())
        sharding = f"{sharding} of {self.inside}" if self.inside else sharding
        parts = [sharding, *["a unit for each Linear"] * self.by_operator, *["checkpointing"] * self.recomputes]
        parts += ["prefetch"] * self.is_ahead
        return ", ".join(parts)

    @property
    def is_predicted(self) -> bool:
        """True where `plan` predicts the way's steps, as ``fully_shard`` takes them."""
        return self.is_fully_shard or self._is_by_hand

    def strategy(self, module: Family, *, node_size: int | None = None) -> ParallelStrategy | None:
        """Strategy for a Trainer of this module, on nodes of so many ranks; None: OSDP's own, with `plan`."""
        if self.sharding == SPARSE:
            _make_sparse(module)
        if self.sharding in {"DDP", SPARSE}:
            return DDPStrategy()
        if self._is_by_hand:
            return None
        world = dist.group.WORLD
        assert world is not None
        if self.sharding == PARALLELIZED:
            # on the instance, where Lightning finds it as if the class had it
            module.configure_model = partial(_parallelize, module, _mesh(world, None))  # type: ignore[method-assign]
            loader, num_ranks = module.loader, dist.get_world_size()
            module.loader = lambda num_samples, **options: loader(num_ranks * num_samples, **options)  # type: ignore[method-assign]
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=num_ranks)
        nodes = node_size if self._mode["home"] == "node" else None
        if self.is_fully_shard:
            # on the instance, where Lightning finds it as if the class had it
            module.configure_model = partial(self._fully_shard, module, _mesh(world, nodes))  # type: ignore[method-assign]
            return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
        policy = {*BLOCKS} if self.recomputes else None
        return LightningFSDP(
            "_HYBRID_SHARD_ZERO2" if self.sharding == "HYBRID_SHARD_ZERO2" else self.sharding,
            auto_wrap_policy={*self._kinds},
            activation_checkpointing_policy=policy,
            device_mesh=None if nodes is None else _mesh(world, nodes),  # of a tuple Lightning makes one for CUDA
        )

    def plan(
        self,
        module: Family,
        *,
        world_size: int,
        micro_batch_size: int,
        num_micro_batches: int = 1,
        node_size: int | None = None,
    ) -> Plan:
        """Plan of what the strategy does; where not `is_predicted`, the most similar one of ``fully_shard``.

        ``FSDPStrategy`` reduces all gradients once, at the end, and ``ModelParallelStrategy`` in every micro-batch.
        (The root of FULL_SHARD is gathered in every micro-batch, the plan's only in the first one. DDP has no plan like
        it: of that for SHARD_GRAD_OP, only the micro-batches are its own.)
        """
        mode, names = self._mode, [name for name, child in module.named_modules() if isinstance(child, self._kinds)]
        slices = tuple(self.sharding.split()) if self._is_by_hand else (mode.name,)
        modes = {name: slices if f".{self.inside or ''}" in f".{name}" else (ZDP.name,) for name in names}
        if RESIDENT.name in slices:
            trained = {name for name in names if any(p.requires_grad for p in module.get_submodule(name).parameters())}
            modes |= dict.fromkeys(trained, (DP.name,))
        if mode["home"] == "node":
            modes[""] = (HDP.name,)
        plan = plan_of(
            module,
            modes,
            world_size=world_size,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            node_size=node_size,
            backward_prefetch="pre" if self.is_fully_shard else "none",  # torch does, without being asked
            forward_prefetch=self.is_ahead,
            asynchronous_unshard=self.is_ahead,
        )
        blocks = [name for name, child in module.named_modules() if isinstance(child, BLOCKS) and self.recomputes]
        sync = "last" if num_micro_batches > 1 and not self.is_fully_shard else "every"
        return replace(
            plan,
            units=tuple(
                replace(unit, treatments=tuple(each.but(sync=sync).within(ANYTHING) for each in unit.treatments))
                for unit in plan.units
            ),
            blocks=Block.recomputing(blocks),
        )

    @property
    def _kinds(self) -> tuple[type[nn.Module], ...]:
        return (nn.Linear,) if self.by_operator else BLOCKS

    @property
    def _is_by_hand(self) -> bool:
        return all(each in NAMED_MODES for each in self.sharding.split())

    @property
    def _mode(self) -> Treatment:
        return HPZ if self.sharding == HPZ.name else _SHARDINGS.get(self.sharding, DP)

    def _fully_shard(self, module: Family, mesh: DeviceMesh) -> None:
        """Shards once, in ``configure_model``; checkpointing is inside of units. On gloo these reduce as OSDP's do."""
        if isinstance(module, FSDPModule):
            return
        if self.recomputes:
            apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, BLOCKS))
        units = [child for child in module.modules() if isinstance(child, self._kinds)]
        for child in units:
            fully_shard(child, mesh=mesh, reshard_after_forward=not effects_of(self._mode).is_kept)
        fully_shard(module, mesh=mesh)
        if self.is_ahead:
            gather_ahead(module, units)
        scatter_in_flight(module)
        register_fsdp_forward_method(module, "training_step")


def _make_sparse(module: Family) -> None:
    """Has embeddings give sparse gradients, and an optimizer that takes these."""
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child.sparse = True
    module.optimizer_name = "sgd"


def _parallelize(module: Family, mesh: DeviceMesh) -> None:
    """Cuts modules over ranks by their styles, once, in ``configure_model``."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear | nn.Embedding)]
    num_heads = getattr(module, "num_groups", 0)
    known = {**_STYLES, **(_STYLES_OF_HEADS if num_heads and num_heads % mesh.size() == 0 else {})}
    styles = {name: make() for name in names for end, make in known.items() if f".{name}".endswith(f".{end}")}
    parallelize_module(module, mesh, styles, src_data_rank=None)  # weights are drawn alike on all ranks


@lru_cache
def _mesh(world: dist.ProcessGroup, node_size: int | None) -> DeviceMesh:
    """Mesh of all ranks in a row, or of nodes and their ranks; one for all models, for process groups have threads."""
    world_size = world.size()
    if node_size is None:
        return init_device_mesh("cpu", (world_size,))
    return init_device_mesh("cpu", (world_size // node_size, node_size), mesh_dim_names=("nodes", "node"))


@dataclass(frozen=True, kw_only=True)
class Baseline(Way):
    """Way to train with so many samples in so many micro-batches, and its counted peak."""

    micro_batch_size: int
    num_micro_batches: int
    counted_bytes: int

    @property
    def way(self) -> Way:
        """Way without sizes."""
        return Way(**{field.name: getattr(self, field.name) for field in fields(Way)})


class LightningFSDP(FSDPStrategy):
    """Lightning's strategy with the one change that CPU needs: FSDP1 gets the device instead of its index."""

    # Lightning's accelerator connector refuses CPU for the names in FSDPStrategy's own list.
    _registered_strategies: list[str] = []  # noqa: RUF012 (Lightning's declaration)

    def __init__(self, sharding: str, **kwargs: Any) -> None:
        super().__init__(sharding_strategy=sharding, **kwargs)  # type: ignore[arg-type]  # one of FSDP1's names

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        wrapped = FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )
        return super()._setup_model(wrapped)  # which applies checkpointing to what is wrapped already
