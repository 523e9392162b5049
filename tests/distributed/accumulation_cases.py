"""Accumulation with a choice of sync for each unit, as the ranks run it: many fits per launch, against DDP."""

import dataclasses
import itertools
import random
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, trainer
from models import Base, OddMLP
from strategy_cases import shared_folder
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy
from lightning_osdp.apply import internals
from lightning_osdp.core.modes import NAMED_MODES

UNITS = ("first", "twice", "partly", "frozen", "last")
KINDS = [(mode, sync) for mode in ("ZDP", "DP") for sync in ("every", "last")]
IN_NODES = [(mode, sync) for mode in ("HSDP", "HDP") for sync in ("every", "last", "node")]
MIXED = [*KINDS, ("hpZ", "every"), *IN_NODES]


class Knotted(Base):
    """Units of every sort: one called twice, one with a frozen weight, one all frozen; a parameter in the root."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first, self.twice = nn.Linear(7, 13), nn.Linear(13, 13)
        self.partly, self.frozen, self.last = nn.Linear(13, 11), nn.Linear(11, 11), nn.Linear(11, 3, bias=False)
        self.partly.weight.requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        x = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        return F.mse_loss(self.last(torch.tanh(self.frozen(torch.tanh(self.partly(x))))) * self.scale, y)

    def dataset(self):
        return OddMLP().dataset()


class Skipping(Knotted):
    """Leaves out a layer in every third micro-batch of an epoch, on all ranks the same."""

    def training_step(self, batch, batch_idx):
        self.is_left_out = batch_idx % 3 == 2
        return super().training_step(batch, batch_idx)

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        x = torch.tanh(self.first(x))
        if not self.is_left_out:
            x = torch.tanh(self.twice(x))
        return F.mse_loss(self.last(torch.tanh(self.frozen(torch.tanh(self.partly(x))))) * self.scale, y)


def plan_with(kinds, num_micro_batches, dtype="float64", of=Knotted):
    """A plan of `Knotted`, or a model like it, with a (mode, sync) for each of `UNITS`."""
    module = of().to(getattr(torch, dtype))
    modes = {unit: mode for unit, (mode, _) in zip(UNITS, kinds, strict=True)}
    plan = plan_of(
        module, modes, world_size=dist.get_world_size(), micro_batch_size=4, num_micro_batches=num_micro_batches
    )
    syncs = {unit: sync for unit, (_, sync) in zip(UNITS, kinds, strict=True)}
    units = tuple(dataclasses.replace(unit, sync=syncs.get(unit.name, "every")) for unit in plan.units)
    if any(NAMED_MODES[mode].needs_nodes for mode, _ in kinds):
        units = tuple(unit if unit.name else dataclasses.replace(unit, modes=("HDP",)) for unit in units)
        plan = dataclasses.replace(plan, node_size=2)
    return dataclasses.replace(plan, units=units)


def mixes(seed, number, of=KINDS):
    """So many random choices of kinds."""
    chosen = random.Random(seed)
    return [[chosen.choice(of) for _ in UNITS] for _ in range(number)]


def fitted(strategy, *, kind=Knotted, optimizer="adamw", dtype="float64", callbacks=(), ckpt_path=None, **options):
    """Whole state (on rank 0), and the trainer."""
    is_ours = isinstance(strategy, OSDPStrategy)
    if dtype == "float64":
        options |= {"plugins": [OSDPPrecision("64-true")]} if is_ours else {"precision": "64-true"}
    module = kind(optimizer).to(getattr(torch, dtype))
    fit = trainer(strategy, callbacks=list(callbacks), **{"max_epochs": -1, **options})
    loader = module.loader(dist.get_rank(), dist.get_world_size())
    fit.fit(module, loader, DataLoader(module.dataset(), batch_size=16), ckpt_path=ckpt_path)
    state = fit.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}, fit


def by_ddp(**options):
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters="kind" in options)
    return fitted(strategy, **options)


def difference(found, expected):
    return largest_difference(found, expected) if dist.get_rank() == 0 else 0.0


def equals_ddp(cases, *, num_micro_batches, **options):
    """Differences from DDP after five steps, one for each list of kinds."""
    if num_micro_batches is not None:
        options["accumulate_grad_batches"] = num_micro_batches
    expected, _ = by_ddp(**options)
    return [
        difference(fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), **options)[0], expected)
        for plan in (plan_with(kinds, num_micro_batches or 1, options.get("dtype", "float64")) for kinds in cases)
    ]


def combinations(num_micro_batches, num_mixes, in_nodes=False):
    """Differences from DDP of each kind alone and of mixes: in epochs of 7 batches, so with a shorter last window."""
    alone, mixed = (IN_NODES, MIXED) if in_nodes else (KINDS, KINDS)
    cases = [[kind] * len(UNITS) for kind in alone] + mixes(num_micro_batches, num_mixes, mixed)
    return equals_ddp(cases, num_micro_batches=num_micro_batches, limit_train_batches=7)


def several_mixes(numbers):
    """Differences from DDP of a mix of kinds for each of these numbers of micro-batches."""
    return [equals_ddp(mixes(7 + number, 1), num_micro_batches=number, limit_train_batches=7)[0] for number in numbers]


class Schedule(GradientAccumulationScheduler):
    def __init__(self):
        super().__init__({0: 1, 1: 3, 2: 2})


def within_lightning(in_nodes=False):
    """Differences from DDP where Lightning does something inside or between windows."""
    kinds = [*mixes(5, 1), [("DP", "last")] * len(UNITS)]
    if in_nodes:
        kinds = [*mixes(5, 1, MIXED), [("HDP", "node")] * len(UNITS)]
    inside = {"num_micro_batches": 3, "limit_train_batches": 7}
    return {
        "validation": equals_ddp(kinds, **inside, val_check_interval=2, limit_val_batches=1),
        "norm": equals_ddp(kinds, **inside, gradient_clip_val=0.05),
        "value": equals_ddp(kinds, **inside, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
        "schedule": equals_ddp(
            kinds, num_micro_batches=None, callbacks=[Schedule()], limit_train_batches=4, max_steps=8
        ),
        "skipped": equals_ddp(kinds, num_micro_batches=3, limit_train_batches=6, kind=Skipping),
        "sgd": equals_ddp(kinds, **inside, optimizer="sgd", dtype="float32"),
        "adamw": equals_ddp(kinds, **inside, dtype="float32"),
    }


@contextmanager
def counted_collectives():
    """Counts calls by name while it is open."""
    names = {"all_gather_single": "gather", "reduce_scatter_single": "reduce"}
    functions, counts = {name: getattr(dist, name) for name in names}, Counter()

    def counting(name):
        def call(*args, **kwargs):
            counts[names[name]] += 1
            return functions[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


class PerStep(Callback):
    """Collectives of each optimizer step."""

    reads_parameters = False

    def __init__(self, counts):
        self.counts, self.found, self.before, self.step = counts, [], Counter(counts), 0

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            self.found.append(self.counts - self.before)
            self.before = Counter(self.counts)


def expected_collectives(kinds, number):
    """By the table: of each unit, and of the root, which is a DP unit that reduces in every micro-batch.

    ``fully_shard`` frees a unit after each of its calls in backward, and gathers it again for the one before; what it
    has added up by then is reduced by itself.
    """
    gathers, reduces = number, number
    for unit, (mode, sync) in zip(UNITS, kinds, strict=True):
        calls = 2 if unit == "twice" else 1
        again = calls - 1
        gathers += number * (calls + 1 + again) if mode == "ZDP" else (1 if sync == "last" else number) * (1 + again)
        reduces += 0 if unit == "frozen" else 1 + (again and number > 1) if sync == "last" else number
    return {"gather": gathers, "reduce": reduces}


def collectives():
    """Of every step of mixes and of each kind alone, with what the table says."""
    found = []
    for number, kinds in itertools.product((1, 3), [[kind] * len(UNITS) for kind in KINDS] + mixes(9, 2)):
        with counted_collectives() as counts:
            steps = PerStep(counts)
            options = {"accumulate_grad_batches": number, "limit_train_batches": 9, "callbacks": [steps]}
            # Ahead of a module that is called twice, it gathers once in vain.
            plan = dataclasses.replace(plan_with(kinds, number), backward_prefetch="none")
            fitted(OSDPStrategy(plan=plan), **options)
        found.append((steps.found, expected_collectives(kinds, number)))
    return found


class SaveAt(Callback):
    """Saves a checkpoint after so many batches of an epoch."""

    def __init__(self, path, batch_idx):
        self.path, self.at = path, batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.at:
            trainer.save_checkpoint(self.path)


def saves_and_resumes(state_dict_type):
    """Differences from an undisturbed run of one saved inside a window, and of one resumed between two windows."""
    kinds, folder = mixes(3, 1)[0], shared_folder()
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 6, "max_steps": -1, "max_epochs": 2}

    def run(**more):
        plan = plan_with(kinds, 3)
        state, fit = fitted(OSDPStrategy(plan=plan, state_dict_type=state_dict_type), **options, **more)
        if state_dict_type == "sharded":
            fit.strategy._state_dict_type = "full"
            state = {k: v.detach().clone() for k, v in fit.strategy.lightning_module_state_dict().items()}
        return state

    undisturbed = run()
    inside = run(callbacks=[SaveAt(folder / "inside.ckpt", 1)])
    keeper = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    kept = run(callbacks=[keeper], enable_checkpointing=True)
    resumed = run(ckpt_path=str(folder / "epoch=0.ckpt"))
    return [difference(state, undisturbed) for state in (inside, kept, resumed)]


class Interrupted(Knotted):
    """Raises once inside backward, in the second micro-batch."""

    def loss(self, batch):
        loss = super().loss(batch)
        if not hasattr(self, "raised") and len(self.found) == 1 and self.training:
            self.raised = True
            loss.register_hook(_raise)
        return loss


def _raise(_):
    raise ValueError("inside backward")


def interrupted():
    """What is left of the choice after an error inside backward."""
    plan = plan_with([("DP", "last")] * len(UNITS), 3, "float32")
    strategy, module = OSDPStrategy(plan=plan), Interrupted()
    fit = trainer(strategy, accumulate_grad_batches=3)
    try:
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    except ValueError as error:
        text = str(error)
    groups = [internals.group_of(unit) for unit in strategy.model.modules() if isinstance(unit, FSDPModule)]
    synchronise = [group.reduce_grads and group.reshard_after_backward for group in groups]
    return text.splitlines()[0], len(synchronise), all(synchronise)


def after_fit():
    """Validation loss after a fit that ended right after a window, and the plain model's with the same weights."""
    plan = plan_with([("DP", "last"), ("ZDP", "last")] + [("DP", "last")] * 3, 3)
    state, fit = fitted(OSDPStrategy(plan=plan), accumulate_grad_batches=3, limit_val_batches=1.0)
    loader = DataLoader(Knotted().dataset(), batch_size=16)
    loss = fit.validate(fit.lightning_module, loader, verbose=False)[0]["val_loss"]
    if dist.get_rank() != 0:
        return loss, loss
    plain = Knotted().double()
    plain.load_state_dict(state)
    return loss, float(plain.loss(plain.dataset()[:]))


def in_mixed_precision(precision):
    """Largest difference between reducing in every micro-batch and in the last, and how far training moved."""
    runs = [
        fitted(
            OSDPStrategy(plan=plan_with([kind] * len(UNITS), 4, "float32")),
            optimizer="sgd",
            dtype="float32",
            precision=precision,
            accumulate_grad_batches=4,
        )[0]
        for kind in KINDS
    ]
    start = Knotted("sgd").state_dict()
    return [difference(run, runs[0]) for run in runs[1:]], difference(start, runs[0])
