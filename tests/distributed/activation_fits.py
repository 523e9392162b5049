"""Fits of Lightning with blocks that recompute or offload, as the ranks run them."""

import dataclasses
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, plan_for, trainer, without_measuring
from models import GPT, Block
from wrapped_units import block_forwards

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.apply.activations.blocks import Reentrant
from lightning_osdp.core.modes import ACTIVATION_CHOICES
from lightning_osdp.core.plans.plan import Block as PlannedBlock
from lightning_osdp.errors import InfeasibleError


class DroppingGPT(GPT):
    """minGPT with dropout after each block's attention."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        for block in self.blocks:
            block.proj = nn.Sequential(block.proj, nn.Dropout(0.1))


def fitted(strategy, *, kind=DroppingGPT, ckpt_path=None, **options):
    """Whole state and losses of a fit, and the trainer."""
    module = kind("sgd")
    torch.manual_seed(3 + dist.get_rank())
    fit = trainer(strategy, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=ckpt_path)
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    return {name: value.detach().float().cpu().clone() for name, value in state.items()}, module.losses, fit


def plan_with(activations, kind=DroppingGPT):
    """A plan in which every other unit is DP and both blocks do the same."""
    plan = plan_for(kind("sgd"), "mixed", world_size=dist.get_world_size())
    blocks = [PlannedBlock(name=f"blocks.{i}", activations=activations) for i in range(2) if activations != "keep"]
    return dataclasses.replace(plan, blocks=tuple(blocks))


def in_precision(precision):
    """Largest differences of losses and weights from those of blocks that keep what they save."""
    kept, losses, _ = fitted(OSDPStrategy(plan=plan_with("keep")), precision=precision)
    found = {}
    for activations in ("recompute", "offload", "recompute_offload"):
        state, ours, _ = fitted(OSDPStrategy(plan=plan_with(activations)), precision=precision)
        found[activations] = largest_of(state, ours, kept, losses)
    return found


def largest_of(state, losses, expected, expected_losses):
    """Largest difference of weights and losses."""
    differences = (abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    return max(largest_difference(state, expected), *differences)


def _is_block(module, recurse, nonwrapped_numel):
    del nonwrapped_numel
    return recurse or isinstance(module, Block)


@without_measuring
def by_policy():
    """For each way to name what recomputes: blocks of the plan, those executed, and the difference from keeping all."""
    expected, _, _ = fitted(OSDPStrategy(plan=plan_with("keep")))
    strategies = {
        "classes": OSDPStrategy(activation_checkpointing_policy={Block}),
        "callable": OSDPStrategy(activation_checkpointing_policy=_is_block),
        "nested": OSDPStrategy(activation_checkpointing_policy={Block, nn.Linear}),
        "given": OSDPStrategy(plan=plan_with("keep"), activation_checkpointing_policy={Block}),
    }
    found = {}
    for name, strategy in strategies.items():
        state, _, fit = fitted(strategy, default_root_dir=tempfile.mkdtemp())
        planned = {block.name: block.activations for block in fit.strategy.plan.blocks}
        names = {module: key for key, module in fit.lightning_module.named_modules()}
        executed = {names[forward.block]: forward.activations for forward in block_forwards(fit.lightning_module)}
        found[name] = planned, executed, largest_difference(state, expected)
    return found


class LongGPT(GPT):
    """minGPT that saves far more than it has parameters, and more at the borders of blocks than inside one of them."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer, width=16, layers=8, length=256)

    def loader(self, rank, world_size):
        return super().loader(rank, world_size, batch_size=1)


@without_measuring
def saving_too_much(limit_bytes):
    """Errors of fits in which blocks may only keep, or recompute, what they save; a fit in which they may offload it.

    Of that: its plan, counted peaks on the device and on the host, and how it differs from a fit without a limit.
    """
    errors = []
    for offered in (("keep",), ("keep", "recompute")):
        space = SearchSpace(activations=offered)
        try:
            fitted(OSDPStrategy(memory_limit=f"{limit_bytes}B", search_space=space), kind=LongGPT)
        except InfeasibleError as error:
            errors.append(str(error))
    keeping = plan_of(LongGPT(), {}, world_size=dist.get_world_size(), micro_batch_size=1)
    kept, losses, _ = fitted(OSDPStrategy(plan=keeping), kind=LongGPT)
    strategy = OSDPStrategy(memory_limit=f"{limit_bytes}B", search_space=SearchSpace(activations=ACTIVATION_CHOICES))
    state, ours, fit = fitted(strategy, kind=LongGPT)
    memory = next(block_forwards(fit.lightning_module)).memory
    peaks = fit.callbacks[0].measured.peak_bytes, memory.peak_bytes
    return errors, strategy.plan, *peaks, largest_of(state, ours, kept, losses)


@without_measuring
def transformers_gpt2(limit_bytes):
    """GPT-2 of transformers in little memory: its plan, the counted peak, and how it differs from keeping everything.

    Then the same difference where its blocks recompute and offload, and how many of their calls took fairscale's form.
    """
    from hf_models import LongGPT2

    blocks = [f"model.transformer.h.{index}" for index in range(LongGPT2.num_layers)]
    modes = dict.fromkeys(blocks, "ZDP")
    keeping = plan_of(LongGPT2(), modes, world_size=dist.get_world_size(), micro_batch_size=4)
    kept, losses, _ = fitted(OSDPStrategy(plan=keeping), kind=LongGPT2)
    planned = [PlannedBlock(name=name, activations="recompute_offload") for name in blocks]
    moved = dataclasses.replace(keeping, blocks=tuple(planned))
    space, found = SearchSpace(slices=(1,)), []
    limited = OSDPStrategy(memory_limit=f"{limit_bytes}B", search_space=space, batch_size="keep")
    for strategy in (limited, OSDPStrategy(plan=moved)):
        with mock.patch.object(Reentrant, "__call__", autospec=True, side_effect=Reentrant.__call__) as reentrant:
            state, ours, fit = fitted(strategy, kind=LongGPT2)
        difference = largest_of(state, ours, kept, losses)
        found.append((strategy.plan, fit.callbacks[0].measured.peak_bytes, difference, reentrant.call_count))
    return found
