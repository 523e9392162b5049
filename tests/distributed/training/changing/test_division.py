"""Other micro-batches for the same optimizer steps: trained as DDP trains with the user's own, and truthfully told."""

import dataclasses
import logging
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPPrecision, OSDPStrategy, SearchSpace
from tests.distributed.support.fits import failure, shared_folder, trainer, with_stated_seconds, without_measuring
from tests.distributed.support.knotted import Knotted, SaveAt, difference, plan_with
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


SPACE = SearchSpace(min_unit_bytes=0, share_units=False)
KINDS = [("DP", "last"), ("ZDP", "every"), ("ZDP", "last"), ("DP", "every"), ("DP", "last")]


class Scheduled(Knotted):
    """Counts what it is given, and has a learning rate for every step of the training that it was told of."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(True)  # a plain checkpoint with frozen parameters does not load
        self.sizes, self.validated_after, self.rates, self.num_steps = set(), [], [], 0

    def training_step(self, batch, batch_idx):
        self.sizes.add(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self):
        self.validated_after.append(self.trainer.global_step)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.num_steps = self.trainer.estimated_stepping_batches
        loader = self.loader(dist.get_rank(), dist.get_world_size())
        self.counted = len(loader) // self.trainer.accumulate_grad_batches  # as recipes did before there was that
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(strategy, *, ckpt_path=None, module=None, **options):
    """Whole state (on rank 0), the module and the trainer, in float64."""
    is_ours = isinstance(strategy, OSDPStrategy)
    options |= {"plugins": [OSDPPrecision("64-true")]} if is_ours else {"precision": "64-true"}
    module = (module or Scheduled()).double()
    fit = trainer(strategy, **{"max_steps": -1, "max_epochs": 2, "num_sanity_val_steps": 0, **options})
    loader = module.loader(dist.get_rank(), dist.get_world_size())
    fit.fit(module, loader, DataLoader(module.dataset(), batch_size=80), ckpt_path=ckpt_path)
    state = fit.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}, module, fit


def ddp(**options):
    return fitted(DDPStrategy(process_group_backend="gloo"), **options)


def divided(size, number):
    return OSDPStrategy(plan=dataclasses.replace(plan_with(KINDS, number, of=Scheduled), micro_batch_size=size))


def seen(module, fit):
    return {
        "steps": fit.global_step,
        "told": (module.num_steps, module.counted),
        "rates": module.rates,
        "validated_after": module.validated_after,
    }


def plans_equal_ddp(cases):
    """Returns, for each (options, sizes), differences from DDP, and what was seen beside what DDP's module saw."""
    found = []
    for options, sizes in cases:
        expected, reference, reference_fit = ddp(**options)
        samples = 4 * options["accumulate_grad_batches"]
        for size in sizes:
            state, module, fit = fitted(divided(size, samples // size), **options)
            found.append(
                {
                    "difference": difference(state, expected),
                    "seen": (seen(module, fit), seen(reference, reference_fit)),
                    "size": (module.sizes, {size}),
                    "number": (fit.accumulate_grad_batches, samples // size),
                }
            )
    return found


def resumes_in_mid_epoch():
    """Resumes from 8 x 2, under plans of 4 x 4 and of 16 x 1, and from DDP's checkpoint, which DDP resumes in 4 x 4."""
    folder = shared_folder()
    options = {"accumulate_grad_batches": 4, "max_epochs": 1}
    fitted(divided(8, 2), callbacks=[SaveAt(folder / "ours.ckpt", 3)], **options)
    ddp(callbacks=[SaveAt(folder / "ddps.ckpt", 7)], **options)
    expected, _, reference = ddp(ckpt_path=str(folder / "ddps.ckpt"), **options)
    found = []
    for size, path in ((4, "ours.ckpt"), (16, "ours.ckpt"), (16, "ddps.ckpt")):
        state, module, fit = fitted(divided(size, 16 // size), ckpt_path=str(folder / path), **options)
        found.append((difference(state, expected), module.sizes, fit.accumulate_grad_batches, fit.global_step))
    return found, reference.global_step


def divides_after_validating():
    """Sizes and number of micro-batches that a fit after validation has, and whether it was measured."""
    module, options = Scheduled().double(), {"accumulate_grad_batches": 4, "max_steps": 1, "limit_val_batches": 1}
    fit = trainer(divided(8, 2), plugins=[OSDPPrecision("64-true")], **options)
    fit.validate(module, DataLoader(module.dataset(), batch_size=80), verbose=False)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return module.sizes, fit.accumulate_grad_batches, [type(callback).__name__ for callback in fit.callbacks]


@contextmanager
def said():
    """Collects what rank zero says meanwhile."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


@without_measuring
def chooses_for_itself():
    """Auto and a stated global batch, both against DDP; and what was said."""
    options = {"accumulate_grad_batches": 4, "limit_train_batches": 8, "val_check_interval": 8, "limit_val_batches": 1}
    expected, reference, reference_fit = ddp(**options)
    found = []
    stated = 16 * dist.get_world_size()
    for given, more in (({}, {}), ({"global_batch_size": stated}, {"accumulate_grad_batches": 1})):
        strategy = OSDPStrategy(memory_limit="64MiB", search_space=SPACE, batch_size="divide", **given)
        with said() as texts:
            state, module, fit = fitted(strategy, **{**options, **more})
        plan = strategy.plan
        found.append(
            {
                "difference": difference(state, expected),
                "seen": (seen(module, fit), seen(reference, reference_fit)),
                "planned": (plan.micro_batch_size, plan.num_micro_batches),
                "used": (module.sizes, fit.accumulate_grad_batches, fit.limit_train_batches),
                "said": [text for text in texts if "bytes on the wire" in text],
            }
        )
    return found


@without_measuring
def a_second_model_is_divided_from_the_users_own():
    """Trains two models on one Trainer: of each fit the planned micro-batch, those that the model saw, and K."""
    found = {}
    for name, given in (("number", {"batch_size": 8}), ("divide", {"batch_size": "divide", "memory_limit": "64MiB"})):
        strategy = OSDPStrategy(search_space=SPACE, **given)
        fit, found[name] = None, []
        for _ in range(2):
            if fit is None:
                _, module, fit = fitted(strategy, accumulate_grad_batches=4, max_epochs=1)
            else:
                module = Scheduled().double()
                fit.fit_loop.max_epochs = 2
                fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
            planned = strategy.plan.micro_batch_size, strategy.plan.num_micro_batches
            found[name].append((*planned, module.sizes, fit.accumulate_grad_batches))
    return found


class Normalised(Scheduled):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def loss(self, batch):
        return super().loss((self.norm(batch[0].to(self.norm.weight.dtype)), batch[1]))


class Every2(Scheduled):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        found["lr_scheduler"]["frequency"] = 2
        return found


@without_measuring
def keeps_what_is_there():
    """Returns what was trained with where the user's micro-batches stay, and what is said of that."""
    found = {}
    cases = {
        "norm": (Normalised(), {}),
        "frequency": (Every2(), {}),
        "schedule": (Scheduled(), {"callbacks": [GradientAccumulationScheduler({0: 2})], "accumulate_grad_batches": 1}),
        "limit": (Scheduled(), {"limit_train_batches": 7, "accumulate_grad_batches": 2, "val_check_interval": 7}),
        "keep": (Scheduled(), {}),
    }
    for name, (module, options) in cases.items():
        batch_size = "keep" if name == "keep" else "auto"
        strategy = OSDPStrategy(memory_limit="64MiB", search_space=SPACE, batch_size=batch_size)
        with said() as texts:
            _, _, fit = fitted(strategy, module=module, **{"accumulate_grad_batches": 2, "max_epochs": 1, **options})
        found[name] = (module.sizes, fit.accumulate_grad_batches, [text for text in texts if "stay" in text])
    return found


class Plain(Knotted):
    """Does nothing in a step but compute its loss."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Annealed(Plain):
    """Weighs its loss by how many steps there were."""

    num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        return self.loss(batch) / self.num_steps


class Averaged(Plain):
    """Moves an average in a hook."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def on_train_batch_end(self, *_):
        self.average.lerp_(torch.ones_like(self.average), 0.1)


class Queued(Plain):
    """Compares with samples of the steps before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, 3))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * (1 + self.queue.mean().abs())
        self.queue = torch.cat([batch[1].to(self.queue), self.queue])[:8]
        return loss


class EveryOther(Plain):
    """Model with another loss in every second batch."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx % 2)


UNASKED = {
    "plain": (Plain, None),
    "annealed": (Annealed, "num_steps is another after a batch than after its halves"),
    "averaged": (Averaged, "on_train_batch_end of Averaged runs once for each micro-batch"),
    "queue": (Queued, "queue is another after a batch than after its halves"),
    "index": (EveryOther, "training_step reads batch_idx, which counts micro-batches"),
}


@without_measuring
@with_stated_seconds
def divides_unasked_only_what_trains_the_same(names):
    """Differences from DDP of models with the default, their micro-batches, and why these stayed."""
    found, options = {}, {"accumulate_grad_batches": 4, "max_epochs": 1}
    for name in names:
        make, _ = UNASKED[name]
        expected, _, _ = ddp(module=make(), **options)
        strategy = OSDPStrategy(memory_limit="64MiB", search_space=SPACE)
        with said() as texts:
            state, _, fit = fitted(strategy, module=make(), **options)
        size = strategy.plan.micro_batch_size, fit.accumulate_grad_batches
        found[name] = difference(state, expected), size, [text for text in texts if "stay" in text]
    return found


@without_measuring
def refused():
    """Errors of global batches that cannot be had."""
    world_size = dist.get_world_size()

    def text(*, accumulate_grad_batches=1, **options):
        strategy = OSDPStrategy(memory_limit="64MiB", search_space=SPACE, **options)
        return failure(lambda: fitted(strategy, accumulate_grad_batches=accumulate_grad_batches))[1]

    whole = plan_with(KINDS, 2, "float32")
    strategy = OSDPStrategy(plan=whole, accumulate_in_fp32=True)
    fit = trainer(strategy, precision="bf16-mixed", accumulate_grad_batches=2)
    module = Knotted()
    return [
        text(global_batch_size=8 * world_size + 1),
        text(global_batch_size=8 * world_size, accumulate_grad_batches=3),
        text(global_batch_size=6 * world_size, batch_size="keep"),
        failure(lambda: fit.fit(module, module.loader(dist.get_rank(), world_size)))[1],
    ]


CASES = [
    ({"accumulate_grad_batches": 4}, (2, 8, 16)),
    # 80 samples a rank in windows of 32: the last has 16
    ({"accumulate_grad_batches": 8, "max_epochs": 1}, (8, 16)),
    ({"accumulate_grad_batches": 4, "limit_train_batches": 6, "val_check_interval": 2, "limit_val_batches": 1}, (2, 8)),
    (
        {"accumulate_grad_batches": 2, "val_check_interval": 0.5, "limit_val_batches": 1, "gradient_clip_val": 0.05},
        (8,),
    ),
]


def check(found):
    for one in found:
        ours, ddps = one["seen"]
        assert ours["rates"] == pytest.approx(ddps["rates"])
        assert {**ours, "rates": None} == {**ddps, "rates": None}
        assert one["difference"] < 1e-7  # clipping by norm differs by 1e-6 of it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "chosen"),
    [(2, CASES), slow(4, [({"accumulate_grad_batches": 4}, (2, 8))])],
)
def test_the_same_steps_in_other_micro_batches(ranks, world_size, chosen):
    found = ranks(world_size).run(plans_equal_ddp, cases=chosen)[0]
    check(found)
    for one in found:
        assert one["size"][0] == one["size"][1]
        assert one["number"][0] == one["number"][1]


@pytest.mark.slow
def test_a_resumed_run_counts_as_its_checkpoint_does(ranks):
    found, steps = ranks(2).run(resumes_in_mid_epoch)[0]
    assert [(sizes, number) for _, sizes, number, _ in found] == [({8}, 2), ({8}, 2), ({4}, 4)]
    assert {global_step for *_, global_step in found} == {steps}
    assert max(difference for difference, *_ in found) < 1e-9


@pytest.mark.slow
def test_a_trainer_that_trains_a_second_model_begins_with_the_users_own_micro_batches(ranks):
    found = ranks(2).run(a_second_model_is_divided_from_the_users_own)[0]
    for fits in found.values():
        for planned, number, sizes, accumulated in fits:
            assert sizes == {planned}
            assert accumulated == number
    assert [size * number for size, number, *_ in found["divide"]] == [16, 16]
    assert [size for size, *_ in found["number"]] == [8, 8]


def test_a_given_plan_divides_after_validation_too(ranks):
    for sizes, number, callbacks in ranks(2).run(divides_after_validating):
        assert (sizes, number) == ({8}, 2)
        assert callbacks[0] == "PlanMonitor"


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_the_strategy_divides_the_users_own_and_a_stated_global_batch(ranks, world_size):
    found = ranks(world_size).run(chooses_for_itself)[0]
    check(found)
    for one in found:
        size, number = one["planned"]
        assert size * number == 16
        assert one["used"] == ({size}, number, 32 // size)
        assert size > 4
        assert len(one["said"]) == 1
        assert one["said"][0].startswith(f"OSDP: b 4 -> {size}, K 4 -> {number}, ")


@pytest.mark.parametrize("names", [["plain", "queue"], slow([*UNASKED])])
def test_micro_batches_are_divided_unasked_only_where_that_trains_the_same(ranks, names):
    found = ranks(2).run(divides_unasked_only_what_trains_the_same, names=names)[0]
    assert list(found) == names
    for name, (apart, (size, number), texts) in found.items():
        assert apart < 1e-9, name
        reason = UNASKED[name][1]
        if reason is None:
            assert size > 4
            assert size * number == 16
            assert not texts
        else:
            assert (size, number) == (4, 4), name
            (text,) = texts
            assert text.startswith(f"OSDP: micro-batches stay 4 x 4: {reason}. batch_size='divide', which does not"), (
                text
            )
            assert "times the samples/s predicted." in text


@pytest.mark.slow
def test_micro_batches_stay_where_others_would_train_differently(ranks):
    found = ranks(2).run(keeps_what_is_there)[0]
    assert {name: (sizes, number) for name, (sizes, number, _) in found.items()} == {
        "norm": ({4}, 2),
        "frequency": ({4}, 2),
        "schedule": ({4}, 2),
        "limit": ({4}, 2),
        "keep": ({4}, 2),
    }
    said = {name: texts[0].removeprefix("OSDP: micro-batches stay ") for name, (_, _, texts) in found.items() if texts}
    assert said.pop("limit").startswith("4 x 2: sizes[0] is another after a batch than after its halves. ")
    assert said == {
        "norm": "4 x 2: norm normalises over the samples of a micro-batch.",
        "frequency": "4 x 2: a learning-rate schedule with frequency 2 counts micro-batches.",
        "schedule": "4 x 1: a GradientAccumulationScheduler changes the number of micro-batches.",
    }


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_global_batches_that_cannot_be_had_are_refused(ranks, world_size):
    uneven, both, kept, coarse = ranks(world_size).run(refused)[0]
    n = world_size
    assert uneven == (f"Expected a global_batch_size that {n} ranks can share, got {8 * n + 1}. Use a multiple of {n}.")
    assert both.startswith(f"Expected global_batch_size={8 * n}, but batches of 4 with accumulate_grad_batches=3 on")
    assert kept == (
        f"Expected micro-batches that divide global_batch_size={6 * n}, which is 6 samples a rank, got 4. Let the"
        " loader give a divisor of it."
    )
    assert coarse.startswith("Expected a plan with sync='every' for accumulate_in_fp32=True in bf16-mixed, got sync=")
