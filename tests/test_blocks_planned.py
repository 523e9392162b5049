"""Plans in which blocks recompute or offload what they save."""

import dataclasses

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.profile import BlockProfile
from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import simulate

KEEP = SearchSpace(activations=("keep",))
RECOMPUTE = SearchSpace(activations=("keep", "recompute"))


@pytest.fixture
def deep(model, operator):
    """Six blocks of two operators of 100 bytes, each of which saves 300 bytes a sample and takes 0.1 s."""
    operators = [
        operator(f"h.{block}.{index}", 100, activation_bytes_per_sample=300, forward_s_per_sample=0.1)
        for block in range(6)
        for index in range(2)
    ]
    profile = model(*operators)
    blocks = []
    for block in range(6):
        ((first, last),) = profile.spans[f"h.{block}"]
        ways = {
            choice: tuple(
                dataclasses.replace(
                    segment,
                    saved_bytes=Affine(0.0, 0.0 if index else inputs),
                    backward_workspace_bytes=Affine(0.0, 600.0 - inputs),
                )
                for index, segment in enumerate(profile.segments[first : last + 1])
            )
            for choice, inputs in (("recompute", 40.0), ("offload", 0.0))
        }
        blocks.append(
            BlockProfile(
                name=f"h.{block}",
                span=(first, last),
                segments=ways,
                rerun_s=Affine(0.0, 0.2),
                copied_bytes={"offload": Affine(0.0, 600.0)},
            )
        )
    return dataclasses.replace(profile, blocks=tuple(blocks))


def plan(profile, cluster, limit_bytes, **options):
    options = {"micro_batch_size": 1, "search_space": RECOMPUTE, **options}
    return make_plan(profile, cluster(2, seconds_per_byte=0.01), memory_limit_bytes=limit_bytes, **options)


def test_blocks_recompute_where_nothing_else_fits_and_no_more_of_them_than_that_takes(deep, cluster):
    everything = plan(deep, cluster, 10**6)
    assert everything.blocks == ()
    least = plan(deep, cluster, 10**6, search_space=SearchSpace(modes=("ZDP",), activations=("keep",))).peak_bytes
    with pytest.raises(InfeasibleError):
        plan(deep, cluster, least - 100, search_space=KEEP)
    numbers = []
    for limit_bytes in range(least, 1000, -100):
        try:
            found = plan(deep, cluster, limit_bytes)
        except InfeasibleError:
            break
        numbers.append(len(found.blocks))
        assert found.peak_bytes <= limit_bytes
        estimate = simulate(found, deep, cluster(2, seconds_per_byte=0.01))
        assert estimate.peak.peak_bytes <= found.peak_bytes
        assert estimate.time_s == pytest.approx(found.step_time_s)
        # those that are kept longest, and each frees what it would have saved but for its inputs
        assert [block.name for block in found.blocks] == [f"h.{index}" for index in range(len(found.blocks))]
        assert {(block.activations, block.frees_bytes) for block in found.blocks} <= {("recompute", 560)}
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 5


def test_recomputing_a_cheap_block_buys_a_gathered_one(deep, cluster):
    cheap = dataclasses.replace(
        deep, blocks=tuple(dataclasses.replace(block, rerun_s=Affine(0.0, 0.01)) for block in deep.blocks)
    )
    everything = plan(cheap, cluster, 10**6).peak_bytes
    limit_bytes = everything - 500
    without = plan(cheap, cluster, limit_bytes, search_space=KEEP)
    found = plan(cheap, cluster, limit_bytes)
    assert found.step_time_s < without.step_time_s * 0.9
    assert [block.name for block in found.blocks] == ["h.0"]
    assert {mode for unit in found.units for mode in unit.modes} == {"DP"}


def test_what_is_copied_takes_its_time(deep, cluster):
    space = SearchSpace(activations=("keep", "recompute", "offload"))
    slow, fast = (dataclasses.replace(cluster(2, seconds_per_byte=0.01), host_copy_s_per_byte=s) for s in (1.0, 1e-6))
    limit_bytes = (
        plan(deep, cluster, 10**6, search_space=SearchSpace(modes=("ZDP",), activations=("keep",))).peak_bytes - 700
    )
    options = {"memory_limit_bytes": limit_bytes, "micro_batch_size": 1, "search_space": space}
    assert {block.activations for block in make_plan(deep, slow, **options).blocks} == {"recompute"}
    found = make_plan(deep, fast, **options)
    assert {block.activations for block in found.blocks} == {"offload"}
    assert found.blocks[0].costs_s == pytest.approx(2 * 600 * 1e-6)


def test_blocks_may_be_given(deep, cluster):
    found = plan(deep, cluster, 10**6, blocks={"h.3": "recompute"})
    assert [(block.name, block.activations) for block in found.blocks] == [("h.3", "recompute")]
    free = plan(deep, cluster, 10**6)
    assert found.step_time_s == pytest.approx(free.step_time_s + 0.2)
    with pytest.raises(ConfigurationError, match=r"block 'h.9' to be one that was profiled"):
        plan(deep, cluster, 10**6, blocks={"h.9": "recompute"})


@pytest.mark.parametrize(
    ("offered", "text"),
    [
        (
            ("keep",),
            r"have blocks recompute or offload them: SearchSpace\(activations=\('keep', 'recompute', 'offload'\)\)",
        ),
        (
            ("keep", "recompute"),
            r"have blocks offload them: SearchSpace\(activations=\('keep', 'recompute', 'offload'\)\)",
        ),
    ],
)
def test_where_activations_dominate_the_error_says_what_would_help(deep, cluster, offered, text):
    with pytest.raises(InfeasibleError, match=rf"Activations dominate; {text}\.$"):
        plan(deep, cluster, 1000, micro_batch_size=8, search_space=SearchSpace(activations=offered))


def test_where_no_blocks_were_found_the_error_says_how_to_name_them(deep, cluster):
    with pytest.raises(InfeasibleError, match="name modules that may recompute them: activation_checkpointing_policy"):
        plan(dataclasses.replace(deep, blocks=()), cluster, 1000, micro_batch_size=8)
