"""Blocks with another forward, without FSDP: the same numbers, less saved, and nothing else that anyone could see."""

import copy
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_osdp.apply.activations.blocks import BlockForwards
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.errors import PlanMismatchError
from lightning_osdp.operations.splitting import compiled_whole
from lightning_osdp.profiler import LiveBytes
from tests.support.tiers import but_slow

CPU = torch.device("cpu")
CHOICES = ("recompute", "offload", "recompute_offload")
FORMS = [("recompute", False), ("offload", False), ("recompute_offload", False), ("recompute_offload", True)]
"""Treatments of what blocks save, each with whether fairscale's form carries it out."""


class Part(nn.Module):
    """Several inputs, one of them by keyword, one in a tuple; several outputs, one no tensor; buffers that change."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x, pair, *, gate, scale=1.0):
        self.calls += 1
        hidden = F.dropout(self.norm(self.linear(x * pair[1] * self.calls.clone())), 0.3)
        first, second = (F.relu(hidden) * 1.5).split(8, dim=1)
        return {
            "x": F.dropout(self.out(hidden), 0.2) * self.mask + first * gate * scale,
            "rest": (second.tanh(), "text"),
        }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.parts = nn.Linear(8, 8), nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        x, rest = self.first(x), 0.0
        for part in self.parts:
            found = part(x, (1, 2.0), gate=x.sigmoid())
            x, rest = found["x"], rest + found["rest"][0].sum()
            assert found["rest"][1] == "text"
        return x.pow(2).sum() + rest


def apply(net, blocks, units=()):
    """Applies what blocks do to a model, and returns the memory that they use on the host."""
    forwards = BlockForwards(net, CPU)
    forwards.choose(blocks, units=units)
    return forwards.memory


def with_blocks(activations, *, reentrant=False, net=None):
    net = net or Net()
    blocks = [Block(name=f"parts.{i}", treatment=Treatment(saves=activations)) for i in range(3)]
    units = ["first", *(block.name for block in blocks)] if reentrant else []
    return net, apply(net, blocks, units)


def steps(net, number=3, around=nullcontext):
    """Loss and gradients of each step, then the buffers."""
    found = []
    torch.manual_seed(1)
    for _ in range(number):
        net.zero_grad()
        x = torch.randn(5, 8)
        with around():
            loss = net(x)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())])
    return found, [buffer.clone() for buffer in net.buffers()]


def assert_same(found, expected):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


@pytest.mark.parametrize(("activations", "reentrant"), FORMS)
def test_losses_gradients_and_buffers_are_those_of_blocks_that_keep_everything(activations, reentrant):
    net, memory = with_blocks(activations, reentrant=reentrant)
    assert_same(steps(net), steps(Net()))
    assert memory.current_bytes == 0
    assert (memory.peak_bytes > 0) == (activations != "recompute")


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(("activations", "reentrant"), FORMS)
def test_the_same_in_autocast(activations, reentrant):
    net, _ = with_blocks(activations, reentrant=reentrant)
    assert_same(steps(net, around=autocast), steps(Net(), around=autocast))


def forms_used(net, monkeypatch):
    """Returns a list that gets, for each call of a block, whether the call took fairscale's form."""
    used = []
    for part in net.parts:
        reentrant = part.forward._reentrant
        takes = reentrant.takes

        def noted(*given, takes=takes):
            used.append(takes(*given))
            return used[-1]

        monkeypatch.setattr(reentrant, "takes", noted)
    return used


def test_fairscales_form_runs_from_the_second_step_on_and_never_in_autocast(monkeypatch):
    net, _ = with_blocks("recompute_offload", reentrant=True)
    used = forms_used(net, monkeypatch)
    steps(net)
    assert used == [False] * 3 + [True] * 6
    used.clear()
    steps(net, 1, autocast)
    assert used == [False] * 3


class Box:
    def __init__(self, value):
        self.value = value


class Boxed(Part):
    def forward(self, x, pair, *, gate):
        return {"x": x, "rest": (super().forward(x, pair, gate=gate)["x"], "text"), "box": Box(x)}


class TwiceNet(Net):
    def forward(self, x):
        return super().forward(x) + self.parts[0](x, (1, 2.0), gate=x)["x"].sum()


class PairNet(Net):
    def forward(self, x):
        return self.parts[0](x, (1, self.first(x)), gate=x)["x"].sum()


@pytest.mark.parametrize("kind", ["boxed", "twice", "pair"])
def test_blocks_for_which_fairscales_form_is_unsound_never_take_it(monkeypatch, kind):
    def net():
        made = {"boxed": Net, "twice": TwiceNet, "pair": PairNet}[kind]()
        if kind == "boxed":
            made.parts[0].__class__ = Boxed
        return made

    ours, _ = with_blocks("recompute_offload", reentrant=True, net=net())
    taken = forms_used(ours, monkeypatch)
    expected = net()
    for network in (ours, expected):
        torch.manual_seed(1)
        for _ in range(2):
            network.zero_grad()
            network(torch.randn(5, 8)).backward()
    assert [p.grad is None for p in ours.parameters()] == [p.grad is None for p in expected.parameters()]
    for found, wanted in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    assert sum(taken) == (0 if kind == "pair" else 2)


class Average(nn.Module):
    """A buffer that training updates and evaluation leaves alone, and no normalisation of torch's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, x):
        if self.training:
            self.average.mul_(0.5).add_(x.detach().mean(0))
        return self.linear(x) * self.average


def test_buffers_that_change_only_in_training_are_updated_once_after_an_evaluation():
    torch.manual_seed(0)
    plain = nn.Sequential(Average(), Average())
    blocks = copy.deepcopy(plain)
    apply(blocks, [Block(name=name, treatment=Treatment(saves="recompute")) for name in "01"])
    x = torch.randn(4, 8)
    for is_training in (False, True):
        for net in (plain, blocks):
            net.train(is_training)
            net(x).pow(2).sum().backward()
    for name, buffer in plain.named_buffers():
        assert torch.equal(blocks.get_buffer(name), buffer), name
    for one, other in zip(plain.parameters(), blocks.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Warming(Average):
    """Begins to change its buffers when it is told to, one in place and one by another tensor."""

    is_warm = False

    def __init__(self):
        super().__init__()
        self.register_buffer("replaced", torch.ones(8))

    def forward(self, x):
        if self.is_warm:
            self.average.mul_(0.5).add_(x.detach().mean(0))
        y = self.linear(x) * self.average.clone() * self.replaced
        if self.is_warm:
            self.replaced = 0.5 * self.replaced + x.detach().mean(0)
        return y


@pytest.mark.parametrize("activations", ["recompute", "recompute_offload"])
def test_buffers_that_begin_to_change_late_are_updated_once(activations):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Warming(), Warming())
    blocks = copy.deepcopy(plain)
    apply(blocks, [Block(name=name, treatment=Treatment(saves=activations)) for name in "12"], list("12"))
    for step in range(5):
        x = torch.randn(4, 8)
        for net in (plain, blocks):
            net[1].is_warm = net[2].is_warm = step > 1
            net.zero_grad()
            net(x).pow(2).sum().backward()
        for name, buffer in plain.named_buffers():
            assert torch.equal(blocks.get_buffer(name), buffer), (step, name)
        for one, other in zip(plain.parameters(), blocks.parameters(), strict=True):
            assert step == 2 or torch.equal(one.grad, other.grad), step


def test_names_state_dicts_and_copies_are_those_of_the_model():
    net, _ = with_blocks("recompute")
    assert list(net.state_dict()) == list(Net().state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in Net().named_modules()]
    twin = copy.deepcopy(net)
    assert twin.parts[0].forward.block is twin.parts[0]
    steps(net)
    torch.testing.assert_close(list(twin.parameters()), list(Net().parameters()))
    own = Net()
    own.parts[0].forward = lambda x, pair, *, gate: {"x": x, "rest": (x, "text")}
    forward = own.parts[0].forward
    with_blocks("recompute", net=own)
    assert own.parts[0].forward.__wrapped__ is forward


def test_evaluation_takes_the_blocks_own_forward():
    (net, memory), plain = with_blocks("recompute_offload"), Net()
    with torch.no_grad():
        torch.manual_seed(1)
        found = net(torch.ones(5, 8))
        torch.manual_seed(1)
        torch.testing.assert_close(found, plain(torch.ones(5, 8)))
    assert memory.peak_bytes == 0


class Attention(nn.Module):
    """Saves three views of one storage, and a mask that is a buffer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())

    def forward(self, x):
        q, k, v = self.qkv(x).split(32, dim=-1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~self.mask, -1e9).softmax(-1)
        return x + self.proj(scores @ v).tanh()


X, QKV, SCORES = 8 * 64 * 32 * 4, 8 * 64 * 96 * 4, 8 * 64 * 64 * 4
MASK = 64 * 64


@pytest.mark.parametrize(
    ("activations", "on_device", "on_host"),
    [
        ("keep", 3 * X + QKV + SCORES + MASK, 0),
        ("recompute", X, 0),
        ("offload", 0, 3 * X + QKV + SCORES + MASK),
        ("recompute_offload", 0, X),
    ],
)
def test_bytes_that_a_block_keeps_on_the_device_and_on_the_host(activations, on_device, on_host):
    """Values that the block keeps: its input, q, k and v, the scores, the projection, the tanh and the inverse mask."""
    net = nn.Sequential(nn.Linear(32, 32), Attention())
    memory = None
    if activations != "keep":
        memory = apply(net, [Block(name="1", treatment=Treatment(saves=activations))])
    batch = torch.ones(8, 64, 32)
    with LiveBytes("cpu") as live:
        live.track([batch, *net.parameters(), *net.buffers()])
        before = live.current_bytes
        out = net(batch)
        assert live.current_bytes - before - X == on_device  # without the output
        assert memory is None or memory.current_bytes == memory.peak_bytes == on_host
        out.sum().backward()
        assert memory is None or memory.current_bytes == 0


class InPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        self.unused = y.sin()  # saves y as it is now, for a backward that never comes
        return (y.mul_(3) * x).sum()


def test_what_is_changed_in_place_after_it_was_saved_is_copied_again():
    net = nn.Sequential(InPlace())
    x = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x), x)
    apply(net, [Block(name="0", treatment=Treatment(saves="offload"))])
    (found,) = torch.autograd.grad(net(x), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["parts.7"], "'parts.7' is not there"),
        ([""], "'' is the root"),
        (["parts", "parts.1"], "'parts.1' is inside block 'parts'"),
    ],
)
def test_names_that_cannot_be_blocks_are_refused(names, message):
    net = Net()
    with pytest.raises(PlanMismatchError, match=f"Expected each block .*{message}. Plan anew by leaving out `plan=`."):
        apply(net, [Block(name=name, treatment=Treatment(saves="recompute")) for name in names])
    assert all("forward" not in vars(module) for module in net.modules())


def saved_bytes(net):
    """Returns the number of bytes that a forward saves for backward."""
    sizes = []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda t: t):
        loss = net(torch.ones(5, 8))
    loss.backward()
    return sum(sizes)


def chosen(*names, activations="recompute"):
    return [Block(name=f"parts.{name}", treatment=Treatment(saves=activations)) for name in names]


def test_what_blocks_do_may_change_from_step_to_step():
    net, plain = Net(), Net()
    forwards = BlockForwards(net, CPU)
    kept = saved_bytes(Net())
    found = []
    for blocks in ([], chosen(0), chosen(0, 1, 2), chosen(1), [], chosen(0, 2)):
        forwards.choose(blocks, units=())
        found_tensors, expected = ([*chain.from_iterable(each), *own] for each, own in (steps(net), steps(plain)))
        assert all(torch.equal(one, other) for one, other in zip(found_tensors, expected, strict=True))
        assert list(net.state_dict()) == list(plain.state_dict())
        found.append(saved_bytes(net))
        saved_bytes(plain)  # whose buffers go on, too
    assert found[0] == found[4] == kept
    assert found[0] > found[1] == found[3] > found[5] > found[2]


def test_a_forward_that_somebody_put_around_a_blocks_stays_there():
    net = Net()
    forwards = BlockForwards(net, CPU)
    forwards.choose(chosen(0), units=())
    calls, inner = [], net.parts[0].forward
    net.parts[0].forward = lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1]
    recomputing = saved_bytes(net)
    forwards.choose([], units=())
    assert saved_bytes(net) == saved_bytes(Net()) > recomputing
    forwards.choose(chosen(0), units=())
    assert saved_bytes(net) == recomputing
    assert len(calls) == 3


def test_names_that_cannot_be_blocks_change_nothing():
    net = Net()
    forwards = BlockForwards(net, CPU)
    forwards.choose(chosen(0), units=())
    recomputing = saved_bytes(net)
    with pytest.raises(PlanMismatchError, match=r"'parts\.7' is not there"):
        forwards.choose(chosen(1, 7), units=())
    assert saved_bytes(net) == recomputing


# dynamo of torch 2.14 looks at the gradients of whatever a frame gets
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("activations", CHOICES)
def test_a_compiled_block_does_as_chosen(activations):
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), nn.Linear(8, 1))
    forwards, x = BlockForwards(net, CPU), torch.ones(5, 8)
    net[1].compile(backend="eager")
    expected = torch.autograd.grad(net(x).sum(), [*net.parameters()])
    counts = []
    for blocks in (
        [Block(name="1", treatment=Treatment(saves=activations))],
        [],
        [Block(name="1", treatment=Treatment(saves=activations))],
    ):
        forwards.choose(blocks, units=())
        with LiveBytes("cpu") as live:
            loss = net(x).sum()
            counts.append(live.current_bytes)
        found = torch.autograd.grad(loss, [*net.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert counts[0] == counts[2] < counts[1]


COMPILED = {
    "in place": lambda net, **options: net[1].compile(**options),
    "whole": lambda net, **options: net[1].compile(fullgraph=True, **options),
    "wrapped": lambda net, **options: net.__setitem__(1, torch.compile(net[1], **options)),
    "around": lambda net, **options: net.compile(**options),
}


# dynamo of torch 2.14 looks at the gradients of whatever a frame gets
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", but_slow(COMPILED, slow=["wrapped", "around"]))
def test_what_is_compiled_of_a_block_stays_so_where_it_recomputes(how):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), nn.Linear(8, 1))
    x, compiled = torch.randn(5, 8), []

    def backend(graph, inputs):
        compiled.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    expected = torch.autograd.grad(net(x).sum(), [*net.parameters()])
    COMPILED[how](net, backend=backend)
    forwards = BlockForwards(net, CPU)
    for blocks in ([Block(name="1", treatment=Treatment(saves="recompute"))], []):
        forwards.choose(blocks, units=())
        for _ in range(2):
            found = torch.autograd.grad(net(x).sum(), [*net.parameters()])
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert any("tanh" in target.lower() for targets in compiled for target in targets), compiled
    assert compiled_whole(net) == (["1"] if how == "whole" else [])  # as it was


# dynamo of torch 2.14 looks at the gradients of whatever a frame gets
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_copy_of_a_compiled_block_is_a_block_of_its_own():
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.Tanh()))
    net[1].compile(backend="eager")
    BlockForwards(net, CPU).choose([Block(name="1", treatment=Treatment(saves="recompute"))], units=())
    twin, x = copy.deepcopy(net), torch.ones(5, 8)
    with torch.no_grad():
        twin[1][0].weight.zero_()
    assert torch.equal(twin(x), twin[1][0].bias.tanh().expand(5, 64))
    assert not torch.equal(net(x), twin(x))


# ---- levels: blocks that recompute but for results of some operations


def at_level(*names, kept=(0, 1)):
    return [Block(name=name, treatment=Treatment(saves="selective_1"), kept=kept) for name in names]


def test_blocks_at_a_level_are_those_that_keep_everything_bit_for_bit():
    net = Net()
    apply(net, at_level("parts.0", "parts.1", "parts.2", kept=(0,)))
    found, expected = steps(net, 4), steps(Net(), 4)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


def test_a_block_holds_its_input_and_the_results_of_its_level():
    net = nn.Sequential(nn.Linear(32, 32), Attention())
    forwards, batch = BlockForwards(net, CPU), torch.ones(8, 64, 32)
    for kept, num_bytes in (
        ((0,), QKV),
        ((1,), SCORES),
        ((0, 2), QKV + X),
        ((), 0),
        ((0, 1, 2, 3), QKV + SCORES + 2 * X),
    ):
        forwards.choose(at_level("1", kept=kept), units=())
        for _ in range(2):
            with LiveBytes("cpu") as live:
                live.track([batch, *net.parameters(), *net.buffers()])
                before = live.current_bytes
                out = net(batch)
                assert live.current_bytes - before - X == X + num_bytes
                out.sum().backward()


class Hidden(nn.Module):
    """Writes to what its layer returns past torch's version counter."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.layer(x)
        torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(hidden.detach())).add_(1.0)
        return self.out(hidden.sin())


def test_blocks_of_a_class_that_writes_unseen_recompute_everything_which_is_said_once(caplog):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Hidden(), Hidden(), Average())
    plain = copy.deepcopy(net)
    forwards = BlockForwards(net, CPU)
    forwards.choose(at_level("1", "2", "3", kept=(0,)), units=())
    for _ in range(3):
        x = torch.randn(5, 8)
        for each in (net, plain):
            each.zero_grad()
            each(x).pow(2).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0] == (
        "OSDP: blocks of class Hidden recompute everything: a result that one keeps for backward is not what running"
        " its operation again returns. Something writes to it past torch's version counters, as through `.data`, or the"
        " operation is not deterministic."
    )
    assert forwards.refused == {Hidden}
    assert [net[index].forward.kept is None for index in (1, 2, 3)] == [True, True, False]
    forwards.choose(at_level("1", "3", kept=(0,)), units=())
    assert [net[index].forward.kept is None for index in (1, 3)] == [True, False]


def test_copies_of_blocks_at_a_level_are_the_copys():
    net = Net()
    apply(net, at_level("parts.0", kept=(0,)))
    steps(net)
    twin = copy.deepcopy(net)
    assert twin.parts[0].forward.block is twin.parts[0]
    assert twin.parts[0].forward.kept is not net.parts[0].forward.kept
    found, expected = steps(twin), steps(net)
    assert all(
        torch.equal(one, other)
        for ours, theirs in zip(found[0], expected[0], strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


# dynamo of torch 2.14 looks at the gradients of whatever a frame gets
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_at_a_level():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), nn.Linear(8, 1))
    forwards, x = BlockForwards(net, CPU), torch.randn(5, 8)
    net[1].compile(backend="eager")
    expected = torch.autograd.grad(net(x).sum(), [*net.parameters()])
    for blocks in (at_level("1", kept=(0,)), [], at_level("1", kept=(0, 1))):
        forwards.choose(blocks, units=())
        for _ in range(3):
            found = torch.autograd.grad(net(x).sum(), [*net.parameters()])
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
