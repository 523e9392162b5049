"""A model whose layers are called twice, partly and never, trained in windows of micro-batches; against DDP."""

import dataclasses

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy
from lightning_osdp.core.axes import NAMED_MODES
from tests.distributed.support.fits import largest_difference, trainer
from tests.distributed.support.models import Base, OddMLP

UNITS = ("first", "twice", "partly", "frozen", "last")


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


def plan_with(kinds, num_micro_batches, dtype="float64", of=Knotted):
    """A plan of `Knotted`, or a model like it, with a (mode, sync) for each of `UNITS`."""
    module = of().to(getattr(torch, dtype))
    modes = {unit: mode for unit, (mode, _) in zip(UNITS, kinds, strict=True)}
    plan = plan_of(
        module, modes, world_size=dist.get_world_size(), micro_batch_size=4, num_micro_batches=num_micro_batches
    )
    syncs = {unit: sync for unit, (_, sync) in zip(UNITS, kinds, strict=True)}
    units = tuple(unit.treated(sync=syncs.get(unit.name, "every")) for unit in plan.units)
    if any(NAMED_MODES[mode].needs_nodes for mode, _ in kinds):
        units = tuple(unit if unit.name else unit.in_modes("HDP") for unit in units)
        plan = dataclasses.replace(plan, node_size=2)
    return dataclasses.replace(plan, units=units)


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
    """Differences from DDP after training, one for each list of kinds."""
    if num_micro_batches is not None:
        options["accumulate_grad_batches"] = num_micro_batches
    expected, _ = by_ddp(**options)
    return [
        difference(fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), **options)[0], expected)
        for plan in (plan_with(kinds, num_micro_batches or 1, options.get("dtype", "float64")) for kinds in cases)
    ]


class SaveAt(Callback):
    """Saves a checkpoint after so many batches of an epoch."""

    def __init__(self, path, batch_idx):
        self.path, self.at = path, batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.at:
            trainer.save_checkpoint(self.path)
