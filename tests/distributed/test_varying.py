"""Batches of different lengths: the largest is planned for, or what is passed is told of at once."""

import pytest
import varying_cases as cases

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_the_longest_batch_can_be_planned_for_and_what_is_passed_is_told(ranks):
    for rank, found in enumerate(ranks(2).run(cases.varying)):
        (predicted, measured, table, told), longest = found["first"], found["longest"]
        assert measured > 3 * predicted  # the seventh step's, not one of the first
        assert "peak memory (steps 3 to 5, 7)" in table
        factor = (40 + 20 * rank) / 3
        assert f"OSDP: rank {rank} has a batch with {4 / 3:.3g} times as many elements" in " ".join(told)
        assert factor > 4
        assert longest[0] == found["given"][0] > predicted
        assert longest[1] <= longest[0] * 1.02
        assert longest[3] == []
        assert predicted < found["chosen"][0] < longest[0]
        assert "over memory_limit" not in " ".join(told)
        (over,) = [text for text in found["limited"][3] if "over memory_limit" in text]
        assert "step 7 took" in over
        assert f"on rank {rank}" in over


def test_micro_batches_as_large_as_the_data_and_limits_in_percent(ranks):
    for rank, found in enumerate(ranks(2).run(cases.sizes)):
        kind, told = found["beyond"]
        assert kind == "ConfigurationError"
        assert "got 512: the training data have 6 samples for a rank. Use at most 6." in told
        assert found["half"] == 2**33
        limit_bytes, micro_batch_size, told = found["scaled"]
        assert limit_bytes == round(0.95 * 2**34)
        assert micro_batch_size == 6
        assert rank or "is all that a rank has of the training data" in told


def test_lora_keeps_its_limit(ranks):
    for found in ranks(2).run(cases.adapted):
        assert len({predicted for _, predicted, _ in found}) > 1
        for limit_bytes, predicted, measured in found:
            assert predicted <= limit_bytes
            assert 0.99 * measured <= predicted <= 1.02 * measured


def test_a_model_that_does_not_fit_on_a_device_is_profiled_by_its_shapes(ranks):
    for found in ranks(2).run(cases.too_large):
        off, *planned = found["too large"]
        assert off < 1e-10
        assert tuple(planned) == found["moved"][1:]
        assert planned[-1] == "kept"
