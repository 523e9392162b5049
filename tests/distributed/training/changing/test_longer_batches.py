"""Batches that become longer than planned for: all ranks change to a plan that has room for them, and back."""

import dataclasses
import functools
import warnings
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPPrecision, OSDPStrategy, Plan, PlanMonitor, SearchSpace, change_plan
from lightning_osdp.callbacks import peak
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.strategy import longer_batches
from lightning_osdp.strategy.sharding.units import reusable_model
from tests.distributed.support.fits import (
    largest_difference,
    shared_folder,
    trainer,
    with_stated_seconds,
    without_measuring,
)
from tests.distributed.support.models import Base
from tests.distributed.support.user_runs import ddp
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

WIDTH, HEADS, SAMPLES = 32, 2, 2
FIRST = 2
"""Length of the batches that are planned for."""
EVERYTHING = SearchSpace(min_unit_bytes=1024, sync=("every",))
SPACE = dataclasses.replace(EVERYTHING, activations=("keep", "recompute"), slices=(1,))
"""Plans among which those for longer batches are: levels and slices are searched for seconds, and are in none."""


class Block(nn.Module):
    """Eager attention, whose memory grows with the square of the length, and a feedforward part."""

    def __init__(self):
        super().__init__()
        # a bias of keys has no gradient but rounding, which AdamW would make steps of
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        samples, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(samples, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
        x = x + self.out((F.dropout(weights, 0.1) @ value).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Reader(Base):
    """Blocks on sequences, whose lengths are those of the batch."""

    def __init__(self, num_blocks=6):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def loss(self, batch):
        x = batch.to(self.blocks[0].out.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batches(lengths):
    """A loader of this rank's batches of these lengths; a pair has one for each of two ranks."""
    own = [length if isinstance(length, int) else length[dist.get_rank()] for length in lengths]
    generator = torch.Generator().manual_seed(dist.get_rank())
    return DataLoader([torch.randn(SAMPLES, length, WIDTH, generator=generator) for length in own], batch_size=None)


class Recorder(L.Callback):
    """Record of the number of the plan under which each batch was trained."""

    reads_parameters = False

    def __init__(self):
        self.numbers, self.plans = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        longer = getattr(trainer.strategy, "_longer", None)
        self.numbers.append(None if longer is None else longer.number)
        self.plans.append(getattr(trainer.strategy, "plan", None))


@without_measuring
def fitted(strategy, lengths, *, module=None, validated=(), accumulates=1, callbacks=(), going_back=0, **options):
    """A fit on batches of these lengths, of which steps are counted from the third on; its record, and what was told.

    ``going_back`` is the number of changes that time must have been lost for before the plan changes back.
    """
    torch.manual_seed(7 + dist.get_rank())
    module, recorder = Reader().double() if module is None else module, Recorder()
    is_ours = isinstance(strategy, OSDPStrategy)
    options |= {"plugins": [OSDPPrecision("64-true")]} if is_ours else {"precision": "64-true"}
    fit = trainer(
        strategy,
        max_steps=len(lengths) // accumulates,
        accumulate_grad_batches=accumulates,
        callbacks=[recorder, *callbacks],
        limit_val_batches=len(validated),
        num_sanity_val_steps=0,
        **options,
    )
    with (
        mock.patch.object(peak, "COUNTED_STEPS", 1000),
        mock.patch.object(longer_batches, "_NUM_CHANGES", going_back),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        fit.fit(module, batches(lengths), batches(validated) if validated else None)
    texts = [str(each.message) for each in told if "OSDP" in str(each.message)]
    return fit, module, recorder, texts


def weights_of(fit):
    state = fit.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in sorted(state.items())}


@functools.cache
def usual_bytes(space=SPACE, accumulates=1, num_blocks=6):
    """Peak of the plan for the first batches where memory does not matter: nothing is freed, and nothing recomputes."""
    strategy = OSDPStrategy(batch_size="keep", search_space=space)
    fit, *_ = fitted(strategy, [FIRST] * accumulates, module=Reader(num_blocks).double(), accumulates=accumulates)
    return fit.strategy.plan.peak_bytes


def limited(limit_bytes, *, space=SPACE, **options):
    return OSDPStrategy(batch_size="keep", search_space=space, memory_limit=f"{limit_bytes}B", **options)


def compared(lengths, *, space=SPACE, accumulates=1, room=1.02, num_blocks=6, short=(), **options):
    """A fit in little more memory than the first batches take, beside DDP; see `Short`."""
    limit_bytes, options["accumulates"] = round(room * usual_bytes(space, accumulates, num_blocks)), accumulates
    modules = [Short(dict.fromkeys(numbers, FIRST), num_blocks).double() for numbers in ((), short)]
    expected, module, *_ = fitted(ddp(), lengths, module=modules[0], accumulates=accumulates)
    fit, ours, recorder, told = fitted(limited(limit_bytes, space=space), lengths, module=modules[1], **options)
    monitor = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    weights, of_ddp = weights_of(fit), weights_of(expected)
    return {
        "limit": limit_bytes,
        "counted": max(min(peaks) for peaks in monitor._peak._peaks_bytes.values()),
        "sizes": len(monitor._peak._peaks_bytes),
        "numbers": recorder.numbers,
        "usual": recorder.plans[0],
        "last": fit.strategy.plan,
        "lasting": fit.strategy._units.model.lasting,
        "left": [each for each in fit.callbacks if isinstance(each, longer_batches.LongerBatches)],
        "losses": max(abs(a - b) for a, b in zip(ours.losses, module.losses, strict=True)),
        "weights": largest_difference(weights, of_ddp) if dist.get_rank() == 0 else 0.0,
        "told": told,
    }


GROWING = [FIRST] * 4 + [2 * FIRST] * 3 + [4 * FIRST] * 3 + [8 * FIRST] * 3


def grows():
    """Lengths that double up to eightfold, on all ranks, and short ones again."""
    return compared(GROWING + [FIRST] * 5, space=EVERYTHING)


def on_one_rank():
    """Long batches of one rank alone, now of this one and now of that one."""
    lengths = [FIRST] * 4 + [(FIRST, 8 * FIRST)] * 2 + [FIRST] * 3 + [(4 * FIRST, FIRST), FIRST, (FIRST, 8 * FIRST)]
    return compared(lengths)


@with_stated_seconds
def in_windows(sync):
    """Long batches of one rank alone, second in an optimizer step, whose first one has left gradients."""
    # four of the longest: a thread of gloo holds a tensor a moment longer in some, and the least peak counts
    lengths = [FIRST] * 6 + [FIRST, (FIRST, 8 * FIRST)] * 4 + [(4 * FIRST, FIRST), FIRST, FIRST, FIRST] + [FIRST] * 6
    space = dataclasses.replace(SPACE, sync=(sync,))
    return compared(lengths, space=space, accumulates=2, room=1.1, num_blocks=3)


def stays_long():
    """Numbers of plans where to change back would take longer than it saves."""
    strategy = limited(round(1.02 * usual_bytes()))
    _, _, recorder, _ = fitted(strategy, [FIRST] * 3 + [8 * FIRST] + [FIRST] * 4, going_back=1e9)
    return recorder.numbers


def too_long():
    """The errors of a fit with a batch, of one rank, that no plan has room for, and what was saved by then."""
    folder, limit_bytes = shared_folder(), round(1.02 * usual_bytes(num_blocks=2))
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2)
    lengths = [FIRST] * 4 + [(FIRST, 100 * FIRST)] + [FIRST] * 3
    module = Reader(num_blocks=2).double()
    options = {"module": module, "callbacks": [saved], "enable_checkpointing": True}
    with pytest.raises(InfeasibleError) as raised:
        fitted(limited(limit_bytes), lengths, **options)
    steps = module.trainer.global_step
    again, *_ = fitted(limited(limit_bytes), [FIRST] * 3, module=module)
    return str(raised.value), steps, str(folder / "step=4.ckpt"), again.global_step


class Short(Reader):
    """Has no memory left on rank 0 in backward, on batches longer than what some plans, by number, have room for."""

    def __init__(self, rooms, num_blocks):
        super().__init__(num_blocks)
        self.rooms = rooms
        self.blocks[0].register_forward_hook(lambda module, args, output: self.stop_in_backward(output))

    def stop_in_backward(self, output):
        longer = getattr(self.trainer.strategy, "_longer", None)
        room = output.shape[1] if longer is None else self.rooms.get(longer.number, output.shape[1])
        if output.requires_grad and output.shape[1] > room and dist.get_rank() == 0:
            output.register_hook(self.stop)

    def stop(self, _):
        raise torch.OutOfMemoryError("nothing is left")


SHORT = [FIRST] * 6 + [4 * FIRST, FIRST] * 2 + [(FIRST, 3 * FIRST)] + [FIRST] * 9
"""Lengths by micro-batch, of which a step has two."""


def turns_out_too_long():
    """A fit whose plan has less room for longer batches than was predicted, beside DDP."""
    return compared(SHORT, accumulates=2, room=1.3, num_blocks=3, short=(0,))


def has_no_room():
    """The error of a fit in which the plan for longer batches has no room, and later the one with least memory."""
    limit_bytes, longest = round(1.1 * usual_bytes(num_blocks=3)), 8 * FIRST
    module = Short({1: FIRST, 2: longest, 3: longest}, 3).double()
    with pytest.raises(InfeasibleError) as raised:
        fitted(limited(limit_bytes), [FIRST] * 3 + [longest, longest + 1], module=module)
    return str(raised.value)


class Reads(Reader):
    """Step that needs the memory of its batch, which fake tensors do not have."""

    def loss(self, batch):
        return super().loss(torch.from_numpy(batch.numpy()))


def cannot_be_profiled():
    limit_bytes = round(1.02 * usual_bytes(num_blocks=2))
    lengths = [FIRST] * 3 + [8 * FIRST] * 2
    fit, _, recorder, told = fitted(limited(limit_bytes), lengths, module=Reads(num_blocks=2).double())
    return fit.global_step, recorder.numbers, told


class Validating(Reader):
    def validation_step(self, batch, batch_idx):
        self.loss(batch)


class Counting(L.Callback):
    """Peak of live bytes in each batch of validations, and the number of the plan under which it was run."""

    reads_parameters = False

    def __init__(self):
        self.peaks_bytes, self.numbers = [], []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.live = LiveBytes("cpu")
        self.live.track([*peak.planned_tensors(trainer), batch])
        self.live.__enter__()

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.live.__exit__(None, None, None)
        self.peaks_bytes.append(self.live.peak_bytes)
        self.numbers.append(trainer.strategy._longer.number)


def saves_and_validates():
    """Checkpoints and validations, on batches longer than any, under the plan for longer batches, and what is left."""
    counting = Counting()
    folder, limit_bytes = shared_folder(), round(1.1 * usual_bytes(num_blocks=3))
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit, module, recorder, _ = fitted(
        limited(limit_bytes),
        [FIRST] * 3 + [8 * FIRST] * 3,
        module=Validating(num_blocks=3).double(),
        validated=[16 * FIRST],
        val_check_interval=2,
        callbacks=[saved, counting],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    stored = Plan.from_json(torch.load(folder / "step=5.ckpt", weights_only=False)["osdp_plan"])
    written = Plan.load(folder / "osdp_plan.json")
    again, *_ = fitted(limited(limit_bytes), [FIRST] * 2, module=module)
    is_usual = stored == written == fit.strategy.plan == again.strategy.plan
    return recorder.numbers, is_usual, len(counting.peaks_bytes), max(counting.peaks_bytes) / limit_bytes


VALIDATED = 40
"""Times that a validation batch is longer than the first: its forward fits where units are freed, and else does not."""


def validates():
    """Validation batches that the usual plan has no room for, with short ones before, of one rank alone, and after."""
    counting, limit_bytes = Counting(), round(1.02 * usual_bytes())
    validated = [FIRST, (FIRST, VALIDATED * FIRST), FIRST]
    options = {"module": Validating().double(), "validated": validated, "val_check_interval": 3}
    fit, _, recorder, told = fitted(limited(limit_bytes), [FIRST] * 6, callbacks=[counting], **options)
    lasting = fit.strategy._units.model.lasting
    return recorder.numbers, counting.numbers, max(counting.peaks_bytes) / limit_bytes, lasting, told


def ends_a_race():
    """A race in whose first turns a batch comes that its plans have no room for."""
    limit_bytes = round(1.02 * usual_bytes())
    with mock.patch.object(longer_batches, "rank_zero_info") as told:
        fit, _, recorder, _ = fitted(limited(limit_bytes, race=True), [FIRST] * 5 + [8 * FIRST] * 2 + [FIRST] * 70)
    races = fit.strategy._racing
    return recorder.numbers, races.is_over, fit.strategy.plan == recorder.plans[0], told.call_count


class Changing(L.Callback):
    """Change of the plan by a user, in a fit's fifth batch."""

    reads_parameters = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4:
            change_plan(pl_module, dataclasses.replace(trainer.strategy.plan, notes=("the user's",)))


def is_changed_by_hand(num_left):
    """Notes of the plans that a fit, and the next one, end under that a user changes for longer batches."""
    limit_bytes, module = round(1.02 * usual_bytes()), Reader().double()
    lengths = [FIRST] * 3 + [8 * FIRST] * 2 + [FIRST] * num_left
    _, _, recorder, _ = fitted(limited(limit_bytes), lengths, module=module, callbacks=[Changing()])
    model = reusable_model(module)
    of_both = [model.planned.notes, model.sharded.plan.notes]
    again, *_ = fitted(limited(limit_bytes), [FIRST], module=module)
    return recorder.numbers[3], model.lasting, [*of_both, again.strategy.plan.notes]


def check(found, *, sizes):
    for each in found:
        assert each["counted"] <= each["limit"]
        assert each["sizes"] >= sizes
        assert each["losses"] < 1e-11
        assert each["weights"] < 1e-11
        assert each["last"] is not None
        assert each["last"] == each["usual"]
        assert each["lasting"] is None
        assert each["left"] == []
        assert each["told"] == []
    assert len({tuple(each["numbers"]) for each in found}) == 1
    return found[0]["numbers"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_lengths_that_double_pass_no_limit_and_train_as_under_ddp(ranks, world_size):
    numbers = check(ranks(world_size).run(grows), sizes=4)
    assert numbers[:4] == [0] * 4
    long = numbers[4:13]
    assert long == sorted(long)
    assert min(long) > 0
    assert numbers[-1] == 0  # the second short step is the first that a plan has lost time before


@pytest.mark.slow  # the next test has such batches, too
def test_all_ranks_change_where_one_has_a_long_batch(ranks):
    numbers = check(ranks(2).run(on_one_rank), sizes=1)
    assert numbers[:4] == [0] * 4
    assert 0 not in numbers[4:6]
    assert numbers[8] == 0
    assert 0 not in {numbers[9], numbers[11]}


@pytest.mark.parametrize("sync", [slow("every"), "last"])
def test_a_plan_changes_between_two_micro_batches_of_a_step(ranks, sync):
    numbers = check(ranks(2).run(in_windows, sync=sync), sizes=1)
    assert numbers[:7] == [0] * 7
    assert numbers[7] > 0
    assert numbers[-1] == 0


def test_a_plan_that_turns_out_to_have_no_room_gives_way_to_the_one_with_least_memory(ranks):
    """Memory runs out on rank 0 in backward, in the first of two micro-batches."""
    found = ranks(2).run(turns_out_too_long)
    told = [each.pop("told") for each in found]
    numbers = check([{**each, "told": []} for each in found], sizes=1)
    assert numbers[:6] == [0] * 6
    assert (numbers[6], numbers[8], numbers[-1]) == (1, 1, 0)
    assert [len(each) for each in told] == [1, 0]
    assert told[0][0].startswith("OSDP: rank 0 ran out of memory in backward of ")
    assert told[0][0].endswith(
        "All ranks take the step again under the plan with least memory, and others with such batches."
    )


@pytest.mark.slow  # the one before it runs out of memory, too
def test_memory_that_runs_out_under_the_plan_with_least_of_it_ends_training(ranks):
    for text in ranks(2).run(has_no_room):
        assert "ank 0 ran out of memory in backward of " in text
        assert text.endswith("and resume from a checkpoint.")


@pytest.mark.slow
def test_a_plan_does_not_change_back_for_little(ranks):
    for numbers in ranks(2).run(stays_long):
        assert numbers == [0] * 3 + [1] * 5


def test_a_batch_that_no_plan_has_room_for_is_an_error_before_its_step(ranks):
    for text, steps, path, again in ranks(2).run(too_long):
        assert "Expected a plan that has room for the next step, but rank 1 has a batch (" in text
        assert f"[{SAMPLES}, {100 * FIRST}, {WIDTH}]) for which the one with least memory is predicted to take" in text
        assert "more than memory_limit" in text
        assert f"The last checkpoint is {path}." in text
        assert steps == 4
        assert again == 3


def test_batches_of_a_step_that_cannot_be_profiled_train_as_they_come(ranks):
    for rank, (steps, numbers, told) in enumerate(ranks(2).run(cannot_be_profiled)):
        assert steps == len(numbers) == 5
        assert {*numbers} == {0}
        assert rank or "one on rank 0 cannot be profiled" in " ".join(told)


def test_checkpoints_have_the_usual_plan(ranks):
    for numbers, is_usual, num_validated, share in ranks(2).run(saves_and_validates):
        assert numbers[:3] == [0] * 3
        assert 0 not in numbers[3:]
        assert is_usual
        assert num_validated == 3
        assert share <= 1


@pytest.mark.slow  # test_checkpoints_have_the_usual_plan validates, too
def test_validation_batches_that_are_longer_have_a_plan_of_their_own(ranks):
    for rank, (numbers, validated, share, lasting, told) in enumerate(ranks(2).run(validates)):
        assert numbers == [0] * 6
        assert validated == [0, 1, 1] * 2
        assert 0.8 * rank < share <= 1
        assert lasting is None
        assert told == []


@pytest.mark.slow
@pytest.mark.parametrize("num_left", [2, 0])
def test_a_plan_that_a_user_changes_to_meanwhile_stays(ranks, num_left):
    for number, lasting, notes in ranks(2).run(is_changed_by_hand, num_left=num_left):
        assert number > 0
        assert lasting is None
        assert notes == [("the user's",)] * 3


@pytest.mark.slow
def test_a_race_ends_where_batches_become_longer(ranks):
    for rank, (numbers, is_over, is_usual, told) in enumerate(ranks(2).run(ends_a_race)):
        assert 0 not in numbers[5:7]
        assert numbers[-1] == 0
        assert is_over
        assert is_usual
        assert rank or told == 1
