"""Plans under the options of accumulation."""

import pytest

from lightning_osdp import ConfigurationError, SearchSpace
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.plan_fit import _search_space


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
