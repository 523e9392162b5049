"""Gradients that a module clears itself are cleared."""

import pytest
import torch.distributed as dist

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import largest_difference, plan_for, trainer
from tests.distributed.support.models import OddMLP

pytestmark = pytest.mark.distributed


class Clearing(OddMLP):
    """MLP that clears gradients of all parameters that it finds."""

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


def test_a_module_may_clear_gradients_of_all_its_parameters(ranks):
    assert ranks(2).run(clears_gradients) == [0.0, 0.0]
