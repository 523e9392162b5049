"""Bytes of a unit on each rank, against `fully_shard` itself, and counted allocations of an optimizer over them."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, AdamW, RAdam, RMSprop
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_osdp.core.profile import OperatorProfile, OptimizerProfile, ParameterProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.engine.layout import chunk_elements, owned_elements
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.profiler.optimizer import profile_optimizers
from lightning_osdp.profiler.step.snapshot import tensors_in

CPU = torch.device("cpu")


def profiles(shapes, itemsize=4, gathered_itemsize=4, frozen=()):
    return tuple(
        ParameterProfile(
            position=index,
            num_elements=torch.Size(shape).numel(),
            itemsize=itemsize,
            gathered_itemsize=gathered_itemsize,
            num_rows=shape[0],
            is_trainable=index not in frozen,
            state_bytes_per_element=8.0,
        )
        for index, shape in enumerate(shapes)
    )


def unit_of(parameters):
    parameters = tuple(parameters)

    def total(itemsize, parts):
        return sum(part.num_elements * getattr(part, itemsize) for part in parts)

    trained = [part for part in parameters if part.is_trainable]
    operator = OperatorProfile(
        name="m",
        kind="Held",
        enclosing=("m", ""),
        parameter_bytes=total("itemsize", parameters),
        num_trainable=sum(part.num_elements for part in trained),
        gathered_bytes=total("gathered_itemsize", parameters),
        trainable_bytes=total("itemsize", trained),
        gradient_bytes=total("gathered_itemsize", trained),
        optimizer_bytes=0,
        parameters=parameters,
    )
    return UnitProfile(name="m", operators=(operator,), segments=(), calls=((0, 0),))


def random_shapes(draw):
    return [[draw.randint(1, 40) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 6))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_ranks_hold_what_fully_shard_gives_them(world_size, seed):
    shapes = random_shapes(random.Random(100 * world_size + seed))
    for rank in sorted({0, world_size // 2, world_size - 1}):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            module = nn.ParameterList(torch.zeros(shape) for shape in shapes)
            fully_shard(module)
            (group,) = module._get_fsdp_state()._fsdp_param_groups
            stored = [parameter._sharded_param_data.numel() for parameter in group.fsdp_params]
            owned = [parameter._local_tensor.numel() for parameter in module.parameters()]
        finally:
            dist.destroy_process_group()
        assert [chunk_elements(each, world_size) for each in profiles(shapes)] == stored
        assert [owned_elements(each, world_size, rank) for each in profiles(shapes)] == owned


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_every_element_is_on_one_rank(world_size):
    for each in profiles(random_shapes(random.Random(world_size))):
        assert sum(owned_elements(each, world_size, rank) for rank in range(world_size)) == each.num_elements


SHAPES = [(5, 3), (1, 3), (3,), (3, 8)]


def test_each_parameter_is_padded_by_itself():
    # 2 rows of 3, 1 of 3, 1 of 1 and 1 of 8: 18 elements for each of 4 ranks, 72 for 45
    unit = unit_of(profiles(SHAPES))
    (size,) = FSDP2().layout([unit], OptimizerProfile(), 4).units
    assert (size.shard, size.gathered, size.buffer, size.flat_gradient) == (4 * 18, 4 * 72, 4 * 72, 4 * 72)
    assert (size.gradients, size.whole_gradient, size.last_gradient) == (4 * 45, 4 * 45, 4 * 24)
    assert (size.scattered, size.reduced, size.cast_shard) == (4 * 18, 4 * 18, 0)
    assert (FSDP2().all_gather_bytes(unit, 4), FSDP2().reduce_scatter_bytes(unit, 4)) == (4 * 72, 4 * 72)


def test_frozen_parameters_are_gathered_and_nothing_else():
    unit = unit_of(profiles(SHAPES, frozen=(0, 3)))
    (size,) = FSDP2().layout([unit], OptimizerProfile(), 4).units
    assert (size.gathered, size.flat_gradient, size.gradients, size.last_gradient) == (4 * 72, 4 * 16, 4 * 6, 4 * 3)
    assert (size.reduced, FSDP2().reduce_scatter_bytes(unit, 4)) == (4 * 4, 4 * 16)
    (size,) = FSDP2().layout([unit_of(profiles(SHAPES, frozen=range(4)))], OptimizerProfile(), 4).units
    assert (size.flat_gradient, size.reduced, size.last_gradient) == (0, 0, 0)


def test_bytes_of_a_unit_in_mixed_precision():
    (size,) = FSDP2().layout([unit_of(profiles(SHAPES, 4, 2))], OptimizerProfile(), 4).units
    assert (size.shard, size.gathered, size.cast_shard) == (4 * 18, 2 * 72, 2 * 18)
    assert (size.flat_gradient, size.scattered, size.reduced) == (2 * 72, 2 * 18, 4 * 18)


def test_one_rank_has_no_buffer_and_casts_in_copying():
    (size,) = FSDP2().layout([unit_of(profiles(SHAPES, 4, 2))], OptimizerProfile(), 1).units
    assert (size.shard, size.gathered, size.buffer, size.cast_shard) == (4 * 45, 2 * 45, 0, 0)


def test_optimizer_state_is_of_what_a_rank_owns():
    unit = unit_of(profiles(SHAPES))
    states = [FSDP2().layout([unit], OptimizerProfile(), 4, rank=rank).optimizer_state for rank in range(4)]
    # rows 2, 2, 1, 0 of the first; 1, 0, 0, 0; 1, 1, 1, 0; 1, 1, 1, 0
    assert states == [8.0 * 18, 8.0 * 15, 8.0 * 12, 0.0]
    assert FSDP2().layout([unit], OptimizerProfile(), 4).optimizer_state == 8.0 * 18


def test_without_known_rows_every_element_is_one():
    (unknown,) = (ParameterProfile(position=0, num_elements=5, itemsize=4, gathered_itemsize=4),)
    assert [owned_elements(unknown, 4, rank) for rank in range(4)] == [2, 2, 1, 0]


def counted_step(groups, make):
    """Bytes of state, and of temporaries in a late step, of an optimizer over shards of so many elements."""
    made = [[nn.Parameter(torch.zeros(num)) for num in group if num] for group in groups]
    made = [group for group in made if group]
    for parameter in (p for group in made for p in group):
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make([{"params": group} for group in made])
    for _ in range(6):
        optimizer.step()
    with LiveBytes("cpu") as live:
        live.track([t for group in made for p in group for t in (p, p.grad)])
        state_bytes = live.track(t for t in tensors_in(list(optimizer.state.values())) if t.dim())
        before = live.current_bytes
        live.reset_peak()
        optimizer.step()
    return state_bytes, live.peak_bytes - before


OPTIMIZERS = {
    "AdamW": AdamW,
    "AdamW, foreach": lambda groups: AdamW(groups, foreach=True),
    "SGD": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "SGD with weight decay": lambda groups: SGD(groups, lr=0.1, weight_decay=0.1),
    "SGD, maximizing": lambda groups: SGD(groups, lr=0.1, maximize=True),
    "RMSprop": RMSprop,
    "Adagrad": Adagrad,
    "RAdam": RAdam,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_temporaries_are_those_of_the_rows_on_a_rank(name, seed):
    draw = random.Random(seed)
    shapes = [[draw.randint(1, 60), draw.randint(1, 60)] for _ in range(draw.randint(1, 7))]
    module = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    num_groups, world_size = draw.randint(1, 3), draw.choice([1, 2, 3])
    group_of = [draw.randrange(num_groups) for _ in shapes]
    group_of = [sorted(set(group_of)).index(group) for group in group_of]
    order = draw.sample(range(len(shapes)), len(shapes))

    def grouped(parameters):
        return [[parameters[i] for i in order if group_of[i] == group] for group in range(max(group_of) + 1)]

    make = OPTIMIZERS[name]
    optimizer, optimized = profile_optimizers(
        module, lambda m: [make([{"params": group} for group in grouped(list(m.parameters()))])], CPU
    )
    unit = unit_of(
        replace(
            each,
            state_bytes_per_element=optimized[p].state_bytes / p.numel(),
            group=optimized[p].group,
            place=optimized[p].place,
        )
        for each, p in zip(profiles(shapes), module.parameters(), strict=True)
    )
    for rank in range(world_size):
        owned = [owned_elements(each, world_size, rank) for each in unit.parameters]
        state_bytes, temporary_bytes = counted_step(grouped(owned), make)
        found = FSDP2().layout([unit], optimizer, world_size, rank=rank)
        assert found.optimizer_state == state_bytes
        # scalars besides: bias corrections, step counts
        assert found.optimizer_temporaries == pytest.approx(temporary_bytes, abs=256)
