"""Texts appended to errors whose cause is known: a lack of memory, DTensors, or another rank's failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy

from lightning_osdp.apply import ONE_MESH, ShardedModel
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.profiler import is_out_of_memory
from lightning_osdp.strategy.checkpointing.saving import is_collecting_checkpoint
from lightning_osdp.strategy.runtime.failure import is_echo

_LINE = "_osdp_line"
"""Attribute of an error for the line that is printed in place of a traceback."""

_EXPLAINED = {
    # before words that torch may add of the operation
    **{words: f"OSDP: {advice}" for words, advice in ONE_MESH.items()},
    "its data is not allocated yet": (
        "OSDP: parameters, gradients and their norms are DTensors, of which torch.tensor() cannot"
        " make a list of values, as Lightning's grad_norm does. Take each value itself, on all ranks:"
        " {name: float(p.grad.norm()) for name, p in self.named_parameters() if p.grad is not None}."
    ),
    **dict.fromkeys(
        (
            "got mixed torch.Tensor and DTensor",
            "does not have a sharding strategy registered",
            "flatten unevenly sharded tensor",
            "without redistribution, which is disallowed",
            "Sharding propagation failed for",
            "is not supported for tensor subclasses",
        ),
        "OSDP: outside the forward of its own module a parameter may be a DTensor, this rank's rows of it. A term of"
        " the loss over parameters belongs into a module's forward, or into a fit without plan=, whose plan keeps"
        " whatever training_step reads gathered; to look at whole weights elsewhere: `with trainer.strategy.gathered():"
        " ...`.",
    ),
    "Checkpointing is not compatible with .grad()": (
        "OSDP: torch.autograd.grad cannot go through a block of the plan that recomputes and offloads. Leave those"
        ' out: OSDPStrategy(search_space=SearchSpace(activations=("keep", "recompute"))).'
    ),
    "appears to not have been used in the graph": (
        "OSDP: outside the forward of its own module a parameter may be a DTensor, this rank's rows of it, to which no"
        " graph leads. Call backward() for gradients of parameters; torch.autograd.grad gives those of inputs and"
        " activations."
    ),
    "are out of bounds for storage of size 0": (
        "OSDP: backward has come to weights of a module that are not gathered. Where gradients have a graph"
        " (create_graph=True), all that they are gradients of must be given to the module as arguments."
    ),
    "must have the same dtype, but got Double and Float": (
        "OSDP: training_step gets float64 as the loader gives it, as under DDP; FSDPStrategy rounds it to float32."
        ' Cast it there, as in x.float(), or train in float64: plugins=OSDPPrecision("64-true").'
    ),
    "LSTM forward propagation primitive": (
        "OSDP: torch has no LSTM for float32 inputs in the lower precision of autocast on this CPU, which lacks"
        " instructions for it. Give the LSTM inputs in that precision, as in self.lstm(x.bfloat16()) for"
        ' precision="bf16-mixed", or train with precision="32-true".'
    ),
}
"""Words of an error of torch or fairscale -> advice for user code that cannot run with sharded tensors, or here."""

_WITHOUT_VALUES = (
    "OSDP: while a full checkpoint is saved, weights and states of optimizers have values on rank 0 alone; on other"
    " ranks their tensors are on device meta. on_save_checkpoint may rename, add and leave out entries on all ranks;"
    " let it read values within `if trainer.is_global_zero: ...`, or take them from"
    " trainer.strategy.whole_state_dict(on_all_ranks=True)."
)


def place_of_shortage(sharded: ShardedModel) -> str:
    """Names the place in a step where memory ran out."""
    return sharded.place_in_step() or "the optimizer step"


def explain_step_error(
    error: BaseException, strategy: FSDPStrategy, sharded: ShardedModel | None, *, turn: str = ""
) -> None:
    """Appends advice to an error of known cause.

    Args:
        error: of a step, or of anything else.
        strategy: that trains.
        sharded: its model; None before the model is sharded.
        turn: name of the plan whose turn it is in a race; empty for none.
    """
    if is_out_of_memory(error) and sharded is not None and sharded.plan is not None:
        _append(error, _of_memory(strategy, sharded.plan, place_of_shortage(sharded), turn))
    advice = next((advice for words, advice in _EXPLAINED.items() if words in str(error)), None)
    is_saving = is_collecting_checkpoint(walk_tb(error.__traceback__))
    if strategy.global_rank and "meta" in str(error).lower() and is_saving:
        advice = _WITHOUT_VALUES
    if advice is not None and advice not in str(error):
        _append(error, advice)


def _of_memory(strategy: FSDPStrategy, plan: Plan, place: str, turn: str) -> str:
    """Names the rank, the place and the plan, and gives advice."""
    assert strategy.lightning_module is not None
    limit = format_bytes(plan.memory_limit_bytes)
    predicted = f" that is predicted to take {format_bytes(plan.peak_bytes)} of {limit}" if plan.peak_bytes else ""
    return (
        f"OSDP: rank {strategy.global_rank} ran out of memory in {place}, under a plan{predicted}. Pass a lower"
        f" memory_limit than {limit}, so that more is sharded, or use a smaller micro-batch."
        + (f" It was the turn of {turn!r} in a race of plans: race=False trains without one." if turn else "")
        + last_checkpoint(strategy.lightning_module.trainer)
    )


def last_checkpoint(trainer: pl.Trainer) -> str:
    """Says which checkpoint a Trainer saved last; empty for none."""
    callbacks = callbacks_of(trainer, ModelCheckpoint)
    saved = [(each._last_global_step_saved, each._last_checkpoint_saved) for each in callbacks]
    _, last = max(((step, path) for step, path in saved if path), default=(0, ""))
    return f" The last checkpoint is {Path(last)}." if last else ""


def explain_echo(error: BaseException, cause: str | None) -> None:
    """Appends the failure of another rank to an error that may be only its consequence."""
    if cause is not None and is_echo(error) and not cause.endswith(str(error)):
        _append(error, cause)


def _append(error: BaseException, text: str) -> None:
    """Appends lines to an error's text."""
    error.args = (f"{error}\n{text}", *error.args[1:])


def print_one_line(error: BaseException, line: str) -> None:
    """Has Python print only this line if nobody catches the error: another rank prints the traceback."""
    error.__dict__[_LINE] = line
    if getattr(sys.excepthook, "func", None) is not _print:
        sys.excepthook = partial(_print, sys.excepthook)


def _print(
    otherwise: Callable[..., None], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an uncaught error's line if it has one; calls the previous ``sys.excepthook`` otherwise."""
    line = getattr(error, _LINE, None)
    if line is None:
        otherwise(kind, error, trace)
    else:
        sys.stderr.write(line + "\n")
