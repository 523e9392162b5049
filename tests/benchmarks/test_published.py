"""Predicted beside published, at its smallest."""

import json
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from benchmarks import published
from benchmarks.measures.simulated.allocator import CachingAllocator
from benchmarks.measures.simulated.models import CompiledLoss
from benchmarks.measures.simulated.published import (
    Case,
    alive,
    calibrated,
    cases,
    measure,
    memory_errors,
    rates,
    speed_errors,
    targets,
    wrong_orders,
)
from lightning_osdp.planner.engine import Moment
from tests.support.tiers import slow

MIB = 2**20


def row(predicted_gib, predicted_tokens_per_s, **fields):
    case = {
        "set": "A", "model": "m", "machine": "8 @", "sequence": 8, "batch": 1, "checkpointing": "none",
        "strategy": "fully_shard",
        "reshard": "default", "gib": None, "tokens_per_s": None, "does_not_fit": False, "calibrates": False, **fields,
    }  # fmt: skip
    return {
        "case": case,
        "predicted_gib": predicted_gib,
        "live_gib": predicted_gib,
        "predicted_tokens_per_s": predicted_tokens_per_s,
        "device_gib": 80.0,
    }


ROWS = [
    row(40.0, 8000.0, gib=50.0, tokens_per_s=4000, calibrates=True, reshard="always"),
    row(54.0, 8800.0, gib=60.0, tokens_per_s=4200, reshard="never"),
    row(90.0, 1.0, does_not_fit=True),
    row(81.0, 1.0, tokens_per_s=4000),
]


def test_throughput_is_calibrated_by_one_row_and_memory_is_not():
    assert calibrated(ROWS, ROWS[1]) == 4400.0
    assert speed_errors(ROWS[:2], ["A"]) == pytest.approx([4400 / 4200 - 1])
    assert memory_errors(ROWS) == pytest.approx([40 / 50 - 1, 54 / 60 - 1])
    assert memory_errors([*ROWS, row(60.0, 1.0, set="R2", gib=40.0, holds_less=True)]) == memory_errors(ROWS)
    counted = {**row(40.0, 1.0, gib=50.0), "allocator_gib": 55.0}  # by the rules of the allocator, not by a share
    assert memory_errors([counted]) == pytest.approx([0.1])


def test_targets_name_what_is_off():
    found = {target.name.rpartition(": ")[2]: target for target in targets(ROWS)}
    assert found["GiB off by"].measured == pytest.approx(0.4)
    assert found["tokens/s off by"].measured == pytest.approx(0.1 / 0.05 - 1)
    fits = [target for target in targets(ROWS) if "whether it fits" in target.name]
    assert [target.is_met for target in fits] == [True, True, True, False]  # 81 GiB do not fit in 80


def test_every_row_states_what_was_measured():
    for case in cases():
        assert isinstance(case, Case)
        assert case.gib or case.tokens_per_s or case.step_s or case.does_not_fit
    names = {case.set for case in cases()}
    timed = [case.set for case in cases() if case.tokens_per_s]
    assert {*timed} < names
    for name in timed:  # one row alone calibrates nothing
        assert sum(case.calibrates for case in cases() if case.set == name) == (timed.count(name) > 1)


def test_rows_in_the_wrong_order_are_found_where_they_can_be_told_apart():
    pairs = [
        row(1.0, 900.0, tokens_per_s=1000),
        row(1.0, 800.0, tokens_per_s=1030),
        row(1.0, 700.0, tokens_per_s=1010),  # 1% and 2% from the others
        row(1.0, 950.0, tokens_per_s=500, model="another"),
    ]
    assert wrong_orders(pairs) == [(pairs[0], pairs[1])]
    assert wrong_orders(pairs[2:]) is None
    assert rates(pairs[:2]) == [1000 / 900, 1030 / 800]


def test_gradients_that_are_zeroed_first_are_not_there_in_the_first_forward():
    def moment(phase, reduced):
        return Moment(num_bytes=10.0 + reduced, phase=phase, operator="", parts={"reduced gradients": reduced})

    moments = [moment("forward", 4.0), moment("backward", 1.0), moment("forward", 3.0)]
    assert [each.num_bytes for each in alive(moments, zeroes_first=True)] == [10.0, 11.0, 13.0]
    assert alive(moments, zeroes_first=False) == moments


def test_a_compiled_loss_is_cross_entropy():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, 3, 3, 1])
    expected = F.cross_entropy(logits, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(3 * expected, logits)
    found = CompiledLoss.apply(logits, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, logits)[0], gradient)


def test_the_allocator_takes_the_smallest_block_and_splits_it():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(size * MIB, "compute") for size in (12, 30, 11))
    assert allocator.reserved_bytes == (12 + 30 + 12) * MIB  # multiples of 2 MiB
    allocator.free(second)
    allocator.free(first)
    allocator.allocate(10 * MIB, "compute")  # of the 12; the rest of 2 MiB is a block of its own
    allocator.allocate(2 * MIB, "compute")
    assert allocator.reserved_bytes == 54 * MIB
    allocator.allocate(25 * MIB, "communicate")  # no other stream's memory, though 30 MiB are free
    assert allocator.by_stream == {"compute": 54 * MIB, "communicate": 26 * MIB}
    allocator.free(third)
    allocator.allocate(int(11.5 * MIB), "compute")  # a rest of half a MiB is not split off
    assert allocator.reserved_bytes == 80 * MIB


def test_the_allocator_joins_free_neighbours_and_has_segments_for_what_is_small():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB, 0) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    allocator.allocate(15 * MIB, 0)
    assert allocator.reserved_bytes == 20 * MIB
    for _ in range(2048):
        allocator.allocate(1000, 0)  # 1024 bytes each
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(1, 0)
    assert allocator.reserved_bytes == 24 * MIB


def test_a_segment_that_grows_has_rests_of_any_size_and_is_larger_only_where_nothing_fits():
    allocator = CachingAllocator(expandable_segments=True)
    _, second, third = (allocator.allocate(size * MIB, "compute") for size in (12, 30, 11))
    assert allocator.reserved_bytes == 60 * MIB  # pages of 20 MiB; 7 MiB are free behind all
    allocator.free(second)
    allocator.allocate(7 * MIB, "compute")  # of the 30: those at the end may grow
    allocator.allocate(24 * MIB, "compute")  # 23 are free before the third, and 7 at the end, which grow to 27
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(third)
    allocator.allocate(33 * MIB + 512, "compute")  # of 23 and 11
    allocator.allocate(MIB - 1024, "compute")  # small tensors have another pool
    assert allocator.reserved_bytes == 82 * MIB
    allocator.allocate(2 * MIB, "compute")  # of the 3 at the end
    allocator.allocate(2 * MIB, "communicate")
    assert allocator.by_stream == {"compute": 82 * MIB, "communicate": 20 * MIB}


@pytest.mark.parametrize(
    ("checkpointing", "reshard", "zeroes_first"),
    [
        ("none", "always", True),
        *(slow("none", *case) for case in (("never", True), ("always", False), ("never", False))),
        *(
            slow(*case)
            for case in product(("full", "every second block", "by operation"), ("always", "never"), (False, True))
        ),
    ],
)
def test_torchs_own_step_holds_what_is_predicted_of_a_row(checkpointing, reshard, zeroes_first):
    common = {"set": "", "model": "tiny", "machine": "4 a100-80", "sequence": 256, "batch": 2, "gib": 1.0}
    found = measure(Case(checkpointing=checkpointing, reshard=reshard, zeroes_first=zeroes_first, **common))
    assert found["counted_gib"] == pytest.approx(found["live_gib"], rel=0.01)
    assert found["allocator_gib"] > found["counted_gib"]


def test_attention_takes_as_long_as_by_the_kernel_that_is_stated():
    common = {"set": "", "model": "tiny", "machine": "2 h200", "sequence": 2048, "batch": 2, "checkpointing": "none"}
    kernels = (None, "cudnn_2024", "flash2_h100")
    seconds = [measure(Case(**common, attention=kernel))["compute_s"] for kernel in kernels]
    assert seconds[0] < seconds[1] < seconds[2]


def test_fsdp1_has_a_pool_for_what_it_reduces():
    common = {"set": "", "model": "tiny", "machine": "4 a100-80", "sequence": 256, "batch": 2, "checkpointing": "none"}
    one, two = (measure(Case(strategy=strategy, **common)) for strategy in ("FULL_SHARD", "fully_shard"))
    assert one["reserved_gib"] - one["live_gib"] > two["reserved_gib"] - two["live_gib"] > 0


@pytest.mark.slow
def test_a_set_is_predicted_without_gpus(tmp_path, capsys):
    output = tmp_path / "results.json"
    published.main(output=output, quick=True)
    rows = json.loads(output.read_text())["published"]["rows"]
    assert [each["case"]["machine"] for each in rows] == ["8 @", "16x8 @, 8x400gbit"]
    # parameters and both moments are 12 bytes each, sharded over 8 or 128; gradients have a pool of their own beside
    difference = rows[0]["reserved_gib"] - rows[1]["reserved_gib"]
    assert difference * 2**30 == pytest.approx(16 * 8.03e9 * (1 / 8 - 1 / 128), rel=0.2)
    assert "memory" in capsys.readouterr().out
