"""Units that stay unsharded for ever, as nothing of them is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_osdp.apply.internals import access, dtensors, gathering, unsharded

_RESIDENT = "lightning_osdp_is_resident"
"""Attribute of units that are told to stay unsharded."""


class _Kept(NamedTuple):
    """Shard of a parameter when its unit was gathered, or when ranks last agreed that nobody had written to it."""

    mark: tuple[int, ...]
    """Other than before once somebody has written to the shard, or might have."""
    hash: int | None
    """Hash of this rank's rows of the unsharded weight; None where the shard has memory of its own."""


def set_resident(module: nn.Module, *, is_resident: bool) -> None:
    """Has a unit stay unsharded as `Residence` says, or as any other does."""
    group = access.group_of(module)
    if group is not None:
        setattr(group, _RESIDENT, is_resident)


class Residence:
    """Keeps unsharded weights of units that are told to stay so, as long as all their parameters are frozen.

    All of them are gathered before a forward gathers its first unit, one parameter after the other, the largest first:
    so the buffers of their all-gathers are small where much is there already, however many modules a unit has. Where
    torch would free it, a module gets its shards alone: optimizers, state dicts and users find what they find of any
    other unit. Where the unit is needed again, its module gets the kept weights, and no all-gather runs.

    A shard of the same precision becomes a view of this rank's rows of the unsharded weight: so a unit takes no more
    than it does under DDP. It gets memory of its own again before the unsharded weight is freed.

    Shards may have been written to meanwhile: by users' hooks, by what loads weights, or by an optimizer that has them.
    So ranks agree, before a unit is needed for the first time after that, of which units shards are others than what is
    kept; those are gathered anew. A rank looks where versions tell of writes, or where somebody has asked for ``data``
    or ``to_local()``, of which no version tells. So it is where a step itself has written to shards, on all ranks, of a
    unit that it has not run yet.

    ``agree`` is given what this rank has found of each group, 0 or 1, and returns the largest of all ranks.

    Attributes:
        opens_itself: whether others may write to shards whenever a module shows them; else whoever runs the steps says
            when, by `open`.
    """

    def __init__(self, groups: Sequence[Any], agree: Callable[[list[int]], Sequence[int]]) -> None:
        self._groups, self._agree = groups, agree
        self.opens_itself = True
        self._is_open = True  # shards may have been written to since ranks last agreed
        self._is_complete = False  # all that may be kept was gathered
        self._kept: dict[Any, list[_Kept]] = {}  # groups that are kept unsharded -> their shards
        self._own_methods = {
            group: (group.unshard, group.wait_for_unshard, group._to_sharded) for group in groups
        }  # of torch: they gather what ``fsdp_params`` has, and leave shards in its place
        for group in groups:
            group.unshard = partial(self._unshard, group, group.unshard)
            group.wait_for_unshard = partial(self._wait, group, group.wait_for_unshard)
            group._to_sharded = partial(self._leave, group, group._to_sharded)

    def open(self) -> None:
        """Begins the time in which others may write to shards."""
        self._is_open = True

    def keeps(self, group: Any) -> bool:
        """Tells if a unit is unsharded, and its weights are kept."""
        return group in self._kept and group.is_unsharded

    def shows(self, group: Any) -> bool:
        """Shows the kept weights of a unit where that needs no other rank; tells if they are there then."""
        if group not in self._kept or group.is_unsharded:
            return self.keeps(group)
        if self._is_open or not (self._is_complete and stays(group) and self._is_unwritten(group)):
            return False
        group.wait_for_unshard()
        return True

    def settle(self) -> None:
        """Ends that: what is outdated is freed, on all ranks. Call it on all of them."""
        if self._is_open:
            self._compare()

    def _compare(self) -> None:
        self._is_open = False
        if not self._kept:
            return
        hidden = {group: _marks(group) for group in self._kept if not group.is_unsharded}
        told = self._agree([int(group in hidden and self._is_outdated(group, hidden[group])) for group in self._groups])
        for group, is_outdated in zip(self._groups, told, strict=True):
            if is_outdated:
                self._free(group)
            elif group in hidden:
                self._kept[group] = [
                    known if known.mark == mark else known._replace(mark=mark)
                    for known, mark in zip(self._kept[group], hidden[group], strict=True)
                ]

    def free(self) -> None:
        """Keeps nothing of what was gathered so far; units are sharded when this is called."""
        self._is_complete = False
        for group in [*self._kept]:
            self._free(group)

    def _gather(self) -> None:
        missing = [
            group
            for group in self._groups
            if stays(group) and not (group in self._kept or group.is_unsharded or group._all_gather_result)
        ]
        parameters = [(group, parameter) for group in missing for parameter in group.fsdp_params]
        try:
            for group, parameter in sorted(parameters, key=lambda pair: _num_bytes(pair[1]), reverse=True):
                self._gather_alone(group, parameter)
        except BaseException:
            for group in missing:
                _part(group)
            raise
        for group in missing:
            self._keep(group)
        self._is_complete = True

    def _gather_alone(self, group: Any, parameter: Any) -> None:
        every, group.fsdp_params = group.fsdp_params, [parameter]
        parameter.free_unsharded_param = access.do_nothing
        try:
            for call in self._own_methods[group]:
                call()
        finally:
            del parameter.free_unsharded_param
            group.fsdp_params = every
        _share(group, parameter)

    def _keep(self, group: Any) -> None:
        """Keeps a unit that is gathered, and whose shards are where they stay."""
        hashes = [
            dtensors.hash_of(unsharded.own_rows(group, each)) if unsharded.is_shared(each) else None
            for each in group.fsdp_params
        ]
        self._kept[group] = [*map(_Kept, _marks(group), hashes)]

    def _unshard(self, group: Any, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if group in self._kept and not group.is_unsharded:
            if self._is_open or not self._is_unwritten(group):
                self._compare()
            elif not stays(group):
                self._free(group)
        if not self._is_complete and group._training_state == TrainingState.FORWARD:
            group._training_state = TrainingState.IDLE  # in forward torch keeps the latest buffer
            try:
                gathering.outside_inference_mode(self._gather)
            finally:
                group._training_state = TrainingState.FORWARD
        if group not in self._kept:
            unshard(*args, **kwargs)

    def _wait(self, group: Any, wait_for_unshard: Callable[[], None]) -> None:
        if group in self._kept:
            group._to_unsharded()
            return
        was_there = group.is_unsharded
        wait_for_unshard()
        if group.is_unsharded and not was_there and stays(group):
            for parameter in group.fsdp_params:
                _share(group, parameter)
            self._keep(group)

    def _leave(self, group: Any, to_sharded: Callable[[], None]) -> None:
        if group in self._kept and not stays(group):
            _part(group)
            if not group.is_unsharded:
                self._free(group)
            self._kept.pop(group, None)
        if group not in self._kept:
            to_sharded()
            return
        self._is_open |= self.opens_itself
        for parameter in group.fsdp_params:
            parameter.free_unsharded_param = access.do_nothing
        try:
            to_sharded()
        finally:
            for parameter in group.fsdp_params:
                del parameter.free_unsharded_param

    def _free(self, group: Any) -> None:
        self._is_complete = False
        del self._kept[group]
        _part(group)
        for parameter in group.fsdp_params:
            parameter.free_unsharded_param()

    def _is_unwritten(self, group: Any) -> bool:
        """Tells if nobody can have written to this rank's shards since ranks last agreed."""
        return [known.mark for known in self._kept[group]] == _marks(group)

    def _is_outdated(self, group: Any, marks: Sequence[tuple[int, ...]]) -> bool:
        """Tells if this rank's shards, with these marks, differ from its rows of the kept weights, bit by bit."""
        if not stays(group):
            return True
        shards = zip(group.fsdp_params, self._kept[group], marks, strict=True)
        return any(_differs(group, parameter, known.hash) for parameter, known, mark in shards if mark != known.mark)


def stays(group: Any) -> bool:
    """Tells if a unit stays unsharded: it is told to, and its parameters are all frozen."""
    is_resident = getattr(group, _RESIDENT, False)
    return is_resident and not any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)


def _num_bytes(parameter: Any) -> int:
    """Bytes of an unsharded weight at rest."""
    num_bytes: int = parameter._orig_size.numel() * parameter.orig_dtype.itemsize
    return num_bytes


def _marks(group: Any) -> list[tuple[int, ...]]:
    """Marks of each shard of a unit, which are others once somebody has written to it, or might have."""
    marks: list[tuple[int, ...]] = []
    for parameter in group.fsdp_params:
        sharded, rows = parameter.sharded_param, parameter._sharded_local_tensor
        marks.append((id(sharded), sharded._version, id(rows), rows._version, dtensors.num_accesses(sharded)))
    return marks


@torch.no_grad()
def _share(group: Any, parameter: Any) -> None:
    """Makes a shard a view of what its unit has gathered, if both are alike.

    A scalar is a row on each rank, of which the first one is the unsharded weight.
    """
    (gathered,), flat, mesh = parameter.all_gather_outputs, parameter._sharded_param_data, group.mesh_info
    expected = flat.numel() * mesh.shard_mesh_size, flat.dtype, flat.device
    if parameter._orig_size and (gathered.numel(), gathered.dtype, gathered.device) == expected:
        _move_shard(parameter, gathered.narrow(0, mesh.shard_mesh_rank * flat.numel(), flat.numel()))


@torch.no_grad()
def _part(group: Any) -> None:
    """Gives shards of a unit memory of their own where they share that of the unsharded weight."""
    for parameter in group.fsdp_params:
        if unsharded.is_shared(parameter):
            _move_shard(parameter, parameter._sharded_param_data.clone())


def _move_shard(parameter: Any, flat: Tensor) -> None:
    """Moves a shard into the memory of a flat tensor, which has its values and paddings; tensors stay the same ones."""
    shard = parameter._sharded_local_tensor
    parameter._sharded_param_data.set_(flat)
    shard.set_(flat.untyped_storage(), flat.storage_offset(), shard.shape, shard.stride())


@torch.no_grad()
def _differs(group: Any, parameter: Any, known_hash: int | None) -> bool:
    """Tells if a shard has other bits than this rank's rows of the unsharded weight had, in the precision of these."""
    rows, shard = unsharded.own_rows(group, parameter), dtensors.local(parameter.sharded_param)
    if rows.shape != shard.shape or rows.device != shard.device:
        return True
    if known_hash is not None and dtensors.hash_of(rows) != known_hash:
        return True
    return bool(unsharded.differ(rows.flatten(), shard.flatten()))
