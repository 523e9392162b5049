"""Hooks on what autograd saves, where ``torch.func``, which refuses them, may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import graph


@contextmanager
def saved_tensors_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """As of torch; what ``torch.func`` transforms runs without them."""
    disable = graph.disable_saved_tensors_hooks
    stack: Any = torch._C._autograd

    @contextmanager
    def without_own(message: str) -> Iterator[None]:
        top = stack._top_saved_tensors_default_hooks(True)
        if top is None or top[0] is not pack:
            with disable(message):
                yield
            return
        stack._pop_saved_tensors_default_hooks()
        try:
            with disable(message):
                yield
        finally:
            stack._push_saved_tensors_default_hooks(pack, unpack)

    with graph.saved_tensors_hooks(pack, unpack), patch.object(graph, "disable_saved_tensors_hooks", without_own):
        yield
