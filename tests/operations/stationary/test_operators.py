"""Modules that change their class in place, on one rank; what several ranks compute is in tests/distributed."""

import copy
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrizations

from lightning_osdp.errors import ConfigurationError, RanksApartError
from lightning_osdp.operations.stationary import Ranks, as_whole, is_stationary, make_stationary, refusal
from lightning_osdp.operations.stationary.exchanges import gather, to_samples


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 5, padding_idx=2)
        self.up, self.act, self.down = nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5, bias=False)
        self.last = nn.Linear(5, 3)

    def forward(self, indices):
        x = self.embedding(indices)
        return self.last(x + self.down(self.act(self.up(x))))


def ranks():
    return Ranks(mesh=init_device_mesh("cpu", (1,)), numbers_of_ranks=lambda number: [number])


@pytest.fixture
def gathers(monkeypatch):
    """Rows of each gather, in turn."""
    found = []
    seen = "lightning_osdp.operations.stationary.operators.gather"
    monkeypatch.setattr(seen, lambda rows, call: found.append(rows) or gather(rows, call))
    return found


KINDS = {"embedding": ("embedding",), "pair": ("up", "down"), "column": ("last",)}


def changed(model, kinds=KINDS):
    for kind, operators in kinds.items():
        assert refusal(model, kind, operators) == ""
        make_stationary(model, kind, operators, ranks())
    return model


def test_names_classes_and_results_stay(one_rank):
    whole, indices = Model(), torch.randint(7, (4, 6))
    model = changed(copy.deepcopy(whole))
    assert [*dict(model.named_parameters())] == [*dict(whole.named_parameters())]
    assert isinstance(model.up, nn.Linear)
    assert repr(model) == repr(whole)
    assert is_stationary(model.up)
    assert not is_stationary(model.act)
    assert torch.equal(model(indices), whole(indices))
    model(indices).square().sum().backward()
    whole(indices).square().sum().backward()
    for name, parameter in whole.named_parameters():
        found = model.get_parameter(name).grad
        assert isinstance(found, DTensor)
        assert torch.allclose(found.full_tensor(), parameter.grad, atol=1e-6), name


def test_parameters_are_cut_where_their_kind_needs_it(one_rank):
    model = changed(Model())
    placements = {name: parameter.placements[0] for name, parameter in model.named_parameters()}
    assert placements == {
        "embedding.weight": Shard(1),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "last.weight": Shard(0),
        "last.bias": Shard(0),
    }
    row = changed(Model(), {"row": ("last",)})
    assert {p.placements[0] for p in (row.last.weight, row.last.bias)} == {Shard(0), Shard(1)}


def test_attributes_of_parameters_stay_and_frozen_ones_stay_frozen(one_rank):
    model = Model()
    model.last.weight.decays = False
    model.last.bias.requires_grad_(False)
    changed(model, {"column": ("last",)})
    assert model.last.weight.decays is False
    assert not model.last.bias.requires_grad
    model(torch.zeros(2, dtype=torch.long)).sum().backward()
    assert model.last.bias.grad is None


def test_whole_modules_have_their_class_within_the_context(one_rank):
    model = changed(Model())
    with as_whole(model.up, whole_of, None):
        assert type(model.up) is nn.Linear
        assert vars(model.up).keys() == vars(nn.Linear(1, 1)).keys()
        assert isinstance(model.up.weight, nn.Parameter)
        assert not isinstance(model.up.weight, DTensor)
    assert is_stationary(model.up)
    assert isinstance(model.up.weight, DTensor)


def whole_of(part):
    return nn.Parameter(part.full_tensor().detach().clone())


class OfOne(nn.Module):
    """Attention whose queries, keys and values one operator makes."""

    def __init__(self, kind=nn.Linear, *, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(5, 12, bias=bias) if kind is nn.Linear else kind(12, 5)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).split(4, dim=2))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class ByHead(OfOne):
    """Attention with queries, keys and values of each head beside each other."""

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (2, 6)).transpose(1, 2).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


OF_ONE = {"attention": ("qkv", "out")}


@pytest.mark.parametrize("make", [OfOne, partial(OfOne, bias=False), partial(OfOne, "Conv1D")])
def test_one_operator_of_queries_keys_and_values_has_its_names_and_results(one_rank, make):
    if "Conv1D" in getattr(make, "args", ()):
        make = partial(OfOne, pytest.importorskip("transformers.pytorch_utils").Conv1D)
    whole, x = make(), torch.randn(2, 3, 5)
    model = changed(copy.deepcopy(whole), OF_ONE)
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert model.qkv.weight.shape == whole.qkv.weight.shape
    assert torch.allclose(model(x), whole(x))
    for each in (model, whole):
        each(x).square().sum().backward()
    found = torch.cat([part.weight.grad.full_tensor() for part in model.qkv.slices], model.qkv.cuts_along["weight"])
    assert torch.allclose(found, whole.qkv.weight.grad, atol=1e-6)
    with as_whole(model.qkv, whole_of, lambda part, values: part.detach().to_local().copy_(values)):
        assert type(model.qkv) is type(whole.qkv)
        assert [*dict(model.named_parameters())] == [*dict(whole.named_parameters())]
        assert torch.equal(model.qkv.weight, whole.qkv.weight)
        assert torch.equal(model.qkv(x), whole.qkv(x))
        model.qkv.weight.data.mul_(2)
    assert is_stationary(model.qkv)
    whole.qkv.weight.data.mul_(2)
    assert torch.equal(model.state_dict()["qkv.weight"].full_tensor(), whole.qkv.weight)
    assert torch.allclose(model(x), whole(x))


class Gated(OfOne):
    """A gated MLP, of which one operator makes gates and values."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(5, 8)

    def forward(self, x):
        gate, value = self.qkv(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


@pytest.mark.parametrize(("make", "kind"), [(ByHead, "heads"), (Gated, "gated")])
def test_features_of_one_operator_may_be_by_head_or_of_two_parts(one_rank, make, kind):
    whole, x = make(), torch.randn(2, 3, 5)
    model = changed(copy.deepcopy(whole), {kind: ("qkv", "out")})
    assert torch.allclose(model(x), whole(x))
    assert model.state_dict().keys() == whole.state_dict().keys()
    for each in (model, whole):
        each(x).square().sum().backward()
    for name, parameter in whole.named_parameters():
        own, _, of = name.partition(".")
        parts = getattr(model.get_submodule(own), "slices", [model.get_submodule(own)])
        found = torch.cat([getattr(part, of).grad.full_tensor() for part in parts])
        assert torch.allclose(found, parameter.grad, atol=1e-6), name


def test_one_operator_that_makes_other_numbers_of_features_is_refused():
    model = OfOne()
    model.qkv = nn.Linear(5, 13)
    assert refusal(model, *OF_ONE, OF_ONE["attention"]) == ("'qkv' does not make 3 parts of as many features")


def test_the_second_of_a_pair_takes_only_what_the_first_has_made(one_rank):
    model = changed(Model())
    with pytest.raises(ConfigurationError, match="Expected 'down' to be given what 'up' made"):
        model.down(torch.randn(2, 8))
    other = changed(Model())
    with pytest.raises(ConfigurationError, match="to be given what 'up' made"):
        model.down(other.up(torch.randn(2, 5)))


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
def test_transforms_of_torch_func_are_refused(one_rank, transform):
    model = changed(Model())
    with pytest.raises(ConfigurationError, match=r"to be called outside of torch\.func"):
        transform(model.last)(torch.randn(2, 5))


class Gated(nn.Module):
    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(5, 8), nn.Linear(5, 8, bias=False), nn.Linear(8, 5)
        self.between = between

    def forward(self, x):
        gate = F.silu(self.gate(x))
        return self.down(gate * self.up(self.between(x)))


GATED = {"pair": ("gate", "up", "down")}


def test_two_operators_that_feed_a_third_take_one_gathered_input(one_rank, gathers):
    whole, x = Gated(), torch.randn(3, 5, requires_grad=True)
    model = changed(copy.deepcopy(whole), GATED)
    gradients = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (whole, model)]
    assert len(gathers) == 1
    assert torch.allclose(*gradients)
    assert vars(x) == {}
    for each in (whole, model):
        each(x).square().sum().backward()
    for name, parameter in whole.named_parameters():
        assert torch.allclose(model.get_parameter(name).grad.full_tensor(), parameter.grad, atol=1e-6), name
    with torch.inference_mode():
        assert torch.equal(model(x * 1), whole(x * 1))


@pytest.mark.parametrize("between", [lambda x: x * 1, lambda x: x.add_(1)])
def test_two_operators_that_take_other_inputs_are_refused(one_rank, between):
    model = changed(Gated(between), GATED)
    with pytest.raises(ConfigurationError, match="of features that were made of another input"):
        model(torch.randn(3, 5))


class Projected(nn.Module):
    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = nn.Linear(5, 4, bias=False), nn.Linear(5, 4), nn.Linear(5, 3)
        self.between = between

    def forward(self, x):
        query, key = self.query(x), self.key(x)
        return torch.softmax(query @ key.mT, -1) @ self.value(self.between(x))


COLUMNS = {"column": ("query", "key", "value")}


@pytest.mark.parametrize(("between", "num_gathers"), [(lambda x: x, 1), (lambda x: x * 2, 2)])
def test_columns_of_one_input_gather_it_once_unless_it_is_another_one(one_rank, gathers, between, num_gathers):
    whole = Projected(between)
    model = changed(copy.deepcopy(whole), COLUMNS)
    for each in (whole, model):
        x = torch.ones(3, 5, requires_grad=True)
        given = x * 1
        each(given).square().sum().backward()
        each.input_gradient = x.grad
        assert is_stationary(model.query)
    assert len(gathers) == num_gathers
    assert vars(given) == {} or num_gathers > 1  # one that is given to some of them alone
    assert torch.allclose(model.input_gradient, whole.input_gradient, atol=1e-6)
    for name, parameter in whole.named_parameters():
        assert torch.allclose(model.get_parameter(name).grad.full_tensor(), parameter.grad, atol=1e-6), name


@pytest.mark.parametrize("between", [lambda x: x.add_(1), lambda x: x.requires_grad_()])
def test_columns_do_not_take_what_was_gathered_of_an_input_that_has_changed(one_rank, gathers, between):
    whole, x = Projected(between), torch.randn(3, 5)
    model = changed(copy.deepcopy(whole), COLUMNS)
    assert torch.equal(model(x.clone()), whole(x.clone()))
    assert len(gathers) == 2


def test_columns_that_ranks_have_gathered_of_other_calls_gather_anew():
    """Both ranks have called the first operator twice; the other one goes on with what it gathered first."""
    apart = SimpleNamespace(size=lambda *_: 2, ndim=1, get_group=lambda _: None, get_local_rank=lambda _: 0)
    for others, expected in ((2, True), (1, False), (0, False)):
        ranks = Ranks(mesh=apart, numbers_of_ranks=lambda number, o=others: [number, number + 3 * (o - 2) * 2**20])
        assert ranks.call(torch.randn(3, 5), place=1, gathered=2)[1].have_gathered is expected


@pytest.mark.parametrize("operators", [("query",), ("query", "key", "value")])
def test_in_evaluations_nothing_holds_a_gathered_input_while_outputs_are_exchanged(one_rank, monkeypatch, operators):
    model, gathered, alive = changed(Projected(), {"column": operators}), [], []
    module = "lightning_osdp.operations.stationary.operators"

    def kept(rows, call):
        found = gather(rows, call).clone()
        gathered.append(weakref.ref(found))
        return found

    monkeypatch.setattr(f"{module}.gather", kept)
    monkeypatch.setattr(
        f"{module}.to_samples",
        lambda *given: alive.append([each() is not None for each in gathered]) or to_samples(*given),
    )
    with torch.no_grad():
        model(torch.randn(3, 5))
    assert len(alive) == len(operators)
    assert not any(map(any, alive))
    model(torch.randn(3, 5))
    assert any(map(any, alive))


def test_columns_take_inference_tensors_that_autocast_casts(one_rank):
    whole = Projected()
    model = changed(copy.deepcopy(whole), COLUMNS)
    with torch.inference_mode():
        x = torch.randn(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for each in (whole, model):
            each(x).square().sum().backward()
    for name, parameter in whole.named_parameters():
        assert torch.allclose(model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-2), name


def test_columns_gather_each_for_itself_without_gradients_and_in_another_precision(one_rank, gathers):
    whole, x = Projected(), torch.randn(3, 5)
    model = changed(copy.deepcopy(whole), COLUMNS)
    with torch.inference_mode():
        assert torch.equal(model(x * 1), whole(x * 1))
    with torch.no_grad():
        assert torch.equal(model(x), whole(x))
    assert len(gathers) == 6
    outputs = []
    for each in (whole, model):
        query = each.query(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append((query, each.key(x), each.value(x)))
    assert len(gathers) == 8
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_columns_that_ranks_call_in_another_order_are_refused():
    # the other rank has a row, and comes to the second of three
    number_of_other = (1 * 3 + 1) * 16 * 3 * 2**20
    ranks = Ranks(mesh=SimpleNamespace(size=lambda: 2), numbers_of_ranks=lambda number: [number, number_of_other])
    with pytest.raises(RanksApartError, match="several of one input in another order"):
        ranks.call(torch.ones(2, 3), place=2)


def test_elementwise_functions_may_write_in_place(one_rank):
    whole = Model()
    whole.act = nn.ReLU(inplace=True)
    model, x = changed(copy.deepcopy(whole)), torch.randn(3, 5)
    for each in (whole, model):
        each.down(each.act(each.up(x))).square().sum().backward()
    assert torch.allclose(model.up.weight.grad.full_tensor(), whole.up.weight.grad, atol=1e-5)


def test_inputs_with_other_features_are_refused_before_ranks_agree(one_rank):
    model = changed(Model())
    with pytest.raises(RuntimeError, match="Expected an input with 5 features, got one of shape"):
        model.last(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("kind", "operators"),
    [("column", ("up",)), ("row", ("up",)), ("pair", ("up", "down")), ("embedding", ("embedding",))],
)
def test_weights_that_stand_the_other_way_are_cut_in_their_own_dimension(one_rank, kind, operators):
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    whole, indices = Model(), torch.randint(7, (4, 6))
    whole.up, whole.down = conv(8, 5), conv(5, 8)
    model = changed(copy.deepcopy(whole), {kind: operators})
    if kind != "embedding":
        assert model.up.weight.placements[0] == Shard(0 if kind == "row" else 1)
        assert model.down.weight.placements[0] == Shard(0) if kind == "pair" else not is_stationary(model.down)
    for each in (model, whole):
        each(indices).square().sum().backward()
    assert torch.allclose(model(indices), whole(indices), atol=1e-6)
    for name, parameter in whole.named_parameters():
        found = model.get_parameter(name).grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.allclose(found, parameter.grad, atol=1e-5), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_autocast_holds(one_rank, dtype):
    whole, x = Model(), torch.randn(4, 5)
    model = changed(copy.deepcopy(whole))
    if dtype == torch.float64:
        whole, model, x = whole.double(), changed(copy.deepcopy(Model()).double()), x.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.last(x), whole.last(x))
        assert torch.equal(model.down(model.act(model.up(x))), whole.down(whole.act(whole.up(x))))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(5, 5)


class Own(nn.Linear):
    pass


def _with(change, kind="column", operators=("last",)):
    def build():
        model = Model()
        change(model)
        return model, kind, operators

    return build


def _tie(model):
    model.other = nn.Linear(5, 3)
    model.other.weight = model.last.weight


REFUSED = {
    "is tests.operations.stationary.test_operators.Own and not exactly of one of": _with(
        lambda model: setattr(model, "last", Own(5, 3))
    ),
    "'act' is torch.nn.modules.activation.GELU": _with(lambda model: None, operators=("act",)),
    "'last' is torch.nn.modules.linear.Linear": _with(lambda model: None, kind="embedding"),
    "is the layer that an adapter is around": _with(
        lambda model: setattr(model, "adapted", Adapted()), operators=("adapted.base_layer",)
    ),
    "has a forward of its own": _with(lambda model: setattr(model.last, "forward", model.last.forward)),
    "'last' has hooks": _with(lambda model: model.last.register_forward_hook(print)),
    "'down' has hooks": _with(
        lambda model: model.down.register_full_backward_hook(print), kind="pair", operators=("up", "down")
    ),
    "has hooks of its weights": _with(lambda model: model.last.weight.register_hook(print)),
    "shares its weights": _with(_tie),
    "not exactly of one of": _with(lambda model: parametrizations.weight_norm(model.last)),
    "has other parameters than": _with(
        lambda model: model.last.register_parameter("more", nn.Parameter(torch.ones(1)))
    ),
    "has modules or buffers": _with(lambda model: model.last.register_buffer("mask", torch.ones(1))),
    "has max_norm, scale_grad_by_freq or sparse": _with(
        lambda model: setattr(model.embedding, "sparse", True), kind="embedding", operators=("embedding",)
    ),
    "'last' is compiled, or inside of a module that is": _with(lambda model: model.compile(backend="eager")),
    "'up' is compiled, or inside": _with(
        lambda model: setattr(model, "fast", torch.compile(model.up, backend="eager")),
        kind="pair",
        operators=("up", "down"),
    ),
    "'last' takes 5 features of torch.float32, and 'up' makes 8": _with(
        lambda model: None, kind="pair", operators=("up", "last")
    ),
    "'pair' is of 2 or 3 operators": _with(lambda model: None, kind="pair", operators=("up",)),
    "'column' is of 1 or 2 or 3 operators": _with(lambda model: None, operators=("up", "last", "up", "last")),
    "['up', 'up'] are not modules of their own": _with(lambda model: None, operators=("up", "up")),
    "'down' takes 8 and 'last' takes 5": _with(lambda model: None, operators=("down", "last")),
}


@pytest.mark.parametrize("text", REFUSED)
def test_operators_that_cannot_move_activations_are_refused_with_the_reason(text):
    model, kind, operators = REFUSED[text]()
    assert text in refusal(model, kind, operators)


def test_weights_of_another_class_are_refused():
    class Special(nn.Parameter):
        pass

    model = Model()
    model.last.weight = Special(model.last.weight.detach())
    assert refusal(model, "column", ("last",)) == "'last' has weights of another class than torch's"
