"""Kinds of training that the manual has recipes for, planned by the strategy itself: as under DDP, or an error."""

from importlib.util import find_spec

import pytest
import recipe_cases as cases
from models import BATCH_SIZE
from ranks import RankPool

pytestmark = pytest.mark.distributed


def test_experts_in_one_module_or_all_called_equal_ddp(ranks):
    for found in ranks(2).run(cases.mixtures):
        for name in ("each is called", "stacked"):
            assert found[name] < 1e-10, name
        assert found["each is called", "units"] == [f"experts.{index}" for index in range(cases.EXPERTS)]
        assert found["stacked", "units"] == ["experts"]


def test_experts_that_only_some_ranks_call_are_an_error():
    pool = RankPool(2)  # of its own: collectives that found no partner are left
    try:
        assert {kind for kind, _ in pool.run(cases.experts_apart)} == {"RanksApartError"}
    finally:
        pool.close()


def test_two_forwards_and_a_loss_over_pairs_equal_ddp(ranks):
    for off, *batch in ranks(2).run(cases.contrastive):
        assert off < 1e-10
        assert batch == [BATCH_SIZE, 2]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: python -m pip install --group models"
)
def test_models_of_transformers_with_masks_checkpoints_and_experts_equal_ddp(ranks):
    for found in ranks(2).run(cases.transformers_models):
        for name, tolerance in (("GPT2", 1e-9), ("Llama", 1e-6), ("Mixtral", 1e-4)):
            off, moved = found[name]
            assert off < tolerance < moved / 10, name
