"""Values as JSON, and back."""

import dataclasses
import json
import math

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.cluster import Cluster, Link, UnitOverhead
from lightning_osdp.core.profile import (
    BlockProfile,
    Crossing,
    Cut,
    ModelProfile,
    OperatorProfile,
    OptimizerProfile,
    ParameterProfile,
    Rerun,
    Segment,
)
from lightning_osdp.errors import PlanFormatError

OPERATOR = OperatorProfile(
    name="a.ü",
    kind="Linear",
    enclosing=("a", ""),
    parameter_bytes=8,
    num_trainable=2,
    gathered_bytes=8,
    trainable_bytes=8,
    gradient_bytes=8,
    optimizer_bytes=16,
    parameters=(ParameterProfile(position=0, num_elements=2, itemsize=4, gathered_itemsize=4, num_rows=2),),
    cut=Cut(num_features=2, is_cut=(True, False), input_bytes=Affine(1.0, 1 / 3)),
)
SEGMENT = Segment(operator="a.ü", forward_s=Affine(0.1, 0.2), settled_bytes=Affine(0.0, 1e-9))
PROFILE = ModelProfile(
    operators=(OPERATOR,),
    segments=(SEGMENT, Segment()),
    spans={"a": ((0, 0), (1, 1))},
    blocks=(
        BlockProfile(name="a", span=(0, 0), segments={"recompute": (SEGMENT,)}, copied_bytes={"offload": Affine(1.0)}),
    ),
    crossings=(Crossing(Affine(3.0), {"keep": (0, 1), "recompute": ()}),),
    rerun={"a": Rerun((0, 0), True, ("a.b",))},
    copied=(((0, 0), Affine(5.0)),),
    fingerprint={"a.weight": "[2] float32"},
    optimizer=OptimizerProfile(temporaries=((1.0, 2.0),), is_foreach=True),
    children_apart=True,
    notes=("a note",),
)
LINK = Link(latency_s=1e-5, seconds_per_byte=1e-9)
CLUSTER = Cluster(
    world_size=4,
    all_gather=LINK,
    reduce_scatter=dataclasses.replace(LINK, steps=((4096.0, 1e-3), (16384.0, 2e-3))),
    unit_overhead={"gather": UnitOverhead(fixed_s=1e-4)},
    overlaps=True,
    memory_bytes=2**40,
)


@pytest.mark.parametrize("value", [PROFILE, CLUSTER], ids=["profile", "cluster"])
def test_what_is_read_is_what_was_written(value, tmp_path):
    value.save(tmp_path / "folder" / "value.json")
    read = type(value).load(tmp_path / "folder" / "value.json")
    assert read == value
    assert repr(read) == repr(value)  # floats to the last digit, and every part of its own type
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["value.json"]


def test_what_has_its_default_is_left_out():
    document = json.loads(CLUSTER.to_json())
    assert (document["schema_version"], document["kind"]) == (1, "Cluster")
    assert document["value"].keys() == {
        "world_size", "all_gather", "reduce_scatter", "unit_overhead", "overlaps", "memory_bytes"
    }  # fmt: skip


def changed(**entries):
    """The cluster's text with other entries; those that are None are left out."""
    document = json.loads(CLUSTER.to_json())
    document["value"] = {name: of for name, of in {**document["value"], **entries}.items() if of is not None}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be parsed"),
        ("[]", "got one of kind None"),
        (PROFILE.to_json(), "to be a Cluster that a fit has written, got one of kind 'ModelProfile'"),
        ('{"kind": "Cluster", "schema_version": 9}', "schema_version 1, got 9"),
        ('{"kind": "Cluster", "schema_version": 1}', "to be an object, got None"),
        (changed(world_size=None), r"missing: \['world_size'\], unknown: \[\]"),
        (changed(ranks=2), r"unknown: \['ranks'\]"),
        (changed(world_size=2.0), r"x at Cluster\.world_size to be a whole number below 2\^63, got 2.0"),
        (changed(world_size=True), r"x at Cluster\.world_size to be a whole number below 2\^63, got True"),
        (changed(world_size=2**63), "to be a whole number"),
        (changed(overlaps=1), r"x at Cluster\.overlaps to be true or false, got 1"),
        (changed(backend=1), r"x at Cluster\.backend to be a text, got 1"),
        (changed(unit_overhead=[]), r"x at Cluster\.unit_overhead to be an object, got \[\]"),
        (
            changed(all_gather={"latency_s": "1", "seconds_per_byte": 0}),
            r"x at Cluster\.all_gather\.latency_s to be a finite number, got '1'",
        ),
        (changed(host_copy_s_per_byte=math.inf), "to be a finite number, got inf"),
        (changed(host_copy_s_per_byte=math.nan), "to be a finite number, got nan"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(text, message):
    with pytest.raises(PlanFormatError, match=message):
        Cluster.from_json(text, source="x")


@pytest.mark.parametrize("span", [[0], [0, 1, 2], 3])
def test_a_list_of_another_length_is_told(span):
    document = json.loads(PROFILE.to_json())
    document["value"]["blocks"][0]["span"] = span
    with pytest.raises(PlanFormatError, match=r"x at ModelProfile\.blocks\[0\]\.span to be a list"):
        ModelProfile.from_json(json.dumps(document), source="x")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(PlanFormatError, match=r"Expected a Cluster at '.*none.json', but it cannot be read"):
        Cluster.load(tmp_path / "none.json")


def test_numbers_that_json_has_not_are_not_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(CLUSTER, host_copy_s_per_byte=math.nan).to_json()
