"""Copies between a CUDA device and host memory that go on beside computing.

[Unvalidated on CUDA: tested with a stream in its place that copies as late as it may.]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CopyStream:
    """A stream of its own for copies, which are done one after the other.

    Memory that is copied to or from must live until computing has waited for the copy: the caller holds it. (That is
    not left to ``record_stream``: Python runs ahead of the device, and what it frees could not be given to others
    before the device had come there.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, to: Tensor, of: Tensor) -> Any:
        """Begins a copy once computing has come here; returns what marks its end, for `wait`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
            return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Has what computing does next wait for the end of a copy; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)
