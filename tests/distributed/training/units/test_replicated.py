"""Trained units that each rank has all of: nothing of them is gathered, and training is what it is under DDP."""

import dataclasses
from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.distributed.tensor import DTensor

from lightning_osdp import OSDPPrecision, OSDPStrategy, RanksApartError
from lightning_osdp.apply import ShardedModel
from lightning_osdp.apply.internals.gathering import whole_storages
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from tests.distributed.support.fits import failure, fitted, plan_for, shared_folder, trainer
from tests.distributed.training.units.test_host_shards import Scaled
from tests.distributed.training.units.test_joined import with_unit
from tests.distributed.training.units.test_resident import (
    Adapters,
    Gathers,
    Penalised,
    Short,
    Writing,
    differs,
    made,
    planned,
    ran,
    whole,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

LOW = "bf16-mixed"
REFUSED = {
    "": "it is the root",
    "scale": "'scale.factor' has no dimensions",
    "head": "'head.weight' is kept in torch.float32 and cast to torch.bfloat16 for computing",
}
"""Units that cannot be replicated, and why."""
JOINED = ("layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up")
"""Adapters, which are one unit."""


def replicated(kind=Adapters, number=1, dtype=torch.float64, **options):
    """A plan with every so many-th trained unit replicated, and the names of these."""
    plan, frozen = planned(kind, "mixed", dtype=dtype, **options)
    plan = with_unit(plan, JOINED)
    trained = [unit.name for unit in plan.units if unit.name and unit.operators and unit.name not in frozen]
    chosen = trained[::number]
    units = [unit.treated(home="one", keep="nothing") if unit.name in chosen else unit for unit in plan.units]
    return dataclasses.replace(plan, units=tuple(units)), chosen


def trains_like_ddp(kind, sync, num_micro_batches, number=1, recomputed=(), clip=None):
    """Difference from DDP, gathers of replicated units, and whether the adapters are among these."""
    options = {"accumulate_grad_batches": num_micro_batches, "limit_val_batches": 2, "val_check_interval": 2}
    options |= {"max_steps": 5, "gradient_clip_val": clip}
    plan, chosen = replicated(number=number, sync=sync, num_micro_batches=num_micro_batches)
    blocks = tuple(Block(name=name, treatment=Treatment(saves="recompute")) for name in recomputed)
    plan = dataclasses.replace(plan, blocks=blocks)
    module = made(kind)
    with Gathers() as gathers:
        _, found = ran(module, plan, **options)
    _, expected = ran(made(kind), **options)
    return differs(found, expected), gathers.of(module, chosen), JOINED[0] in chosen


@pytest.mark.parametrize(
    ("num_ranks", "kind", "sync", "num_micro_batches", "number", "recomputed", "clip"),
    [
        (2, Adapters, "last", 3, 2, ("layers.0", "layers.1"), None),
        slow(2, Adapters, "every", 1, 1, (), 0.1),
        slow(2, Penalised, "every", 2, 1, (), None),
        slow(4, Adapters, "every", 2, 2, (), 0.1),
        slow(4, Adapters, "last", 2, 1, (), None),
    ],
)
def test_what_each_rank_has_all_of_is_never_gathered_and_training_is_that_of_ddp(
    ranks, num_ranks, kind, sync, num_micro_batches, number, recomputed, clip
):
    arguments = {"kind": kind, "sync": sync, "num_micro_batches": num_micro_batches, "number": number}
    arguments |= {"recomputed": recomputed, "clip": clip}
    for apart, gathered, has_joined in ranks(num_ranks).run(trains_like_ddp, **arguments):
        assert apart < 1e-12
        assert set(gathered) == {0}
        assert has_joined


class Sharing(L.Callback):
    """Number of trained weights, in each step, whose shards have memory of their own, and shapes of shards."""

    def __init__(self):
        self.apart, self.shapes = [], set()

    def on_train_batch_end(self, fit, module, *_):
        storages = {weight.untyped_storage()._cdata for weight in whole_storages(module)}
        shards = [each for each in module.parameters() if isinstance(each, DTensor) and each.device_mesh.ndim > 1]
        self.apart.append(sum(each._local_tensor.untyped_storage()._cdata not in storages for each in shards))
        self.shapes |= {tuple(each._local_tensor.shape) == tuple(each.shape) for each in shards}


def shares_memory():
    """Number of shards with memory of their own after each step, and whether shards are whole."""
    sharing, (plan, _) = Sharing(), replicated()
    fitted(OSDPStrategy(plan=plan), made(), max_steps=3, plugins=[OSDPPrecision("64-true")], callbacks=[sharing])
    return sharing.apart, sharing.shapes


def test_a_shard_that_is_all_of_its_weight_has_no_memory_of_its_own(ranks):
    assert ranks(2).run(shares_memory) == [([0, 0, 0], {True})] * 2


def refused():
    """Errors of plans that replicate the root, a number, and weights that are cast for computing."""
    found = []
    for name, kind, precision in (("", Adapters, "32-true"), ("scale", Scaled, "32-true"), ("head", Adapters, LOW)):
        plan, _ = planned(kind, dtype=torch.float32)
        units = [each.treated(home="one", keep="nothing") if each.name == name else each for each in plan.units]
        plan = dataclasses.replace(plan, units=tuple(units))
        found.append(failure(partial(ran, made(kind, torch.float32), plan, precision=precision)))
    return found


def test_units_that_cannot_be_replicated_are_refused_before_training(ranks):
    for found in ranks(2).run(refused):
        for (kind, text), (name, why) in zip(found, REFUSED.items(), strict=True):
            assert kind == "ConfigurationError"
            assert text == (
                f"Expected unit {name!r} to be one of which each rank can have all, with home='one' (replicated) as the"
                f" plan says, but {why}. Give it another 'home', or plan anew by leaving out `plan=`."
            )


def saves_and_resumes(state_dict_type, is_first):
    """Differences of a fit from one without a break, where it is replicated before it was saved, or after."""
    folder, (plan, _) = shared_folder(), replicated(Short)
    plain = plan_for(made(Short), "zdp", world_size=dist.get_world_size())
    before, after = (plan, plain) if is_first else (plain, plan)
    save = ModelCheckpoint(dirpath=folder, every_n_epochs=2, save_on_train_epoch_end=True)
    options = {"max_steps": -1, "plugins": [OSDPPrecision("64-true")]}
    strategy = OSDPStrategy(plan=before, state_dict_type=state_dict_type)
    fitted(strategy, made(Short), max_epochs=2, callbacks=[save], enable_checkpointing=True, **options)
    fit, module = trainer(OSDPStrategy(plan=after), max_epochs=4, **options), made(Short)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=save.best_model_path)
    found = {name: value.clone() for name, value in whole(fit).items()}
    _, expected = ran(made(Short), max_steps=-1, max_epochs=4)
    return differs(found, expected)


@pytest.mark.parametrize(
    ("state_dict_type", "is_first"),
    [("sharded", True), slow("sharded", False), slow("full", True), slow("full", False)],
)
def test_checkpoints_go_on_under_plans_that_shard_what_was_replicated_and_back(ranks, state_dict_type, is_first):
    assert max(ranks(2).run(saves_and_resumes, state_dict_type=state_dict_type, is_first=is_first)) < 1e-12


def averages_like_ddp():
    """Difference of averages from those of DDP, where validation swaps weights."""
    options = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
    _, found = ran(made(), replicated()[0], callbacks=[EMAWeightAveraging(decay=0.5)], **options)
    _, expected = ran(made(), callbacks=[EMAWeightAveraging(decay=0.5)], **options)
    return differs(found, expected)


@pytest.mark.slow
def test_averages_of_weights_are_those_of_ddp(ranks):
    assert max(ranks(2).run(averages_like_ddp)) < 1e-12


def _by_data(module, _):
    module.layers[0].up.weight.data.mul_(1.25)


def _by_operation(module, _):
    with torch.no_grad():
        module.layers[0].up.weight.add_(0.125)


def _set_whole(module, _):
    module.layers[0].up.weight.data = module.layers[0].up.weight.data * 1.5


def _load(module, _):
    other = made()
    torch.manual_seed(5)
    torch.nn.init.normal_(other.layers[0].up.weight)
    module.layers[0].up.load_state_dict(other.layers[0].up.state_dict())


def _gathered(module, fit):
    weight = module.layers[0].up.weight
    if not isinstance(fit.strategy, OSDPStrategy):
        weight.data.mul_(0.75)
        return
    with fit.strategy.gathered(module.layers[0].up, write_back=True), torch.no_grad():
        module.layers[0].up.weight.mul_(0.75)


WRITES = {
    "data": _by_data,
    "operation": _by_operation,
    "set": _set_whole,
    "load": _load,
    "gathered": _gathered,
}
HOOKS = ["on_train_batch_start", "on_before_optimizer_step", "on_before_backward"]


def writes_like_ddp(cases):
    """Differences from DDP, by what is written to a replicated weight, and when."""
    plan, _ = replicated()
    told = {}
    for name, hook in cases:
        _, found = ran(made(), plan, callbacks=[Writing(WRITES[name], hook)])
        _, expected = ran(made(), callbacks=[Writing(WRITES[name], hook)])
        told[name, hook] = differs(found, expected)
    return told


@pytest.mark.parametrize(
    "cases",
    [
        [("set", HOOKS[0]), ("data", HOOKS[1])],
        slow([(name, hook) for name in WRITES for hook in HOOKS[:2]]),
    ],
)
def test_what_is_written_to_replicated_weights_counts_from_then_on(ranks, cases):
    for told in ranks(2).run(writes_like_ddp, cases=cases):
        assert {case: apart for case, apart in told.items() if not apart < 1e-12} == {}


class Before(L.Callback):
    """Has a hook between forward and backward, before which modules show shards."""

    def on_before_backward(self, *_):
        pass


def runs_again():
    """Difference from DDP where a resident unit and a replicated one are blocks that run again in backward."""
    plan, _ = replicated()
    blocks = tuple(Block(name=name, treatment=Treatment(saves="recompute")) for name in ("twice", "head"))
    _, found = ran(made(), dataclasses.replace(plan, blocks=blocks), callbacks=[Before()], max_steps=3)
    _, expected = ran(made(), max_steps=3)
    return differs(found, expected)


def test_blocks_that_run_again_find_weights_whatever_hooks_come_before_backward(ranks):
    assert max(ranks(2).run(runs_again)) < 1e-12


class ByHand(Adapters):
    """Steps an optimizer itself, and calls modules of its own but not itself."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.automatic_optimization = False

    def loss(self, batch):
        x, y = (each.to(self.head.weight.dtype) for each in batch)
        return F.mse_loss(Adapters.forward(self, x), y)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for factor in (1.0, 0.5):  # two backwards for one step
            self.manual_backward(super().training_step(batch, batch_idx) * factor)
        optimizer.step()
        optimizer.zero_grad()


def steps_by_hand():
    """Difference from DDP where backward is called in a step all of whose units stay unsharded."""
    _, found = ran(made(ByHand), replicated()[0], max_steps=3)
    _, expected = ran(made(ByHand), max_steps=3)
    return differs(found, expected)


def test_gradients_are_reduced_where_a_step_calls_backward_and_no_unit_has_hooks(ranks):
    assert max(ranks(2).run(steps_by_hand)) < 1e-12


class Unseen(ByHand):
    """Calls backward without Lightning."""

    def manual_backward(self, loss):
        loss.backward()


def steps_unseen():
    """Error of a step that calls backward itself, where no unit has hooks."""
    return failure(lambda: ran(made(Unseen), replicated()[0], max_steps=3))


def test_gradients_that_nothing_has_reduced_are_an_error(ranks):
    for name, text in ranks(2).run(steps_unseen):
        assert name == "ConfigurationError"
        assert text.startswith(
            "Expected a step to call self.manual_backward(loss), got gradients of 'layers.0.down.weight'"
        )
        assert text.endswith("Call manual_backward in place of loss.backward().")


class Apart(L.Callback):
    """Writes to a weight on one rank alone."""

    def on_train_batch_start(self, fit, module, *_):
        if fit.global_step == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                module.layers[0].up.weight._local_tensor.add_(1.0)


def drifts_apart():
    """Error of a fit whose ranks change a replicated weight in different ways."""
    return failure(lambda: ran(made(), replicated()[0], callbacks=[Apart()]))


def test_ranks_that_drift_apart_are_told(ranks):
    for name, text in ranks(2).run(drifts_apart):
        assert name == RanksApartError.__name__
        assert "or each rank (replicated)" in text


def fits_twice():
    """Difference from DDP of a module that is trained, changed by hand, and trained again."""
    states = []
    for plan in (replicated()[0], None):
        module = made()
        for time in range(2):
            _, state = ran(module, plan, max_steps=3)
            if time == 0:
                with torch.no_grad():
                    module.layers[0].up.weight.mul_(0.5)
        states.append(state)
    return differs(*states)


@pytest.mark.slow
def test_a_module_is_trained_again(ranks):
    assert max(ranks(2).run(fits_twice)) < 1e-12


def comes_back_late():
    """Error of a backward that comes to weights which an optimizer has changed since its forward."""
    plan, _ = replicated()
    module = made()
    sharded = ShardedModel.planned(module, plan, device=torch.device("cpu"))
    optimizer, batch = module.configure_optimizers(), next(iter(module.loader(dist.get_rank(), dist.get_world_size())))
    told = []
    for _ in range(2):
        loss = sharded.run(module.loss, batch)
        sharded.before_backward()
        loss.backward(retain_graph=True)
        sharded.before_optimizer_step(optimizer)
        with sharded.stepping(optimizer):
            optimizer.step()
        sharded.reshard()
        try:
            loss.backward()
        except RuntimeError as error:
            told.append(str(error))
        sharded.forget_step()
    return told


def test_backward_refuses_weights_that_were_updated_since_forward(ranks):
    for told in ranks(2).run(comes_back_late):
        assert ["modified by an inplace operation" in each for each in told] == [True, True]
