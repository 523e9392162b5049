"""The loss of a step, and batches of another size."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.step.run_step import (
    another_size,
    check_finite,
    check_loss,
    loss_in,
    resized,
    samples_in,
)

LOSS = torch.ones(2, requires_grad=True).sum()


def test_the_loss_may_be_returned_alone_or_in_a_mapping():
    assert loss_in(LOSS) is LOSS
    assert loss_in({"logits": 1, "loss": LOSS}) is LOSS


@pytest.mark.parametrize("returned", [LOSS, {"loss": LOSS, "more": None}, LOSS.reshape(1), LOSS * float("nan")])
def test_a_scalar_with_a_gradient_is_one_whatever_its_value(returned):
    check_loss(returned)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_loss_that_is_not_finite_is_refused(value):
    check_finite(LOSS)
    with pytest.raises(ProfileError, match=rf"^Expected a finite loss on the profiling batch, got {value}\."):
        check_finite(LOSS * float(value))


def test_the_second_size_is_smaller_where_it_can_be():
    assert [another_size(size) for size in (1, 2, 3, 8)] == [2, 1, 1, 4]


def test_every_tensor_of_samples_is_resized_and_nothing_else():
    batch = {"x": torch.arange(8).view(4, 2), "weights": torch.ones(3), "y": [torch.arange(4)], "name": "a", "n": 4}
    half = resized(batch, 4, 2)
    assert half["x"].tolist() == [[0, 1], [2, 3]]
    assert half["y"][0].tolist() == [0, 1]
    assert half["weights"].tolist() == [1, 1, 1]
    assert (half["name"], half["n"]) == ("a", 4)
    assert resized([torch.arange(1)], 1, 2)[0].tolist() == [0, 0]


def test_a_batch_without_such_a_tensor_cannot_be_resized():
    assert resized({"x": torch.ones(3), "s": torch.tensor(1.0)}, 4, 2) is None


SEQUENCES = [torch.arange(float(length)) for length in (3, 4, 2, 5)]


@pytest.mark.parametrize(
    ("batch", "expected", "number"),
    [
        (torch.ones(3, 7), (), 3),
        ((torch.ones(6, 2), torch.ones(6)), (4,), 6),
        ({"ids": SEQUENCES, "lengths": [3, 4, 2, 5]}, (), 4),
        ({"ids": SEQUENCES[:3], "lengths": torch.ones(3)}, (4,), 3),
        (({"ids": SEQUENCES}, ("name", None)), (4,), 4),
        (SEQUENCES, (4,), 4),
        ({"ids": SEQUENCES, "positions": torch.ones(1, 8)}, (4,), 4),
        # two views of six samples
        ({"views": [torch.ones(6, 2), torch.ones(6, 2)]}, (6,), 6),
        ({"views": [torch.ones(6, 2), torch.ones(6, 2)]}, (), 6),
        ((torch.ones(2, 3), torch.ones(2)), (2,), 2),
        ([{"image": each, "boxes": torch.ones(7, 4)} for each in SEQUENCES], (4,), 4),
        ({"weights": torch.tensor(1.0), "x": torch.ones(5)}, (), 5),
        ("text", (), 1),
        # batches of two loaders
        ([[torch.ones(4, 7), torch.ones(4, 3)], [torch.ones(5, 7), torch.ones(5, 3)]], (), 4),
    ],
)
def test_samples_are_rows_of_tensors_or_entries_of_lists(batch, expected, number):
    assert samples_in(batch, expected) == number


def test_lists_with_an_entry_for_each_sample_are_resized():
    targets = tuple({"boxes": torch.ones(length, 4)} for length in (1, 3, 4, 2))
    batch = {"ids": SEQUENCES, "lengths": [3, 4, 2, 5], "of": (targets, torch.arange(4)), "name": ("a", None, "b", "c")}
    half = resized(batch, 4, 2)
    assert [len(each) for each in half["ids"]] == half["lengths"] == [3, 4]
    assert ([len(each["boxes"]) for each in half["of"][0]], half["of"][1].tolist()) == ([1, 3], [0, 1])
    assert half["name"] == batch["name"]
    assert [len(each) for each in resized(SEQUENCES, 4, 5)] == [3, 4, 2, 5, 3]
    packed = pack_sequence(SEQUENCES, enforce_sorted=False)
    assert resized(packed, 4, 2) is None
    (same, x) = resized((packed, torch.arange(4)), 4, 2)
    assert same is packed
    assert x.tolist() == [0, 1]
