import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler import fingerprint
from lightning_osdp.profiler.tracing.calls import recorded_calls
from lightning_osdp.profiler.tracing.operators import check_parameters, find_operators
from tests.profiler.traced import Net, linear


def operators_of(model, *inputs):
    """Operators by name, in forward order, of one forward."""
    with recorded_calls(model) as calls:
        model(*inputs)
    return {operator.name: operator for operator in find_operators(model, calls)}


X = torch.ones(2, 4)


def test_operators_come_in_the_order_of_their_first_call():
    net = Net(lambda n, x: n.a(n.c(n.b(n.c(x)))), a=linear(), b=linear(), c=linear())
    found = operators_of(net, X)
    assert list(found) == ["c", "b", "a"]


def test_modules_without_parameters_are_no_operators():
    found = operators_of(nn.Sequential(linear(), nn.ReLU(), nn.LayerNorm(4, elementwise_affine=False)), X)
    assert list(found) == ["0"]


def test_enclosing_goes_from_the_operator_to_the_root():
    inner = Net(lambda n, x: n.layers[0](x), layers=nn.ModuleList([linear()]))
    found = operators_of(Net(lambda n, x: n.inner(x), inner=inner), X)
    assert found["inner.layers.0"].enclosing == ("inner.layers.0", "inner", "")  # a ModuleList is never called


def test_a_module_called_past_its_parent_is_not_enclosed_by_it():
    net = Net(lambda n, x: n.parts(n.parts[0](x)), parts=nn.Sequential(linear(), linear()))
    found = operators_of(net, X)
    assert found["parts.0"].enclosing == ("parts.0", "")
    assert found["parts.1"].enclosing == ("parts.1", "parts", "")


def test_parameters_of_a_container_run_within_it():
    inner = Net(lambda n, x: n.lin(x) * n.gain, lin=linear(), gain=nn.Parameter(torch.ones(4)))
    found = operators_of(Net(lambda n, x: n.inner(x), inner=inner), X)
    assert list(found) == ["inner", "inner.lin"]
    assert found["inner"].enclosing == ("inner", "")
    assert [p.shape for p in found["inner"].parameters] == [(4,)]


def test_parameters_of_the_root_come_first():
    found = operators_of(Net(lambda n, x: n.lin(x) * n.gain, lin=linear(), gain=nn.Parameter(torch.ones(4))), X)
    assert list(found) == ["", "lin"]
    assert found[""].enclosing == ("",)


def test_a_parameter_list_belongs_to_the_module_that_reads_it():
    reader = Net(lambda n, x: n.lin(x) + n.values[0], lin=linear(), values=nn.ParameterList([torch.ones(4)]))
    found = operators_of(Net(lambda n, x: n.reader(x), reader=reader), X)
    assert found["reader.values"].enclosing == ("reader", "")
    assert "never called" in found["reader.values"].signature


def test_a_parameter_read_outside_its_called_module_needs_whoever_reads_it():
    net = Net(lambda n, x: F.linear(n.inner(x), n.inner.lin.weight), inner=Net(lambda n, x: n.lin(x), lin=linear()))
    assert operators_of(net, X)["inner.lin"].enclosing == ("",)


def test_asking_for_shape_or_dtype_is_no_read():
    net = Net(lambda n, x: n.lin(x.to(n.lin.weight.dtype).expand(2, n.lin.weight.shape[1])), lin=linear())
    assert operators_of(net, X)["lin"].enclosing == ("lin", "")


def test_a_read_through_autocasts_cache_is_seen():
    net = Net(lambda n, x: F.linear(n.lin(x), n.lin.weight), lin=linear())
    with recorded_calls(net) as calls, torch.autocast("cpu", torch.bfloat16):
        net(X.requires_grad_(False))
    assert find_operators(net, calls)[0].enclosing == ("",)
    assert torch.is_autocast_cache_enabled()


def test_a_parameter_that_nothing_uses_stays_with_the_nearest_called_module():
    idle = Net(lambda n, x: x, lin=linear())
    found = operators_of(Net(lambda n, x: n.busy(n.idle(x)), idle=idle, busy=linear()), X)
    assert found["idle.lin"].enclosing == ("idle", "")
    assert list(found) == ["idle.lin", "busy"]


def test_attentions_out_proj_runs_within_attention():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    found = operators_of(Attend(), X)
    assert found["attention.out_proj"].enclosing == ("attention", "")


def test_a_parametrization_belongs_to_its_module():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(linear()))
    found = operators_of(net, X)
    assert [operator.enclosing for operator in found.values()] == [("0", ""), ("0", "")]


def test_the_same_module_under_two_names_has_one_of_them():
    shared = linear()
    net = Net(lambda n, x: n.two(n.one(x)), one=nn.Sequential(shared, linear()), two=nn.Sequential(shared))
    found = operators_of(net, X)
    assert list(found) == ["one.0", "one.1"]
    assert found["one.0"].enclosing == ("",)  # FSDP would wrap it at one place only


def test_an_alias_of_a_list_of_modules_changes_nothing():
    layers = nn.ModuleList([linear(), linear()])
    net = Net(lambda n, x: n.alias[1](n.layers[0](x)), layers=layers, alias=layers)
    assert [operator.enclosing for operator in operators_of(net, X).values()] == [("layers.0", ""), ("layers.1", "")]


def test_two_layers_that_share_a_weight_meet_at_their_lowest_common_ancestor():
    block = Net(lambda n, x: n.b(n.a(x)), a=linear(), b=linear())
    block.b.weight = block.a.weight
    found = operators_of(Net(lambda n, x: n.last(n.block(x)), block=block, last=linear()), X)
    assert found["block.a"].enclosing == found["block.b"].enclosing == ("block", "")
    assert [len(found[name].parameters) for name in ("block.a", "block.b")] == [2, 1]  # the weight counts once
    assert found["last"].enclosing == ("last", "")


def test_chains_of_shared_weights_meet_at_one_place():
    # a and b share a weight inside the block, b and c a bias across it: all three end up at the root.
    block = Net(lambda n, x: n.b(n.a(x)), a=linear(), b=linear())
    block.b.weight = block.a.weight
    net = Net(lambda n, x: n.c(n.block(x)), block=block, c=linear())
    net.c.bias = block.b.bias
    assert [operator.enclosing for operator in operators_of(net, X).values()] == [("",)] * 3


def test_three_layers_that_share_a_weight_count_it_once():
    net = nn.Sequential(linear(), linear(), linear())
    net[1].weight = net[2].weight = net[0].weight
    found = operators_of(net, X)
    assert [sum(p.numel() for p in operator.parameters) for operator in found.values()] == [20, 4, 4]
    assert all(operator.enclosing == ("",) for operator in found.values())


def test_a_module_around_a_weight_tied_elsewhere_is_no_unit():
    middle = Net(lambda n, x: n.lin(x) * n.gain, lin=linear(), gain=nn.Parameter(torch.ones(4)))
    net = Net(lambda n, x: n.middle(n.first(x)), first=linear(), middle=middle)
    net.first.weight = middle.lin.weight
    assert operators_of(net, X)["middle"].enclosing == ("",)


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), True),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False)), False),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4).requires_grad_(False)), False),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), False),
    ],
)
def test_signatures_are_equal_for_equal_operators_only(other, equal):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    signatures = [operators_of(m, X)["1"].signature for m in (model, other())]
    assert (signatures[0] == signatures[1]) == equal


@pytest.mark.parametrize("inputs", [torch.ones(3, 4), torch.ones(2, 1, 4), torch.ones(2, 4, requires_grad=True)])
def test_signatures_differ_with_the_inputs(inputs):
    model = nn.Sequential(linear())
    assert operators_of(model, X)["0"].signature != operators_of(model, inputs)["0"].signature


def test_signatures_differ_without_gradients():
    model = nn.Sequential(linear())
    with torch.no_grad():
        without = operators_of(model, X)["0"]
    assert without.signature != operators_of(model, X)["0"].signature


def test_equal_blocks_have_equal_signatures():
    blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), linear()) for _ in range(3)))
    found = operators_of(blocks, X.clone().requires_grad_())
    assert len({operator.signature for operator in found.values()}) == 2


def test_fingerprint_names_shape_dtype_frozen_and_tied():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2, bias=False).double(), nn.Linear(3, 2))
    model[1].weight.requires_grad_(False)
    model[2].weight = model[0].weight
    assert fingerprint(model) == {
        "0.weight": "float32[2, 3]",
        "0.bias": "float32[2]",
        "1.weight": "float64[2, 3] frozen",
        "2.weight": "float32[2, 3] tied to 0.weight",
        "2.bias": "float32[2]",
    }


def test_fingerprint_of_a_shared_module_has_both_names():
    shared = nn.Linear(2, 2, bias=False)
    names = fingerprint(nn.ModuleDict({"a": shared, "b": shared}))
    assert names == {"a.weight": "float32[2, 2]", "b.weight": "float32[2, 2] tied to a.weight"}


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ProfileError, match=r"^Expected ReLU to have parameters to shard, but it has none\. Create its"):
        check_parameters(nn.ReLU())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_is_refused():
    with pytest.raises(ProfileError, match=r"'0\.weight' is created by the first batch .*in configure_model"):
        check_parameters(nn.Sequential(nn.LazyLinear(3)))
