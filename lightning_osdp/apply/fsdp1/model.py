"""A module under FSDP1: `ShardedModel` over its flat parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import TrainingState
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply.activations import apply_activations
from lightning_osdp.apply.fsdp1 import alone
from lightning_osdp.apply.fsdp1.accumulate import reduce_left_over, units_reduced_last, without_reducing
from lightning_osdp.apply.fsdp1.optimizer_state import load_state, named_state
from lightning_osdp.apply.fsdp1.separate import wrap_separately
from lightning_osdp.apply.fsdp1.state_dict import full_state, sharded_state
from lightning_osdp.apply.fsdp1.units import place_in_step, use_modes
from lightning_osdp.apply.fsdp1.unwrap import free_gathered, unwrap_whole
from lightning_osdp.apply.fsdp1.wrap import apply_plan, forget_zeroed_gradients, wrap_whole
from lightning_osdp.apply.optimizer_state import numbered
from lightning_osdp.apply.sharded import ShardedModel
from lightning_osdp.apply.sharded_checkpoint import read_optimizers
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.plan_unit import Block
from lightning_osdp.engine import FSDP1, check_change


class Fsdp1Model(ShardedModel):
    """FSDP1's units around a module, or around each of its children."""

    def __init__(self, module: nn.Module, root: nn.Module, plan: Plan | None) -> None:
        super().__init__(module, root, plan)
        self._reduced_last: tuple[FullyShardedDataParallel, ...] = ()
        if plan is not None:
            assert isinstance(root, FullyShardedDataParallel)
            self._reduced_last = units_reduced_last(root, plan)

    @classmethod
    def arguments(cls, fsdp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All of them are FSDP1's."""
        return dict(fsdp_kwargs)

    @classmethod
    def planned(cls, module: nn.Module, plan: Plan, *, device: torch.device, **kwargs: Any) -> Fsdp1Model:
        """As a plan says; arguments as of `apply_plan`."""
        return cls(module, apply_plan(module, plan, device=device, **kwargs), plan)

    @classmethod
    def unplanned(cls, module: nn.Module, *, device: torch.device, **kwargs: Any) -> Fsdp1Model:
        """As one unit."""
        return cls(module, wrap_whole(module, device=device, **kwargs), None)

    @classmethod
    def separated(
        cls, module: nn.Module, blocks: Sequence[Block], *, min_unit_bytes: int, device: torch.device, **kwargs: Any
    ) -> Fsdp1Model:
        """Each child by itself, for steps that run backward between the children's calls."""
        apply_activations(module, blocks, device=device)
        wrap_separately(module, min_unit_bytes=min_unit_bytes, device=device, **kwargs)
        return cls(module, module, None)

    @cached_property
    def _units(self) -> tuple[FullyShardedDataParallel, ...]:
        """All of them: finding them takes a while in every micro-batch."""
        return tuple(FullyShardedDataParallel.fsdp_modules(self.root))

    @property
    def _fsdp_root(self) -> FullyShardedDataParallel:
        assert isinstance(self.root, FullyShardedDataParallel)
        return self.root

    @property
    @override
    def num_units(self) -> int:
        return len(self._units)

    @property
    @override
    def is_whole(self) -> bool:
        return self.plan is None and self.root is not self.module

    @property
    @override
    def shares_world(self) -> bool:
        return self._units[0].process_group is dist.group.WORLD

    @property
    @override
    def is_opened(self) -> bool:
        root = self.root
        if not isinstance(root, FullyShardedDataParallel) or root.world_size == 1:
            return True
        return root.training_state is TrainingState.SUMMON_FULL_PARAMS

    @override
    def undo(self) -> None:
        unwrap_whole(self._fsdp_root)

    @override
    def before_backward(self) -> None:
        forget_zeroed_gradients(self._units)
        reduce_left_over(self._reduced_last)

    @override
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """FSDP1 has made all that there is to make of gradients."""

    @override
    def after_optimizer_step(self) -> None:
        """The next forward sees to it."""

    @override
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Flat parameters are plain tensors."""

    @override
    def accumulating(self) -> AbstractContextManager[None]:
        return without_reducing(self._reduced_last)

    @override
    def reshard(self) -> None:
        free_gathered(self.root)

    @override
    def use(self, plan: Plan, *, may_divide: bool = False) -> None:
        assert self.plan is not None
        check_change(self.plan, plan, FSDP1, may_divide=may_divide)
        use_modes(self._fsdp_root, plan)
        self.plan, self._reduced_last = plan, units_reduced_last(self._fsdp_root, plan)

    @override
    def place_in_step(self) -> str:
        assert self.plan is not None
        return place_in_step(self._fsdp_root, self.plan)

    @override
    def alone(self) -> AbstractContextManager[None]:
        return alone.alone(self._fsdp_root)

    @override
    def kept_shards(self) -> AbstractContextManager[None]:
        return alone.kept_shards(self._fsdp_root)

    @override
    def shard_gradients(self) -> None:
        alone.shard_gradients(self._fsdp_root)

    @property
    @override
    def shards(self) -> Sequence[Tensor]:
        return alone.flat_parameters(self._fsdp_root)

    @override
    def whole_state(self, *, on_all_ranks: bool) -> dict[str, Any] | None:
        with full_state(self.root, rank0_only=not on_all_ranks):
            state = self.root.state_dict()
        if dist.get_rank() != 0 and not on_all_ranks:
            return None
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    @override
    def model_state(self, state_dict_type: str) -> dict[str, Any]:
        with self._as(state_dict_type):
            return self.root.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer, state_dict_type: str) -> dict[str, Any]:
        with self._as(state_dict_type):
            state = named_state(self.root, optimizer)
        return numbered(state) if state_dict_type == "full" and dist.get_rank() == 0 else state

    def _as(self, state_dict_type: str) -> AbstractContextManager[object]:
        return sharded_state(self.root) if state_dict_type == "sharded" else full_state(self.root, rank0_only=True)

    @override
    def load_model(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        with full_state(self.root, rank0_only=False):
            self.root.load_state_dict(state_dict, strict=strict)

    @override
    def taking(self, state_dict: dict[str, Any]) -> AbstractContextManager[object]:
        if not isinstance(self.root, FullyShardedDataParallel):
            return nullcontext()
        taking: AbstractContextManager[object] = self.root.summon_full_params(self.root, recurse=False)
        return taking

    @override
    def load_optimizer(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        with full_state(self.root, rank0_only=False):
            load_state(self.root, optimizer, state_dict)

    @override
    def load_sharded(self, path: Path, optimizers: Sequence[Optimizer], *, strict: bool) -> None:
        with sharded_state(self.root):
            state = {"model": self.root.state_dict()}
            load(state, checkpoint_id=path)
            self.root.load_state_dict(state["model"], strict=strict)
            states = read_optimizers(path, len(optimizers), state["model"])
            for optimizer, saved in zip(optimizers, states, strict=False):  # without state none is stored
                load_state(self.root, optimizer, saved)
