"""Units that stay unsharded for ever: nothing of them is trained, or each rank has all of them between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from lightning_osdp.apply.internals import access, dtensors, gathering, unsharded

_RESIDENT = "lightning_osdp_is_resident"
"""Attribute of units that are told to stay unsharded."""
_IS_TRAINED = attrgetter("sharded_param.requires_grad")


class _Kept(NamedTuple):
    """Shard of a parameter when its unit was gathered, or when ranks last agreed that nobody had written to it."""

    mark: tuple[int, ...]
    """Other than before once somebody has written to the shard, or might have."""
    hash: int | None
    """Hash of this rank's rows of the unsharded weight; None where the shard has memory of its own."""


def set_resident(module: Any, *, is_resident: bool) -> None:
    """Has a unit stay unsharded as `Residence` says, or as any other does."""
    group = access.group_of(module)
    if group is not None:
        setattr(group, _RESIDENT, is_resident)
        if is_resident and is_replicated(group):
            module.set_reshard_after_backward(False, recurse=False)


class _Places:
    """Places of the parameters of a unit in its modules, which get whole weights and shards by turns.

    Torch does the same, parameter by parameter, and so do all that watch what it frees, of which nothing is here.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._parameters = group, [*group.fsdp_params]
        infos = [(each, each._module_info) for each in self._parameters]
        self._places = [
            (module, name, each)
            for each, info in infos
            for module, name in (
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            )
        ]
        self._is_plain = all(
            unsharded.is_shared(each) and getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
            for module, _, each in self._places
        )

    def show(self) -> bool:
        """Puts whole weights into the modules; returns False where torch has to."""
        if not (self._is_plain and _are_trained_alike(self._parameters)):
            return False
        for module, name, each in self._places:
            module._parameters[name] = each._unsharded_param
        self._set_state(ShardedState.UNSHARDED)
        return True

    def hide(self) -> bool:
        """Puts shards into the modules; returns False where torch has to, as for weights that got other memory."""
        if not (self._is_plain and _are_trained_alike(self._parameters)) or any(map(_is_moved, self._parameters)):
            return False
        for module, name, each in self._places:
            module._parameters[name] = each.sharded_param
        self._set_state(ShardedState.SHARDED)
        return True

    def _set_state(self, state: ShardedState) -> None:
        self._group._sharded_state = state
        for each in self._parameters:
            each.sharded_state = state


class Residence:
    """Keeps unsharded weights of units that are told to stay so, as long as they can: see `stays`.

    All of them are gathered before a forward gathers its first unit, one parameter after the other, the largest first:
    so the buffers of their all-gathers are small where much is there already, however many modules a unit has. Where
    torch would free it, a module gets its shards alone: optimizers, state dicts and users find what they find of any
    other unit. Where the unit is needed again, its module gets the kept weights, and no all-gather runs.

    A shard of the same precision becomes a view of this rank's rows of the unsharded weight: so a unit takes no more
    than it does under DDP. It gets memory of its own again before the unsharded weight is freed. The shard of a unit
    that each rank has all of is all of the unsharded weight: an optimizer that writes to the one has written to both.

    Shards may have been written to meanwhile: by users' hooks, by what loads weights, or by an optimizer that has them.
    So ranks agree, before a unit is needed for the first time after that, of which units shards are others than what is
    kept; those are gathered anew. A rank looks where versions tell of writes, or where somebody has asked for ``data``
    or ``to_local()``, of which no version tells. So it is where a step itself has written to shards, on all ranks, of a
    unit that it has not run yet.

    Kept weights have values as long as a backward may read them, whether hooks are there that would gather them or not.

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
        self._marks: dict[Any, list[tuple[int, ...]]] = {}  # groups that were reported on -> marks of their shards
        self._when_hidden: dict[Any, Callable[[], None]] = {}
        self._places: dict[Any, _Places] = {}  # of units that have been shown since they were gathered
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
        if group not in self._places:
            group.wait_for_unshard()
            self._places[group] = _Places(group)
        elif not self._places[group].show():
            group.wait_for_unshard()
        return True

    def hide(self) -> None:
        """Has modules show shards, as resharding does, of units that need nothing else for that."""
        for group, places in self._places.items():
            if group.is_unsharded and stays(group) and places.hide():
                self._when_hidden.get(group, access.do_nothing)()
                self._is_open |= self.opens_itself

    def outdate(self, shards: Iterable[Any]) -> None:
        """Has backward raise that comes to weights which forward has saved, for an optimizer writes to these shards.

        It writes to the memory of weights, of whose versions it does not know.
        """
        replicated = [group for group in self._kept if is_replicated(group)]
        written = {id(shard) for shard in shards} if replicated else set[int]()
        for group in replicated:
            increment_version(
                [each._unsharded_param for each in group.fsdp_params if id(each.sharded_param) in written]
            )

    def on_hidden(self, group: Any, call: Callable[[], None]) -> None:
        """Calls a function whenever a unit may show its kept weights no longer."""
        self._when_hidden[group] = call

    def settle(self) -> None:
        """Ends that time: what is outdated is gathered anew, on all ranks. Call it on all of them."""
        if self._is_open:
            self._compare()

    def show_all(self) -> None:
        """Shows kept weights that were hidden since forward: blocks that run again in backward read them."""
        for group in [*self._kept]:
            self.shows(group)

    def reports(self, *, of_all: bool = True) -> list[int]:
        """Numbers of which ranks take the largest, to `take`: of each unit, whether its kept weights are outdated.

        Args:
            of_all: report on units, too, that show these weights.
        """
        self._is_open = False
        self._marks = {group: _marks(group) for group in self._kept if of_all or not group.is_unsharded}
        return [int(group in self._marks and self._is_outdated(group)) for group in self._groups]

    def take(self, reports: Sequence[int]) -> None:
        """Gathers anew what is outdated on any rank, and hidden by now. Call it on all of them."""
        for group, is_outdated in zip(self._groups, reports, strict=True):
            if is_outdated:
                self._free(group)
            elif group in self._marks:
                self._kept[group] = [
                    known if known.mark == mark else known._replace(mark=mark)
                    for known, mark in zip(self._kept[group], self._marks[group], strict=True)
                ]
        if any(reports):
            gathering.gather_after(self._groups[0].comm_ctx)
            gathering.outside_inference_mode(self._gather)

    def _compare(self) -> None:
        if self._kept:
            self.take(self._agree(self.reports(of_all=False)))
        self._is_open = False

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
        state, group._training_state = group._training_state, TrainingState.IDLE  # in forward torch keeps the buffer
        parameter.free_unsharded_param = access.do_nothing
        try:
            for call in self._own_methods[group]:
                call()
        finally:
            del parameter.free_unsharded_param
            group.fsdp_params, group._training_state = every, state
        _share(group, parameter)

    def _keep(self, group: Any) -> None:
        """Keeps a unit that is gathered, and whose shards are where they stay."""
        hashes = [
            dtensors.hash_of(unsharded.own_rows(group, each))
            if unsharded.is_shared(each) and not is_replicated(group)
            else None
            for each in group.fsdp_params
        ]
        self._kept[group] = [*map(_Kept, _marks(group), hashes)]
        self._places.pop(group, None)

    def _unshard(self, group: Any, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if group in self._kept and not group.is_unsharded:
            if self._is_open or not self._is_unwritten(group):
                self._compare()
            elif not stays(group):
                self._free(group)
        if not self._is_complete and group._training_state == TrainingState.FORWARD:
            gathering.outside_inference_mode(self._gather)
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
        self._when_hidden.get(group, access.do_nothing)()
        if group in self._kept and not stays(group):
            _outdate(group)
            _part(group)
            if not group.is_unsharded:
                self._free(group)
            self._kept.pop(group, None)
            self._places.pop(group, None)
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
        self._places.pop(group, None)
        if not stays(group):
            _outdate(group)
        for parameter in group.fsdp_params:
            _part_one(parameter)
            parameter.free_unsharded_param()

    def _is_unwritten(self, group: Any) -> bool:
        """Tells if nobody can have written to this rank's shards since ranks last agreed."""
        return [known.mark for known in self._kept[group]] == _marks(group)

    def _is_outdated(self, group: Any) -> bool:
        """Tells if this rank's shards of a unit differ from its rows of the kept weights, bit by bit."""
        if not stays(group):
            return True
        if is_replicated(group):
            return [known.mark for known in self._kept[group]] != self._marks[group]
        shards = zip(group.fsdp_params, self._kept[group], self._marks[group], strict=True)
        return any(_differs(group, parameter, known.hash) for parameter, known, mark in shards if mark != known.mark)


def stays(group: Any) -> bool:
    """Tells if a unit stays unsharded: it is told to, and its parameters are all frozen, or each rank has all of it."""
    return getattr(group, _RESIDENT, False) and (is_replicated(group) or _is_frozen(group))


def reduces_nothing(group: Any) -> bool:
    """Tells if a unit stays unsharded, and backward has nothing to do for it."""
    return getattr(group, _RESIDENT, False) and _is_frozen(group)


def is_replicated(group: Any) -> bool:
    """Tells if each rank has all of a unit between steps."""
    return bool(group.mesh_info.shard_mesh_size == 1)


def _is_frozen(group: Any) -> bool:
    return not any(map(_IS_TRAINED, group.fsdp_params))


def _outdate(group: Any) -> None:
    """Has backward raise, and not compute with memory that is gone, where forward has saved weights of a unit."""
    for parameter in group.fsdp_params:
        increment_version(parameter._unsharded_param)


def _is_moved(parameter: Any) -> bool:
    """Tells if somebody has given an unsharded weight other memory, or refers to its memory by NumPy."""
    (gathered,) = parameter.all_gather_outputs
    return parameter._unsharded_param.data_ptr() != gathered.data_ptr() or not gathered.untyped_storage().resizable()


def _are_trained_alike(parameters: Iterable[Any]) -> bool:
    """Tells if unsharded weights are trained, or frozen, as their shards are."""
    return all(each._unsharded_param.requires_grad == each.sharded_param.requires_grad for each in parameters)


def _num_bytes(parameter: Any) -> int:
    """Bytes of an unsharded weight at rest."""
    num_bytes: int = parameter._orig_size.numel() * parameter.orig_dtype.itemsize
    return num_bytes


def _marks(group: Any) -> list[tuple[int, ...]]:
    """Marks of each shard of a unit, which are others once somebody has written to it, or might have.

    A shard that is all of the unsharded weight may be written to, but not have other memory.
    """
    marks: list[tuple[int, ...]] = []
    is_all = is_replicated(group)
    for parameter in group.fsdp_params:
        sharded = parameter.sharded_param
        rows = dtensors.local(sharded)
        is_one = is_all and rows.data_ptr() in [gathered.data_ptr() for gathered in parameter.all_gather_outputs]
        marks.append((id(sharded), id(rows), rows.data_ptr()) if is_one else dtensors.mark_of(sharded))
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
        _part_one(parameter)


@torch.no_grad()
def _part_one(parameter: Any) -> None:
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
