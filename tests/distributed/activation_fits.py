"""Fits of Lightning with blocks that recompute or offload, as the ranks run them."""

import dataclasses
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, plan_for, trainer, without_measuring
from models import GPT, Block

from lightning_osdp import OSDPStrategy
from lightning_osdp.apply.activations import block_forwards
from lightning_osdp.core.plan import Block as PlannedBlock


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
        found[activations] = max(
            largest_difference(state, kept), *(abs(a - b) for a, b in zip(ours, losses, strict=True))
        )
    return found


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
        executed = {
            names[forward.block]
            .replace("_fsdp_wrapped_module.", "")
            .replace("._fsdp_wrapped_module", ""): forward.activations
            for forward in block_forwards(fit.lightning_module)
        }
        found[name] = planned, executed, largest_difference(state, expected)
    return found
