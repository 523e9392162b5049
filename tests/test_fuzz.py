"""Random plan files, options, models and clusters: what comes of them is valid, or one of our errors.

``OSDP_FUZZ_EXAMPLES`` sets how many of each are tried.
"""

import json
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_osdp import (
    OSDPError,
    OSDPStrategy,
    Plan,
    PlanMethod,
    SearchSpace,
    TrainingStep,
    apply_plan,
    make_plan,
    profile_model,
)
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster, Link, UnitOverhead
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.profiler import fingerprint
from lightning_osdp.report.picture import save_picture
from lightning_osdp.report.tables import plan_table, render

fuzzed = settings(
    max_examples=int(os.environ.get("OSDP_FUZZ_EXAMPLES", "25" if settings().derandomize else "100")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
LINK = Link(latency_s=1e-5, seconds_per_byte=1e-9)
RANKS = Cluster(world_size=2, all_gather=LINK, reduce_scatter=LINK)

# ---- plan files

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 5), st.floats(), st.text(max_size=5),
    st.sampled_from(["", "0", "0.weight", "2", "ZDP", "DP", "every", "last", "recompute", "paper", "post", 10**400]),
)  # fmt: skip
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=5), SCALARS, max_size=3),
    st.lists(st.sampled_from(["ZDP", "DP"]), min_size=1, max_size=20),
)


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def two_ranks():
    """Makes this process one of two; the other does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def profile():
    module = net()
    step = TrainingStep(lambda batch: module(batch).sum(), lambda module: [torch.optim.AdamW(module.parameters())])
    return profile_model(module, torch.ones(2, 4), step)


@pytest.fixture(scope="module")
def written(profile):
    """JSON of a plan with units of one operator, in slices too."""
    space = SearchSpace(min_unit_bytes=0, share_units=False)
    plan = make_plan(profile, RANKS, memory_limit_bytes=2**30, micro_batch_size=2, search_space=space)
    document = json.loads(plan.to_json())
    del document["decisions"]
    document["units"][-1]["treatments"] = [{}, {"keep": "whole"}]
    return json.dumps(document)


@st.composite
def edits(draw):
    """Changes one entry, however deep: another value, deleted, repeated, or swapped with its neighbour."""
    places = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    return places, draw(st.sampled_from(["set", "set", "delete", "repeat", "swap"])), draw(VALUES)


def edit(document, places, how, value):
    holder, key = {"": document}, ""
    for place in places:
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        holder, key = inner, (list(inner) if isinstance(inner, dict) else range(len(inner)))[place % len(inner)]
    if how == "set":
        holder[key] = value
    elif how == "delete":
        del holder[key]
    elif isinstance(holder, list):
        if how == "repeat":
            holder.append(holder[key])
        else:
            holder[key], holder[key - 1] = holder[key - 1], holder[key]
    return document


def used(text, profile, folder):
    """A plan from this text is read, checked, shown, simulated and applied."""
    plan = Plan.from_json(text)
    assert Plan.from_json(plan.to_json()) == plan
    module = net()
    plan.check_matches(fingerprint(module), world_size=2)
    render(plan_table(plan))
    save_picture(plan, folder / "plan.svg", memory=[])
    root = apply_plan(module, plan, device=torch.device("cpu"))
    assert simulate(plan, profile, RANKS).peak.peak_bytes > 0
    return root


def test_the_plan_that_is_changed_can_be_used(two_ranks, profile, written, tmp_path):
    assert used(written, profile, tmp_path)(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.slow
@fuzzed
@given(changes=st.lists(edits(), min_size=1, max_size=3))
def test_an_edited_plan_works_or_is_refused(two_ranks, profile, written, tmp_path, changes):
    document = json.loads(written)
    for change in changes:
        if isinstance(document, (dict, list)):
            document = edit(document, *change)
    try:
        used(json.dumps(document), profile, tmp_path)
    except OSDPError:
        return


@fuzzed
@given(
    cut=st.floats(0, 1), flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 127)), max_size=3)
)
def test_a_damaged_plan_works_or_is_refused(two_ranks, profile, written, tmp_path, cut, flips):
    content = bytearray(written.encode())
    for place, byte in flips:
        content[int(place * len(content))] = byte
    path = tmp_path / "plan.json"
    path.write_bytes(bytes(content[: max(1, int(cut * len(content)))] if cut < 0.5 else content))
    try:
        used(Plan.load(path).to_json(), profile, tmp_path)
    except OSDPError:
        return


# ---- options

GIVEN = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.text(max_size=3), SCALARS, max_size=2),
    st.sampled_from(["8GiB", "1e3", "-1GB", "auto", "keep", "scale", "greedy", "full", "spawn", 1, 8, float("nan")]),
)  # fmt: skip
OPTIONS = [
    "memory_limit", "plan", "batch_size", "search", "search_space", "global_batch_size", "accumulate_in_fp32",
    "dry_run", "cost_model", "start_method", "state_dict_type", "backward_prefetch", "forward_prefetch",
    "mixed_precision", "sharding_strategy", "device_mesh", "use_orig_params", "ignored_states", "no_such_option",
]  # fmt: skip
LIMITS = ["modes", "sync", "slices", "activations", "min_unit_bytes", "share_units"]


@fuzzed
@given(st.dictionaries(st.sampled_from(OPTIONS), GIVEN, max_size=4))
@example({"dry_run": []})
def test_options_are_taken_or_refused(options):
    try:
        strategy = OSDPStrategy(**options)
    except OSDPError:
        return
    assert strategy.plan is None


@fuzzed
@given(st.dictionaries(st.sampled_from(LIMITS), GIVEN | st.lists(st.integers(1, 9)), max_size=3))
def test_search_spaces_are_taken_or_refused(limits):
    try:
        space = SearchSpace(**limits)
    except OSDPError:
        return
    assert all(getattr(space, name) == value for name, value in limits.items())


# ---- models and clusters

NUMBERS = st.sampled_from([0, 1, 3, 64, 10**6, 2**40, 2**62])
SECONDS = st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e9])


@fuzzed
@given(data=st.data())
def test_a_plan_is_made_or_refused(model, operator, data):
    draw = data.draw
    per_sample = ("forward_s", "backward_s", "activation_bytes", "backward_workspace_bytes")
    profile = model(
        *(
            operator(
                f"block.{index}" if index % 2 else f"m{index}",
                draw(NUMBERS),
                frozen=draw(st.booleans()),
                **{f"{name}_per_sample": draw(SECONDS) for name in per_sample},
            )
            for index in range(draw(st.integers(1, 5)))
        ),
        batch_bytes_per_sample=draw(SECONDS),
    )
    links = [Link(latency_s=draw(SECONDS), seconds_per_byte=draw(SECONDS)) for _ in range(2)]
    cluster = Cluster(
        world_size=draw(st.sampled_from([1, 2, 3, 4096, 10**6])),
        all_gather=links[0],
        reduce_scatter=links[1],
        overlaps=draw(st.booleans()),
        unit_overhead={"gather": UnitOverhead(fixed_s=draw(SECONDS))} if draw(st.booleans()) else {},
    )
    counts = st.sampled_from([-1, 0, 1, 2, 7, 64, 10**6, 2**62])
    try:
        plan = make_plan(
            profile,
            cluster,
            memory_limit_bytes=draw(NUMBERS | st.sampled_from([-1, 10**400])),
            micro_batch_size=draw(
                st.sampled_from(
                    [
                        lambda: draw(counts),
                        lambda: BatchPolicy.fixed(draw(counts), draw(counts)),
                        lambda: BatchPolicy.scale(draw(st.none() | counts), draw(counts)),
                        lambda: BatchPolicy.divide(draw(counts)),
                    ]
                )
            )(),
            method=PlanMethod(
                search=draw(st.sampled_from(["depth_first", "greedy", "exhaustive"])),
                cost_model=draw(st.sampled_from(["simulate", "paper"])),
            ),
        )
    except OSDPError:
        return
    assert Plan.from_json(plan.to_json()) == plan
