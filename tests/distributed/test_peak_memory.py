"""The simulated peak against a count of live storages in real training steps."""

import pytest
from cases import predicted_and_counted_peak
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("prefetch", ["pre", slow("none")])
@pytest.mark.parametrize("num_micro_batches", [slow(1), 3])
@pytest.mark.parametrize("modes", ["zdp", "dp", "mixed"])
@pytest.mark.parametrize("name", ["wide_mlp", slow("wide_gpt")])
def test_peak_of_a_step_is_what_was_predicted(ranks, name, modes, num_micro_batches, prefetch):
    predicted, counted, _ = ranks(2).run(
        predicted_and_counted_peak,
        name=name,
        optimizer="adamw",
        modes=modes,
        num_micro_batches=num_micro_batches,
        prefetch=prefetch,
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


@pytest.mark.parametrize("world_size", [1, slow(4)])
@pytest.mark.parametrize("name", ["wide_mlp", "tied_gpt"])
def test_peak_on_one_rank_and_on_four(ranks, world_size, name):
    predicted, counted, _ = ranks(world_size).run(
        predicted_and_counted_peak, name=name, optimizer="sgd", modes="mixed"
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


def test_optimizer_temporaries_can_be_the_peak(ranks):
    predicted, counted, phase = ranks(1).run(
        predicted_and_counted_peak, name="wide_mlp", optimizer="adamw", modes="zdp"
    )[0]
    assert phase == "optimizer step"
    assert predicted == pytest.approx(counted, rel=2e-3)
