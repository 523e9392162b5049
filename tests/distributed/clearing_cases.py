"""Modules that clear gradients themselves, as the ranks run them."""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, plan_for, trainer
from models import OddMLP

from lightning_osdp import OSDPStrategy


class Clearing(OddMLP):
    """Of all parameters that it finds."""

    def optimizer_zero_grad(self, *_):
        for parameter in self.parameters():
            parameter.grad = None


def clears_gradients():
    """Largest difference of weights after training from those of a module that leaves it to the optimizer."""
    states = []
    for kind in (Clearing, OddMLP):
        module = kind("sgd")
        plan = plan_for(module, "mixed", world_size=dist.get_world_size())
        fit = trainer(OSDPStrategy(plan=plan))
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        states.append(fit.strategy.whole_state_dict(on_all_ranks=True))
    return largest_difference(*states)
