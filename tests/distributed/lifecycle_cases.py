"""Features of the Trainer, each run under a strategy and compared with the same under DDP."""

import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from cases import EVERYTHING, plan_for, without_measuring
from lifecycle_runs import (
    Model,
    fitted,
    from_nothing,
    in_orders,
    in_precision,
    manually,
    on_other_trainers,
    options,
    out_of_time,
    rates_logged,
    stages,
    summarised,
    with_callback,
    with_metrics,
    with_statistics,
)

from lightning_osdp import OSDPStrategy

EPOCHS = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 2}
FEATURES = {
    "fit, validate, test, predict: each after any of the others": in_orders,
    "fit again": lambda make: stages(make, ["fit"], ["fit", "validate"]),
    "one module on several Trainers": on_other_trainers,
    "validate without fit": lambda make: stages(make, ["validate"]),
    "sanity validation": options(num_sanity_val_steps=2, limit_val_batches=2),
    "fast_dev_run": options(fast_dev_run=2),
    "overfit_batches": options(max_steps=-1, max_epochs=2, overfit_batches=2),
    "limit_train_batches, limit_val_batches": options(**EPOCHS),
    "val_check_interval": options(max_steps=6, val_check_interval=2, limit_val_batches=1),
    "max_time": options(max_time=timedelta(hours=1)),
    "max_time is over": out_of_time,
    "accumulate_grad_batches": options(max_steps=2, accumulate_grad_batches=2),
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
    """With a mixed plan, where there is one for the model."""
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
