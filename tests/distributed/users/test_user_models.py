"""Models that do in their forward what people do: as under DDP, or an error."""

import dataclasses
import itertools
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_osdp import Block, OSDPStrategy
from lightning_osdp.apply.internals import in_flight
from lightning_osdp.core.axes import Treatment
from tests.distributed.support.ranks import RankPool
from tests.distributed.support.user_runs import (
    WIDTH,
    Adapter,
    Chain,
    check,
    ddp,
    difference,
    differences,
    fitted,
    plan_with,
    planned,
    refusal,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


UNUSED = {"find_unused_parameters": True}


class Adapted(Chain):
    """LoRA: a unit of frozen and trained parameters, one of frozen ones alone, and trained ones."""

    units = ("first", "second", "third", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first, self.second = Adapter(self.first), Adapter(self.second)
        self.third.requires_grad_(False)
        self.norm.requires_grad_(False)


class ByRank(Chain):
    """A branch that one rank takes, in a unit that all of them gather; its weights decay where it is used."""

    units = ("first", "branches", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.branches = Branches()
        del self.second, self.third

    def features(self, x):
        return self.branches(torch.tanh(self.first(x)), self.branch_of())

    def branch_of(self):
        return 0 if dist.get_rank() == 0 else 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


class Branches(nn.Module):
    """Three branches, the last of which nobody takes."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x, branch):
        return torch.tanh(self.each[branch](x))


class BySteps(ByRank):
    """A branch in every third step only, by all ranks; that rank alone in others."""

    def training_step(self, batch, batch_idx):
        self.step = batch_idx
        return super().training_step(batch, batch_idx)

    def branch_of(self):
        return [2, 1, super().branch_of()][getattr(self, "step", 0) % 3]


class LayerDrop(Chain):
    """Leaves out a unit in some steps, the same on all ranks; its weights decay."""

    def training_step(self, batch, batch_idx):
        self.is_short = batch_idx % 3 == 1
        return super().training_step(batch, batch_idx)

    def features(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x if getattr(self, "is_short", False) else torch.tanh(self.third(x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


class Siamese(Chain):
    """Several forwards for one backward, and a module that is called twice in each."""

    def features(self, x):
        x = torch.tanh(self.first(x))
        return torch.tanh(self.third(self.second(torch.tanh(self.second(x)))))

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        one, other = self.features(x), self.features(-x)
        return F.mse_loss(self.last(self.norm(one)) * self.scale, y) + (one * other).mean()


class Tied(Chain):
    """One weight in two layers, which are one unit."""

    units = ("first", "body", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.body = nn.Sequential(self.second, nn.Tanh(), self.third)
        del self.second, self.third
        self.body[0].weight = self.body[2].weight

    def features(self, x):
        return torch.tanh(self.body(torch.tanh(self.first(x))))


class TiedAcross(Chain):
    """One weight in two layers apart, which the root holds."""

    units = ("first", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.second.weight = self.third.weight


class Recomputing(Chain):
    """Checkpoints around a unit, around two of them, and inside one."""

    units = ("first", "body", "third", "norm", "last")

    def __init__(self, optimizer="adamw", *, is_reentrant):
        super().__init__(optimizer)
        self.is_reentrant = is_reentrant
        self.body = Inside(self.second, is_reentrant)
        del self.second

    def features(self, x):
        x = torch.tanh(self.first(x))
        x = checkpoint(self.body, x, use_reentrant=self.is_reentrant)
        return checkpoint(lambda each: torch.tanh(self.third(each)), self.body(x), use_reentrant=self.is_reentrant)

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        x = self.features(x)
        told = checkpoint(lambda each: self.last(self.norm(each)), x, use_reentrant=self.is_reentrant)
        return F.mse_loss(told * self.scale, y)


class Inside(nn.Module):
    def __init__(self, layer, is_reentrant):
        super().__init__()
        self.layer, self.is_reentrant = layer, is_reentrant

    def forward(self, x):
        return checkpoint(lambda each: torch.tanh(self.layer(each)), x, use_reentrant=self.is_reentrant)


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    name: str


class Wrapped(nn.Module):
    """Returns its output in some container."""

    def __init__(self, layer, kind):
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x):
        value = torch.tanh(self.layer(x))
        return {
            "tuple": lambda: (value, None, "text"),
            "dict": lambda: {"value": [value]},
            "dataclass": lambda: Output(value, "text"),
            "view": lambda: self.layer(x).view(-1, 2, WIDTH // 2).transpose(0, 1),
        }[self.kind]()


class Returning(Chain):
    """Outputs in tuples, dictionaries and dataclasses."""

    units = ("first", "second", "third", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        for name, kind in (("first", "tuple"), ("second", "dict"), ("third", "dataclass")):
            setattr(self, name, Wrapped(getattr(self, name), kind))

    def features(self, x):
        return self.third(self.second(self.first(x)[0])["value"][0]).value


class InPlace(Chain):
    """Changes what units return in place: views, and tensors that are none."""

    units = ("first", "second", "third", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first = Wrapped(self.first, "view")

    def features(self, x):
        x = self.first(x)
        x += 1
        x = x.transpose(0, 1).flatten(1)
        x = self.second(x)
        x.mul_(0.5)
        y = self.third(torch.tanh(x))
        y += 1
        return torch.tanh(y)


MODELS = {
    "LoRA": Adapted,
    "siamese": Siamese,
    "tied in a unit": Tied,
    "tied in the root": TiedAcross,
    "reentrant": partial(Recomputing, is_reentrant=True),
    "not reentrant": partial(Recomputing, is_reentrant=False),
    "containers": Returning,
    "in place": InPlace,
}
PARTLY_USED = {"by rank": ByRank, "by step and rank": BySteps, "LayerDrop": LayerDrop}


class Asking(Chain):
    """Asks for gradients of its inputs within its step."""

    def told(self, x):
        return self.last(self.norm(self.features(x))) * self.scale

    def batch_of(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        return x.clone().requires_grad_(), y


class Adversarial(Asking):
    """FGSM: learns from inputs that it is worst at, and validates on them."""

    def loss(self, batch):
        x, y = self.batch_of(batch)
        (slope,) = torch.autograd.grad(F.mse_loss(self.told(x), y), x)
        return F.mse_loss(self.told(x.detach() + 0.1 * slope.sign()), y) + F.mse_loss(self.told(x), y)

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.found.append(self.loss(batch).detach())


class Penalty(Asking):
    """Second derivatives, as of a gradient penalty; forwards before and after the one whose slope is taken."""

    def loss(self, batch):
        x, y = self.batch_of(batch)
        before = F.mse_loss(self.told(x), y)
        (slope,) = torch.autograd.grad(self.told(0.5 * x).sum(), x, create_graph=True)
        return before + (slope.norm(dim=1) - 1).square().mean() + F.mse_loss(self.told(2 * x), y)


class PenaltyAlone(Asking):
    """The slope of layers between which there are kinks is all that it learns from: biases have no gradient."""

    def features(self, x):
        return torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x))))))

    def loss(self, batch):
        x, _ = self.batch_of(batch)
        (slope,) = torch.autograd.grad((self.last(self.features(x)) * self.scale).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()


class Curvature(Asking):
    """Third derivatives: a product with the Hessian."""

    def loss(self, batch):
        x, y = self.batch_of(batch)
        told = self.told(x)
        (slope,) = torch.autograd.grad(told.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad((slope * y.sum(1, keepdim=True)).sum(), x, create_graph=True)
        return F.mse_loss(told, y) + curve.square().mean()


class Forces(nn.Module):
    """An energy and its slope, which its forward asks for; a unit with or without others inside."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.gain = nn.Sequential(*layers), nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.layers(x) * self.gain
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=torch.is_grad_enabled())
        return energy, slope


class Field(Asking):
    units = ("inner", "inner.layers.0", "inner.layers.2", "outer", "third", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.inner = Forces(self.first, nn.Tanh(), self.second, nn.Tanh())
        self.outer = Forces(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        del self.first, self.second

    def loss(self, batch):
        x, y = self.batch_of(batch)
        (features, slope), (told, other) = self.inner(x), self.outer(x)
        told = told + self.last(self.norm(self.third(features))) * self.scale
        return F.mse_loss(told, y) + (slope - x.detach()).square().mean() + (other - x.detach()).square().mean()


GRADIENTS = {
    "FGSM": Adversarial,
    "penalty": Penalty,
    "penalty alone": PenaltyAlone,
    "Hessian": Curvature,
    "forces": Field,
}


class Closed(nn.Module):
    """Takes its input from where it was put."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, _):
        return self.layer(self.given)


class Hidden(Asking):
    units = ("first", "second", "third", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.second = Closed(self.second)

    def features(self, x):
        self.second.given = torch.tanh(self.first(x))
        return torch.tanh(self.third(torch.tanh(self.second(None))))

    def loss(self, batch):
        x, y = self.batch_of(batch)
        told = self.told(x)
        (slope,) = torch.autograd.grad(told.sum(), x, create_graph=True)
        return F.mse_loss(told, y) + slope.square().sum()


class Steepness(Asking):
    """Asks for gradients of parameters."""

    def loss(self, batch):
        x, y = self.batch_of(batch)
        loss = F.mse_loss(self.told(x), y)
        (slope,) = torch.autograd.grad(loss, [self.second.weight], create_graph=True)
        return loss + slope.square().sum()


def modelled(names=tuple(MODELS), kinds=("mixed", "zdp", "dp")):
    """Differences from DDP, by model."""
    options = {"max_steps": 4, "limit_val_batches": 1, "val_check_interval": 2}
    static = {"ddp_options": {"static_graph": True}}  # DDP wants it where a module runs twice under a checkpoint
    return {name: differences(MODELS[name], kinds, **options, **(static if "reent" in name else {})) for name in names}


WINDOWS = {"accumulate_grad_batches": 2, "plan_options": {"num_micro_batches": 2}, "sync": "last"}


def partly_used(cases):
    """Differences from DDP of parameters that some ranks use, or all in some steps, with and without accumulation."""
    options = {"max_steps": 6, "ddp_options": UNUSED}
    return {
        (name, in_windows): differences(PARTLY_USED[name], **options, **(WINDOWS if in_windows else {}))
        for name, in_windows in cases
    }


def with_gradients_inside(kinds, names, in_windows):
    """Differences from DDP of models that ask for gradients within their step, and of these in windows."""
    validated = {"limit_val_batches": 1, "val_check_interval": 2, "inference_mode": False}
    options = {name: {"max_steps": 4} for name in GRADIENTS}
    options["FGSM"] |= validated
    options["penalty alone"]["ddp_options"] = UNUSED
    found = {name: differences(GRADIENTS[name], kinds, **options[name]) for name in names}
    for name in in_windows:
        found[f"{name}, in windows"] = differences(GRADIENTS[name], ("mixed",), **options[name], **WINDOWS)
    return found


def with_gradients_through_blocks():
    """Differences from DDP of such models where a block recomputes or offloads, and of those that are planned."""
    found = {}
    for name in ("FGSM", "penalty"):
        make = GRADIENTS[name]
        expected = fitted(ddp(), make(), max_steps=3)
        for activations in ("recompute", "offload"):
            plan = with_block(plan_with(make, "mixed"), activations)
            found[name, activations] = difference(fitted(OSDPStrategy(plan=plan), make(), max_steps=3), expected)
        found[name, "planned"] = planned(make)[0]
    return found


def with_block(plan, activations):
    return dataclasses.replace(plan, blocks=(Block(name="second", treatment=Treatment(saves=activations)),))


def without_gradients_inside():
    """Returns errors where gradients cannot be had in a step."""

    def told(make, change=lambda plan: plan):
        plan = change(plan_with(make, "zdp"))
        try:
            fitted(OSDPStrategy(plan=plan), make(), max_steps=3)
        except RuntimeError as error:
            return str(error)
        return ""

    blocks = partial(with_block, activations="recompute_offload")
    return {"hidden": told(Hidden), "parameters": told(Steepness), "blocks": told(Adversarial, blocks)}


def reduced_by_gradients_inside():
    """Counts reduce-scatters of two steps that ask for gradients of inputs, and of two that do not."""
    found = []
    for make in (Adversarial, Chain):
        plan = plan_with(make, "zdp")
        with mock.patch.object(in_flight, "begin_all_to_all", wraps=in_flight.begin_all_to_all) as reduced:
            fitted(OSDPStrategy(plan=plan), make(), max_steps=2)
        found.append(reduced.call_count)
    return found


class ExpertByRank(Chain):
    """Rank 0 calls another unit than the others."""

    def __init__(self, optimizer="adamw", *, width=WIDTH):
        super().__init__(optimizer)
        self.second, self.third = (
            nn.Sequential(nn.Linear(WIDTH, each), nn.Tanh(), nn.Linear(each, WIDTH)) for each in (WIDTH, width)
        )

    units = ("first", "second", "third", "norm", "last")

    def features(self, x):
        return (self.second if dist.get_rank() == 0 else self.third)(torch.tanh(self.first(x)))


class SkippedByRank(Chain):
    """Rank 0 alone leaves out a unit."""

    def features(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x if dist.get_rank() == 0 else torch.tanh(self.third(x))


EXPERTS = {
    "equal": ExpertByRank,
    "larger": partial(ExpertByRank, width=3 * WIDTH),
    "skipped": SkippedByRank,
}
APART = [("equal", "dp"), ("larger", "zdp"), ("skipped", "zdp")]
"""Cases in which ranks are apart; under "dp" each rank gathers all units, and reduces them in another order."""


def apart(name, kind):
    """Returns the error that a rank raises, after how many seconds, and after how many steps."""
    plan, start = plan_with(EXPERTS[name], kind), time.monotonic()
    module = EXPERTS[name]()
    try:
        fitted(OSDPStrategy(plan=plan), module, max_steps=6)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, len(module.found)
    return None, time.monotonic() - start, len(module.found)


class ApartAtFirst(ExpertByRank):
    """Has all ranks call both units once they are said to."""

    are_apart = True

    def features(self, x):
        return super().features(x) if self.are_apart else Chain.features(self, x)


def apart_and_together():
    """Returns the error of a fit in which ranks call different units, and how many steps the next fit takes."""
    plan, module = plan_with(ApartAtFirst, "dp"), ApartAtFirst()
    told = refusal(lambda: fitted(OSDPStrategy(plan=plan), module, max_steps=3))
    module.are_apart, module.found = False, []
    fitted(OSDPStrategy(plan=plan), module, max_steps=3)
    return told, len(module.found)


def reduced_elements():
    """Elements that reduce-scatters of a step take in with LoRA, and those of what is trained, padded to all ranks."""
    world_size, module = dist.get_world_size(), Adapted()
    rows = [((*p.shape, 1)[0], p.shape[1:].numel()) for p in module.parameters() if p.requires_grad]
    expected = sum(-(-num_rows // world_size) * world_size * size for num_rows, size in rows)
    plan = plan_with(Adapted, "mixed")
    with mock.patch.object(in_flight, "begin_all_to_all", wraps=in_flight.begin_all_to_all) as reduced:
        fitted(OSDPStrategy(plan=plan), module, max_steps=1)
    return sum(whole.numel() for (_, whole, _), _ in reduced.call_args_list), expected


class Normalised(Chain):
    """BatchNorm and LayerNorm, and what dtype their buffers have in a step."""

    units = ("first", "batch_norm", "second", "third", "norm", "last")

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.dtypes = set()

    def features(self, x):
        x = self.batch_norm(self.first(x))
        self.dtypes |= {self.batch_norm.running_mean.dtype, self.batch_norm.running_var.dtype}
        return torch.tanh(self.third(torch.tanh(self.second(torch.tanh(x)))))


class Remembering(Normalised):
    """Model whose loss reads buffers that differ by rank, and that its step changes in all ways, one of them later."""

    def __init__(self, *, is_expanded=True):
        super().__init__("adamw")
        drawn = torch.Generator().manual_seed(dist.get_rank())
        for name in ("in_place", "by_data", "assigned", "late"):
            self.register_buffer(name, torch.rand(WIDTH, generator=drawn), persistent=name != "assigned")
        expanded = torch.full((1,), dist.get_rank()).expand(3)
        self.register_buffer("expanded", expanded if is_expanded else expanded.clone())  # which DDP cannot broadcast
        self.register_buffer("validated", torch.zeros(()))

    def features(self, x):
        x = super().features(x) * self.by_data.clone() + self.in_place + self.assigned + self.late + self.expanded[0]
        if self.training:
            mean = x.detach().mean(0)
            self.in_place.lerp_(mean, 0.1)
            self.by_data.data.mul_(0.9).add_(mean, alpha=0.1)
            self.assigned = 0.9 * self.assigned + 0.1 * mean
            if self.trainer.global_step > 2:
                self.late.add_(0.1 * mean)
        return x

    def validation_step(self, batch, batch_idx):
        self.validated = self.validated + 1
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Growing(Chain):
    """Has a cache of positions, as far as this rank's longest sequence needs it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", self.computed(WIDTH), persistent=False)

    def computed(self, length):
        return torch.arange(length, dtype=self.scale.dtype).cos()

    def features(self, x):
        length = WIDTH + (1 + dist.get_rank()) * (self.trainer.global_step // 2)
        if len(self.positions) < length:
            self.positions = self.computed(length)
        return super().features(x) + self.positions[length - WIDTH : length]


class Unlike(Chain):
    """Has a buffer that is larger on rank 1, or that only rank 1 has."""

    def __init__(self, name):
        super().__init__()
        if name == "size" or dist.get_rank() == 1:
            self.register_buffer("own", torch.zeros(1 + dist.get_rank()))


def remembered():
    """Differences from DDP, with and without accumulation, and buffers of a second fit; what is refused."""
    options = {"limit_val_batches": 1, "val_check_interval": 2, "expected": partial(Remembering, is_expanded=False)}
    windows = {"accumulate_grad_batches": 2, "plan_options": {"num_micro_batches": 2}, "sync": "last"}
    found = {
        "each step": differences(Remembering, ("mixed", "dp"), max_steps=6, **options),
        "windows": differences(Remembering, ("dp",), max_steps=6, **options, **windows),
    }
    own = {"ddp_options": {"broadcast_buffers": False}, "limit_val_batches": 1, "val_check_interval": 2}
    found["growing"] = differences(Growing, ("mixed",), max_steps=6, **own)
    plan = plan_with(Chain, "zdp")
    refused = [refusal(lambda name=name: fitted(OSDPStrategy(plan=plan), Unlike(name))) for name in ("size", "number")]
    return found, refused


def mixed_precision():
    """Losses in bf16-mixed under DDP and under each kind of plan, with the dtypes of buffers."""
    found = {}
    for kind in (None, "zdp", "dp", "mixed"):
        module = Normalised()
        strategy = ddp() if kind is None else OSDPStrategy(plan=plan_with(Normalised, kind, dtype="float32"))
        fitted(strategy, module, dtype="float32", precision="bf16-mixed", max_steps=16)
        found[kind] = (module.losses, sorted(map(str, module.dtypes)))
    return found


class Sharded(Chain):
    """Shards a part of itself."""

    def configure_model(self):
        if not hasattr(self, "is_sharded"):
            self.is_sharded = fully_shard(self.second) is not None


class Dtypes(Chain):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.second.bias = nn.Parameter(self.second.bias.detach().half())


BAD_MODELS = {"sharded": Sharded, "dtypes": Dtypes}
BAD_OPTIONS = {
    "limit_all_gathers": {"limit_all_gathers": False},
    "BACKWARD_POST": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "keep_low_precision_grads": {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
}


def refused():
    """Returns errors of bad input, and how many steps had been trained."""
    found = {}
    for name, make in BAD_MODELS.items():
        plan = plan_with(make, "zdp", dtype=None)
        module = make()
        told = refusal(
            lambda plan=plan, module=module: fitted(OSDPStrategy(plan=plan), module, dtype=None, precision="bf16-mixed")
        )
        found[name] = told, len(module.found)
    for name, options in BAD_OPTIONS.items():
        found[name] = refusal(lambda options=options: OSDPStrategy(**options)), 0
    return found


@pytest.mark.slow
def test_models_equal_ddp(ranks):
    check(ranks(2).run(modelled)[0])


@pytest.mark.slow
def test_models_equal_ddp_on_four_ranks(ranks):
    check(ranks(4).run(modelled, names=["LoRA", "siamese", "in place"], kinds=["mixed"])[0])


USED = [*itertools.product(PARTLY_USED, (False, True))]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, [("by rank", False), ("by step and rank", True), ("LayerDrop", True)]), slow(2, USED), slow(4, USED)],
)
def test_parameters_that_some_ranks_use_equal_ddp(ranks, world_size, cases):
    check(ranks(world_size).run(partly_used, cases=cases)[0])


@pytest.mark.parametrize(
    ("world_size", "kinds", "names", "in_windows"),
    [
        (2, ["mixed"], ["FGSM", "penalty alone", "Hessian", "forces"], ["penalty"]),
        slow(2, ["mixed"], ["penalty"], ["FGSM"]),
        *(slow(*case, [*GRADIENTS], ["FGSM", "penalty"]) for case in ((2, ["zdp", "dp"]), (4, ["node", "nodes"]))),
    ],
)
def test_gradients_that_are_asked_for_in_a_step_equal_ddp(ranks, world_size, kinds, names, in_windows):
    given = {"kinds": kinds, "names": names, "in_windows": in_windows}
    check(ranks(world_size).run(with_gradients_inside, **given)[0])


@pytest.mark.slow
def test_gradients_that_are_asked_for_go_through_blocks_that_save_less(ranks):
    found = ranks(2).run(with_gradients_through_blocks)[0]
    assert len(found) == 6
    assert max(found.values()) < 1e-10, found


def test_gradients_that_cannot_be_had_in_a_step_are_explained(ranks):
    for told in ranks(2).run(without_gradients_inside):
        assert "must be given to the module as arguments" in told["hidden"]
        assert "Call backward() for gradients of parameters" in told["parameters"]
        assert 'SearchSpace(activations=("keep", "recompute"))' in told["blocks"]


def test_gradients_that_are_asked_for_in_a_step_reduce_nothing(ranks):
    for asking, plain in ranks(2).run(reduced_by_gradients_inside):
        assert asking == plain > 0


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_frozen_parameters_are_not_reduced(ranks, world_size):
    for found, expected in ranks(world_size).run(reduced_elements):
        assert found == expected > 0


@pytest.mark.parametrize(("world_size", "cases"), [(2, APART[:1]), slow(2, APART[1:]), slow(4, APART)])
def test_units_that_only_some_ranks_call_are_an_error_on_all_ranks(world_size, cases):
    for name, kind in cases:
        pool = RankPool(world_size)  # its own pool: collectives that found no partner are left
        try:
            for told, duration_s, num_steps in pool.run(apart, name=name, kind=kind):
                assert told is not None, (name, kind)
                assert "Expected every rank to run the same modules in the same order" in told
                assert duration_s < 60
                assert num_steps <= 1
        finally:
            pool.close()


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_buffers_are_those_of_rank_zero_as_under_ddp(ranks, world_size):
    for found, (size, number) in ranks(world_size).run(remembered):
        check(found)
        expected = "RanksApartError: Expected the same buffers of the same sizes on every rank"
        assert size.startswith(expected)
        assert "but 'own' differs. Keep what is a rank's own in an attribute" in size
        assert number.startswith(expected)
        assert "but their number differs" in number


def test_a_fit_does_not_compare_what_one_before_it_has_left():
    pool = RankPool(2)
    try:
        for told, num_steps in pool.run(apart_and_together):
            assert told.startswith("RanksApartError: Expected every rank to run the same modules")
            assert num_steps == 3
    finally:
        pool.close()


@pytest.mark.slow
def test_bf16_mixed_is_ddps_and_buffers_stay_float32(ranks):
    found = ranks(2).run(mixed_precision)[0]
    expected, dtypes = found.pop(None)
    assert dtypes == ["torch.float32"]
    assert expected[-1] < 0.9 * expected[0]
    assert len(found) == 3
    for kind, (losses, own_dtypes) in found.items():
        assert own_dtypes == dtypes, kind
        assert losses == pytest.approx(expected, rel=0.02), kind


REMEDIES = {
    "sharded": "leave out a fully_shard of your own",
    "dtypes": "Give them one dtype",
    "limit_all_gathers": "Leave it out",
    "BACKWARD_POST": "Pass BackwardPrefetch.BACKWARD_PRE or None",
    "keep_low_precision_grads": "Leave it out",
}


def test_bad_input_is_refused_before_training_with_the_remedy(ranks):
    for found in ranks(2).run(refused):
        assert list(found) == list(REMEDIES)
        for name, (told, num_steps) in found.items():
            assert told is not None, name
            assert told.startswith("ConfigurationError: "), told
            assert REMEDIES[name] in told
            assert num_steps == 0, name
