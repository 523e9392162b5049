"""What torch's ``fully_shard`` has that is not public, and does as is assumed: another torch fails here first."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_osdp.apply import internals
from lightning_osdp.errors import ConfigurationError

METHODS = [(kind, name) for kind, names in internals._METHODS.items() for name in names]
ATTRIBUTES = [f"{kind}.{path}".rpartition(".")[::2] for kind, paths in internals._ATTRIBUTES.items() for path in paths]


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
    internals.begin(module)
    return module


@pytest.fixture
def groups(net):
    return [internals.group_of(each) for each in (net, net.first, net.second)]


def objects(net):
    """One of each kind that internals.py reaches into."""
    state = internals.state_of(net)
    group = internals.group_of(net)
    return {
        "state": state,
        "state._comm_ctx": state._comm_ctx,
        "state._state_ctx": state._state_ctx,
        "group": group,
        "group.mesh_info": group.mesh_info,
        "parameter": group.fsdp_params[0],
    }


def test_this_torch_has_everything(net):
    internals.check_torch()
    internals.check_units(net)


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_class_that_lacks_one_is_named(monkeypatch, kind, name):
    holder = next(base for base in kind.__mro__ if name in vars(base))
    if isinstance(kind, type(internals.TrainingState)):  # members of an Enum cannot be deleted
        monkeypatch.setitem(internals._METHODS, kind, (f"{name}_2",))
        name = f"{name}_2"
    else:
        monkeypatch.delattr(holder, name)
    expected = rf"^Expected a torch .*as that of 2\.13, got .* without {kind.__name__}\.{name}\. Install torch 2\.13\.$"
    with pytest.raises(ConfigurationError, match=expected):
        internals.check_torch()


@pytest.mark.parametrize(("path", "name"), ATTRIBUTES)
def test_an_object_that_lacks_one_is_named(net, path, name):
    delattr(objects(net)[path], name)
    with pytest.raises(ConfigurationError, match=rf" without {path}\.{name}[,.]"):
        internals.check_units(net)


@pytest.mark.slow
def test_the_package_is_imported_where_fully_shard_has_no_all_gathers_of_its_own():
    code = (
        "import torch.distributed.fsdp._fully_shard._fsdp_param_group\n"
        "import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives\n"
        "del collectives.DefaultAllGather\n"  # as in an older torch
        "import lightning_osdp\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_what_is_written_while_it_is_gathered_is_in_the_shards(net, groups):
    writes, expected = internals.GatheredWrites(groups), Net()
    writes.is_looking = True

    def written(*, is_taken):
        internals.run_as_forward(net, net.forward, (torch.ones(2, 3),), {}, lambda output: output)
        for model in (net, expected) if is_taken else (net,):
            with torch.no_grad():
                model.gain.mul_(2)
                model.second.weight.data = 3 * model.second.weight.data
                model.second.bias.data.add_(1)
        internals.reshard(net, groups)
        for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(internals.local(parameter), other)
        owners = [owner for group in groups for _, owner in internals.parameters_of(group)]
        assert all(owner._unsharded_param.untyped_storage().size() == 0 for owner in owners)

    written(is_taken=True)
    writes.is_paused = True
    written(is_taken=False)
    writes.is_paused = writes.is_looking = False
    written(is_taken=True)  # of what is known to change behind its version, too
    internals.run_as_forward(net, net.forward, (torch.ones(2, 3),), {}, lambda output: output)
    net.gain.data.add_(1)
    internals.reshard(net, groups)
    assert torch.equal(internals.local(net.gain), expected.gain)


def test_a_forward_gathers_and_a_backward_leaves_shards_with_gradients(net, groups):
    x, plain = torch.ones(2, 3), Net()
    told = [[], [], []]
    assert all(group._all_gather_result is None for group in groups)
    internals.BackwardWatch(net, groups, lambda index, have: told[index].append(have))
    owners = [owner for group in groups for _, owner in internals.parameters_of(group)]
    assert not any(hasattr(owner, "_unsharded_param") for owner in owners)

    def phases():
        return [internals.phase_of(unit) for unit in (net, net.first, net.second)]

    seen = []
    net.none.register_forward_hook(lambda *_: seen.append(phases()))
    loss = internals.run_as_forward(net, net.forward, (x,), {}, lambda loss: loss).sum()
    assert seen == [["forward", "", ""]]
    assert phases() == ["", "", ""]
    assert [group.is_sharded for group in groups] == [False, True, False]
    assert all(hasattr(owner, "_unsharded_param") for owner in owners)
    assert all(type(parameter) is nn.Parameter for parameter in net.second.parameters())
    context = internals.state_of(net)._comm_ctx
    assert context.post_forward_order == [groups[1], groups[2], groups[0]]
    assert [group._post_forward_indices for group in groups] == [[2], [0], [1]]

    during = []
    loss.register_hook(lambda _: during.append(internals.is_in_backward(net)))
    net.second.weight.register_hook(lambda _: during.append((internals.is_in_backward(net), phases())))
    loss.backward()
    assert during[0] is False  # no unit was reached yet
    assert during[1] == (True, ["backward", "", "backward"])
    assert not internals.is_in_backward(net)
    assert [heard[0] for heard in told] == [[True], [True, True], [True, True]]
    assert all(group.is_sharded for group in groups)
    assert context.post_forward_order == []
    plain(x).sum().backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(internals.local(parameter.grad), expected.grad)
    assert not any(internals.has_whole_gradient(owner) for owner in owners)


def test_gradients_that_are_not_reduced_are_whole_until_a_step_is_forgotten(net, groups):
    net.set_requires_gradient_sync(False)
    net(torch.ones(2, 3)).sum().backward()
    owners = [owner for group in groups for _, owner in internals.parameters_of(group)]
    assert all(internals.has_whole_gradient(owner) for owner in owners)
    assert all(owner.unsharded_accumulated_grad is None for owner in owners)  # but where it has a dtype of its own
    assert all(parameter.grad is None for parameter in net.parameters())
    internals.reshard(net, groups)
    assert all(internals.has_whole_gradient(owner) for owner in owners)
    internals.forget_step(net, groups)
    assert not any(internals.has_whole_gradient(owner) for owner in owners)


def test_an_all_gather_that_nobody_waited_for_is_dropped(net, groups):
    with torch.no_grad():
        net(torch.ones(2, 3))
    assert not groups[2].is_sharded
    net.first.unshard(async_op=True)
    assert groups[1]._all_gather_result is not None
    assert hasattr(groups[1]._all_gather_result, "all_gather_event")
    assert hasattr(groups[1]._all_gather_result, "all_gather_work")
    internals.reshard(net, groups)
    assert groups[1]._all_gather_result is None
    assert all(group.is_sharded for group in groups)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    assert internals.state_of(net)._comm_ctx.post_forward_order == []


def test_all_gathers_within_a_step_wait_for_what_was_written_to_shards(net, groups, monkeypatch):
    told = []

    class Stream(torch.cpu.Stream):
        def wait_stream(self, stream):
            told.append("waits")

    def noted(name, function):
        def call(*args):
            told.append(name)
            return function(*args)

        return call

    def step(x):
        told.clear()
        internals.reshard(net, groups)
        assert told == ["waits"] * 2
        told.clear()
        with internals.plain(net, groups, writes=True):
            assert told == []
        assert told == ["writes"] * 5 + ["waits"] * 2 + ["gathers"]
        return net.forward(x)

    context = internals.state_of(net)._comm_ctx
    context.all_gather_copy_in_stream, context.all_gather_stream = Stream(), Stream()
    monkeypatch.setattr(internals, "_write_rows", noted("writes", internals._write_rows))
    groups[0].unshard = noted("gathers", groups[0].unshard)
    internals.run_as_forward(net, step, (torch.ones(2, 3),), {}, lambda loss: loss)


def test_collectives_run_on_the_process_group_of_the_unit(net, groups):
    world, other = dist.group.WORLD, dist.new_group([0])

    def used():
        own = [(group._all_gather_process_group, group._reduce_scatter_process_group) for group in groups]
        return {*sum(own, ())} | {parameter.device_mesh.get_group() for parameter in net.parameters()}

    assert used() == {world}
    with internals.on_process_groups(groups, {world: other}):
        assert used() == {other}
    assert used() == {world}
    dist.destroy_process_group(other)


def test_a_units_all_gather_may_be_replaced(groups):
    heard, own = [], groups[0]._all_gather_comm
    internals.on_collectives(groups[0], heard.append)
    noted = groups[0]._all_gather_comm
    memory = noted.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    noted(output_tensor=memory, input_tensor=torch.arange(3.0), group=dist.group.WORLD)
    assert memory.tolist() == [0, 1, 2]
    assert heard == [False]
    assert noted._own is own


def test_zeros_are_sharded_as_gradients_are(net, groups):
    net(torch.ones(2, 3)).sum().backward()
    for group in groups:
        for parameter, zeros in internals.sharded_zeros(group):
            assert zeros.placements == parameter.grad.placements
            assert internals.local(zeros).shape == internals.local(parameter.grad).shape
            parameter.grad = zeros


def test_whole_storages_are_empty_but_while_units_are_unsharded(net, groups):
    net(torch.ones(2, 3)).sum().backward()
    whole = list(internals.whole_storages(net))
    assert len(whole) == 5
    assert not any(tensor.untyped_storage().nbytes() for tensor in whole)
    net(torch.ones(2, 3))
    sizes = [tensor.untyped_storage().nbytes() for tensor in internals.whole_storages(net.second)]
    assert sizes == [4 * 10, 4 * 2]


def test_all_gathers_are_asynchronous_where_it_is_said(net, groups):
    for is_asynchronous in (True, False):
        internals.set_asynchronous(net, is_asynchronous=is_asynchronous)
        assert {group.unshard_async_op for group in groups} == {is_asynchronous}


def test_what_was_sharded_is_plain_again(net):
    names, kinds = [name for name, _ in net.named_parameters()], [Net, nn.Linear, nn.Linear, nn.Tanh]
    net(torch.ones(2, 3)).sum().backward()
    internals.make_plain(net)
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
    internals.pass_inputs(module)
    x, other = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 3.0, requires_grad=True)
    module(x, x, value=x).backward()
    assert x.grad.tolist() == [12.0] * 3
    module(x, other, value=x).backward()
    assert x.grad.tolist() == [24.0] * 3
    assert other.grad.tolist() == [4.0] * 3
    assert seen == [(True, True), (False, True)]
