import threading
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import optimizer
from lightning_osdp.profiler.optimizer import fit_step, front, profile_optimizers, replica_of

CPU = torch.device("cpu")
WEIGHT, BIAS = 4 * 48, 4 * 8
"""Bytes of the float32 parameters of `model`'s first layer."""


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def profiled(*make, module=None):
    module = module or model()
    profile, optimized = profile_optimizers(module, lambda m: [one(m) for one in make], CPU)
    return [optimized[p].state_bytes if p in optimized else None for p in module.parameters()], profile


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (AdamW, 2),
        (lambda p: AdamW(p, amsgrad=True), 3),
        (lambda p: AdamW(p, fused=True), 2),
        (lambda p: AdamW(p, foreach=True), 2),
        (lambda p: SGD(p, lr=0.1), 0),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 1),
        (Adagrad, 1),
        (RMSprop, 1),
        (lambda p: RMSprop(p, momentum=0.9, centered=True), 3),
        (torch.optim.NAdam, 2),
        (torch.optim.Adadelta, 2),
        (torch.optim.Rprop, 2),
        (torch.optim.ASGD, 1),
    ],
)
def test_state_bytes_are_those_of_as_many_copies_of_the_parameter(make, states):
    found, profile = profiled(lambda m: make(m.parameters()))
    assert found[:2] == [states * WEIGHT, states * BIAS]
    assert profile.fixed_s > 0


@pytest.mark.parametrize(
    ("make", "can"),
    [
        (AdamW, True),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), True),
        (Adagrad, False),
        (Adafactor, False),
    ],
)
def test_updates_on_the_host_are_profiled_where_it_can_make_them(make, can):
    module = model()

    def found(**options):
        return profile_optimizers(module, lambda m: [make(m.parameters())], CPU, **options)[0]

    assert found().host_s_per_element is None
    profile = found(on_host=True)
    assert profile.host_s_per_element == (profile.s_per_element if can else None)
    rates = DeviceRates(flops_per_s={"float32": 1e9}, bytes_per_s=1e9)
    assert found(on_host=True, rates=rates).host_s_per_element is None  # they are of no host


def test_seconds_on_a_host_that_is_not_there_are_those_of_its_bytes():
    rates = DeviceRates(flops_per_s={"float32": 1e15}, bytes_per_s=1e12, is_cuda=True, host_bytes_per_s=1e9)
    for make, num_bytes in ((AdamW, 28), (lambda p: SGD(p, lr=0.1), 12), (Adagrad, None)):
        found, _ = profile_optimizers(
            nn.Linear(256, 256), lambda m, make=make: [make(m.parameters())], CPU, on_host=True, rates=rates
        )
        # it reads parameters, gradients and states, and writes all but gradients
        seconds = found.host_s_per_element
        assert seconds == (None if num_bytes is None else pytest.approx(num_bytes / 1e9, rel=0.01))
        assert num_bytes is None or seconds > found.s_per_element


def test_the_host_of_a_gpu_steps_fused_where_the_user_leaves_that_to_torch(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(4, 2, device="meta"))]
    made = [AdamW(parameters), AdamW(parameters, foreach=False)]
    seen = []
    monkeypatch.setattr(optimizer, "fastest_s", lambda step, *_, **__: seen.append(step.__self__.optimizer) or 1.0)
    optimizer._host_s_per_element(made, None)
    assert [each.param_groups[0]["fused"] for each in seen] == [True, True, None, None]
    assert [each.param_groups[0]["fused"] for each in made] == [None, None]


class Averaging(Optimizer):
    """Steps of another optimizer, and an average of its own after some; does not call torch's constructor."""

    def __init__(self, optimizer):
        self.optimizer, self.num_steps = optimizer, 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, defaultdict(dict)

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.num_steps += 1
        if self.num_steps == 5:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                self.state[parameter]["average"] = parameter.detach().clone()


def test_the_state_of_an_optimizer_that_wraps_another_is_that_of_both():
    found, profile = profiled(lambda m: Averaging(AdamW(m.parameters())))
    assert found[:2] == [3 * WEIGHT, 3 * BIAS]
    assert profile.temporaries
    assert not hasattr(Averaging.step, "hooked")  # it would look for hooks, which this one has not made


def test_the_state_of_a_scalar_is_that_of_one_element():
    module = nn.ParameterList([torch.tensor(1.0), torch.ones(3)])
    found, profile = profiled(lambda m: AdamW(m.parameters()), module=module)
    assert found == [2 * 4, 2 * 12]
    assert profile.temporaries == profiled(lambda m: AdamW(m.parameters()))[1].temporaries


def test_an_optimizer_of_matrices_alone():
    found, _ = profiled(lambda m: torch.optim.Muon(m.parameters()), module=nn.Linear(6, 8, bias=False))
    assert found == [WEIGHT]


@pytest.mark.parametrize("rows", [8, 9000])  # all of them, and a sample
def test_state_of_rows_and_of_columns_is_no_state_of_elements(rows):
    found, _ = profiled(lambda m: Adafactor(m.parameters()), module=nn.Linear(600, rows, bias=False))
    assert found == [4 * (rows + 600)]


def test_state_is_scaled_up_from_a_sample_of_large_parameters():
    found, _ = profiled(
        lambda m: AdamW(m.parameters()), module=nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 7))
    )
    assert found == [2 * 4 * n for n in (9_000_000, 3000, 21_000, 7)]


def test_state_has_the_dtype_that_the_optimizer_gives_it():
    found, _ = profiled(lambda m: AdamW(m.parameters()), module=nn.Linear(6, 8).to(torch.bfloat16))
    assert found == [2 * 2 * 48, 2 * 2 * 8]


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_train_shards_are_refused_before_they_are_timed(make):
    with pytest.raises(ConfigurationError, match=f"got {make.__name__}"):
        profiled(lambda m: make(m.parameters()))


def test_frozen_parameters_have_no_state():
    module = model()
    module[0].requires_grad_(False)
    found, _ = profiled(lambda m: AdamW(m.parameters()), module=module)
    assert found == [0, 0, 2 * 4 * 16, 2 * 4 * 2]


def test_only_frozen_parameters_take_no_time():
    found, profile = profiled(lambda m: AdamW(m[0].parameters()), module=model().requires_grad_(False))
    assert found == [0, 0, None, None]
    assert profile == OptimizerProfile()


def test_several_optimizers_and_groups():
    def first(m):
        return AdamW([{"params": [m[0].weight], "weight_decay": 0.1}, {"params": [m[0].bias], "amsgrad": True}])

    found, profile = profiled(first, lambda m: SGD(m[1].parameters(), lr=0.1))
    assert found == [2 * WEIGHT, 3 * BIAS, 0, 0]
    assert profile.fixed_s > 0


def test_groups_may_be_made_from_shapes_and_names():
    def make(m):
        decayed = [p for name, p in m.named_parameters() if p.dim() > 1 and name.endswith("weight")]
        return SGD([{"params": decayed, "momentum": 0.9}], lr=0.1)

    assert profiled(make)[0] == [WEIGHT, None, 4 * 16, None]


def test_groups_may_be_made_from_what_is_set_on_parameters():
    model = nn.Linear(4, 4)
    model.weight.no_decay, model.bias.no_decay = False, True

    def make(m):
        return [SGD([p for p in m.parameters() if p.no_decay], lr=0.1, momentum=0.9)]

    _, optimized = profile_optimizers(model, make, torch.device("cpu"))
    assert [parameter is model.bias for parameter in optimized] == [True]


def test_a_scheduler_on_the_optimizer_does_no_harm():
    made = []

    def make(m):
        made.append(AdamW(m.parameters()))
        made.append(StepLR(made[0], 1))
        return made[0]

    assert profiled(make)[0][:2] == [2 * WEIGHT, 2 * BIAS]
    assert not made[0].state  # the step was the sample's, not the original's


class WithAttributes(Optimizer):
    """Optimizer as people write it: options as attributes, values read with item(), which meta tensors do not have."""

    def __init__(self, params, rate):
        super().__init__(params, {})
        self.rate = rate
        self.everything = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        for p in self.everything:
            if p.grad is not None and p.grad.abs().sum().item() < 1:
                self.state[p].setdefault("history", [torch.zeros_like(p), torch.zeros_like(p)])
                p.data.add_(p.grad, alpha=-self.rate)


def test_an_optimizer_of_ones_own():
    assert profiled(lambda m: WithAttributes(m.parameters(), 0.1))[0][:2] == [2 * WEIGHT, 2 * BIAS]


class Clearing(SGD):
    """Clears gradients, and needs those of its closure."""

    def step(self, closure=None):
        torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]])
        self.zero_grad()
        closure()
        torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]])
        super().step()
        self.zero_grad()


def test_an_optimizer_that_needs_gradients_in_every_step_and_of_its_closure():
    states, profile = profiled(lambda m: Clearing(m.parameters(), lr=0.1, momentum=0.9))
    assert states[:2] == [WEIGHT, BIAS]
    assert profile.fixed_s > 0


class Broken(SGD):
    def step(self, closure=None):
        raise NotImplementedError("no step today")


def test_an_optimizer_that_cannot_step_is_refused():
    text = (
        r"^Expected Broken to take a step on zero gradients of parameters with other numbers of rows, as shards"
        r" have, so that its state can be measured, but it failed: NotImplementedError\('no step today'\)\. Pass plan="
        r" to skip profiling\.$"
    )
    with pytest.raises(ProfileError, match=text):
        profiled(lambda m: Broken(m.parameters(), lr=0.1))


def test_a_module_that_cannot_be_copied_is_refused():
    module = model()
    module.lock = threading.Lock()
    text = (
        r"^Expected Sequential to be copyable, so that configure_optimizers can be run on a copy, but copy\.deepcopy"
        r" failed: TypeError\(.*Keep what cannot be copied \(locks, files, sockets\) out of the module"
    )
    with pytest.raises(ProfileError, match=text):
        profiled(lambda m: SGD(m.parameters(), lr=0.1), module=module)


def test_hooks_of_forward_that_cannot_be_copied_stay_with_the_module():
    module, lock = model(), threading.Lock()
    module[0].register_forward_pre_hook(partial(lambda *_: None, lock))
    module[0].register_forward_hook(partial(lambda *_, **__: None, lock), with_kwargs=True)
    copies = []
    profiled(lambda m: copies.append(m) or SGD(m.parameters(), lr=0.1), module=module)
    hooks = [[len(m[0]._forward_pre_hooks), len(m[0]._forward_hooks_with_kwargs)] for m in (module, *copies)]
    assert hooks == [[1, 1], [0, 0]]


def test_a_module_that_holds_results_of_earlier_steps_is_copied():
    module = model()
    module.outputs = [module(torch.ones(1, 6))]
    assert profiled(lambda m: AdamW(m.parameters()), module=module)[0][0] == 2 * WEIGHT


def test_a_replica_has_no_values_and_shares_what_takes_memory():
    module = model()
    module[1].weight = module[0].weight
    module.register_buffer("scale", torch.ones(3))
    module.mask, module.table = torch.ones(5), np.ones(5)
    module.data = TensorDataset(torch.ones(5))
    module.loader = DataLoader(module.data)
    module.names = ["a"]
    replica = replica_of(module)
    assert all(tensor.is_meta for tensor in (*replica.parameters(), *replica.buffers()))
    assert replica[1].weight is replica[0].weight
    assert replica[0] is not module[0]
    assert replica.names is not module.names
    for name in ("mask", "table", "data", "loader"):
        assert getattr(replica, name) is getattr(module, name)
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_the_users_module_is_untouched():
    module = model()
    before = [(p, p.detach().clone()) for p in module.parameters()]
    seen = []
    profile_optimizers(module, lambda m: seen.append(m) or [AdamW(m.parameters(), lr=1.0)], CPU)
    for (parameter, value), now in zip(before, module.parameters(), strict=True):
        assert now is parameter
        assert torch.equal(now, value)
        assert now.grad is None
    assert seen[0] is not module
    assert all(p.is_meta for p in seen[0].parameters())


def test_ties_stay_ties_in_the_copy():
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    module[1].weight = module[0].weight
    assert profiled(lambda m: AdamW(m.parameters()), module=module)[0] == [2 * 4 * 36]


def test_every_parameter_has_a_group_and_a_place_in_it():
    module = model()

    def first(m):
        return AdamW([{"params": [m[1].bias]}, {"params": [m[0].bias, m[0].weight]}])

    _, optimized = profile_optimizers(module, lambda m: [first(m), SGD([m[1].weight], lr=0.1)], CPU)
    places = [(optimized[p].group, optimized[p].place) for p in module.parameters()]
    assert places == [(1, 1), (1, 0), (2, 0), (0, 0)]


@pytest.mark.parametrize(
    ("make", "temporaries"),
    [
        (lambda p: SGD(p, lr=0.1), ()),  # p.add_(grad, alpha=-lr)
        (lambda p: SGD(p, lr=0.1, momentum=0.9), ()),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.1), ((0, 1),)),  # grad + decay * p, freed before the next turn
        (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True), ((0, 1),)),
        (lambda p: SGD(p, lr=0.1, maximize=True), ((1, 1),)),  # -grad, until the next one takes its name
        (lambda p: AdamW(p, fused=True), ()),
        (AdamW, ((1, 2),)),  # sqrt(v), and the same divided by the bias correction, which the next turn finds alive
        (lambda p: AdamW(p, amsgrad=True), ((1, 2),)),
        (RMSprop, ((1, 1),)),
        (Adagrad, ((1, 1),)),
        (torch.optim.RAdam, ((0, 5), (1, 1))),  # from its sixth step on
    ],
)
def test_temporaries_by_turn(make, temporaries):
    profile = profiled(lambda m: make(m.parameters()))[1]
    assert profile.temporaries == temporaries
    assert not profile.is_foreach


def test_nothing_is_left_from_another_group():
    def alone(m):
        return AdamW([{"params": [parameter]} for parameter in m.parameters()])

    assert profiled(alone)[1].temporaries == ((0, 2),)


def test_temporaries_of_several_groups_and_optimizers_are_those_that_no_other_is_above():
    def two(m):
        return [{"params": m[0].parameters(), "weight_decay": 0.1}, {"params": m[1].parameters(), "maximize": True}]

    assert profiled(lambda m: SGD(two(m), lr=0.1))[1].temporaries == ((1, 1),)
    adam, sgd = lambda m: AdamW(m[0].parameters()), lambda m: SGD(m[1].parameters(), lr=0.1, maximize=True)
    assert profiled(adam, sgd)[1].temporaries == ((1, 2),)
    assert front({(0.0, 0.0), (2.0, 0.0), (1.0, 0.0), (0.0, 1.0)}) == ((0.0, 1.0), (2.0, 0.0))


def test_temporaries_in_half_precision_are_multiples_of_the_parameter_too():
    assert profiled(lambda m: AdamW(m.parameters()), module=model().bfloat16())[1].temporaries == ((1, 2),)


@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        (lambda p: AdamW(p, foreach=True), 1.0),
        (lambda p: SGD(p, lr=0.1, foreach=True), 0.0),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.1, foreach=True), 1.0),
    ],
)
def test_temporaries_of_foreach_are_in_proportion_to_the_group(make, ratio):
    profile = profiled(lambda m: make(m.parameters()))[1]
    assert profile.is_foreach
    assert profile.foreach_temporaries == pytest.approx(ratio, abs=1e-3)
    assert profile.temporaries == ()


def test_the_time_sample_is_no_larger_for_many_groups(monkeypatch):
    monkeypatch.setitem(optimizer._SAMPLE_ELEMENTS, "cpu", 100)
    sizes = []

    class Spy(SGD):
        def step(self, closure=None):
            sizes.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    layers = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(4)))
    profiled(lambda m: Spy([{"params": layer.parameters()} for layer in m], lr=0.1), module=layers)
    assert sizes[0] == 100 + 3 * 60  # whole rows of 20


@pytest.mark.parametrize(
    ("make", "moved"),
    [
        # p -= lr g: reads both, writes one
        (lambda p: SGD(p, lr=0.1), 3),
        # reads parameter, gradient and both moments, writes all but the gradient
        (lambda p: AdamW(p, fused=True), 7),
    ],
)
def test_seconds_by_rates_are_the_bytes_that_the_step_moves(make, moved):
    rates = DeviceRates(flops_per_s={"float32": 1.0}, bytes_per_s=1e9)
    module = nn.Linear(1000, 1000, bias=False)
    profile, _ = profile_optimizers(module, lambda m: [make(m.parameters())], CPU, rates=rates)
    assert profile.s_per_element == pytest.approx(moved * 4 / 1e9, rel=0.01)


def test_on_cuda_parameters_are_updated_at_once_unless_somebody_chose():
    rates = DeviceRates(flops_per_s={"float32": 1.0}, bytes_per_s=1e9, is_cuda=True)

    def is_foreach(**options):
        profile, _ = profile_optimizers(model(), lambda m: [AdamW(m.parameters(), **options)], CPU, rates=rates)
        return profile.is_foreach

    assert is_foreach()
    assert not is_foreach(foreach=False)
    assert not is_foreach(fused=True)


class Counted(SGD):
    """Optimizer of a made-up device: a step takes 2 ms, 0.1 ms for each parameter, and 3 ns for each element."""

    def seconds(self):
        updated = [p for group in self.param_groups for p in group["params"]]
        return 2e-3 + 1e-4 * len(updated) + 3e-9 * sum(p.numel() for p in updated)


def test_what_is_fixed_of_a_step_and_what_elements_take(monkeypatch):
    taken = []
    monkeypatch.setattr(Counted, "step", lambda self, closure=None: taken.append(self.seconds()))
    monkeypatch.setattr(optimizer, "fastest_s", lambda call, device, *, repeats: call() or taken[-1])
    layers = nn.Sequential(*(nn.Linear(3000, 1000, bias=False) for _ in range(5)))
    profile = profiled(lambda m: Counted(m.parameters(), lr=0.1), module=layers)[1]
    assert profile.fixed_s == pytest.approx(2.5e-3)  # five parameters
    assert profile.s_per_element == pytest.approx(3e-9)
    two = profiled(*(lambda m, i=i: Counted(m[i].parameters(), lr=0.1) for i in (0, 1)), module=layers)[1]
    assert two.fixed_s == pytest.approx(2 * 2.1e-3)
    assert two.s_per_element == pytest.approx(3e-9)


def test_a_step_of_few_elements_is_fixed_whatever_the_noise():
    assert fit_step((100, 1.0), (100, 1.1)) == (1.1, 0.0)
    assert fit_step((100, 1.0), (200, 0.9)) == (0.9, 0.0)
    assert fit_step((100, 1.0), (300, 0.5)) == (1.0, 0.0)
