"""Choices that the planner may be given, and refused ones."""

import pytest

from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError


def test_everything_is_offered_unless_told():
    space = SearchSpace()
    assert space.offered_modes == ("ZDP", "hpZ", "DP", "resident", "HSDP", "HDP")
    assert (space.modes, space.min_unit_bytes) == (None, None)


def test_limits_are_kept():
    space = SearchSpace(modes=("DP",), min_unit_bytes=0)
    assert (space.modes, space.min_unit_bytes) == (("DP",), 0)


@pytest.mark.parametrize("modes", [(), ("ZDP", "DDP"), ("zdp",)])
def test_modes_that_do_not_exist_and_none_at_all_are_refused(modes):
    with pytest.raises(ConfigurationError) as caught:
        SearchSpace(modes=modes)
    assert (
        str(caught.value)
        == "SearchSpace(modes=...) must name at least one of ('ZDP', 'hpZ', 'DP', 'resident', 'HSDP', 'HDP',"
        f" 'replicated', 'stationary', 'node_stationary'), got {modes!r}."
    )


def test_a_text_is_no_list_of_modes():
    with pytest.raises(
        ConfigurationError,
        match=r"must name at least one of \('ZDP', .*, 'stationary', 'node_stationary'\), got 'ZDP'",
    ):
        SearchSpace(modes="ZDP")


def test_negative_bytes_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        SearchSpace(min_unit_bytes=-1)
    assert str(caught.value) == "SearchSpace(min_unit_bytes=...) must be None or a whole number, at least 0, got -1."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modes", 3),
        ("slices", None),
        ("slices", 3),
        ("slices", (1, 2.5)),
        ("slices", (1, True)),
        ("activations", [["keep"]]),
        ("states", "host"),
        ("min_unit_bytes", "64KiB"),
        ("min_unit_bytes", float("nan")),
        ("share_units", "no"),
    ],
)
def test_values_of_another_type_are_refused(name, value):
    with pytest.raises(ConfigurationError) as caught:
        SearchSpace(**{name: value})
    assert str(caught.value).startswith(f"SearchSpace({name}=...) must")
    assert str(caught.value).endswith(f", got {value!r}.")


@pytest.mark.parametrize("modes", [("ZDP", "DP"), ("hpZ",)])
def test_only_what_is_sharded_in_the_node_synchronises_there(modes):
    with pytest.raises(ConfigurationError, match="HSDP and HDP"):
        SearchSpace(modes=modes, sync=("node",))
    assert SearchSpace(modes=(*modes, "HDP"), sync=("node",)).sync == ("node",)


def test_states_are_on_the_device_unless_the_host_is_named():
    assert (SearchSpace().states, SearchSpace(states=["device", "host"]).states) == (("device",), ("device", "host"))
    assert SearchSpace(states=("host",)).states == ("host",)
