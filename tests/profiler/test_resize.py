"""Batches of another size."""

import torch

from lightning_osdp.profiler.step.resize import another_size, resized


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
