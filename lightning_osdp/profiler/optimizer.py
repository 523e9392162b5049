"""What the user's optimizer keeps and takes, found by running it on a copy of the model, on some elements."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.live_bytes import LiveBytes
from lightning_osdp.profiler.tensors import tensors_in
from lightning_osdp.profiler.timing import synchronize

_SAMPLE_ELEMENTS = 4_000_000
"""Elements that the timed optimizer step updates: enough to leave the caches, quick on any device."""
_LEAST_ELEMENTS = 64
"""Elements of each further parameter, whose state is scaled up from them."""
_REPEATS = 3


@dataclass(frozen=True)
class OptimizerProfile:
    """The optimizers of one model."""

    state_bytes: Mapping[nn.Parameter, int] = field(default_factory=dict)
    """State tensors by parameter; scalars such as a step counter are not sharded and do not count."""
    s_per_element: float = 0.0
    is_foreach: bool = False
    workspace_ratio: float = 0.0
    """Bytes of temporaries over those of the parameters that are updated at once: all (foreach) or the largest."""


def profile_optimizers(
    module: nn.Module, configure: Callable[[nn.Module], Sequence[Optimizer]], device: torch.device
) -> OptimizerProfile:
    """State bytes per parameter and seconds per element of the optimizers that ``configure`` makes.

    Args:
        module: the model; it is not touched: ``configure`` sees a copy whose parameters are on the meta device.
        configure: returns the optimizers of the module that it is given.
        device: where the step is run.

    Raises:
        ProfileError: the module cannot be copied, or an optimizer cannot be run.
    """
    twins = {
        p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()
    }
    optimizers = list(configure(_copied(module, twins)))
    samples = [_Sample(optimizer, device) for optimizer in optimizers]
    state_bytes: dict[nn.Parameter, int] = {}
    for original, twin in twins.items():
        kept = [sample.state_bytes(twin) for sample in samples if twin in sample.parameters]
        if kept:
            state_bytes[original] = sum(kept)
    # Each optimizer's seconds per element, weighted by the elements that it updates.
    sizes = [sum(p.numel() for p in sample.parameters if p.requires_grad) for sample in samples]
    total_s = sum(sample.s_per_element() * size for sample, size in zip(samples, sizes, strict=True))
    elements = sum({p: p.numel() for sample in samples for p in sample.parameters if p.requires_grad}.values())
    return OptimizerProfile(
        state_bytes=state_bytes,
        s_per_element=total_s / elements if elements else 0.0,
        is_foreach=any(sample.is_foreach for sample in samples),
        workspace_ratio=max((sample.workspace_ratio() for sample in samples), default=0.0),
    )


def _copied(module: nn.Module, twins: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    memo: dict[int, Any] = {id(p): twin for p, twin in twins.items()}
    # Results of earlier steps that the module still holds are no part of what its optimizers see.
    attributes = list(tensors_in([vars(m) for m in module.modules()]))
    memo |= {id(tensor): tensor.detach() for tensor in attributes if not tensor.is_leaf}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ProfileError(
            f"Expected {type(module).__name__} to be copyable, so that configure_optimizers can be run on a copy, but"
            f" copy.deepcopy failed: {error!r}. Keep what cannot be copied (locks, files, sockets) out of the"
            " module until training starts."
        ) from error


class _Sample:
    """The same optimizer, options and all, over some elements of each parameter, after one step."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.device = device
        room = _SAMPLE_ELEMENTS
        self.parameters: dict[Tensor, nn.Parameter] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            elements = min(parameter.numel(), max(room, _LEAST_ELEMENTS))
            room -= elements if parameter.requires_grad else 0
            # A shard under FSDP is flat, whatever the parameter's shape: no factored state.
            twin = nn.Parameter(torch.zeros(elements, dtype=parameter.dtype, device=device), parameter.requires_grad)
            twin.grad = torch.zeros_like(twin) if parameter.requires_grad else None
            self.parameters[parameter] = twin
        self.updated = [p for p in self.parameters.values() if p.requires_grad]
        try:
            self.optimizer = _replica(optimizer, self.parameters, device)
            if self.updated:
                self.optimizer.step(_no_loss)  # makes its state
        except Exception as error:  # an optimizer may do anything
            raise ProfileError(
                f"Expected {type(optimizer).__name__} to take a step on zero gradients of flat parameters, as FSDP"
                f" gives them, so that its state can be measured, but it failed: {error!r}."
                " Pass plan= to skip profiling."
            ) from error

    def state_bytes(self, parameter: Tensor) -> int:
        """Bytes of state that the optimizer would keep for all elements of the parameter."""
        twin = self.parameters[parameter]
        elementwise = parameter.numel() / max(1, twin.numel())
        return sum(
            round(value.numel() * value.element_size() * (elementwise if value.numel() == twin.numel() else 1))
            for value in tensors_in(self.optimizer.state.get(twin, {}))
            if value.dim() > 0
        )

    @property
    def is_foreach(self) -> bool:
        """Whether a step makes temporaries of all parameters together: torch.optim's default on CUDA unless fused."""
        groups = self.optimizer.param_groups
        explicit = any(group.get("foreach") for group in groups)
        by_default = self.device.type == "cuda" and any(
            "foreach" in group and group["foreach"] is None and not group.get("fused") for group in groups
        )
        return explicit or by_default

    def s_per_element(self) -> float:
        """Seconds of a step per element that it updates."""
        if not self.updated:
            return 0.0
        seconds = []
        for _ in range(_REPEATS):
            synchronize(self.device)
            start = time.perf_counter()
            self.optimizer.step(_no_loss)
            synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return min(seconds) / sum(p.numel() for p in self.updated)

    def workspace_ratio(self) -> float:
        """Bytes of a step's temporaries over those of the parameters that it updates at once."""
        if not self.updated:
            return 0.0
        with LiveBytes(self.device.type) as live:
            kept_bytes = live.track([*self.updated, *(p.grad for p in self.updated if p.grad is not None)])
            kept_bytes += live.track(tensors_in(list(self.optimizer.state.values())))
            self.optimizer.step(_no_loss)
        sizes = [p.numel() * p.element_size() for p in self.updated]
        return (live.peak_bytes - kept_bytes) / (sum(sizes) if self.is_foreach else max(sizes))


def _replica(optimizer: Optimizer, parameters: Mapping[Tensor, nn.Parameter], device: torch.device) -> Optimizer:
    """The optimizer with other parameters; state that it made at once is zeroed, in the new shapes."""
    memo: dict[int, Any] = {id(old): new for old, new in parameters.items()}
    for old, new in parameters.items():
        for value in tensors_in(optimizer.state.get(old, {})):
            shape = new.shape if value.shape == old.shape else value.shape
            if value.is_meta:
                memo[id(value)] = torch.zeros(shape, dtype=value.dtype, device=device)
    # Not copy.deepcopy(optimizer): that leaves out all but groups and state, such as the parameter list of LBFGS. A
    # learning rate scheduler has put a `step` of its own there, bound to the original; hooks may hold anything.
    kept = {k: v for k, v in vars(optimizer).items() if k != "step" and not k.endswith("_hooks")}
    replica = copy.copy(optimizer)
    vars(replica).update(copy.deepcopy(kept, memo))
    return replica


def _no_loss() -> float:
    return 0.0
