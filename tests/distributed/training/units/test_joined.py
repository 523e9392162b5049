"""Units of several modules, as the planner makes them, and units that are gathered late: on two ranks."""

import dataclasses
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from lightning_osdp import OSDPStrategy, SearchSpace, make_plan
from lightning_osdp.planner.engine import FSDP2, engine_of
from lightning_osdp.planner.simulation import planned_step
from tests.distributed.support.fits import largest_difference, profile_of, stated_cluster, trained
from tests.distributed.support.models import BATCH_SIZE, GPT, MODELS, OddMLP, build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Unused(OddMLP):
    """A unit's last module makes what the loss does not depend on."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.side = nn.Linear(11, 2)

    def loss(self, batch):
        x, y = (t.to(self.shift.dtype) for t in batch)
        hidden = self.layers[:3](x)
        self.side(hidden)
        for layer in self.layers[3:]:
            hidden = layer(hidden)
        return F.mse_loss(self.last(hidden) * self.scale + self.shift, y)


class DeepGPT(GPT):
    """GPT with enough blocks for two of them to be a unit."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer, layers=5)


MODELS |= {"unused": Unused, "deep_gpt": DeepGPT}


def _planned(name, prefetch, *, shares):
    """A plan under which everything is sharded."""
    space = SearchSpace(min_unit_bytes=0, share_units=shares, modes=("ZDP",), slices=(1,), activations=("keep",))
    return make_plan(
        profile_of(build(name, dtype="float64")),
        stated_cluster(dist.get_world_size()),
        memory_limit_bytes=2**40,
        micro_batch_size=BATCH_SIZE,
        search_space=space,
        engine=FSDP2(backward_prefetch=prefetch, forward_prefetch=prefetch == "pre"),
    )


@contextmanager
def entries():
    """Yields how often torch's hooks enter units, by module that is called."""
    seen, enter = Counter(), FSDPState._pre_forward

    def noted(state, module, *args):
        seen[module] += 1
        return enter(state, module, *args)

    with mock.patch.object(FSDPState, "_pre_forward", noted):
        yield seen


def _counted(group_names):
    """Patches that note all-gathers and reduce-scatters with the unit that each is of."""
    seen = []

    def noting(kind, original):
        def noted(params, *args, **kwargs):
            seen.append((kind, group_names(params[0])))
            return original(params, *args, **kwargs)

        return noted

    patched = [
        mock.patch.object(_fsdp_param_group, name, noting(kind, getattr(_fsdp_param_group, name)))
        for kind, name in (("gather", "foreach_all_gather"), ("reduce", "foreach_reduce"))
    ]
    return seen, patched


def trains(name, prefetch, modules=None, late=0):
    """Weights after five steps beside DDP's, the plan's units of several modules, and collectives of the last step.

    Args:
        name: name of the model.
        prefetch: backward's prefetch, and forward's with it.
        modules: modules of one unit, where the plan is not to be the planner's.
        late: units that are gathered late, in both directions.
    """
    plan = _planned(name, prefetch, shares=modules is None)
    if modules is not None:
        plan = with_unit(plan, modules)
    units = [unit.name for unit in plan.units if unit.name]
    plan = dataclasses.replace(plan, late_forward=tuple(units[:late]), late_backward=tuple(units[1 : 1 + late]))
    options = {"name": name, "optimizer": "adamw", "dtype": "float64"}
    ddp, _, _ = trained(DDPStrategy(process_group_backend="gloo", find_unused_parameters=True), **options)
    holder = {operator: unit.name for unit in plan.units for operator in unit.operators}
    seen, patches = _counted(lambda param: holder[param._param_fqn.rpartition(".")[0]])
    entered, begun = (
        mock.patch.object(FSDPParamGroup, name, autospec=True, side_effect=getattr(FSDPParamGroup, name))
        for name in ("pre_forward", "lazy_init")
    )
    with patches[0], patches[1], entered as entering, begun as beginning, entries() as hooked:
        osdp, _, fit = trained(OSDPStrategy(plan=plan, dry_run=False), **options)
    profile = profile_of(build(name, dtype="float64"))
    step, modes = planned_step(plan, profile, stated_cluster(dist.get_world_size()))
    (events,) = engine_of(plan).events_of(step, modes)
    expected = [
        (kind, step.units[of].name) for kind, of in events if kind in {"gather", "reduce"} and step.units[of].operators
    ]
    return {
        "difference": largest_difference(osdp, ddp) if dist.get_rank() == 0 else 0.0,
        "lists": [unit.modules for unit in fit.strategy.plan.units if unit.modules],
        "expected": expected,
        "seen": seen[-len(expected) :],
        "num_seen": len(seen),
        "num_entered": entering.call_count,
        "num_begun": beginning.call_count,
        "num_hooked": sum(number for module, number in hooked.items() if module is not fit.lightning_module),
        "num_named": sum(1 for unit in plan.units if unit.name),
        "num_units": sum(1 for unit in plan.units if unit.operators),
    }


def with_unit(plan, modules):
    """The plan with these modules one unit."""
    together = [unit for unit in plan.units if unit.name in modules]
    operators = tuple(operator for unit in together for operator in unit.operators)
    first = dataclasses.replace(together[0], operators=operators, modules=tuple(modules))
    others = [unit for unit in plan.units if unit.name not in modules]
    units = sorted([first, *others], key=lambda unit: [each.name for each in plan.units].index(unit.name))
    return dataclasses.replace(plan, units=tuple(units))


@pytest.mark.parametrize("prefetch", ["pre", slow("none")])
@pytest.mark.parametrize("name", ["deep_gpt", slow("odd_mlp")])
def test_units_that_the_planner_joined_train_as_ddp_with_the_collectives_as_predicted(ranks, name, prefetch):
    for found in ranks(2).run(trains, name=name, prefetch=prefetch):
        assert found["lists"]
        assert found["difference"] < 1e-9
        assert found["seen"] == found["expected"]
        assert found["num_seen"] == 5 * len(found["expected"])
        # whatever the number of modules
        assert (found["num_entered"], found["num_begun"]) == (5 * found["num_units"], found["num_units"])
        assert found["num_hooked"] == 5 * found["num_named"]


@pytest.mark.slow
def test_units_that_are_gathered_late_train_as_ddp_with_the_collectives_as_predicted(ranks):
    for found in ranks(2).run(trains, name="gpt", prefetch="pre", late=1):
        assert found["difference"] < 1e-9
        assert found["seen"] == found["expected"]


def test_backward_gathers_a_unit_though_the_loss_does_not_depend_on_its_last_module(ranks):
    for found in ranks(2).run(trains, name="unused", prefetch="none", modules=("layers.2", "side")):
        assert found["lists"] == [("layers.2", "side")]
        assert found["difference"] < 1e-9
