"""Plans under the options of accumulation, and limits of the host's memory."""

import dataclasses
import warnings

import pytest
import torch

from lightning_osdp import ConfigurationError, SearchSpace
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.plan_fit import _host_limit_bytes, _search_space


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
