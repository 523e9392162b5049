"""Hooks on tensors that autograd saves, for steps in which ``torch.func``, which refuses such hooks, may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import graph


@contextmanager
def saved_tensors_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Applies torch's ``saved_tensors_hooks``, but for functions that ``torch.func`` transforms."""
    disable = graph.disable_saved_tensors_hooks
    stack: Any = torch._C._autograd

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        top = stack._top_saved_tensors_default_hooks(True)
        with ExitStack() as cleanup:
            # torch raises where hooks are set: others than these are the model's, whose error stays
            if top is not None and top[0] is pack:
                stack._pop_saved_tensors_default_hooks()
                cleanup.callback(stack._push_saved_tensors_default_hooks, pack, unpack)
            with disable(message):
                yield

    with graph.saved_tensors_hooks(pack, unpack), patch.object(graph, "disable_saved_tensors_hooks", disabled):
        yield
