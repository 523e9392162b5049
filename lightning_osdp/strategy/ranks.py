"""The processes of a run: how ranks start, watch each other, and end."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies import FSDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_osdp.strategy.failure import FailureWatch, explain
from lightning_osdp.strategy.launcher import GatheringLauncher, StartMethod, check_start_method, refuse_in_notebook
from lightning_osdp.strategy.shortage import explain_shortage
from lightning_osdp.strategy.shutdown import settle_at_exit


class RanksStrategy(FSDPStrategy):
    """FSDP whose ranks are started by any method, end together when one fails, and leave no thread behind.

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

    def _watch_failures(self, run: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._watch = FailureWatch(store, run, rank=self.global_rank, world_size=self.world_size)
        self._watch.start()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain_shortage(exception, self)
        if self._watch is not None:
            explain(exception, self._watch.report(exception))

    @override
    def teardown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        super().teardown()
