"""Layers that torch has for some CPUs only, found by trying them."""

from functools import cache

import pytest
import torch
from torch import nn

LOW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Precisions that need instructions of their own, as Lightning names them."""


@cache
def refused_lstm(precision):
    """Words of torch where this CPU has no LSTM in a precision; nothing where it has one."""
    if precision not in LOW:
        return ""
    with torch.autocast("cpu", dtype=LOW[precision]), torch.random.fork_rng():
        try:
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        except RuntimeError as error:
            return str(error)
    return ""


def skip_what_it_lacks(module, precision):
    """Skips a test of a module that this CPU cannot run in a precision."""
    has_lstm = any(isinstance(child, nn.LSTM) for child in module.modules())
    if has_lstm and (told := refused_lstm(precision)):
        pytest.skip(f"{precision} on this CPU: {told}")
