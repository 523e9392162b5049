"""One module on several Trainers: the later ones go on with the units that are there, or say why they do not."""

import dataclasses

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import SPACE, failure, plan_for, shared_folder, trainer, without_measuring
from tests.distributed.support.models import GPT

pytestmark = pytest.mark.distributed


def fit(strategy, module, **options):
    fitting = trainer(strategy, limit_val_batches=2, **options)
    fitting.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return fitting


@without_measuring
def later_wishes():
    """Returns errors of strategies with another plan, limit, precision, micro-batch or arguments than the first."""
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
    """Returns units, plans and losses of Trainers of which a second one plans a model that the first one evaluated."""
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


REFUSED = {
    "plan": "the plan that it was sharded by, got another plan=",
    "path": "the plan that it was sharded by, got another plan=",
    "memory_limit": "memory_limit 1.00 TiB, got 1.00 GiB",
    "precision": "precision 32-true, got bf16-true",
    "arguments": "'sync_module_states': True",
}


@pytest.mark.slow
def test_a_later_strategy_uses_the_units_of_the_first_unless_it_asks_for_others(ranks):
    for found in ranks(2).run(later_wishes):
        for name, text in REFUSED.items():
            kind, told = found[name]
            assert kind == "ConfigurationError"
            assert text in told
            assert "whole_state_dict(on_all_ranks=True)" in told
        assert "got batch_size=2 and a plan for a micro-batch of 4" in found["batch_size"][1]
        assert (found["same"], found["same_limit"], found["nothing"]) == (None, None, None)
        assert found["evaluates"]
        assert found["summarized"] == 0
        assert found["weights"]


@pytest.mark.slow
def test_a_model_that_one_trainer_evaluated_is_planned_by_the_next(ranks):
    for found in ranks(2).run(fits_what_another_evaluated):
        assert found["units"] > 1
        assert found["plan"]
        assert len(set(found["losses"])) == 1
