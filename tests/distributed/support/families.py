"""Models of families that people train, and one of them under every kind of plan, against DDP and one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import TensorDataset

from lightning_osdp import OSDPStrategy, SearchSpace
from tests.distributed.support.fits import (
    EVERYTHING,
    largest_difference,
    plan_for,
    reference,
    trained,
    without_measuring,
)
from tests.distributed.support.models import MODELS, NUM_SAMPLES, Base, build

WIDTH, CLASSES, LENGTH = 8, 6, 5


def _random(*shape, seed):
    return torch.randn(NUM_SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def _tokens(seed):
    return torch.randint(0, CLASSES, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))


class Regression(Base):
    """(batch, WIDTH) onto (batch, CLASSES), in the dtype of the parameters."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.layers()

    def layers(self):
        raise NotImplementedError

    def loss(self, batch):
        dtype = next(self.parameters()).dtype
        return F.mse_loss(self(batch[0].to(dtype)), batch[1].to(dtype))

    def dataset(self):
        x = _random(WIDTH, seed=2)
        return TensorDataset(x, x[:, :CLASSES].sin())


class ConvBatchNorm(Regression):
    """Convolutions without bias, BatchNorm after each, a residual."""

    def layers(self):
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)
        )
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        x = self.norm(x + self.block(x))
        return self.head(x.mean((2, 3)))

    def dataset(self):
        x = _random(3, 6, 6, seed=3)
        return TensorDataset(x, x.flatten(1)[:, :CLASSES].sin())


class Adapters(Regression):
    """Fine-tuning: two frozen blocks, each with a small trainable adapter, a wholly frozen unit, a new head."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

        def forward(self, x):
            x = x + self.out(F.gelu(self.fc(self.norm(x))))
            return x + self.up(torch.tanh(self.down(x)))

    def layers(self):
        self.enter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FrozenBias(Regression):
    """Frozen and trainable parameters in one operator."""

    def layers(self):
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.body[0].bias.requires_grad_(False)
        self.body[2].weight.requires_grad_(False)

    def forward(self, x):
        return self.body(x)


class CalledTwice(Regression):
    """One layer at two places of forward, and a block that is applied three times."""

    def layers(self):
        self.enter, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.shared(self.enter(x)))
        for _ in range(3):
            x = x + self.block(x)
        return self.head(self.shared(x))


class Tiny(Regression):
    """Operators of fewer elements than ranks."""

    def layers(self):
        self.gain, self.first = nn.Parameter(torch.ones(1)), nn.Linear(1, 1, bias=False)
        self.bias = nn.Module()
        self.bias.shift = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.first(x.unsqueeze(-1)).squeeze(-1) * self.gain + self.bias.shift)


class Containers(Regression):
    """Parameters on containers, in a ParameterList and a ParameterDict; buffers, one of them not saved."""

    class Gated(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.gate = nn.Parameter(torch.full((WIDTH,), 0.5))

        def forward(self, x):
            return x + self.gate * super().forward(x)

    def layers(self):
        self.blocks = nn.Sequential(*(self.Gated(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.prompts = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.scales = nn.ParameterDict({"in": torch.ones(WIDTH), "out": torch.ones(CLASSES)})
        self.experts = nn.ModuleDict({"a": nn.Linear(WIDTH, CLASSES), "b": nn.Linear(WIDTH, CLASSES, bias=False)})
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.register_buffer("offset", torch.full((CLASSES,), 0.1), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count += 1
        x = self.blocks(x * self.scales["in"] + self.prompts[0] * self.prompts[1] + self.shift)
        return (self.experts["a"](x) + self.experts["b"](x)) * self.scales["out"] + self.offset


class EncoderDecoder(Base):
    """torch's own Transformer: cross attention, the target embedding tied with the head."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.source, self.target = nn.Embedding(CLASSES, WIDTH), nn.Embedding(CLASSES, WIDTH)
        self.net = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.target.weight

    def loss(self, batch):
        x, y = batch
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1] - 1, dtype=self.head.weight.dtype)
        out = self.net(self.source(x), self.target(y[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(out).flatten(0, 1), y[:, 1:].flatten())

    def dataset(self):
        return TensorDataset(_tokens(4), _tokens(5))


class CrossAttention(Base):
    """Memory read by every decoder block; three-way tie of both embeddings and the head, far apart."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, memory):
            y = F.scaled_dot_product_attention(self.query(self.norm(x)), self.key(memory), self.value(memory))
            return x + self.fc(y)

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.encoder = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.decoder = nn.ModuleList(self.Decoder() for _ in range(2))
        self.output = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False))
        self.embedding.weight = self.output[1].weight = self.encoder[0].weight

    def loss(self, batch):
        memory, x = self.encoder(batch[0]), self.embedding(batch[1])
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.output(x).flatten(0, 1), batch[0].flatten())

    def dataset(self):
        return TensorDataset(_tokens(4), _tokens(5))


class Recurrent(Regression):
    """Flat weights of an LSTM, and a cell called once per time step."""

    def layers(self):
        self.lstm = nn.LSTM(2, 6, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(6, CLASSES)

    def forward(self, x):
        x, _ = self.lstm(x.view(-1, WIDTH // 2, 2))
        hidden = None
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return hidden


class ReturnsItsLoss(Regression):
    """A module that computes the loss, so that its output is the root's, with shared weights: it is one unit."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.leave.weight = self.enter.weight

        def forward(self, x, y):
            out = self.leave(torch.tanh(self.enter(x)))
            return {"loss": F.mse_loss(out[:, :CLASSES], y), "out": out}

    def layers(self):
        self.net = self.Network()

    def loss(self, batch):
        return self.net(*(t.to(self.net.enter.weight.dtype) for t in batch))["loss"]


FAMILIES = {
    model.__name__: model
    for model in (
        ConvBatchNorm, Adapters, FrozenBias, CalledTwice, Tiny, Containers, EncoderDecoder, CrossAttention, Recurrent,
        ReturnsItsLoss,
    )
}  # fmt: skip
MODELS |= FAMILIES

STEPS = 3


def without_key_biases(state):
    """Attention's bias of keys has a gradient of zero but for rounding, of which Adam makes whole steps."""
    kept = {name: value.clone() for name, value in state.items()}
    for name, value in kept.items():
        if name.endswith("in_proj_bias"):
            value.chunk(3)[1].zero_()
    return kept


@without_measuring
def family(name, optimizer, dtype, given=("zdp", "dp", "mixed"), own=2):
    """Returns by plan its distance from DDP after three steps, units and modes; and DDP's from one process (rank 0).

    ``own`` is the number of plans of the strategy's own: without a limit, and in little memory.
    """

    def run(strategy):
        state, losses, fit = trained(strategy, name, optimizer, dtype, max_steps=STEPS)
        return state, losses, fit.strategy

    def compared(strategy):
        state, losses, strategy = run(strategy)
        plan = strategy.plan
        found = {"units": [unit.name for unit in plan.units], "modes": {u.modes[0] for u in plan.units if u.name}}
        if dist.get_rank() == 0:
            # FSDP lists the second name of a tied weight after the rest of its module.
            ours, theirs = (dict(sorted(each.items())) for each in (state, ddp))
            if dtype == "float32" and optimizer == "adamw":
                ours, theirs = without_key_biases(ours), without_key_biases(theirs)
            found["difference"] = largest_difference(ours, theirs)
        found["loss"] = max(abs(a - b) for a, b in zip(losses, ddp_losses, strict=True))
        return found, plan

    ddp, ddp_losses, _ = run(DDPStrategy(process_group_backend="gloo", find_unused_parameters=False))
    world_size, found = dist.get_world_size(), {}
    for modes in given:
        plan = plan_for(build(name, optimizer, dtype), modes, world_size=world_size, space=EVERYTHING)
        found[modes], _ = compared(OSDPStrategy(plan=plan))
    if own > 0:
        found["own"], plan = compared(OSDPStrategy(memory_limit="4GiB"))
    if own > 1:
        # Half way between what the fastest plan takes and the least that any plan needs.
        limit = (plan.peak_bytes + plan.all_zdp_peak_bytes) // 2
        space = SearchSpace(min_unit_bytes=0)
        found["own, little memory"], _ = compared(OSDPStrategy(memory_limit=f"{max(limit, 1)}B", search_space=space))
    if dist.get_rank() != 0:
        return None
    plain, start = reference(name, optimizer, dtype, world_size=world_size, steps=STEPS), build(name, optimizer, dtype)
    parameters = dict(start.named_parameters())
    return {
        "plans": found,
        "plain": largest_difference({k: ddp[k] for k in parameters}, {k: plain[k] for k in parameters}),
        "moved": largest_difference({k: plain[k] for k in parameters}, parameters),
    }


def check(found, tolerance):
    """BatchNorm's running statistics are DDP's, those of rank 0; one process is compared by its parameters."""
    assert found["moved"] > 100 * tolerance
    assert found["plain"] < tolerance
    for name, plan in found["plans"].items():
        assert plan["difference"] < tolerance, name
        assert plan["loss"] < 100 * tolerance, name
    mixed = found["plans"]["mixed"]
    assert mixed["modes"] == {"DP", "ZDP"} or len(mixed["units"]) == 2  # the root and one more
