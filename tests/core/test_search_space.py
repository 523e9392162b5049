"""What the planner may choose from."""

import pytest

from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError


def test_everything_is_offered_unless_told():
    assert (SearchSpace().modes, SearchSpace().min_unit_bytes) == (("ZDP", "DP"), None)


def test_limits_are_kept():
    space = SearchSpace(modes=("DP",), min_unit_bytes=0)
    assert (space.modes, space.min_unit_bytes) == (("DP",), 0)


@pytest.mark.parametrize("modes", [(), ("ZDP", "HSDP"), ("zdp",)])
def test_modes_that_do_not_exist_and_none_at_all_are_refused(modes):
    with pytest.raises(ConfigurationError) as caught:
        SearchSpace(modes=modes)
    assert str(caught.value) == f"SearchSpace(modes=...) must name at least one of ('ZDP', 'DP'), got {modes!r}."


def test_a_text_is_no_list_of_modes():
    with pytest.raises(ConfigurationError, match=r"must name at least one of \('ZDP', 'DP'\), got 'ZDP'"):
        SearchSpace(modes="ZDP")


def test_negative_bytes_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        SearchSpace(min_unit_bytes=-1)
    assert str(caught.value) == "SearchSpace(min_unit_bytes=...) must be None or at least 0, got -1."
