"""Manual optimization: each child sharded by itself trains what DDP trains."""

import manual_cases as cases
import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_manual_optimization_with_one_and_two_optimizers_equals_ddp_and_resumes(ranks):
    for found in ranks(2).run(cases.manual_training):
        assert found["GAN moved"] > 1e-3
        assert found["One moved"] > 1e-3
        for name in ("GAN", "Once", "One", "GAN resumed", "Once resumed", "One resumed", "averaged"):
            assert found[name] < 1e-6, name
        assert found["optimizers"] == [4, 4]
        root, *names = found["units"]
        assert root == ""
        assert {name.split(".")[0] for name in names} == {"generator", "discriminator"}
        assert [unit.name for unit in found["plan"].units] == [root, *names]
        assert found["plan"].units[0].operators == ()  # nothing that the first backward of a step would free


def test_what_manual_optimization_cannot_shard_is_refused(ranks):
    for found in ranks(2).run(cases.refused):
        assert "'scale' is in none. Put it into a module that is called" in found["direct"][1]
        assert found["plan"][0] == "PlanMismatchError"


def test_children_that_share_a_parameter_are_one_unit(ranks):
    assert max(ranks(2).run(cases.shared)) < 1e-6
