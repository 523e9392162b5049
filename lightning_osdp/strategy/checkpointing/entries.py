"""What a checkpoint has beside weights: plan and micro-batches that it was trained in, and random numbers of all ranks.

A run that is resumed learns of the first two before it plans, long before Lightning loads the checkpoint.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, is_zipfile

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
from lightning_osdp.errors import ConfigurationError, PlanFormatError
from lightning_osdp.profiler import tensors_in
from lightning_osdp.splitting import JoinedShards
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values, on_rank_zero

_STATES = ("state_dict", "optimizer_states")
"""Entries of a checkpoint that the strategy makes of shards."""
_PLAN = "osdp_plan"
"""Of a checkpoint's entry: the plan as JSON text."""
_DIVISION = "osdp_division"
"""Of another: samples of a micro-batch, and micro-batches of an optimizer step."""
_GENERATORS = "osdp_rng"
"""Of another: per rank, the states of its generators, as tensors and plain values."""


def check_whole(checkpoint: Mapping[str, Any]) -> None:
    """Raises a `ConfigurationError` if anything but the states of model and optimizers has a shard in it.

    Rank 0 writes the rest of a checkpoint, for all ranks: of a shard it would be rank 0's rows.
    """
    others = {key: value for key, value in checkpoint.items() if key not in _STATES}
    for path, value in tree_flatten_with_path(others)[0]:
        if any(isinstance(tensor, (DTensor, JoinedShards)) for tensor in tensors_in(value)):
            raise ConfigurationError(
                f"Expected whole tensors and plain values in a checkpoint, but its entry {keystr(path)} is a shard, of"
                " which only the rows of rank 0 would be saved. Save its full_tensor(), called on all ranks, in"
                " state_dict() of the callback or in on_save_checkpoint."
            )


def store_plan(plan: Plan | None, checkpoint: dict[str, Any]) -> None:
    """Writes the plan in use into a checkpoint, if there is one."""
    if plan is not None:
        checkpoint[_PLAN] = plan.to_json()


def store_division(workload: Workload, checkpoint: dict[str, Any]) -> None:
    """Writes the micro-batches in use, which a checkpoint's progress is counted in."""
    checkpoint[_DIVISION] = (workload.micro_batch_size, workload.num_micro_batches)


def stored_division(checkpoint: Mapping[str, Any]) -> Workload | None:
    """The micro-batches that a checkpoint's progress is counted in; None if those were of the user's own loaders."""
    if _DIVISION not in checkpoint:
        return None
    size, number = checkpoint[_DIVISION]
    return Workload(micro_batch_size=size, num_micro_batches=number)


def checkpoint_to_resume(trainer: pl.Trainer) -> str | Path | None:
    """The checkpoint that this fit will load once it is set up; None where it loads none.

    Lightning tells nobody before it loads: until then it is a variable of the method that calls setup.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is pl.Trainer._run.__code__ and frame.f_locals["self"] is trainer:
            path: str | Path | None = frame.f_locals["ckpt_path"]
            return path
    return trainer.ckpt_path


class Resumed(NamedTuple):
    """What a fit goes on from."""

    path: str
    division: Workload | None
    """As of `stored_division`."""
    plan: str | None
    """As JSON text; None where it was trained without."""


def read_resumed(trainer: pl.Trainer) -> Resumed | None:
    """What the checkpoint has that this fit will load; None where it loads none, or one that is not there.

    Nothing in it is executed. All ranks call it; raises a `ConfigurationError` if the checkpoint cannot be read.
    """
    path = checkpoint_to_resume(trainer)
    return None if path is None else on_rank_zero(lambda: _resumed(str(path)))


def _resumed(path: str) -> Resumed | None:
    files = get_filesystem(path)
    file = f"{path}/{_METADATA_FILENAME}" if files.isdir(path) else path
    if not files.isfile(file):
        return None  # as loading it will say
    with files.open(file, "rb") as content:
        if not is_zipfile(content):
            return None
        content.seek(0)
        try:
            saved = _read_inert(content)
        except Exception as error:  # damaged files are not refused by any one kind of error
            raise ConfigurationError(
                f"Expected a checkpoint at {path!r}, but it cannot be read: {type(error).__name__}: {error}. Use"
                " another one."
            ) from error
    return Resumed(path, stored_division(saved), _text_of_plan(saved))


def read_plan(path: Path) -> Plan:
    """Plan of a plan file or a checkpoint, of which nothing is executed; raises `PlanFormatError` if there is none."""
    try:
        is_checkpoint = path.is_dir() or (path.is_file() and is_zipfile(path))
    except (OSError, ValueError, BadZipFile):  # no file can have such a path, or it is damaged: reading it will say so
        is_checkpoint = False
    if not is_checkpoint:
        return Plan.load(path)
    file = path / _METADATA_FILENAME if path.is_dir() else path
    try:
        text = _text_of_plan(_read_inert(str(file))) if file.exists() else None
    except Exception as error:  # damaged files are not refused by any one kind of error
        raise PlanFormatError(
            f"Expected a checkpoint at {str(path)!r}, but {file.name!r} cannot be read: {type(error).__name__}:"
            f" {error}. Use another checkpoint, or plan anew by leaving out `plan=`."
        ) from error
    if text is None:
        raise PlanFormatError(
            f"Expected a plan file or a checkpoint trained under a plan at {str(path)!r}, got one without a plan. Plan"
            " anew by leaving out `plan=`."
        )
    return Plan.from_json(text, source=f"the plan in checkpoint {str(path)!r}")


def _text_of_plan(checkpoint: Mapping[str, Any]) -> str | None:
    text = checkpoint.get(_PLAN)
    return text if isinstance(text, str) else None


def _read_inert(file: Any) -> dict[str, Any]:
    """Texts, numbers, lists and dicts in a file of ``torch.save``, given by its path or opened.

    Whatever is something else is passed over: neither its class nor any function is looked up, so that a checkpoint
    with classes of its own can be read, and one that was made to do harm does none.
    """
    content = torch.PyTorchFileReader(file).get_record("data.pkl")
    saved = _InertUnpickler(BytesIO(content)).load()
    return saved if isinstance(saved, dict) else {}


class _Ignored:
    """Stands for every class, function and object, and can be called, filled and set as any of them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = update = _nothing


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Ignored]:
        del module, name
        return _Ignored

    def persistent_load(self, pid: object) -> _Ignored:
        del pid
        return _Ignored()


class Generators:
    """Those of one rank, Python's, NumPy's and torch's: a resumed run draws what an uninterrupted one does."""

    def __init__(self) -> None:
        self._in_mid_epoch: Mapping[str, Any] | None = None

    def save(self, checkpoint: dict[str, Any], device: torch.device) -> None:
        """Writes all ranks' states into a checkpoint that training can resume from; all ranks must call it."""
        if "optimizer_states" in checkpoint:
            checkpoint[_GENERATORS] = all_gather_values(_states(device))

    def resume(self, checkpoint: Mapping[str, Any], device: torch.device) -> None:
        """Goes on from a checkpoint's states, where as many ranks wrote it."""
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
