"""One module on several Trainers: the later ones go on with the units that are there, or say why they do not."""

import pytest
import takeover_cases as cases

pytestmark = pytest.mark.distributed

REFUSED = {
    "plan": "the plan that it was sharded by, got another plan=",
    "path": "the plan that it was sharded by, got another plan=",
    "memory_limit": "memory_limit 1.00 TiB, got 1.00 GiB",
    "precision": "precision 32-true, got bf16-true",
    "arguments": "'sync_module_states': True",
}


@pytest.mark.slow
def test_a_later_strategy_uses_the_units_of_the_first_unless_it_asks_for_others(ranks):
    for found in ranks(2).run(cases.later_wishes):
        for name, text in REFUSED.items():
            kind, told = found[name]
            assert kind == "ConfigurationError"
            assert text in told
            assert "whole_state_dict(on_all_ranks=True)" in told
        assert "got batch_size=2 and a plan for a micro-batch of 4" in found["batch_size"][1]
        assert (found["same"], found["same_limit"], found["nothing"]) == (None, None, None)
        assert found["evaluates"]
        assert found["summarized"] == 0
        assert found["weights"]


def test_a_model_that_one_trainer_evaluated_is_planned_by_the_next(ranks):
    for found in ranks(2).run(cases.fits_what_another_evaluated):
        assert found["units"] > 1
        assert found["plan"]
        assert len(set(found["losses"])) == 1
