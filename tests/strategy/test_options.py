"""Options of the strategy: what is refused, and with which text."""

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload

import lightning_osdp
from lightning_osdp import ConfigurationError, OSDPStrategy, SearchSpace
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.strategy.options import Options, check_fsdp_kwargs, pop_cpu_offload, pop_prefetch


def test_importing_registers_the_strategy_by_name():
    assert "osdp" in StrategyRegistry
    assert isinstance(StrategyRegistry.get("osdp"), OSDPStrategy)
    assert lightning_osdp.OSDPStrategy.strategy_name == "osdp"


def test_options_reach_the_planner_in_its_units(tmp_path):
    (tmp_path / "p.json").touch()
    found = Options(memory_limit="8GiB", plan=str(tmp_path / "p.json"), batch_size=3).checked()
    assert found.memory_limit_bytes == 8 * 2**30
    assert found.plan == tmp_path / "p.json"
    assert found.search_space == SearchSpace()


def test_limits_are_bytes_or_a_share_of_what_is_free():
    for given, expected in (
        ({}, (None, 1.0)),
        ({"memory_limit": "90%"}, (None, 0.9)),
        ({"memory_limit": " 12.5 %", "batch_size": "scale"}, (None, 0.125)),
        ({"batch_size": "scale"}, (None, 0.95)),
        ({"memory_limit": 2**20}, (2**20, 1.0)),
        ({"memory_limit": "24B"}, (24, 1.0)),
    ):
        found = Options(**given).checked()
        assert (found.memory_limit_bytes, found.memory_share) == expected, given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"memory_limit": "lots"}, "such as '8GiB' or '500MB', got 'lots'"),
        ({"memory_limit": -1}, "at least one byte, got -1"),
        ({"memory_limit": 24}, 'is 24 B, a number without a unit being bytes. Pass a text such as "24GiB", or "24B"'),
        ({"host_memory_limit": 24}, "host_memory_limit=24 is 24 B, a number without a unit being bytes. Pass a text"),
        ({"host_memory_limit": "half"}, "such as '8GiB' or '500MB', got 'half'"),
        ({"memory_limit": "0%"}, "more than 0% and at most 100% of the free memory, got '0%'"),
        ({"memory_limit": "101%"}, "more than 0% and at most 100% of the free memory, got '101%'"),
        ({"plan": "none/osdp_plan.json"}, "got 'none/osdp_plan.json', which does not exist"),
        ({"profile_batch": "shortest"}, "returns one, got 'shortest'"),
        ({"cost_model": "guess"}, "cost_model must be one of ('simulate', 'paper'), got 'guess'"),
        ({"batch_size": "big"}, "one of ('auto', 'divide', 'keep', 'scale') or at least 1, got 'big'"),
        ({"batch_size": 0}, "or at least 1, got 0"),
        ({"batch_size": True}, "or at least 1, got True"),
        ({"search": "luck"}, "search must be one of ('depth_first', 'greedy', 'exhaustive'), got 'luck'"),
        ({"global_batch_size": 0}, "global_batch_size must be None or at least 1, got 0"),
        ({"global_batch_size": True}, "global_batch_size must be None or at least 1, got True"),
        (
            {"global_batch_size": 8, "batch_size": "scale"},
            "got batch_size='scale', which chooses",
        ),
        ({"plan": 3}, "plan must be a Plan or the path of one, got 3"),
        ({"memory_limit": "9" * 400}, "A memory size must be less than 2^63 bytes (8 EiB), got '999"),
        ({"search": ["greedy"]}, "search must be one of ('depth_first', 'greedy', 'exhaustive'), got ['greedy']"),
        ({"search_space": {"modes": ("ZDP",)}}, "search_space must be None or a SearchSpace, got {'modes': ('ZDP',)}"),
        ({"accumulate_in_fp32": "no"}, "accumulate_in_fp32 must be True or False, got 'no'"),
        ({"forward_prefetch": "no"}, "forward_prefetch must be True or False, got 'no'"),
        ({"backward_prefetch": [1]}, "backward_prefetch must be a BackwardPrefetch or None, got [1]"),
        ({"state_dict_type": "half"}, "state_dict_type must be one of ('full', 'sharded'), got 'half'"),
        ({"mixed_precision": "bf16"}, "MixedPrecision of torch.distributed.fsdp, got 'bf16'. To train in mixed"),
        ({"memory_limt": "8GiB"}, "got 'memory_limt', which is none of them. Look for a spelling mistake"),
    ],
)
def test_options_that_cannot_be_used_are_refused(given, text):
    with pytest.raises(ConfigurationError) as refused:
        OSDPStrategy(**given)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("sharding_strategy", "SHARD_GRAD_OP", "search_space=SearchSpace(modes=...)"),
        ("auto_wrap_policy", {torch.nn.Linear}, "pass a plan of your own with plan="),
        ("device_mesh", (1, 2), "shards over all ranks"),
        ("ignored_modules", [torch.nn.Linear(1, 1)], "covers every parameter"),
        ("ignored_states", torch.ones(3), "covers every parameter"),
    ],
)
def test_arguments_that_the_plan_decides_are_refused_with_the_remedy(name, value, remedy):
    with pytest.raises(ConfigurationError) as refused:
        OSDPStrategy(**{name: value})
    assert f"OSDPStrategy cannot take {name}=" in str(refused.value)
    assert remedy in str(refused.value)


def test_flat_parameters_are_refused():
    with pytest.raises(ConfigurationError, match="needs use_orig_params=True"):
        check_fsdp_kwargs({"use_orig_params": False})


def test_other_arguments_reach_fsdp():
    strategy = OSDPStrategy(state_dict_type="sharded", sync_module_states=True, cpu_offload=False)
    assert strategy._state_dict_type == "sharded"
    assert strategy.kwargs == {"sync_module_states": True, "use_orig_params": True}


def test_offloading_to_the_cpu_has_all_states_and_frozen_shards_on_the_host():
    for value, places in (
        (None, ("device",)),
        (False, ("device",)),
        (CPUOffload(), ("device",)),
        (True, ("host",)),
        (CPUOffload(offload_params=True), ("host",)),
    ):
        given = {"cpu_offload": value, "other": 1}
        assert pop_cpu_offload(given, SearchSpace(slices=(1,))) == SearchSpace(
            slices=(1,), states=places, shards=places
        )
        assert given == {"other": 1}
    assert OSDPStrategy(cpu_offload=True)._units.options.search_space.states == ("host",)
    for given in ({"states": ("device", "host")}, {"shards": ("device", "host")}):
        with pytest.raises(ConfigurationError, match="got both"):
            OSDPStrategy(cpu_offload=True, search_space=SearchSpace(**given))
    with pytest.raises(ConfigurationError, match="cpu_offload must be None, True, False or a CPUOffload, got 'yes'"):
        OSDPStrategy(cpu_offload="yes")


def test_arguments_that_fully_shard_has_not_are_refused():
    with pytest.raises(ConfigurationError, match=r"^OSDPStrategy cannot take limit_all_gathers=False: fully_shard"):
        OSDPStrategy(limit_all_gathers=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, FSDP2(backward_prefetch="auto", forward_prefetch="auto")),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, FSDP2(backward_prefetch="pre", forward_prefetch="auto")),
        ({"forward_prefetch": False}, FSDP2(backward_prefetch="auto", forward_prefetch=False)),
        ({"backward_prefetch": None, "forward_prefetch": True}, FSDP2(backward_prefetch="none", forward_prefetch=True)),
    ],
)
def test_prefetch_settings_belong_to_the_plan(given, expected):
    given = {**given, "limit_all_gathers": True}
    assert pop_prefetch(given) == expected
    assert given == {"limit_all_gathers": True}


def test_prefetch_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="must be a BackwardPrefetch or None, got 'soon'"):
        pop_prefetch({"backward_prefetch": "soon"})
    text = r"^OSDPStrategy cannot take BackwardPrefetch\.BACKWARD_POST: .*BACKWARD_PRE or None"
    with pytest.raises(ConfigurationError, match=text):
        pop_prefetch({"backward_prefetch": BackwardPrefetch.BACKWARD_POST})


def test_a_dry_run_is_on_off_or_left_to_the_device():
    with pytest.raises(ConfigurationError, match="dry_run must be True, False or 'auto', got 'always'"):
        OSDPStrategy(dry_run="always")


def test_plans_change_for_longer_batches_or_not():
    for value in ("auto", None, 1):
        with pytest.raises(ConfigurationError, match=f"longer_batches must be True or False, got {value!r}"):
            OSDPStrategy(longer_batches=value)


def test_a_race_is_on_off_or_left_to_predictions():
    for race in ("sometimes", None, 1):
        with pytest.raises(ConfigurationError, match=f"race must be True, False or 'auto', got {race!r}"):
            OSDPStrategy(race=race)
