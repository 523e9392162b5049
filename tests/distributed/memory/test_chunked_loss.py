"""The loss in slices of tokens, under fully_shard: trained as with all logits at once, in the memory predicted."""

import pytest
import torch.distributed as dist

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPStrategy, SearchSpace, chunked_cross_entropy
from tests.distributed.memory.test_activations import fitted, largest_of
from tests.distributed.support.fits import without_measuring
from tests.distributed.support.models import WideGPT
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Whole(WideGPT):
    """Vocabulary larger than the body, and many tokens."""

    def loader(self, rank, world_size):
        return super().loader(rank, world_size, batch_size=16)


class Chunked(Whole):
    """Loss in slices of 32 tokens."""

    def loss(self, batch):
        x = self.tokens(batch[0]) + self.positions
        for block in self.blocks:
            x = block(x)
        return chunked_cross_entropy(self.head, self.norm(x), batch[1], chunk_size=32)


HEADS = {"ZDP": "ZDP", "DP": "DP", "slices": ("ZDP", "DP", "ZDP"), "in the root": None}


@without_measuring
def differences(heads):
    """Differences from the loss of all logits, in losses and weights after a fit, by what the head is in the plan."""

    def trained(kind, mode):
        modes = {"tokens": "ZDP"} if mode is None else {"head": mode}
        plan = plan_of(kind(), modes, world_size=dist.get_world_size(), micro_batch_size=16)
        return fitted(OSDPStrategy(plan=plan), kind=kind, max_steps=3)

    expected, losses, _ = trained(Whole, "ZDP")
    found = {}
    for name in heads:
        state, ours, _ = trained(Chunked, HEADS[name])
        found[name] = largest_of(state, ours, expected, losses)
    return found


@without_measuring
def peaks():
    """Predicted and counted peaks, by kind of the loss, of plans that slice no operator; two steps are counted."""
    found, space = {}, SearchSpace(slices=(1,), activations=("keep",))
    for kind in (Whole, Chunked):
        strategy = OSDPStrategy(search_space=space, batch_size="keep")
        fit = fitted(strategy, kind=kind, max_steps=4)[2]
        found[kind.__name__] = strategy.plan.peak_bytes, fit.callbacks[0].measured.peak_bytes
    return found


@pytest.mark.parametrize("heads", [["slices", "in the root"], slow([*HEADS])])
def test_a_loss_in_slices_trains_as_one_of_all_logits(ranks, heads):
    for found in ranks(2).run(differences, heads=heads):
        assert list(found) == heads
        assert max(found.values()) < 1e-5, found


def test_the_peak_of_a_loss_in_slices_is_predicted(ranks):
    for found in ranks(2).run(peaks):
        for predicted, counted in found.values():
            assert 0.99 * counted <= predicted <= 1.02 * counted, found
        assert found["Chunked"][1] < 0.8 * found["Whole"][1]
