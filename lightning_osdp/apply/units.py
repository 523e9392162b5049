"""Units of a module, the meshes that they are sharded over, and the calls of ``fully_shard`` that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

from lightning_osdp.apply.internals import dtensors, gathering, sharding
from lightning_osdp.apply.preparing.initialize import children_first
from lightning_osdp.core.axes import DP, ZDP, Treatment
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.operations.splitting import compiled_whole
from lightning_osdp.planner.engine import FSDP2, effects_of

_NAMES = ("nodes", "node")
NODE_GROUPS = tuple(f"mesh_{name}" for name in _NAMES)
"""Names that torch gives the process groups of a mesh of nodes."""
OVER_ALL = 'SearchSpace(modes=("ZDP", "hpZ", "DP", "resident"))'
"""Search space without the modes that shard in the node."""
ONE_MESH = dict.fromkeys(
    ("with different meshes", "cross-mesh operation", "must have the same mesh", "cross mesh concatenation"),
    "Units that are sharded in each node (HSDP, HDP), or whole on each rank (replicated), are on another mesh than"
    " those that are sharded over all ranks, as torch does not allow here. Have the plan shard all of them over all"
    " ranks:"
    f" OSDPStrategy(search_space={OVER_ALL}).",
)
"""Parts of torch's errors about units on two meshes -> advice."""


class Meshes:
    """Meshes that the units of one model are sharded over: all ranks, or nodes. Call methods on all ranks.

    Attributes:
        device: of this rank.
        nodes: the mesh (nodes, ranks of a node); None until a plan needs it.
        replicas: the same with one rank in each, which has all of a unit; None likewise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._all_ranks = init_device_mesh(device.type, (dist.get_world_size(),))
        self.nodes: DeviceMesh | None = None
        self.replicas: DeviceMesh | None = None
        self._warm_up(self._all_ranks.get_group())

    def add_nodes(self, plan: Plan) -> None:
        """Makes the meshes that the plan needs, if they are not there; ranks of a node have successive numbers."""
        world = dist.group.WORLD
        homes = {effects_of(treatment).sharded_over for unit in plan.units for treatment in unit.treatments}
        if self.replicas is None and "one" in homes:
            assert world is not None
            self.replicas = _mesh_of_nodes(world, self.device.type, 1)
            dtensors.mix_meshes()
            if self.device.type != "cpu":
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.replicas.get_group("nodes"))
        if self.nodes is not None or not plan.needs_nodes:
            return
        assert world is not None
        assert plan.node_size is not None
        self.nodes = _mesh_of_nodes(world, self.device.type, plan.node_size)
        self._warm_up(self.nodes.get_group("node"))
        if "node" in homes:
            dtensors.mix_meshes()
            if self.device.type != "cpu":
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.nodes.get_group("nodes"))

    def mesh_for(self, treatment: Treatment) -> DeviceMesh:
        """Mesh that a unit with this treatment is sharded over between steps."""
        over = effects_of(treatment).sharded_over
        mesh = {"all": self._all_ranks, "node": self.nodes, "one": self.replicas}[over]
        assert mesh is not None
        return mesh

    def warm_up_exchanges(self, treatments: Iterable[Treatment]) -> None:
        """Runs an all-to-all over the ranks that exchange activations, as `warm_up` runs other collectives."""
        meshes = dict.fromkeys(self.mesh_for(each) for each in treatments) if self.device.type != "cpu" else ()
        for mesh in meshes:
            group = mesh.get_group(mesh.ndim - 1)
            given = torch.zeros(group.size(), device=self.device)
            dist.all_to_all_single(torch.empty_like(given), given, group=group)

    @contextmanager
    def faked(self, groups: Sequence[Any]) -> Iterator[None]:
        """Keeps collectives of these units and of the default process group on this rank, within the context."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

        world = dist.new_group(backend="fake")
        fakes = {self._all_ranks.get_group(): world}
        for mesh in filter(None, (self.nodes, self.replicas)):
            for name, ranks in zip(_NAMES, (mesh.mesh.T, mesh.mesh), strict=True):
                fake, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend="fake")
                fakes[mesh.get_group(name)] = fake
        real, dist.group.WORLD = dist.group.WORLD, world
        try:
            with gathering.on_process_groups(groups, fakes):
                yield
        finally:
            dist.group.WORLD = real
            for fake in fakes.values():
                dist.destroy_process_group(fake)

    def _warm_up(self, group: dist.ProcessGroup) -> None:
        if self.device.type != "cpu":
            warm_up(group, self.device)


@lru_cache
def _mesh_of_nodes(world: dist.ProcessGroup, device_type: str, size: int) -> DeviceMesh:
    """Mesh for all models: each of its process groups has threads, or memory of a device, of its own."""
    return init_device_mesh(device_type, (world.size() // size, size), mesh_dim_names=_NAMES)


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Runs one collective of each kind, with which NCCL takes the memory that a process group keeps.

    The first step would take it otherwise, out of memory that the dry run of one rank has counted as free.
    """
    whole, shard = torch.zeros(group.size(), device=device), torch.zeros(1, device=device)
    dist.all_gather_single(whole, shard, group=group)
    dist.reduce_scatter_single(shard, whole, group=group)
    dist.all_reduce(shard, group=group)


_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Modules whose parameters are gathered together."""

    name: str
    """Name of the unit or slice; the empty string for the root."""
    modules: tuple[nn.Module, ...]
    """Modules in forward order."""
    treatment: Treatment = DP
    is_read: bool = True
    """True where backward reads the unit's parameters; where not, backward gathers none."""

    @property
    def handle(self) -> Any:
        """Module by which torch finds the unit."""
        return self.modules[0]


def leaving_order(units: Sequence[ShardedUnit]) -> list[ShardedUnit]:
    """Units without the root, given in the order in which forward enters them, in the order in which it leaves them."""
    left: list[ShardedUnit] = []
    inside: list[ShardedUnit] = []
    for unit in units:
        if not unit.name:
            continue
        while inside and not unit.name.startswith(f"{inside[-1].name}."):
            left.append(inside.pop())
        inside.append(unit)
    return left + inside[::-1]


def called_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Children with parameters, by name; a list or dictionary of modules, which nobody calls, gives its entries."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_children(child, f"{prefix}{name}.")
        elif not isinstance(child, _NOT_CALLED) and any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def children_and_blocks(module: nn.Module, *, min_unit_bytes: int) -> Iterator[ShardedUnit]:
    """Units of a module that has no plan, in forward order; children that share a parameter are one unit."""
    names = {child: name for name, child in module.named_modules()}
    whole = compiled_whole(module)
    groups: list[list[tuple[str, nn.Module]]] = []
    for name, child in called_children(module):
        parameters = set(child.parameters())
        sharing = [
            group for group in groups if any(not parameters.isdisjoint(other.parameters()) for _, other in group)
        ]
        groups = [group for group in groups if group not in sharing]
        groups.append([*(each for group in sharing for each in group), (name, child)])
    for group in groups:
        modules = tuple(child for _, child in group)
        yield ShardedUnit(group[0][0], modules, ZDP)
        if len(modules) == 1:
            num_holders = Counter(each for inner in modules[0].modules() for each in inner.parameters(recurse=False))
            for block in _blocks_in(modules[0], num_holders, min_unit_bytes):
                if not any(names[block].startswith(f"{each}.") for each in whole):
                    yield ShardedUnit(names[block], (block,), ZDP)


def _blocks_in(module: nn.Module, num_holders: Mapping[nn.Parameter, int], min_unit_bytes: int) -> Iterator[nn.Module]:
    """Outermost entries of lists and sequences whose parameters belong to no other module."""
    for child in module.children():
        parameters = list(child.parameters())
        is_entry = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _NOT_CALLED)
        is_large = sum(parameter.nbytes for parameter in parameters) >= max(1, min_unit_bytes)
        if is_entry and is_large and all(num_holders[each] == 1 for each in parameters):
            yield child
        else:
            yield from _blocks_in(child, num_holders, min_unit_bytes)


def shard(
    units: Sequence[ShardedUnit],
    arguments: Callable[[ShardedUnit], Mapping[str, Any]],
    precision: MixedPrecision | None,
    initialize: Callable[[nn.Module], None],
    ignored: Collection[nn.Parameter],
) -> None:
    """Calls ``fully_shard`` for all units, inner units before outer ones and the root last.

    Units are otherwise initialised in the order of their modules: a buffer that several units have is initialised by
    the first one.

    Args:
        units: root first, then in forward order.
        arguments: gives the arguments of ``fully_shard`` that the treatment of a unit asks for.
        precision: None for the dtypes of the parameters.
        initialize: gives the tensors of a module storage and values.
        ignored: parameters that are sharded already.
    """
    (root,) = (unit.handle for unit in units if not unit.name)
    places = {module: place for place, module in enumerate(dict.fromkeys(children_first(root)))}
    for unit in sorted(units, key=lambda unit: max(places[module] for module in unit.modules)):
        hooks = {(child, name): parameter._backward_hooks for child, name, parameter in _own_parameters(unit)}
        for module in unit.modules:
            initialize(module)
        kept = [(child, name, vars(parameter)) for child, name, parameter in _own_parameters(unit)]
        with sharding.scalars_as_rows(unit.modules):
            fully_shard(
                list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],
                mp_policy=policy_of(unit, precision),
                ignored_params=set(ignored) or None,
                **arguments(unit),
            )
        for child, name, attributes in kept:
            sharded: Any = child._parameters[name]
            vars(sharded).update(attributes)
            dtensors.mark_shard(sharded)
            if hooks[child, name]:
                sharded._backward_hooks = hooks[child, name]  # `sharding.carry_hooks` has them run
        for module in unit.modules:
            sharding.keep_attributes(module)
            sharding.refuse_copies(module)


def set_prefetch(units: Sequence[ShardedUnit], engine: FSDP2, reached: Sequence[str]) -> None:
    """Sets which unit each unit all-gathers ahead: the next one that is not resident.

    torch itself takes the order of the last forward. The last one may have been an evaluation, and it has units
    that no backward comes to.

    Args:
        units: root first, then in the order in which forward enters them.
        engine: what is gathered ahead at all.
        reached: names of units, and perhaps others, in the order in which backward comes to them, see `Plan.reached`.
    """
    (root,) = (unit for unit in units if not unit.name)
    inner = {unit.name: unit for unit in units if unit.name}
    order = [inner[name] for name in reached if name in inner] if reached else _reached(units)
    for unit in set(inner.values()).difference(order):
        _gather_in_backward(unit, None)
    for unit, following in _followed([root, *order]):
        is_late = following is None or not following.is_read or following.name in engine.late_backward
        _gather_in_backward(unit, None if is_late or engine.backward_prefetch != "pre" else following)
    # The root gathers nothing ahead: a step may write to weights before it calls a module.
    for unit, following in _followed([*inner.values()]):
        comes = engine.forward_prefetch and following is not None and following.name not in engine.late_forward
        gathering.gather_ahead(unit.handle, [following.handle] if comes and following is not None else [])


def _gather_in_backward(unit: ShardedUnit, ahead: ShardedUnit | None) -> None:
    """Sets the unit that this one gathers ahead in backward; None: no unit.

    A list with the unit itself keeps torch from choosing another one. The list of a unit that backward does not read is
    empty: it would gather that unit.
    """
    listed = [unit] if ahead is None and unit.is_read else [] if ahead is None else [ahead]
    unit.handle.set_modules_to_backward_prefetch([each.handle for each in listed])


def _followed(units: Sequence[ShardedUnit]) -> Iterator[tuple[ShardedUnit, ShardedUnit | None]]:
    """Units, the last one first, each with the next one of these that is not resident."""
    following: ShardedUnit | None = None
    for unit in reversed(units):
        yield unit, following
        if not effects_of(unit.treatment).is_resident:
            following = unit


def _reached(units: Sequence[ShardedUnit]) -> list[ShardedUnit]:
    """Units that backward comes to, in that order, where inner units are left before outer ones."""
    order = leaving_order(units)
    is_trained = [any(each.requires_grad for part in unit.modules for each in part.parameters()) for unit in order]
    return order[is_trained.index(True) :][::-1] if True in is_trained else []


def _own_parameters(unit: ShardedUnit) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters under every name, with the modules that have them."""
    for module in unit.modules:
        for child in module.modules():
            yield from ((child, name, p) for name, p in child._parameters.items() if p is not None)


def policy_of(unit: ShardedUnit, precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    """Precision as Lightning's FSDP strategy sets it: inputs are cast for the root; exempt modules keep their dtype."""
    if precision is None:
        return MixedPrecisionPolicy()
    exempt = tuple(precision._module_classes_to_ignore or ())
    if unit.name and all(isinstance(module, exempt) for module in unit.modules):
        dtype = next(unit.modules[0].parameters()).dtype
        return MixedPrecisionPolicy(param_dtype=dtype, output_dtype=precision.param_dtype, cast_forward_inputs=True)
    casts = precision.cast_forward_inputs if unit.name else precision.cast_root_forward_inputs
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=casts
    )
