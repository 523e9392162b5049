"""Plans under the options of accumulation, limits of the host's memory, and what plans learn from earlier ones."""

import dataclasses
import warnings
from types import SimpleNamespace

import pytest
import torch

from lightning_osdp import ConfigurationError, SearchSpace
from lightning_osdp.core.axes import named
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.strategy.checkpointing.entries import Resumed
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.plan_fit import _host_limit_bytes, _learned, _search_space
from tests.support.plans import bare_plan


@pytest.mark.parametrize(
    ("precision", "accumulate_in_fp32", "sync"),
    [
        ("bf16-mixed", True, ("every",)),
        ("16-mixed", True, ("every",)),
        ("bf16-mixed", False, ("every", "last", "node")),
        ("32-true", True, ("every", "last", "node")),
        ("bf16-true", True, ("every", "last", "node")),
    ],
)
def test_sums_in_float32_are_reduced_in_every_micro_batch_of_mixed_precision(precision, accumulate_in_fp32, sync):
    space = _search_space(Options(accumulate_in_fp32=accumulate_in_fp32), precision)
    assert space == SearchSpace(sync=sync)


def test_a_search_space_that_contradicts_is_refused():
    given = Options(accumulate_in_fp32=True, search_space=SearchSpace(sync=("last",)))
    text = r"^Expected 'every' in SearchSpace\(sync=...\) with accumulate_in_fp32=True, got \('last',\)\."
    with pytest.raises(ConfigurationError, match=text):
        _search_space(given, "bf16-mixed")


@pytest.mark.parametrize(
    ("options", "free_bytes", "device", "expected"),
    [
        ({}, None, "cuda", None),
        ({"host_memory_limit": "5B"}, None, "cuda", 5),
        ({"memory_limit": "6B"}, 8, "cuda", 8),
        ({"host_memory_limit": "5B"}, 8, "cuda", 5),
        ({}, 8, "cpu", 8),
        ({"memory_limit": "6B"}, 8, "cpu", 2),  # of one memory
        ({"memory_limit": "9B"}, 8, "cpu", 0),
    ],
)
def test_a_rank_may_take_what_is_given_or_free_of_its_host(cluster, options, free_bytes, device, expected):
    ranks = dataclasses.replace(cluster(2), host_memory_bytes=free_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _host_limit_bytes(Options(**options), ranks, torch.device(device)) == expected


def test_a_limit_above_what_the_host_has_free_is_warned_of(cluster):
    ranks = dataclasses.replace(cluster(2), host_memory_bytes=8)
    with pytest.warns(UserWarning, match=r"host_memory_limit is 9 B, more than 8 B, the rank's share of what is free"):
        assert _host_limit_bytes(Options(host_memory_limit="9B"), ranks, torch.device("cuda")) == 9


TAUGHT = Correction(computing=1.2, links={"all": 0.8}, error=0.01, error_before=0.2, num_plans=5)
ROOT = Unit(name="", operators=("a",), kind="Linear", treatments=named("DP"))
RACED = bare_plan((ROOT,), fingerprint={"a": "[2] float32"}, world_size=2, correction=TAUGHT)
"""Plan that a race has corrected."""
OTHER = dataclasses.replace(RACED, fingerprint={"b": "[2] float32"})


@pytest.mark.parametrize(
    ("saved", "previous", "learned"),
    [
        (None, None, Correction()),
        (RACED.to_json(), None, TAUGHT),
        (None, RACED, TAUGHT),
        ("no plan", RACED, TAUGHT),
        (dataclasses.replace(RACED, correction=Correction(computing=3.0, num_plans=4)).to_json(), RACED, None),
        (dataclasses.replace(RACED, correction=Correction()).to_json(), None, Correction()),
        (None, OTHER, Correction()),
        (OTHER.to_json(), RACED, TAUGHT),
        (None, dataclasses.replace(RACED, world_size=4), Correction()),
    ],
)
def test_what_a_race_has_taught_holds_for_the_same_model_and_ranks(saved, previous, learned):
    profile, cluster = SimpleNamespace(fingerprint=RACED.fingerprint), SimpleNamespace(world_size=2, node_size=None)
    resumed = None if saved is None else Resumed("a.ckpt", None, saved, {})
    found = _learned(profile, cluster, resumed, previous)
    assert found == learned if learned is not None else found.computing == 3.0  # the checkpoint's comes first
