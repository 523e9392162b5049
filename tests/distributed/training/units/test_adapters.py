"""LoRA under the planner's own plan: frozen bytes are gathered once in a fit, and adapters of many layers together."""

import dataclasses
import itertools
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import TensorDataset

from lightning_osdp import BatchPolicy, OSDPPrecision, OSDPStrategy, SearchSpace, make_plan
from lightning_osdp.core.cluster import Link
from lightning_osdp.planner.engine import FSDP2, effects_of, engine_of
from lightning_osdp.planner.engine.effects import num_all_gathers
from lightning_osdp.planner.simulation import planned_step
from lightning_osdp.report.sentences import wire_bytes
from tests.distributed.support.fits import fitted, profile_of, stated_cluster
from tests.distributed.support.models import BATCH_SIZE, Base, Block
from tests.distributed.training.units.test_resident import Adapted, differs, whole
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

STEPS, WIDTH, LENGTH, VOCABULARY = 4, 24, 8, 40


class Net(nn.Module):
    """A frozen GPT with an adapter beside each Linear of its blocks."""

    def __init__(self, layers=3):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(WIDTH, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.requires_grad_(False)
        for block in self.blocks:
            for name, child in [*block.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(block, name, Adapted(child.in_features, child.out_features))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Lora(Base):
    """It is trained whole, as users train it."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.net = Net()

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (160, LENGTH), generator=generator)
        return TensorDataset(tokens, (tokens * 3 + 1) % VOCABULARY)


def slow_cluster():
    """Ranks whose links are busy, but for what computing hides."""
    link = Link(latency_s=1e-5, seconds_per_byte=1e-7)
    cluster = stated_cluster(dist.get_world_size())
    return dataclasses.replace(cluster, all_gather=link, reduce_scatter=link, overlaps=True)


def planned(num_micro_batches, share=None):
    """The plan where communication overlaps, with room for this share of what may be resident, or without limit.

    Rank 0 makes it for all: ranks share cores.
    """
    profile = profile_of(Lora().double())
    made = [_planned(profile, num_micro_batches, share) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def _planned(profile, num_micro_batches, share):
    arguments = {
        "micro_batch_size": BatchPolicy.fixed(BATCH_SIZE, num_micro_batches),
        "search_space": SearchSpace(slices=(1,), activations=("keep",)),
        "engine": FSDP2(backward_prefetch="pre", forward_prefetch=True),
    }
    cluster = slow_cluster()
    plan = make_plan(profile, cluster, memory_limit_bytes=2**40, **arguments)
    if share is None:
        return plan
    least = plan.peak_bytes - sum(
        unit.parameter_bytes for unit in plan.units if effects_of(unit.treatments[0]).is_resident
    )
    limit_bytes = int(least + share * (plan.peak_bytes - least))
    return make_plan(profile, cluster, memory_limit_bytes=limit_bytes, **arguments)


class Collectives:
    """Bytes of all-gathers and reduce-scatters, with an operator of the unit of each, while it is entered."""

    def __enter__(self):
        self.seen = []
        gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce

        def gathered(parameters, *args, **kwargs):
            result = gather(parameters, *args, **kwargs)
            self._note("gather", parameters, result.all_gather_output)
            return result

        def reduced(parameters, *args, **kwargs):
            result = reduce(parameters, *args, **kwargs)
            self._note("reduce", parameters, result[0])
            return result

        self._patches = [
            mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathered),
            mock.patch.object(_fsdp_param_group, "foreach_reduce", reduced),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def _note(self, kind, parameters, whole):
        self.seen.append((kind, parameters[0]._param_fqn.rpartition(".")[0], whole.nbytes))

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


class BytesOfSteps(L.Callback):
    """Bytes of collectives until the end of each optimizer step."""

    reads_parameters = False

    def __init__(self, collectives):
        self._collectives, self.sent = collectives, []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > len(self.sent):
            self.sent.append(sum(num_bytes for _, _, num_bytes in self._collectives.seen))


def sent_of(whole_bytes):
    """Bytes that a rank sends in collectives of so many bytes."""
    return whole_bytes * (1 - 1 / dist.get_world_size())


def trains(num_micro_batches, share):
    """Training beside DDP's, and collectives of the fit beside what the plan and a closed form have."""
    plan = planned(num_micro_batches, share)
    options = {"accumulate_grad_batches": num_micro_batches, "max_steps": STEPS}
    module = Lora().double()
    with Collectives() as collectives:
        fit = fitted(OSDPStrategy(plan=plan, dry_run=False), module, plugins=[OSDPPrecision("64-true")], **options)
    found = {name: value.clone() for name, value in whole(fit).items()}
    other = fitted(DDPStrategy(find_unused_parameters=True), Lora().double(), precision="64-true", **options)
    expected = {name: value.clone() for name, value in whole(other).items()}
    module = Lora().double()
    step, modes = planned_step(plan, profile_of(module), slow_cluster())
    events = [event for events in engine_of(plan).events_of(step, modes) for event in events]
    ordered = [
        (kind, step.units[of].name)
        for kind, of in events
        if (kind == "gather" and step.units[of].operators) or (kind == "reduce" and step.units[of].gradient_bytes)
    ]
    unit_of = {operator: unit.name for unit in plan.units for operator in unit.operators}
    trained = {name.rpartition(".")[0] for name, each in module.named_parameters() if each.requires_grad}
    frozen = {unit.name for unit in plan.units if unit.operators and trained.isdisjoint(unit.operators)}
    resident = {unit.name for unit in plan.units if effects_of(unit.treatments[0]).is_resident}
    seen = [(kind, unit_of[operator], num_bytes) for kind, operator, num_bytes in collectives.seen]
    closed = {"gather": 0, "reduce": 0}
    for unit, mode in zip(step.units, modes, strict=True):
        counts = effects_of(mode).counts(unit, num_micro_batches=num_micro_batches)
        inside = [module.get_submodule(operator.name).parameters(recurse=False) for operator in unit.operators]
        sizes = [(each.numel() * 8, each.requires_grad) for held in inside for each in held]
        if unit.name not in frozen:
            closed["gather"] += STEPS * num_all_gathers(counts) * sum(size for size, _ in sizes)
            closed["reduce"] += STEPS * counts["reduce"] * sum(size for size, is_trained in sizes if is_trained)
    once = sum(unit.parameter_bytes for unit in plan.units if unit.name in resident)
    again = sum(num_bytes for kind, name, num_bytes in seen if kind == "reduce" or name not in resident)
    return {
        "apart": differs(found, expected),
        "mixed": [
            unit.name for unit in plan.units if unit.name not in frozen and not trained.issuperset(unit.operators)
        ],
        "lists": [len(unit.modules) for unit in plan.units if unit.modules and unit.name not in frozen],
        "num_trained": sum(1 for unit in plan.units if unit.operators and unit.name not in frozen),
        "resident": (len(resident), len(frozen)),
        "frozen_once": sum(n for kind, name, n in seen if name in resident) == once,
        "sent": wire_bytes(plan) * STEPS / sent_of(again),
        "ordered": [(kind, name) for kind, name, _ in seen[-len(ordered) :]] == ordered,
        "bytes": [
            sum(n for each, name, n in seen if each == kind and name not in frozen) / closed[kind] for kind in closed
        ],
    }


@pytest.mark.parametrize(("number", "num_micro_batches", "share"), [slow(2, 1, None), slow(2, 3, None), (2, 2, 0.5)])
def test_frozen_bytes_are_gathered_once_and_all_others_as_a_closed_form_has_them(
    ranks, number, num_micro_batches, share
):
    for found in ranks(number).run(trains, num_micro_batches=num_micro_batches, share=share):
        assert found["apart"] < 1e-12
        assert found["frozen_once"]
        assert found["ordered"]
        assert found["bytes"] == pytest.approx([1.0, 1.0], rel=0.01)
        assert found["sent"] == pytest.approx(1.0, rel=0.01)
        num_resident, num_frozen = found["resident"]
        assert num_resident == num_frozen if share is None else 0 < num_resident < num_frozen
        assert share is not None or found["mixed"] == []
        assert max(found["lists"]) >= (4 if share is None else 2)
        assert found["num_trained"] < (12 if share is None else 24)  # adapters


def treated(unit, keep, sync):
    """The unit with a treatment, as far as it applies: only frozen ones are resident, and then reduce nothing."""
    if not unit.name:
        return unit
    if keep != "always":
        return unit.treated(keep=keep, sync=sync)
    return unit.treated(keep="whole", sync=sync) if unit.gradient_bytes else unit.treated(keep=keep, sync="every")


def sent_by_treatment(num_micro_batches):
    """Bytes that a plan sends in a step, by treatment, beside those that are counted after the first step."""
    base, found = planned(num_micro_batches), {}
    for keep, sync in itertools.product(("nothing", "whole", "always"), ("every", "last")):
        units = tuple(treated(unit, keep, sync) for unit in base.units)
        plan = dataclasses.replace(base, units=units)
        with Collectives() as collectives:
            counting = BytesOfSteps(collectives)
            fitted(
                OSDPStrategy(plan=plan, dry_run=False),
                Lora().double(),
                plugins=[OSDPPrecision("64-true")],
                accumulate_grad_batches=num_micro_batches,
                max_steps=3,
                callbacks=[counting],
            )
        first, _, last = counting.sent
        found[keep, sync] = wire_bytes(plan), sent_of(last - first) / 2
    return found


@pytest.mark.slow  # the test above has those of the planner's own plan
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_bytes_on_the_wire_are_those_that_are_counted_in_any_treatment(ranks, num_micro_batches):
    for found in ranks(2).run(sent_by_treatment, num_micro_batches=num_micro_batches):
        for treatment, (predicted, counted) in found.items():
            assert predicted == pytest.approx(counted, rel=0.01), treatment
        assert found["always", "every"][0] < found["whole", "every"][0] < found["nothing", "every"][0]
