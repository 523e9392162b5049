"""What the user's optimizer keeps and takes, found by running it on a copy of the model without memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.live_bytes import LiveBytes
from lightning_osdp.profiler.timing import synchronize

_SAMPLE_ELEMENTS = 4_000_000
"""Elements that the timed optimizer step updates: enough to leave the caches, quick on any device."""


@dataclass(frozen=True)
class OptimizerProfile:
    """The optimizers of one model."""

    state_bytes: Mapping[nn.Parameter, int] = field(default_factory=dict)
    """State tensors by parameter; scalars such as a step counter are not sharded and do not count."""
    s_per_element: float = 0.0
    is_foreach: bool = False
    workspace_ratio: float = 0.0
    """Bytes of temporaries over those of the parameters that are updated at once: all (foreach) or the largest."""


@dataclass(frozen=True)
class _Step:
    """One optimizer's step on a sample of its parameters."""

    s_per_element: float = 0.0
    is_foreach: bool = False
    workspace_ratio: float = 0.0


def profile_optimizers(
    module: nn.Module, configure: Callable[[nn.Module], Sequence[Optimizer]], device: torch.device
) -> OptimizerProfile:
    """State bytes per parameter and seconds per element of the optimizers that ``configure`` makes.

    Args:
        module: the model; it is not touched: ``configure`` sees a copy whose parameters are on the meta device.
        configure: returns the optimizers of the module that it is given.
        device: where the step is timed.

    Raises:
        ProfileError: the module cannot be copied, or an optimizer can be run neither without nor with memory.
    """
    twins = {
        p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()
    }
    memo: dict[int, object] = {id(p): twin for p, twin in twins.items()}
    try:
        replica = copy.deepcopy(module, memo)
    except Exception as error:
        raise ProfileError(
            f"Expected {type(module).__name__} to be copyable, so that configure_optimizers can be run on a copy, but"
            f" copy.deepcopy failed: {error!r}. Keep what cannot be copied (locks, files, generators) out of the"
            " module until training starts."
        ) from error
    optimizers = list(configure(replica))
    used = {p: p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    state_bytes: dict[nn.Parameter, int] = {}
    for optimizer in optimizers:
        states = _states_without_memory(optimizer)
        for original, twin in twins.items():
            if twin in used and twin in states:
                state_bytes[original] = state_bytes.get(original, 0) + states[twin]
    steps = [_measure_step(optimizer, device) for optimizer in optimizers]
    elements = sum(p.numel() for p in used)
    total_s = sum(
        step.s_per_element * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        for optimizer, step in zip(optimizers, steps, strict=True)
    )
    return OptimizerProfile(
        state_bytes=state_bytes,
        s_per_element=total_s / elements if elements else 0.0,
        is_foreach=any(step.is_foreach for step in steps),
        workspace_ratio=max((step.workspace_ratio for step in steps), default=0.0),
    )


def _with_parameters(optimizer: Optimizer, replace: Callable[[Tensor], Tensor]) -> Optimizer:
    """The same optimizer, options and all, over other parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(optimizer, {id(p): replace(p) for p in parameters})


def _states_without_memory(optimizer: Optimizer) -> dict[Tensor, int]:
    """Bytes of state per parameter after one step; parameters stay on the meta device if the optimizer allows it."""
    twins: dict[Tensor, Tensor] = {}

    def as_device(device: str) -> Callable[[Tensor], Tensor]:
        def replace(parameter: Tensor) -> Tensor:
            twin = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad)
            twin.grad = torch.zeros_like(twin) if parameter.requires_grad else None
            twins[parameter] = twin
            return twin

        return replace

    failure: Exception | None = None
    for device in ("meta", "cpu"):
        twins.clear()
        replica = _with_parameters(optimizer, as_device(device))
        try:
            replica.step(_no_loss)
        except Exception as error:  # an optimizer may do anything; both causes are in the text below
            failure = error
            continue
        return {
            parameter: sum(
                value.numel() * value.element_size()
                for value in replica.state.get(twin, {}).values()
                if isinstance(value, Tensor) and value.dim() > 0
            )
            for parameter, twin in twins.items()
        }
    raise ProfileError(
        f"Expected {type(optimizer).__name__} to take a step on zero gradients, so that its state can be measured, but"
        f" it failed: {failure!r}. Pass plan= to skip profiling."
    ) from failure


def _measure_step(optimizer: Optimizer, device: torch.device) -> _Step:
    """Time and temporaries of a step on a sample of the parameters."""
    room = _SAMPLE_ELEMENTS
    sampled: list[nn.Parameter] = []

    def sample(parameter: Tensor) -> Tensor:
        nonlocal room
        elements = min(parameter.numel(), room) if parameter.requires_grad else 0
        room -= elements
        # A shard under FSDP is flat, and empty where the rank holds nothing of the parameter.
        twin = nn.Parameter(torch.zeros(elements, dtype=parameter.dtype, device=device))
        twin.grad = torch.zeros_like(twin)
        sampled.append(twin)
        return twin

    replica = _with_parameters(optimizer, sample)
    elements = sum(p.numel() for p in sampled)
    if not elements:
        return _Step()
    replica.step(_no_loss)  # makes its state
    states = [value for state in replica.state.values() for value in state.values() if isinstance(value, Tensor)]
    with LiveBytes(device.type) as live:
        kept_bytes = live.track([*sampled, *(p.grad for p in sampled if p.grad is not None), *states])
        replica.step(_no_loss)
    seconds = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        replica.step(_no_loss)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    is_foreach = _is_foreach(replica, device)
    sizes = [p.numel() * p.element_size() for p in sampled]
    return _Step(
        s_per_element=min(seconds) / elements,
        is_foreach=is_foreach,
        workspace_ratio=(live.peak_bytes - kept_bytes) / (sum(sizes) if is_foreach else max(sizes)),
    )


def _no_loss() -> float:
    return 0.0


def _is_foreach(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a step makes temporaries of all parameters together: torch.optim's default on CUDA unless fused."""
    groups = optimizer.param_groups
    explicit = any(group.get("foreach") for group in groups)
    by_default = device.type == "cuda" and any(
        "foreach" in group and group["foreach"] is None and not group.get("fused") for group in groups
    )
    return explicit or by_default
