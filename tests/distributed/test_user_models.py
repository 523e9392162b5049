"""Models that do in their forward what people do: as under DDP, or an error."""

import pytest
import user_model_cases as cases
from ranks import RankPool
from test_user_code import check
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_models_equal_ddp(ranks):
    check(ranks(2).run(cases.modelled)[0])


@pytest.mark.slow
def test_models_equal_ddp_on_four_ranks(ranks):
    check(ranks(4).run(cases.modelled, names=["LoRA", "siamese", "in place"], kinds=["mixed"])[0])


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_parameters_that_some_ranks_use_equal_ddp(ranks, world_size):
    check(ranks(world_size).run(cases.partly_used)[0])


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_frozen_parameters_are_not_reduced(ranks, world_size):
    for found, expected in ranks(world_size).run(cases.reduced_elements):
        assert found == expected > 0


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_units_that_only_some_ranks_call_are_an_error_on_all_ranks(world_size):
    for name, kind in cases.APART:
        pool = RankPool(world_size)  # of its own: collectives that found no partner are left
        try:
            for told, duration_s, num_steps in pool.run(cases.apart, name=name, kind=kind):
                assert told is not None, (name, kind)
                assert "Expected every rank to run the same modules in the same order" in told
                assert duration_s < 60
                assert num_steps <= 1
        finally:
            pool.close()


@pytest.mark.slow
def test_bf16_mixed_is_ddps_and_buffers_stay_float32(ranks):
    found = ranks(2).run(cases.mixed_precision)[0]
    expected, dtypes = found.pop(None)
    assert dtypes == ["torch.float32"]
    assert expected[-1] < 0.9 * expected[0]
    assert len(found) == 3
    for kind, (losses, own_dtypes) in found.items():
        assert own_dtypes == dtypes, kind
        assert losses == pytest.approx(expected, rel=0.02), kind


REMEDIES = {
    "sharded": "leave out a fully_shard of your own",
    "scalar": "Make it a tensor of one element",
    "dtypes": "Give them one dtype",
    "strided": "Make it contiguous",
    "limit_all_gathers": "Leave it out",
    "BACKWARD_POST": "Pass BackwardPrefetch.BACKWARD_PRE or None",
    "keep_low_precision_grads": "Leave it out",
}


def test_bad_input_is_refused_before_training_with_the_remedy(ranks):
    for found in ranks(2).run(cases.refused):
        assert list(found) == list(REMEDIES)
        for name, (told, num_steps) in found.items():
            assert told is not None, name
            assert told.startswith("ConfigurationError: "), told
            assert REMEDIES[name] in told
            assert num_steps == 0, name
