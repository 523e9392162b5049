"""Models of which torch compiles a part, or all, train as under DDP."""

import shutil

import compiled_cases as cases
import pytest
from test_user_code import TOLERANCE, check
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("how", "backend"), [slow("first", "aot_eager"), slow("first in place", "eager"), ("all in place", "eager")]
)
def test_compiled_modules_train_under_plans(ranks, how, backend):
    check(ranks(2).run(cases.given_plans, how=how, backend=backend)[0])


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
            ],
        ),
    ],
)
def test_blocks_that_are_compiled_whole_are_units(ranks, backend):
    check(ranks(2).run(cases.around, backend=backend)[0])


def test_a_plan_is_made_of_compiled_blocks_and_says_how_they_were_timed(ranks):
    apart, units, notes = ranks(2).run(cases.planned, how="both")[0]
    assert apart < TOLERANCE
    assert "blocks.0._orig_mod.up" in units
    assert "blocks.0._orig_mod" not in units
    (note,) = notes
    assert note.startswith("'blocks.0', 'blocks.1': profiled as eager code")


@pytest.mark.parametrize("how", [slow("both"), "both in place"])
def test_a_block_that_is_compiled_whole_is_one_unit(ranks, how):
    apart, units, _ = ranks(2).run(cases.planned, how=how, fullgraph=True)[0]
    assert apart < TOLERANCE
    assert units == ["", "blocks.0", "blocks.1", "last"]


def test_a_unit_inside_what_is_compiled_whole_is_refused(ranks):
    for told in ranks(2).run(cases.refused)[0]:
        assert told.startswith(
            "ConfigurationError: Expected no unit inside 'blocks.0', which is compiled with fullgraph"
        )


def test_checkpoints_of_compiled_models_are_those_of_ddp(ranks):
    assert max(ranks(2).run(cases.resumed)[0]) < TOLERANCE


def test_a_compiled_lightning_module_trains(ranks):
    apart, (note,) = ranks(2).run(cases.by_lightning, backend="aot_eager")[0]
    assert apart < TOLERANCE
    assert note.startswith("the whole model: profiled as eager code")
