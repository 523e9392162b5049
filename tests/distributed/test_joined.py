"""Units of several modules, as the planner makes them, and units that are gathered late: on two ranks."""

import pytest
from joined_cases import trains
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("prefetch", ["pre", slow("none")])
@pytest.mark.parametrize("name", ["deep_gpt", slow("odd_mlp")])
def test_units_that_the_planner_joined_train_as_ddp_with_the_collectives_as_predicted(ranks, name, prefetch):
    for found in ranks(2).run(trains, name=name, prefetch=prefetch):
        assert found["lists"]
        assert found["difference"] < 1e-9
        assert found["seen"] == found["expected"]
        assert found["num_seen"] == 5 * len(found["expected"])


@pytest.mark.slow
def test_units_that_are_gathered_late_train_as_ddp_with_the_collectives_as_predicted(ranks):
    for found in ranks(2).run(trains, name="gpt", prefetch="pre", late=1):
        assert found["difference"] < 1e-9
        assert found["seen"] == found["expected"]


def test_backward_gathers_a_unit_though_the_loss_does_not_depend_on_its_last_module(ranks):
    for found in ranks(2).run(trains, name="unused", prefetch="none", modules=("layers.2", "side")):
        assert found["lists"] == [("layers.2", "side")]
        assert found["difference"] < 1e-9
