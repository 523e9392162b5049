"""One model under every kind of plan, its own ones included, against DDP and one process."""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import family_models  # noqa: F401 (registers its models)
from cases import EVERYTHING, largest_difference, plan_for, reference, trained, without_measuring
from lightning.pytorch.strategies import DDPStrategy
from models import build

from lightning_osdp import OSDPStrategy, SearchSpace

STEPS = 3


def without_key_biases(state):
    """Attention's bias of keys has a gradient of zero but for rounding, of which Adam makes whole steps."""
    kept = {name: value.clone() for name, value in state.items()}
    for name, value in kept.items():
        if name.endswith("in_proj_bias"):
            value.chunk(3)[1].zero_()
    return kept


@without_measuring
def family(name, optimizer, dtype, given=("zdp", "dp", "mixed"), own=True):
    """Per plan its distance from DDP after three steps, with its units and modes; DDP's from one process (rank 0)."""

    def run(strategy):
        state, losses, fit = trained(strategy, name, optimizer, dtype, max_steps=STEPS)
        return state, losses, fit.strategy

    def compared(strategy):
        state, losses, strategy = run(strategy)
        plan = strategy.plan
        found = {"units": [unit.name for unit in plan.units], "modes": {u.modes[0] for u in plan.units if u.name}}
        if dist.get_rank() == 0:
            # FSDP lists the second name of a tied weight after the rest of its module.
            ours, theirs = (dict(sorted(each.items())) for each in (state, ddp))
            if dtype == "float32" and optimizer == "adamw":
                ours, theirs = without_key_biases(ours), without_key_biases(theirs)
            found["difference"] = largest_difference(ours, theirs)
        found["loss"] = max(abs(a - b) for a, b in zip(losses, ddp_losses, strict=True))
        return found, plan

    ddp, ddp_losses, _ = run(DDPStrategy(process_group_backend="gloo", find_unused_parameters=False))
    world_size, found = dist.get_world_size(), {}
    for modes in given:
        plan = plan_for(build(name, optimizer, dtype), modes, world_size=world_size, space=EVERYTHING)
        found[modes], _ = compared(OSDPStrategy(plan=plan))
    if own:
        found["own"], plan = compared(OSDPStrategy(memory_limit="4GiB"))
        # Half way between what the fastest plan takes and the least that any plan needs.
        limit = (plan.peak_bytes + plan.all_zdp_peak_bytes) // 2
        space = SearchSpace(min_unit_bytes=0)
        found["own, little memory"], _ = compared(OSDPStrategy(memory_limit=f"{max(limit, 1)}B", search_space=space))
    if dist.get_rank() != 0:
        return None
    plain, start = reference(name, optimizer, dtype, world_size=world_size, steps=STEPS), build(name, optimizer, dtype)
    parameters = dict(start.named_parameters())
    return {
        "plans": found,
        "plain": largest_difference({k: ddp[k] for k in parameters}, {k: plain[k] for k in parameters}),
        "moved": largest_difference({k: plain[k] for k in parameters}, parameters),
    }


def hf_exported():
    """See `hf_export_cases`, which needs ``transformers`` and ``peft``."""
    import hf_export_cases

    return hf_export_cases.exported(), hf_export_cases.adapted()


def hf_family(**kwargs):
    """The same for a model of ``transformers``."""
    import hf_models  # noqa: F401 (registers its models)

    return family(**kwargs)
