"""Precision plugin: autocast on the device in use, and gradient clipping by norm over shards."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply import local, num_copies


class OSDPPrecision(FSDPPrecision):
    """Lightning's FSDP precision without its limits: CPU autocast, clipping by norm, and ``"64-true"``.

    ``"32-true"`` rounds nothing, as under DDP: float64 in modules and batches stays, and so does the default dtype. It
    makes float32 of parameters in fewer bits, as Lightning's does.

    Args:
        precision: as for ``Trainer(precision=...)`` with FSDP, or ``"64-true"``, which the Trainer's own flag refuses
            for FSDP strategies: pass ``plugins=OSDPPrecision("64-true")`` instead.

    Attributes:
        writes_always: False where clipping leaves gradients alone whose norm is small enough, and waits for the device
            to find that out.
    """

    def __init__(self, precision: Any = "32-true") -> None:
        is_double = precision == "64-true"
        super().__init__("32-true" if is_double else precision)
        if is_double:
            self.precision: Any = "64-true"
            self._desired_input_dtype = torch.float64
        self._device = torch.device("cuda")
        self.writes_always = True

    def use_device(self, device: torch.device) -> None:
        """Sets the device of autocast and of the gradient scaler."""
        self._device = device
        if self.scaler is not None and not self.scaler.is_enabled():  # Lightning makes one for CUDA
            self.scaler = ShardedGradScaler(device=device.type)

    @property
    @override
    def mixed_precision_config(self) -> MixedPrecision:
        """Dtypes that units compute and reduce in; empty where parameters' own dtype is used."""
        return MixedPrecision() if self.precision in ("32-true", "64-true") else super().mixed_precision_config

    @property
    def _keeps(self) -> bool:
        """Tells whether float64 stays, in modules and in batches."""
        return self._desired_input_dtype == torch.float32

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts real tensors alone: Lightning's FSDP precision would drop the imaginary part of complex ones."""
        dtype, tensors = self._desired_input_dtype, (*module.parameters(), *module.buffers())
        if "true" in self.precision and self._keeps and any(t.dtype == torch.float64 for t in tensors):
            module._apply(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t)
            return module
        if "true" in self.precision and any(t.is_complex() for t in tensors):
            casts = {torch.float64: module.double, torch.float16: module.half, torch.bfloat16: module.bfloat16}
            return casts.get(dtype, module.float)()
        return super().convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self._keeps else super().convert_input(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._keeps else super().tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if "mixed" in self.precision:
            dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
            return torch.autocast(self._device.type, dtype=dtype)
        return self.tensor_init_context()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizable, clip_val: int | float, *_: Any, **__: Any) -> None:
        """Scales gradients so that their norm over all ranks is at most ``clip_val``, as `clip_grad_norm_` of torch.

        Each rank has a shard of every gradient: squared norms are summed over ranks, and each is divided by the number
        of ranks that have a copy of the shard.
        """
        if clip_val <= 0:
            return
        assert isinstance(optimizer, Optimizer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        is_shared = dist.is_initialized() and dist.get_world_size() > 1
        if not gradients and not is_shared:
            return
        buckets = defaultdict(list)  # shards for one _foreach kernel each, by number of copies, dtype and device
        for gradient in gradients:
            buckets[num_copies(gradient), gradient.dtype, local(gradient).device].append(local(gradient))
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for (number, dtype, _device), shards in buckets.items():
            norms = torch._foreach_norm(shards, dtype=torch.float32 if torch.finfo(dtype).bits < 32 else None)
            square += torch.stack(norms).to(square).square().sum() / number
        if is_shared:
            # A rank without a gradient of this optimizer (fewer elements than ranks) must take part, too.
            dist.all_reduce(square)
        scale = torch.clamp(clip_val / (square.sqrt() + 1e-6), max=1.0)
        if not self.writes_always and float(scale) == 1.0:
            return
        for shards in buckets.values():
            torch._foreach_mul_(shards, scale.to(shards[0]))
