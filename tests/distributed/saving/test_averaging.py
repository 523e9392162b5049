"""Lightning's averages of weights on shards: what they are under DDP, and what they cost."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from tests.distributed.support.fits import (
    SPACE,
    failure,
    fitted,
    in_nodes,
    largest_difference,
    plan_for,
    shared_folder,
    trainer,
)
from tests.distributed.support.models import GPT, WideMLP

pytestmark = pytest.mark.distributed


EPOCHS = {"max_steps": -1, "limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}


class Model(GPT):
    """GPT with a buffer that training changes, and validation that comes last before training ends."""

    def __init__(self):
        super().__init__("sgd")
        self.register_buffer("count", torch.zeros(()))
        self.validated = []

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.loss(batch))


def epochs(make, averaging, number, *, again=False, **resumed):
    """Trains, validates and saves so many epochs; returns the module, whole weights, the checkpoint and its path."""
    module, folder = Model(), shared_folder()
    keeper = ModelCheckpoint(dirpath=folder, filename="one", save_on_train_epoch_end=True)
    fit = trainer(make(), callbacks=[averaging(), keeper], enable_checkpointing=True, max_epochs=number, **EPOCHS)
    data = module.loader(dist.get_rank(), dist.get_world_size()), DataLoader(module.dataset(), batch_size=8)
    fit.fit(module, *data, **resumed)
    if again:
        fit.fit_loop.max_epochs = number + 1
        fit.fit(module, *data)
    fit.validate(module, data[1], verbose=False)
    fit.validate(module, data[1], ckpt_path="best", verbose=False)
    state = {name: value.detach().clone() for name, value in fit.strategy.lightning_module_state_dict().items()}
    path = fit.checkpoint_callback.best_model_path
    return module, state, torch.load(path, weights_only=False), path


def compared(found, expected):
    """Largest difference of losses, weights and what checkpoints have of both models."""
    module, state, checkpoint, _ = found
    reference, reference_state, reference_checkpoint, _ = expected
    numbers = [
        abs(float(a) - float(b))
        for a, b in zip(module.losses + module.validated, reference.losses + reference.validated, strict=True)
    ]
    entries = ["state_dict", "current_model_state", "averaging_state"]
    differences = [largest_difference(checkpoint[entry], reference_checkpoint[entry]) for entry in entries]
    if dist.get_rank() == 0:
        differences.append(largest_difference(state, reference_state))
    return max(numbers + differences)


def ddp():
    return DDPStrategy(process_group_backend="gloo")


AVERAGES = {
    "all alike": WeightAveraging,
    "exponential": lambda: EMAWeightAveraging(decay=0.5, use_buffers=False),
}


def averages(modes, again):
    """Differences from DDP of each average: of one that is fitted again, and of others resumed from a checkpoint."""
    plan = plan_for(Model(), "mixed", world_size=dist.get_world_size())
    plan = plan if modes == "mixed" else in_nodes(plan, modes)
    found = {}

    def osdp():
        return OSDPStrategy(plan=plan, node_size=plan.node_size)

    for name, averaging in AVERAGES.items():
        ours, ddps = (epochs(make, averaging, 1, again=name == again) for make in (osdp, ddp))
        found[name] = compared(ours, ddps)
        found[f"{name}, apart"] = largest_difference(ours[2]["state_dict"], ours[2]["current_model_state"])
        if name != again:
            resumed = epochs(osdp, averaging, 2, ckpt_path=ours[3])
            found[f"{name}, resumed"] = compared(resumed, epochs(ddp, averaging, 2, ckpt_path=ddps[3]))
    return found


def planned():
    """Peaks that were predicted and counted with an average, and predicted without; and what is refused."""
    peaks = {}
    for name, callbacks in {"with": [WeightAveraging()], "without": []}.items():
        fit = fitted(OSDPStrategy(search_space=SPACE, memory_limit="1GiB"), WideMLP("sgd"), callbacks=callbacks)
        monitor = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
        peaks[name] = fit.strategy.plan.peak_bytes, monitor.measured.peak_bytes
    stochastic = [StochasticWeightAveraging(0.01)]
    return {
        "peaks": peaks,
        "shard_bytes": sum(p.numel() * 4 for p in WideMLP().parameters()) / dist.get_world_size(),
        "stochastic": failure(lambda: fitted(OSDPStrategy(), WideMLP(), callbacks=stochastic)),
        "sharded": failure(
            lambda: fitted(OSDPStrategy(state_dict_type="sharded"), WideMLP(), callbacks=[WeightAveraging()])
        ),
    }


class OwnAverage(L.Callback):
    """An average that a user keeps, of shards, and saves as they are or whole."""

    def __init__(self, make):
        self.shadow, self.make = {}, make

    def on_train_batch_end(self, trainer, module, *_):
        for name, parameter in module.named_parameters():
            average = self.shadow.setdefault(name, parameter.detach().clone())
            average.mul_(0.5).add_(parameter.detach(), alpha=0.5)

    def state_dict(self):
        return {"shadow": {name: self.make(value) for name, value in self.shadow.items()}, "steps": len(self.shadow)}


class Noting(L.Callback):
    """Writes a shard into the checkpoint, on rank 0."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if trainer.is_global_zero:
            checkpoint["noted"] = [None, next(module.parameters())]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def saved_by_users():
    """Difference from DDP of an average that is saved whole, and what is refused where it is not."""
    shadows, refused = [], []
    plan = plan_for(Model(), "mixed", world_size=dist.get_world_size())
    for make in (ddp, lambda: OSDPStrategy(plan=plan)):
        fit, folder = fitted(make(), Model(), callbacks=[OwnAverage(whole)], max_steps=2), shared_folder()
        fit.save_checkpoint(folder / "one.ckpt")
        shadows.append(torch.load(folder / "one.ckpt", weights_only=True)["callbacks"]["OwnAverage"]["shadow"])
    for callback, kind in ((OwnAverage(lambda value: value), "full"), (Noting(), "sharded")):
        fit = fitted(OSDPStrategy(plan=plan, state_dict_type=kind), Model(), callbacks=[callback], max_steps=1)
        refused.append(failure(lambda fit=fit: fit.save_checkpoint(folder / "two.ckpt")))
    return largest_difference(*shadows), refused


@pytest.mark.slow  # tests/distributed/stationary/test_training.py compares averages with DDP's, too
@pytest.mark.parametrize(
    ("world_size", "modes", "again"),
    [(2, "mixed", "exponential"), (2, "mixed", "all alike"), *((4, "all", name) for name in AVERAGES)],
)
def test_averages_are_those_under_ddp_also_resumed_and_fitted_again(ranks, world_size, modes, again):
    for found in ranks(world_size).run(averages, modes=modes, again=again):
        for name in AVERAGES:
            assert found.pop(f"{name}, apart") > 1e-4
        assert max(found.values()) < 1e-6, found


def test_averages_that_users_keep_are_saved_whole_or_refused(ranks):
    for rank, (off, refused) in enumerate(ranks(2).run(saved_by_users)):
        assert off < 1e-6
        entries = ["['callbacks']['OwnAverage']['shadow']['positions']", "['noted'][1]"]
        for (kind, text), entry in zip(refused, entries, strict=True):
            assert f"Expected whole tensors and plain values in a checkpoint, but its entry {entry} is a shard" in text
            assert kind == ("OSDPError" if rank and "noted" in entry else "ConfigurationError")


@pytest.mark.slow
def test_an_average_is_planned_for_and_others_are_refused(ranks):
    for found in ranks(2).run(planned):
        (predicted, counted), (without, _) = found["peaks"]["with"], found["peaks"]["without"]
        assert predicted - without == pytest.approx(found["shard_bytes"], rel=0.01)
        assert counted == pytest.approx(predicted, rel=2e-3)
        name, text = found["stochastic"]
        assert name == "ConfigurationError"
        assert "Use WeightAveraging(), which averages all updates alike, or EMAWeightAveraging()" in text
        assert "Expected state_dict_type='full' with WeightAveraging" in found["sharded"][1]
