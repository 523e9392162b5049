"""The loss in slices of tokens: torch's but for rounding, with logits of one slice alive at a time."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from lightning_osdp import chunked_cross_entropy
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler import LiveBytes


def whole(head, hidden, target, **options):
    return F.cross_entropy(head(hidden).flatten(0, -2), target.flatten().long(), **options)


def found(loss, head, hidden, target, **options):
    """Loss and gradients, of twice the loss."""
    head.zero_grad()
    hidden = hidden.clone().requires_grad_()
    value = loss(head, hidden, target, **options)
    (2 * value).backward()
    return [value.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())]


def case(shape=(3, 7), *, width=5, classes=11, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(width, classes, bias=bias).to(dtype)
    target = torch.randint(0, classes, shape)
    return head, torch.randn(*shape, width, dtype=dtype), target


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 21, 1000])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0, 5, 20])
@pytest.mark.parametrize("shape", [(3, 7), (21,)], ids=str)
def test_it_is_torchs_with_its_gradients(shape, ignored, label_smoothing, chunk_size):
    head, hidden, target = case(shape)
    target.view(-1)[:ignored] = 3
    options = {"ignore_index": 3 if ignored else -100, "label_smoothing": label_smoothing}
    ours = found(chunked_cross_entropy, head, hidden, target, chunk_size=chunk_size, **options)
    assert_close(ours, found(whole, head, hidden, target, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    head, hidden, target = case((64,), width=16, classes=50, bias=False, dtype=dtype)
    ours = found(chunked_cross_entropy, head, hidden, target, chunk_size=16)
    assert ours[0].dtype is torch.float32
    theirs = found(whole, copy.deepcopy(head).double(), hidden.double(), target)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one.double(), other, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_autocast():
    head, hidden, target = case((64,), width=16, classes=50, dtype=torch.float32)

    def under_autocast(loss):
        def run(*given, **options):
            with torch.autocast("cpu", torch.bfloat16):
                return loss(*given, **options)

        return run

    ours = found(under_autocast(chunked_cross_entropy), head, hidden, target, chunk_size=16)
    theirs = found(under_autocast(whole), head, hidden, target)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs] == [torch.float32] * 4
    assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_a_mean_over_no_token_is_not_a_number():
    head, hidden, target = case()
    target.fill_(-100)
    assert chunked_cross_entropy(head, hidden, target).isnan()
    assert whole(head, hidden, target).isnan()


def test_evaluation_and_heads_that_are_frozen():
    head, hidden, target = case()
    expected = whole(head, hidden, target)
    with torch.no_grad():
        assert_close(chunked_cross_entropy(head, hidden, target, chunk_size=4), expected)
    head.requires_grad_(False)
    assert_close(
        found(chunked_cross_entropy, head, hidden, target, chunk_size=4)[:2], found(whole, head, hidden, target)[:2]
    )


def test_the_head_is_called_once_and_keeps_its_own_forward():
    head, hidden, target = case()
    calls = []
    head.register_forward_hook(lambda _, given, output: calls.append((len(given), output.shape)))
    chunked_cross_entropy(head, hidden, target, chunk_size=4).backward()
    assert calls == [(2, torch.Size([]))]
    assert "forward" not in vars(head)
    with pytest.raises(IndexError):
        chunked_cross_entropy(head, hidden, target + 100)
    assert head(hidden).shape == (3, 7, 11)


@pytest.mark.parametrize(
    ("target", "chunk_size", "message"),
    [
        (torch.zeros(3, 7), 8, r"has one class, a whole number, .* \(3, 7, 5\), got shape \(3, 7\) of torch.float32"),
        (torch.zeros(21, dtype=torch.int64), 8, r"got shape \(21,\) of torch.int64"),
        (torch.zeros(3, 7, dtype=torch.int64), 0, "chunk_size to be a positive number of tokens, got 0"),
    ],
)
def test_wrong_arguments(target, chunk_size, message):
    head, hidden, _ = case()
    with pytest.raises(ConfigurationError, match=message):
        chunked_cross_entropy(head, hidden, target, chunk_size=chunk_size)


def test_logits_of_one_slice_are_alive_at_a_time():
    torch.manual_seed(0)
    head, hidden, target = nn.Linear(16, 4000), torch.randn(1024, 16), torch.arange(1024)
    peaks = {}
    for chunk_size in (1024, 64):
        with LiveBytes("cpu") as live:
            live.track([hidden, target, *head.parameters()])
            before = live.current_bytes
            chunked_cross_entropy(head, hidden.requires_grad_(), target, chunk_size=chunk_size).backward()
        peaks[chunk_size] = live.peak_bytes - before
        head.zero_grad()
    logits = 4000 * 4
    weights = 17 * logits  # as many as gradients of weights, of which there are two while they are added up
    assert peaks[64] < 3 * 64 * logits + 3 * weights < 2 * 1024 * logits < peaks[1024]
