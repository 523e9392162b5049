"""Windows of micro-batches and steps that are broken off, as the ranks run them: what comes after them, against DDP."""

import sys
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parent))

from accumulation_cases import UNITS, Knotted, difference, equals_ddp, plan_with
from cases import trainer

from lightning_osdp import OSDPPrecision, OSDPStrategy


class Leaving(Knotted):
    """Ends each epoch in the second micro-batch of its second window, without a step."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


def ended_epochs(kinds):
    """Differences from DDP where epochs end inside a window, with all units of each of these kinds."""
    return equals_ddp(
        [[kind] * len(UNITS) for kind in kinds], num_micro_batches=3, limit_train_batches=7, kind=Leaving
    )


class StopAt(Callback):
    """Stops a fit after so many micro-batches."""

    def __init__(self, batch_idx):
        self.at = batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == self.at


def _fit(module, strategy, **options):
    precision = (
        {"plugins": [OSDPPrecision("64-true")]} if isinstance(strategy, OSDPStrategy) else {"precision": "64-true"}
    )
    fit = trainer(strategy, accumulate_grad_batches=3, limit_train_batches=6, **precision, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    state = fit.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def stopped_fits(kinds):
    """Differences from DDP of a second fit after one that stopped inside a window, likewise."""

    def weights(make):
        module = Knotted().double()
        _fit(module, make(), callbacks=[StopAt(4)])
        return _fit(module, make())

    expected = weights(lambda: DDPStrategy(process_group_backend="gloo"))
    found = []
    for kind in kinds:
        plan = plan_with([kind] * len(UNITS), 3)
        found.append(difference(weights(lambda: OSDPStrategy(plan=plan, node_size=plan.node_size)), expected))
    return found
