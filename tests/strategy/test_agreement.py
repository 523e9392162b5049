"""Work that ranks do together, on one rank; two ranks are in tests/distributed."""

import pytest

from lightning_osdp.strategy.agreement import on_all_ranks, on_rank_zero


def _fail():
    raise KeyError("lost")


@pytest.mark.parametrize("together", [on_all_ranks, on_rank_zero])
def test_one_rank_alone_gets_its_own_result_or_error(together):
    assert together(lambda: 3) == 3
    with pytest.raises(KeyError, match="lost"):
        together(_fail)
