"""Private parts of torch's ``fully_shard`` exist and do as is assumed: another torch fails here first."""

import dataclasses
import inspect
import itertools
import re
import runpy
import sys
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor

from benchmarks.testbed.plans import plan_of
from lightning_osdp.apply import ShardedModel, internals
from lightning_osdp.apply.internals import (
    access,
    backward,
    calls,
    dtensors,
    gathering,
    in_flight,
    sharding,
    shortcuts,
    unsharded,
)
from lightning_osdp.apply.updating.updates import stepping_on_rows
from lightning_osdp.errors import ConfigurationError

METHODS = [f"{kind.__name__}.{name}" for kind, names in access._METHODS.items() for name in names]
ATTRIBUTES = [f"{kind}.{path}" for kind, paths in access._ATTRIBUTES.items() for path in paths]


class Net(nn.Module):
    """A parameter of the root, two units, and one without parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(5))
        self.first, self.second, self.none = nn.Linear(3, 5), nn.Linear(5, 2), nn.Tanh()

    def forward(self, x):
        return self.second(self.none(self.first(x)) * self.gain)


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def net():
    module = Net()
    mesh = init_device_mesh("cpu", (1,))
    for unit in (module.first, module.second, module.none, module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit is module.first)
    access.begin(module)
    return module


@pytest.fixture
def groups(net):
    return [access.group_of(each) for each in (net, net.first, net.second)]


def holders():
    """Classes that have what the room uses of the objects of a unit, by where it finds them."""
    return {
        "state": _fsdp_state.FSDPState,
        "state._comm_ctx": _fsdp_param_group.FSDPCommContext,
        "state._state_ctx": _fsdp_state.FSDPStateContext,
        "group": _fsdp_param_group.FSDPParamGroup,
        "group.mesh_info": _fsdp_common.FSDPMeshInfo,
        "parameter": _fsdp_param.FSDPParam,
    }


def is_in_room(frame):
    return Path(frame.f_code.co_filename).parent == Path(internals.__file__).parent


class Renamed:
    """An attribute that the room does not find, as if torch had it under another name; torch itself finds it."""

    def __init__(self, holder, name):
        self.name, self.own = name, inspect.getattr_static(holder, name, None)

    def __get__(self, instance, owner):
        if is_in_room(sys._getframe(1)):
            raise AttributeError(self.name)
        if instance is not None and self.name in vars(instance):
            return vars(instance)[self.name]
        if self.own is None:
            raise AttributeError(self.name)
        return self.own.__get__(instance, owner) if hasattr(self.own, "__get__") else self.own

    def __set__(self, instance, value):
        assert not is_in_room(sys._getframe(1)), f"{self.name} is set, and nobody looks"
        if isinstance(self.own, property):
            self.own.__set__(instance, value)
        else:
            vars(instance)[self.name] = value

    def __delete__(self, instance):
        del vars(instance)[self.name]


def train(model, step, optimizer_step):
    """Losses of some steps, of which one accumulates, and the weights afterwards."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(4):
        loss = step(torch.full((2, 3), index + 1.0)).square().mean()
        losses.append(loss.item())
        optimizer_step(loss, optimizer)
        optimizer.zero_grad()
    return losses


class Scaled(Net):
    """Net with a scalar parameter, which is no shard."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) * self.scale


def plainly_trained():
    def step(loss, optimizer):
        loss.backward()
        optimizer.step()

    module = Scaled()
    losses = train(module, module, step)
    return losses, [2 * parameter.detach() for parameter in module.parameters()]


def trained():
    """Trains under a plan with all else that a fit may do; returns losses, weights and the texts of refusals."""
    module, told = Scaled(), []
    plan = plan_of(module, {"first": "ZDP", "second": "DP"}, world_size=1, micro_batch_size=2)
    sharded = ShardedModel.planned(module, plan, device=torch.device("cpu"))

    def step(loss, optimizer):
        sharded.before_backward()
        loss.backward()
        sharded.after_backward()
        sharded.before_optimizer_step(optimizer)
        with sharded.stepping(optimizer):
            optimizer.step()
        sharded.reshard()

    def run(x):
        return sharded.run(module.forward, x)

    def twice():
        with sharded.gathered(module, writes=True), torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)

    sharded.begin_fit()
    losses = train(module, run, step)
    with sharded.alone():
        run(torch.ones(2, 3)).sum().backward()
    sharded.use(dataclasses.replace(plan, units=plan.units))
    with torch.no_grad():
        sharded.evaluate(module.forward, torch.ones(2, 3))
    try:
        twice()
        weights = [dtensors.local(parameter).clone() for parameter in module.parameters()]
        sharded.undo()
    except ConfigurationError as error:
        told.append(str(error))
        weights = [2 * dtensors.local(parameter) for parameter in module.parameters()]
    return losses, weights, told


def test_this_torch_has_everything(net):
    access.check_torch()
    access.check_units(net)


@pytest.mark.parametrize("name", [*METHODS, *ATTRIBUTES])
def test_a_torch_that_lacks_one_trains_or_is_refused(monkeypatch, name):
    """Checks that a step never raises an error, and never gives other losses than plain torch."""
    path, _, attribute = name.rpartition(".")
    kinds = {kind.__name__: kind for kind in access._METHODS}
    if path == "TrainingState":  # members of an Enum cannot be replaced
        names = [f"{each}_2" if each == attribute else each for each in access._METHODS[kinds[path]]]
        monkeypatch.setitem(access._METHODS, kinds[path], names)
        name = f"{name}_2"
    else:
        holder = {**kinds, **holders()}[path]
        monkeypatch.setattr(holder, attribute, Renamed(holder, attribute), raising=False)
    lacking = rf"torch {re.escape(torch.__version__)} lacks {re.escape(name)}: there is not "
    expected = (
        rf"^Expected a torch whose .* 2\.13 to 2\.15(, for .*)?, got .* without {re.escape(name)}\. Install torch"
    )
    if name not in access._DISPENSABLE:
        with pytest.raises(ConfigurationError, match=expected):
            trained()
        return
    with pytest.warns(UserWarning, match=lacking) as warned:
        losses, weights, told = trained()
    assert len(warned) == 1
    torch.testing.assert_close((losses, weights), plainly_trained())
    assert len(told) == (access._DISPENSABLE[name] == access.WHOLE)
    assert all(re.match(expected, each) for each in told)


def test_a_torch_that_lacks_nothing_trains_without_a_word():
    losses, weights, told = trained()
    torch.testing.assert_close((losses, weights), plainly_trained())
    assert told == []


def test_a_torch_that_nobody_has_tried_trains_with_one_warning(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.16.1+cpu"))
    with pytest.warns(
        UserWarning, match=r"^OSDP: torch 2\.16\.1\+cpu was not tried \(2\.13 to 2\.15 were\)\. Training"
    ):
        losses, weights, _ = trained()
    torch.testing.assert_close((losses, weights), plainly_trained())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("group", "post_forward_mesh_info"),
        ("parameter", "post_forward_mesh_info"),
        ("parameter", "_init_sharded_post_forward_param_metadata"),
        ("group", "_to_sharded_post_forward"),
    ],
)
def test_a_shard_in_each_node_is_refused_where_torch_lacks_it(monkeypatch, net, kind, name):
    monkeypatch.setattr(holders()[kind], name, Renamed(holders()[kind], name), raising=False)
    nodes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("nodes", "node"))
    with pytest.raises(ConfigurationError, match=rf", for a mode that leaves a shard in each node, got .*\.{name}\."):
        gathering.reshard_after_forward(net.first, is_kept=False, nodes=nodes)


def test_a_unit_of_several_groups_of_parameters_is_refused(net):
    state = access.state_of(net.first)
    state._fsdp_param_groups.append(state._fsdp_param_groups[0])
    expected = (
        r"^Expected fully_shard to gather all parameters of a unit together, but in torch .* 4 units have 4 groups"
    )
    with pytest.raises(ConfigurationError, match=expected):
        access.check_units(net)


def test_a_torch_that_registers_other_hooks_is_refused(net):
    state = access.state_of(net.first)
    state._post_forward_hook_handle = state._pre_forward_hook_handle
    expected = (
        r"^Expected a torch whose .*, got .* without hooks before and after each call of a module of a unit\. Install"
    )
    with pytest.raises(ConfigurationError, match=expected):
        calls.shorten([net.first], None, MixedPrecisionPolicy())


def test_a_torch_without_a_part_of_fully_shard_says_so_when_it_is_imported(monkeypatch):
    monkeypatch.delattr(_fsdp_param_group, "RegisterPostBackwardFunction")
    expected = r"^Expected a torch with the parts of fully_shard that 2\.13 to 2\.15 have, got .*: cannot import name"
    monkeypatch.delitem(sys.modules, sharding.__name__)
    monkeypatch.delattr(internals, "sharding")
    with pytest.raises(ImportError, match=expected):
        runpy.run_path(internals.__file__)


def test_what_is_written_while_it_is_gathered_is_in_the_shards(net, groups):
    writes, expected = unsharded.GatheredWrites(groups), Net()

    def written(*, is_taken):
        gathering.run_as_forward(net, net.forward, (torch.ones(2, 3),), {}, lambda output: output)
        net.first.unshard()
        for model in (net, expected) if is_taken else (net,):
            with torch.no_grad():
                model.gain.mul_(2)
                model.second.weight.data = 3 * model.second.weight.data
                model.second.bias.data.add_(1)
                model.first.weight.set_(2 * model.first.weight)
                model.first.bias.detach().numpy()[...] += 1
        gathering.reshard(net, groups)
        for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(dtensors.local(parameter), other)
        owners = [owner for group in groups for _, owner in access.parameters_of(group)]
        assert all(owner._unsharded_param.untyped_storage().size() == 0 for owner in owners)

    written(is_taken=True)
    writes.is_paused = True
    written(is_taken=False)
    writes.is_paused = False
    written(is_taken=True)


def test_hooks_of_units_are_wrapped_for_dynamo_once(monkeypatch):
    module, wrapped, disable = Net(), [], torch._dynamo.disable

    def noted(function, *args, **options):
        wrapped.append(function.__name__)
        return disable(function, *args, **options)

    plan = plan_of(module, {"first": "ZDP", "second": "DP"}, world_size=1, micro_batch_size=2)
    sharded = ShardedModel.planned(module, plan, device=torch.device("cpu"))
    monkeypatch.setattr(torch._dynamo, "disable", noted)
    sharded.run(module.forward, torch.ones(2, 3)).sum().backward()
    assert sorted(wrapped) == ["_post_forward", "_pre_forward", "_root_post_backward_final_callback"]  # of the root


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_one_rank_copies_all_shards_of_a_unit_at_once(monkeypatch, dtype):
    module, seen, copy = nn.Linear(3, 5), [], torch._foreach_copy_
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    access.begin(module)
    group = access.group_of(module)
    shortcuts.take(access.states_in(module), [group])
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: seen.append(len(given[0])) or copy(*given))
    for step in range(2):
        module.unshard()
        wholes = [each._unsharded_param for each in group.fsdp_params]
        assert [*module.parameters()] == wholes
        shards = [dtensors.local(each.sharded_param) for each in group.fsdp_params]
        assert all(map(torch.equal, wholes, [shard.to(dtype or torch.float32) for shard in shards]))
        assert {(whole.is_leaf, whole.requires_grad, whole._version) for whole in wholes} == {(True, True, 0)}
        assert seen == [2] * (step + 1)
        module.reshard()
        assert all(isinstance(each, DTensor) for each in module.parameters())
        with torch.no_grad():
            module.weight.add_(1)


def test_ranges_are_named_for_profilers(net, groups):
    shortcuts.take(access.states_in(net), groups)
    with mock.patch.object(shortcuts, "record_function", side_effect=AssertionError):
        net(torch.ones(2, 3)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        net(torch.ones(2, 3)).sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {
        f"FSDP::{name} ({unit})" for name in ("pre_forward", "post_backward_reduce") for unit in ("first", "second")
    } <= names


def freeze_alike(groups):
    return [unsharded.Freezing(group) for group in groups]


@pytest.mark.parametrize(
    "wrappers", list(permutations([gathering.gather_for_training, unsharded.GatheredWrites, freeze_alike]))
)
def test_wrappers_of_one_method_may_be_put_on_in_any_order(net, groups, wrappers):
    for wrap in wrappers:
        wrap(groups)

    def run():
        return gathering.run_as_forward(net, net.forward, (torch.ones(2, 3),), {}, lambda output: output)

    with torch.inference_mode():
        run()
    gathering.reshard(net, groups)
    run()
    net.second.requires_grad_(False)
    with torch.no_grad():
        net.second.weight.mul_(2)
        net.gain.data.mul_(3)
    gathering.reshard(net, groups)
    assert [name for name, parameter in net.named_parameters() if not parameter.requires_grad] == [
        "second.weight",
        "second.bias",
    ]
    assert torch.equal(dtensors.local(net.second.weight), 2 * Net().second.weight)
    assert torch.equal(dtensors.local(net.gain), 3 * Net().gain)


def test_a_forward_gathers_and_a_backward_leaves_shards_with_gradients(net, groups):
    x, plain = torch.ones(2, 3), Net()
    told = [[], [], []]
    assert all(group._all_gather_result is None for group in groups)
    backward.BackwardWatch(net, groups, lambda index, have: told[index].append(have))
    owners = [owner for group in groups for _, owner in access.parameters_of(group)]
    assert not any(hasattr(owner, "_unsharded_param") for owner in owners)

    def phases():
        return [backward.phase_of(unit) for unit in (net, net.first, net.second)]

    seen = []
    net.none.register_forward_hook(lambda *_: seen.append(phases()))
    loss = gathering.run_as_forward(net, net.forward, (x,), {}, lambda loss: loss).sum()
    assert seen == [["forward", "", ""]]
    assert phases() == ["", "", ""]
    assert [group.is_sharded for group in groups] == [False, True, False]
    assert all(hasattr(owner, "_unsharded_param") for owner in owners)
    assert all(type(parameter) is nn.Parameter for parameter in net.second.parameters())
    context = access.state_of(net)._comm_ctx
    assert context.post_forward_order == [groups[1], groups[2], groups[0]]
    assert [group._post_forward_indices for group in groups] == [[2], [0], [1]]

    during = []
    loss.register_hook(lambda _: during.append(backward.is_in_backward(net)))
    net.second.weight.register_hook(lambda _: during.append((backward.is_in_backward(net), phases())))
    loss.backward()
    assert during[0] is False  # no unit was reached yet
    assert during[1] == (True, ["backward", "", "backward"])
    assert not backward.is_in_backward(net)
    assert [heard[0] for heard in told] == [[True], [True, True], [True, True]]
    assert all(group.is_sharded for group in groups)
    assert context.post_forward_order == []
    plain(x).sum().backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(dtensors.local(parameter.grad), expected.grad)
    assert not any(flag for group in groups for flag in backward.have_unreduced_gradients(group))


def test_gradients_that_are_not_reduced_are_whole_until_a_step_is_forgotten(net, groups):
    net.set_requires_gradient_sync(False)
    net(torch.ones(2, 3)).sum().backward()
    assert all(flag for group in groups for flag in backward.have_unreduced_gradients(group))
    assert all(parameter.grad is None for parameter in net.parameters())
    gathering.reshard(net, groups)
    assert all(flag for group in groups for flag in backward.have_unreduced_gradients(group))
    backward.forget_step(net, groups)
    assert not any(flag for group in groups for flag in backward.have_unreduced_gradients(group))


def test_states_that_a_step_makes_share_the_layout_of_their_parameters(net):
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.Adam(net.parameters())
    with stepping_on_rows(optimizer):
        optimizer.step()
    for parameter in net.parameters():
        assert optimizer.state[parameter]["exp_avg"]._spec is parameter._spec
        low = dtensors.of_rows_there(dtensors.local(parameter).bfloat16(), parameter)
        assert (low.dtype, low.shape) == (torch.bfloat16, parameter.shape)
        assert dtensors.has_layout_of(low, parameter)


def test_units_that_are_sharded_are_left_alone(net, groups):
    with torch.no_grad():
        net(torch.ones(2, 3))
    freed = []
    for group in groups:
        group._to_sharded = lambda group=group, free=group._to_sharded: freed.append(group) or free()
    gathering.reshard(net, groups)
    assert freed == [groups[0], groups[2]]  # forward has left these two
    gathering.reshard(net, groups)
    assert freed == [groups[0], groups[2]]


def test_an_all_gather_that_nobody_waited_for_is_dropped(net, groups):
    with torch.no_grad():
        net(torch.ones(2, 3))
    assert not groups[2].is_sharded
    net.first.unshard(async_op=True)
    assert groups[1]._all_gather_result is not None
    assert hasattr(groups[1]._all_gather_result, "all_gather_event")
    assert hasattr(groups[1]._all_gather_result, "all_gather_work")
    gathering.reshard(net, groups)
    assert groups[1]._all_gather_result is None
    assert all(group.is_sharded for group in groups)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    assert access.state_of(net)._comm_ctx.post_forward_order == []


def test_all_gathers_within_a_step_wait_for_what_was_written_to_shards(net, groups, monkeypatch):
    told = []

    class Stream(torch.cpu.Stream):
        def wait_stream(self, stream):
            told.append("waits")

    def noted(name, function):
        def call(*args, **kwargs):
            told.append(name)
            return function(*args, **kwargs)

        return call

    def step(x):
        told.clear()
        gathering.reshard(net, groups)
        assert told == ["waits"] * 2
        told.clear()
        with sharding.without_fully_shard(net, groups, writes=True):
            assert told == []
        assert told == ["writes"] * 5 + ["waits"] * 2 + ["gathers"]
        return net.forward(x)

    context = access.state_of(net)._comm_ctx
    context.all_gather_copy_in_stream, context.all_gather_stream = Stream(), Stream()
    monkeypatch.setattr(dtensors, "write_rows", noted("writes", dtensors.write_rows))
    groups[0].unshard = noted("gathers", groups[0].unshard)
    gathering.run_as_forward(net, step, (torch.ones(2, 3),), {}, lambda loss: loss)


def test_collectives_run_on_the_process_group_of_the_unit(net, groups):
    world, other = dist.group.WORLD, dist.new_group([0])

    def used():
        own = [(group._all_gather_process_group, group._reduce_scatter_process_group) for group in groups]
        return {*sum(own, ())} | {parameter.device_mesh.get_group() for parameter in net.parameters()}

    assert used() == {world}
    with gathering.on_process_groups(groups, {world: other}):
        assert used() == {other}
    assert used() == {world}
    dist.destroy_process_group(other)


def test_collectives_of_a_unit_are_told_and_as_torchs_own(groups):
    heard, world = [], dist.group.WORLD
    gathering.on_collectives(groups[0], heard.append, lambda: heard.append("begun"))
    gather, reduce = groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm
    memory = gather.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    gather(output_tensor=memory, input_tensor=torch.arange(3.0), group=world, async_op=True).wait()
    assert memory.tolist() == [0, 1, 2]
    reduce(output_tensor=memory, input_tensor=torch.ones(3), group=world, op=dist.ReduceOp.SUM)
    assert memory.tolist() == [1, 1, 1]
    assert heard == [False, "begun", True, "begun"]


def test_functions_of_units_are_known_to_spmd_types(monkeypatch):
    registered = []
    installed = SimpleNamespace(register_local_autograd_function=registered.append)
    monkeypatch.setitem(sys.modules, "spmd_types", installed)
    for function in (sharding._Inputs, calls._Alias):
        assert sharding.typed_as_local(function) is function
    assert registered == [sharding._Inputs, calls._Alias]


def test_functions_of_units_are_known_to_spmd_types_itself():
    why = "needs spmd-types, which a newer torch checks with: python -m pip install spmd-types"
    registered = pytest.importorskip("spmd_types._local_registration", reason=why)._LOCAL_AUTOGRAD_FUNCTIONS
    assert {sharding._Inputs, calls._Alias} <= registered


def test_zeros_are_sharded_as_gradients_are(net, groups):
    net(torch.ones(2, 3)).sum().backward()
    for group in groups:
        for parameter, zeros in backward.sharded_zeros(group):
            assert zeros.placements == parameter.grad.placements
            assert dtensors.local(zeros).shape == dtensors.local(parameter.grad).shape
            parameter.grad = zeros


def test_whole_storages_are_empty_but_while_units_are_unsharded(net, groups):
    net(torch.ones(2, 3)).sum().backward()
    whole = list(gathering.whole_storages(net))
    assert len(whole) == 5
    assert not any(tensor.untyped_storage().nbytes() for tensor in whole)
    net(torch.ones(2, 3))
    sizes = [tensor.untyped_storage().nbytes() for tensor in gathering.whole_storages(net.second)]
    assert sizes == [4 * 10, 4 * 2]


def test_all_gathers_are_asynchronous_where_it_is_said(net, groups):
    for is_asynchronous in (True, False):
        gathering.set_asynchronous(net, is_asynchronous=is_asynchronous)
        assert {group.unshard_async_op for group in groups} == {is_asynchronous}


def test_gradients_that_do_not_add_up_name_their_unit():
    parameters = [SimpleNamespace(padded_sharded_param_size=torch.Size(size)) for size in ((2, 3), (5,))]
    text = "^Expected parameters of 'adapter' that have gradients to have 12 elements, as torch reduces, got 11. Please"
    with pytest.raises(RuntimeError, match=text):
        in_flight._begun_all_reduce(SimpleNamespace(_module_fqn="adapter"), parameters, torch.zeros(12))


def test_what_was_sharded_is_plain_again(net):
    names, kinds = [name for name, _ in net.named_parameters()], [Net, nn.Linear, nn.Linear, nn.Tanh]
    net(torch.ones(2, 3)).sum().backward()
    sharding.undo_fully_shard(net)
    assert [type(module) for module in net.modules()] == kinds
    assert [name for name, _ in net.named_parameters()] == names
    assert not any(isinstance(module, FSDPModule) for module in net.modules())
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    torch.testing.assert_close(dict(net.state_dict()), dict(Net().state_dict()))
    x = torch.ones(2, 3)
    torch.testing.assert_close(net(x), Net()(x))
    for unit in (net.first, net):  # and can be sharded anew
        fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
    torch.testing.assert_close(net(x), Net()(x))


def test_a_tensor_that_is_given_twice_arrives_as_one():
    seen = []

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, query, key, *, value):
            seen.append((query is key, query is value))
            return (query * key * value * self.weight).sum()

    module = Pair()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    sharding.pass_inputs(module)
    x, other = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 3.0, requires_grad=True)
    module(x, x, value=x).backward()
    assert x.grad.tolist() == [12.0] * 3
    module(x, other, value=x).backward()
    assert x.grad.tolist() == [24.0] * 3
    assert other.grad.tolist() == [4.0] * 3
    assert seen == [(True, True), (False, True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_a_hash_tells_of_every_change_and_of_the_order(dtype):
    rows = (torch.arange(3 * 5000).remainder(97) + 1).to(dtype).view(3, 5000)
    known = dtensors.hash_of(rows)
    assert dtensors.hash_of(rows.clone()) == known
    for place in (0, 4095, 4096, 14_999):
        changed = rows.clone()
        changed.view(-1)[place] += 1
        assert dtensors.hash_of(changed) != known
    assert dtensors.hash_of(rows.repeat_interleave(2, dim=1).flatten()[::2]) == known
    assert dtensors.hash_of(rows.roll(1, 1)) != known
    assert dtensors.hash_of(rows[[1, 0, 2]]) != known


def test_a_hash_tells_of_changes_of_all_signs():
    for signs in range(2**6):
        values = torch.tensor([1.5 if signs >> place & 1 else -1.5 for place in range(6)])
        assert dtensors.hash_of(values) != dtensors.hash_of(-values)


def test_a_hash_tells_of_signs_of_any_two_elements():
    values = torch.randn(9)
    for one, other in itertools.combinations(range(9), 2):
        changed = values.clone()
        changed[[one, other]] *= -1
        assert dtensors.hash_of(values) != dtensors.hash_of(changed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex128])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_hash_is_that_of_a_copy_wherever_the_memory_begins(dtype, first):
    memory = torch.arange(50_003).remainder(113).to(dtype)
    rows = memory[first:]
    assert dtensors.hash_of(rows) == dtensors.hash_of(rows.clone())


def test_a_hash_of_nothing_is_a_number():
    assert dtensors.hash_of(torch.empty(0, 3)) == dtensors.hash_of() == 0


def test_a_hash_of_several_tensors_tells_of_each_of_them_and_of_their_order():
    sizes = (1, 300, 70_000, 7, 5, 40_000)  # of which some are small, beside each other and alone
    tensors = [torch.arange(size).remainder(89).to(torch.float32) + place for place, size in enumerate(sizes, 1)]
    tensors.insert(2, torch.arange(6).to(torch.bfloat16))
    known = dtensors.hash_of(*tensors)
    assert dtensors.hash_of(*(each.clone() for each in tensors), torch.empty(0)) == known
    assert len({dtensors.hash_of(*order) for order in itertools.permutations(tensors, 3)}) == 7 * 6 * 5
    for place, tensor in enumerate(tensors):
        for element in {0, len(tensor) - 1}:
            changed = [each.clone() for each in tensors]
            changed[place][element] += 1
            assert dtensors.hash_of(*changed) != known
