"""Plans whose blocks recompute or offload what they save: trained as where blocks keep it, gathered as predicted."""

from importlib.util import find_spec

import activation_cases as cases
import activation_fits as fits
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed


ONE, TWO = [(1, "every")], [(1, "every"), (2, "last"), (2, "every")]
"""Micro-batches in a step, and which of them reduce."""
EVERY_KIND = "mixed, offload first"
"""Of `cases.POLICIES`, the one in which each block does another thing."""


@pytest.mark.parametrize(
    ("world_size", "activations", "workloads"),
    [
        *(slow(2, activations, TWO) for activations in cases.POLICIES if activations != EVERY_KIND),
        (2, EVERY_KIND, TWO),
        slow(4, "mixed", ONE),
        *(slow(4, each, ONE) for each in ("recompute", "offload", "recompute_offload")),
    ],
)
def test_every_plan_trains_as_one_process_in_which_blocks_keep_everything(ranks, world_size, activations, workloads):
    """Losses, gradients, weights and buffers, with every kind of unit and mode; nothing is left on the host."""
    given = {"activations": activations, "workloads": workloads}
    for found in ranks(world_size).run(cases.differences_from_one_process, **given):
        assert len(found) == 1 + 3 + 3 + 4 + 4
        assert {name: difference for name, difference in found.items() if not difference < 1e-12} == {}


@pytest.mark.slow
def test_fits_in_bf16_mixed_are_those_of_blocks_that_keep_everything(ranks):
    for found in ranks(2).run(fits.in_precision, precision="bf16-mixed"):
        assert len(found) == 3
        assert max(found.values()) < 1e-6, found


@pytest.mark.slow
def test_what_lightnings_policy_names_recomputes_and_is_planned_so(ranks):
    found = ranks(2).run(fits.by_policy)[0]
    blocks = {"blocks.0": "recompute", "blocks.1": "recompute"}
    assert {name: (planned, executed) for name, (planned, executed, _) in found.items()} == {
        "classes": (blocks, blocks),
        "callable": (blocks, blocks),
        "nested": (blocks | {"head": "recompute"}, blocks | {"head": "recompute"}),
        "given": ({}, blocks),
    }
    assert max(difference for *_, difference in found.values()) < 1e-6


@pytest.mark.slow
def test_a_model_whose_activations_exceed_the_limit_trains_where_they_may_be_offloaded(ranks):
    """One sample is all that a micro-batch has; on CPU what is offloaded is counted apart from the peak."""
    limit_bytes = 560 * 2**10
    for errors, plan, peak_bytes, host_bytes, difference in ranks(2).run(fits.saving_too_much, limit_bytes=limit_bytes):
        keeping, recomputing = errors
        assert "a micro-batch of 1 on 2 ranks needs at least" in keeping
        assert keeping.endswith(
            "Activations dominate; have blocks recompute or offload them:"
            " SearchSpace(activations=('keep', 'recompute', 'offload'))."
        )
        assert recomputing.endswith(
            "Activations dominate; have blocks offload them: SearchSpace(activations=('keep', 'recompute', 'offload'))."
        )
        assert plan.micro_batch_size == 1
        assert {block.activations for block in plan.blocks} & {"offload", "recompute_offload"}
        # one block's input more is predicted than counted
        assert peak_bytes == pytest.approx(plan.peak_bytes, rel=0.03)
        assert peak_bytes <= limit_bytes < host_bytes
        assert difference < 1e-6


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: python -m pip install --group models"
)
def test_gpt2_of_transformers_recomputes_where_memory_is_short(ranks):
    limit_bytes = 2560 * 2**10
    for (plan, peak_bytes, difference, _), (_, _, moved_difference, num_reentrant) in ranks(2).run(
        fits.transformers_gpt2, limit_bytes=limit_bytes
    ):
        assert {block.activations for block in plan.blocks} == {"recompute"}
        assert peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
        assert peak_bytes <= limit_bytes
        assert difference < 1e-6
        assert moved_difference < 1e-6
        assert num_reentrant == 4 * 4  # each block, but for the first step
