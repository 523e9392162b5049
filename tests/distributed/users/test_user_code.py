"""User code that looks at weights and changes them wherever it may: trained as under DDP."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_osdp import OSDPPrecision, OSDPStrategy
from tests.distributed.support.fits import EVERYTHING, trainer, without_measuring
from tests.distributed.support.user_runs import (
    TOLERANCE,
    Chain,
    check,
    ddp,
    difference,
    differences,
    fitted,
    moved,
    plan_with,
    refusal,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


HOOKS = (
    ("on_fit_start", "on_train_batch_start"),
    ("on_train_start", "on_train_batch_end"),
    ("on_train_epoch_start", "on_before_zero_grad"),
    ("on_train_epoch_end", "on_before_backward"),
    ("on_validation_start", "on_after_backward"),
    ("on_validation_end", "on_before_optimizer_step"),
    ("on_validation_batch_start",),
    ("on_validation_batch_end",),
    ("on_validation_epoch_end",),
)
"""Hooks that run together, far from each other: what is gathered before one is not freed for the other."""
IN_STEP = ("on_before_zero_grad", "on_before_backward")
"""Hooks between forward and backward: autograd lets weights change only behind its back."""
EPOCHS = {
    "max_steps": -1,
    "max_epochs": 2,
    "limit_train_batches": 5,
    "limit_val_batches": 2,
    "val_check_interval": 3,
    "accumulate_grad_batches": 2,
}
"""Validation in the middle of a window, and a window that is shorter."""


def shrink(module, hook):
    with torch.no_grad():
        for parameter in module.parameters():
            (parameter.data if hook in IN_STEP else parameter).mul_(0.9)


def changing(hooks, *, in_callback):
    """Returns what makes a model whose weights shrink in these hooks, and callbacks."""

    def written(hook, is_of_module):
        def run(first, *others, **_):
            shrink(first if is_of_module else others[1], hook)

        return run

    found = {hook: written(hook, not in_callback) for hook in hooks}
    if in_callback:
        return Chain, [type("Changing", (L.Callback,), found)()]
    return type("Changing", (Chain,), found), []


def changed_in_hooks(kinds=("mixed",), sets=HOOKS):
    """Differences from DDP where weights change in hooks, in the module and in a callback by turns."""
    found = {}
    for index, hooks in enumerate(sets):
        make, callbacks = changing(hooks, in_callback=index % 2 == dist.get_world_size() // 2 % 2)
        window = {"plan_options": {"num_micro_batches": 2}, "sync": "last"}
        found["+".join(hooks)] = differences(make, kinds, callbacks=callbacks, **window, **EPOCHS)
    return found


def changed_in_all_hooks():
    """Differences from DDP where weights change in all hooks at once."""
    return changed_in_hooks(("zdp", "dp"), [[hook for hooks in HOOKS for hook in hooks]])


class Skipping(Chain):
    """Chain whose validation leaves out a layer that forward has gathered ahead by then."""

    def __init__(self, optimizer="adamw", *, hook=None):
        super().__init__(optimizer)
        self.hook = hook

    def validation_step(self, batch, batch_idx):
        x = torch.tanh(self.second(torch.tanh(self.first(batch[0].to(self.scale.dtype)))))
        self.log("val_loss", self.last(self.norm(x)).sum(), sync_dist=True)

    def on_validation_batch_end(self, *_):
        if self.hook == "batch":
            shrink(self, "")


class SkippingAndChanging(Skipping):
    """Changes weights between an evaluation and the next training step."""

    def on_validation_end(self):
        shrink(self, "")


class SkippingInTraining(Chain):
    """Leaves out a layer in every second step."""

    is_short = False

    def training_step(self, batch, batch_idx):
        self.is_short = batch_idx % 2 == 1
        return super().training_step(batch, batch_idx)

    def features(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x if self.is_short else torch.tanh(self.third(x))


def left_out_after_it_was_gathered_ahead():
    """Differences from DDP; weights that an all-gather has brought before they changed would be used."""
    options = {"max_steps": 8, "val_check_interval": 2, "limit_val_batches": 2}
    used = {"ddp_options": {"find_unused_parameters": True}}
    return {
        "evaluation": differences(Skipping, **options),
        "changed after": differences(SkippingAndChanging, ("mixed", "zdp", "dp"), **options),
        "changed within": differences(lambda: Skipping(hook="batch"), **options),
        "training": differences(SkippingInTraining, ("mixed", "zdp"), **used, **options),
    }


class Taught(Chain):
    """Chain whose layers learn from a frozen teacher, too."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.teacher = copy.deepcopy(nn.Sequential(self.first, self.second, self.third)).requires_grad_(False)

    def loss(self, batch):
        x = batch[0].to(self.scale.dtype)
        with torch.no_grad():
            told = self.teacher(x)
        return super().loss(batch) + F.mse_loss(self.third(self.second(self.first(x))), told)


class Teaching(Taught):
    """Chain whose teacher is an average of its layers."""

    def on_train_batch_end(self, *_):
        layers = (self.first, self.second, self.third)
        with torch.no_grad():
            for teacher, student in zip(self.teacher, layers, strict=True):
                teacher.weight.lerp_(student.weight, 0.1)
                teacher.bias.mul_(0.9).add_(student.bias, alpha=0.1)


AVERAGES = {
    "lerp": lambda teacher, student: teacher.lerp_(student, 0.1),
    "add": lambda teacher, student: teacher.mul_(0.9).add_(student, alpha=0.1),
    "sub": lambda teacher, student: teacher.sub_(0.1 * (teacher - student)),
    "mul": lambda teacher, student: teacher.mul_(1 + 0.1 * student).mul_(0.9 * student.norm()),
    "copy": lambda teacher, student: teacher.copy_(torch.lerp(teacher, student, 0.1) * 0.9),
    "new value": lambda teacher, student: teacher.copy_(0.9 * teacher + 0.1 * student),
    "new data": lambda teacher, student: setattr(teacher, "data", 0.9 * teacher.data + 0.1 * student.data),
    "foreach lerp": lambda teacher, student: torch._foreach_lerp_([teacher], [student], 0.1),
    "foreach add": lambda teacher, student: torch._foreach_add_([teacher], [student], alpha=0.1),
}
"""Ways to make weights of a teacher from themselves and from those of its student."""


class Assigning(Taught):
    """Sets the data of its weights in hooks: to averages, to what is clipped, and to parts of one vector."""

    def on_train_batch_end(self, *_):
        students = nn.Sequential(self.first, self.second, self.third)
        for teacher, student in zip(self.teacher.parameters(), students.parameters(), strict=True):
            teacher.data = 0.9 * teacher.data + 0.1 * student.data
        for parameter in students.parameters():
            parameter.data = parameter.data.clamp(-0.3, 0.3)

    def on_train_epoch_start(self):
        parameters = [*self.last.parameters(), *self.norm.parameters()]
        vector = torch.cat([whole(parameter).flatten() for parameter in parameters])
        nn.utils.vector_to_parameters(0.9 * vector, parameters)


def whole(parameter):
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


class AssigningWrongly(Chain):
    """Sets the data of a weight to something else than all of it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def on_train_batch_end(self, *_):
        data = self.second.weight.data
        self.second.weight.data = data.to_local() if self.kind == "rows" else data.float()


def assigned():
    """Differences from DDP of weights whose data are set; what is refused."""
    found = differences(Assigning, ("zdp", "dp"), **EPOCHS, plan_options={"num_micro_batches": 2})
    plan = plan_with(Chain, "mixed")
    return found, [
        refusal(lambda kind=kind: fitted(OSDPStrategy(plan=plan), AssigningWrongly(kind))) for kind in ("rows", "dtype")
    ]


class TeachingAcross(Teaching):
    """Chain whose teacher is sharded over other ranks than its layers; each step averages them in another way."""

    units = ("teacher.0", "teacher.1", "teacher.2", "first", "second", "third", "norm", "last")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        average = [*AVERAGES.values()][batch_idx]
        layers = (self.first, self.second, self.third)
        with torch.no_grad():
            for teacher, student in zip(self.teacher, layers, strict=True):
                average(teacher.weight, student.weight)
                average(teacher.bias, student.bias)


class Joining(Chain):
    """Makes one vector of all biases, as can be made of those of one mesh."""

    def on_train_batch_start(self, *_):
        torch.cat([parameter.detach() for parameter in self.parameters() if parameter.ndim == 1])


class Comparing(TeachingAcross):
    """Has a term of the loss over weights of two meshes."""

    def loss(self, batch):
        return super().loss(batch) + (self.third.weight - self.teacher[1].weight).square().sum()


def averages_in_nodes():
    """Differences from DDP of teachers that are sharded over other ranks than their students; what is refused."""
    found = differences(TeachingAcross, ("nodes", "node"), max_steps=len(AVERAGES), limit_train_batches=len(AVERAGES))
    refused = []
    for make in (Joining, Comparing):
        plan = plan_with(make, "nodes")
        try:
            fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), make(), max_steps=1)
        except Exception as error:
            refused.append(str(error))
    return found, refused


WRITES = {
    "in place": lambda teacher, student: teacher.mul_(0.9).add_(student, alpha=0.1),
    "by data": lambda teacher, student: teacher.data.mul_(0.9).add_(student.data, alpha=0.1),
    "as data": lambda teacher, student: setattr(teacher, "data", 0.9 * teacher.data + 0.1 * student.data),
}
"""Ways in which people move an average of weights."""


class Moving(Taught):
    """Chain whose step moves the teacher, and shrinks what is trained, in one of these ways."""

    def __init__(self, way):
        super().__init__()
        self.write = WRITES[way]

    def training_step(self, batch, batch_idx):
        students = nn.Sequential(self.first, self.second, self.third)
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), students.parameters(), strict=True):
                self.write(teacher, student)
            for parameter in self.last.parameters():
                self.write(parameter, 0.5 * parameter)
        return super().training_step(batch, batch_idx)


@without_measuring
def moved_in_steps(kinds, ways):
    """Differences from DDP of models whose step writes to weights, planned and under plans; what is refused.

    All ways write the same numbers, so that DDP trains in one of them. ``kinds`` has the kinds of given plans, by way;
    plans are made for modules that write in these ``ways``.
    """
    in_place, windows = partial(Moving, "in place"), {"accumulate_grad_batches": 2, "max_steps": 4}
    in_windows, at_once = fitted(ddp(), in_place(), **windows), fitted(ddp(), in_place(), max_steps=3)
    found = {"windows": {"moved": moved(in_windows[0], in_place)}, "units": {"moved": moved(at_once[0], in_place)}}
    for way in ways:
        strategy = OSDPStrategy(search_space=EVERYTHING, batch_size="keep")
        found["windows"][f"planned, {way}"] = difference(fitted(strategy, Moving(way), **windows), in_windows)
    for way in WRITES:
        for kind in kinds[way]:
            own = fitted(OSDPStrategy(plan=plan_with(in_place, kind)), Moving(way), max_steps=3)
            found["units"][kind, way] = difference(own, at_once)
    plan = plan_with(in_place, "dp", num_micro_batches=2, sync="last")
    found["windows"]["kept"] = difference(fitted(OSDPStrategy(plan=plan), in_place(), **windows), in_windows)
    low = {"dtype": "float32", "precision": "bf16-mixed"}
    refused = [
        refusal(lambda way=way: fitted(OSDPStrategy(search_space=EVERYTHING), Moving(way), **low)) for way in ways
    ]
    return found, refused


def plain(name):
    return name.endswith("bias") or name.startswith("norm")


class Looking(Chain):
    """Chain whose hooks look at shapes and attributes of parameters; weights decay where not told otherwise."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        for name, parameter in self.named_parameters():
            parameter.no_decay = plain(name)
        self.seen = []

    def look(self):
        assert {name: parameter.shape for name, parameter in self.named_parameters()} == self.shapes
        assert all(parameter.no_decay is plain(name) for name, parameter in self.named_parameters())
        self.seen.append(len(self.shapes))

    def on_train_batch_start(self, *_):
        self.look()

    def on_before_backward(self, *_):
        self.look()

    def on_validation_batch_end(self, *_):
        self.look()

    def on_before_optimizer_step(self, optimizer):
        assert all(p.grad.shape == p.shape for p in self.parameters())
        self.look()

    def configure_optimizers(self):
        self.look()
        self.optimized = list(self.parameters())
        groups = [
            {
                "params": [p for p in self.parameters() if p.no_decay is is_plain],
                "weight_decay": 0.0 if is_plain else 0.3,
            }
            for is_plain in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


def looks_and_averages():
    """Differences from DDP of a mean teacher, and of a model that asserts what it sees of its parameters."""
    teaching = differences(Teaching, ("dp", "zdp"), val_check_interval=2, limit_val_batches=1)
    windows = {"plan_options": {"num_micro_batches": 2}, "sync": "last", **EPOCHS}
    return {
        "mean teacher": teaching,
        "mean teacher in windows": differences(Teaching, ("mixed",), **windows),
        "looking": differences(Looking, ("mixed",), **windows),
    }


def stages_of(strategy, order):
    """Losses and weights of what stages leave, on one Trainer or each on one of its own."""
    module, found = Looking().double(), []
    is_ours = isinstance(strategy(), OSDPStrategy)

    def new():
        precision = {"plugins": [OSDPPrecision("64-true")]} if is_ours else {"precision": "64-true"}
        return trainer(strategy(), limit_val_batches=2, **precision)

    fit, loader = new(), module.loader(dist.get_rank(), dist.get_world_size())
    data = DataLoader(module.dataset(), batch_size=8)
    for stage in order:
        if stage == "new":
            fit = new()
        elif stage == "validate":
            found.append(fit.validate(module, data, verbose=False)[0]["val_loss"])
        else:
            fit.fit_loop.epoch_loop.max_steps = fit.global_step + 3
            fit.fit(module, loader, data)
            ours = {id(p) for group in fit.optimizers[0].param_groups for p in group["params"]}
            assert ours == {id(p) for p in module.parameters()}
            assert not is_ours or all(isinstance(p, DTensor) for p in module.parameters())
    state = fit.strategy.lightning_module_state_dict()
    return [*found, *module.losses, *(n for name in sorted(state) for n in state[name].flatten().tolist())]


def stages():
    """Largest difference from DDP of what stages in these orders train, under DP units that stay gathered."""
    plan, found = plan_with(Looking, "dp"), {}
    for order in (
        ("validate", "fit", "validate", "fit"),
        ("fit", "validate", "new", "fit", "new", "validate", "fit"),
        ("validate", "new", "fit"),
    ):
        expected = stages_of(ddp, order)
        own = stages_of(lambda: OSDPStrategy(plan=plan), order)
        is_first = dist.get_rank() == 0
        assert not is_first or len(own) == len(expected)
        found[order] = max(abs(a - b) for a, b in zip(own, expected, strict=is_first))
    return found


@pytest.mark.slow
def test_weights_that_hooks_change_are_those_that_train(ranks):
    check(ranks(2).run(changed_in_hooks)[0])
    check(ranks(2).run(changed_in_all_hooks)[0])


@pytest.mark.slow
def test_weights_that_hooks_change_are_those_that_train_on_four_ranks(ranks):
    check(ranks(4).run(changed_in_hooks, sets=HOOKS[-3:])[0])


@pytest.mark.slow
def test_a_unit_that_is_left_out_after_it_was_gathered_ahead_is_gathered_anew(ranks):
    check(ranks(2).run(left_out_after_it_was_gathered_ahead)[0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_mean_teachers_shapes_and_attributes_of_parameters(ranks, world_size):
    check(ranks(world_size).run(looks_and_averages)[0])


@pytest.mark.parametrize(
    ("kinds", "ways"),
    [
        ({"in place": ["zdp"], "by data": ["dp"], "as data": ["zdp"]}, ["by data"]),
        slow({way: ["zdp", "dp"] for way in WRITES}, [*WRITES]),
    ],
    ids=["few", "all"],
)
def test_weights_that_a_step_writes_to_are_those_that_train(ranks, kinds, ways):
    for found, refused in ranks(2).run(moved_in_steps, kinds=kinds, ways=ways):
        check(found)
        assert len(refused) == len(ways)
        for told in refused:
            assert told.startswith("ConfigurationError: Expected a step to leave parameters as they are that"), told
            assert "Change weights in a hook, such as on_train_batch_start or on_train_batch_end" in told


def test_data_of_weights_may_be_set_in_hooks(ranks):
    for found, (rows, dtype) in ranks(2).run(assigned):
        check({"assigned": found})
        whole = "Expected the data of a parameter to be set to all of it, torch.float64[6, 6]"
        assert rows.startswith(
            f"ConfigurationError: {whole}, got torch.float64[3, 6]. Set it to a result of operations on parameters"
        ), rows
        assert dtype.startswith(f"ConfigurationError: {whole}, got torch.float32[6, 6]. "), dtype


@pytest.mark.slow
def test_optimizers_are_made_of_shards_whatever_ran_before(ranks):
    found = ranks(2).run(stages)[0]
    assert len(found) == 3
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
def test_teachers_may_be_sharded_over_other_ranks_than_their_students(ranks):
    for found, refused in ranks(4).run(averages_in_nodes):
        check({"mean teacher": found})
        assert len(refused) == 2
        for told in refused:
            assert 'OSDPStrategy(search_space=SearchSpace(modes=("ZDP", "hpZ", "DP")))' in told
