"""Random number generators of all ranks in checkpoints, so that a resumed run draws what an uninterrupted one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_osdp.strategy.runtime.all_ranks import from_all_ranks

_KEY = "osdp_rng"
"""Of a checkpoint's entry: per rank, the states of its generators, as tensors and plain values."""


class Generators:
    """Those of one rank: Python's, NumPy's, torch's on the CPU and on the rank's GPU."""

    def __init__(self) -> None:
        self._in_mid_epoch: Mapping[str, Any] | None = None

    def save(self, checkpoint: dict[str, Any], device: torch.device) -> None:
        """Writes all ranks' states into a checkpoint that training can resume from; all ranks must call it."""
        if "optimizer_states" in checkpoint:
            checkpoint[_KEY] = from_all_ranks(_states(device))

    def resume(self, checkpoint: Mapping[str, Any], device: torch.device) -> None:
        """Goes on from a checkpoint's states, where as many ranks wrote it."""
        saved, num_ranks = checkpoint.get(_KEY), dist.get_world_size()
        if saved is None:
            return
        if len(saved) != num_ranks:
            rank_zero_info(
                f"OSDP: the checkpoint was written with a world size of {len(saved)}, this run's is {num_ranks}, so"
                " ranks keep their own random number generators: dropout is not that of an uninterrupted run."
            )
            return
        states = saved[dist.get_rank()]
        _set(states, device)
        # Training begins with a new iterator, which draws. The run that saved in mid-epoch had its own already.
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]
        self._in_mid_epoch = states if epochs["processed"] < epochs["started"] else None

    def begin(self, device: torch.device) -> None:
        """Training begins; the loader's iterator is there."""
        if self._in_mid_epoch is not None:
            _set(self._in_mid_epoch, device)
            self._in_mid_epoch = None


def _states(device: torch.device) -> dict[str, Any]:
    states = _collect_rng_states(include_cuda=False)
    if "numpy" in states:
        kind, key, *rest = states["numpy"]
        states["numpy"] = (kind, key.tolist(), *rest)  # torch.load takes no arrays with weights_only=True
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def _set(states: Mapping[str, Any], device: torch.device) -> None:
    _set_rng_states(dict(states))
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"], device)
