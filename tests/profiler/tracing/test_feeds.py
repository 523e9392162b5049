"""Operators and pairs whose activations can move, found in one forward, and what they are given and give."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.operations.stationary import refusal
from lightning_osdp.profiler import profile_model
from tests.profiler.traced import Net
from tests.support.tiers import slow

WIDTH, HIDDEN, OUTPUTS = 8, 32, 4


def layers(**others):
    return {"a": nn.Linear(WIDTH, HIDDEN), "b": nn.Linear(HIDDEN, OUTPUTS)} | others


def profiled(step, modules=None, batch=None, *, exchanges=True):
    torch.manual_seed(0)
    batch = torch.randn(2, WIDTH) if batch is None else batch
    return profile_model(Net(step, **(modules or layers())), batch, activations=("keep",), exchanges=exchanges)


def exchanges(step, modules=None, batch=None):
    return {each.operators: each.kind for each in profiled(step, modules, batch).exchanges}


def test_operators_are_followed_only_where_that_is_asked(monkeypatch):
    monkeypatch.setattr(
        "lightning_osdp.profiler.tracing.saved_bytes.recorded_feeds", lambda *_: pytest.fail("followed")
    )
    step = lambda m, x: m.b(F.relu(m.a(x))).sum()  # noqa: E731
    assert {each.operators: each.kind for each in profiled(step, exchanges=False).exchanges} == ALONE


def alone(step, modules=None, batch=None, *, exchanges):
    """Bytes of operators by themselves, without what they save."""
    found = profiled(step, modules, batch, exchanges=exchanges).exchanges
    return {each for each in (dataclasses.replace(each, saved_bytes=ZERO) for each in found) if each.kind != "pair"}


def without_gradients(m, x):
    with torch.no_grad():
        h = m.a(x)
    return m.b(F.relu(h)).sum()


@pytest.mark.parametrize(
    ("step", "modules", "batch"),
    [
        (lambda m, x: m.b(F.relu(m.a(x))).sum(), None, None),
        (lambda m, x: m.b(F.relu(m.a(x)) + m.c(x)).sum(), {"c": nn.Linear(WIDTH, HIDDEN).requires_grad_(False)}, None),
        (lambda m, x: m.b(F.relu(m.a(m.e(x)))).sum(), {"e": nn.Embedding(6, WIDTH)}, torch.zeros(2, 3, dtype=int)),
        (lambda m, x: (m.b(m.a(x)) + m.b(m.a(2 * x))).sum(), None, None),
        (lambda m, x: torch.vmap(m.b)(F.relu(m.a(x))).sum(), None, None),
        (without_gradients, None, None),
    ],
)
def test_operators_by_themselves_are_known_without_being_followed(step, modules, batch):
    made = lambda: layers(**{name: copy.deepcopy(each) for name, each in (modules or {}).items()})  # noqa: E731
    found = [alone(step, made(), batch, exchanges=exchanges) for exchanges in (True, False)]
    assert found[0] == found[1]


ALONE = {("a",): "column", ("b",): "row"}
PAIR = ALONE | {("a", "b"): "pair"}

ELEMENTWISE = {
    "nothing": lambda x: x,
    "relu": F.relu,
    "in place": F.relu_,
    "gelu": F.gelu,
    "by hand": lambda x: x * 0.5 * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3)))),
    "silu times itself": lambda x: F.silu(x) * x,
    "dropout": lambda x: F.dropout(F.relu(x), 0.5, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "cast": lambda x: x.double().tanh().float(),
    "out of the graph": lambda x: x + x.detach(),
    "as its kind": lambda x: x * 2 if x.dtype.is_floating_point and x.dim() == 2 and x.requires_grad else x.sum(),
}


@pytest.mark.parametrize("between", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_an_operator_feeds_another_through_elementwise_operations(between):
    assert exchanges(lambda m, x: m.b(between(m.a(x))).sum()) == PAIR


OTHERS = {
    "norm": lambda x: F.layer_norm(x, [HIDDEN]),
    "softmax": lambda x: x.softmax(-1),
    "of features": lambda x: x - x.mean(-1, keepdim=True),
    "weights": lambda x: x * torch.arange(HIDDEN, dtype=torch.float32),
    "view": lambda x: F.relu(x.view(1, -1, HIDDEN)).view(-1, HIDDEN),
    "transposed": lambda x: x.t().tanh().t(),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "of channels": lambda x: F.dropout2d(x[..., None, None], 0.5, training=True)[..., 0, 0],
    "cumulative": lambda x: x.cumsum(-1),
    "width": lambda x: F.gelu(x / math.sqrt(x.size(-1))),
    "shape": lambda x: F.gelu(x / x.shape[-1]),
    "number of elements": lambda x: x / x.numel(),
    "length": lambda x: x / len(x),
    "hook": lambda x: x.register_hook(lambda gradient: gradient) and x,
    "constant": lambda x: x * torch.tensor(0.5),
    "no gradient": lambda x: x.detach() + F.layer_norm(x.detach(), [HIDDEN]),
}


@pytest.mark.parametrize("between", OTHERS.values(), ids=OTHERS)
def test_what_mixes_features_or_knows_their_places_is_no_pair(between):
    assert exchanges(lambda m, x: m.b(between(m.a(x))).sum()) == ALONE


def test_of_other_tensors_only_a_parameter_of_one_element_is_alike_on_all_ranks():
    modules = layers(act=nn.PReLU(init=0.5))
    assert exchanges(lambda m, x: m.b(m.act(m.a(x))).sum(), modules) == PAIR
    assert exchanges(lambda m, x: m.b(m.a(x) * m.act.weight).sum(), modules) == PAIR
    assert exchanges(lambda m, x: m.b(m.a(x) * m.act.weight.exp()).sum(), modules) == ALONE
    assert exchanges(lambda m, x: m.b(m.a(x) * x.mean()).sum(), modules) == ALONE
    modules = layers(norm=nn.BatchNorm1d(WIDTH))
    assert exchanges(lambda m, x: m.b(m.a(x) * m.norm.num_batches_tracked).sum(), modules) == ALONE


def test_what_torch_func_calls_moves_no_activations():
    assert exchanges(lambda m, x: torch.vmap(m.b)(F.relu(m.a(x))).sum()) == {("a",): "column"}
    assert exchanges(lambda m, x: m.b(F.relu(torch.vmap(m.a)(x))).sum()) == {("b",): "row"}
    assert exchanges(lambda m, x: m.b(torch.vmap(lambda row: F.relu(row / len(row)))(m.a(x))).sum()) == ALONE


def twice(m, x):
    h = F.relu(m.a(x))
    return m.b(h).sum() + h.sum()


def looked_at(m, x):
    h = m.a(x)
    with torch.no_grad():
        float_of = h.abs().max()
    return m.b(F.relu(h)).sum() + 0 * float_of


def returned(m, x):
    h = F.relu(m.a(x))
    return {"loss": m.b(h).sum(), "features": h}


def residual(m, x):
    h = m.a(x)
    return m.b(h + m.c(x)).sum()


@pytest.mark.parametrize("step", [twice, looked_at, returned])
def test_features_that_anybody_else_looks_at_make_no_pair(step):
    assert exchanges(step) == ALONE


def gated_and_looked_at(m, x):
    h = m.a(x)
    return m.b(F.silu(h) * m.c(x)).sum() + h.sum()


GATED = ALONE | {("c",): "column", ("a", "c", "b"): "pair"}


@pytest.mark.parametrize("step", [residual, lambda m, x: m.b(F.silu(m.a(x)) * m.c(x)).sum()])
def test_two_operators_of_one_input_feed_a_third(step):
    assert exchanges(step, layers(c=nn.Linear(WIDTH, HIDDEN))) == GATED


@pytest.mark.parametrize(
    "step",
    [
        gated_and_looked_at,
        lambda m, x: m.b(m.a(x) * m.c(x * 1)).sum(),
        lambda m, x: m.b(m.a(x) * m.c(x)[:, :1]).sum(),
        lambda m, x: m.b(torch.cat([m.a(x)[:, 1:], m.c(x)[:, :1]], 1)).sum(),
        lambda m, x: m.b(m.a(x) * m.c(x) * m.d(x)).sum(),
    ],
)
def test_features_of_several_operators_make_no_pair_otherwise(step):
    modules = layers(c=nn.Linear(WIDTH, HIDDEN), d=nn.Linear(WIDTH, HIDDEN))
    assert not any(kind == "pair" for kind in exchanges(step, modules).values())


def test_what_two_operators_save_of_one_input_stays_for_neither_alone_and_for_both_together():
    modules = layers(c=nn.Linear(WIDTH, HIDDEN), d=nn.Linear(WIDTH, WIDTH))

    def step(m, x):
        x = F.gelu(m.d(x))
        return m.b(F.silu(m.a(x)) * m.c(x)).sum()

    saved = {each.operators: each.saved_bytes for each in profiled(step, modules).exchanges}
    assert saved["a",] == saved["c",] == Affine()
    assert saved["a", "c", "b"] == Affine(0.0, 4.0 * WIDTH)


def of_columns(step, modules):
    return {
        operators for operators, kind in exchanges(step, modules).items() if kind == "column" and len(operators) > 1
    }


COLUMNS = {
    "in turn": (lambda m, x: (m.a(x).sum() * m.c(x).sum() * m.d(x)).sum(), {("a", "c", "d")}),
    "normalized": (lambda m, x: (F.layer_norm(m.a(x), [HIDDEN]).sum() + m.norm(m.c(x))).sum(), {("a", "c")}),
    "another input": (lambda m, x: (m.a(x).sum() * m.c(x * 1).sum() * m.d(x)).sum(), set()),
    "four": (lambda m, x: (m.a(x).sum() * m.c(x).sum() * m.d(x).sum() * m.f(x)).sum(), {("a", "c", "d")}),
    "another between": (lambda m, x: (m.b(m.a(x)).sum() * m.c(x).sum() * m.d(x)).sum(), {("c", "d")}),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_one_input_follow_each_other(name):
    modules = layers(c=nn.Linear(WIDTH, HIDDEN), d=nn.Linear(WIDTH, WIDTH), f=nn.Linear(WIDTH, 3))
    step, expected = COLUMNS[name]
    assert of_columns(lambda m, x: step(m, x * 1), modules | {"norm": nn.LayerNorm(HIDDEN)}) == expected


def test_columns_of_one_input_save_it_together_and_send_each_output_by_itself():
    modules = layers(c=nn.Linear(WIDTH, HIDDEN), d=nn.Linear(WIDTH, 3))

    def step(m, x):
        x = F.gelu(m.e(x))
        return (m.c(x).sum() * m.d(x)).sum()

    modules["e"] = nn.Linear(WIDTH, WIDTH)
    found = {each.operators: each for each in profiled(step, modules).exchanges}
    columns = found["c", "d"]
    assert found["c",].saved_bytes == found["d",].saved_bytes == Affine()
    assert columns.saved_bytes == columns.input_bytes == Affine(0.0, 4.0 * WIDTH)
    assert columns.outputs == (Affine(0.0, 4.0 * HIDDEN), Affine(0.0, 4.0 * 3))
    assert columns.output_bytes == Affine(0.0, 4.0 * (HIDDEN + 3))


def test_columns_of_one_input_that_autocast_casts_for_each_save_a_copy_each():
    modules = layers(c=nn.Linear(WIDTH, HIDDEN), d=nn.Linear(WIDTH, 3), e=nn.Linear(WIDTH, WIDTH))

    def step(m, x):
        x = F.layer_norm(m.e(x), [WIDTH])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (m.c(x).sum() * m.d(x).float()).sum()

    (columns,) = (each for each in profiled(step, modules).exchanges if each.operators == ("c", "d"))
    assert columns.input_bytes == columns.saved_bytes == Affine(0.0, 2.0 * WIDTH)
    assert columns.saved_again == (Affine(0.0, 2.0 * WIDTH),)


def test_batch_statistics_between_two_operators_make_no_pair():
    modules = layers(norm=nn.BatchNorm1d(HIDDEN))
    assert exchanges(lambda m, x: m.b(m.norm(m.a(x))).sum(), modules) == ALONE


def test_two_that_take_the_same_features_make_no_pair():
    modules = layers(c=nn.Linear(HIDDEN, OUTPUTS))

    def step(m, x):
        h = F.relu(m.a(x))
        return m.b(h).sum() + m.c(h).sum()

    assert exchanges(step, modules) == ALONE | {("c",): "row"}


def test_each_of_a_chain_feeds_the_next():
    modules = layers(c=nn.Linear(OUTPUTS, OUTPUTS))
    found = exchanges(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))).sum(), modules)
    assert found == PAIR | {("c",): "column", ("b", "c"): "pair"}


def test_an_embedding_is_cut_by_columns_and_feeds_nothing():
    modules = layers(e=nn.Embedding(10, WIDTH))
    found = profiled(lambda m, x: m.b(F.relu(m.a(m.e(x)))).sum(), modules, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    by_operators = {each.operators: each for each in found.exchanges}
    assert {operators: each.kind for operators, each in by_operators.items()} == PAIR | {("e",): "embedding"}
    indices, rows = Affine(0.0, 8.0 * 3), 4 * 3
    embedding, pair = by_operators["e",], by_operators["a", "b"]
    # the batch lives whatever the embedding saves
    assert (embedding.input_bytes, embedding.input_gradient_bytes, embedding.saved_bytes) == (
        indices,
        Affine(),
        Affine(),
    )
    assert embedding.output_bytes == pair.input_bytes == pair.input_gradient_bytes == Affine(0.0, rows * WIDTH)
    assert pair.output_bytes == Affine(0.0, rows * OUTPUTS)
    assert pair.saved_bytes == pair.input_bytes


def test_an_input_that_others_save_as_well_does_not_stay_for_one_operator_alone():
    modules = layers(c=nn.Linear(WIDTH, WIDTH))
    for between, expected in ((F.relu, 0.0), (F.gelu, 4.0 * WIDTH)):
        found = profiled(lambda m, x, f=between: m.b(m.a(f(m.c(x)))).sum(), modules)
        (a,) = (each for each in found.exchanges if each.operators == ("a",))
        assert a.saved_bytes == Affine(0.0, expected)
        assert a.input_gradient_bytes == a.input_bytes == Affine(0.0, 4.0 * WIDTH)


def frozen(modules):
    modules["a"].weight.requires_grad_(False)
    return modules


def with_hook(modules):
    modules["a"].register_forward_hook(lambda *_: None)
    return modules


class Scaled(nn.Linear):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    "changed",
    [
        lambda: frozen(layers()),
        lambda: with_hook(layers()),
        lambda: layers(a=Scaled(WIDTH, HIDDEN)),
        lambda: layers(a=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, HIDDEN))),
    ],
    ids=["frozen", "hook", "subclass", "parametrized"],
)
def test_operators_that_are_not_as_they_come_move_no_activations(changed):
    found = exchanges(lambda m, x: m.b(F.relu(m.a(x))).sum(), changed())
    assert found == {("b",): "row"}


def compiled_in_place(block):
    block.compile(backend="eager")
    return {"block": block}


@pytest.mark.parametrize(
    "changed",
    [
        compiled_in_place,
        lambda block: {"block": torch.compile(block, backend="eager")},
        lambda block: {"plain": block, "block": torch.compile(block, backend="eager")},
    ],
    ids=["in place", "wrapped", "under two names"],
)
def test_nothing_inside_of_a_compiled_module_moves_activations_and_the_profile_says_so(changed):
    def found(change):
        modules = {"first": nn.Linear(WIDTH, WIDTH)} | change(nn.Sequential(*layers().values()))
        return profiled(lambda m, x: m.block(m.first(x)).sum(), modules)

    plain, profile = found(lambda block: {"block": block}), found(changed)
    assert ("block.0", "block.1") in [each.operators for each in plain.exchanges]
    assert [each.operators for each in profile.exchanges] == [("first",)]
    assert plain.notes == ()
    assert profile.notes[-1].endswith("moves weights, for the compiler knows no exchanges of activations")


def test_shared_weights_and_operators_that_are_called_again_move_no_activations():
    modules = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}
    assert exchanges(lambda m, x: m.b(F.relu(m.a(m.a(x)))).sum(), modules) == {("b",): "column"}
    modules["b"].weight = modules["a"].weight
    assert exchanges(lambda m, x: m.b(F.relu(m.a(x))).sum(), modules) == {}
    # a penalty reads weights out of their operator's forward
    assert exchanges(lambda m, x: m.b(m.a(x)).sum() + m.a.weight.norm()) == {("b",): "row"}


class Adapted(nn.Module):
    """A layer with an adapter around it."""

    def __init__(self):
        super().__init__()
        self.base_layer, self.down, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, 2), nn.Linear(2, HIDDEN)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def changed_ones():
    sparse = nn.Embedding(10, WIDTH, sparse=True)
    bounded = nn.Embedding(10, WIDTH, max_norm=1.0)
    scaled = nn.Embedding(10, WIDTH, scale_grad_by_freq=True)
    called = nn.Linear(WIDTH, HIDDEN)
    called.forward = lambda x: F.linear(x, called.weight)
    watched = nn.Linear(WIDTH, HIDDEN)
    watched.weight.register_hook(lambda gradient: gradient)
    return {
        "adapted": (Adapted(), "base_layer"),
        "hooked": (with_hook({"a": nn.Linear(WIDTH, HIDDEN)})["a"], ""),
        "sparse": (sparse, ""),
        "bounded": (bounded, ""),
        "scaled": (scaled, ""),
        "called": (called, ""),
        "watched": (watched, ""),
        "subclass": (Scaled(WIDTH, HIDDEN), ""),
        "plain": (nn.Linear(WIDTH, HIDDEN), ""),
        "embedding": (nn.Embedding(10, WIDTH), ""),
    }


@pytest.mark.parametrize("name", changed_ones())
def test_operators_move_activations_where_nothing_refuses_to_carry_it_out(name):
    module, inner = changed_ones()[name]
    is_embedding = isinstance(module, nn.Embedding)
    operator = f"m.{inner}" if inner else "m"

    def step(m, x):
        return m.m(x).sum() if is_embedding else m.m(m.first(x)).sum()

    batch = torch.tensor([[1, 2, 3], [4, 5, 6]]) if is_embedding else torch.randn(2, WIDTH)
    modules = {"m": module} | ({} if is_embedding else {"first": nn.Linear(WIDTH, WIDTH)})
    found = profiled(step, modules, batch).exchanges
    kind = "embedding" if is_embedding else "column"
    refused = refusal(Net(step, **modules), kind, [operator])
    assert ((operator,) in [each.operators for each in found]) == (not refused)
    assert bool(refused) == (name not in {"plain", "embedding"})


class Block(nn.Module):
    """T5's: features, relu, dropout, and back."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wi, self.wo = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.wo(self.dropout(F.relu(self.wi(self.norm(x))))))


@pytest.mark.parametrize("depth", [2, 12])
def test_pairs_are_found_in_every_block_also_of_those_that_a_few_stand_for(depth):
    modules = {"blocks": nn.Sequential(*(Block() for _ in range(depth))), "head": nn.Linear(WIDTH, OUTPUTS)}
    found = exchanges(lambda m, x: m.head(m.blocks(x)).sum(), modules)
    pairs = {(f"blocks.{index}.wi", f"blocks.{index}.wo") for index in range(depth)}
    assert {operators for operators, kind in found.items() if kind == "pair"} == pairs
    assert {operators for operators, kind in found.items() if kind == "row"} == {("head",)} | {
        (second,) for _, second in pairs
    }


@pytest.mark.parametrize("name", [slow("t5"), slow("bert"), "gpt2", "llama"])
def test_pairs_of_transformers_are_found_in_the_projects_own_trace(name):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    configs = {
        "t5": lambda: transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
        "bert": lambda: transformers.BertConfig(**small, intermediate_size=64),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4),
        "llama": lambda: transformers.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2),
    }
    config = configs[name]()
    config.use_cache = False
    model = transformers.AutoModel.from_config(config).train()
    more = ("decoder_input_ids",) if name == "t5" else ()

    def step(m, ids):
        return m.model(input_ids=ids, **dict.fromkeys(more, ids)).last_hidden_state.float().pow(2).mean()

    found = exchanges(step, {"model": model}, torch.randint(0, 64, (2, 6)))
    pairs = {
        tuple(each.rpartition(".")[2] for each in operators) for operators, kind in found.items() if kind == "pair"
    }
    columns = {operators for operators, kind in found.items() if kind == "column" and len(operators) > 1}
    projections = {"t5": "qkv", "bert": ("query", "key", "value"), "llama": ("q_proj", "k_proj", "v_proj")}.get(name)
    assert {tuple(each.rpartition(".")[2] for each in operators) for operators in columns} >= (
        {tuple(projections)} if projections else set()
    )
    gated = {("gate_proj", "up_proj", "down_proj")}
    expected = {"t5": {("wi", "wo")}, "bert": {("dense", "dense")}, "gpt2": {("c_fc", "c_proj")}, "llama": gated}
    assert pairs == expected[name]


LENGTH, HEADS = 3, 4


class Attention(nn.Module):
    """Attention with projections of their own, of ``groups`` heads of keys and values."""

    def __init__(self, attend, groups=HEADS):
        super().__init__()
        self.size, self.attend = WIDTH // HEADS, attend
        self.query, self.key, self.value = (nn.Linear(WIDTH, number * self.size) for number in (HEADS, groups, groups))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        return self.output(self.attend(query, key, value, x).transpose(1, 2).flatten(2))


def causal(query, key, value, _):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def of_attention(attend, groups=HEADS, between=lambda x: x * 1):
    modules = {"attention": Attention(attend, groups)}
    batch = torch.randn(2, LENGTH, WIDTH)
    found = profiled(lambda m, x: m.attention(between(x)).sum(), modules, batch).exchanges
    return [each for each in found if each.kind == "attention"]


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_attention_is_found_with_the_number_of_heads_that_ranks_can_share(groups):
    (found,) = of_attention(causal, groups)
    assert found.operators == tuple(f"attention.{name}" for name in ("query", "key", "value", "output"))
    assert found.num_heads == groups
    row = 4.0 * LENGTH
    of_groups = Affine(0.0, row * groups * WIDTH / HEADS)
    assert found.outputs == (Affine(0.0, row * WIDTH), of_groups, of_groups)
    assert found.input_bytes == found.output_bytes == found.fed_bytes == Affine(0.0, row * WIDTH)
    assert [found.divides_over(number) for number in (2, 3, 4)] == [True, False, groups == 4]


class AttentionOfOne(nn.Module):
    """Attention whose queries, keys and values one operator makes."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.qkv, self.output = cut, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.output(causal(*self.cut(self.qkv(x)), x).transpose(1, 2).flatten(2))


def of_three(x):
    return x.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)


CUTS = {
    "split": (lambda x: [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in x.split(WIDTH, -1)], "attention"),
    "unbound": (lambda x: of_three(x).unbind(0), "attention"),
    "by head": (lambda x: x.unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1), "heads"),
    "three of each head": (lambda x: x.unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3), "heads"),
    "in another order": (lambda x: of_three(x.flip(-1)), ""),
}


@pytest.mark.parametrize("name", CUTS)
def test_attention_is_found_where_one_operator_makes_queries_keys_and_values(name):
    cut, kind = CUTS[name]
    batch, modules = torch.randn(2, LENGTH, WIDTH), {"attention": AttentionOfOne(cut)}
    exchanges = profiled(lambda m, x: m.attention(x * 1).sum(), modules, batch).exchanges
    found = [each for each in exchanges if each.num_heads]
    assert [(each.kind, each.num_heads) for each in found] == [(kind, HEADS)] * bool(kind)
    for each in found:
        assert each.operators == ("attention.qkv", "attention.output")
        row = Affine(0.0, 4.0 * LENGTH * WIDTH)
        assert each.outputs == (row * 3,)
        assert each.input_bytes == each.output_bytes == each.fed_bytes == row


def with_mask_of_batch(query, key, value, x):
    mask = (x.mean(-1) > 0)[:, None, None, :]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def kept_weights(query, key, value, _):
    weights = (query @ key.mT).softmax(-1)
    kept_weights.found = weights.mean().item()
    return weights @ value


NO_ATTENTION = {
    "mask of the batch": with_mask_of_batch,
    "slopes of heads": lambda q, k, v, _: F.scaled_dot_product_attention(q * torch.rand(HEADS, 1, 1), k, v),
    "of heads": lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v).softmax(1),
    "values alone": lambda q, k, v, _: v + 0 * v,
    "looked at": kept_weights,
    "residual": lambda q, k, v, x: F.scaled_dot_product_attention(q, k, v) + x.view(2, HEADS, LENGTH, -1),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_attention_that_knows_heads_or_samples_apart_moves_by_its_operators(name):
    attend = NO_ATTENTION[name]
    batch = torch.randn(2, LENGTH, WIDTH)
    modules = {"attention": Attention(attend)}
    found = profiled(lambda m, x: m.attention(x * 1).sum(), modules, batch).exchanges
    assert "attention" not in {each.kind for each in found}
    assert ("column", 3) in {(each.kind, len(each.operators)) for each in found} or name == "looked at"


GATES = {
    "halves": (lambda x: x.chunk(2, -1), "gated"),
    "slices": (lambda x: (x[..., :WIDTH], x[..., WIDTH:]), "gated"),
    "by turns": (lambda x: x.unflatten(-1, (WIDTH, 2)).unbind(-1), ""),
    "every other": (lambda x: (x[..., ::2], x[..., 1::2]), ""),
    "norm of gates": (lambda x: (F.layer_norm(x[..., :WIDTH], (WIDTH,)), x[..., WIDTH:]), ""),
    "scaled gates": (lambda x: (x[..., :WIDTH] * torch.ones(WIDTH), x[..., WIDTH:]), ""),
    "unequal": (lambda x: (x[..., 2 : WIDTH + 2], x[..., WIDTH:]), ""),
    "swapped": (lambda x: torch.cat(x.chunk(2, -1)[::-1], -1).chunk(2, -1), ""),
}


@pytest.mark.parametrize("name", [*GATES, "glu"])
def test_gates_and_values_of_one_operator_are_found_where_each_feature_is_alike(name):
    cut, kind = GATES.get(name, (None, "gated"))
    modules = {"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(WIDTH, WIDTH)}

    def step(m, x):
        made = m.up(x * 1)
        if cut is None:
            return m.down(F.glu(made)).sum()
        gates, values = cut(made)
        return m.down(F.silu(gates) * values).sum()

    found = profiled(step, modules, torch.randn(2, LENGTH, WIDTH)).exchanges
    assert [(each.kind, each.operators, each.num_heads) for each in found if each.num_heads] == [
        (kind, ("up", "down"), WIDTH)
    ] * bool(kind)


class Probed(nn.Module):
    """Attention, of whose queries another operator makes something besides."""

    def __init__(self, probe):
        super().__init__()
        self.attention, self.other, self.probe = Attention(self.attend), nn.Linear(WIDTH // HEADS, 2), probe

    def attend(self, query, key, value, x):
        self.found = self.probe(self.other, query)
        return causal(query, key, value, x)

    def forward(self, x):
        return self.attention(x).sum() + self.found.sum()


def without(other, query):
    with torch.no_grad():
        return other(query)


PROBES = {
    "without gradients": without,
    "one position": lambda other, query: other(query[0, 0, 0]),
    "of torch.func": lambda other, query: torch.vmap(lambda x: x.tanh())(query),
    "slopes": lambda other, query: torch.autograd.grad(query.tanh().sum(), query)[0],
    "slopes of many": lambda other, query: torch.autograd.grad(query.tanh(), query, torch.ones_like(query))[0],
    "by a script": lambda other, query: torch.jit.script(_scripted)(query),
}


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_attention_that_others_look_into_moves_by_its_operators(name):
    found = profiled(lambda m, x: m.m(x * 1), {"m": Probed(PROBES[name])}, torch.randn(2, LENGTH, WIDTH))
    assert "attention" not in {each.kind for each in found.exchanges}


def test_bytes_are_those_of_a_step_that_is_not_followed():
    modules = {
        "attention": Attention(
            lambda q, k, v, _: ((q.float() * 2) @ k.mT).masked_fill(q[..., :1] > 9, 0).softmax(-1) @ v
        )
    }
    step, batch = lambda m, x: m.attention(x * 1).sum(), torch.randn(2, LENGTH, WIDTH)
    followed, plain = (profiled(step, modules, batch, exchanges=is_so) for is_so in (True, False))
    assert "attention" in {each.kind for each in followed.exchanges}
    for segments in zip(followed.segments, plain.segments, strict=True):
        of_followed, of_plain = (dataclasses.asdict(each) for each in segments)
        assert all(of_followed[name] == of_plain[name] for name in of_plain if name.endswith("_bytes"))


def test_attention_of_two_inputs_moves_by_its_operators():
    module = Attention(causal)
    module.forward = lambda x: module.output(
        causal(
            *(
                each(y).unflatten(-1, (-1, module.size)).transpose(1, 2)
                for each, y in ((module.query, x), (module.key, 2 * x), (module.value, x))
            ),
            x,
        )
        .transpose(1, 2)
        .flatten(2)
    )
    found = profiled(lambda m, x: m.attention(x * 1).sum(), {"attention": module}, torch.randn(2, LENGTH, WIDTH))
    assert "attention" not in {each.kind for each in found.exchanges}


@pytest.mark.parametrize(
    ("name", "num_heads"),
    [
        ("LlamaForCausalLM", 2),
        ("Qwen3ForCausalLM", 2),
        ("BertForMaskedLM", 4),
        ("GPT2LMHeadModel", 4),
        ("GPTNeoXForCausalLM", 4),
        ("T5", 0),
    ],
)
def test_attention_of_transformers_is_found(name, num_heads):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 30}
    heads = {"num_attention_heads": 4}
    if name == "T5":  # whose biases are of each head
        config = transformers.T5Config(
            d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, vocab_size=30, decoder_start_token_id=0
        )
        model, batch = transformers.T5ForConditionalGeneration(config), {"labels": torch.ones(2, 5, dtype=int)}
    else:
        grouped = {"num_key_value_heads": 2, "head_dim": 4} if num_heads == 2 else {}
        kind = getattr(transformers, name)
        model, batch = kind(kind.config_class(**sizes, **heads, **grouped)), {}
    model.config.use_cache = False
    tokens = torch.arange(10).view(2, 5)
    batch = {"labels": tokens, **batch, "input_ids": tokens}
    found = profiled(lambda m, x: m.model(**x).loss, {"model": model}, batch).exchanges
    kind = "heads" if "NeoX" in name else "attention"
    assert [(each.kind, each.num_heads) for each in found if each.num_heads] == [(kind, num_heads)] * bool(num_heads)
