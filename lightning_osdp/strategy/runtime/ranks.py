"""The processes of a run: how ranks start, watch each other, and end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_osdp.strategy.runtime.all_ranks import first_rank
from lightning_osdp.strategy.runtime.failure import FailureWatch, explain, is_echo, print_one_line
from lightning_osdp.strategy.runtime.interrupted import SavingTogether
from lightning_osdp.strategy.runtime.launcher import (
    GatheringLauncher,
    StartMethod,
    check_start_method,
    refuse_in_notebook,
)
from lightning_osdp.strategy.runtime.shutdown import settle_at_exit
from lightning_osdp.strategy.runtime.sigterm import EXIT_CODE, SigtermWatch, end_together, forget

log = logging.getLogger(__name__)

STALL_SHARE = 0.9
"""Of the process group's timeout, after which waiting ranks only know that they have waited."""


class RanksStrategy(FSDPStrategy):
    """Ranks that are started by any method, end together when one fails, and leave no thread behind.

    Args:
        start_method: ``"popen"``, ``"spawn"``, ``"forkserver"`` or ``"fork"``.
        **fsdp_kwargs: arguments of Lightning's ``FSDPStrategy``.

    Raises:
        ConfigurationError: there is no such start method.
    """

    def __init__(self, *, start_method: StartMethod, **fsdp_kwargs: Any) -> None:
        check_start_method(start_method)
        self._start_method = start_method
        self._watch: FailureWatch | None = None
        self._sigterm: SigtermWatch | None = None
        self._saving: SavingTogether | None = None
        super().__init__(**fsdp_kwargs)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        method = self._start_method
        if method == "popen":
            super()._configure_launcher()
        elif self.cluster_environment.creates_processes_externally:
            rank_zero_warn(f"OSDP: start_method={method!r} is ignored, the ranks have been started already.")
        else:
            self._launcher = GatheringLauncher(self, method)
        if _IS_INTERACTIVE and self._launcher is not None and not self._launcher.is_interactive_compatible:
            raise refuse_in_notebook(method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if dist.get_backend() == "gloo":
            settle_at_exit()
        if self.world_size > 1:
            self._watch_failures(self.broadcast(uuid4().hex))
        if self.lightning_module is not None:
            self._saving = SavingTogether(self._can_save)
            self._saving.begin(self.lightning_module.trainer)

    def _watch_failures(self, run: str) -> None:
        timeout = self._timeout or default_pg_timeout
        self._sigterm = SigtermWatch()
        self._watch = watch = FailureWatch(
            dist.distributed_c10d._get_default_store(),
            run,
            rank=self.global_rank,
            world_size=self.world_size,
            num_collectives=_collectives_on(self.root_device),
            stall_s=STALL_SHARE * timeout.total_seconds(),
            is_terminated=self._sigterm.is_received,
        )
        watch.start()
        assert self.lightning_module is not None
        end_together(self.lightning_module.trainer, lambda: watch.is_terminating)

    def _can_save(self) -> bool:
        """Whether all ranks can save a checkpoint, after an exception on this one; says so if they cannot."""
        can = self._has_states and (self._watch is None or self._watch.have_all_raised())
        if not can:
            why = "not all have raised one at the same point" if self._has_states else "there is nothing to save yet"
            log.warning("OSDP: no checkpoint is saved on this exception: all ranks must save together, and %s.", why)
        return can

    @property
    def _has_states(self) -> bool:
        """Whether there is a model to save."""
        return True

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._watch is not None:
            cause = self._watch.report(exception)
            explain(exception, cause)
            rank, first = self.global_rank, first_rank(exception)
            if first not in (None, rank):
                text = f"{type(exception).__name__}: {exception}".partition("\n")[0]
                print_one_line(exception, f"OSDP: rank {rank} ends as rank {first} does: {text}")
            elif first is None and cause is not None and is_echo(exception):
                print_one_line(exception, f"OSDP: rank {rank} ends, for another one failed. {cause}")
            if isinstance(exception, SIGTERMException):
                log.error("%s Rank %d ended between two steps.", cause, self.global_rank)
                # Lightning's launcher kills this process as soon as another one ends with an error.
                exception.code = EXIT_CODE if self.local_rank == 0 else 0

    @override
    def teardown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            assert self._sigterm is not None
            self._sigterm.close()
            assert self.lightning_module is not None
            forget(self.lightning_module.trainer)
        if self._saving is not None:
            assert self.lightning_module is not None
            self._saving.end(self.lightning_module.trainer)
        super().teardown()


def _collectives_on(device: torch.device) -> Callable[[], int]:
    """Counts the collectives that this rank has entered; always none where the backend does not count them."""
    if dist.get_backend() not in {"gloo", "nccl"}:
        return int
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
    counts: Callable[[], int] = backend._get_sequence_number_for_group
    return counts
