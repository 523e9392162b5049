"""Features of the Trainer give under the strategy what they give under DDP."""

import pytest

from tests.distributed.support.lifecycle import outcomes

pytestmark = pytest.mark.distributed


NOT_WITH_SHARDS = {"StochasticWeightAveraging": "ConfigurationError: Expected averages that can be made of shards"}
"""Features that raise -> how the error begins."""


@pytest.mark.slow
def test_features_of_the_trainer_give_what_they_give_under_ddp(ranks):
    for found in ranks(2).run(outcomes):
        assert {feature: wrong for feature, wrong in found.items() if wrong}.keys() == NOT_WITH_SHARDS.keys()
        for feature, text in NOT_WITH_SHARDS.items():
            assert found[feature].startswith(text)
