"""Units that reduce gradients in the last micro-batch only: trained as under DDP, with the collectives of the table."""

import dataclasses
import itertools
import random
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from lightning_osdp.apply.internals import access, gathering, in_flight
from tests.distributed.support.fits import shared_folder, trainer
from tests.distributed.support.knotted import UNITS, Knotted, SaveAt, difference, equals_ddp, fitted, plan_with
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

KINDS = [(mode, sync) for mode in ("ZDP", "DP") for sync in ("every", "last")]
IN_NODES = [(mode, sync) for mode in ("HSDP", "HDP") for sync in ("every", "last", "node")]
MIXED = [*KINDS, ("hpZ", "every"), *IN_NODES]


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


def mixes(seed, number, of=KINDS):
    """Draws so many random choices of kinds."""
    chosen = random.Random(seed)
    return [[chosen.choice(of) for _ in UNITS] for _ in range(number)]


def combinations(num_micro_batches, num_mixes, in_nodes=False):
    """Differences from DDP of each kind alone and of mixes: in epochs of 7 batches, so with a shorter last window."""
    alone, mixed = (IN_NODES, MIXED) if in_nodes else (KINDS, KINDS)
    cases = [[kind] * len(UNITS) for kind in alone] + mixes(num_micro_batches, num_mixes, mixed)
    return equals_ddp(cases, num_micro_batches=num_micro_batches, limit_train_batches=7, max_steps=4)


def several_mixes(numbers):
    """Differences from DDP of a mix of kinds for each of these numbers of micro-batches."""
    return [equals_ddp(mixes(7 + number, 1), num_micro_batches=number, limit_train_batches=7)[0] for number in numbers]


class Schedule(GradientAccumulationScheduler):
    def __init__(self):
        super().__init__({0: 1, 1: 3, 2: 2})


INSIDE = {"num_micro_batches": 3, "limit_train_batches": 7}
BY_LIGHTNING = {
    "validation": {**INSIDE, "val_check_interval": 2, "limit_val_batches": 1},
    "norm": {**INSIDE, "gradient_clip_val": 0.05},
    "value": {**INSIDE, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "schedule": {"num_micro_batches": None, "limit_train_batches": 4, "max_steps": 8},
    "skipped": {"num_micro_batches": 3, "limit_train_batches": 6, "kind": Skipping},
    "sgd": {**INSIDE, "optimizer": "sgd", "dtype": "float32"},
    "adamw": {**INSIDE, "dtype": "float32"},
}


def within_lightning(names, in_nodes=False):
    """Differences from DDP where Lightning does something inside or between windows."""
    kinds = [*mixes(5, 1), [("DP", "last")] * len(UNITS)]
    if in_nodes:
        kinds = [*mixes(5, 1, MIXED), [("HDP", "node")] * len(UNITS)]
    callbacks = {"schedule": {"callbacks": [Schedule()]}}
    return {
        name: equals_ddp(
            kinds[:1] if name in ("value", "sgd", "adamw") else kinds, **BY_LIGHTNING[name], **callbacks.get(name, {})
        )
        for name in names
    }


@contextmanager
def counted_collectives():
    """Counts calls by name while it is open."""
    names = {(gathering, "all_gather"): "gather", (in_flight, "begin_all_to_all"): "reduce"}
    functions, counts = {place: getattr(*place) for place in names}, Counter()

    def counting(place):
        def call(*args, **kwargs):
            counts[names[place]] += 1
            return functions[place](*args, **kwargs)

        return call

    for place in names:
        setattr(*place, counting(place))
    try:
        yield counts
    finally:
        for place, function in functions.items():
            setattr(*place, function)


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
    """Counts collectives by the table: of each unit, and of the root, a DP unit that reduces in every micro-batch.

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
    """Counts collectives of every step of mixes and of each kind alone, beside what the table says."""
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


def saves_and_resumes(state_dict_type):
    """Differences from an undisturbed run of one saved inside windows and between them, and of one resumed between."""
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
    keeper = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    saved = run(callbacks=[SaveAt(folder / "inside.ckpt", 1), keeper], enable_checkpointing=True)
    resumed = run(ckpt_path=str(folder / "epoch=0.ckpt"))
    return [difference(state, undisturbed) for state in (saved, resumed)]


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
    """Returns the error inside backward, the number of units, and if all reduce and reshard again."""
    plan = plan_with([("DP", "last")] * len(UNITS), 3, "float32")
    strategy, module = OSDPStrategy(plan=plan), Interrupted()
    fit = trainer(strategy, accumulate_grad_batches=3)
    try:
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    except ValueError as error:
        text = str(error)
    groups = [access.group_of(unit) for unit in strategy.model.modules() if isinstance(unit, FSDPModule)]
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


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "num_mixes"),
    [(2, 3, 1), slow(2, 3, 2), slow(2, 2, 2), slow(4, 4, 1)],
)
def test_each_kind_of_unit_and_mixes_equal_ddp(ranks, world_size, num_micro_batches, num_mixes):
    found = ranks(world_size).run(combinations, num_micro_batches=num_micro_batches, num_mixes=num_mixes)[0]
    assert len(found) == 4 + num_mixes
    assert max(found) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [slow(2), 3])
def test_each_kind_of_unit_in_nodes_and_mixes_equal_ddp(ranks, num_micro_batches):
    found = ranks(4).run(combinations, num_micro_batches=num_micro_batches, num_mixes=2, in_nodes=True)[0]
    assert len(found) == 6 + 2
    assert max(found) < 1e-9


@pytest.mark.parametrize(("world_size", "numbers"), [slow(2, (1, 4)), slow(4, (1, 2, 3))])
def test_mixes_equal_ddp_with_any_number_of_micro_batches(ranks, world_size, numbers):
    found = ranks(world_size).run(several_mixes, numbers=numbers)[0]
    assert len(found) == len(numbers)
    assert max(found) < 1e-9


@pytest.mark.parametrize(
    ("world_size", "names", "in_nodes"),
    [
        (2, ["validation", "schedule", "skipped"], False),
        slow(2, [*BY_LIGHTNING], False),
        slow(4, [*BY_LIGHTNING], True),
    ],
)
def test_what_lightning_does_in_and_between_windows_equals_ddp(ranks, world_size, names, in_nodes):
    found = ranks(world_size).run(within_lightning, names=names, in_nodes=in_nodes)[0]
    tolerances = {
        "validation": 1e-9,
        "norm": 1e-7,
        "value": 1e-9,
        "schedule": 1e-9,
        "skipped": 1e-9,
        "sgd": 1e-6,
        "adamw": 1e-4,
    }
    within = {name: max(differences) < tolerances[name] for name, differences in found.items()}
    assert within == dict.fromkeys(names, True), found


@pytest.mark.slow
def test_collectives_of_a_step_are_those_of_the_table(ranks):
    for steps, expected in ranks(2).run(collectives)[0]:
        assert len(steps) == 5
        assert [dict(step) for step in steps] == [expected] * 5


@pytest.mark.parametrize("state_dict_type", [slow("full"), "sharded"])
def test_checkpoints_inside_and_between_windows(ranks, state_dict_type):
    assert ranks(2).run(saves_and_resumes, state_dict_type=state_dict_type)[0] == [0.0, 0.0]


def test_an_error_inside_backward_leaves_no_unit_unsynchronised(ranks):
    text, num_units, all_synchronise = ranks(2).run(interrupted)[0]
    assert text.endswith("inside backward")
    assert num_units == 6
    assert all_synchronise


def test_evaluation_after_fit_sees_the_trained_weights(ranks):
    found, expected = ranks(2).run(after_fit)[0]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_in_mixed_precision_what_is_kept_whole_differs_by_rounding(ranks, precision):
    differences, moved = ranks(2).run(in_mixed_precision, precision=precision)[0]
    assert max(differences) < 0.1 * moved
