"""Second try of a micro-batch, under another plan, where a rank has run out of memory in the first one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import Closure
from typing_extensions import override

from lightning_osdp.apply import ShardedModel
from lightning_osdp.errors import CalledOffError, OSDPError
from lightning_osdp.profiler import empty_cache, is_out_of_memory, snapshot
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values
from lightning_osdp.strategy.runtime.error_texts import last_checkpoint, place_of_shortage
from lightning_osdp.strategy.runtime.ranks import collectives_by_group
from lightning_osdp.strategy.sharding.units import Units

T = TypeVar("T")


class SecondTries:
    """Second tries of micro-batches in a fit with automatic optimization, where they are asked for.

    There are none where hooks or the host may change weights within backward.

    Attributes:
        fall_back: as of `run_or_fall_back`, in micro-batches from now on; None: they are run once.
    """

    def __init__(self, units: Units) -> None:
        self._units = units
        self.fall_back: Callable[[str], None] | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Puts itself around forward and backward of each micro-batch."""
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        loop._make_closure = partial(self._make_closure, trainer, loop._make_closure)

    @staticmethod
    def end(trainer: pl.Trainer) -> None:
        """Leaves the Trainer, with all others that have put themselves around micro-batches."""
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)

    def _make_closure(self, trainer: pl.Trainer, make: Callable[..., Closure], *args: Any, **kwargs: Any) -> Closure:
        """Makes Lightning's closure of a micro-batch, with `_run` around it."""
        made = make(*args, **kwargs)
        is_first = made._zero_grad_fn is not None
        return _Around(made, partial(self._run, trainer, made.closure, (args, kwargs), is_first=is_first))

    def _run(self, trainer: pl.Trainer, micro_batch: Callable[[], Any], arguments: Any, *, is_first: bool) -> Any:
        sharded, fall_back = self._units.sharded, self.fall_back
        if fall_back is None or sharded.hands_gradients_over:
            return micro_batch()

        def fall_back_once(why: str) -> None:
            self.fall_back = None  # an optimizer may run a micro-batch several times
            fall_back(why)

        return run_or_fall_back(micro_batch, trainer, sharded, arguments, is_first=is_first, fall_back=fall_back_once)


class _Around(Closure):
    """Closure of a micro-batch with something around it.

    The other closure does not refer to it: the batch is freed with it, and not when Python next looks for cycles.
    """

    def __init__(self, made: Closure, run: Callable[[], Any]) -> None:
        super().__init__(made._step_fn, made._backward_fn, made._zero_grad_fn)
        self._run = run

    @override
    def closure(self, *args: Any, **kwargs: Any) -> Any:
        return self._run()


def run_or_fall_back(
    micro_batch: Callable[[], T],
    trainer: pl.Trainer,
    sharded: ShardedModel,
    arguments: Any,
    *,
    is_first: bool,
    fall_back: Callable[[str], None],
) -> T:
    """Runs forward and backward; if memory runs out, all ranks undo what they did, fall back, and run them again.

    Random numbers, gradients of earlier micro-batches, buffers, attributes and what was logged are as before the first
    try, so that training goes on as if there had been none. Copies for that are made in any case, gradients on the
    host; and ranks meet before each collective, so that steps take longer. Weights do not change in a micro-batch.

    Args:
        micro_batch: forward and backward of this rank.
        trainer: whose micro-batch it is.
        sharded: the model.
        arguments: of the step, which it may change.
        is_first: True of the first micro-batch of a step, which drops gradients of the step before.
        fall_back: changes to a plan that has room, on all ranks; it is given which rank ran out of memory, and where.

    Raises:
        Exception: of the micro-batch; one that memory ran out, if others may wait for this rank in a collective.
        OSDPError: memory ran out, and ranks have entered different collectives, as of the user's own code: the next one
            of a rank would be taken for another one that has begun.
    """
    restore = snapshot(trainer.lightning_module, arguments, trainer.fit_loop.epoch_loop._results)
    restore_gradients = None if is_first else sharded.copy_gradients()
    place = ""
    try:
        with sharded.meeting():
            return micro_batch()
    except CalledOffError:
        pass
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place = place_of_shortage(sharded)
        if not sharded.call_off():
            raise
    places, entered = zip(*all_gather_values((place, collectives_by_group())), strict=True)
    rank, place = next((rank, each) for rank, each in enumerate(places) if each)
    why = f"rank {rank} ran out of memory in {place}"
    groups = {name for counts in entered for name in counts}
    if any(len({counts[name] for counts in entered if name in counts}) > 1 for name in groups):
        raise OSDPError(
            f"{why[0].upper()}{why[1:]} under a plan that is tried, when other ranks had begun a collective that it has"
            " not come to, as code of yours may have in forward: the step cannot be taken again."
            " OSDPStrategy(race=False, longer_batches=False) tries no plans, and a lower memory_limit leaves more"
            f" room.{last_checkpoint(trainer)}"
        )
    sharded.forget_step()
    gc.collect()  # errors keep tensors in reference cycles
    empty_cache(trainer.strategy.root_device)
    if restore_gradients is not None:
        restore_gradients()
    restore()
    fall_back(why)
    # the change of the plan has units reduce gradients at once
    with sharded.accumulating() if trainer.fit_loop._should_accumulate() else nullcontext():
        return micro_batch()
