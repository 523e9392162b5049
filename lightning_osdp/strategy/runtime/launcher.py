"""Start of ranks whose processes are not there yet: as scripts, or as children of this process."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
"""``"popen"`` runs the script once per rank; the others fork or spawn workers and leave this process to wait."""


def check_interactive(launcher: _Launcher | None, start_method: StartMethod) -> None:
    """Raises a `ConfigurationError` in a notebook or interactive session where this launcher cannot start ranks."""
    if _IS_INTERACTIVE and launcher is not None and not launcher.is_interactive_compatible:
        raise ConfigurationError(
            f"Expected start_method='fork' in a notebook or interactive session, got {start_method!r}, which would run"
            " the session's code again in every rank. Use Trainer(strategy='osdp_notebook') or OSDPStrategy("
            "start_method='fork'), or run a script."
        )


class GatheringLauncher(_MultiProcessingLauncher):
    """Lightning's multiprocessing launcher for sharded models.

    When fit ends, the LightningModule of the main process gets the whole weights, and its strategy the plan.
    Lightning's launcher would send back ``lightning_module.state_dict()``, which has shards here.

    Attributes:
        plan: in the main process, the plan that the ranks trained under.
        whole_state: in a worker, weights at the end of fit, whole on each node's first rank at least.
    """

    def __init__(self, strategy: ParallelStrategy, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self.plan: Plan | None = None
        self.whole_state: dict[str, Any] | None = None
        self._inherited: tuple[dict[str, str], _GlobalStateSnapshot] | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if self._start_method == "forkserver":
            self._inherited = dict(os.environ), _GlobalStateSnapshot.capture()
        if threading.current_thread() is not threading.main_thread():
            return super().launch(function, *args, trainer=trainer, **kwargs)
        # workers would run on after this process has ended
        before = signal.signal(signal.SIGTERM, lambda signum, _: self.kill(signum))
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, before)

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has the handler of `launch`
        if self._inherited is not None:
            # Lightning does this for spawned workers only. The fork server has the environment, seed included, of its
            # own start, and its children share memory: without copies all ranks would write to the same buffers.
            environment, global_states = self._inherited
            os.environ.update(environment)
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, return_queue, global_states)
        except BaseException as error:
            # Here the Trainer would call on_exception in the main process only.
            self._strategy.on_exception(error)
            raise

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        state, plan = self.whole_state, trainer.strategy.plan  # type: ignore[attr-defined]  # OSDPStrategy's
        weights_path: str | None = None
        names: list[str] = []
        if state is not None and trainer.state.fn == TrainerFn.FITTING:
            weights_path, names = str(Path(tempfile.mkdtemp()) / "weights.ckpt"), list(state)
            self._strategy.checkpoint_io.save_checkpoint(state, weights_path)
        best_model_path = getattr(trainer.checkpoint_callback, "best_model_path", None)
        plan_text = None if plan is None else plan.to_json()
        extra = {**self.get_extra_results(trainer), "plan": plan_text, "names": names}
        return _WorkerOutput(best_model_path, weights_path, trainer.state, results, extra)

    @override
    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: pl.Trainer) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)
        if worker_output.weights_path is not None:
            shutil.rmtree(Path(worker_output.weights_path).parent, ignore_errors=True)

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        if extra["plan"] is not None:
            self.plan = Plan.from_json(extra["plan"], source="the ranks' plan")
        module = trainer.lightning_module
        lost = sorted(set(extra["names"]) - set(module.state_dict()))
        if lost:
            rank_zero_warn(
                f"OSDP: {len(lost)} trained weights, such as {lost[0]!r}, are not in the main process: the ranks built"
                f" them in configure_model, {type(module).__name__} has none of that name here. Load the checkpoint."
            )
