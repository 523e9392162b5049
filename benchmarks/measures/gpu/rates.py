"""Rates that a GPU reaches of its data sheet: the fractions that `lightning_osdp/machines/catalog.toml` assumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.measures.gpu.finding import Finding
from lightning_osdp.profiler.machine.stopwatch import fastest_s

_REPEATS, _NUM_CALLS = 5, 10
_PRODUCTS = {
    "square": (8192, 8192, 8192),
    "up of Llama 8B": (8192, 4096, 14336),
    "down of Llama 8B": (8192, 14336, 4096),
}
"""Rows, inner size and columns."""
_LENGTHS = (1024, 4096, 16384)
_NUM_HEADS, _HEAD_SIZE, _NUM_TOKENS = 32, 128, 16384
_COPIED_BYTES = 2**30


def rates(device: torch.device) -> Iterator[Finding]:
    """Lists TFLOP/s of matrix products and causal attention in bf16, and GB/s of copies."""
    seconds = partial(fastest_s, device=device, repeats=_REPEATS, num_calls=_NUM_CALLS)
    numbers = {}
    for name, (rows, inner, columns) in _PRODUCTS.items():
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        weight = torch.randn(columns, inner, device=device, dtype=torch.bfloat16)
        numbers[name] = 2 * rows * inner * columns / seconds(partial(F.linear, x, weight)) / 1e12
    yield Finding("rates: matrix products, TFLOP/s", is_good=True, numbers=numbers)
    for length in _LENGTHS:
        shape = (_NUM_TOKENS // length, _NUM_HEADS, length, _HEAD_SIZE)
        query, key, value = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        # products of queries with keys and of weights with values, of which causal attention needs half
        flops = 4 * _NUM_TOKENS * _NUM_HEADS * _HEAD_SIZE * length / 2
        attention: Callable[[], torch.Tensor] = partial(
            F.scaled_dot_product_attention, query, key, value, is_causal=True
        )
        result = attention()
        gradient = torch.randn_like(result)
        backward = partial(torch.autograd.grad, result, (query, key, value), gradient, retain_graph=True)
        numbers = {"forward": flops / seconds(attention) / 1e12, "backward": 2.5 * flops / seconds(backward) / 1e12}
        yield Finding(f"rates: causal attention over {length} tokens, TFLOP/s", is_good=True, numbers=numbers)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    numbers = {
        "on the device, read and written": 2 * _COPIED_BYTES / seconds(lambda: other.copy_(there)) / 1e9,
        "from the host": _COPIED_BYTES / seconds(lambda: there.copy_(host, non_blocking=True)) / 1e9,
        "to the host": _COPIED_BYTES / seconds(lambda: host.copy_(there, non_blocking=True)) / 1e9,
    }
    yield Finding("rates: copies, GB/s", is_good=True, numbers=numbers)
