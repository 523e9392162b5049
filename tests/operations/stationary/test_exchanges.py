"""Exchanges of one rank, which are none; those of several ranks are in tests/distributed/stationary."""

import pytest
import torch

from lightning_osdp.operations.stationary.exchanges import Call, gather, part_sizes, sum_up, to_features, to_samples


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [0, 1, 5, 6, 7, 12])
def test_parts_are_cut_as_torch_cuts_chunks(total, num_ranks):
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(num_ranks)] if total else []
    assert part_sizes(total, num_ranks) == chunks + [0] * (num_ranks - len(chunks))


@pytest.mark.parametrize("exchange", [gather, sum_up, to_features, lambda x, call: to_samples(x, call, 3)])
def test_one_rank_exchanges_nothing(exchange):
    noted = []
    call = Call(None, 0, (4,), lambda *_: noted.append("backward"))
    rows = torch.randn(4, 3, requires_grad=True)
    found = exchange(rows, call)
    assert torch.equal(found, rows)
    found.backward(gradient := torch.randn(4, 3))
    assert torch.equal(rows.grad, gradient)
    assert noted == ["backward"]
