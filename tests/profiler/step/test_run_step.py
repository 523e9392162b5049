"""The loss of a step, and batches of another size."""

import pytest
import torch

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.step.run_step import another_size, check_finite, check_loss, loss_in, resized

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
