"""Choices that the planner may be given, and refused ones."""

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.errors import ConfigurationError
from tests.support.plans import bare_plan


def test_everything_is_offered_unless_told():
    space = SearchSpace()
    assert space.offered_modes == ("ZDP", "hpZ", "DP", "resident", "HSDP", "HDP")
    assert (space.modes, space.min_unit_bytes) == (None, None)


def test_limits_are_kept():
    space = SearchSpace(modes=("DP",), min_unit_bytes=0)
    assert (space.modes, space.min_unit_bytes) == (("DP",), 0)


UNASKED = {
    "little is trained": (4000, {}, True),
    "more than a tenth is trained": (300, {}, False),
    "nothing is frozen": (0, {}, False),
    "manual optimization": (4000, {"children_apart": True}, False),
    "another optimizer": (4000, {"optimizer": OptimizerProfile(is_elementwise=False)}, False),
}
"""Bytes of a frozen operator beside a trained one of 40, further fields, and whether it may be replicated."""


@pytest.mark.parametrize("case", UNASKED)
def test_replicated_units_are_offered_unasked_where_a_plain_step_trains_little(model, operator, case):
    frozen_bytes, fields, is_offered = UNASKED[case]
    frozen = [operator("base", frozen_bytes, frozen=True)] if frozen_bytes else []
    # gradients are reduced in two bytes of four: what is trained is told by its bytes at rest
    profile = model(*frozen, operator("adapter", 40, gradient_bytes=20), **fields)
    assert ("replicated" in SearchSpace().unasked(profile).offered_modes) == is_offered
    named = SearchSpace(modes=("ZDP", "DP"), slices=(1, 2))
    assert named.unasked(profile) == named
    assert bare_plan().offered(profile).offered_modes == SearchSpace().unasked(profile).offered_modes


@pytest.mark.parametrize("is_elementwise", [True, False])
def test_optimizers_that_may_look_at_whole_parameters_get_them_unless_slices_are_named(model, operator, is_elementwise):
    moving = (("attention", ("qkv", "out")), ("gated", ("qkv", "out")), ("heads", ("qkv", "out")))
    exchanges = tuple(
        Exchange(kind, names, outputs=(Affine(),) * (len(names) - 1), num_heads=4)
        for kind, names in (*moving, ("attention", ("q", "k", "v", "o")))
    )
    operators = [operator(name, 40) for name in ("qkv", "out", "q", "k", "v", "o")]
    profile = model(*operators, exchanges=exchanges, optimizer=OptimizerProfile(is_elementwise=is_elementwise))
    assert SearchSpace().unasked(profile).slices == ((1, 2, 4, 8, 16) if is_elementwise else (1,))
    assert SearchSpace(slices=(1, 3)).unasked(profile).slices == (1, 3)
    assert SearchSpace(modes=("ZDP", "stationary")).of(profile).exchanges == exchanges[2 * (not is_elementwise) :]
    assert SearchSpace().of(profile).exchanges == ()


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
