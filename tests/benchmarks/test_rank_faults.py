"""Ranks that fail without a word: all end, say who was first, and leave no process behind."""

import pytest

from benchmarks import rank_faults

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return rank_faults.make_plan(tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize(
    ("name", "launcher", "exit_code"),
    [
        ("rank 0 is killed", "popen", -9),
        ("SIGTERM to rank 1", "popen", 143),
        ("SIGTERM to the launcher", "spawn", 1),
    ],
)
def test_all_ranks_end_and_tell_who_was_first(plan, name, launcher, exit_code):
    case = next(case for case in rank_faults.CASES if case.name == name)
    found = rank_faults.outcome(case, launcher, plan)
    assert found.told is not None, found.output
    assert found.orphans == ()
    assert found.exit_code == exit_code
