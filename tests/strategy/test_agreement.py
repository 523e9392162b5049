"""Work that ranks do together, on one rank; two ranks are in tests/distributed."""

import pytest

from lightning_osdp import OSDPError
from lightning_osdp.strategy import agreement
from lightning_osdp.strategy.agreement import in_step, on_all_ranks, on_rank_zero


def _fail():
    raise KeyError("lost")


@pytest.mark.parametrize("together", [on_all_ranks, on_rank_zero])
def test_one_rank_alone_gets_its_own_result_or_error(together):
    assert together(lambda: 3) == 3
    with pytest.raises(KeyError, match="lost"):
        together(_fail)


def test_ranks_that_have_come_to_different_stages_all_stop_and_tell_it_once(monkeypatch):
    told = []

    def beside_one_that_is_done(said):
        told.append(said)
        return [said, ("", None, 3)]

    monkeypatch.setattr(agreement, "from_all_ranks", beside_one_that_is_done)
    text = r"^Expected every rank to do the same .* rank 0: timing 4 samples, rank 1: done\. .* pass plan=\.$"
    with pytest.raises(OSDPError, match=text):
        on_all_ranks(lambda: in_step(lambda: 1, stage="timing 4 samples"))
    assert told == [("timing 4 samples", None, 1)]
