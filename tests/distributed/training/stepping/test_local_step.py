"""Optimizers that step on rows: as on DTensors, bit for bit, and nobody else sees rows."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.apply import local
from lightning_osdp.apply.updating.updates import stepping_on_rows
from tests.support.tiers import slow
from tests.support.wrapped_units import mesh_of_nodes

pytestmark = pytest.mark.distributed


SHAPES = ((7, 3), (5,), (1, 2), (9, 2, 2), (3,))
"""Uneven on 2 ranks and on 4, with fewer rows than ranks; every second one is in the second group."""
CLASSES = {
    "SGD": ({}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "maximize": True, "lr": torch.tensor(0.05)}),
    "Adam": ({"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}),
    "AdamW": ({}, {"amsgrad": True}),
    "NAdam": ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ({"weight_decay": 0.1},),
    "Adamax": ({"weight_decay": 0.1},),
    "Adagrad": ({"lr_decay": 0.1, "initial_accumulator_value": 0.1},),
    "RMSprop": ({}, {"centered": True, "momentum": 0.5}),
    "Adadelta": ({"weight_decay": 0.1},),
    "Rprop": ({},),
    "ASGD": ({"t0": 2, "weight_decay": 0.1},),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
NOT_ON_DTENSORS = (("Rprop", False), ("Rprop", True), ("SGD", "fused"), ("Adagrad", "fused"))
NUM_STEPS = 5


def values(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def configured(parameters, name, how, options):
    """Two groups; ``how`` is whether it runs foreach, or "fused"."""
    implementation = {"fused": True} if how == "fused" else {"foreach": how}
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
    return getattr(torch.optim, name)(groups, **{"lr": 0.05, **implementation, **copy.deepcopy(options)})


def parameters_of(make):
    """Makes parameters of all shapes, one of which never gets a gradient."""
    return [nn.Parameter(make(values(place, shape))) for place, shape in enumerate((*SHAPES, (4, 2)))]


def stepped(make, name, how, options, around):
    """Parameters, optimizer, and the names of what is in its state; some gradients come late or stay away."""
    parameters = parameters_of(make)
    optimizer = configured(parameters, name, how, options)
    skips = (name, how) != ("SGD", "fused")  # which wants all momenta of a group at once
    for step in range(NUM_STEPS):
        if step == 2:  # saved and loaded
            saved = copy.deepcopy(optimizer.state_dict())
            parameters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            optimizer = configured(parameters, name, how, options)
            optimizer.load_state_dict(saved)
        if step == 3:
            parameters.append(nn.Parameter(make(values(100, (5, 2)))))
            optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.03})
            parameters[0].requires_grad_(False)
        for place, parameter in enumerate(parameters):
            has_gradient = place != 5 and (place != step or not skips)
            parameter.grad = make(values(10 * step + place + 50, parameter.shape)) if has_gradient else None
        gradients = [parameter.grad for parameter in parameters]
        with around(optimizer):
            optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
    return parameters, optimizer


def differences(of, others):
    """Names what is not the same in weights, groups and states of two optimizers with the same parameters."""
    found = []
    for index, (own, other) in enumerate(zip(of[0], others[0], strict=True)):
        states = [of[1].state.get(own), others[1].state.get(other)]
        if not is_same(own.detach(), other.detach()):
            found.append(f"parameter {index}")
        if any(state is None for state in states) or list(states[0]) != list(states[1]):
            found += [] if states == [None, None] else [f"state of {index}: {states}"]
            continue
        found += [f"{name} of {index}" for name in states[0] if not is_same(states[0][name], states[1][name])]
    order = [[next(i for i, p in enumerate(each[0]) if p is key) for key in each[1].state] for each in (of, others)]
    return found + ([] if order[0] == order[1] else [f"order of states: {order}"])


def is_same(value, other):
    """Tells if values are the same bit for bit, and of the same kind; of a DTensor the rows of this rank."""
    if type(value) is not type(other):
        return False
    if isinstance(value, DTensor):
        same = (value.placements, value.shape, value.stride()) == (other.placements, other.shape, other.stride())
        return same and is_same(value.to_local(), other.to_local())
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def largest_from_plain(of, plain):
    """Largest difference from one process, of weights and states; ranks gather them."""
    found = 0.0
    for own, other in zip(of[0], plain[0], strict=True):
        pairs = [(own.detach(), other.detach())]
        assert list(of[1].state.get(own, {})) == list(plain[1].state.get(other, {}))
        pairs += [(value, plain[1].state[other][name]) for name, value in of[1].state.get(own, {}).items()]
        for value, expected in pairs:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if isinstance(whole, torch.Tensor):
                assert whole.shape == expected.shape
                found = max(found, float((whole - expected).abs().max()))
    return found


def cases_of(name, *, is_all):
    """Implementations with indices of options: all, or each of them at least once."""
    hows, indices = (False, True, *["fused"] * (name in FUSED)), range(len(CLASSES[name]))
    if is_all:
        return [*itertools.product(hows, indices)]
    number = max(len(hows), len(indices))
    return [*itertools.islice(zip(itertools.cycle(hows), itertools.cycle(indices), strict=False), number)]


def equals_dtensors(names=tuple(CLASSES), in_nodes=False, is_all=True):
    """Returns, by case, differences from steps on DTensors, and distances from steps of one process."""
    found, make = {}, cut_in_nodes if in_nodes else cut
    for name in names:
        for how, index in cases_of(name, is_all=is_all):
            given = {k: 0.05 if how == "fused" and k == "lr" else v for k, v in CLASSES[name][index].items()}
            rows = stepped(make, name, how, given, stepping_on_rows)
            plain = stepped(lambda whole: whole, name, how, given, lambda _: nullcontext())
            other = None
            if (name, how) not in NOT_ON_DTENSORS:
                other = differences(rows, stepped(make, name, how, given, lambda _: nullcontext()))
            found[name, how, index] = other, largest_from_plain(rows, plain)
    return found


class Kinds(TorchDispatchMode):
    """Notes kinds of tensors that operators of an optimizer's arithmetic are given; scalars count steps."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        self.seen |= {type(tensor).__name__ for tensor in tensors}
        return func(*args, **(kwargs or {}))


class OwnAdam(torch.optim.Adam):
    """Optimizer that is not exactly torch's."""


def kinds_in(optimizer):
    """Returns what the arithmetic of a step is given."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = parameter.grad if parameter.grad is not None else torch.ones_like(parameter)
    with stepping_on_rows(optimizer), Kinds() as kinds:
        optimizer.step()
    return kinds.seen


def cut(whole):
    """Cuts a tensor into rows of all ranks."""
    return distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def cut_in_nodes(whole):
    """Cuts a tensor with an odd number of elements into rows of two ranks, others into rows of all ranks."""
    if whole.numel() % 2 == 0:
        return cut(whole)
    return distribute_tensor(whole, mesh_of_nodes(), [Replicate(), Shard(0)])


def cut_parameters():
    return parameters_of(cut)


def arithmetic():
    """Returns what the arithmetic is given, by case."""
    adam = partial(torch.optim.Adam, lr=0.1)
    scheduled = adam(cut_parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    replaced = adam(cut_parameters())
    replaced.step = lambda closure=None: [p.mul_(2) for g in replaced.param_groups for p in g["params"]]
    mixed = adam([*cut_parameters(), nn.Parameter(torch.ones(3))])
    odd = adam(cut_parameters())
    (first, *_) = odd.param_groups[0]["params"]
    first.grad = torch.ones_like(first).redistribute(placements=[Replicate()])
    with torch.no_grad():
        return {
            "adam": kinds_in(adam(cut_parameters())),
            "scheduled": kinds_in(scheduled),
            "mixed": kinds_in(mixed),
            "replaced": kinds_in(replaced),
            "subclass": kinds_in(OwnAdam(cut_parameters(), lr=0.1)),
            "gradient of other cut": kinds_in(odd),
        }


def seen_by_others(how):
    """Kinds of parameters, gradients and states in all that others have around a step; and what the step returns.

    Args:
        how: the closure is given by "name", by "place", or not at all: "none".
    """
    optimizer = torch.optim.Adam(cut_parameters(), lr=0.1)
    seen, parameters = [], [p for group in optimizer.param_groups for p in group["params"]]
    kinds_in(optimizer)  # makes states

    def note(place):
        shown = [p for group in optimizer.param_groups for p in group["params"]]
        found = [p.grad for p in shown if p.grad is not None] + [s["exp_avg"] for s in optimizer.state.values()]
        kept = [rows for rows in map(local, parameters) if rows.grad is not None]
        seen.append((place, {type(value).__name__ for value in (*shown, *found, *kept)}))

    def closure():
        note("closure")
        return 3.0

    optimizer.register_step_pre_hook(lambda *_: note("before"))
    optimizer.register_step_post_hook(lambda *_: note("after"))
    given = {"name": ((), {"closure": closure}), "place": ((closure,), {}), "none": ((), {})}[how]
    groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    with stepping_on_rows(optimizer), Kinds() as kinds:
        returned = optimizer.step(*given[0], **given[1])
        note("behind")
    assert optimizer.state is state
    assert all(group["params"] is kept for group, kept in zip(optimizer.param_groups, groups, strict=True))
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (1, 1)
    return seen, returned, kinds.seen, {float(fields["step"]) for fields in state.values()}


def failing(where):
    """Returns the error of a step that fails in the closure or in the second group, and what the optimizer has then."""
    parameters = cut_parameters()
    optimizer = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
    state, versions = optimizer.state, [parameter._version for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if where == "arithmetic":
        optimizer.param_groups[1]["betas"] = ("none", "none")

    def closure():
        raise ValueError("of the closure")

    told = ""
    try:
        with stepping_on_rows(optimizer):
            optimizer.step(closure if where == "closure" else None)
    except (TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    assert optimizer.state is state
    assert all(local(parameter).grad is None for parameter in parameters)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    kinds = {type(p).__name__ for group in optimizer.param_groups for p in group["params"]}
    moved = [parameter._version > version for parameter, version in zip(parameters, versions, strict=True)]
    return told, kinds, moved, [next(i for i, p in enumerate(parameters) if p is key) for key in state]


ROUNDING = 1e-6


@pytest.mark.parametrize(
    ("world_size", "names", "in_nodes", "is_all"),
    [
        (2, ("SGD", "Adam", "AdamW", "NAdam", "Adagrad", "RMSprop"), False, False),
        slow(2, tuple(CLASSES), False, False),
        slow(2, tuple(CLASSES), False, True),
        slow(4, ("SGD", "AdamW", "NAdam"), True, True),
        slow(4, tuple(CLASSES), False, True),
    ],
    ids=["two, some", "two", "two, all", "nodes", "four"],
)
def test_steps_on_rows_equal_those_on_dtensors(ranks, world_size, names, in_nodes, is_all):
    for found in ranks(world_size).run(equals_dtensors, names=names, in_nodes=in_nodes, is_all=is_all):
        assert set(found) == {(name, *case) for name in names for case in cases_of(name, is_all=is_all)}
        for (name, how, index), (different, from_plain) in found.items():
            if (name, how) in NOT_ON_DTENSORS:
                assert different is None
            else:
                assert different == [], (name, how, index)
            assert from_plain < ROUNDING, (name, how, index)


def test_what_steps_on_rows(ranks):
    for found in ranks(2).run(arithmetic):
        assert found["adam"] == {"Tensor"}
        assert found["scheduled"] == {"Tensor"}
        assert found["mixed"] == {"Tensor", "Parameter"}  # that one is of a plain parameter
        for name in ("replaced", "subclass", "gradient of other cut"):
            assert "DTensor" in found[name], name


@pytest.mark.parametrize("how", ["name", "place", "none"])
def test_closures_and_hooks_see_dtensors(ranks, how):
    for seen, returned, arithmetic, steps in ranks(2).run(seen_by_others, how=how):
        places = ["before", *["closure"] * (how != "none"), "after", "behind"]
        assert seen == [(place, {"DTensor"}) for place in places]
        assert returned == (None if how == "none" else 3.0)
        assert arithmetic == {"Tensor"}
        assert steps == {2.0}


@pytest.mark.parametrize("where", [slow("closure"), "arithmetic"])
def test_a_step_that_fails_leaves_dtensors(ranks, where):
    for told, kinds, moved, states in ranks(2).run(failing, where=where):
        assert told.startswith("ValueError: of the closure" if where == "closure" else "TypeError"), told
        assert kinds == {"DTensor"}
        assert not any(moved) if where == "closure" else all(moved[:2])
        assert states == ([] if where == "closure" else [*range(6)])
