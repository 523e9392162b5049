"""Lightning's averages of weights on shards: what they are under DDP, and what they cost."""

import averaging_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("world_size", "modes"), [(2, "mixed"), slow(4, "all")])
def test_averages_are_those_under_ddp_also_resumed_and_fitted_again(ranks, world_size, modes):
    for found in ranks(world_size).run(cases.averages, modes=modes):
        for name in ("all alike", "exponential"):
            assert found.pop(f"{name}, apart") > 1e-4
        assert max(found.values()) < 1e-6, found


@pytest.mark.slow
def test_an_average_is_planned_for_and_others_are_refused(ranks):
    for found in ranks(2).run(cases.planned):
        (predicted, counted), (without, _) = found["peaks"]["with"], found["peaks"]["without"]
        assert predicted - without == pytest.approx(found["shard_bytes"], rel=0.01)
        assert counted == pytest.approx(predicted, rel=2e-3)
        name, text = found["stochastic"]
        assert name == "ConfigurationError"
        assert "Use WeightAveraging(), which averages all updates alike, or EMAWeightAveraging()" in text
        assert "Expected state_dict_type='full' with WeightAveraging" in found["sharded"][1]
