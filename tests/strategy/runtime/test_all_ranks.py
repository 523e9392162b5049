"""Work that ranks do together, on one rank; two ranks are in tests/distributed."""

import pickle
import threading

import pytest

from lightning_osdp import OSDPError
from lightning_osdp.errors import RanksApartError
from lightning_osdp.strategy.runtime import all_ranks
from lightning_osdp.strategy.runtime.all_ranks import in_step, on_all_ranks, on_rank_zero


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

    monkeypatch.setattr(all_ranks, "all_gather_values", beside_one_that_is_done)
    text = r"^Expected every rank to do the same .* rank 0: timing 4 samples, rank 1: done\. .* pass plan=\.$"
    with pytest.raises(OSDPError, match=text):
        on_all_ranks(lambda: in_step(lambda: 1, stage="timing 4 samples"))
    assert told == [("timing 4 samples", None, 1)]


def test_a_rank_that_fails_elsewhere_is_told_from_one_that_fails_in_the_same_stage(monkeypatch):
    others = iter([("timing 4 samples", "ValueError: lost", None), ("", "ValueError: lost", None)])
    monkeypatch.setattr(all_ranks, "all_gather_values", lambda said: [said, next(others)])
    for kind in (OSDPError, RanksApartError):
        with pytest.raises(OSDPError, match=r"^Rank 1 failed, so every rank stops: ValueError: lost$") as found:
            in_step(lambda: 1, stage="timing 4 samples")
        assert type(found.value) is kind


class TakesTwoError(Exception):
    def __init__(self, path, used):
        super().__init__(f"{path} is full: {used}")


class LockedError(Exception):
    def __init__(self):
        super().__init__("no")
        self.lock = threading.Lock()


@pytest.mark.parametrize("error", [TakesTwoError("/x", 3), LockedError()])
def test_errors_that_cannot_be_sent_are_sent_as_text(error):
    sent = pickle.loads(pickle.dumps(all_ranks._sendable(error)))
    assert str(sent) == f"Rank 0 failed, so every rank stops: {type(error).__name__}: {error}"


def test_errors_that_can_be_sent_are_sent():
    assert isinstance(all_ranks._sendable(PermissionError(13, "denied")), PermissionError)
