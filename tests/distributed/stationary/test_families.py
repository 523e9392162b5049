"""Models of many kinds whose operators move activations without being asked: equal to DDP."""

from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.families import build
from lightning_osdp import Cluster, OSDPPrecision, OSDPStrategy
from lightning_osdp.core.cluster import Link
from lightning_osdp.strategy.planning import plan_fit
from tests.distributed.support.fits import largest_difference, trainer
from tests.distributed.support.user_runs import ddp
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


def weights(name, strategy, **options):
    """Weights after three steps in float64, each rank with samples of its own, and the plan."""
    module = build(name, optimizer="sgd_momentum").double()
    batches = [module.batch(1, seed=10 * step + dist.get_rank()) for step in range(3)]
    fit = trainer(strategy, max_steps=3, limit_val_batches=0, **options)
    fit.fit(module, DataLoader(batches, batch_size=None))
    state = fit.strategy.lightning_module_state_dict()
    return {key: value.detach().clone() for key, value in sorted(state.items())}, getattr(fit.strategy, "plan", None)


def unasked(name):
    """Difference from DDP, and kinds of exchanges in the plan."""
    link = Link(latency_s=1e-6, seconds_per_byte=1e-5)
    cluster = Cluster(world_size=dist.get_world_size(), all_gather=link, reduce_scatter=link, memory_bytes=2**34)
    with mock.patch.object(plan_fit, "measure_cluster", return_value=cluster):
        own, plan = weights(name, OSDPStrategy(batch_size="keep"), plugins=[OSDPPrecision("64-true")])
    by_ddp, _ = weights(name, ddp(), precision="64-true")
    moving = {unit.exchange for unit in plan.units if "moves" in unit.treatments[0]}
    return largest_difference(own, by_ddp) if dist.get_rank() == 0 else 0.0, sorted(moving)


OTHERS = ("encoder_decoder", "hierarchical_vit", "odd_mlp", "tied", "large_vocabulary", "convolutional")


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        slow("mingpt", 2),  # test_training.py has models that are smaller
        *(slow("3 wide Linears", number) for number in (2, 4)),
        *(slow(name, 2) for name in OTHERS),
    ],
)
def test_families_train_as_under_ddp(ranks, name, world_size):
    for off, moving in ranks(world_size).run(unasked, name=name):
        assert off < 1e-10
        assert moving or name == "convolutional"
        assert "pair" not in moving
