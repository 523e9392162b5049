"""A device with memory of its own, emulated on CPU: a clock for computing and for its link, beside a host that is real.

All tensors are in memory of the CPU, and what is copied is copied. Seconds of the device are kept as moments of time:
computing takes stated ones, copies those of their bytes on a link that has two directions, and whoever waits sleeps.
Updates on the host are computed. They are *stretched*: the host then sleeps for some times the seconds that they took a
core, so that the other work of this machine, which a device would do in no time, hides behind the emulated device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Adam
from torch.utils._python_dispatch import _disable_current_modes

from lightning_osdp.apply import ShardedModel
from lightning_osdp.apply.activations.offload import HostMemory
from lightning_osdp.apply.internals import access, dtensors, host_shards
from lightning_osdp.apply.updating.host_updates import HostRows
from lightning_osdp.apply.updating.updates_ahead import UpdatesAhead
from lightning_osdp.planner.engine.layout import pinned_bytes

_SPIN_S = 2e-4
"""The end of a wait for the device is spun through: a sleeping process comes back late by about this much."""
_ENDS = "emulated_end_s"
"""Attribute of parameters of ``fully_shard``: when the copy of their shard ends."""


class Device:
    """Clock of an emulated device: when what was issued so far is done, by its computing and by its link.

    The host issues one operation of computing while the one before is under way, as hosts of GPUs run ahead.

    Args:
        bytes_per_s: rate of the link to the host, in each direction.
        stretch: seconds that the host's updates are to take, over those that they take.
        computes: True where operations are computed by this machine, in the thread that issues them; the device is then
            never behind, and its optimizer is this machine's.
        update_s: seconds per element of an update on the device.
    """

    def __init__(self, *, bytes_per_s: float, stretch: float, computes: bool, update_s: float) -> None:
        self.stretch, self.computes = stretch, computes
        self._bytes_per_s, self.update_s = bytes_per_s, update_s
        self.is_ahead = True
        """True if the host runs ahead; not where segments of a step are timed one by one."""
        self.holds_states = False
        """True if updates are the device's, unless they are in the context of the host's."""
        self._free_s = self._copied_out_s = self._gradients_s = 0.0
        self._link_s = {"in": 0.0, "out": 0.0}
        self._lock, self._local = threading.Lock(), threading.local()

    def __deepcopy__(self, _: Any) -> Device:
        """Copies of a module compute on the same device."""
        return self

    @property
    def free_s(self) -> float:
        """Time at which all computing that was issued is done."""
        return max(self._free_s, time.perf_counter())

    def compute(self, seconds: float) -> None:
        """Issues an operation of so many seconds."""
        start_s = self.free_s
        self._free_s = start_s + seconds
        self.sleep_until(start_s if self.is_ahead else self._free_s, spins=not self.is_ahead)

    def wait(self, moment_s: float) -> None:
        """Makes later computing wait."""
        self._free_s = max(self._free_s, moment_s)
        if self.computes:
            self.sleep_until(moment_s)

    def finish(self) -> None:
        """Makes the host wait for the device."""
        self.sleep_until(self._free_s)

    def copy(self, direction: str, num_bytes: int, after_s: float) -> float:
        """Begins a copy ``in`` to the device or ``out``, not before a moment; returns when it ends."""
        with self._lock:
            start_s = max(after_s, self._link_s[direction])
            end_s = self._link_s[direction] = start_s + num_bytes / self._bytes_per_s
        return end_s

    @staticmethod
    def sleep_until(moment_s: float, *, spins: bool = False) -> None:
        """Makes this thread sleep."""
        left_s = moment_s - time.perf_counter()
        if left_s > 0:
            time.sleep(max(0.0, left_s - _SPIN_S) if spins else left_s)
        while spins and time.perf_counter() < moment_s:
            pass

    @contextmanager
    def stretched(self) -> Iterator[None]:
        """Stretches what this thread computes within the context; it does not matter what else runs on its core."""
        if getattr(self._local, "is_stretched", False):
            yield
            return
        start_s, self._local.is_stretched = time.thread_time(), True
        try:
            yield
        finally:
            self._local.is_stretched = False
            time.sleep((self.stretch - 1) * (time.thread_time() - start_s))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Has shards, states, updates and saved tensors of OSDP and ``fully_shard`` be this device's in the context."""
        with ExitStack() as stack:
            for of, name, wrapped in (
                (sys.modules[Adam.__module__], "adam", self._adam),
                (HostRows, "fused", self._fused),
                (HostRows, "fill", self._fill),
                (HostRows, "give_back", self._give_back),
                (UpdatesAhead, "_update", self._update),
                (UpdatesAhead, "_wait_for_device", self._wait_for_device),
                (ShardedModel, "_update_ahead", self._update_ahead),
                (host_shards._OnHost, "copy_ahead", self._copy_ahead),
                (host_shards._OnHost, "_sent", self._sent),
                (host_shards, "add_gradients", self._add_gradients),
                (FSDPParam, "to_sharded_dtensor", self._to_sharded),
                (FSDPParamGroup, "finalize_backward", self._finalize),
            ):
                stack.enter_context(patch.object(of, name, wrapped(getattr(of, name))))
            for kind in (host_shards._OnHost, FSDPParam):
                gathered = property(self._all_gather_inputs(kind, vars(kind)["all_gather_inputs"].fget))
                stack.enter_context(patch.object(kind, "all_gather_inputs", gathered))
            stack.enter_context(patch.object(UpdatesAhead, "_after", _after))
            stack.enter_context(patch.object(HostMemory, "taken_bytes", lambda _, num_bytes: pinned_bytes(num_bytes)))
            yield

    # ---- updates

    def _adam(self, adam: Callable[..., None]) -> Callable[..., None]:
        def run(parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            if self.holds_states and not self.computes and not getattr(self._local, "is_host", False):
                self.compute(self.update_s * sum(each.numel() for each in parameters))
                return
            with self.stretched():
                adam(parameters, *args, **kwargs)

        return run

    def _fused(self, fused: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def run(host: HostRows, optimizer: Any) -> Iterator[None]:
            self._local.is_host = True
            try:
                with fused(host, optimizer):
                    yield
            finally:
                self._local.is_host = False

        return run

    def _fill(self, fill: Callable[..., None]) -> Callable[..., None]:
        def run(host: HostRows, stepped: Sequence[Any], pairs: Sequence[Any]) -> None:
            away = sum(dtensors.local(each).nbytes for pair in pairs if not host.keeps(pair[0]) for each in pair)
            is_main = threading.current_thread() is threading.main_thread()
            if away:
                self.sleep_until(self.copy("out", away, self.free_s if is_main else time.perf_counter()))
            fill(host, stepped, pairs)

        return run

    def _give_back(self, give_back: Callable[..., None]) -> Callable[..., None]:
        def run(host: HostRows, stepped: Sequence[Any]) -> None:
            away = (each for each in stepped if each.rows is not dtensors.local(each.parameter))
            num_bytes = sum(each.rows.nbytes for each in away if not host.keeps(each.parameter))
            self.wait(self.copy("in", num_bytes, self.free_s))
            with self.stretched():  # what is on the host is copied there
                give_back(host, [each for each in stepped if host.keeps(each.parameter)])
            give_back(host, [each for each in stepped if not host.keeps(each.parameter)])

        return run

    def _update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.stretched():
                return update(*args, **kwargs)

        return run

    def _update_ahead(self, _: Callable[..., None]) -> Callable[..., None]:
        def run(sharded: ShardedModel, group: Any) -> None:
            ready = _Ready(self, max(self.free_s, self._gradients_s if host_shards.kept([group]) else 0.0))
            sharded._ahead.begin((parameter for parameter, _ in access.parameters_of(group)), ready)

        return run

    def _wait_for_device(self, _: Callable[..., None]) -> Callable[..., None]:
        return lambda _: self.finish()

    # ---- shards on the host, and their gradients

    def _copy_ahead(self, copy_ahead: Callable[..., None]) -> Callable[..., None]:
        def run(parameter: Any) -> None:
            copy_ahead(parameter)
            num_bytes = parameter._sharded_param_data.numel() * _itemsize(parameter)
            after_s = max(self._copied_out_s, time.perf_counter())
            vars(parameter)[_ENDS] = self.copy("in", num_bytes, after_s)

        return run

    def _sent(self, sent: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(parameter: Any) -> Tensor:
            with self.stretched():
                return sent(parameter)

        return run

    def _all_gather_inputs(self, kind: type[FSDPParam], inputs: Callable[..., list[Tensor]]) -> Callable[..., Any]:
        """Makes computing wait for a copy: ahead of an all-gather, or, as torch's on one rank, in its own place."""

        def get(parameter: Any) -> list[Tensor]:
            if kind is FSDPParam and host_shards.is_kept(parameter):
                return inputs(parameter)
            is_away = parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED
            end_s, size = vars(parameter).pop(_ENDS, None), _itemsize(parameter)
            if is_away and kind is FSDPParam:  # torch copies in the dtype at rest, and casts then
                copied = parameter._sharded_param_data.clone()
                found, size = [copied.to(parameter.param_dtype or copied.dtype)], copied.itemsize
            else:
                found = inputs(parameter)
            if is_away:
                num_bytes = found[0].numel() * size
                self.wait(self.copy("in", num_bytes, self.free_s) if end_s is None else end_s)
            self._copied_out_s = self.free_s
            return found

        return get

    def _add_gradients(self, add_gradients: Callable[..., None]) -> Callable[..., None]:
        def run(gradients: Iterable[tuple[Tensor, Any]], *, is_kept: bool) -> None:
            pairs = [*gradients]
            for _, gradient in pairs if is_kept else ():
                self._gradients_s = self.copy("out", gradient._local_tensor.nbytes, self.free_s)
            add_gradients(pairs, is_kept=is_kept)

        return run

    def _to_sharded(self, to_sharded: Callable[..., Any]) -> Callable[..., Any]:
        def run(parameter: Any, tensor: Tensor) -> Any:
            is_gradient = hasattr(parameter, "sharded_param")  # else the shard itself, which is made now
            if is_gradient and parameter.offload_to_cpu and not host_shards.is_kept(parameter):
                with _disable_current_modes():
                    tensor = tensor.clone()
                self._gradients_s = self.copy("out", tensor.nbytes, self.free_s)
            return to_sharded(parameter, tensor)

        return run

    def _finalize(self, finalize: Callable[..., None]) -> Callable[..., None]:
        def run(group: Any) -> None:
            finalize(group)
            self.sleep_until(self._gradients_s)

        return run


class Stream:
    """`CopyStream` of an emulated device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def copy(self, to: Tensor, of: Tensor) -> float:
        """Copies, and returns when the device has; what backward copies comes back."""
        direction = "out" if torch._C._current_graph_task_id() == -1 else "in"
        with _disable_current_modes():
            to.copy_(of)
        return self._device.copy(direction, of.nbytes, self._device.free_s)

    def wait(self, mark: float) -> None:
        """Makes later computing wait for the end of a copy."""
        self._device.wait(mark)


class _Ready:
    """Event of an emulated device."""

    def __init__(self, device: Device, moment_s: float) -> None:
        self._device, self._moment_s = device, moment_s

    def synchronize(self) -> None:
        """Makes this thread wait for the event."""
        self._device.sleep_until(self._moment_s)


@contextmanager
def _after(_: UpdatesAhead, ready: Any) -> Iterator[None]:
    if ready is not None:
        ready.synchronize()
    yield


def _itemsize(parameter: Any) -> int:
    dtype: torch.dtype = parameter.param_dtype or parameter.orig_dtype
    return dtype.itemsize
