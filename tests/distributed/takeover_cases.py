"""One module on several Trainers, as the ranks run it: what the later ones may ask for."""

import dataclasses
import sys
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary

sys.path.insert(0, str(Path(__file__).parent))

from cases import plan_for, trainer, without_measuring
from models import GPT
from strategy_cases import SPACE, failure, shared_folder
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy


def fit(strategy, module, **options):
    fitting = trainer(strategy, limit_val_batches=2, **options)
    fitting.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return fitting


@without_measuring
def later_wishes():
    """What strategies get that name another plan, limit, precision, micro-batch or arguments than the first."""
    module, folder = GPT(), shared_folder()
    plan = plan_for(GPT(), "mixed", world_size=dist.get_world_size())
    first = fit(OSDPStrategy(plan=plan), module, callbacks=[ModelSummary()])
    other = dataclasses.replace(plan, memory_limit_bytes=2**30)
    if dist.get_rank() == 0:
        other.save(folder / "other.json")
    dist.barrier()

    def refused(precision="32-true", **options):
        return failure(lambda: fit(OSDPStrategy(**options), module, precision=precision))

    found = {
        "plan": refused(plan=other),
        "path": refused(plan=folder / "other.json"),
        "memory_limit": refused(memory_limit="1GiB"),
        "batch_size": refused(batch_size=2),
        "precision": refused(precision="bf16-true"),
        "arguments": refused(sync_module_states=True),
        "same": refused(plan=plan),
        "same_limit": refused(memory_limit=plan.memory_limit_bytes, batch_size=4),
        "nothing": refused(),
    }
    summary = ModelSummary()
    fit(OSDPStrategy(), module, callbacks=[summary])
    found["summarized"] = summary._summary(None, module).total_parameters - sum(p.numel() for p in GPT().parameters())
    evaluating = trainer(OSDPStrategy(memory_limit="1GiB"), limit_val_batches=2)
    evaluating.validate(module, DataLoader(module.dataset(), batch_size=8), verbose=False)
    found["evaluates"] = evaluating.strategy.plan == first.strategy.plan
    found["weights"] = sorted(first.strategy.whole_state_dict(on_all_ranks=True)) == sorted(GPT().state_dict())
    return found


@without_measuring
def fits_what_another_evaluated():
    """Whether a second Trainer plans a model that the first one evaluated whole, and the first goes on with that."""
    module = GPT()
    data = DataLoader(module.dataset(), batch_size=8)
    first = trainer(OSDPStrategy(search_space=SPACE), limit_val_batches=2)
    first.validate(module, data, verbose=False)
    second = fit(OSDPStrategy(search_space=SPACE), module)
    losses = [
        float(each.validate(module, data, verbose=False)[0]["val_loss"])
        for each in (first, second, trainer(OSDPStrategy(), limit_val_batches=2))
    ]
    return {
        "units": len(second.strategy.plan.units),
        "plan": first.strategy.plan == second.strategy.plan,
        "losses": losses,
    }
