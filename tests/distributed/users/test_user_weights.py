"""User code that reaches for whole weights, gradients and optimizers: as under DDP, or one clear error."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import nn

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.runtime.error_texts import explain_step_error
from tests.distributed.support.fits import EVERYTHING, failure, shared_folder, without_measuring
from tests.distributed.support.user_runs import (
    WIDTH,
    Chain,
    check,
    ddp,
    difference,
    differences,
    fitted,
    plan_with,
    refusal,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


SHORT = {"max_steps": 6, "limit_val_batches": 1, "val_check_interval": 2}
WINDOWS = {"accumulate_grad_batches": 2, "plan_options": {"num_micro_batches": 2}, "sync": "last"}


def masked(gradient):
    return gradient * (torch.arange(gradient.numel()).view(gradient.shape) % 2)


class Hooked(Chain):
    """Hooks of gradients: some from the beginning, one of which is taken away, and others of hooks and of a step."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.second.weight.register_hook(masked)
        self.handle = self.first.weight.register_hook(masked)
        self.scale.register_hook(lambda gradient: 3 * gradient)

    def on_fit_start(self):
        self.third.bias.register_hook(masked)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.second.bias.register_hook(masked)
        if batch_idx == 3:
            self.handle.remove()

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            self.norm.weight.register_hook(masked)
        return super().training_step(batch, batch_idx)


class Late(Chain):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))


def hooked():
    """Differences from DDP where gradients have hooks, and what a hook that cannot be carried over is refused with."""
    plan = plan_with(Chain, "mixed")
    return {
        "hooks": differences(Hooked, ("zdp", "dp"), **SHORT),
        "hooks in windows": differences(Hooked, ("mixed",), **SHORT, **WINDOWS),
    }, refusal(lambda: fitted(OSDPStrategy(plan=plan), Late(), **SHORT))


class Partly(nn.Module):
    """Module of which two layers are not called."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.spare, self.idle = layer, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)


class Assigning(Chain):
    """Changes gradients, and assigns some to a layer that no loss reaches; another one has none."""

    units = ("first", "second", "third", "norm", "last")
    limit = 0.1

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.third = Partly(self.third)

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-self.limit, self.limit)
        for parameter in self.third.spare.parameters():
            if parameter.grad is None:
                parameter.grad = 0.1 * torch.ones_like(parameter)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


class AssigningAlone(Assigning):
    """Leaves the others as they are, which DDP has not reduced between micro-batches."""

    limit = float("inf")


def assigned():
    """Differences from DDP where a hook assigns gradients, also between micro-batches."""
    unused = {"ddp_options": {"find_unused_parameters": True}, "limit_val_batches": 0}
    windows = {"accumulate_grad_batches": 2, "plan_options": {"num_micro_batches": 2}}
    return {
        "at once": differences(Assigning, ("zdp", "dp"), max_steps=6, **unused),
        "in windows": differences(AssigningAlone, ("mixed",), max_steps=6, **unused, **windows),
    }


class Penalised(Chain):
    """Chain whose loss has a term over all parameters."""

    def loss(self, batch):
        return super().loss(batch) + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())


class Orthogonal(Chain):
    """Chain whose loss has a term of one weight and a constant."""

    def loss(self, batch):
        weight = self.second.weight
        return super().loss(batch) + 0.1 * (weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype)).norm()


class Anchored(Chain):
    """Chain whose loss keeps weights near to where they began."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.anchor = nn.ModuleList([nn.Linear(layer.in_features, layer.out_features) for layer in self.layers])
        self.anchor.requires_grad_(False)

    @property
    def layers(self):
        return self.first, self.second, self.third

    def loss(self, batch):
        apart = sum(
            (own - other).square().sum()
            for layer, anchor in zip(self.layers, self.anchor, strict=True)
            for own, other in zip(layer.parameters(), anchor.parameters(), strict=True)
        )
        return super().loss(batch) + 0.1 * apart


PENALISED = {"all": Penalised, "orthogonal": Orthogonal, "anchored": Anchored}


@without_measuring
def penalised():
    """Differences from DDP of models that are planned, with the plans' notes."""
    found, notes = {}, {}
    for name, make in PENALISED.items():
        own = fitted(OSDPStrategy(search_space=EVERYTHING), make(), **SHORT)
        found[name] = difference(own, fitted(ddp(), make(), **SHORT))
        notes[name] = " ".join(own[2].strategy.plan.notes)
    return found, notes


def penalised_in_units():
    """Returns differences from DDP, or errors, of units that hold what the loss reads elsewhere."""
    tried = ("all", "zdp"), ("all", "dp"), ("orthogonal", "mixed"), ("anchored", "dp")
    return {(name, kind): outcome(PENALISED[name], kind) for name, kind in tried}


def outcome(make, kind):
    try:
        return differences(make, (kind,), max_steps=4)[kind]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Tuned(Chain):
    """A backbone and a head; all ranks have the same data, for DDP never reduces what was frozen when it began."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.backbone = nn.Sequential(self.first, nn.Tanh(), self.second, nn.Tanh())
        del self.first, self.second

    units = ("backbone.0", "backbone.2", "third", "norm", "last")

    def features(self, x):
        return torch.tanh(self.third(self.backbone(x)))

    def loader(self, rank, world_size):
        return super().loader(0, 1)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def frozen():
    module = Tuned()
    module.backbone.requires_grad_(False)
    return module


def tuned(strategy, folder=None, **options):
    callbacks = [BackboneFinetuning(1, lambda _: 1.5, backbone_initial_ratio_lr=0.5)]
    if folder is not None:
        saving = ModelCheckpoint(folder, save_last=True, save_top_k=0)
        callbacks.append(saving)
        options["enable_checkpointing"] = True
    options = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 1, **options}
    return fitted(strategy, Tuned(), callbacks=callbacks, **options)


def unfrozen():
    """Differences from DDP of a backbone that is unfrozen, and from itself resumed; the groups' sizes."""
    found, folder = {}, shared_folder()
    expected = tuned(ddp())
    sizes = [group_sizes(expected)]
    for kind in ("dp", "zdp"):
        plan = plan_with(frozen, kind)
        own = tuned(OSDPStrategy(plan=plan))
        sizes.append(group_sizes(own))
        found[kind] = difference(own, expected)
    for how in ("full", "sharded"):
        tuned(OSDPStrategy(plan=plan, state_dict_type=how), folder / how, max_epochs=2)
        resumed = tuned(OSDPStrategy(plan=plan), max_epochs=3, ckpt_path=folder / how / "last.ckpt")
        sizes.append(group_sizes(resumed))
        found[how, "moments"] = len(resumed[2].optimizers[0].state)
    return found, sizes


def unfrozen_in_low_precision():
    """Losses of a backbone that is unfrozen in bf16-mixed, under DDP and two kinds of plans."""
    mixed = {"dtype": "float32", "precision": "bf16-mixed"}
    found = {"ddp": tuned(ddp(), **mixed)}
    for kind in ("dp", "zdp"):
        found[kind] = tuned(OSDPStrategy(plan=plan_with(frozen, kind, dtype="float32")), **mixed)
    return {name: each[1] for name, each in found.items()}


def group_sizes(result):
    """Counts the parameters in each group of the optimizer of a fit."""
    return [len(group["params"]) for group in result[2].optimizers[0].param_groups]


class Exporting(Chain):
    """Runs whole in its validation, copies itself there, and shrinks by way of whole weights."""

    def gathered(self, **options):
        return self.trainer.strategy.gathered(**options)

    def validation_step(self, batch, batch_idx):
        value = self.scale * 2
        with self.gathered():
            found = self.features(batch[0].to(self.scale.dtype)).sum()
            self.copied = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
            if dist.get_rank() == 0:
                self.exported = self.second.state_dict(), self.last(self.norm(torch.ones(1, 6).double())).detach()
        self.log("val_loss", found * (self.scale * 2 / value).sum(), sync_dist=True)
        self.found.append(found.detach().clone())

    def on_train_batch_end(self, *_):
        with self.gathered(write_back=True), torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)
        with self.gathered(module=self.first), torch.no_grad():
            self.first.weight.zero_()


class PlainExporting(Exporting):
    """Model under DDP, where all is whole."""

    def gathered(self, **options):
        return torch.no_grad()

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


def exported():
    """Differences from DDP; whether what was copied is what was trained; what is refused."""
    found = differences(Exporting, ("zdp", "dp", "mixed"), expected=PlainExporting, **SHORT)
    plan, module, plain = plan_with(Chain, "mixed"), Chain(), Chain().double()
    _, _, fit = fitted(OSDPStrategy(plan=plan), module, **SHORT)
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    plain.load_state_dict(state)
    refused = {
        "layer": refusal(module.second.state_dict),
        "norm": refusal(lambda: nn.Sequential(module.norm).state_dict()),
        "root": refusal(module.state_dict),
        "other": refusal(lambda: fit.strategy.gathered(plain).__enter__()),
        "early": refusal(lambda: OSDPStrategy().gathered().__enter__()),
    }
    with fit.strategy.gathered(module.second):
        same = {name: torch.equal(value, state[f"second.{name}"]) for name, value in module.second.state_dict().items()}
        alone = float((module.second(torch.ones(2, 6).double()) - plain.second(torch.ones(2, 6).double())).abs().max())
    return found, refused, same, alone


class ByType(Chain):
    """Tells layers apart by their class, which sharding changes."""

    def configure_optimizers(self):
        linear = [p for child in self.modules() if type(child) is nn.Linear for p in child.parameters()]
        others = [p for p in self.parameters() if all(p is not each for each in linear)]
        return torch.optim.AdamW([{"params": linear, "weight_decay": 0.5}, {"params": others}], lr=1e-2)


class Counting(Chain):
    """Counts in plain objects, and draws from generators of its own; its loss depends on both."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.meter, self.seen = SimpleNamespace(steps=0), np.zeros(2)
        self.random, self.generator = random.Random(1), np.random.default_rng(1)

    def training_step(self, batch, batch_idx):
        self.meter.steps += 1
        self.seen += 1
        factor = self.random.random() + self.generator.random() + self.meter.steps
        return factor * super().training_step(batch, batch_idx)


@without_measuring
def profiled():
    """Compares a fit that is planned with DDP, for a model that counts; and returns the error of other groups."""
    found = []
    for strategy in (ddp(), OSDPStrategy(search_space=EVERYTHING)):
        module = Counting()
        found.append((fitted(strategy, module, max_steps=4), module.meter.steps, module.seen.tolist()))
    (expected, *counts), (own, *own_counts) = found
    return (
        difference(own, expected),
        counts == own_counts,
        failure(lambda: fitted(OSDPStrategy(search_space=EVERYTHING), ByType(), max_steps=1)),
    )


class Asking(Chain):
    """Asks for its optimizer and its schedule in its step, and takes what it needs out of the batch."""

    def training_step(self, batch, batch_idx):
        assert self.trainer.estimated_stepping_batches == 4
        rate = self.optimizers().param_groups[0]["lr"] + self.lr_schedulers().get_last_lr()[0]
        y = batch.pop()
        loss = self.loss((batch.pop(), y)) * (1 + rate)
        assert not batch
        self.found.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Awaiting(Chain):
    """Chain whose step needs what a hook makes."""

    def on_train_epoch_start(self):
        self.outs = []

    def training_step(self, batch, batch_idx):
        self.outs.append(batch_idx)
        return super().training_step(batch, batch_idx)


@without_measuring
def asked():
    """Difference from DDP of a step that asks, and what one gets that needs a hook first."""
    own = fitted(OSDPStrategy(search_space=EVERYTHING, batch_size="keep"), Asking(), max_steps=4)
    off = difference(own, fitted(ddp(), Asking(), max_steps=4))
    return off, failure(lambda: fitted(OSDPStrategy(search_space=EVERYTHING), Awaiting(), max_steps=1))


READS = {
    "flatten": torch.flatten,  # its rows are not shared evenly by ranks
    "quantile": lambda weight: weight.quantile(0.5),
    "rows": list,
    "tolist": torch.Tensor.tolist,
    "unique": torch.unique,
    "nonzero": torch.nonzero,
    "mask": lambda weight: weight[weight > 0],
    "masked_select": lambda weight: weight.masked_select(weight > 0),
    "allclose": lambda weight: torch.allclose(weight, weight),
}


class Reading(Chain):
    """Reads values of a weight in a hook, in shards and gathered."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first = nn.Linear(7, 2 * WIDTH + 1)
        self.second = nn.Linear(2 * WIDTH + 1, WIDTH)

    def on_train_batch_start(self, batch, batch_idx):
        strategy, weight = self.trainer.strategy, self.first.weight.detach()
        self.told = {}
        for name, read in READS.items():
            with pytest.raises((RuntimeError, NotImplementedError)) as refused:
                read(weight)
            explain_step_error(refused.value, strategy, strategy._sharded)
            self.told[name] = str(refused.value)
        with strategy.gathered():
            self.expected = self.first.weight.detach().clone()
            self.values = [str(read(self.first.weight.detach())) for read in READS.values()]


def reads():
    """Errors of reading a shard each way, and whether each gives of a gathered weight what it gives of a plain one."""
    module = Reading()
    fitted(OSDPStrategy(plan=plan_with(Reading, "zdp")), module, max_steps=1)
    return module.told, module.values == [str(read(module.expected)) for read in READS.values()]


def test_values_of_shards_that_torch_cannot_compute_are_told_how_to_be_read(ranks):
    for told, are_read in ranks(2).run(reads):
        assert told.keys() == READS.keys()
        for name, text in told.items():
            assert "\nOSDP: outside the forward of its own module a parameter may be a DTensor" in text, name
            assert "to look at whole weights elsewhere: `with trainer.strategy.gathered(): ...`." in text, name
        assert are_read


def test_hooks_of_gradients_see_what_they_see_under_ddp(ranks):
    found, refused = ranks(2).run(hooked)[0]
    check(found)
    assert refused.startswith("ConfigurationError: Expected no register_post_accumulate_grad_hook")


@pytest.mark.slow
def test_gradients_that_a_hook_assigns_are_those_that_train(ranks):
    check(ranks(2).run(assigned)[0])


@pytest.mark.slow
def test_losses_over_parameters_equal_ddp_or_are_refused(ranks):
    found, notes = ranks(2).run(penalised)[0]
    assert max(found.values()) < 1e-10, found
    for name, note in notes.items():
        assert "can only be in the root unit, which stays gathered" in note, name
    for name, outcome in ranks(2).run(penalised_in_units)[0].items():
        if isinstance(outcome, str):
            assert "\nOSDP: outside the forward of its own module a parameter may be a DTensor" in outcome, name
        else:
            assert outcome < 1e-10, name


@pytest.mark.slow
def test_backbones_are_unfrozen_and_resumed(ranks):
    for found, sizes in ranks(2).run(unfrozen):
        assert max(found["dp"], found["zdp"]) < 1e-10, found
        assert found["full", "moments"] == found["sharded", "moments"] == sum(sizes[0])
        assert sizes == [sizes[0]] * 5
        assert len(sizes[0]) == 2


@pytest.mark.slow
def test_backbones_are_unfrozen_in_low_precision(ranks):
    for losses in ranks(2).run(unfrozen_in_low_precision):
        assert len(losses["ddp"]) == 9
        for kind in ("dp", "zdp"):
            assert losses[kind] == pytest.approx(losses["ddp"], rel=0.02), kind


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_whole_weights_can_be_run_copied_and_changed(ranks, world_size):
    for rank, (found, refused, same, alone) in enumerate(ranks(world_size).run(exported)):
        if rank == 0:
            check({"exporting": found})
        for name in ("layer", "norm", "root"):
            assert "with trainer.strategy.gathered()" in refused[name], name
        assert "got another one. Pass self" in refused["other"]
        assert "setup has not been yet" in refused["early"]
        assert same == {"weight": True, "bias": True}
        assert alone == 0.0


def test_profiling_leaves_no_trace_and_groups_are_compared(ranks):
    for off, is_counted_alike, (kind, told) in ranks(2).run(profiled):
        assert off < 1e-10
        assert is_counted_alike
        assert kind == "ConfigurationError"
        assert "group 0 has 'first.bias', 'first.weight', 'last.bias' and 5 more of the whole one only" in told


def test_steps_may_ask_for_optimizers_and_take_their_batch_apart(ranks):
    for off, (kind, told) in ranks(2).run(asked):
        assert off < 1e-10
        assert kind == "ProfileError"
        assert "training_step reads self.outs" in told
        assert "on_train_epoch_start sets it later" in told
