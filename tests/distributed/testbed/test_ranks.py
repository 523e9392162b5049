"""Ranks of tests that die."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.distributed.support.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def dies(*, with_signal, once=None):
    """Dies on rank 1, the first time if ``once`` is a path, else whenever it runs."""
    if dist.get_rank() == 1 and not (once and once.exists()):
        if once:
            once.touch()
        os.kill(os.getpid(), with_signal)
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


@pytest.fixture
def pool():
    made = RankPool(2)
    yield made
    made.close()


def test_a_case_runs_again_after_one_segmentation_fault(pool, tmp_path):
    with pytest.warns(UserWarning, match="(?s)dies runs again .* Rank 1 died, exit code -11.* in dies"):
        assert pool.run(dies, with_signal=signal.SIGSEGV, once=tmp_path / "died") == [2.0, 2.0]
    assert pool.run(dies, with_signal=signal.SIGSEGV, once=tmp_path / "died") == [2.0, 2.0]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_rank_that_dies_again_or_of_something_else_fails_the_test(pool, number, recwarn):
    with pytest.raises(AssertionError, match=f"Rank 1 died, exit code -{int(number)}"):
        pool.run(dies, with_signal=number)
    assert len(recwarn) == (1 if number == signal.SIGSEGV else 0)
