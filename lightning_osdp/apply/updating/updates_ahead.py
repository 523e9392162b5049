"""Updates on the host that begin in backward, once the gradients of a unit are there, in a thread beside it."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_osdp.apply.internals import dtensors
from lightning_osdp.apply.updating.host_updates import HostRows, Stepped
from lightning_osdp.operations.optimizers import arithmetic

_log = logging.getLogger(__name__)

_MOST_LEFT_OUT = 64
"""Most steps in a row in which no update begins."""
_SAMPLE = 256
"""Elements of a tensor that are hashed, at least."""


class Updated(NamedTuple):
    """Rows on the host as a step leaves them, and the state of the parameter then."""

    stepped: Stepped
    fields: dict[str, Any]


class _Computed(NamedTuple):
    """Updates of a unit."""

    fields: Mapping[int, dict[str, Any]]
    """States as the updates leave them, by id of parameters."""
    hash: int
    """Hash of samples of what they were computed of."""


_Copies = dict[str, tuple[Any, Tensor | None]]
"""States by name, each with memory for its copy if it is a tensor."""


class _Begun(NamedTuple):
    """Updates of a unit that have begun."""

    optimizer: Optimizer
    stepped: Mapping[int, Stepped]
    """Parameters by id."""
    pairs: Sequence[tuple[DTensor, DTensor]]
    """These parameters, with their gradients."""
    marks: object
    """Marks of parameters, gradients and states, when the update was begun."""
    options: Mapping[int, Mapping[str, Any]]
    """Options of the group of each parameter, by id."""
    copies: Mapping[int, _Copies]
    """States of parameters, by id, which live as long as their ids are part of marks."""
    work: Future[_Computed]
    """The updates."""


class UpdatesAhead:
    """Updates of parameters on the host, each begun in backward for the optimizer step that follows.

    An update is computed of what is there then: weights, gradient, states and options of the group. Clipping may change
    these before the step, or somebody of whom nothing is known. Therefore an update touches copies alone, and the step
    takes those of a unit only if its options are as they were, and its weights, gradients and states are the same
    tensors to which nobody is known to have written: by their versions, by how often rows or data of weights and
    gradients were asked for, and by a hash of samples. Else the step is computed at its own place, and no update begins
    in the next step, then in the next two, and so on, as long as this happens again. Where the device is through with
    backward before an update is begun, it is computed in the step, too: there is nothing to hide behind, and it needs
    no copies. In any case these are the numbers of a step without updates ahead, for the arithmetic is that of single
    elements.

    Copies of states take memory of the host beside these, of which there may be a limit.

    [Run on one GPU by `benchmarks/gpu_check.py`.]

    Args:
        host: parameters that the host updates.
        device: of their shards.

    Attributes:
        room_bytes: most bytes of copies of states, and of shards that are on the host; None: as many as there are.
        num_taken: number of updates of parameters that steps have taken.
    """

    def __init__(self, host: HostRows, device: torch.device) -> None:
        self.room_bytes: int | None = None
        self.num_taken = 0
        self._host, self._device = host, device
        self._is_on = self._has_said = False
        self._num_left_out, self._next_left_out = 0, 1  # steps
        self._optimizer: Optimizer | None = None
        self._groups: Mapping[int, int] = {}  # number of the group of each parameter that may begin, by id
        self._begun: list[_Begun] = []
        self._thread: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def begin_fit(self, *, is_on: bool) -> None:
        """Lets updates begin in the fit that begins now, or none."""
        self._is_on, self._has_said = is_on, False
        self._num_left_out, self._next_left_out = 0, 1

    def end_fit(self) -> None:
        """Lets no more updates begin, and ends the thread."""
        self._is_on = False
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Lets updates begin of what an optimizer has on the host, within the context of its step."""
        held = self._host.held_in(optimizer) if self._is_on else {}
        if held and self._num_left_out:
            self._num_left_out -= 1
        elif held:
            self._optimizer = optimizer
            # ranks are given rank 0's gradients of scalars before they step
            self._groups = {
                id(each): number
                for number, group in enumerate(optimizer.param_groups)
                for each in group["params"]
                if id(each) in held and each.dim()
            }
        try:
            yield
        finally:
            wait([each.work for each in self._begun])
            for begun in self._begun:
                for _, gradient in begun.pairs:
                    dtensors.unmark(gradient)
            self._optimizer, self._groups, self._begun = None, {}, []

    def begin(self, parameters: Iterable[Tensor], ready: Any = None) -> None:
        """Begins updates of a unit where an optimizer is stepping, for those parameters whose gradients are there.

        Args:
            parameters: shards of the unit.
            ready: event of a GPU after which gradients are there; None: they are.
        """
        optimizer = self._optimizer
        if optimizer is None or _is_scaled(optimizer):
            return
        pairs = [
            (parameter, parameter.grad)
            for parameter in parameters
            if id(parameter) in self._groups
            and isinstance(parameter, DTensor)
            and isinstance(parameter.grad, DTensor)
            and dtensors.has_layout_of(parameter.grad, parameter)
        ]
        if not pairs:
            return
        for _, gradient in pairs:
            dtensors.mark_shard(gradient)
        with _disable_current_modes():  # which count for the device
            copies = self._copies(optimizer, [parameter for parameter, _ in pairs])
            if copies is None:
                return
            stepped = self._host.places(pairs)
            marks, marked = _marks(pairs, optimizer.state)  # before the thread reads: later writes have later versions
        options = [_options(group) for group in optimizer.param_groups]
        rows: list[list[Tensor]] = [[] for _ in options]
        for each in stepped:
            rows[self._groups[id(each.parameter)]].append(each.rows)
        twin: Optimizer = object.__new__(type(optimizer))
        of_twin = [{**of, "params": params} for of, params in zip(options, rows, strict=True) if params]
        vars(twin).update({**vars(optimizer), "param_groups": of_twin})
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="osdp-updates")
        self._begun.append(
            _Begun(
                optimizer=optimizer,
                stepped={id(each.parameter): each for each in stepped},
                pairs=pairs,
                marks=marks,
                options={id(each.parameter): options[self._groups[id(each.parameter)]] for each in stepped},
                copies=copies,
                work=self._thread.submit(self._update, twin, stepped, pairs, copies, marked=marked, ready=ready),
            )
        )

    def taken(self, optimizer: Optimizer, pairs: Sequence[tuple[DTensor, DTensor]]) -> list[Updated]:
        """Returns what has begun of these parameters with these gradients, and is what a step now would compute.

        No update goes on when it returns.

        Raises:
            Exception: an update failed.
        """
        if not self._begun:
            return []
        self._wait_for_device()
        for begun in reversed(self._begun):
            begun.work.cancel()  # which has no effect on what runs
        latest = {key: each for each in self._begun for key in each.stepped}
        given = {id(parameter): gradient for parameter, gradient in pairs}
        group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        found, is_same = [], True
        for begun in self._begun:
            if begun.work.cancelled():
                continue
            # those that no rank has used have no gradients any more
            of_step = [id(parameter) for parameter, _ in begun.pairs if id(parameter) in given]
            computed = begun.work.result()
            groups = {id(group_of[key]): (group_of[key], begun.options[key]) for key in of_step}
            is_own = begun.optimizer is optimizer and not _is_scaled(optimizer)
            is_own = is_own and all(latest[key] is begun for key in begun.stepped)
            is_own = is_own and all(_has_options(group, options) for group, options in groups.values())
            is_own = is_own and all(given.get(id(each), gradient) is gradient for each, gradient in begun.pairs)
            if is_own and _is_as_begun(begun, computed):
                found += [Updated(begun.stepped[key], computed.fields[key]) for key in of_step]
            else:
                is_same = False
        wait([each.work for each in self._begun])
        if not is_same:
            self._leave_out()
        elif found:
            self._next_left_out = 1
        for updated in found:
            before = optimizer.state.get(updated.stepped.parameter, {})
            rows = {name: dtensors.local(value) for name, value in before.items() if isinstance(value, Tensor)}
            self._host.spare[id(updated.stepped.parameter)] = rows  # memory of the next copies
        self.num_taken += len(found)
        return found

    def _wait_for_device(self) -> None:
        """Returns when the device has done what was issued: until then updates hide behind it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _leave_out(self) -> None:
        """Lets no updates begin in some steps, and says so once in a fit."""
        self._num_left_out = self._next_left_out
        self._next_left_out = min(2 * self._next_left_out, _MOST_LEFT_OUT)
        if not self._has_said:
            self._has_said = True
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            _log.log(
                logging.INFO if is_first else logging.DEBUG,
                "OSDP: the host had begun to update units in backward, but weights, gradients, states or options have"
                " changed before the optimizer's step, as by clipping. It updates them in the step, and begins less"
                " often in backward the more often this happens.",
            )

    def _copies(self, optimizer: Optimizer, parameters: Sequence[DTensor]) -> dict[int, _Copies] | None:
        """States of parameters, by id, with memory for their copies; None for lack of room."""
        spare, found = self._host.spare, dict[int, _Copies]()
        is_more = not self._host.has_places(parameters)  # than earlier steps have taken
        for parameter in parameters:
            own, copies = spare.get(id(parameter), {}), _Copies()
            for name, value in optimizer.state.get(parameter, {}).items():
                place = own.get(name) if isinstance(value, Tensor) else None
                if isinstance(value, Tensor):
                    rows = dtensors.local(value)
                    if place is None or (place.shape, place.dtype) != (rows.shape, rows.dtype):
                        place, is_more = torch.empty_like(rows), True
                copies[name] = value, place
            found[id(parameter)] = copies
        new = {key: {name: of for name, (_, of) in each.items() if of is not None} for key, each in found.items()}
        if self.room_bytes is not None and is_more:
            places = (place for each in {**spare, **new}.values() for place in each.values())
            if sum(place.nbytes for place in places) + self._host.bytes_beside(parameters) > self.room_bytes:
                return None
        spare.update(new)
        return found

    def _update(
        self,
        twin: Optimizer,
        stepped: Sequence[Stepped],
        pairs: Sequence[tuple[DTensor, DTensor]],
        copies: Mapping[int, _Copies],
        *,
        marked: Sequence[Tensor],
        ready: Any,
    ) -> _Computed:
        """Takes the step of an optimizer's twin on copies; runs in the thread."""
        with torch.no_grad(), self._after(ready):
            hashed = _hash_of_samples(marked)  # before anything is copied: what is written from then on is found
            self._host.fill(stepped, pairs)
            twin.state = defaultdict(dict)
            for each in stepped:
                each.rows.grad = each.gradient
                for name, (value, place) in copies[id(each.parameter)].items():
                    twin.state[each.rows][name] = value if place is None else place.copy_(dtensors.local(value))
            try:
                with self._host.fused(twin):
                    arithmetic(twin)(twin)
            finally:
                for each in stepped:
                    each.rows.grad = None
            return _Computed({id(each.parameter): twin.state.get(each.rows, {}) for each in stepped}, hashed)

    @contextmanager
    def _after(self, ready: Any) -> Iterator[None]:
        """Makes copies of a GPU's memory follow an event, in a stream of their own."""
        if ready is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        ready.synchronize()  # rows and gradients on the host are read by no stream
        with torch.cuda.stream(self._stream):
            yield


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of the options of a group."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _has_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Tells if a group still has the options of which there is a copy."""

    def values(of: Mapping[str, Any]) -> list[Any]:
        named = [(name, value) for name, value in of.items() if name != "params"]
        return [(name, value.tolist() if isinstance(value, Tensor) else value) for name, value in named]

    return values(group) == values(options)


def _is_as_begun(begun: _Begun, computed: _Computed) -> bool:
    """Tells if parameters, gradients and states are what updates were computed of."""
    marks, marked = _marks(begun.pairs, begun.optimizer.state)
    return marks == begun.marks and _hash_of_samples(marked) == computed.hash


def _hash_of_samples(marked: Iterable[Tensor]) -> int:
    """Hash of samples of tensors, those of one device together."""
    samples = [rows.flatten()[:: max(1, rows.numel() // _SAMPLE)] for rows in marked]
    return dtensors.hash_of(*sorted(samples, key=lambda each: each.device.type))


def _marks(
    pairs: Iterable[tuple[DTensor, DTensor]], states: Mapping[Any, Mapping[str, Any]]
) -> tuple[object, list[Tensor]]:
    """Marks of parameters, gradients and states, and this rank's rows of those with dimensions.

    Marks are others once somebody has written to these, or might have; they have states without dimensions by their
    values.
    """
    marked: list[Tensor] = []

    def mark(value: Any) -> object:
        if not isinstance(value, Tensor):
            return value
        rows = dtensors.local(value)
        if not rows.dim():
            return float(rows)
        marked.append(rows)
        return rows.data_ptr(), dtensors.mark_of(value)

    marks = [
        (mark(parameter), mark(gradient), [(name, mark(value)) for name, value in states.get(parameter, {}).items()])
        for parameter, gradient in pairs
    ]
    return marks, marked


def _is_scaled(optimizer: Optimizer) -> bool:
    """Tells if a gradient scaler has left an optimizer what fused steps divide gradients by."""
    return any(isinstance(getattr(optimizer, name, None), Tensor) for name in ("grad_scale", "found_inf"))
