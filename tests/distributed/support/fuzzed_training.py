"""Random models under random plans beside one plain process, as the ranks run them: cases are plain data."""

import dataclasses
import zlib
from contextlib import nullcontext
from types import MappingProxyType

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPPrecision, OSDPStrategy, change_plan
from lightning_osdp.apply import ShardedModel
from lightning_osdp.apply.states.state import whole_parameters
from lightning_osdp.core.axes import PLACES, Treatment, named
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.profiler import fingerprint
from tests.distributed.support.fits import trainer
from tests.support.plans import bare_plan

CPU = torch.device("cpu")
OUTPUTS = 3
IN_NODE = {"ZDP": "HSDP", "hpZ": "HSDP", "DP": "HDP"}
"""A mode over all ranks -> one that shards a unit in the node instead."""


# ---- models: every layer takes and returns (samples, width)


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Cut(nn.Module):
    """Returns a view."""

    def __init__(self, width):
        super().__init__()
        self.wide = nn.Linear(width, width + 2)

    def forward(self, x):
        return self.wide(x)[:, 2:]


class InPlace(nn.Module):
    """Changes a module's output in place."""

    def __init__(self, width):
        super().__init__()
        self.cut = Cut(width)

    def forward(self, x):
        y = self.cut(x)
        y += 1
        return y.tanh()


class Residual(nn.Module):
    """A parameter beside a module, which is called by keyword."""

    def __init__(self, width, inner):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.rand(width)), Keyword(inner)

    def forward(self, x):
        return x + self.gain * self.inner(x=x)


class Keyword(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *, x):
        return self.inner(x).tanh()


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(self.inner(x).sin())


class Fork(nn.Module):
    """Returns a tuple, and an object inside of it that is no tensor."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x):
        return self.left(x), {"right": self.right(x), "text": "text"}


class Joined(nn.Module):
    def __init__(self, width, left, right):
        super().__init__()
        self.fork, self.mix = Fork(left, right), nn.Parameter(torch.rand(1, width))

    def forward(self, x):
        left, rest = self.fork(x)
        return left.tanh() + self.mix * rest["right"].sin()


def layer(node, width):
    """The module that a node describes."""
    kind, *rest = node
    inner = [layer(each, width) for each in rest if isinstance(each, (list, tuple))]
    if kind == "stack":
        return nn.Sequential(*inner)
    if kind == "linear":
        return nn.Linear(width, width, bias=rest[0])
    if kind == "mlp":
        return Mlp(width, rest[0])
    if kind == "view":
        return InPlace(width)
    return {"residual": lambda: Residual(width, *inner), "twice": lambda: Twice(*inner)}.get(
        kind, lambda: Joined(width, *inner)
    )()


class Net(L.LightningModule):
    """Layers that a batch may leave out.

    Args:
        width: features of layers.
        vocabulary: number of tokens; 0 where inputs are numbers.
        layers: nodes.
        gain: True where the root has parameters of its own.
        tie: names of two modules whose weights are one; empty for none.
        frozen: names of parameters.
    """

    def __init__(self, *, width, vocabulary, layers, gain, tie=(), frozen=()):
        super().__init__()
        torch.manual_seed(width)
        self.width, self.vocabulary = width, vocabulary
        self.tokens = nn.Embedding(vocabulary, width) if vocabulary else None
        self.layers = nn.ModuleList([layer(node, width) for node in layers])
        self.gain = nn.Parameter(torch.rand(width)) if gain else None
        self.head = nn.Linear(width, vocabulary or OUTPUTS)
        if tie:
            self.get_submodule(tie[1]).weight = self.get_submodule(tie[0]).weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.double()

    def loss(self, x, y, skip=()):
        if self.tokens is not None:
            x = self.tokens(x)
        for index, each in enumerate(self.layers):
            if index not in skip:
                x = each(x)
        if self.gain is not None:
            x = x * self.gain
        return F.mse_loss(self.head(x).tanh(), y)

    def batch(self, *key):
        """Draws the batch of a place in the case and a rank."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
        if self.vocabulary:
            x = torch.randint(0, self.vocabulary, (3,), generator=generator)
        else:
            x = torch.randn(3, self.width, generator=generator, dtype=torch.float64)
        return x, torch.randn(3, self.head.out_features, generator=generator, dtype=torch.float64)


def unit_of(modes, sync="every", places=MappingProxyType({}), **fields):
    """A unit of a plan by the names of its modes, and what is on the host."""
    return Unit(kind="", treatments=named(*modes, sync=sync), **fields).treated(**places)


def on_host(unit):
    """Places of a unit of a plan that are on the host, which no change of the plan moves."""
    return {axis: unit.treatments[0][axis] for axis in PLACES}


def blocks_of(described):
    """Blocks of a plan by their names, what they do, and the results that they keep."""
    return tuple(Block(name=name, treatment=Treatment(saves=saves), kept=kept) for name, saves, kept in described)


def plan_of(case, world_size):
    """Makes a plan from plain data."""
    return bare_plan(
        (unit_of(**unit) for unit in case["units"]),
        world_size=world_size,
        node_size=case.get("node_size"),
        blocks=blocks_of(case["blocks"]),
        **case["options"],
    )


def optimizer_of(module, name):
    kind, options = {
        "sgd": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
        "adamw": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4}),
        "adamw loop": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4, "foreach": False}),
    }[name]
    return kind(module.parameters(), **options)


# ---- two ways to play a case


class Plain:
    """Process that sees the batches of all ranks.

    Args:
        case: plain data.
        world_size: number of ranks.
    """

    def __init__(self, case, world_size):
        self.module, self.world_size = Net(**case["model"]), world_size
        self.optimizer = optimizer_of(self.module, case["optimizer"])
        self.rank = dist.get_rank()
        self._losses = []

    def forward(self, key, skip):
        self._losses = [self.module.loss(*self.module.batch(*key, r), skip) for r in range(self.world_size)]
        return float(self._losses[self.rank].detach())

    def backward(self, num_micro_batches):
        sum(loss / self.world_size / num_micro_batches for loss in self._losses).backward()

    def evaluate(self, key, skip):
        with torch.no_grad():
            return self.forward(key, skip)

    def step(self, clip):
        if clip:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        self.optimizer.step()

    def change(self):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(0.95)

    load = change

    def freeze(self, index):
        for parameter in self.module.layers[index % len(self.module.layers)].parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    def ignore(self, *_):
        pass

    use = alone = save = save_optimizer = reshard = ignore
    accumulating = nullcontext

    def weights(self):
        return {n: p.detach().clone() for n, p in self.module.named_parameters(remove_duplicate=False)}


class Sharded:
    """Rank under the plan, driven as the strategy does.

    Args:
        case: plain data.
        world_size: number of ranks.
    """

    def __init__(self, case, world_size):
        self.module = Net(**case["model"])
        self.model = ShardedModel.planned(self.module, plan_of(case, world_size), device=CPU)
        self.optimizer = optimizer_of(self.module, case["optimizer"])
        self.rank, self._loss = dist.get_rank(), None

    def forward(self, key, skip):
        self._loss = self.model.run(self.module.loss, *self.module.batch(*key, self.rank), skip)
        return float(self._loss.detach())

    def accumulating(self):
        return self.model.accumulating()

    def backward(self, num_micro_batches):
        with self.model.reaching_alike(self._loss / num_micro_batches) as loss:
            self.model.before_backward()
            loss.backward()

    def evaluate(self, key, skip):
        with torch.no_grad():
            return self.forward(key, skip)

    def step(self, clip):
        self.model.before_optimizer_step(self.optimizer)
        precision = OSDPPrecision("64-true")
        precision.use_device(torch.device("cpu"))
        precision.clip_grad_by_norm(self.optimizer, clip)
        with self.model.stepping(self.optimizer):
            self.optimizer.step()
        self.model.reshard()

    def change(self):
        self.model.reshard()  # as before every hook
        Plain.change(self)

    def freeze(self, index):
        self.model.reshard()
        Plain.freeze(self, index)

    def load(self):
        state = self.model.whole_state(on_all_ranks=True)
        self.model.load_model({name: 0.95 * value for name, value in state.items()}, strict=True)

    def save(self):
        self.model.model_state("sharded")
        assert self.rank or self.model.whole_state(on_all_ranks=False) is not None
        assert not self.rank or self.model.whole_state(on_all_ranks=False) is None

    def save_optimizer(self):
        state = [self.model.optimizer_state(self.optimizer, "full")]
        dist.broadcast_object_list(state)
        self.model.load_optimizer(self.optimizer, state[0])

    def reshard(self):
        self.model.reshard()

    def use(self, modes, sync, options, blocks):
        self._loss = None  # a forward's, to which no backward comes
        units = []
        for index, unit in enumerate(self.model.plan.units):
            chosen = [modes[(index + place) % len(modes)] for place in range(unit.num_slices)]
            reduces = sync[index % len(sync)] if unit.name else "every"
            if unit.modes[0] in IN_NODE.values():  # where it is sharded stays
                chosen = [IN_NODE[mode] for mode in chosen]
            elif reduces == "node":
                reduces = "last"
            becomes = unit if unit.modes[0] == "replicated" else unit.in_modes(*chosen)
            units.append(becomes.treated(sync=reduces, **on_host(unit)))
        plan = dataclasses.replace(self.model.plan, units=tuple(units), blocks=blocks_of(blocks), **options)
        change_plan(self.module, plan)

    def alone(self):
        with self.model.alone(), self.model.kept_shards():
            self.forward(("alone",), ())
            self.backward(1)
        self._loss = None

    def weights(self):
        found = whole_parameters(self.module)
        assert not any(type(value) is torch.Tensor for value in found.values())  # each is a shard by now
        return {name: value.full_tensor().detach().clone() for name, value in found.items()}


def play(case, player):
    """Losses, and weights after each step."""
    losses, weights = [], []
    for number, step in enumerate(case["steps"]):
        batches = step["batches"]
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else player.accumulating():
                losses.append(player.forward((number, index), batch["skip"]))
                if batch["reshards"]:
                    player.reshard()
                if index == 0:
                    player.optimizer.zero_grad()
                player.backward(len(batches))
            losses += [_happen(player, event, (number, index)) for event in batch["events"]]
        player.step(case["clip"])
        weights.append(player.weights())
        losses += [_happen(player, event, (number,)) for event in step["events"]]
    losses.append(player.evaluate(("end",), ()))
    return losses, weights


def _happen(player, event, place):
    name, *arguments = event
    if name in ("evaluate", "forward"):
        return getattr(player, name)(("event", *place), *arguments)
    getattr(player, name)(*arguments)
    return 0.0


def differences(drawn):
    """Largest differences of each step's weights and of all losses, between this rank and one plain process."""
    world_size = dist.get_world_size()
    expected_losses, expected = play(drawn, Plain(drawn, world_size))
    losses, weights = play(drawn, Sharded(drawn, world_size))
    found = {f"step {number}, {name}": _apart(own[name], value)
             for number, (own, whole) in enumerate(zip(weights, expected, strict=True))
             for name, value in whole.items()}  # fmt: skip
    found |= {f"loss {i}": abs(a - b) for i, (a, b) in enumerate(zip(losses, expected_losses, strict=True))}
    return {name: value for name, value in found.items() if not value < 1e-9}


def _apart(own, whole):
    assert own.shape == whole.shape
    return float((own - whole).abs().max()) if whole.numel() else 0.0


# ---- the same by a Trainer


class Fitted(Net):
    """Trains on its own batches, and leaves out the layers that the case says."""

    def __init__(self, case):
        super().__init__(**case["model"])
        self.case, self.found = case, []

    def configure_optimizers(self):
        return optimizer_of(self, self.case["optimizer"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch, self.case["skips"][batch_idx])
        self.found.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        self.found.append(self.loss(*batch, self.case["val_skip"]).clone())


class Clearing(Fitted):
    """Clears gradients itself, of what parameters it finds."""

    def optimizer_zero_grad(self, *_):
        for parameter in self.parameters():
            parameter.grad = None


class Changing(L.Callback):
    """Changes weights in one hook."""

    def __init__(self, hook):
        setattr(self, hook, self._change)

    def _change(self, trainer, module, *_):
        Plain.change(Module(module))


class Module:
    def __init__(self, module):
        self.module = module


def fits_apart(drawn):
    """Returns differences of weights and losses between a fit and one plain process that plays the same."""
    rank, world_size, number = dist.get_rank(), dist.get_world_size(), drawn["num_micro_batches"]
    play_out, change, every = Plain(drawn, world_size), drawn["changes"], drawn["validates_every"]
    losses, skips = [], drawn["skips"]

    def changed(hook):
        if change == hook:
            play_out.change()

    for index, skip in enumerate(skips):
        losses.append(play_out.forward((index,), skip))
        if index % number == 0:
            play_out.optimizer.zero_grad()
        play_out.backward(number)
        if index % number == number - 1:
            changed("on_before_optimizer_step")
            play_out.step(drawn["clip"])
        changed("on_train_batch_end")
        if every and index % every == every - 1:
            losses.append(play_out.evaluate(("val",), drawn["val_skip"]))
            changed("on_validation_end")

    module = (Clearing if drawn["clears"] else Fitted)(drawn)
    plan = dataclasses.replace(plan_of(drawn, world_size), fingerprint=fingerprint(module))
    fit = trainer(
        OSDPStrategy(plan=plan, batch_size="keep"),
        plugins=[OSDPPrecision("64-true")],
        callbacks=[Changing(change)] if change else [],
        max_steps=len(skips) // number,
        accumulate_grad_batches=number,
        gradient_clip_val=drawn["clip"] or None,
        limit_val_batches=1.0 if every else 0,
        val_check_interval=every or None,
        num_sanity_val_steps=0,
    )
    batches = [module.batch(index, rank) for index in range(len(skips))]
    fit.fit(module, DataLoader(batches, batch_size=None), DataLoader([module.batch("val", rank)], batch_size=None))
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    found = {name: _apart(state[name], value) for name, value in play_out.weights().items()}
    found |= {f"loss {i}": abs(float(a) - b) for i, (a, b) in enumerate(zip(module.found, losses, strict=True))}
    return {name: value for name, value in found.items() if not value < 1e-9}
