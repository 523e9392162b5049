"""Units that the host updates: bit for bit as the device updates them, whatever goes on around the step."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_osdp import OSDPStrategy, SearchSpace, simulate
from lightning_osdp.apply import local
from lightning_osdp.apply.internals import dtensors
from lightning_osdp.apply.updating import updates_ahead
from lightning_osdp.apply.updating.host_updates import HostRows
from lightning_osdp.apply.updating.updates import stepping_on_rows
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.errors import OSDPError
from lightning_osdp.planner.cost import host_bytes
from lightning_osdp.planner.simulation.plan import planned_step
from lightning_osdp.profiler import tensors_in
from lightning_osdp.strategy import osdp
from lightning_osdp.strategy.planning import plan_fit
from tests.distributed.support.by_hand import GAN
from tests.distributed.support.fits import (
    failure,
    fitted,
    hosted,
    largest_difference,
    plan_for,
    profiled_in,
    shared_folder,
    stated_cluster,
    trained,
    trainer,
)
from tests.distributed.support.models import WideMLP, build
from tests.distributed.training.stepping.test_local_step import (
    CLASSES,
    cases_of,
    cut,
    cut_in_nodes,
    differences,
    stepped,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
NAMES = tuple(name for name in CLASSES if name != "Adagrad")


# ---- the arithmetic


def all_begin():
    """Context in which all updates that can begin in backward do, and none is left for the step."""
    return mock.patch.object(
        updates_ahead.UpdatesAhead, "_wait_for_device", lambda ahead: wait([begun.work for begun in ahead._begun])
    )


@contextlib.contextmanager
def partly_on_host(optimizer):
    """Steps of which the host takes two thirds, and half of these in two units that begin ahead."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p for place, p in enumerate(parameters) if place % 3]
    host = HostRows(held, CPU)
    ahead = updates_ahead.UpdatesAhead(host, CPU)
    ahead.begin_fit(is_on=True)
    with all_begin(), stepping_on_rows(optimizer, host, ahead):
        for unit in (held[::4], held[1::4]):
            ahead.begin(unit)
        yield
    assert ahead.num_taken == sum(p.grad is not None for p in (*held[::4], *held[1::4]))


def equals_the_device(names, in_nodes):
    """Returns, by case, differences from steps on the device; the host's states may come later in their order."""
    found, make = {}, cut_in_nodes if in_nodes else cut
    for name in names:
        for how, index in cases_of(name, is_all=False):
            options = {k: 0.05 if how == "fused" and k == "lr" else v for k, v in CLASSES[name][index].items()}
            ours = stepped(make, name, how, options, partly_on_host)
            other = stepped(make, name, how, options, stepping_on_rows)
            different = differences(ours, other)
            found[name, how, index] = [text for text in different if not text.startswith("order of states")]
    return found


@pytest.mark.parametrize(
    ("world_size", "names", "in_nodes"),
    [
        (2, ("SGD", "AdamW", "NAdam", "RMSprop"), False),
        *(slow(number, NAMES, in_nodes) for number, in_nodes in ((2, False), (4, False), (4, True))),
    ],
)
def test_steps_on_the_host_equal_those_on_the_device(ranks, world_size, names, in_nodes):
    for found in ranks(world_size).run(equals_the_device, names=names, in_nodes=in_nodes):
        assert {name for name, *_ in found} == {*names}
        assert [case for case, different in found.items() if different] == []


def around():
    """Returns what a closure, hooks and the device see of a step of which the host takes a part."""
    parameters = [nn.Parameter(cut(torch.ones(6, 2))) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    host, seen = HostRows([parameters[1]], CPU), []

    def note(place):
        values = [float(local(p).mean()) for p in parameters]
        seen.append((place, [round(value, 3) for value in values], len(optimizer.state)))

    def closure():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        note("closure")
        return torch.tensor(3.0)

    optimizer.register_step_pre_hook(lambda *_: note("before"))
    optimizer.register_step_post_hook(lambda *_: note("after"))
    with stepping_on_rows(optimizer, host):
        for _ in range(2):
            assert optimizer.step(closure) == 3.0
    return seen, [float(fields["step"]) for fields in optimizer.state.values()]


def test_closures_and_hooks_see_one_step(ranks):
    for seen, steps in ranks(2).run(around):
        assert seen == [
            ("before", [1.0, 1.0], 0),
            ("closure", [1.0, 1.0], 0),
            ("after", [0.9, 0.9], 2),
            ("before", [0.9, 0.9], 2),
            ("closure", [0.9, 0.9], 2),
            ("after", [0.8, 0.8], 2),
        ]
        assert steps == [2.0, 2.0]


class Own(torch.optim.AdamW):
    """Optimizer that is not exactly torch's."""


def refused():
    """Returns errors of optimizers that the host cannot step, and of a gradient of another layout."""
    parameter = nn.Parameter(cut(torch.ones(4, 2)))
    host = HostRows([parameter], CPU)
    optimizers = [
        Own([parameter]),
        torch.optim.Adagrad([parameter]),
        torch.optim.AdamW([parameter], capturable=True, foreach=False),
        torch.optim.SGD([nn.Parameter(torch.ones(2))], differentiable=True),
        torch.optim.SGD([parameter], lr=0.1),
    ]
    found = [failure(lambda optimizer=optimizer: host.check(optimizer)) for optimizer in optimizers]
    parameter.grad = torch.ones_like(parameter).redistribute(placements=[torch.distributed.tensor.Replicate()])

    def step():
        with stepping_on_rows(optimizers[-1], host):
            optimizers[-1].step()

    return found, failure(step)


def test_optimizers_that_the_host_cannot_step_are_refused(ranks):
    for found, laid_out in ranks(2).run(refused):
        texts = [None if each is None else each[1] for each in found]
        assert texts[3:] == [None, None]  # the fourth has nothing that the host updates
        for text, name in zip(texts, ("Own", "Adagrad", "AdamW"), strict=False):
            assert f"for a plan with states on the host, got {name}. Use such an optimizer as AdamW" in text
        assert laid_out[0] == "ConfigurationError"
        assert "Expected gradients and states with the layout of their parameters" in laid_out[1]


# ---- updates that begin in backward

CHANGES = {
    "nothing": lambda *_: None,
    "the gradient through data": lambda parameter, _: parameter.grad.data.mul_(0.5),
    "the gradient through rows": lambda parameter, _: parameter.grad.to_local().mul_(0.5),
    "the gradient by several at once": lambda parameter, _: torch._foreach_mul_([parameter.grad], 0.5),
    "rows of the gradient": lambda parameter, _: torch._foreach_neg_([local(parameter.grad)]),
    "rows of weights": lambda parameter, _: torch._foreach_mul_([local(parameter)], 0.9),
    "the gradient in place": lambda parameter, _: parameter.grad.clamp_(-0.5, 0.5),
    "the gradient as another": lambda parameter, _: setattr(parameter, "grad", parameter.grad * 2),
    "weights": lambda parameter, _: parameter.mul_(0.9),
    "weights through data": lambda parameter, _: parameter.data.mul_(0.9),
    "an element of rows of the gradient": lambda parameter, _: local(parameter.grad).view(-1)[1:2].mul_(0.5),
    "an element of the gradient unseen": lambda parameter, _: parameter.grad.to_local().data.view(-1)[1:2].mul_(0.5),
    "an element of the gradient through data": lambda parameter, _: parameter.grad.data[1:2].mul_(0.5),
    "an element of rows of weights": lambda parameter, _: local(parameter).view(-1)[1:2].mul_(0.9),
    "options": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.01),
    "options in place": lambda _, optimizer: optimizer.param_groups[0]["lr"].mul_(0.5),
    "states": lambda _, optimizer: [f["exp_avg"].mul_(0.5) for f in optimizer.state.values() if "exp_avg" in f],
    "states by several at once": lambda _, optimizer: [
        torch._foreach_mul_([f["exp_avg_sq"]], 0.5) for f in optimizer.state.values() if "exp_avg_sq" in f
    ],
    "other states": lambda _, optimizer: [f.update(exp_avg=f["exp_avg"] * 1) for f in optimizer.state.values() if f],
    "step counts": lambda _, optimizer: [f["step"].add_(1) for f in optimizer.state.values() if f],
}
"""Changes between backward and an optimizer step."""
ROWS = 1200
"""Rows of weights, so many that every second element of a rank's alone is part of samples."""


def stepped_ahead(change, is_ahead=True, steps=3, changing=10, room_bytes=None, **options):
    """Values and states after steps of which the host takes one parameter, and the number of updates taken ahead.

    Changes are made in the first steps alone.
    """
    parameters = [nn.Parameter(cut(torch.ones(ROWS, 2) * number)) for number in (1, 2)]
    for parameter in parameters:
        dtensors.mark_shard(parameter)
    lr = torch.tensor(0.1) if change == "options in place" else 0.1
    optimizer = torch.optim.AdamW(parameters, lr=lr, **options)
    host = HostRows(parameters[1:], CPU)
    ahead = updates_ahead.UpdatesAhead(host, CPU)
    ahead.begin_fit(is_on=is_ahead)
    ahead.room_bytes = room_bytes

    def closure(name):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.3
        ahead.begin(parameters)
        wait([begun.work for begun in ahead._begun])  # what changes before it is computed is no change
        with torch.no_grad():
            CHANGES[name](parameters[1], optimizer)

    for step in range(steps):
        with stepping_on_rows(optimizer, host, ahead), torch.no_grad():
            optimizer.step(partial(closure, change if step < changing else "nothing"))
    states = [(name, local(value).clone()) for p in parameters for name, value in optimizer.state[p].items()]
    return [local(p).clone() for p in parameters], states, ahead.num_taken


def is_equal(ours, other):
    values = zip(ours[0], other[0], strict=True)
    states = zip(ours[1], other[1], strict=True)
    return all(map(torch.equal, *zip(*values, strict=True))) and all(
        name == its and torch.equal(value, of) for (name, value), (its, of) in states
    )


def taken_ahead():
    """Returns if steps are those without updates ahead, and how many of these they take, by change; and a failure."""
    dtensors.set_values()
    found = {}
    for change in CHANGES:
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}) if change == "nothing" else ({},):
            ours, other = (stepped_ahead(change, is_ahead, **how) for is_ahead in (True, False))
            found.setdefault(change, []).append((is_equal(ours, other), ours[2]))
    found["room"] = [
        stepped_ahead("nothing", room_bytes=room_bytes)[2] for room_bytes in (2 * ROWS * 4 + 4, 2 * ROWS * 4 + 3)
    ]
    clipped = [stepped_ahead("the gradient in place", is_ahead, steps=9, changing=3) for is_ahead in (True, False)]
    with mock.patch.object(updates_ahead, "arithmetic", side_effect=ArithmeticError("no update")):
        try:
            stepped_ahead("nothing")
            failed = None
        except ArithmeticError as error:
            failed = str(error)
    return found, (is_equal(*clipped), clipped[0][2]), failed


def test_a_step_takes_no_update_of_what_has_changed_since_backward(ranks):
    for found, clipped, failed in ranks(2).run(taken_ahead):
        assert found.pop("nothing") == [(True, 3), (True, 3), (True, 3)]
        assert found.pop("room") == [3, 1]  # for two states of 6 elements and a count, where there are any
        for name in ("states", "states by several at once", "other states", "step counts"):
            assert found.pop(name) == [(True, 1)]  # a first step has no states that could be changed
        assert found.pop("options") == [(True, 1)]  # later steps change them to what they are
        assert all(each == [(True, 0)] for each in found.values()), found
        # updates begin in steps 1, 3, 6, which leave out 1, 2 and then none, and in all later ones
        assert clipped == (True, 4)
        assert failed == "no update"


def with_and_without(take_step):
    """Returns if three steps of two weights on the host are those without updates ahead, and how many are taken from
    backward; ``take_step`` begins updates and steps.
    """
    found = []
    for is_ahead in (True, False):
        parameters = [nn.Parameter(cut(torch.ones(6, 2) * number)) for number in (1, 2)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        host = HostRows(parameters, CPU)
        ahead = updates_ahead.UpdatesAhead(host, CPU)
        ahead.begin_fit(is_on=is_ahead)
        for _ in range(3):
            with stepping_on_rows(optimizer, host, ahead):
                for parameter in parameters:
                    parameter.grad = parameter.detach() * 0.3
                take_step(ahead, parameters, optimizer)
        states = [(name, local(value)) for p in parameters for name, value in optimizer.state[p].items()]
        found.append(([local(p) for p in parameters], states, ahead.num_taken))
    return is_equal(*found), found[0][2]


def late():
    """`with_and_without` where the second of two updates comes too late."""
    update = updates_ahead.UpdatesAhead._update

    def held_up(ahead, *args, **kwargs):
        deadline_s = time.monotonic() + 60
        while not any(begun.work.cancelled() for begun in ahead._begun) and time.monotonic() < deadline_s:
            time.sleep(1e-3)
        return update(ahead, *args, **kwargs)

    def take_step(ahead, parameters, optimizer):
        for parameter in parameters:
            ahead.begin([parameter])
            while ahead._begun and not ahead._begun[0].work.running():
                time.sleep(1e-3)
        optimizer.step()

    with mock.patch.object(updates_ahead.UpdatesAhead, "_update", held_up):
        return with_and_without(take_step)


def unused():
    """`with_and_without` where one of two weights of a unit turns out to have no gradient."""

    def take_step(ahead, parameters, optimizer):
        ahead.begin(parameters)
        parameters[1].grad = None
        optimizer.step()

    with all_begin():
        return with_and_without(take_step)


def test_weights_that_no_rank_has_used_keep_no_others_waiting(ranks):
    assert ranks(2).run(unused) == [(True, 3)] * 2


def test_updates_that_have_not_begun_when_backward_is_over_are_those_of_the_step(ranks):
    assert ranks(2).run(late) == [(True, 3)] * 2


FAILING = """
import os, threading
import lightning as L
from lightning_osdp import OSDPStrategy
from lightning_osdp.apply.updating import updates_ahead
from tests.distributed.support.models import WideMLP

rank, arithmetic = int(os.environ.get("LOCAL_RANK", 0)), updates_ahead.arithmetic

def failing(optimizer):
    if rank == 1 and threading.current_thread().name.startswith("osdp-updates"):
        raise ArithmeticError("no update")
    return arithmetic(optimizer)

updates_ahead.arithmetic, module = failing, WideMLP("adamw")
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 3}
trainer = L.Trainer(strategy=OSDPStrategy(cpu_offload=True), accelerator="cpu", devices=2, **options)
trainer.fit(module, module.loader(rank, 2))
"""
"""Fit of two processes, in one of which the thread fails."""


@pytest.mark.slow
def test_an_error_in_the_thread_ends_all_ranks_with_its_text(tmp_path):
    script, root = tmp_path / "failing.py", Path(__file__).parents[4]
    script.write_text(FAILING)
    environment = {**os.environ, "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"}
    command, options = [sys.executable, script], {"text": True, "capture_output": True, "timeout": 120}
    ended = subprocess.run(command, check=False, env=environment, cwd=tmp_path, **options)
    assert ended.returncode != 0
    assert "Rank 1 failed: ArithmeticError: no update" in ended.stderr


# ---- fits


def fits(name, optimizer, dtype, number=2, shard="device", num_micro_batches=1, clip=None, modes="mixed", **options):
    """Differences of weights and losses under a plan with states on the host from one without, and from DDP."""
    world_size = dist.get_world_size()
    options |= {"accumulate_grad_batches": num_micro_batches, "gradient_clip_val": clip}
    plan = plan_for(build(name, optimizer, dtype), modes, world_size=world_size, num_micro_batches=num_micro_batches)
    ddp, _, _ = trained(DDPStrategy(process_group_backend="gloo"), name, optimizer, dtype, **options)
    device, losses, _ = trained(OSDPStrategy(plan=plan), name, optimizer, dtype, **options)
    own = hosted(plan, number, shard)
    with all_begin():
        ours, own_losses, fit = trained(OSDPStrategy(plan=own), name, optimizer, dtype, **options)
    start = build(name, optimizer, dtype).state_dict()
    host = fit.strategy._sharded.host
    held = [host.holds(p) for group in fit.optimizers[0].param_groups for p in group["params"]]
    return {
        "held": (sum(held), len(held)),
        "kept": sum(host.keeps(p) for group in fit.optimizers[0].param_groups for p in group["params"]),
        "ahead": fit.strategy._sharded._ahead.num_taken,
        "scalars": sum(
            host.holds(p) for group in fit.optimizers[0].param_groups for p in group["params"] if not p.dim()
        ),
        "losses": own_losses == losses,
        "device": largest_difference(ours, device) if ours else 0.0,
        "ddp": largest_difference(ours, ddp) if ours else 0.0,
        "moved": largest_difference(ours, {key: start[key] for key in ours}) if ours else 1.0,
    }


IN_BF16 = {"dtype": "float32", "precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"optimizer": "adamw", "number": 1}),
        (2, {"optimizer": "adamw"}),
        slow(2, {"optimizer": "adamw", "number": 1}),
        (2, {"optimizer": "sgd", "num_micro_batches": 3, "clip": 1e3}),  # which nothing comes to
        (2, {"optimizer": "adamw", "clip": 0.05}),
        (1, {"optimizer": "adamw", "number": 1, "shard": "host", "num_micro_batches": 2, "clip": 0.05}),
        (2, {"optimizer": "adamw", "shard": "host", "num_micro_batches": 2, **IN_BF16}),
        slow(1, {"optimizer": "adamw", "number": 1, "shard": "host", **IN_BF16}),
        slow(2, {"optimizer": "adamw", "shard": "host", **IN_BF16}),
        slow(2, {"optimizer": "adamw", "shard": "host", "num_micro_batches": 2}),
        slow(1, {"optimizer": "adamw", "number": 1, "shard": "host"}),
        slow(2, {"optimizer": "adamw", "number": 1, "shard": "host", "modes": "zdp", "clip": 0.05}),
        slow(2, {"optimizer": "sgd", "name": "tied_gpt", "number": 1, "shard": "host"}),
        slow(4, {"optimizer": "adamw", "shard": "host", "num_micro_batches": 3}),
        slow(4, {"optimizer": "adamw", "num_micro_batches": 2}),
        slow(2, {"optimizer": "adamw", "name": "tied_gpt", "number": 1}),
        slow(4, {"optimizer": "sgd", "name": "gpt", "clip": 0.05}),
    ],
)
def test_five_steps_equal_those_with_states_on_the_device(ranks, world_size, options):
    given = {"name": "odd_mlp", "dtype": "float64", **options}
    for found in ranks(world_size).run(fits, **given):
        held, number = found["held"]
        assert 0 < held <= number
        assert found["kept"] == (held if given.get("shard") else 0)
        assert held == number or given.get("number") != 1
        # in five steps; gradients of scalars are rank 0's
        all_ahead = 5 * (held - found["scalars"])
        assert found["ahead"] < all_ahead if given.get("clip") == 0.05 else found["ahead"] == all_ahead
        assert found["losses"]
        assert found["device"] == 0.0
        of_ddp = 5e-2 if "precision" in given else 1e-7 if given.get("clip") else 1e-9  # torch adds 1e-6 to the norm
        assert found["ddp"] < of_ddp
        assert found["moved"] > 1e-4


def scaled(optimizer, shard):
    """Compares steps in float16 with a gradient scaler, with states on the host and without, and what is said."""
    found, plan = [], plan_for(build("wide_mlp", optimizer), "mixed", world_size=dist.get_world_size())
    for each in (plan, hosted(plan, shard=shard)):
        module = build("wide_mlp", optimizer)
        with mock.patch.object(osdp, "rank_zero_info") as tell:
            fit = fitted(OSDPStrategy(plan=each), module, precision="16-mixed", max_steps=6)
        told = [text for ((text,), _) in tell.call_args_list if "the host updates" in text]
        found.append((fit.strategy.whole_state_dict(on_all_ranks=True), fit.precision_plugin.scaler.get_scale(), told))
    (device, scale, told), (ours, own_scale, own_told) = found
    num_ahead = fit.strategy._sharded._ahead.num_taken
    return largest_difference(ours, device), scale == own_scale, num_ahead, told, own_told


@pytest.mark.parametrize("shard", ["device", slow("host")])
def test_a_gradient_scaler_sees_the_same_step(ranks, shard):
    text = (
        "OSDP: the host updates in the optimizer's step alone, not beside backward: the precision '16-mixed' may change"
        " gradients."
    )
    assert ranks(2).run(scaled, optimizer="adamw", shard=shard) == [(0.0, True, 0, [], [text])] * 2


def by_hand():
    """Weights after manual optimization by two optimizers, with states on the host and without."""

    def fit_with(strategy):
        module = GAN()
        fit = fitted(strategy, module)
        return fit.strategy.whole_state_dict(on_all_ranks=True), fit.strategy

    _, searched = fit_with(OSDPStrategy(search_space=SearchSpace(min_unit_bytes=0)))
    plan = searched.plan
    device, _ = fit_with(OSDPStrategy(plan=plan))
    ours, strategy = fit_with(OSDPStrategy(plan=hosted(plan)))
    held = [strategy._sharded.host.holds(parameter) for parameter in strategy.lightning_module.parameters()]
    return largest_difference(ours, device), sum(held) in range(1, len(held))


@pytest.mark.slow
def test_two_optimizers_by_hand_take_the_same_steps(ranks):
    assert ranks(2).run(by_hand) == [(0.0, True)] * 2


# ---- checkpoints


def resumed(kind, shard):
    """Differences from a run on the device that is resumed likewise, where places change after three of five steps."""
    world_size, folder = dist.get_world_size(), shared_folder()
    plan = plan_for(build("odd_mlp", "adamw"), "mixed", world_size=world_size)
    plans = {"device": plan, "host": hosted(plan, shard=shard)}

    def fit(place, max_steps, ckpt_path=None):
        module = build("odd_mlp", "adamw")
        strategy = OSDPStrategy(plan=plans[place], batch_size="keep", state_dict_type=kind)
        ran = trainer(strategy, max_steps=max_steps)
        ran.fit(module, module.loader(dist.get_rank(), world_size), ckpt_path=ckpt_path)
        return ran

    ends = {}
    for before, after in (("device", "device"), ("device", "host"), ("host", "device"), ("host", "host")):
        name = f"{before}-{after}"
        fit(before, 3).save_checkpoint(folder / name)
        ran = fit(after, 5, ckpt_path=folder / name)
        ends[name] = ran.strategy.whole_state_dict(on_all_ranks=True)
        assert ran.global_step == 5
    expected = ends.pop("device-device")
    return {name: largest_difference(end, expected) for name, end in ends.items()}


@pytest.mark.parametrize(
    ("kind", "shard"), [("full", "device"), slow("sharded", "device"), slow("full", "host"), ("sharded", "host")]
)
def test_checkpoints_go_from_one_place_to_the_other(ranks, kind, shard):
    for found in ranks(2).run(resumed, kind=kind, shard=shard):
        assert found == {"device-host": 0.0, "host-device": 0.0, "host-host": 0.0}


# ---- memory


def predicted_and_counted(name, optimizer, num_micro_batches, shard, precision="32-true"):
    """Peaks that were predicted and counted, other tensors, and the phase, without and with states on the host; and the
    host's memory, predicted and counted.
    """
    module, world_size = build(name, optimizer), dist.get_world_size()
    space = SearchSpace(min_unit_bytes=1024, share_units=False)
    plan = plan_for(module, "zdp", world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    profile = profiled_in(precision, module)
    profile = dataclasses.replace(profile, optimizer=dataclasses.replace(profile.optimizer, host_s_per_element=2e-9))
    found = []
    for each in (plan, hosted(plan, 1, shard)):
        predicted = simulate(each, profile, stated_cluster(world_size)).peak
        options = {"accumulate_grad_batches": num_micro_batches, "precision": precision}
        fit = fitted(OSDPStrategy(plan=each), build(name, optimizer), **options)
        (check,) = (callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
        measured = check.measured
        found.append((predicted.peak_bytes, measured.peak_bytes, measured.other_bytes, predicted.phase))
    rows = fit.strategy._sharded.host
    there, ahead = (
        {
            storage.data_ptr(): storage.nbytes()
            for storage in (local(t).untyped_storage() for t in tensors_in(of) if t.dim())
        }
        for of in ([*rows.tensors(fit.optimizers)], [*rows.spare.values()])
    )
    counted = sum(there.values()) - sum(ahead.values()) - rows.bytes_beside(())
    return found, host_bytes(*planned_step(each, profile, stated_cluster(world_size))), counted


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "shard", "precision"),
    [
        (1, 1, "device", "32-true"),
        (2, 1, "device", "32-true"),
        (1, 2, "host", "bf16-mixed"),
        (2, 1, "host", "bf16-mixed"),
        *(slow(*each, "host", "32-true") for each in ((1, 1), (1, 2), (2, 1), (2, 3), (4, 1))),
        *(slow(*each, "device", "32-true") for each in ((2, 3), (4, 1))),
        slow(1, 1, "host", "bf16-mixed"),
        slow(2, 2, "host", "bf16-mixed"),
    ],
)
def test_the_peak_is_without_states_on_the_host(ranks, world_size, num_micro_batches, shard, precision):
    given = {"optimizer": "adamw", "num_micro_batches": num_micro_batches, "shard": shard, "precision": precision}
    found, predicted, there = ranks(world_size).run(predicted_and_counted, name="wide_mlp", **given)[0]
    assert there == predicted
    (device, counted, others, _), (ours, own_counted, own_others, _) = found
    assert device == pytest.approx(counted, rel=2e-3)
    assert ours == pytest.approx(own_counted, rel=2e-3)
    parameter_bytes = sum(p.nbytes for p in WideMLP().parameters())
    assert device - ours >= 2 * parameter_bytes / world_size * 0.99  # two states of each parameter
    assert own_others <= others + 1024  # a number or two for each value that Lightning logs


# ---- planned


def planned(share):
    """Peak, limit and parts of a fit whose plan may have states on the host, under a share of what it needs else."""
    space = SearchSpace(min_unit_bytes=1024, slices=(1,))
    copying = dataclasses.replace(stated_cluster(dist.get_world_size()), host_copy_s_per_byte=1e-9)

    def fit_with(states=("device",), memory_limit=None, max_steps=5):
        strategy = OSDPStrategy(memory_limit=memory_limit, search_space=dataclasses.replace(space, states=states))
        module, fit = WideMLP("adamw"), trainer(strategy, max_steps=max_steps)
        with mock.patch.object(plan_fit, "measure_cluster", return_value=copying):
            fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        return strategy, fit

    first, _ = fit_with(max_steps=1)
    limit_bytes = int(share * first.plan.all_zdp_peak_bytes)
    refused = failure(lambda: fit_with(memory_limit=limit_bytes))
    strategy, fit = fit_with(states=("device", "host"), memory_limit=limit_bytes)
    (check,) = (callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    plan = strategy.plan
    places = [{each["states"] for each in unit.treatments} for unit in plan.units if unit.gradient_bytes]
    return refused, limit_bytes, plan.peak_bytes, check.measured.peak_bytes, places, plan.notes


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_a_model_that_does_not_fit_on_the_device_is_planned_with_states_on_the_host(ranks, world_size):
    refused, limit_bytes, peak_bytes, counted, places, notes = ranks(world_size).run(planned, share=0.8)[0]
    assert refused[0] == "InfeasibleError"
    assert "SearchSpace(states=('device', 'host'))" in refused[1]
    assert counted <= limit_bytes * 1.002
    assert peak_bytes <= limit_bytes
    assert {"host"} in places
    assert {"device"} in places
    assert any("the host updates" in note for note in notes)


def custom():
    """Error, and notes, of fits with an optimizer that the host cannot step."""

    class Module(WideMLP):
        def configure_optimizers(self):
            return Own(self.parameters(), lr=1e-2)

    plan = plan_for(WideMLP("adamw"), "mixed", world_size=dist.get_world_size())
    try:
        fitted(OSDPStrategy(plan=hosted(plan)), Module())
        told = None
    except OSDPError as error:
        told = str(error)
    refused = failure(lambda: fitted(OSDPStrategy(cpu_offload=True), Module()))
    offloaded = fitted(OSDPStrategy(cpu_offload=True), WideMLP("adamw"), max_steps=2)
    host, parameters = offloaded.strategy._sharded.host, [*offloaded.strategy.lightning_module.parameters()]
    held = all(map(host.holds, parameters)), offloaded.strategy.plan.host_bytes
    space = SearchSpace(min_unit_bytes=1024, states=("device", "host"))
    notes = [
        fitted(OSDPStrategy(search_space=space), module, max_steps=1, callbacks=callbacks).strategy.plan.notes
        for module, callbacks in ((Module(), []), (WideMLP("adamw"), [EMAWeightAveraging()]))
    ]
    return told, refused, held, *notes


@pytest.mark.slow
def test_optimizers_that_the_host_cannot_step_stay_on_the_device(ranks):
    parameter_bytes = sum(p.nbytes for p in WideMLP().parameters())
    for told, refused, held, notes, averaged in ranks(2).run(custom):
        assert refused[0] == "ConfigurationError"
        assert "Expected states that can all be on the host, for cpu_offload=True" in refused[1]
        assert held == (True, pytest.approx(4 * parameter_bytes / 2, rel=0.01))
        assert "for a plan with states on the host, got Own." in told
        assert any(
            "all states of optimizers stay on the device: on the host those of torch.optim" in each for each in notes
        )
        assert any("stay on the device, where the average of weights is" in note for note in averaged)
