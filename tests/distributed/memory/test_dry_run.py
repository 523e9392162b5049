"""A step that each rank takes alone before the first one: it leaves nothing, and where memory runs out, all act."""

import dataclasses
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics.aggregation import MeanMetric

from lightning_osdp import OSDPStrategy
from lightning_osdp.apply import local
from lightning_osdp.apply.internals import gathering
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import OSDPError
from lightning_osdp.strategy.checkpointing.entries import read_plan
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values
from tests.distributed.support.fits import PROFILED, plan_for, shared_folder, trainer
from tests.distributed.support.models import BATCH_SIZE, Base, build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


CALLS = []
"""Micro-batches that a model has seen: what modules hold is restored after a dry run, this is not."""


class Gate(nn.Module):
    """The identity; runs out of memory on one rank where units of more than so many bytes are gathered.

    Args:
        phase: ``forward`` or ``backward``.
    """

    def __init__(self, phase="forward"):
        super().__init__()
        self.phase, self.root, self.most_bytes = phase, None, None

    def check(self, phase):
        if self.phase == phase and self.root is not None and dist.get_rank() == 1:
            gathered = sum(whole.untyped_storage().size() for whole in gathering.whole_storages(self.root()))
            if gathered > self.most_bytes:
                raise torch.OutOfMemoryError(f"{gathered} bytes are gathered, of {self.most_bytes}")

    def forward(self, x):
        self.check("forward")
        return _Checked.apply(x, self)


class _Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.gate.check("backward")
        return gradient, None


class Restless(Base):
    """Dropout, batch statistics, a metric, a counter: whatever a dry run might leave changed."""

    def __init__(self, phase="forward"):
        super().__init__()
        self.gate = Gate(phase)
        self.layers = nn.Sequential(
            nn.Linear(7, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 32), nn.Tanh()
        )
        self.last = nn.Linear(32, 3)
        self.mean, self.num_calls = MeanMetric(sync_on_compute=False), 0

    def loss(self, batch):
        self.num_calls += 1
        CALLS.append(self.num_calls)
        x, y = (t.float() for t in batch)
        loss = nn.functional.mse_loss(self.last(self.gate(self.layers(x))), y)
        if self._trainer is not None:
            dist.all_reduce(loss.detach().clone())  # a rank that failed before does not come here
        self.mean.update(loss.detach())
        self.log("mean", self.mean.compute())
        return loss

    def dataset(self):
        return build("odd_mlp").dataset()


def planned(modes="dp", *, number=2, sync=("last", "every"), **options):
    """A plan for `Restless`; units take turns in when they reduce."""
    plan = plan_for(Restless(), modes, world_size=dist.get_world_size(), num_micro_batches=number)
    units = [
        unit.treated(sync=sync[index % len(sync)] if unit.name and number > 1 else "every")
        for index, unit in enumerate(plan.units)
    ]
    return agreed(dataclasses.replace(plan, units=tuple(units), **options))


def agreed(value):
    """Returns rank 0's value on all ranks."""
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def fitted(plan, *, dry_run, module=None, folder=None, ckpt_path=None, most_bytes=None, max_steps=3, **options):
    """Fits, and returns the trainer, everything that a dry run must not change, and the number of calls."""
    torch.manual_seed(5)
    module = module or Restless()
    folder = folder or shared_folder()
    fit = trainer(
        OSDPStrategy(
            plan=plan,
            dry_run=dry_run,
            batch_size=options.pop("batch_size", "auto"),
            node_size=plan.node_size,
        ),
        max_steps=max_steps,
        default_root_dir=folder,
        logger=CSVLogger(folder, name="", version="logs"),
        log_every_n_steps=1,
        accumulate_grad_batches=options.pop("number", plan.num_micro_batches),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        **options,
    )
    if most_bytes is not None:
        module.gate.most_bytes, module.gate.root = most_bytes, lambda: fit.strategy.model
    CALLS.clear()
    loaders = [module.loader(dist.get_rank(), dist.get_world_size()) for _ in range(2)]
    fit.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=False)
    state = {name: value.detach().clone() for name, value in fit.strategy.lightning_module_state_dict().items()}
    left = {
        "state": [(name, value.tolist()) for name, value in state.items()],
        "losses": module.losses,
        "num_calls": module.num_calls,
        "buffers": [value.tolist() for value in module.buffers()],
        "drawn": torch.rand(3).tolist(),
        "metrics": {name: float(v) for name, v in fit.logged_metrics.items() if not name.startswith("osdp/")},
        "optimizer": [
            local(value).tolist() if isinstance(value, torch.Tensor) else value
            for entries in fit.strategy.optimizers[0].state.values()
            for value in entries.values()
        ],
    }
    return fit, left, len(CALLS)


def differences(modes, **options):
    """Returns names of what a dry run changes, from the start and resumed, how many more calls it takes, and notes."""
    found = {}
    plan = planned(modes)
    plain, expected, num_calls = fitted(plan, dry_run=False, **options)
    fit, left, more_calls = fitted(plan, dry_run=True, **options)
    found["from the start"] = [name for name in expected if left[name] != expected[name]], more_calls - num_calls
    options |= {"ckpt_path": agreed(str(Path(plain.default_root_dir) / "step=2.ckpt")), "max_steps": 5}
    _, expected, num_calls = fitted(plan, dry_run=False, **options)
    _, left, more_calls = fitted(plan, dry_run=True, **options)
    found["resumed"] = [name for name in expected if left[name] != expected[name]], more_calls - num_calls
    return found, fit.strategy.plan.notes


def runs_short(phase, most_bytes):
    """Memory runs out on rank 1 in this phase: the plan in use then, and how training differs from one given it."""
    folder = shared_folder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, module = planned(), Restless(phase)
        fit, left, _ = fitted(given, dry_run=True, folder=folder, module=module, most_bytes=most_bytes)
        again, _, _ = fitted(given, dry_run=False, module=module, max_steps=1)
    plan = fit.strategy.plan
    _, expected, _ = fitted(plan, dry_run=False)
    return {
        "differs": [name for name in expected if left[name] != expected[name]],
        "another Trainer's": again.strategy.plan is plan,
        "kept": [(unit.modes[0], unit.sync) for unit in plan.units],
        "notes": plan.notes,
        "monitored": fit.callbacks[0]._plan is plan,
        "saved": Plan.load(folder / "logs" / "osdp_plan.json") == plan,
        "in checkpoint": read_plan(folder / "step=3.ckpt") == plan,
    }


def counted(shares):
    """Notes, or the error, of plans whose limit is this share of what a step was counted to take."""
    plan = planned(number=1)
    fit, _, _ = fitted(plan, dry_run=False, max_steps=6)
    counted_bytes = max(all_gather_values(fit.callbacks[0].measured.peak_bytes))
    return [_outcome(dataclasses.replace(plan, memory_limit_bytes=int(share * counted_bytes))) for share in shares]


def _outcome(plan, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit, _, _ = fitted(plan, dry_run=True, **options)
        except OSDPError as error:
            return type(error).__name__, str(error)
    return fit.strategy.plan.notes


class Shrinks(Restless):
    """Runs out of memory on rank 1 with more than two samples; its loss is a mean that can be divided."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 32))
        self.sizes = []

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 2 and dist.get_rank() == 1 and self._trainer is not None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def loader(self, rank, world_size, batch_size=8):
        return super().loader(rank, world_size, batch_size)


def shrinks():
    """Returns what is in use after micro-batches of 8 ran out of memory: sizes, numbers of micro-batches, notes."""
    plan = plan_for(Shrinks(), "zdp", world_size=dist.get_world_size(), micro_batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit, _, _ = fitted(agreed(plan), dry_run=True, module=(module := Shrinks()))
    plan = fit.strategy.plan
    return {*module.sizes}, len(module.sizes), fit.accumulate_grad_batches, plan.num_micro_batches, plan.notes


class Odd(Restless):
    """Fails, but only in its first micro-batch, and not of memory."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(CALLS) == 1:
            raise ValueError("the loss is not a number")
        return loss


class Broken(Restless):
    """Breaks rank 1's device in its first micro-batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.get_rank() == 1 and len(CALLS) == 1:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return loss


def broken():
    """Returns the error of a device that is broken in a dry run."""
    try:
        fitted(planned(number=1), dry_run=True, module=Broken())
    except (OSDPError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


class Once(Restless):
    """Trains on a generator."""

    def loader(self, rank, world_size, batch_size=BATCH_SIZE):
        return iter([*super().loader(rank, world_size, batch_size)])


class Slow(torch.optim.Optimizer):
    """Holds the optimizer that steps, as wrappers of optimizers do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        loss = closure()
        self.inner.step()
        return loss


class Nested(Restless):
    def configure_optimizers(self):
        return Slow(super().configure_optimizers())


def cannot_tell():
    """Micro-batches that models saw which can have no dry run, or read from a generator, and whether losses differ."""
    plan = planned(number=1)
    found = []
    for cls in (Odd, Nested, Once):
        _, expected, _ = fitted(plan, dry_run=False, module=(Restless if cls is Odd else cls)())
        _, left, num_calls = fitted(plan, dry_run=True, module=cls())
        found.append((num_calls, left["losses"] == expected["losses"]))
    return found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 128), nn.Linear(128, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(self.up(x).tanh()), 0.1)


class Deep(Restless):
    """Blocks that save far more than they have parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.last = nn.Linear(8, 3)

    def loss(self, batch):
        x, y = (t.float() for t in batch)
        x = nn.functional.pad(x, (0, 1))[:, None, :].expand(-1, 64, -1)
        loss = nn.functional.mse_loss(self.last(self.gate(self.layers(x))).mean(1), y)
        self.mean.update(loss.detach())
        self.log("mean", self.mean.compute())
        return loss


def recomputes():
    """Returns notes, blocks and changed values of training where a plan can do nothing more but recompute."""
    with mock.patch.dict(PROFILED, activations=("keep", "recompute")):
        plan = agreed(plan_for(Deep(), "zdp", world_size=dist.get_world_size()))

    def counted(of, **options):
        fit, left, _ = fitted(of, dry_run=False, module=Deep(), max_steps=6, **options)
        return max(all_gather_values(fit.callbacks[0].measured.peak_bytes)), left

    least = dataclasses.replace(plan, blocks=plan.recomputable, recomputable=())
    (most_bytes, expected), (least_bytes, _) = counted(plan), counted(least)
    limit_bytes = (most_bytes + least_bytes) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tight = dataclasses.replace(plan, memory_limit_bytes=limit_bytes)
        fit, left, _ = fitted(tight, dry_run=True, module=Deep(), max_steps=6)
    peak_bytes = max(all_gather_values(fit.callbacks[0].measured.peak_bytes))
    return {
        "notes": fit.strategy.plan.notes,
        "could": [block.name for block in plan.recomputable],
        "blocks": [(block.name, block.activations) for block in fit.strategy.plan.blocks],
        "fits": peak_bytes <= limit_bytes < most_bytes,
        "differs": [name for name in expected if left[name] != expected[name]],
    }


COLUMNS = []
"""Columns of the weight in whose step rank 1 runs out of memory, as often as they are here."""


class Normed(torch.optim.Optimizer):
    """Scales each step by the norms over all ranks of the gradient and of the weight."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            if COLUMNS and COLUMNS[-1] == parameter.shape[-1] and dist.get_rank() == 1:
                COLUMNS.pop()
                raise torch.OutOfMemoryError("nothing is left")
            if parameter.grad is not None:
                scale = 0.01 * parameter.norm() / (1 + parameter.grad.norm())
                parameter.sub_(parameter.grad * scale)
        return loss


class ByNorms(Restless):
    def configure_optimizers(self):
        return Normed(self.parameters())


def short_in_the_optimizer(columns, times, node_size=None):
    """Notes after rank 1 ran out of memory so often in optimizers of dry runs; what differs from a plan like that."""
    plan = planned(number=1)
    if node_size is not None:
        units = [unit.in_modes("HDP") for unit in plan.units[:2]]
        plan = dataclasses.replace(plan, units=(*units, *plan.units[2:]), node_size=node_size)
    fitted(plan, dry_run=False, module=ByNorms())  # DTensors remember its mesh, which is equal to the next one
    COLUMNS[:] = [columns] * times
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit, left, _ = fitted(plan, dry_run=True, module=ByNorms())
        except OSDPError as error:
            return type(error).__name__, str(error)
        finally:
            COLUMNS.clear()
    lower = fit.strategy.plan
    _, expected, _ = fitted(lower, dry_run=False, module=ByNorms())
    return lower.notes, [name for name in expected if left[name] != expected[name]]


KINDS = ("DP", "every"), ("DP", "last"), ("ZDP", "every")


@pytest.mark.parametrize(
    ("world_size", "modes", "options"),
    [
        slow(1, "dp", {}),
        (2, "mixed", {"precision": "bf16-mixed"}),
        slow(2, "dp", {"limit_val_batches": 1}),
        slow(4, "mixed", {}),
    ],
)
def test_a_dry_run_changes_nothing(ranks, world_size, modes, options):
    # evaluation leaves units gathered
    for found, notes in ranks(world_size).run(differences, modes=modes, **options):
        assert found == {"from the start": ([], 2), "resumed": ([], 2)}
        assert notes == ()


@pytest.mark.parametrize(
    ("phase", "place"), [slow("forward", "forward of the root unit"), ("backward", "backward of 'last'")]
)
def test_what_one_rank_lacks_all_save_and_train_as_if_planned_so(ranks, phase, place):
    for found in ranks(2).run(runs_short, phase=phase, most_bytes=22000):
        assert found["notes"] == (
            f"dry run: rank 1 ran out of memory in {place}, so 2 units keep less, 18.2 KiB together",
        )
        assert found["kept"] == [KINDS[index] for index in (0, 2, 1, 2, 1, 0)]  # backward does not read the first
        assert found["differs"] == []
        assert found["another Trainer's"]
        assert found["monitored"]
        assert found["saved"]
        assert found["in checkpoint"]


def test_on_cpu_tensors_are_counted_against_the_limit(ranks):
    # Alone, too, a rank receives as much as it reduces.
    for fits, saves, (kind, text) in ranks(2).run(counted, shares=(1.01, 0.98, 0.5)):
        assert fits == ()
        assert 1 <= len(saves) <= 3
        assert "ran out of memory in backward of 'layers.2', so 2 units keep less, 18.2 KiB together" in saves[0]
        assert kind == "InfeasibleError"
        assert "in the dry run rank 0 ran out of memory in the optimizer step: MemoryError: live tensors take" in text
        assert "Use a smaller batch, more ranks or, where tensors are counted, a higher memory_limit" in text


def test_micro_batches_get_smaller_where_nothing_is_left_to_shard(ranks):
    for sizes, num_calls, number, planned, notes in ranks(2).run(shrinks):
        assert sizes == {2}
        assert num_calls == 3 * 4  # optimizer steps of 8 samples
        assert number == planned == 4
        assert [note.partition(", so ")[2] for note in notes] == [
            "micro-batches have 4 samples instead of 8",
            "micro-batches have 2 samples instead of 4",
        ]


@pytest.mark.slow
def test_what_says_nothing_of_memory_does_not_keep_from_training(ranks):
    assert ranks(2).run(cannot_tell) == [[(4, True), (3, True), (4, True)]] * 2


@pytest.mark.slow
def test_blocks_recompute_where_units_keep_nothing_and_training_is_the_same(ranks):
    for found in ranks(2).run(recomputes):
        assert found["could"] == [f"layers.{index}" for index in range(4)]
        assert 0 < len(found["blocks"]) < 4
        assert {activations for _, activations in found["blocks"]} == {"recompute"}
        told = [re.search(r"so (\d+) blocks? recomputes?, ", note) for note in found["notes"]]
        assert sum(int(each[1]) for each in told) == len(found["blocks"])
        assert found["fits"]
        assert found["differs"] == []


@pytest.mark.parametrize(("world_size", "node_size"), [(2, None), slow(4, 2)])
@pytest.mark.parametrize("columns", [slow(7), 64])  # columns of the first weight, and of one after it
def test_an_optimizer_that_takes_norms_over_all_ranks_waits_for_none_that_lacks_memory(
    ranks, world_size, node_size, columns
):
    pool = ranks(world_size)
    pool.timeout_s = 60
    for notes, differs in pool.run(short_in_the_optimizer, columns=columns, times=1, node_size=node_size):
        assert len(notes) == 1
        assert notes[0].startswith("dry run: rank 1 ran out of memory in the optimizer step, so ")
        assert differs == []


def test_all_ranks_fail_together_where_an_optimizer_never_has_the_memory(ranks):
    pool = ranks(2)
    pool.timeout_s = 60
    for kind, text in pool.run(short_in_the_optimizer, columns=7, times=100):
        assert kind == "InfeasibleError"
        assert "in the dry run rank 1 ran out of memory in the optimizer step" in text


def test_all_ranks_fail_together_where_a_dry_run_breaks_a_device(ranks):
    pool = ranks(2)
    pool.timeout_s = 60
    error = "CUDA error: device-side assert triggered"
    assert pool.run(broken) == [
        ("OSDPError", f"Rank 1 failed, so every rank stops: AcceleratorError: {error}"),
        ("AcceleratorError", error),
    ]
