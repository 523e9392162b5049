"""Frozen units that stay unsharded for a whole fit: gathered once, and training is what it is under DDP."""

import dataclasses
import itertools
from collections import Counter
from contextlib import contextmanager
from functools import wraps
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPPrecision, OSDPStrategy, change_plan
from lightning_osdp.apply.internals import calls, sharding
from lightning_osdp.apply.internals.gathering import whole_storages
from lightning_osdp.apply.ranks.agreement import Agreement
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from tests.distributed.support.fits import fitted, largest_difference, plan_for, shared_folder, trainer
from tests.distributed.support.models import Base
from tests.distributed.training.units.test_joined import entries, with_unit
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

STEPS = 6
WIDTH = 12


class Adapted(nn.Module):
    """A frozen Linear, and what is trained beside it."""

    def __init__(self, first, second):
        super().__init__()
        self.frozen = nn.Linear(first, second).requires_grad_(False)
        self.down, self.up = nn.Linear(first, 2, bias=False), nn.Linear(2, second, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Adapters(Base):
    """Frozen units before, between and behind trained ones; one is called twice, one has buffers."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.backbone = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.layers = nn.ModuleList([Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)])
        self.twice = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)
        self.hooked = None

    def forward(self, x):
        hidden = self.backbone(x)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(self.twice(self.norm(self.twice(hidden))))

    def loss(self, batch):
        x, y = (each.to(self.head.weight.dtype) for each in batch)
        return F.mse_loss(self(x).float(), y.float())

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(160, 5, generator=generator), torch.randn(160, 3, generator=generator))

    def val_dataloader(self):
        return DataLoader(self.dataset(), batch_size=4)


class AllGiven(Adapters):
    """Frozen parameters are in the optimizer, too, and decay if they ever have gradients."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Penalised(Adapters):
    """The loss of a training step has gradients of the model's inputs."""

    def loss(self, batch):
        if not torch.is_grad_enabled():
            return super().loss(batch)
        x = batch[0].to(self.head.weight.dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).square().sum(), x, create_graph=True)
        return super().loss(batch) + gradient.square().mean()


class Short(Adapters):
    """Two steps are an epoch, on two ranks."""

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(16, 5, generator=generator), torch.randn(16, 3, generator=generator))


def made(kind=Adapters, dtype=torch.float64):
    """The model, with the same values in any strategy."""
    return kind().to(dtype)


def resident(plan):
    """The plan with everything resident that is frozen, and the names of those units."""
    module = made()
    trained = {name.rpartition(".")[0] for name, each in module.named_parameters() if each.requires_grad}
    frozen = [unit.name for unit in plan.units if unit.name and trained.isdisjoint(unit.operators)]
    units = [unit.treated(keep="always", sync="every") if unit.name in frozen else unit for unit in plan.units]
    return dataclasses.replace(plan, units=tuple(units)), frozen


def planned(kind=Adapters, modes="mixed", dtype=torch.float64, sync="every", num_micro_batches=1):
    plan = plan_for(made(kind, dtype), modes, world_size=dist.get_world_size(), num_micro_batches=num_micro_batches)
    units = [unit.treated(sync=sync) if unit.name else unit for unit in plan.units]
    return resident(dataclasses.replace(plan, units=tuple(units)))


class Gathers:
    """Counts all-gathers of weights by module while it is entered."""

    def __enter__(self):
        self.seen, original = Counter(), _fsdp_param_group.foreach_all_gather

        def noted(parameters, *args, **kwargs):
            weights = [each for each in parameters if each._module_info.param_name == "weight"]
            self.seen.update(each._module_info.module for each in weights)
            return original(parameters, *args, **kwargs)

        self._patch = mock.patch.object(_fsdp_param_group, "foreach_all_gather", noted)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def of(self, module, names):
        return [self.seen[module.get_submodule(name)] for name in names]


def whole(fit):
    """Whole state on rank 0 of either strategy, nothing elsewhere."""
    if isinstance(fit.strategy, OSDPStrategy):
        return fit.strategy.whole_state_dict() or {}
    return dict(fit.lightning_module.state_dict()) if dist.get_rank() == 0 else {}


def ran(module, plan=None, **options):
    """A fit of the module, under a plan or DDP, and its whole state."""
    strategy = DDPStrategy(find_unused_parameters=True) if plan is None else OSDPStrategy(plan=plan)
    if plan is not None and module.head.weight.dtype == torch.float64:
        options["plugins"] = [OSDPPrecision("64-true")]
    elif module.head.weight.dtype == torch.float64:
        options["precision"] = "64-true"
    fit = fitted(strategy, module, **{"max_steps": STEPS, **options})
    return fit, {name: value.detach().clone() for name, value in whole(fit).items()}


def differs(found, expected):
    """Largest difference of two states on rank 0, zero elsewhere."""
    return largest_difference(found, expected) if dist.get_rank() == 0 else 0.0


@contextmanager
def ended_units():
    """Yields modules of units that backward ends where it comes to their inputs."""
    seen, forward = set(), sharding._Inputs.forward

    def noted(group, *inputs):
        seen.update(group.modules)
        return forward(group, *inputs)

    with mock.patch.object(sharding._Inputs, "forward", staticmethod(noted)):
        yield seen


JOINED = (("backbone.0", "backbone.2"), ("layers.0.frozen", "layers.1.frozen"))
"""Modules of units, where some have several."""


def trains_like_ddp(kind, modes, sync, num_micro_batches, joined=(), recomputed=()):
    """Difference from DDP, gathers of each resident unit, with validation in between, and which kinds backward ends."""
    options = {"accumulate_grad_batches": num_micro_batches, "limit_val_batches": 2, "val_check_interval": 2}
    options["max_steps"] = 4
    plan, frozen = planned(Adapters, modes, sync=sync, num_micro_batches=num_micro_batches)
    for modules in joined:
        plan, frozen = with_unit(plan, modules), [name for name in frozen if name not in modules[1:]]
    blocks = tuple(Block(name=name, treatment=Treatment(saves="recompute")) for name in recomputed)
    plan = dataclasses.replace(plan, blocks=blocks)
    module = made(kind)
    with Gathers() as gathers, ended_units() as ended:
        _, found = ran(module, plan, **options)
    _, expected = ran(made(kind), **options)
    are_frozen = {module.get_submodule(unit.name) in ended for unit in plan.units if unit.name in frozen}
    are_trained = {module.get_submodule(unit.name) in ended for unit in plan.units if unit.name not in frozen}
    return differs(found, expected), gathers.of(module, frozen), len(frozen), (are_frozen, True in are_trained)


@pytest.mark.parametrize(
    ("number", "kind", "modes", "sync", "num_micro_batches", "joined", "recomputed"),
    [
        slow(2, Adapters, "mixed", "every", 1, (), ()),
        slow(2, AllGiven, "zdp", "every", 3, (), ()),
        (2, Adapters, "dp", "last", 3, JOINED, ()),
        (2, Adapters, "mixed", "every", 2, JOINED[:1], ("layers.0", "layers.1")),
        (2, Penalised, "mixed", "every", 1, JOINED, ()),
        slow(4, Adapters, "mixed", "every", 2, JOINED, ()),
    ],
)
def test_what_is_frozen_is_gathered_once_and_training_is_that_of_ddp(
    ranks, number, kind, modes, sync, num_micro_batches, joined, recomputed
):
    arguments = {"kind": kind, "modes": modes, "sync": sync, "num_micro_batches": num_micro_batches}
    arguments |= {"joined": joined, "recomputed": recomputed}
    for apart, gathered, num_frozen, ended in ranks(number).run(trains_like_ddp, **arguments):
        assert apart < 1e-12
        assert (gathered, num_frozen >= 3) == ([1] * num_frozen, True)
        assert ended == ({False}, True)


def enters_units():
    """Number of times that torch enters units of a fit: at modules of frozen ones, and at each module of the others."""
    plan, frozen = planned()
    for modules in JOINED:
        plan = with_unit(plan, modules)
    module = made()
    with entries() as entered:
        ran(module, plan)
    entered = {name: entered[each] for name, each in module.named_modules() if name and each in entered}
    return sum(entered.get(name, 0) for name in frozen), [entered[name] for name in entered if name not in frozen]


def test_torch_enters_a_frozen_unit_to_gather_it_and_no_more(ranks):
    for of_frozen, of_trained in ranks(2).run(enters_units):
        assert (of_frozen, set(of_trained), len(of_trained) > 4) == (1, {STEPS}, True)


class Looks(L.Callback):
    """Notes where hooks of a module stand among those of a user, before and after a step."""

    def __init__(self, name):
        self._name, self.found = name, []

    def _look(self, module):
        hooks = (module.get_submodule(self._name)._forward_pre_hooks, module.get_submodule(self._name)._forward_hooks)
        self.found.append([[getattr(hook, "__name__", "") for hook in each.values()] for each in hooks])

    def on_train_start(self, fit, module):
        unit = module.get_submodule(self._name)
        for prepend in (True, False):
            unit.register_forward_pre_hook(_users, prepend=prepend)
            unit.register_forward_hook(_users, prepend=prepend)

    def on_train_batch_start(self, fit, module, *_):
        self._look(module)

    def on_train_batch_end(self, fit, module, *_):
        self._look(module)


def _users(*_):
    """Hook of a user, which does nothing."""


def calls_hooks():
    """Calls of hooks of modules of frozen units in a fit, and where they stand among a user's."""
    plan, frozen = planned()
    for modules in JOINED:
        plan = with_unit(plan, modules)
    module, called, looks = made(), Counter(), Looks("backbone.2")
    frozen = [module.get_submodule(name) for name in frozen]

    def counted(name):
        original = getattr(calls._Call, name)

        @wraps(original)
        def run(self, of, *args):
            called[name] += of in frozen
            return original(self, of, *args)

        return mock.patch.object(calls._Call, name, run)

    # where another test has compiled something in this process, all hooks stay
    with mock.patch.dict(calls.counters, clear=True), counted("begin"), counted("end"):
        ran(module, plan, callbacks=[looks])
    num_units = len({unit.name for unit in plan.units if module.get_submodule(unit.name) in frozen})
    return dict(called), len(frozen), num_units, looks.found


def test_modules_of_a_frozen_unit_have_no_hooks_while_it_is_unsharded(ranks):
    for called, num_modules, num_units, found in ranks(2).run(calls_hooks):
        # torch enters the first unit in the first step, to gather all of them
        assert called["begin"] <= num_modules + num_units * (STEPS - 1) < num_modules * STEPS
        assert called["end"] <= num_modules
        assert found == [[["_users", "begin", "_users"], ["_users", "end", "_users"]]] * 2 * STEPS


def finetunes_like_others():
    """Difference from plain FSDP where a callback unfreezes the backbone in the middle, and how units are gathered.

    DDP reduces no gradients of what is frozen when it is made.
    """
    options = {"max_steps": -1, "max_epochs": 4}

    def callback():
        return BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, backbone_initial_lr=0.02)

    plan, frozen = planned(Short, "mixed")
    module = made(Short)
    with Gathers() as gathers:
        _, found = ran(module, plan, callbacks=[callback()], **options)
    start = made(Short).state_dict()
    plain = plan_for(made(Short), "zdp", world_size=dist.get_world_size())
    _, expected = ran(made(Short), plain, callbacks=[callback()], **options)
    moved = float((expected["backbone.0.weight"] - start["backbone.0.weight"]).abs().max()) if expected else 1.0
    inside = [name for name in frozen if name.startswith("backbone")]
    others = [name for name in frozen if name not in inside]
    return differs(found, expected), moved, gathers.of(module, inside), gathers.of(module, others)


def test_a_unit_that_is_unfrozen_in_the_middle_is_gathered_after_each_update(ranks):
    for apart, moved, inside, others in ranks(2).run(finetunes_like_others):
        assert (apart < 1e-12, moved > 1e-3) == (True, True)
        assert (min(inside) > 4, set(others)) == (True, {1})


class Sharing(L.Callback):
    """Number of frozen weights, in each step, whose shards have memory of their own."""

    def __init__(self):
        self.apart = []

    def on_train_batch_end(self, fit, module, *_):
        storages = {whole.untyped_storage()._cdata for whole in whole_storages(module)}
        frozen = [each for each in module.parameters() if not each.requires_grad]
        self.apart.append(sum(each._local_tensor.untyped_storage()._cdata not in storages for each in frozen))


def shares_memory(precision):
    """Number of frozen shards that have memory of their own after each step, and after the fit."""
    sharing = Sharing()
    plan, _ = planned(dtype=torch.float32)
    fitted(OSDPStrategy(plan=plan), made(dtype=torch.float32), max_steps=3, precision=precision, callbacks=[sharing])
    return sharing.apart


@pytest.mark.parametrize("number", [2, slow(4)])
def test_shards_of_resident_units_take_no_memory_of_their_own_but_where_they_are_cast(ranks, number):
    num_cast = sum(not each.requires_grad for each in made().parameters()) - 2  # a BatchNorm's are not
    assert ranks(number).run(shares_memory, precision="32-true") == [[0, 0, 0]] * number
    assert ranks(number).run(shares_memory, precision="bf16-mixed") == [[num_cast] * 3] * number


def _by_data(module, _):
    module.twice.weight.data.mul_(1.25)


def _by_operation(module, _):
    with torch.no_grad():
        module.twice.weight.add_(0.125)


def _set_whole(module, _):
    module.twice.weight.data = module.twice.weight.data * 1.5


def _load(module, _):
    other = made(type(module))
    torch.manual_seed(5)
    nn.init.normal_(other.twice.weight)
    module.twice.load_state_dict(other.twice.state_dict())


def _rows(module, _):
    """Writes the rows of one rank."""
    with torch.no_grad():
        rows = module.twice.weight
        if hasattr(rows, "to_local"):
            if dist.get_rank() == 0:
                rows.to_local().data[:1].fill_(0.5)
        else:
            rows[:1].fill_(0.5)


def _swapped(module, _):
    """Swaps two rows of one rank, by way of memory that no version tells of."""
    weight = module.twice.weight
    if dist.get_rank() == 0 or not hasattr(weight, "to_local"):
        rows = weight.to_local() if hasattr(weight, "to_local") else weight
        rows.data[:2] = rows.data[[1, 0]]


def _gathered(module, fit):
    strategy = fit.strategy
    if isinstance(strategy, OSDPStrategy):
        with strategy.gathered(module.twice, write_back=True), torch.no_grad():
            module.twice.weight.mul_(0.75)
    else:
        with torch.no_grad():
            module.twice.weight.mul_(0.75)


def _read(module, _):
    """Reads a weight, and writes nothing."""
    module.twice.weight.data.sum()


WRITES = {
    "data": _by_data,
    "operation": _by_operation,
    "set": _set_whole,
    "load": _load,
    "rows": _rows,
    "swapped": _swapped,
    "gathered": _gathered,
    "read": _read,
}


class Teacher(Adapters):
    """A frozen unit follows a trained one, moved in each step before it is called."""

    def loss(self, batch):
        with torch.no_grad():
            self.twice.weight.mul_(0.9).add_(0.01)
        return super().loss(batch)


def moves_like_ddp():
    """Difference from DDP of a model whose step writes to frozen weights, and how often units are gathered."""
    plan, frozen = planned(Adapters)  # a profile would see what the step does, and leave that unit to the root
    module = made(Teacher)
    with Gathers() as gathers:
        _, found = ran(module, plan)
    _, expected = ran(made(Teacher))
    return differs(found, expected), dict(zip(frozen, gathers.of(module, frozen), strict=True))


def test_what_a_step_writes_to_frozen_weights_before_it_uses_them_counts_at_once(ranks):
    for apart, gathered in ranks(2).run(moves_like_ddp):
        assert (apart < 1e-12, gathered.pop("twice"), set(gathered.values())) == (True, STEPS, {1})


class Writing(L.Callback):
    """Writes to frozen weights in the middle, in a hook."""

    def __init__(self, write, hook):
        self._write = write
        setattr(self, hook, self._run)
        self.num_calls = 0

    def _run(self, fit, module, *_, **__):
        self.num_calls += 1
        if self.num_calls == 3:
            self._write(module, fit)

    def on_train_batch_start(self, *_):
        """Hook in each step."""

    def on_before_optimizer_step(self, *_):
        """Hook before each optimizer step."""

    def on_validation_start(self, *_):
        """Hook where validation starts."""

    def on_before_backward(self, *_):
        """Hook between forward and backward."""


def writes_like_ddp(cases):
    """Returns, by what is written and when, the difference from DDP, and how often units are gathered."""
    plan, frozen = planned(Adapters, "mixed")
    told = {}
    for name, hook in cases:
        options = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
        options = options if hook == "on_validation_start" else {}
        module = made()
        with Gathers() as gathers:
            _, found = ran(module, plan, callbacks=[Writing(WRITES[name], hook)], **options)
        _, expected = ran(made(), callbacks=[Writing(WRITES[name], hook)], **options)
        told[name, hook] = differs(found, expected), dict(zip(frozen, gathers.of(module, frozen), strict=True))
    return told


HOOKS = ["on_train_batch_start", "on_before_optimizer_step", "on_validation_start"]


@pytest.mark.parametrize(
    "cases",
    [
        [*zip([name for name in WRITES if name != "read"], itertools.cycle(HOOKS), strict=False)],
        slow([("read", HOOKS[0]), ("data", "on_before_backward")]),
        slow([*itertools.product(WRITES, HOOKS)]),
    ],
)
def test_what_is_written_to_frozen_weights_counts_from_then_on(ranks, cases):
    for told in ranks(2).run(writes_like_ddp, cases=cases):
        for (name, _), (apart, gathered) in told.items():
            assert apart < 1e-12, name
            again = gathered.pop("twice")
            assert (again, set(gathered.values())) == (1 if name == "read" else 2, {1}), name


class Transferring(Adapters):
    """A method of the module that is no hook writes to frozen weights, between two steps."""

    num_batches = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.num_batches += 1
        if self.num_batches == 3:
            _rows(self, None)
        return batch


class Holding(Adapters):
    """A step writes to shards that it has held on to, before it uses them."""

    held = ()

    def loss(self, batch):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps in {3, 5}:
            with torch.no_grad():
                self.held[0].mul_(0.5)
        return super().loss(batch)

    def on_train_start(self):
        self.held = [self.twice.weight]


def writes_out_of_sight():
    """Differences from DDP where one rank alone has a hook, or a module writes outside of hooks; and gathers."""
    plan, frozen = planned()
    told = []
    for kind, hooks in ((Adapters, ["on_train_batch_start"]), (Transferring, []), (Holding, [])):
        module = made(kind)
        with Gathers() as gathers:
            _, found = ran(module, plan, callbacks=[Writing(_rows, hook) for hook in hooks if dist.get_rank() == 0])
        _, expected = ran(made(kind), callbacks=[Writing(_rows, hook) for hook in hooks])
        told.append((differs(found, expected), dict(zip(frozen, gathers.of(module, frozen), strict=True))))
    return told


def test_writes_are_seen_wherever_they_come_from(ranks):
    for told in ranks(2).run(writes_out_of_sight):
        assert [(apart < 1e-12, gathered["twice"]) for apart, gathered in told] == [(True, 2), (True, 2), (True, 3)]


class Touching(L.Callback):
    """Callback of which it is not known whether it writes to parameters."""

    def on_train_batch_start(self, *_):
        """Hook in each step."""


class Untouched(Touching):
    """Callback that says that it does not."""

    reads_parameters = False


def agreements(callbacks):
    """Number of small all-reduces in each step, of which one begins beside reduce-scatters; and of these."""
    plan, _ = planned()
    numbers, early, original = [], [], Agreement._begin_largest

    class Steps(L.Callback):
        reads_parameters = False

        def on_train_batch_start(self, *_):
            numbers.append(0)

    def counted(self, values):
        numbers[-1:] = [each + 1 for each in numbers[-1:]]
        return original(self, values)

    def begun(self):
        early.append(len(numbers))
        return settling(self)

    settling = Agreement.begin_settling
    with (
        mock.patch.object(Agreement, "_begin_largest", counted),
        mock.patch.object(Agreement, "begin_settling", begun),
    ):
        ran(made(), plan, callbacks=[Steps(), *callbacks])
    return numbers[3:-1], early


@pytest.mark.parametrize(("callback", "number"), [(Untouched, 1), (Touching, 2)])
def test_ranks_agree_once_in_a_step_and_once_more_where_a_hook_may_write(ranks, callback, number):
    for numbers, early in ranks(2).run(agreements, callbacks=[callback()]):
        assert (set(numbers), early) == ({number}, [*range(1, STEPS + 1)])


def saves_and_resumes(state_dict_type):
    """Differences of fits that go on under other plans, saved while units are resident, from one without a break."""
    folder, plan = shared_folder(), planned(Short)[0]
    plain = plan_for(made(Short), "zdp", world_size=dist.get_world_size())
    save = ModelCheckpoint(dirpath=folder, every_n_epochs=2, save_on_train_epoch_end=True)
    options = {"max_steps": -1, "plugins": [OSDPPrecision("64-true")]}
    strategy = OSDPStrategy(plan=plan, state_dict_type=state_dict_type)
    fitted(strategy, made(Short), max_epochs=2, callbacks=[save], enable_checkpointing=True, **options)
    found = []
    for going_on in (plain, plan):
        fit, module = trainer(OSDPStrategy(plan=going_on), max_epochs=4, **options), made(Short)
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=save.best_model_path)
        found.append({name: value.clone() for name, value in whole(fit).items()})
    _, expected = ran(made(Short), max_steps=-1, max_epochs=4)
    return [differs(each, expected) for each in found]


@pytest.mark.parametrize("state_dict_type", [slow("full"), "sharded"])
def test_checkpoints_of_resident_units_go_on_under_any_plan(ranks, state_dict_type):
    for apart in ranks(2).run(saves_and_resumes, state_dict_type=state_dict_type):
        assert max(apart) < 1e-12


def averages_like_ddp():
    """Difference of averages from those of DDP, where validation swaps weights, and how often units are gathered."""
    options = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
    plan, frozen = planned()
    module = made()
    with Gathers() as gathers:
        _, found = ran(module, plan, callbacks=[EMAWeightAveraging(decay=0.5)], **options)
    _, expected = ran(made(), callbacks=[EMAWeightAveraging(decay=0.5)], **options)
    return differs(found, expected), gathers.of(module, frozen)


@pytest.mark.slow
def test_averages_of_weights_are_those_of_ddp(ranks):
    for apart, gathered in ranks(2).run(averages_like_ddp):
        assert (apart < 1e-12, set(gathered)) == (True, {1})


class Changing(L.Callback):
    """Has the plan change after steps."""

    def __init__(self, plans):
        self._plans = plans

    def on_train_batch_end(self, fit, module, *_):
        if fit.global_step in self._plans:
            change_plan(module, self._plans[fit.global_step])


def changes_like_ddp():
    """Difference from DDP of a fit whose units become resident, are so no longer, and are again; and gathers."""
    plan, _ = planned(modes="zdp")
    plain = plan_for(made(), "zdp", world_size=dist.get_world_size())
    module = made()
    with Gathers() as gathers:
        _, found = ran(module, plain, callbacks=[Changing({1: plan, 3: plain, 4: plan})])
    _, expected = ran(made())
    # backward comes to the second one alone
    return differs(found, expected), gathers.of(module, ["backbone.0", "layers.1.frozen"])


def test_units_become_resident_and_are_so_no_longer_between_steps(ranks):
    for apart, gathered in ranks(2).run(changes_like_ddp):
        assert (apart < 1e-12, gathered) == (True, [1 + 1 + 1 + 1, 2 + 1 + 2 + 1])


def fits_twice():
    """Difference from DDP of a module that is trained, changed by hand, and trained again; and gathers."""
    plan, frozen = planned()
    states, gathered = [], []
    for is_planned in (True, False):
        module = made()
        for time in range(2):
            with Gathers() as gathers:
                _, state = ran(module, plan if is_planned else None, max_steps=3)
            gathered.append(gathers.of(module, frozen))
            if time == 0:
                with torch.no_grad():
                    module.twice.weight.mul_(0.5)
        states.append(state)
    return differs(*states), gathered[:2]


def test_each_fit_gathers_anew(ranks):
    for apart, gathered in ranks(2).run(fits_twice):
        assert apart < 1e-12
        assert [set(each) for each in gathered] == [{1}, {1}]


def in_low_precision():
    """Tells if losses in bf16 are those of the plan with everything resharded; how far states differ, and gathers."""
    plan, frozen = planned(dtype=torch.float32)
    plain = plan_for(made(dtype=torch.float32), "zdp", world_size=dist.get_world_size())
    module, other = made(dtype=torch.float32), made(dtype=torch.float32)
    with Gathers() as gathers:
        _, found = ran(module, plan, precision="bf16-mixed")
    _, expected = ran(other, plain, precision="bf16-mixed")
    dtypes = {module.get_submodule(name).weight.dtype for name in frozen}
    return module.losses == other.losses, differs(found, expected), gathers.of(module, frozen), dtypes


@pytest.mark.slow
def test_low_precision_is_bit_equal_to_gathering_anew(ranks):
    for is_same, apart, gathered, dtypes in ranks(2).run(in_low_precision):
        assert (is_same, apart, set(gathered), dtypes) == (True, 0.0, {1}, {torch.float32})
