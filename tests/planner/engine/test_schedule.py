"""Gathers, frees and reductions of torch's `fully_shard`, in order, against the predicted ones."""

import dataclasses
import inspect
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lightning_osdp import profile_model
from lightning_osdp.apply.internals import gathering
from lightning_osdp.core.axes import ALL_MODES, DP, HDP, HPZ, HSDP, RESIDENT, SYNC_CHOICES, ZDP, Subject
from lightning_osdp.core.plans.plan import PREFETCH_CHOICES
from lightning_osdp.core.units import joined, merged, partition
from lightning_osdp.planner.engine import FSDP2, effects_of, leaving_order
from tests.support.steps import step_of
from tests.support.tiers import but_slow, slow

WIDTH = 8
WORLD_SIZE, NODE_SIZE = 4, 2
WITH_ALL_REDUCE = ("reduce_in_node", "all_reduce")
ALL_REDUCES = [*inspect.signature(_fsdp_param_group.foreach_reduce).parameters].index("all_reduce_grads") - 1
"""Place among the arguments after the parameters."""
BLOCKS = [f"blocks.{index}" for index in range(3)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """A root with a parameter of its own; the blocks may recompute, and the first layer may be called again."""

    def __init__(self, *, recomputes="", calls_again=False, frozen=()):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recomputes, self.calls_again = recomputes, calls_again
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        x = self.through(x)
        if self.calls_again:
            x = self.last(self.first(x).relu())
        return (self.last(x) * self.scale).square().mean()

    def through(self, x):
        def one(block, x):
            return checkpoint(block, x, use_reentrant=self.recomputes == "reentrant")

        def two(x):
            run = one if self.recomputes == "nested" else lambda block, x: block(x)
            return run(self.blocks[1], run(self.blocks[0], x))

        if self.recomputes in {"together", "nested"}:
            return one(self.blocks[2], one(two, x))
        for block in self.blocks:
            if self.recomputes == "with dropout":
                x = one(lambda x, block=block: F.dropout(block(x)), x)
            else:
                x = one(block, x) if self.recomputes else block(x)
        return x

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.0)


def profiled(**options):
    """Profile of a model whose blocks have no choice, and the smallest units."""
    profile = profile_model(Model(**options), torch.randn(4, WIDTH), activations=("keep",))
    return profile, partition(profile, min_unit_bytes=0)


@pytest.fixture(autouse=True)
def group():
    """A process group of one process that takes itself for one of four, on two nodes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def sharded(model, units, modes, engine):
    """Modules by which torch finds these units of the model, and what each of them prefetches."""
    nodes = init_device_mesh("cpu", (WORLD_SIZE // NODE_SIZE, NODE_SIZE), mesh_dim_names=("nodes", "node"))
    places = {unit.name: place for place, unit in enumerate(units)}
    for unit in sorted(units, key=lambda unit: unit.name.count(".") + bool(unit.name), reverse=True):
        in_node = "home" in modes[places[unit.name]]
        parts = [model.get_submodule(name) for name in unit.modules or (unit.name,)]
        fully_shard(parts if unit.modules else parts[0], mesh=nodes if in_node else None)
    modules = [model.get_submodule(unit.name) for unit in units]
    order, places = leaving_order(units), {unit: place for place, unit in enumerate(leaving_order(units))}
    comes_back = [any(last >= unit.trained_from for _, last in unit.calls) for unit in units]
    is_resident = [effects_of(mode).is_resident for mode in modes]
    for index, (module, mode) in enumerate(zip(modules, modes, strict=True)):
        if index:
            gathering.reshard_after_forward(
                module, is_kept=effects_of(mode).is_kept, nodes=nodes if effects_of(mode).leaves_shard else None
            )
        module._set_unshard_async_op(engine.asynchronous_unshard)
        place = places.get(index, len(order))
        before = next((unit for unit in reversed(order[:place]) if not is_resident[unit]), index)
        is_called_once = len(units[index].calls) == 1
        prefetches = engine.backward_prefetch == "pre" and comes_back[before] and is_called_once
        prefetches = prefetches and units[before].is_read and units[before].name not in engine.late_backward
        ahead = [modules[before]] if prefetches else [module] if units[index].is_read else []
        module.set_modules_to_backward_prefetch(ahead)
        gathering.gather_where_read(module._get_fsdp_state()._fsdp_param_groups)
        gathering.set_read(module, is_read=units[index].is_read)
        following = next((unit for unit in range(index + 1, len(units)) if not is_resident[unit]), None)
        leads_on = following is not None and units[following].name not in engine.late_forward
        if engine.forward_prefetch and leads_on and is_called_once:
            gathering.gather_ahead(module, [modules[following]])
    return modules


def done(model, units, modes, engine, num_micro_batches, monkeypatch):
    """Returns the events of FSDP2 in the second step, one list for each micro-batch."""
    seen = []
    names = {}

    def noted(kind, original):
        def call(params, *args, **kwargs):
            of = names[id(params[0])]
            in_node = args[0 if kind == "gather" else 1].size() == NODE_SIZE
            if kind == "reduce" and in_node:
                assert [each.size() for each in args if isinstance(each, dist.ProcessGroup)] == [NODE_SIZE] * 2
                is_whole = args[ALL_REDUCES]
                seen.extend((each, of) for each in (WITH_ALL_REDUCE if is_whole else ("scatter_in_node",)))
            else:
                seen.append((f"{kind}_in_node" if in_node else kind, of))
            return original(params, *args, **kwargs)

        return call

    to_sharded_post_forward = _fsdp_param_group.FSDPParamGroup._to_sharded_post_forward

    def freed_but_in_node(group):
        seen.extend((kind, names[id(group.fsdp_params[0])]) for kind in ("retain", "free"))
        to_sharded_post_forward(group)

    to_sharded = _fsdp_param_group.FSDPParamGroup._to_sharded

    def freed(group):
        if group.is_unsharded:
            seen.append(("free", names[id(group.fsdp_params[0])]))
        to_sharded(group)

    found = []
    with monkeypatch.context() as patched:
        patched.setattr(_fsdp_param_group, "foreach_all_gather", noted("gather", _fsdp_param_group.foreach_all_gather))
        patched.setattr(_fsdp_param_group, "foreach_reduce", noted("reduce", _fsdp_param_group.foreach_reduce))
        patched.setattr(_fsdp_param_group.FSDPParamGroup, "_to_sharded", freed)
        patched.setattr(_fsdp_param_group.FSDPParamGroup, "_to_sharded_post_forward", freed_but_in_node)
        modules = sharded(model, units, modes, engine)  # which wraps these
        for unit, module in zip(units, modules, strict=True):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                names.update(dict.fromkeys(map(id, group.fsdp_params), unit.name))
        for _ in range(2):
            found = []
            for index in range(num_micro_batches):
                seen.clear()
                is_last = index == num_micro_batches - 1
                for module, mode in zip(modules, modes, strict=True):
                    waits = mode["sync"] == "last" and not is_last
                    module.set_requires_gradient_sync(not waits, recurse=False)
                    if mode["sync"] == "node":
                        module.set_requires_all_reduce(is_last, recurse=False)
                    stays = effects_of(mode).is_resident or (waits and effects_of(mode).is_kept)
                    module.set_reshard_after_backward(not stays, recurse=False)
                model(torch.randn(4, WIDTH)).backward()
                found.append(list(seen))
            for parameter in model.parameters():
                parameter.grad = None
    return found


def predicted(profile, units, modes, engine, num_micro_batches):
    """Returns predicted events, one list for each micro-batch, without those of units that hold nothing."""
    gathered, found = set(), []
    step = dataclasses.replace(step_of(profile, num_micro_batches=num_micro_batches), units=units)
    for events in engine.events_of(step, modes):
        effective = []
        for kind, of in events:
            gathers, reduces = {"gather", "gather_in_node"}, {"reduce", "scatter_in_node", *WITH_ALL_REDUCE}
            unit = units[of] if kind in gathers | reduces | {"free", "retain"} else None
            if unit is None or not unit.gathered_bytes:
                continue
            if kind == "free" and of not in gathered:
                continue
            if kind != "retain":
                (gathered.add if kind in gathers else gathered.discard)(of)
            effective.append((kind, unit.name))
        found.append(effective)
    return found


CASES = {
    "plain": {},
    "frozen from the beginning": {"frozen": ("first", "blocks.0")},
    "frozen in between": {"frozen": ("blocks.1", "last")},
    "recomputing": {"recomputes": "each"},
    "called again": {"calls_again": True},
}


SETTINGS = [*product((False, True), (False, True), PREFETCH_CHOICES, (1, 2))]
"""Settings: forward prefetches, all-gathers are asynchronous, kind of prefetch in backward, micro-batches."""
HALF = [each for each, places in zip(SETTINGS, product((0, 1), repeat=4), strict=True) if sum(places) % 2 == 0]
QUARTERS = [[each for each in HALF if (each[0] == each[1]) == is_equal] for is_equal in (True, False)]
"""Settings that modes have in turn; in all of them any three settings have all their values."""


@pytest.mark.parametrize("case", but_slow(CASES, slow=[case for case in CASES if "frozen" in case or case == "plain"]))
@pytest.mark.parametrize(
    ("by_block", "settings"),
    [(True, QUARTERS), slow(True, [SETTINGS]), slow(False, [SETTINGS])],
    ids=["few", "all", "operators"],
)
def test_fully_shard_does_in_this_order_what_is_predicted(case, by_block, settings, monkeypatch):
    profile, units = profiled(**CASES[case])
    if by_block:
        units = merged(profile, units, BLOCKS)
    of_nodes = [mode.but(sync=sync) for mode in (HSDP, HDP) for sync in SYNC_CHOICES]
    for place, mode in enumerate((*ALL_MODES, RESIDENT, HPZ, *of_nodes)):
        for ahead, asynchronous, prefetch, number in settings[place % len(settings)]:
            engine = FSDP2(backward_prefetch=prefetch, forward_prefetch=ahead, asynchronous_unshard=asynchronous)
            subjects = [Subject(may_wait=engine.may_wait(unit), may_stay=not unit.gradient_bytes) for unit in units]
            allowed = [mode.within(subject) for subject in subjects]
            modes = [DP if unit.is_root else each for unit, each in zip(units, allowed, strict=True)]
            seen = done(Model(**CASES[case]), units, modes, engine, number, monkeypatch)
            expected = predicted(profile, units, modes, engine, number)
            assert seen == expected, (mode, engine, number)


@pytest.mark.parametrize("by_block", [True, slow(False)])
@pytest.mark.parametrize("recomputes", ["reentrant", "with dropout", "together", "nested"])
def test_so_it_does_where_a_model_checkpoints_in_other_ways(recomputes, by_block, monkeypatch):
    profile, units = profiled(recomputes=recomputes)
    if by_block:
        units = merged(profile, units, BLOCKS)
    modes = [DP if unit.is_root else ZDP for unit in units]
    for ahead, prefetch, number in product((False, True), PREFETCH_CHOICES, (1, 2)):
        engine = FSDP2(backward_prefetch=prefetch, forward_prefetch=ahead)
        seen = done(Model(recomputes=recomputes), units, modes, engine, number, monkeypatch)
        assert seen == predicted(profile, units, modes, engine, number), (engine, number)


@pytest.mark.parametrize("case", CASES)
def test_units_that_are_gathered_late_are_gathered_as_predicted(case, monkeypatch):
    profile, units = profiled(**CASES[case])
    modes = [DP if unit.is_root else ZDP for unit in units]
    names = [unit.name for unit in units if not unit.is_root]
    every = FSDP2(forward_prefetch=True)
    orders = []
    for late in (names[::2], names[1::2], names):
        engine = every.gathering_late(late, late[:2])
        seen = done(Model(**CASES[case]), units, modes, engine, 1, monkeypatch)
        assert seen == predicted(profile, units, modes, engine, 1), late
        orders.append(seen)
    assert predicted(profile, units, modes, every, 1) not in orders


@pytest.mark.parametrize("recomputes", ["", "each"])
def test_trained_units_are_one_over_frozen_ones_between_them(recomputes, monkeypatch):
    case = {"frozen": tuple(f"{block}.up" for block in BLOCKS), "recomputes": recomputes}
    profile, units = profiled(**case)
    if not recomputes:
        units = joined(profile, units, [("blocks.0.down", "blocks.1.down")])
        assert [(unit.name, unit.calls) for unit in units if unit.modules] == [("blocks.0.down", ((2, 4),))]
    for frozen, trained, ahead, prefetch in product((ZDP, DP, RESIDENT), (ZDP, DP), (False, True), PREFETCH_CHOICES):
        engine = FSDP2(backward_prefetch=prefetch, forward_prefetch=ahead)
        modes = [DP if unit.is_root else trained if unit.gradient_bytes else frozen for unit in units]
        seen = done(Model(**case), units, modes, engine, 2, monkeypatch)
        assert seen == predicted(profile, units, modes, engine, 2), (frozen, trained, engine)
