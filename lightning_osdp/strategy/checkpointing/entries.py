"""Entries of a checkpoint beside weights: the plan, the micro-batches, and the states of all ranks' generators.

A resumed run needs plan and micro-batches before it plans, long before Lightning loads the checkpoint.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple
from zipfile import is_zipfile

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.step import Workload
from lightning_osdp.errors import ConfigurationError, OSDPError, PlanFormatError
from lightning_osdp.operations.splitting import JoinedShards
from lightning_osdp.profiler import tensors_in
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values, on_rank_zero

_STATES = ("state_dict", "optimizer_states")
"""Keys of the entries that the strategy makes of shards."""
_PLAN = "osdp_plan"
"""Key of the plan, as JSON text."""
_RACED = "osdp_raced"
"""Key that is there, with True, where the plan has won a race."""
_DIVISION = "osdp_division"
"""Key of a pair: samples of a micro-batch, and micro-batches of an optimizer step."""
_GENERATORS = "osdp_rng"
"""Key of a list by rank: the states of a rank's generators, as tensors and plain values."""


def check_whole(checkpoint: Mapping[str, Any]) -> None:
    """Raises a `ConfigurationError` if anything but the states of model and optimizers has a shard in it.

    Rank 0 writes all other entries for all ranks, so that of a shard only rank 0's rows would be saved.
    """
    plain = {key: value for key, value in checkpoint.items() if key not in _STATES}
    for path, value in tree_flatten_with_path(plain)[0]:
        if any(isinstance(tensor, (DTensor, JoinedShards)) for tensor in tensors_in(value)):
            raise ConfigurationError(
                f"Expected whole tensors and plain values in a checkpoint, but its entry {keystr(path)} is a shard, of"
                " which only the rows of rank 0 would be saved. Save its full_tensor(), called on all ranks, in"
                " state_dict() of the callback or in on_save_checkpoint."
            )


def store_plan(plan: Plan | None, checkpoint: dict[str, Any], *, is_raced: bool = False) -> None:
    """Writes the plan in use into a checkpoint, if there is one, and whether a race has found it."""
    if plan is not None:
        checkpoint[_PLAN] = plan.to_json()
    if is_raced:
        checkpoint[_RACED] = True


def store_division(workload: Workload, checkpoint: dict[str, Any]) -> None:
    """Writes the micro-batches in which training counts its progress into a checkpoint."""
    checkpoint[_DIVISION] = (workload.micro_batch_size, workload.num_micro_batches)


def stored_division(checkpoint: Mapping[str, Any]) -> Workload | None:
    """Reads in which micro-batches a checkpoint counts progress; None where the user's own loaders gave them."""
    if _DIVISION not in checkpoint:
        return None
    size, number = checkpoint[_DIVISION]
    return Workload(micro_batch_size=size, num_micro_batches=number)


def checkpoint_to_resume(trainer: pl.Trainer) -> str | Path | None:
    """Path of the checkpoint that this fit will load after setup; None where the fit loads none.

    Until Lightning loads the checkpoint, its path is a local variable of `Trainer._run`, which calls setup.
    """
    runs = (frame.f_locals for frame, _ in walk_stack(None) if frame.f_code is pl.Trainer._run.__code__)
    path: str | Path | None = next((run["ckpt_path"] for run in runs if run["self"] is trainer), trainer.ckpt_path)
    return path


class Resumed(NamedTuple):
    """Checkpoint that a fit goes on from."""

    path: str
    division: Workload | None
    """Micro-batches that its progress is counted in, as from `stored_division`."""
    plan: str | None
    """Plan as JSON text; None where training had none."""
    loops: Mapping[str, Any]
    """State of Lightning's loop of fitting, numbers by names."""
    is_raced: bool = False
    """True if the plan has won a race."""


def read_resumed(trainer: pl.Trainer) -> Resumed | None:
    """Reads the checkpoint that this fit will load; None where the fit loads none, or where no file is at its path.

    All ranks call it. Nothing in the checkpoint is executed.

    Raises:
        ConfigurationError: the checkpoint cannot be read.
    """

    def read(path: str) -> Resumed | None:
        saved = _read_entries(path, ConfigurationError, "Use another one.")
        if not saved:
            return None
        loops = saved.get("loops")
        loops = loops.get("fit_loop") if isinstance(loops, dict) else None
        loops = loops if isinstance(loops, dict) else {}
        return Resumed(path, stored_division(saved), _plan_text(saved), loops, is_raced=_RACED in saved)

    path = checkpoint_to_resume(trainer)
    return None if path is None else on_rank_zero(lambda: read(str(path)))


def read_plan(path: Path) -> Plan:
    """Reads the plan in a plan file or a checkpoint, of which nothing is executed.

    Raises:
        PlanFormatError: the file cannot be read, or has no plan.
    """
    advice = "Use another checkpoint, or plan anew by leaving out `plan=`."
    saved = _read_entries(str(path), PlanFormatError, advice)
    if saved is None:
        return Plan.load(path)
    text = _plan_text(saved)
    if text is None:
        raise PlanFormatError(
            f"Expected a plan file or a checkpoint trained under a plan at {str(path)!r}, got one without a plan. Plan"
            " anew by leaving out `plan=`."
        )
    return Plan.from_json(text, source=f"the plan in checkpoint {str(path)!r}")


def _plan_text(checkpoint: Mapping[str, Any]) -> str | None:
    text = checkpoint.get(_PLAN)
    return text if isinstance(text, str) else None


def _read_entries(path: str, error_type: type[OSDPError], advice: str) -> dict[str, Any] | None:
    """Reads texts, numbers, lists and dicts of a checkpoint, full or sharded; None where no file of ``torch.save`` is.

    No class and no function that the file names is looked up: a checkpoint with classes of its own can be read, and
    one that was made to do harm does none.

    Raises:
        OSDPError: an ``error_type`` with this advice, where the checkpoint is damaged.
    """
    files = get_filesystem(path)
    file = f"{path}/{_METADATA_FILENAME}" if files.isdir(path) else path
    if not files.isfile(file):
        return None if file == path else {}  # a folder without metadata is no plan file either
    with files.open(file, "rb") as opened:
        try:
            if not is_zipfile(opened):
                return None
            opened.seek(0)
            saved = _InertUnpickler(BytesIO(torch.PyTorchFileReader(opened).get_record("data.pkl"))).load()
        except Exception as error:  # damaged files raise errors of many types
            raise error_type(
                f"Expected a checkpoint at {path!r}, but it cannot be read: {type(error).__name__}: {error}. {advice}"
            ) from error
    return saved if isinstance(saved, dict) else {}


class _Ignored:
    """Stand-in for every class, function and object of a pickle: it can be called, filled and set as any of them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = update = _nothing


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, *_: str) -> type[_Ignored]:
        return _Ignored

    def persistent_load(self, _: object) -> _Ignored:
        return _Ignored()


class Generators:
    """Random number generators of one rank: Python's, NumPy's and torch's.

    Checkpoints have their states, so that a resumed run draws the numbers that an uninterrupted one draws.
    """

    def __init__(self) -> None:
        self._in_mid_epoch: Mapping[str, Any] | None = None

    def save(self, checkpoint: dict[str, Any], device: torch.device) -> None:
        """Writes the states of all ranks into a checkpoint with optimizer states; all ranks must call it."""
        if "optimizer_states" in checkpoint:
            checkpoint[_GENERATORS] = all_gather_values(_states(device))

    def resume(self, checkpoint: Mapping[str, Any], device: torch.device) -> None:
        """Restores the states in a checkpoint, if this run has as many ranks as the run that wrote it."""
        saved, num_ranks = checkpoint.get(_GENERATORS), dist.get_world_size()
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
        # Training begins with a new loader iterator, which draws from the generators. The iterator of the run that
        # saved in mid-epoch had drawn before the states were saved, so `begin` restores them once more.
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]
        self._in_mid_epoch = states if epochs["processed"] < epochs["started"] else None

    def begin(self, device: torch.device) -> None:
        """Restores states of mid-epoch once more; call it when training begins, after the loader's iterator."""
        if self._in_mid_epoch is not None:
            _set(self._in_mid_epoch, device)
            self._in_mid_epoch = None


def _states(device: torch.device) -> dict[str, Any]:
    states = _collect_rng_states(include_cuda=False)
    if "numpy" in states:
        kind, key, *rest = states["numpy"]
        states["numpy"] = (kind, key.tolist(), *rest)  # torch.load(weights_only=True) refuses arrays
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def _set(states: Mapping[str, Any], device: torch.device) -> None:
    _set_rng_states(dict(states))
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"], device)
