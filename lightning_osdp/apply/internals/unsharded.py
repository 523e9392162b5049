"""Changes of parameters while they are unsharded, which shards take over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.apply.internals import access, host_shards
from lightning_osdp.errors import ConfigurationError

_FREEING = ("_to_sharded", "_to_sharded_post_forward")
"""Methods of a group that free unsharded parameters."""
_SAMPLED = 2**8
"""Number of elements of a parameter that are compared in a step."""
_STEPS_OF_A_SAMPLE = 8
"""Steps that compare the same elements: views of others take as long as comparing them."""


def _wrap(group: Any, names: Iterable[str], around: Callable[[Any], None]) -> None:
    """Replaces those of these methods that a group has by a function that is given the method."""
    for name in names:
        if hasattr(group, name):
            setattr(group, name, partial(around, getattr(group, name)))


class Freezing:
    """Keeps ``requires_grad`` of unsharded parameters and shards equal, whichever of them somebody freezes.

    Code that runs while a unit is unsharded finds unsharded parameters in its module. Optimizers have the shards. Torch
    looks at the shards alone, when it gathers the unit.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._needed: list[bool] = []  # requires_grad of both when they last agreed
        _wrap(group, ("wait_for_unshard", *_FREEING), self._around)

    def _around(self, change: Callable[[], None]) -> None:
        was_gathered = self._group.is_unsharded
        if was_gathered:
            self._make_equal()
        change()
        if self._group.is_unsharded and not was_gathered:
            self._needed = [parameter.sharded_param.requires_grad for parameter in self._group.fsdp_params]

    def _make_equal(self) -> None:
        pairs = [(each._unsharded_param, each.sharded_param) for each in self._group.fsdp_params]
        needed = [sharded.requires_grad for _, sharded in pairs]
        if needed != self._needed or needed != [whole.requires_grad for whole, _ in pairs]:
            for place, (whole, sharded) in enumerate(pairs):
                if whole.requires_grad != sharded.requires_grad:
                    whole.requires_grad_(not self._needed[place])
                    sharded.requires_grad_(not self._needed[place])
                self._needed[place] = sharded.requires_grad


class GatheredWrites:
    """Copies values that somebody writes to unsharded parameters, such as moved averages, to the shards.

    Torch frees unsharded parameters and later gathers the shards again. Versions of tensors do not tell of
    ``p.data.mul_()`` or of writes by NumPy. Therefore this rank's rows are copied to the shards each time before a unit
    is freed, whether somebody has written or not. The copy reads and writes as much as this rank holds, and waits for
    nothing.

    Rows that are gathered in another precision than the shards have cannot be copied back, and shards on the host are
    not copied to. They are compared with the shards on their device, and the result is read one step later, because a
    step must not wait for its device. The plan has no memory for copies of all rows, so each step compares a sample of
    the elements, which after some steps is another one.

    Attributes:
        is_paused: True while all written values are dropped.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.is_paused = False
        self._groups, self._rows = groups, [_Rows(group) for group in groups]
        self._reported: tuple[list[int], Tensor, Any] | None = None
        """Numbers of the units that the step before has compared, the results on their way to the host, and the event
        that marks their arrival."""
        for group, rows in zip(groups, self._rows, strict=True):
            _wrap(group, _FREEING, partial(self._free, rows))
            _wrap(group, ("wait_for_unshard",), rows.note)

    def begin_fit(self) -> None:
        """Forgets the comparisons of a fit that ended with an error."""
        self._reported = None
        for rows in self._rows:
            rows.are_written = None

    def reports(self) -> list[int]:
        """1 for each unit whose parameters are known to be written to; the device reports a step at the next call."""
        before, self._reported = self._reported, None
        compared = {
            place: are_written for place, rows in enumerate(self._rows) if (are_written := rows.are_written) is not None
        }
        if compared:
            event = self._groups[0].device_handle.Event()
            self._reported = [*compared], torch.stack([*compared.values()]).to("cpu", non_blocking=True), event
            event.record()
        for place in compared:
            self._rows[place].end_step()
        written = set[int]()
        if before is not None:
            places, arrived, event = before
            event.synchronize()
            written.update(compress(places, arrived.tolist()))  # on the host: the device is not waited for
        return [int(place in written) for place in range(len(self._rows))]

    def check(self, reports: Sequence[int]) -> None:
        """Raises a `ConfigurationError` about the first unit that some rank reports."""
        for group, is_written in zip(self._groups, reports, strict=True):
            if is_written:
                kept = host_shards.kept([group])
                low = next((each for each in group.fsdp_params if _is_cast(each)), *kept[:1])
                dtype = low.all_gather_outputs[0].dtype
                what = f"that are gathered in {dtype} and kept in {low.orig_dtype}"
                instead = "train in the precision in which they are kept"
                if kept:
                    what, instead = "whose shards are on the host", "plan without 'host' in SearchSpace(shards=...)"
                raise ConfigurationError(
                    f"Expected a step to leave parameters as they are {what}, but it has written to those of"
                    f" {access.name_of(low)!r} or of others in its unit. Change weights in a hook, such as"
                    f" on_train_batch_start or on_train_batch_end, or {instead}."
                )

    def _free(self, rows: _Rows, free: Callable[[], None]) -> None:
        try:
            rows.take_over(drops=self.is_paused)
        finally:
            free()


class _Rows:
    """Rows that this rank has of the parameters of a unit: its shards, and their places in unsharded parameters.

    Attributes:
        are_written: result of the comparison in this step, on the device; None before a comparison.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.are_written: Tensor | None = None
        self._versions: list[int] = []  # versions of shards when they were gathered
        self._shards: list[Tensor] = []
        self._addresses: list[int] = []  # of the shards when they were located
        self._copied: tuple[list[Tensor], list[Tensor]] = [], []
        self._compared: list[tuple[Tensor, Tensor]] = []
        self._num_steps = 0
        self._samples: tuple[list[Tensor], list[Tensor]] | None = None  # rows and shards, for some steps

    def note(self, wait_for_unshard: Callable[[], None]) -> None:
        """Wraps ``wait_for_unshard``, which copies rows out of an all-gather: notes the versions of shards."""
        was_there = self._group.is_unsharded
        wait_for_unshard()
        if self._group.is_unsharded and not was_there:
            self._versions = self._versions_now()

    @torch.no_grad()
    def take_over(self, *, drops: bool) -> None:
        """Copies rows to shards of their precision, and compares the others, before the unit is freed.

        Args:
            drops: copy and compare nothing.
        """
        group = self._group
        if not group.is_unsharded:
            return
        for parameter in group.fsdp_params:
            (gathered,) = parameter.all_gather_outputs
            if parameter._unsharded_param.data_ptr() != gathered.data_ptr():  # as after ``p.data = value``
                _move_back(parameter)
            if not gathered.untyped_storage().resizable():
                _renew(parameter)
                self._addresses = []
        # A shard that somebody has changed while its unit was unsharded is newer than the unsharded parameter.
        if drops or self._versions_now() != self._versions:
            return
        self._locate()
        if self._copied[0]:
            torch._foreach_copy_(*self._copied)
            # The next all-gather runs in a stream of its own, and waits for this event before it reads the shards.
            group._reshard_after_forward_event = group.device_handle.Event()
            group._reshard_after_forward_event.record()
        if not self._compared:
            return
        if self._samples is None:
            rows, shards = zip(*self._compared, strict=True)
            turn = self._num_steps // _STEPS_OF_A_SAMPLE
            self._samples = [_sampled(each, turn) for each in rows], [_sampled(each, turn) for each in shards]
        differs = differ(*map(torch.cat, self._samples))
        self.are_written = differs if self.are_written is None else self.are_written | differs

    def end_step(self) -> None:
        """Forgets the comparison of a step, and after some steps which elements were compared."""
        self.are_written = None
        self._num_steps += 1
        if self._num_steps % _STEPS_OF_A_SAMPLE == 0:
            self._samples = None

    def _versions_now(self) -> list[int]:
        return [parameter.sharded_param._version for parameter in self._group.fsdp_params]

    def _locate(self) -> None:
        """Finds the places of rows, which stay the same until shards are other tensors, or have other memory."""
        parameters = self._group.fsdp_params
        shards = [parameter.sharded_param._local_tensor for parameter in parameters]
        addresses = [shard.data_ptr() for shard in shards]
        if addresses == self._addresses and all(map(operator.is_, shards, self._shards)):
            return
        self._shards, self._addresses = shards, addresses
        # Writes to ``data`` leave versions, which autograd checks, as they are.
        apart = [(each, shard) for each, shard in zip(parameters, shards, strict=True) if not is_shared(each)]
        compares = [_is_cast(each) or host_shards.is_kept(each) for each, _ in apart]
        pairs = [(own_rows(self._group, each), shard.data) for each, shard in apart]
        same = [pair for pair, is_compared in zip(pairs, compares, strict=True) if not is_compared]
        self._copied = [shard for _, shard in same], [rows for rows, _ in same]
        self._compared = [
            (rows.flatten(), shard.flatten())
            for (rows, shard), is_compared in zip(pairs, compares, strict=True)
            if is_compared
        ]
        self._samples = None


def _is_cast(parameter: Any) -> bool:
    """True if a parameter is gathered in another precision than its shard has."""
    (gathered,) = parameter.all_gather_outputs
    return bool(gathered.dtype != parameter._sharded_local_tensor.dtype)


def is_shared(parameter: Any) -> bool:
    """True if a shard is a view of the unsharded parameter."""
    own = parameter._sharded_local_tensor.untyped_storage()._cdata
    return any(gathered.untyped_storage()._cdata == own for gathered in parameter.all_gather_outputs)


def _gathered(parameter: Any) -> Tensor:
    """View of the memory that a unit has gathered for a parameter, in the shape of the parameter."""
    (gathered,) = parameter.all_gather_outputs
    view: Tensor = gathered.data.as_strided(parameter._orig_size, parameter._contiguous_orig_stride)
    return view


def _move_back(parameter: Any) -> None:
    """Moves an unsharded parameter back into the memory of its unit, with its values."""
    own = _gathered(parameter)
    own.copy_(parameter._unsharded_param.detach())
    parameter._unsharded_param.data = own


def _renew(parameter: Any) -> None:
    """Moves the memory of an unsharded parameter elsewhere: memory that NumPy refers to cannot be freed."""
    (gathered,) = parameter.all_gather_outputs
    gathered.data = gathered.data.clone()
    parameter._unsharded_param.data = _gathered(parameter)


def own_rows(group: Any, parameter: Any) -> Tensor:
    """View of this rank's rows of an unsharded parameter."""
    whole, mesh = _gathered(parameter), group.mesh_info
    if not whole.dim():
        return whole
    first = min(mesh.shard_mesh_rank * -(-len(whole) // mesh.shard_mesh_size), len(whole))  # as torch.chunk cuts
    return whole.narrow(0, first, len(parameter._sharded_local_tensor))


def _sampled(flat: Tensor, turn: int) -> Tensor:
    """Elements of a flat tensor at equal distances; the next turn takes others."""
    step = -(-len(flat) // _SAMPLED) or 1
    return flat[turn % step :: step]


def differ(rows: Tensor, shards: Tensor) -> Tensor:
    """True, on the device of rows, if shards differ from rows in any bit once they have the precision of rows."""
    if rows.is_cuda and not shards.is_cuda:  # which else waits for the device
        shards = shards.to(rows.dtype).pin_memory().to(rows.device, non_blocking=True)
    return (rows.view(torch.uint8) != shards.to(rows).view(torch.uint8)).any()
