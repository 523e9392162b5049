"""Steps on an emulated device that is too small for its model: OSDP's plans, and what people use instead, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import AdamW

from benchmarks.testbed.emulated.blocks import Block, Blocks
from benchmarks.testbed.emulated.device import Device, Stream
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.step import Step, time_in_turns
from benchmarks.testbed.training import quiet
from lightning_osdp import Cluster, ModelProfile, SearchSpace, make_plan, profile_model, simulate
from lightning_osdp.apply import local
from lightning_osdp.apply.internals import host_shards
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.cluster import Link
from lightning_osdp.core.plans import parts
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.cost import host_bytes_ahead
from lightning_osdp.planner.engine.layout import pinned_bytes
from lightning_osdp.planner.simulation.plan import planned_step
from lightning_osdp.profiler import LiveBytes, tensors_in
from lightning_osdp.profiler.model import TrainingStep
from lightning_osdp.profiler.precision import ComputePrecision

FLOPS_PER_S, HOST_BYTES_PER_S, DEVICE_BYTES_PER_S, WIDTH = 82.5e12, 100e9, 1e12, 4096
"""Half of an RTX 4090's peak in bfloat16, rates of a host's memory and of the device's, and the width of a model with
7 billion parameters: what the emulated device, this machine's host and the blocks stand for."""
_STRETCH = 12.0
_UPDATED_BYTES = 28
"""Bytes per element that AdamW moves in float32."""
_MEASURED_ELEMENTS = 4_000_000
_SPACE = SearchSpace(
    states=("device", "host"),
    shards=("device", "host"),
    slices=(1,),
    activations=("keep", "recompute", "offload"),
)
_FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
ON_HOST, UNFUSED = "fully_shard, all on the host", "fully_shard, all on the host, not fused"
BY_HAND = ("states on the host", "recompute", "activations on the host")


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """Way to train that takes part where the model needs so many times the memory of the device."""

    name: str
    need: float
    plan: str
    """Decisions, in words."""
    counted_bytes: int
    predicted_bytes: int | None
    counted_host_bytes: int | None
    predicted_host_bytes: int | None
    predicted_s: float | None
    measured_s: float
    num_taken: int
    """Updates of parameters that a step took from backward."""


def on_one_rank(
    *,
    num_layers: int,
    width: int,
    tokens: int,
    link_gb_s: float,
    needs: Sequence[float],
    computes: bool,
    num_rounds: int,
) -> dict[str, Any]:
    """Profiles, plans for every size of the device, and takes steps in turns, in a process group of one rank.

    Args:
        num_layers: blocks of the model.
        width: of the blocks; as many times fewer than `WIDTH`, so many tokens are one row.
        tokens: of a step, of the model that this one stands for.
        link_gb_s: rate of the link to the host of which `HOST_BYTES_PER_S` is the rate of the memory; in 10^9 bytes/s.
        needs: bytes that the model needs, over those of the device.
        computes: True where this machine computes, and nothing is emulated but the link.
        num_rounds: timed steps.

    Returns:
        Scale of this machine, bytes that are needed, closed forms, and the fields of an `Entrant` for each that fits.
    """
    gc.collect()  # of models before
    stretch = 1.0 if computes else _STRETCH
    scale = _host_bytes_per_s() / stretch / HOST_BYTES_PER_S
    device = Device(
        bytes_per_s=link_gb_s * 1e9 * scale,
        stretch=stretch,
        computes=computes,
        update_s=_UPDATED_BYTES / (DEVICE_BYTES_PER_S * scale),
    )
    num_rows = max(1, tokens * width // WIDTH)
    build = partial(Blocks, num_layers, width, num_rows, device, FLOPS_PER_S * scale * num_rows / tokens)
    with device.installed(), quiet():
        bench = _Bench(build, device, link_bytes_per_s=link_gb_s * 1e9 * scale)
        base = bench.searched(2**62)
        limits = {need: int(base.peak_bytes / need) for need in needs}
        ways = [*bench.ways(), *bench.of_osdp(limits)]
        seconds = time_in_turns({way.key: way.step for way in ways}, num_rounds=num_rounds)
    entrants = [
        asdict(way.entrant(need, min(seconds[way.key])))
        for need, limit_bytes in limits.items()
        for way in _fastest(ways, limit_bytes, need, {key: min(each) for key, each in seconds.items()})
    ]
    return {
        "scale": scale,
        "base_bytes": base.peak_bytes,
        "bounds_s": [bench.bound_s(base, limit_bytes) for limit_bytes in limits.values()],
        "entrants": entrants,
    }


def _host_bytes_per_s() -> float:
    """Bytes per second that a fused AdamW on one core moves."""
    parameter = torch.zeros(_MEASURED_ELEMENTS, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer, seconds = AdamW([parameter], fused=True), list[float]()
    for _ in range(4):
        start_s = time.thread_time()
        optimizer.step()
        seconds.append(time.thread_time() - start_s)
    return _UPDATED_BYTES * _MEASURED_ELEMENTS / min(seconds)


@dataclass(kw_only=True)
class _Way:
    """Way to train, with its step, and its bytes as counted."""

    name: str
    key: str
    need: float | None
    """Size that it was planned for; None: whatever it fits."""
    plan: str
    step: Planned | Offloaded
    predicted: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.step()  # makes states and the first gradients
        found: tuple[int, int | None] = self.step.count()
        self.counted_bytes, self.counted_host_bytes = found

    def entrant(self, need: float, measured_s: float) -> Entrant:
        """Entrant with what was found, for a device of this size."""
        return Entrant(
            name=self.name,
            need=need,
            plan=self.plan,
            counted_bytes=self.counted_bytes,
            counted_host_bytes=self.counted_host_bytes,
            measured_s=measured_s,
            num_taken=self.step.num_taken,
            **self.predicted,
        )


def _fastest(ways: Sequence[_Way], limit_bytes: int, need: float, seconds: Mapping[str, float]) -> Iterator[_Way]:
    """Yields, by name, the fastest of the ways that fit; OSDP's that was planned for this size whatever it takes."""
    fits = [way for way in ways if way.need == need or (way.need is None and way.counted_bytes <= limit_bytes)]
    for name in dict.fromkeys(way.name for way in fits):
        yield min((way for way in fits if way.name == name), key=lambda way: seconds[way.key])


class _Bench:
    """Model on an emulated device, and all ways to train it.

    Args:
        build: makes the model; takes ``is_fused``.
        device: that it trains on.
        link_bytes_per_s: of each direction.
    """

    def __init__(self, build: Callable[..., Blocks], device: Device, *, link_bytes_per_s: float) -> None:
        self._build, self._device, self._link_bytes_per_s = build, device, link_bytes_per_s
        self._dtype = None if device.computes else torch.bfloat16
        module = build()
        device.is_ahead = False
        profile = profile_model(
            module,
            module.batch(1),
            TrainingStep(precision=ComputePrecision(dtype=self._dtype, reduce_dtype=self._dtype)),
            activations=_SPACE.activations,
            on_host=True,
        )
        device.is_ahead = True
        if not device.computes:  # whose optimizer was timed on the host
            optimizer = replace(profile.optimizer, s_per_element=device.update_s, fixed_s=0.0)
            profile = replace(profile, optimizer=optimizer)
        self._profile: ModelProfile = profile.with_updates(ahead=True)
        self._cluster = Cluster(
            world_size=1,
            all_gather=_FREE,
            reduce_scatter=_FREE,
            overlaps=True,
            host_copy_s_per_byte=1 / link_bytes_per_s,
            host_copies_overlap=True,
        )
        self._names = [f"blocks.{place}" for place in range(len(module.blocks))]

    def searched(self, limit_bytes: int) -> Plan:
        """OSDP's plan under a limit."""
        space = replace(_SPACE, states=("device",), shards=("device",)) if limit_bytes == 2**62 else _SPACE
        return make_plan(
            self._profile, self._cluster, memory_limit_bytes=limit_bytes, micro_batch_size=1, search_space=space
        )

    def of_osdp(self, limits: Mapping[float, int]) -> Iterator[_Way]:
        """Yields OSDP's plan for each device that it finds one for."""
        for need, limit_bytes in limits.items():
            try:
                plan = self.searched(limit_bytes)
            except InfeasibleError:
                continue
            yield self._planned("OSDP", plan, need=need)

    def ways(self) -> Iterator[_Way]:
        """Yields all other ways."""
        for is_fused, name in ((True, ON_HOST), (False, UNFUSED)):
            for recomputes in (False, True):
                module = self._build(is_fused=is_fused)
                yield _Way(
                    name=name,
                    key=f"{name} {recomputes}",
                    need=None,
                    plan="all blocks recompute" if recomputes else "",
                    step=Offloaded(module, self._device, self._dtype, recomputes=recomputes),
                    predicted=dict.fromkeys(("predicted_bytes", "predicted_host_bytes", "predicted_s")),
                )
        states, recompute, offload = BY_HAND
        yield self._planned(states, self._by_hand(states="host"), ahead=False)
        yield self._planned(states, self._by_hand(saves="recompute", states="host"), ahead=False)
        yield self._planned(recompute, self._by_hand(saves="recompute"))
        yield self._planned(offload, self._by_hand(saves="offload"))

    def bound_s(self, base: Plan, limit_bytes: int) -> float:
        """Seconds that no step goes below on a device of this size, if all of them overlapped.

        Saved tensors are the first that do not fit, and may cost nothing, and then all 16 bytes of elements whose
        updates the host takes, and whose gradients and weights go over the link.
        """
        profile, size = self._profile, 1
        saved = sum(segment.saved_bytes.at(size) for segment in profile.segments)
        elements = max(0.0, base.peak_bytes - limit_bytes - saved) / 16
        computing_s = sum(each.forward_s.at(size) + each.backward_s.at(size) for each in profile.segments)
        host_s = elements * (profile.optimizer.host_s_per_element or 0.0)
        return max(computing_s, host_s, 4 * elements / self._link_bytes_per_s)

    def _by_hand(self, *, saves: str = "keep", states: str = "device") -> Plan:
        plan = plan_of(self._build(), dict.fromkeys(self._names, "ZDP"), world_size=1, micro_batch_size=1)
        blocks = (parts.Block(name=name, treatment=Treatment(saves=saves)) for name in self._names if saves != "keep")
        return replace(plan, units=tuple(each.treated(states=states) for each in plan.units), blocks=tuple(blocks))

    def _planned(self, name: str, plan: Plan, *, need: float | None = None, ahead: bool = True) -> _Way:
        profile = self._profile.with_updates(ahead=ahead)
        estimate = simulate(plan, profile, self._cluster)
        return _Way(
            name=name,
            key=f"{name} {need} {_in_words(plan)}",
            need=need,
            plan=_in_words(plan),
            step=Planned(self._build(), plan, self._device, precision=self._precision, ahead=ahead),
            predicted={
                "predicted_bytes": estimate.peak.peak_bytes,
                "predicted_host_bytes": int(host_bytes_ahead(*planned_step(plan, profile, self._cluster))),
                "predicted_s": estimate.time_s,
            },
        )

    @property
    def _precision(self) -> str:
        return "32-true" if self._dtype is None else "bf16-mixed"


def _in_words(plan: Plan) -> str:
    units = [unit.treatments[0] for unit in plan.units]
    numbers = {
        f"states of {{}} of {len(units)} units on the host": sum(each["states"] == "host" for each in units),
        "shards of {} there": sum(each["shard"] == "host" for each in units),
        "{} blocks recompute": sum(each.activations == "recompute" for each in plan.blocks),
        "{} blocks offload": sum(each.activations == "offload" for each in plan.blocks),
    }
    return ", ".join(text.format(number) for text, number in numbers.items() if number)


class Planned:
    """Step of a plan; with updates that begin in backward, if ``ahead``."""

    def __init__(self, module: Blocks, plan: Plan, device: Device, *, precision: str, ahead: bool) -> None:
        self._device, self._step = device, Step(module, plan, precision=precision)
        self._sharded = self._step.sharded
        self._sharded._forwards.memory.stream = Stream(device)  # type: ignore[assignment]  # of the same methods
        self._sharded.begin_fit(updates_ahead=ahead)
        self._num_before = 0

    def __call__(self) -> None:
        """Takes a step, and waits for the device."""
        self._num_before = self._sharded._ahead.num_taken
        self._device.holds_states = True
        try:
            self._step()
        finally:
            self._device.holds_states = False
        self._device.finish()

    @property
    def num_taken(self) -> int:
        """Updates of parameters that the last step took from backward."""
        return self._sharded._ahead.num_taken - self._num_before

    def count(self) -> tuple[int, int]:
        """Peaks of a step: on the device, and on the host."""
        host, optimizers = self._sharded.host, [self._step.optimizer]
        live = LiveBytes("cpu")
        live.leave_out(tensors_in([*host.tensors(optimizers)]))
        live.track(living_tensors(self._sharded.module, optimizers))
        live.track(self._step.batch)
        memory = self._sharded._forwards.memory
        memory.peak_bytes = memory.current_bytes
        with live:
            self()
        shards = [each for parameter in host._kept.values() for each in host_shards.tensors_of(parameter)]
        pinned = tensors_in([*shards, *host._copies.values()])
        plain = tensors_in([*host.spare.values(), *host.tensors(optimizers)])
        sizes = {each._cdata: each.nbytes() for each in _storages(plain)}
        sizes |= {each._cdata: pinned_bytes(each.nbytes()) for each in _storages(pinned)}
        return live.peak_bytes, sum(sizes.values()) + memory.peak_bytes


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return [local(each).untyped_storage() for each in tensors]


class Offloaded:
    """Step of ``fully_shard`` with all shards, gradients and states on the host, as torch has it."""

    num_taken = 0

    def __init__(self, module: Blocks, device: Device, dtype: torch.dtype | None, *, recomputes: bool) -> None:
        self._module, self._device = module, device
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        if recomputes:
            apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, Block))
        for child in [each for each in module.modules() if isinstance(each, Block)]:
            fully_shard(child, **options)
        fully_shard(module, **options)
        register_fsdp_forward_method(module, "training_step")
        self._optimizer, self._batch = module.configure_optimizers(), module.batch(1)

    def __call__(self) -> None:
        """Takes a step, and waits for the device."""
        self._gradients()
        self._optimizer.step()
        self._device.finish()

    def count(self) -> tuple[int, None]:
        """Peak of a step on the device, on which there is nothing between steps; none of the host's."""
        live = LiveBytes("cpu")
        states = tensors_in([*self._optimizer.state.values()])
        live.leave_out([*map(local, self._module.parameters()), *states])
        live.track(self._batch)
        with live:
            self._gradients()
        return live.peak_bytes, None

    def _gradients(self) -> None:
        self._optimizer.zero_grad()
        loss: Tensor = self._module.training_step(self._batch, 0)
        loss.backward()
