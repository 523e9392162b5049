"""What people are told when a plan is made."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.planning import publish


@pytest.fixture
def told(monkeypatch):
    texts = []
    monkeypatch.setattr(publish, "rank_zero_info", texts.append)

    def tell(*, state_dict_type="full", device="cpu", limit_bytes=2**20, saves=True):
        with mock.patch.object(OSDPStrategy, "root_device", torch.device(device)):
            trainer = SimpleNamespace(
                strategy=OSDPStrategy(state_dict_type=state_dict_type), checkpoint_callbacks=[None] * saves
            )
            estimate = SimpleNamespace(saving_bytes={"full": 3 * 2**20, "sharded": 2 * 2**20})
            publish._tell_of_saving(trainer, SimpleNamespace(memory_limit_bytes=limit_bytes), estimate)
        return texts

    return tell


def test_a_checkpoint_that_takes_more_than_the_limit_is_told_of_with_what_takes_less(told):
    (text,) = told()
    assert text == (
        "OSDP: saving a full checkpoint may take 3.00 MiB on rank 0, more than memory_limit (1.00 MiB), which is about"
        ' training. OSDPStrategy(state_dict_type="sharded") takes 2.00 MiB.'
    )


def test_of_a_sharded_checkpoint_there_is_no_smaller_one(told):
    assert told(state_dict_type="sharded")[0].endswith("more than memory_limit (1.00 MiB), which is about training.")


@pytest.mark.parametrize("given", [{"limit_bytes": 4 * 2**20}, {"device": "cuda"}, {"saves": False}])
def test_nothing_is_said_where_it_fits_or_goes_to_the_host_or_nothing_is_saved(told, given):
    assert told(**given) == []
