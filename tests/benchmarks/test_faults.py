"""Ranks that are killed or fail: what resumes is the newest complete checkpoint, and no process is left behind."""

import pytest

from benchmarks import exits, faults, rank_faults

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_training_goes_on_from_the_newest_complete_checkpoint_whichever_rank_is_killed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["faults.py", "--count", "3"])
    num_failed = faults.main()
    printed = capsys.readouterr().out
    assert num_failed == 0, printed
    assert "3 ranks killed, 4 of 4 runs as they should" in printed


@pytest.mark.slow
def test_a_script_ends_as_it_should(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["exits.py", "--count", "1"])
    num_failed = exits.main()
    printed = capsys.readouterr().out
    assert num_failed == 0, printed
    assert "1 of 1 ended with 0" in printed


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
@pytest.mark.slow
def test_all_ranks_end_and_tell_who_was_first(plan, name, launcher, exit_code):
    case = next(case for case in rank_faults.CASES if case.name == name)
    found = rank_faults.outcome(case, launcher, plan)
    assert found.told is not None, found.output
    assert found.orphans == ()
    assert found.exit_code == exit_code
