"""Models of every family train under every kind of plan, their own ones included, as under DDP and in one process."""

import pytest

from lightning_osdp import TrainingStep, profile_model
from lightning_osdp.core.units import partition
from tests.distributed.support.families import check, family
from tests.distributed.support.models import build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


FAMILIES = [
    "ConvBatchNorm", "Adapters", "FrozenBias", "CalledTwice", "Tiny", "Containers", "EncoderDecoder", "CrossAttention",
    "Recurrent", "ReturnsItsLoss",
]  # fmt: skip
GIVEN = ["zdp", "dp", "mixed"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ReturnsItsLoss", ["mixed"]),
        *(slow(name, GIVEN) for name in FAMILIES),
    ],
)
def test_every_plan_equals_ddp_and_one_process(ranks, name, given):
    found = ranks(2).run(family, name=name, optimizer="adamw", dtype="float64", given=given)[0]
    assert list(found["plans"]) == [*given, "own", "own, little memory"]
    check(found, 1e-9)


@pytest.mark.parametrize(
    ("name", "optimizer", "tolerance"),
    [*((name, "sgd", 1e-6) for name in FAMILIES), ("ConvBatchNorm", "adamw", 1e-4), ("EncoderDecoder", "adamw", 1e-4)],
)
@pytest.mark.slow
def test_a_mixed_plan_equals_ddp_in_float32(ranks, name, optimizer, tolerance):
    options = {"given": ["mixed"], "own": 0}
    check(ranks(2).run(family, name=name, optimizer=optimizer, dtype="float32", **options)[0], tolerance)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_a_mixed_plan_equals_ddp_and_one_process_on_four_ranks(ranks, name):
    check(ranks(4).run(family, name=name, optimizer="adamw", dtype="float64", given=["mixed"], own=0)[0], 1e-9)


@pytest.mark.parametrize(
    ("name", "whole", "parts"),
    [
        # three modules that share a weight, far apart: it goes to the unit of the whole model
        ("CrossAttention", {"decoder.0.key"}, {"encoder.0", "embedding", "output.1"}),
        # attention reads its projection without calling it
        slow(
            "EncoderDecoder", {"net.decoder.layers.0.multihead_attn"}, {"net.decoder.layers.0.multihead_attn.out_proj"}
        ),
    ],
)
def test_what_is_read_elsewhere_is_no_unit_of_its_own(name, whole, parts):
    module = build(name)
    batch = next(iter(module.loader(0, 1)))
    profile = profile_model(module, batch, TrainingStep(module.loss), activations=("keep",))
    units = {unit.name for unit in partition(profile, min_unit_bytes=0)}
    assert whole <= units
    assert not parts & units
