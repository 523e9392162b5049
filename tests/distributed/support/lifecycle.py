"""Features of the Trainer, each run with a small model under a strategy and compared with the same under DDP."""

import tempfile
import time
from datetime import timedelta
from itertools import combinations, permutations
from typing import ClassVar
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values
from tests.distributed.support.by_hand import GAN
from tests.distributed.support.fits import EVERYTHING, plan_for, shared_folder, trainer, without_measuring
from tests.distributed.support.models import OddMLP


class Model(OddMLP):
    """Model with all the hooks, a metric, and a schedule of steps or epochs."""

    def __init__(self, interval=None):
        super().__init__("sgd")
        self.interval, self.rates = interval, []
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean.update(self.loss(batch))
        self.log("val_loss", self.mean)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.loss(batch).reshape(1)

    def on_train_batch_start(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def own_loader(self):
        return self.loader(dist.get_rank(), dist.get_world_size())


def floats(value):
    """Lists all numbers in what a Trainer returns, in order."""
    if isinstance(value, torch.Tensor):
        return value.float().flatten().tolist()
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value) if not key.startswith("osdp/")]
    return [number for entry in value for number in floats(entry)] if isinstance(value, list) else [float(value)]


def fitted(make, module=None, **options):
    """Fits with these options of the Trainer, and returns what is trained and logged."""
    module = Model() if module is None else module
    fit = trainer(make(), **options)
    fit.fit(module, module.own_loader(), DataLoader(module.dataset(), batch_size=8))
    return [fit.global_step, *module.losses, *module.rates, *floats(dict(fit.callback_metrics))]


def stages(make, order, again=(), num_steps=3):
    """Runs fit, validate, test and predict in this order, on one Trainer with one module; returns what they give."""
    module, found = Model(), []
    fit = trainer(make(), limit_val_batches=2, num_sanity_val_steps=0)
    data = DataLoader(module.dataset(), batch_size=8)
    for stage in (*order, *again):
        if stage == "fit":
            fit.fit_loop.epoch_loop.max_steps = fit.global_step + num_steps
            fit.fit(module, module.own_loader(), data)
            found += module.losses
        elif stage == "predict":
            found += floats(fit.predict(module, DataLoader(module.dataset(), batch_size=80)))
        else:
            found += floats(getattr(fit, stage)(module, data, verbose=False))
    return found


def on_other_trainers(make):
    """Returns what a module gives: one Trainer fits it, others fit, validate and predict, and the first fits again."""
    module, found = Model(), []
    data = DataLoader(module.dataset(), batch_size=8)
    fits = [trainer(make(), limit_val_batches=2) for _ in range(2)]
    for fit in (*fits, fits[0]):
        fit.fit_loop.epoch_loop.max_steps = fit.global_step + 3
        fit.fit(module, module.own_loader(), data)
        found += floats(trainer(make(), limit_val_batches=2).validate(module, data, verbose=False))
    found += floats(trainer(make()).predict(module, DataLoader(module.dataset(), batch_size=80)))
    return [*module.losses, *found]


def other_models(make):
    """Returns losses of models that one Trainer fits one after the other, as for cross-validation."""
    fit, found = trainer(make()), []
    for _ in range(3):
        module = Model()
        fit.fit_loop.epoch_loop.max_steps = fit.global_step + 3
        fit.fit(module, module.own_loader())
        found += module.losses
    return found


class Rated(Model):
    """Model whose learning rate a callback may find."""

    def __init__(self):
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def rate_found(make):
    """Returns the learning rate that a callback finds, and losses before and after."""
    module = Rated()
    return [*fitted(make, module, callbacks=[LearningRateFinder(num_training_steps=12)]), module.lr]


def in_orders(make):
    """Runs the even permutations: each stage after every set of others, and right after every other one."""
    names = ["fit", "validate", "test", "predict"]
    orders = [order for order in permutations(range(4)) if sum(a > b for a, b in combinations(order, 2)) % 2 == 0]
    return [number for order in orders for number in stages(make, [names[i] for i in order], num_steps=2)]


def in_precision(precision):
    """Returns a feature that tells if losses are about float32's: under other rounding they are not equal."""

    def run(make):
        module = Model()
        trainer(make(), precision=precision).fit(module, module.own_loader())
        reference = Model()
        trainer(DDPStrategy(process_group_backend="gloo")).fit(reference, reference.own_loader())
        close = all(abs(a - b) < 0.05 * b for a, b in zip(module.losses, reference.losses, strict=True))
        return [float(close), float(len(module.losses))]

    return run


def options(**given):
    return lambda make: fitted(make, **given)


def with_callback(callback, **given):
    return lambda make: fitted(make, callbacks=[callback()], **given)


def rates_logged(make):
    module = Model("step")
    return fitted(
        make, module, callbacks=[LearningRateMonitor("step")], logger=CSVLogger(tempfile.mkdtemp()), log_every_n_steps=1
    )


def out_of_time(make):
    """Tells if all ranks end at the same step, some steps after the first and long before the last."""
    module, last = Model(), 10**6
    fit = trainer(make(), max_steps=last, max_time=timedelta(seconds=1), callbacks=[SlowRank()])
    fit.fit(module, module.own_loader())
    steps = all_gather_values(fit.global_step)
    return [float(len(set(steps))), float(0 < steps[0] < last)]


class SlowRank(Callback):
    """Rank 1 takes longer than rank 0."""

    def on_train_batch_start(self, trainer, *_):
        time.sleep(0.01 * trainer.global_rank)


def with_metrics(make):
    """Returns if metrics in the module are where the model is, and what they compute over all ranks."""
    module = Model()
    fit = trainer(make(), limit_val_batches=3)
    loader = module.own_loader()
    fit.fit(module, loader, loader)
    on_device = module.mean.device == fit.strategy.root_device
    return [float(on_device), *floats(dict(fit.callback_metrics))]


class Normalised(Model):
    def __init__(self):
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(13))


def with_statistics(make):
    """Returns losses of training, and the statistics that a checkpoint has."""
    module, path = Normalised(), shared_folder() / "one.ckpt"
    fit = trainer(make())
    fit.fit(module, module.own_loader())
    fit.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    return [*module.losses, *(n for name in sorted(state) if "layers.1." in name for n in floats(state[name]))]


class Even(torch.nn.Linear):
    """Starts with the same values everywhere."""

    def reset_parameters(self):
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))


class FromNothing(Model):
    """Has its layers from `configure_model` on, which makes them without values but under DDP."""

    def configure_model(self):
        is_ddp = isinstance(self.trainer.strategy, DDPStrategy)
        if not isinstance(self.last, Even):
            with torch.device("cpu" if is_ddp else "meta"):
                self.layers, self.last = torch.nn.Sequential(Even(7, 6), torch.nn.Tanh(), Even(6, 5)), Even(5, 3)


def from_nothing(make):
    return fitted(make, FromNothing())


class Summaries(ModelSummary):
    """Keeps what it is to print, as numbers."""

    found: ClassVar = []

    @staticmethod
    def summarize(summary_data, total_parameters, trainable_parameters, model_size, *_, **__):
        told = crc32(repr(summary_data).encode())
        Summaries.found += [float(total_parameters), float(trainable_parameters), model_size, float(told)]


def summarised(make):
    """Sizes and layers that a summary shows of a module before it is fitted."""
    Summaries.found = []
    fitted(make, callbacks=[Summaries(max_depth=2)], enable_model_summary=True)
    return [0.0, *Summaries.found]


def manually(make):
    """Returns losses of a GAN whose two optimizers step inside its training_step."""
    module, strategy = GAN(), make()
    if isinstance(strategy, DDPStrategy):
        strategy._ddp_kwargs["find_unused_parameters"] = True  # parameters of the network whose turn it is not
    trainer(strategy, max_steps=10).fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return module.losses


EPOCHS = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 2}
FEATURES = {
    "fit, validate, test, predict: each after any of the others": in_orders,
    "fit again": lambda make: stages(make, ["fit"], ["fit", "validate"]),
    "one module on several Trainers": on_other_trainers,
    "one Trainer for several modules": other_models,
    "validate without fit": lambda make: stages(make, ["validate"]),
    "sanity validation": options(num_sanity_val_steps=2, limit_val_batches=2),
    "fast_dev_run": options(fast_dev_run=2),
    "overfit_batches": options(max_steps=-1, max_epochs=2, overfit_batches=2),
    "limit_train_batches, limit_val_batches": options(**EPOCHS),
    "val_check_interval": options(max_steps=6, val_check_interval=2, limit_val_batches=1),
    "max_time": options(max_time=timedelta(hours=1)),
    "max_time is over": out_of_time,
    "accumulate_grad_batches": options(max_steps=2, accumulate_grad_batches=2),
    "GradientAccumulationScheduler": with_callback(lambda: GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}), **EPOCHS),
    "LearningRateFinder": rate_found,
    "learning rates by step": lambda make: fitted(make, Model("step")),
    "learning rates by epoch": lambda make: fitted(make, Model("epoch"), **EPOCHS),
    "clipping by norm": options(gradient_clip_val=0.01),
    "clipping by value": options(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "StochasticWeightAveraging": with_callback(lambda: StochasticWeightAveraging(0.01, 1), **EPOCHS),
    "WeightAveraging": with_callback(WeightAveraging, **EPOCHS),
    "EMAWeightAveraging": with_callback(lambda: EMAWeightAveraging(decay=0.5), **EPOCHS),
    "EarlyStopping": with_callback(lambda: EarlyStopping("val_loss", min_delta=9.0, patience=1), **EPOCHS),
    "ModelSummary": summarised,
    "LearningRateMonitor": rates_logged,
    "manual optimization with two optimizers": manually,
    "torchmetrics": with_metrics,
    "BatchNorm": with_statistics,
    "configure_model on the meta device": from_nothing,
    "32-true": in_precision("32-true"),
    "bf16-mixed": in_precision("bf16-mixed"),
    "16-mixed": in_precision("16-mixed"),
    "bf16-true": in_precision("bf16-true"),
}


class OnCPU(FullyShardedDataParallel):
    """Takes the CPU for a device, where Lightning gives none."""

    def __init__(self, *args, device_id=None, **kwargs):
        assert device_id is None
        super().__init__(*args, device_id=torch.device("cpu"), **kwargs)


class PlainOnCPU(FSDPStrategy):
    """Lightning's strategy, but that it runs on CPU."""

    _registered_strategies: list = []  # noqa: RUF012 (Lightning's declaration)

    def _setup_model(self, model):
        with mock.patch.object(torch.distributed.fsdp, "FullyShardedDataParallel", OnCPU):
            return super()._setup_model(model)


PLANS_ITSELF = (
    "manual optimization with two optimizers",
    "BatchNorm",
    "configure_model on the meta device",
    "bf16-true",
)
"""Models with other parameters than those that the mixed plan is for, and those that have no plan."""


def planned_strategy(feature):
    """Returns what makes the strategy, with a mixed plan where there is one for the model."""
    if feature in PLANS_ITSELF:
        return lambda: OSDPStrategy(search_space=EVERYTHING, memory_limit="1GiB")
    plan = plan_for(Model(), "mixed", world_size=dist.get_world_size())
    return lambda: OSDPStrategy(plan=plan)


@without_measuring
def outcome(feature, kind="osdp"):
    """The empty string if the feature gives what it gives under DDP; otherwise what is wrong."""
    run = FEATURES[feature]
    make = planned_strategy(feature) if kind == "osdp" else lambda: PlainOnCPU(process_group_backend="gloo")
    try:
        # FSDP1 takes no scalar parameters
        with mock.patch.object(OddMLP, "scale_shape", () if kind == "osdp" else (1,)):
            expected = run(lambda: DDPStrategy(process_group_backend="gloo"))
            found = run(make)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if len(found) != len(expected):
        return f"{len(found)} numbers for {len(expected)}"
    differences = [abs(a - b) / max(1e-3, abs(b)) for a, b in zip(found, expected, strict=True)]
    return "" if max(differences) < 1e-4 else f"differs by {max(differences):.2g}"


def outcomes():
    """Outcome of every feature, by name."""
    return {feature: outcome(feature) for feature in FEATURES}
