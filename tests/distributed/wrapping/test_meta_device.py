"""Models whose tensors are on the meta device, on all ranks or on all but rank 0, wrapped unit by unit."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.axes import NAMED_MODES
from lightning_osdp.errors import OSDPError
from lightning_osdp.profiler import LiveBytes
from tests.distributed.support.fits import trainer
from tests.distributed.support.models import Base, build
from tests.profiler.wrapped import whole
from tests.support.tiers import in_turn, slow
from tests.support.wrapped_units import plan, units_of

pytestmark = pytest.mark.distributed


WIDTH, VOCABULARY, LAYERS = 64, 50, 12


class Scale(nn.Module):
    """A gain, and buffers of several dtypes, strides and sizes that ``reset_parameters`` computes."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.gain.no_decay = True
        self.register_buffer("ramp", torch.empty(4, width).t())
        self.register_buffer("mask", torch.empty(width, dtype=torch.bool), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int16))
        self.register_buffer("none", torch.empty(0))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain, mean=1.0)
        self.ramp.copy_(torch.arange(self.ramp.numel()).view_as(self.ramp))
        self.mask.copy_(torch.arange(len(self.mask)) % 2)
        self.count.fill_(3)

    def forward(self, x):
        return x * self.gain * self.mask + 1e-3 * self.ramp[:, self.count]


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.scale = Scale(WIDTH)
        self.expand, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x):
        return x + self.proj(F.gelu(self.expand(self.scale(x)))) * self.shared.offset


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        self.offset.uniform_(0.9, 1.1)


class Net(nn.Module):
    """Blocks, a head tied to the embedding, a parameter in the root, a buffer that all blocks hold."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(6, WIDTH))
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            shared = Shared()
            if len(self.blocks):
                shared.offset = self.blocks[0].shared.offset
            self.blocks.append(Block(shared))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens):
        x = 0.1 * self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), (tokens * 3 + 1).remainder(VOCABULARY).flatten())


class InitialisesAll(Net):
    def reset_parameters(self):
        for child in self.modules():
            if isinstance(child, nn.Linear) and child.bias is not None:
                nn.init.zeros_(child.bias)


class Recurrent(nn.Module):
    """Modules that keep references to their parameters, or that initialise those of their children."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.lstm(x)[0])


class Evaluated(Base):
    """A LightningModule around the same, created by configure_model."""

    def configure_model(self):
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
                self.net[2].weight = self.net[0].weight

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0].float())[:, :3], batch[1].float())

    def dataset(self):
        return build("odd_mlp").dataset()


CPU = torch.device("cpu")


def plan_of(module, *, modes=("ZDP", "DP"), blocks=True):
    """Plans every block as a unit, the modes in turn, or the whole model as one."""
    owners = [name for name, child in module.named_modules() if list(child.parameters(recurse=False))]
    units = {"": ([name for name in owners if not (blocks and name.startswith("blocks."))], "DP")}
    for index in range(LAYERS if blocks else 0):
        name = f"blocks.{index}"
        units[name] = ([o for o in owners if o.startswith(f"{name}.")], modes[index % len(modes)])
    node_size = 2 if any(NAMED_MODES[mode].needs_nodes for mode in modes) else None
    return plan(units, dist.get_world_size(), node_size=node_size)


def made(start, *, seed=0):
    """The model with ``start`` "meta", "real", or "rank 0": real on rank 0 alone; ranks have seeds of their own."""
    torch.manual_seed(seed + dist.get_rank())
    is_meta = start == "meta" or (start == "rank 0" and dist.get_rank() > 0)
    with torch.device("meta" if is_meta else "cpu"):
        return Net()


def values(sharded):
    """Whole state dict in memory of its own on every rank, and the buffers that it leaves out."""
    state = sharded.whole_state(on_all_ranks=True)
    return state | {name: buffer.clone() for name, buffer in sharded.module.named_buffers()}


def planned(module, plan):
    return ShardedModel.planned(module, plan, device=CPU)


def wrapped(start, **options):
    module = made(start)
    return planned(module, plan_of(module, **options))


def memory_while_wrapping(start):
    """Bytes on this rank: the most while wrapping, shards and buffers at the end, the largest unit, the whole model."""
    module = made(start)
    chosen = plan_of(module)
    parameters = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    with LiveBytes("cpu") as live:
        live.track([*module.parameters(), *module.buffers()])
        sharded = planned(module, chosen)
    units = [sum(parameters[name] for name in held) for held, _ in units_of(sharded.module).values()]
    return {
        "peak": live.peak_bytes,
        "end": live.current_bytes,
        "unit": max(units),
        "whole": sum(parameters.values()),
    }


def starts(start, modes=("ZDP", "DP")):
    """Returns values that a model starts with, if those are rank 0's and those in other units, ties and attributes."""
    module = made(start)
    expected = {name: value.clone() for name, value in module.state_dict().items()} if start == "rank 0" else {}
    sharded = planned(module, plan_of(module, modes=modes))
    after = torch.get_rng_state()
    found = values(sharded)
    from_zero = [found]
    dist.broadcast_object_list(from_zero, src=0)
    other = values(wrapped(start, blocks=False))
    net = sharded.module
    is_rank_zeros = dist.get_rank() > 0 or all(torch.equal(found[name], expected[name]) for name in expected)
    torch.manual_seed(dist.get_rank())
    torch.randint(2**62, ())
    return {
        "equal": found.keys() == from_zero[0].keys() and all(torch.equal(found[n], v) for n, v in from_zero[0].items()),
        "rank 0's": is_rank_zeros,
        "any units": all(torch.equal(found[name], value) for name, value in other.items()),
        "tied": net.head.weight is net.tokens.weight,
        "shared": len({block.shared.offset.data_ptr() for block in net.blocks}),
        "no_decay": all(hasattr(block.scale.gain, "no_decay") for block in net.blocks),
        "ramp": found["blocks.3.scale.ramp"][:, 0].tolist() == list(range(0, 4 * WIDTH, 4)),
        "std": (found["tokens.weight"].std().item(), found["blocks.0.scale.gain"].std().item()),
        "one draw": torch.equal(after, torch.get_rng_state()),
    }


def trains(start, steps=4, modes=("ZDP", "DP")):
    """Largest difference from the unwrapped model after some steps of AdamW in float64, all starting alike."""
    module = made(start).double()
    sharded = planned(module, plan_of(module, modes=modes))
    plain = made("real").double()
    before = values(sharded)
    plain.load_state_dict(before, strict=False)
    plain.load_state_dict({name: before[name] for name, _ in plain.named_buffers()}, strict=False)
    tokens = torch.randint(VOCABULARY, (steps, dist.get_world_size(), 3, 6), generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded.module, plain))
    for step in range(steps):
        for optimizer, loss in (
            (ours, lambda batch: sharded.module(batch[dist.get_rank()])),
            (theirs, lambda batch: plain(batch.flatten(0, 1))),
        ):
            optimizer.zero_grad()
            loss(tokens[step]).backward()
            optimizer.step()
    found = values(sharded)
    reached = plain.state_dict()
    moved = max((reached[name] - before[name]).abs().max().item() for name in reached if "weight" in name)
    return max((found[name] - value).abs().max().item() for name, value in reached.items() if value.numel()), moved


def loads_a_checkpoint():
    """Tells if a model from meta tensors has exactly the weights of another one after loading its whole state."""
    source = values(wrapped("real", modes=("DP",)))
    sources = [source]
    dist.broadcast_object_list(sources, src=0)
    sharded = wrapped("meta")
    differed = not torch.equal(values(sharded)["positions"], sources[0]["positions"])
    persistent = sharded.whole_state(on_all_ranks=True).keys()
    sharded.load_model({name: sources[0][name] for name in persistent}, strict=True)
    found = values(sharded)
    return differed, all(torch.equal(found[name], sources[0][name]) for name in persistent)


def initialises_other_units():
    """The error of a root that initialises what is below it, on each rank."""
    with torch.device("meta"):
        module = InitialisesAll()
    try:
        planned(module, plan_of(module))
    except OSDPError as error:
        return type(error).__name__, str(error)
    return None


def torch_modules():
    """Finite gradients of layers from the meta device, and whether attention's own initialisation prevailed."""
    with torch.device("meta"):
        module = Recurrent()
    owners = [name for name, child in module.named_modules() if list(child.parameters(recurse=False))]
    units = {unit: ([name for name in owners if name.split(".")[0] == unit], "ZDP") for unit in ("lstm", "layer")}
    sharded = planned(module, plan({"": ([], "DP"), **units}, dist.get_world_size()))
    zero = not values(sharded)["layer.self_attn.out_proj.bias"].any()
    sharded.module(torch.randn(2, 3, 8)).sum().backward()
    _, gradients = whole(sharded.module)
    return zero, all(bool(gradient.isfinite().all()) for gradient in gradients.values() if gradient is not None)


def evaluates_without_a_plan():
    """Validation loss of the model as one unit, that of an unwrapped one with its weights, and whether ties stay."""
    module = Evaluated()
    torch.manual_seed(dist.get_rank())
    fit = trainer(OSDPStrategy(), limit_val_batches=1.0)
    data = module.dataset()
    found = fit.validate(module, DataLoader(data, batch_size=len(data)), verbose=False)[0]["val_loss"]
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    plain = Evaluated()
    plain.configure_model()
    plain.to_empty(device=CPU)
    plain.load_state_dict(state)
    return found, float(plain.loss(data[:])), torch.equal(state["net.0.weight"], state["net.2.weight"])


MIXED, IN_NODES = ("ZDP", "DP"), ("HSDP", "ZDP", "HDP")
KINDS, MORE = [(2, MIXED), (4, IN_NODES)], [slow((4, MIXED), start) for start in ("meta", "rank 0")]


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize("start", ["meta", "rank 0"])
def test_wrapping_takes_the_shards_and_two_copies_of_one_unit(ranks, start, world_size):
    found = ranks(world_size).run(memory_while_wrapping, start=start)
    for each in found[1:] if start == "rank 0" else found:
        assert each["end"] < each["whole"] / world_size + 0.2 * each["unit"]
        # one copy less the parameter that is freed first: fully_shard frees one of a unit after the other
        assert 0.9 * each["unit"] < each["peak"] - each["end"] < 2.2 * each["unit"]
        assert each["peak"] < 0.8 * each["whole"]


def test_rank_zero_gives_its_values_away_as_it_goes(ranks):
    found = ranks(2).run(memory_while_wrapping, start="rank 0")[0]
    assert found["peak"] < found["whole"] + 2.2 * found["unit"]
    assert found["end"] < 0.6 * found["whole"]


@pytest.mark.parametrize(("kind", "start"), [*in_turn(KINDS, ["rank 0", "meta"]), *MORE])
def test_all_ranks_start_with_the_values_of_rank_zero_whatever_the_units(ranks, kind, start):
    world_size, modes = kind
    for found in ranks(world_size).run(starts, start=start, modes=modes):
        assert found["equal"]
        assert found["rank 0's"]
        assert found["any units"]
        assert found["tied"]
        assert found["shared"] == 1
        assert found["no_decay"]
        assert found["ramp"]
        assert found["std"] == pytest.approx((1.0, 1.0), abs=0.3)


def test_random_numbers_of_every_rank_advance_by_one_draw(ranks):
    assert all(found["one draw"] for found in ranks(2).run(starts, start="meta"))


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (KINDS[0], "meta"),
        *(slow(*case) for case in ((KINDS[0], "rank 0"), (KINDS[1], "meta"), (KINDS[1], "rank 0"))),
        *MORE,
    ],
)
def test_training_equals_the_unwrapped_model_from_the_same_weights(ranks, kind, start):
    world_size, modes = kind
    for difference, moved in ranks(world_size).run(trains, start=start, modes=modes):
        assert difference < 1e-10
        assert moved > 1e-2


def test_a_whole_checkpoint_loads(ranks):
    assert ranks(2).run(loads_a_checkpoint) == [(True, True)] * 2


def test_a_module_that_initialises_another_unit_is_refused_on_every_rank(ranks):
    for kind, text in ranks(2).run(initialises_other_units):
        assert kind == "ProfileError"
        assert text == (
            "Expected reset_parameters() of a module on the meta device to initialise what the module itself owns, but"
            " one asked for 'modules' of blocks.0, which is a unit of its own and sharded already. Let blocks.0"
            " initialise itself, or create the model with its values on rank 0."
        )


def test_recurrent_layers_and_attention(ranks):
    assert ranks(2).run(torch_modules) == [(True, True)] * 2


def test_evaluation_without_a_plan(ranks):
    for found, expected, is_tied in ranks(2).run(evaluates_without_a_plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert is_tied
