"""Changes of parameters while they are unsharded, which shards take over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.apply.internals.access import name_of
from lightning_osdp.apply.internals.gathering import FREEING, wrap
from lightning_osdp.errors import ConfigurationError

_SAMPLED = 2**8
"""Elements of a parameter of which copies are made in the middle of a step."""


class Freezing:
    """Has whole parameters of a unit and its shards need gradients alike, whichever of them somebody freezes.

    Code that runs while a unit is gathered finds whole parameters in its module, optimizers have the shards, and torch
    looks at the shards alone, where it gathers the unit.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._needed: list[bool] = []  # when both were last alike, while they are gathered
        wrap(group, ("wait_for_unshard", *FREEING), self._around)

    def _around(self, change: Callable[[], None]) -> None:
        was_gathered = self._group.is_unsharded
        if was_gathered:
            self._make_alike()
        change()
        if self._group.is_unsharded and not was_gathered:
            self._needed = [parameter.sharded_param.requires_grad for parameter in self._group.fsdp_params]

    def _make_alike(self) -> None:
        for place, parameter in enumerate(self._group.fsdp_params):
            whole, sharded = parameter._unsharded_param, parameter.sharded_param
            if whole.requires_grad != sharded.requires_grad:
                whole.requires_grad_(not self._needed[place])
                sharded.requires_grad_(not self._needed[place])
            self._needed[place] = sharded.requires_grad


class GatheredWrites:
    """Has shards take over what somebody writes to parameters that are gathered: a step that moves averages, or clips.

    Torch frees what is gathered, and gathers the shards again. No version tells of ``p.data.mul_()``, or of writes by
    NumPy. So before a unit is freed, its shards get this rank's rows, whether somebody has written to them or not: a
    read and a write of what this rank holds, which wait for nothing.

    What is gathered in another precision than it is kept in cannot be taken over. There, rows are compared with shards
    on their device; what that finds is read a step later, for a step is not to wait for its device. Copies of all rows
    are not in the plan, so in each step other elements are compared, which no one write to many of them escapes.

    Attributes:
        is_paused: whether all that is written is dropped.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.is_paused = False
        self._groups, self._rows = groups, [_Rows(group) for group in groups]
        for group, rows in zip(groups, self._rows, strict=True):
            wrap(group, FREEING, partial(self._free, rows))
            wrap(group, ("wait_for_unshard",), rows.note)

    def begin_fit(self) -> None:
        """Training begins, and nothing counts of a fit that ended with an error."""
        for rows in self._rows:
            rows.are_written = rows.was_told = None

    def told(self) -> list[int]:
        """Of each unit, whether somebody has written to what is gathered in low precision, as far as it is known."""
        return [rows.told() for rows in self._rows]

    def check(self, told: Sequence[int]) -> None:
        """Raises a `ConfigurationError` of the first unit that some rank tells of."""
        for group, is_written in zip(self._groups, told, strict=True):
            if is_written:
                low = next(each for each in group.fsdp_params if each.all_gather_outputs[0].dtype != each.orig_dtype)
                dtype = low.all_gather_outputs[0].dtype
                raise ConfigurationError(
                    f"Expected a step to leave parameters as they are that are gathered in {dtype} and kept in"
                    f" {low.orig_dtype}, but it has written to those of {name_of(low)!r} or of others in its unit."
                    " Change weights in a hook, such as on_train_batch_start or on_train_batch_end, or train in the"
                    " precision in which they are kept."
                )

    def _free(self, rows: _Rows, free: Callable[[], None]) -> None:
        try:
            rows.take_over(drops=self.is_paused)
        finally:
            free()


class _Rows:
    """This rank's rows of the parameters of a unit, in its shards and, while it is gathered, among all others.

    Attributes:
        are_written: whether somebody has written to rows of another precision than the shards'; None: not looked at.
        was_told: the same on its way to the host, and what tells that it is there.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.are_written: Tensor | None = None
        self.was_told: tuple[Tensor, Any] | None = None
        self._versions: list[int] = []  # of shards, when they were gathered
        self._shards: list[Tensor] = []
        self._same: tuple[list[Tensor], list[Tensor]] = [], []
        self._low: list[tuple[Tensor, Tensor]] = []
        self._turn = 0
        self._samples: tuple[list[Tensor], list[Tensor]] | None = None  # of rows and shards, in this turn

    def note(self, wait_for_unshard: Callable[[], None]) -> None:
        """Around what copies rows out of an all-gather."""
        was_there = self._group.is_unsharded
        wait_for_unshard()
        if self._group.is_unsharded and not was_there:
            self._versions = self._versions_now()

    @torch.no_grad()
    def take_over(self, *, drops: bool) -> None:
        """Before rows are freed among all others: copies them to shards of the same precision, compares the others."""
        group = self._group
        if not group.is_unsharded:
            return
        for parameter in group.fsdp_params:
            if _has_other_memory(parameter):
                _move_back(parameter)
            if not parameter.all_gather_outputs[0].untyped_storage().resizable():
                _renew(parameter)
                self._shards = []
        # a shard that somebody has changed while it was gathered stays as it is, and the gathered one is outdated
        if drops or self._versions_now() != self._versions:
            return
        self._find()
        if self._same[0]:
            torch._foreach_copy_(*self._same)
            # the next all-gather, in a stream of its own, waits for it
            group._reshard_after_forward_event = group.device_handle.Event()
            group._reshard_after_forward_event.record()
        if not self._low:
            return
        if self._samples is None:
            rows, shards = zip(*self._low, strict=True)
            self._samples = (
                [_sampled(each, self._turn) for each in rows],
                [_sampled(each, self._turn) for each in shards],
            )
        found = _are_apart(*map(torch.cat, self._samples))
        self.are_written = found if self.are_written is None else self.are_written.logical_or_(found)

    def told(self) -> bool:
        """Whether rows are known to be written to; of this step the device may tell at the next call."""
        self._turn, self._samples = self._turn + 1, None
        before, self.was_told = self.was_told, None
        if self.are_written is not None:
            event = self._group.device_handle.Event()
            self.was_told = self.are_written.to("cpu", non_blocking=True), event
            event.record()
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].tolist())  # of the host, which nothing waits for

    def _versions_now(self) -> list[int]:
        return [parameter.sharded_param._version for parameter in self._group.fsdp_params]

    def _find(self) -> None:
        """Where rows are, which is the same until shards are other tensors."""
        parameters = self._group.fsdp_params
        shards = [parameter._sharded_local_tensor for parameter in parameters]
        if len(shards) == len(self._shards) and all(map(operator.is_, shards, self._shards)):
            return
        self._shards = shards
        # by data, so that their versions, which autograd looks at, stay as they are
        pairs = [(_own_rows(self._group, each), shard.data) for each, shard in zip(parameters, shards, strict=True)]
        same = [(shard, rows) for rows, shard in pairs if rows.dtype == shard.dtype]
        self._same = [shard for shard, _ in same], [rows for _, rows in same]
        self._low = [(rows.flatten(), shard.flatten()) for rows, shard in pairs if rows.dtype != shard.dtype]
        self._samples = None


def _has_other_memory(parameter: Any) -> bool:
    """Whether a gathered parameter is not where its unit has gathered it, as after ``p.data = value``."""
    (gathered,) = parameter.all_gather_outputs
    return bool(parameter._unsharded_param.data_ptr() != gathered.data_ptr())


def _gathered(parameter: Any) -> Tensor:
    """What a unit has gathered of a parameter."""
    (gathered,) = parameter.all_gather_outputs
    found: Tensor = gathered.data.as_strided(parameter._orig_size, parameter._contiguous_orig_stride)
    return found


def _move_back(parameter: Any) -> None:
    """Has a gathered parameter be where its unit has gathered it, with the values that it has."""
    own = _gathered(parameter)
    own.copy_(parameter._unsharded_param.detach())
    parameter._unsharded_param.data = own


def _renew(parameter: Any) -> None:
    """Has a gathered parameter be in other memory from now on: what NumPy looks at cannot be freed."""
    (gathered,) = parameter.all_gather_outputs
    gathered.data = gathered.data.clone()
    parameter._unsharded_param.data = _gathered(parameter)


def _own_rows(group: Any, parameter: Any) -> Tensor:
    """This rank's rows of a gathered parameter."""
    whole, mesh = _gathered(parameter), group.mesh_info
    if not whole.dim():
        return whole
    first = min(mesh.shard_mesh_rank * -(-len(whole) // mesh.shard_mesh_size), len(whole))  # as torch.chunk cuts
    return whole.narrow(0, first, len(parameter._sharded_local_tensor))


def _sampled(flat: Tensor, turn: int) -> Tensor:
    """Elements that lie evenly apart, others in the next turn."""
    step = -(-len(flat) // _SAMPLED) or 1
    return flat[turn % step :: step]


def _are_apart(rows: Tensor, shards: Tensor) -> Tensor:
    """Whether shards have other bits in the precision of rows; on their device."""
    return (rows.view(torch.uint8) != shards.to(rows.dtype).view(torch.uint8)).any()
