"""State, seconds and temporaries of the user's optimizer, measured on some elements of a copy of the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.errors import ProfileError
from lightning_osdp.operations.optimizers import (
    can_update_on_host,
    check_supported,
    copied,
    fused_on_host,
    is_elementwise,
    states_of,
)
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.machine.stopwatch import fastest_s
from lightning_osdp.profiler.step.fake_model import stand_in
from lightning_osdp.profiler.step.snapshot import tensors_in
from lightning_osdp.profiler.timing.operation_time import OperationRecorder, roofline_s, segment_seconds

_SAMPLE_ELEMENTS = {"cpu": 4_000_000, "cuda": 16_000_000}
"""Elements that the timed optimizer step updates, by device: enough to leave the caches, on a GPU enough to take longer
than the fixed seconds of a step, and quick on either."""
_LEAST_ELEMENTS = 64
"""Elements of each further parameter, whose state is scaled up from them, and of all parameters in the step that tells
the fixed seconds."""
_REPEATS = 3

_SMALL, _BIG = 1024, 128 * 1024
"""Elements of a group's first and second parameter, of which sums of multiples can be told apart."""
_NUM_STEPS = 8
"""Steps that are measured: RAdam, for one, takes more memory from its sixth step on."""
_NUM_TURNS = 3
"""Parameters of a group that are updated: the small, the big, and one after it, which may find temporaries of the
big."""

Pair = tuple[float, float]
"""(x, y) as in `OptimizerProfile.temporaries`."""


@dataclass(frozen=True)
class OptimizedParameter:
    """State and group of one parameter in the optimizers."""

    state_bytes: int
    """Bytes of state in tensors; scalars such as a step counter are not sharded and do not count."""
    group: int
    """Number of the parameter's group, counted over all optimizers; the last group that holds the parameter."""
    place: int
    """Index of the parameter in the group."""


def profile_optimizers(
    module: nn.Module,
    configure: Callable[[nn.Module], Sequence[Optimizer]],
    device: torch.device,
    *,
    rates: DeviceRates | None = None,
    on_host: bool = False,
) -> tuple[OptimizerProfile, Mapping[nn.Parameter, OptimizedParameter]]:
    """Profile of the step of the optimizers that ``configure`` makes, and their state of each parameter.

    The module is not touched: ``configure`` sees a copy whose parameters are on the meta device. The step is timed, or
    its seconds follow from its operations and ``rates`` of another device. ``on_host`` has it timed on the host, too,
    where that can be, or its seconds there follow from rates that are those of a host as well.

    Raises:
        ConfigurationError: an optimizer cannot train shards.
        ProfileError: the module cannot be copied, or an optimizer cannot be run.
    """
    twins = {parameter: stand_in(parameter) for parameter in module.parameters()}
    optimizers = list(configure(_copied(module, {id(parameter): twin for parameter, twin in twins.items()})))
    for optimizer in optimizers:
        check_supported(optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    on_host = on_host and all(map(can_update_on_host, optimizers))
    host_s = None
    if on_host and rates is not None and rates.host_bytes_per_s is not None:
        host_s = _host_s_per_element(optimizers, replace(rates, bytes_per_s=rates.host_bytes_per_s))
    elif on_host and rates is None and device.type != "cpu":
        host_s = _host_s_per_element(optimizers, None)
    if device.type == "cuda" or (rates is not None and rates.is_cuda):
        for group in groups:  # torch's choice on CUDA where the user makes none
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
    is_foreach = any(group.get("foreach") for group in groups)
    room = _SAMPLE_ELEMENTS[device.type]
    samples = [_Sample(optimizer, device, partial(_sampled, room=room)) for optimizer in optimizers]
    places = {p: (number, place) for number, group in enumerate(groups) for place, p in enumerate(group["params"])}
    optimized = {}
    for original, twin in twins.items():
        if twin in places:
            state_bytes = sum(sample.state_bytes(twin) for sample in samples if twin in sample.parameters)
            optimized[original] = OptimizedParameter(state_bytes, *places[twin])
    fixed_s, s_per_element = _seconds(optimizers, samples, device, rates)
    ratio, pairs = 0.0, set[Pair]()
    for probe in [_Sample(optimizer, device, _two_sizes) for optimizer in optimizers]:
        if probe.updated and is_foreach:
            ratio = max(ratio, _foreach_ratio(probe))
        elif probe.updated:
            pairs |= _turn_pairs(probe)
    profile = OptimizerProfile(
        s_per_element=s_per_element,
        host_s_per_element=s_per_element if on_host and rates is None and device.type == "cpu" else host_s,
        fixed_s=fixed_s,
        is_foreach=is_foreach,
        temporaries=front(pairs),
        foreach_temporaries=ratio,
        is_elementwise=all(map(is_elementwise, optimizers)),
    )
    return profile, optimized


def _host_s_per_element(optimizers: Sequence[Optimizer], rates: DeviceRates | None) -> float:
    """Seconds per element of steps on the host of a GPU, where groups compute in torch's fused way if they may."""
    host = torch.device("cpu")
    with fused_on_host(optimizers):
        room = _SAMPLE_ELEMENTS[host.type]
        samples = [_Sample(optimizer, host, partial(_sampled, room=room)) for optimizer in optimizers]
        return _seconds(optimizers, samples, host, rates)[1]


def _seconds(
    optimizers: Sequence[Optimizer], samples: Sequence[_Sample], device: torch.device, rates: DeviceRates | None
) -> tuple[float, float]:
    """Fixed seconds of a step of all optimizers, and seconds per element, from these samples and small ones."""
    small = [_Sample(optimizer, device, partial(_sampled, room=0)) for optimizer in optimizers]
    fixed = [fit_step(*(sample.elements_and_s(rates) for sample in pair)) for pair in zip(small, samples, strict=True)]
    # seconds per element of each optimizer are weighted by the elements that it updates
    sizes = [sum(p.numel() for p in sample.parameters if p.requires_grad) for sample in samples]
    total_s = sum(s_per_element * size for (_, s_per_element), size in zip(fixed, sizes, strict=True))
    elements = sum({p: p.numel() for sample in samples for p in sample.parameters if p.requires_grad}.values())
    return sum(fixed_s for fixed_s, _ in fixed), total_s / elements if elements else 0.0


def replica_of(module: nn.Module) -> nn.Module:
    """Copy of a module without values, for later steps on fake tensors: its parameters and buffers are on meta.

    Other tensors, and arrays, datasets and loaders that are attributes, are the module's own: the copy takes no memory.

    Raises:
        ProfileError: the module cannot be copied.
    """
    attributes = [vars(each) for each in module.modules()]
    values = [value for held in attributes for value in held.values()]
    shared = [v for v in values if isinstance(v, (Dataset, DataLoader)) or type(v).__module__ == "numpy"]
    memo = {id(each): each for each in (*tensors_in(attributes), *shared)}
    tensors = (each for each in (*module.parameters(), *module.buffers()) if each.layout is torch.strided)
    return _copied(module, memo | {id(each): stand_in(each) for each in tensors})


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # results of earlier steps that the module still holds cannot be copied, and optimizers do not see them
    attributes = list(tensors_in([vars(m) for m in module.modules()]))
    memo |= {id(tensor): tensor.detach() for tensor in attributes if not tensor.is_leaf}
    # nor can hooks of forward: profilers, such as Lightning's, hold objects that cannot be copied
    members = [member for m in module.modules() for member in vars(m).items()]
    memo |= {id(hooks): type(hooks)() for name, hooks in members if re.fullmatch(r"_forward_(pre_)?hooks\w*", name)}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ProfileError(
            f"Expected {type(module).__name__} to be copyable, so that configure_optimizers can be run on a copy, but"
            f" copy.deepcopy failed: {error!r}. Keep what cannot be copied (locks, files, sockets) out of the"
            " module until training starts."
        ) from error


class _Sample:
    """Copy of an optimizer with its options, over some elements of each parameter, after one step at least."""

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        num_elements: Callable[[Sequence[Sequence[Tensor]]], Sequence[int]],
    ) -> None:
        self.device = device
        self.parameters: dict[Tensor, nn.Parameter] = {}
        groups = [group["params"] for group in optimizer.param_groups]
        every = [parameter for group in groups for parameter in group]
        for parameter, elements in zip(every, num_elements(groups), strict=True):
            shape = _rows_of(parameter, elements)
            twin = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device), parameter.requires_grad)
            self.parameters[parameter] = twin
        self.updated = [p for p in self.parameters.values() if p.requires_grad]
        self.gradients = [torch.zeros_like(p) for p in self.updated]
        try:
            self.optimizer = _replica(optimizer, self.parameters, device)
            if self.updated:
                is_alone = len(states_of(self.optimizer)) == 1
                for _ in range(1 if is_alone else _NUM_STEPS):  # inner optimizers may make their state after some steps
                    self.step()
        except Exception as error:  # an optimizer may do anything
            raise ProfileError(
                f"Expected {type(optimizer).__name__} to take a step on zero gradients of parameters with other"
                f" numbers of rows, as shards have, so that its state can be measured, but it failed: {error!r}."
                " Pass plan= to skip profiling."
            ) from error

    def step(self) -> None:
        """Takes a step with gradients, which the closure gives again: an optimizer may clear them after evaluation."""
        self._give_gradients()
        self.optimizer.step(self._give_gradients)

    def _give_gradients(self) -> float:
        for parameter, gradient in zip(self.updated, self.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
        return 0.0

    def state_bytes(self, parameter: Tensor) -> int:
        """Bytes of state that the optimizer would keep for all elements of the parameter."""
        twin = self.parameters[parameter]

        def factor(value: Tensor) -> float:
            if value.numel() == twin.numel():
                return parameter.numel() / max(1, twin.numel())
            is_by_row = twin.dim() > 1 and len(value) == len(twin) > 1  # such as Adafactor's
            return len(parameter) / len(twin) if is_by_row else 1.0

        values = tensors_in([state.get(twin, {}) for state in states_of(self.optimizer)])
        return sum(round(value.nbytes * factor(value)) for value in values if value.dim() > 0)

    def elements_and_s(self, rates: DeviceRates | None) -> tuple[int, float]:
        """Number of elements that a step updates, and its seconds: timed, or by these rates."""
        if not self.updated:
            return 0, 0.0
        if rates is None:
            step_s = fastest_s(self.step, self.device, repeats=_REPEATS)
        else:
            with OperationRecorder() as recorder:
                self.step()
            step_s = sum(segment_seconds(recorder.operations, partial(roofline_s, rates=rates)).values())
        return sum(p.numel() for p in self.updated), step_s


def fit_step(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Fixed seconds of a step, and seconds per element, from steps of two sizes, given as (elements, seconds).

    Neither is below 0. Where the large step has less than twice the elements of the small one, all of it is fixed.

    Example:
        >>> fit_step((10, 1.5), (100, 6.0))
        (1.0, 0.05)
    """
    more = large[0] - small[0]
    if more <= small[0]:  # noise would be taken for the seconds of elements
        return large[1], 0.0
    s_per_element = max(0.0, (large[1] - small[1]) / more)
    return max(0.0, small[1] - s_per_element * small[0]), s_per_element


def _rows_of(parameter: Tensor, num_elements: int) -> tuple[int, ...]:
    """Shape of about ``num_elements`` of a parameter: whole rows, as a shard has them, or narrower ones.

    A scalar is a row, so that its state can be told from counts of steps.
    """
    if num_elements == parameter.numel():
        return tuple(parameter.shape) or (1,)
    per_row = parameter.shape[1:].numel()
    if 0 < per_row <= num_elements:
        return (num_elements // per_row, *parameter.shape[1:])
    return (num_elements, *(1 for _ in parameter.shape[1:]))


def _sampled(groups: Sequence[Sequence[Tensor]], *, room: int) -> list[int]:
    """Elements of each parameter on which time is measured: all of the first parameters, while there is room."""
    sizes: list[int] = []
    for parameter in (parameter for group in groups for parameter in group):
        sizes.append(min(parameter.numel(), max(room, _LEAST_ELEMENTS)))
        room -= sizes[-1] if parameter.requires_grad else 0
    return sizes


def _replica(optimizer: Optimizer, parameters: Mapping[Tensor, nn.Parameter], device: torch.device) -> Optimizer:
    """Copy of an optimizer with other parameters; state that it made before a step is zeroed, in the new shapes."""
    memo: dict[int, Any] = {id(old): new for old, new in parameters.items()}
    for old, new in parameters.items():
        for value in tensors_in([state.get(old, {}) for state in states_of(optimizer)]):
            shape = new.shape if value.shape == old.shape else value.shape
            if value.is_meta:
                memo[id(value)] = torch.zeros(shape, dtype=value.dtype, device=device)
    return copied(optimizer, memo)


def _two_sizes(groups: Sequence[Sequence[Tensor]]) -> list[int]:
    """Elements of each parameter for `_turn_pairs`: a small and a big one, or a big one that is alone in its group."""
    sizes: list[int] = []
    for group in groups:
        is_alone = sum(parameter.requires_grad for parameter in group) == 1
        left = iter((_BIG,) if is_alone else (_SMALL, _BIG))
        sizes += [next(left, 1) if parameter.requires_grad else 1 for parameter in group]
    return sizes


def _turn_pairs(probe: _Sample) -> set[Pair]:
    """Pairs of every moment of a step over parameters of `_two_sizes`, to the quarter: masks have one byte an element.

    From this call on the optimizer updates only the first few parameters of each group: later ones tell nothing more.
    """
    for group in probe.optimizer.param_groups:
        trainable = [p for p in group["params"] if p.requires_grad]
        group["params"][:] = trainable[:_NUM_TURNS] or group["params"]
    itemsize = max(parameter.element_size() for parameter in probe.updated)
    pairs = set()
    for num_bytes in _temporary_bytes(probe):
        big = round(num_bytes / itemsize / _BIG * 4) / 4
        small = round((num_bytes / itemsize - big * _BIG) / _SMALL * 4) / 4
        pairs.add((small, big) if big else (0.0, small))  # in the turn of the small one there is none before
    return pairs


def front(pairs: Collection[Pair]) -> tuple[Pair, ...]:
    """Pairs that no other pair is above.

    Example:
        >>> front([(0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (1.0, 1.0)])
        ((0.0, 2.0), (1.0, 1.0))
    """

    def is_below(pair: Pair) -> bool:
        return any(other != pair and other[0] >= pair[0] and other[1] >= pair[1] for other in pairs)

    return tuple(sorted(pair for pair in pairs if any(pair) and not is_below(pair)))


def _foreach_ratio(probe: _Sample) -> float:
    """Most bytes of temporaries over those of the largest group."""
    groups = ([p for p in group["params"] if p.requires_grad] for group in probe.optimizer.param_groups)
    largest: int = max(sum(p.nbytes for p in group) for group in groups)
    return max(_temporary_bytes(probe)) / largest


def _temporary_bytes(probe: _Sample) -> set[int]:
    """Every number of bytes of temporaries that live during a step."""
    live = _Counts(probe.device.type)
    with live:
        live.track([*probe.updated, *probe.gradients])
        live.track(tensors_in([list(state.values()) for state in states_of(probe.optimizer)]))
        before = live.current_bytes
        live.counts = {before}
        for _ in range(_NUM_STEPS):
            probe.step()
    return {count - before for count in live.counts}


class _Counts(LiveBytes):
    """Set of all numbers of live bytes."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.counts: set[int] = set()

    def _set(self, key: int, num_bytes: int) -> None:
        super()._set(key, num_bytes)
        self.counts.add(self.current_bytes)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self.counts.add(self.current_bytes)
