"""Optimizers on shards, and gradients before they step: as under DDP, or refused before training."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import grad_norm

from lightning_osdp import OSDPStrategy
from tests.distributed.support.user_runs import Chain, check, ddp, differences, fitted, plan_with, refusal
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Lamb(torch.optim.Optimizer):
    """Momentum, scaled for each tensor by its norm over that of its step, in operations that anybody would write."""

    def __init__(self, params, lr=1e-2, beta=0.9, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})
        self.norm = lambda tensor: float(tensor.norm())

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                clipped = p.grad / max(1.0, self.norm(p.grad))
                state["average"].mul_(group["beta"]).add_(clipped)
                step = state["average"] + group["weight_decay"] * p
                trust = p.norm() / (step.norm() + 1e-8)
                if float(trust) == 0.0:
                    trust = torch.ones_like(trust)
                p.add_(step * trust, alpha=-group["lr"])
        return loss


class ByForeach(torch.optim.Optimizer):
    """Momentum and decay in operations on lists, of all parameters of a group at once."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.state[p].setdefault("average", torch.zeros_like(p))
            averages = [self.state[p]["average"] for p in params]
            torch._foreach_lerp_(averages, [p.grad for p in params], 0.2)
            steps = torch._foreach_div(averages, torch._foreach_add(torch._foreach_abs(averages), 1e-3))
            torch._foreach_mul_(params, 1 - 0.1 * group["lr"])
            torch._foreach_add_(params, steps, alpha=-group["lr"])
        return loss


class BySetting(torch.optim.Optimizer):
    """Sets the data of parameters, to where they were before its first half of a step and then to where they go."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = p.data.clone()
                    p.data = p.data - group["lr"] * p.grad.sign()
                    halfway = p.data.clone()
                    p.data = before
                    p.data = 0.5 * p.data + 0.5 * halfway
        return loss


class Sharp(torch.optim.SGD):
    """Takes the gradients of its closure twice: where the weights are, and a step up from there."""

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ups = [0.05 * p.grad / torch.stack([each.grad.norm() for each in moved]).norm() for p in moved]
        torch._foreach_add_(moved, ups)
        self.zero_grad()
        closure()
        torch._foreach_sub_(moved, ups)
        super().step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Steps of another optimizer, and back to an average of them; as many write it, without ``super().__init__()``."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, defaultdict(dict)
        self.num_steps = 0

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.num_steps += 1
        if self.num_steps % self.k == 0:
            for group in self.param_groups:
                for fast in group["params"]:
                    state = self.state[fast]
                    slow = state["slow"] = state.get("slow", torch.zeros_like(fast.data))
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups


def decaying(parameters, **options):
    """AdamW that decays matrices alone."""
    parameters = list(parameters)
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    assert matrices
    assert others
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


KINDS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": decaying,
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
}
IMPLEMENTATIONS = {"default": {}, "loop": {"foreach": False}, "foreach": {"foreach": True}}
OPTIMIZERS = {
    f"{name}, {how}": partial(make, **options)
    for name, make in KINDS.items()
    for how, options in IMPLEMENTATIONS.items()
} | {
    "AdamW, fused": partial(decaying, fused=True),
    "AdamW, amsgrad": partial(decaying, amsgrad=True),
    "Adam, tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2)),
    "SGD, Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adagrad, fused": partial(torch.optim.Adagrad, lr=0.05, fused=True),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "Lamb": Lamb,
    "ByForeach": ByForeach,
    "BySetting": BySetting,
    "Sharp": partial(Sharp, lr=0.05, momentum=0.9),
    "Lookahead": lambda parameters: Lookahead(decaying(parameters)),
}


class Optimized(Chain):
    """Trained by any optimizer."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


def optimized(names=tuple(OPTIMIZERS), kinds=("mixed",)):
    """Differences from DDP, by optimizer."""
    return {name: differences(partial(Optimized, OPTIMIZERS[name]), kinds, max_steps=3) for name in names}


class Matrices(Chain):
    """Chain that trains what Muon takes: matrices alone."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim == 2)

    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def muon():
    """Difference from DDP of Muon, which rounds to bfloat16 inside."""
    return {"Muon": differences(Matrices, max_steps=4)}


def scheduled(make, parameters):
    """An optimizer with a schedule, which puts a step of its own on it."""
    optimizer = make(parameters)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def seeing_shards(parameters):
    """Lamb that reads the norm of its shard."""
    optimizer = Lamb(parameters)
    optimizer.norm = lambda tensor: float(getattr(tensor, "_local_tensor", tensor).norm())
    return optimizer


class OwnSGD(torch.optim.SGD):
    """SGD whose step is torch's, which nothing knows."""


class ByOneVector(ByForeach):
    """Optimizer that makes one vector of gradients that are vectors, as can be made of what is on one mesh."""

    def step(self, closure=None):
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None and p.grad.ndim == 1]
            if gradients:
                torch.cat(gradients)
        return super().step(closure)


REFUSED = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "OwnSGD, fused": partial(OwnSGD, lr=0.1, fused=True),
    "Adafactor, scheduled": partial(scheduled, torch.optim.Adafactor),
    "Lamb, of shards": seeing_shards,
}


class Noted(Optimized):
    """Notes whether a step of training was begun."""

    def on_train_start(self):
        self.has_begun = True


def refused(kind):
    """Returns errors of these optimizers, and if training had begun."""
    found = {}
    for name, make in REFUSED.items() if kind == "mixed" else [("ByOneVector", ByOneVector)]:
        module = Noted(make)
        plan = plan_with(lambda make=make: Noted(make), kind)
        strategy = OSDPStrategy(plan=plan, node_size=plan.node_size)
        found[name] = refusal(lambda strategy=strategy, module=module: fitted(strategy, module, max_steps=2))
        found[name] = (found[name], hasattr(module, "has_begun"))
    return found


class Counting(torch.optim.Adam):
    """Counts what hooks and draws it has seen."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2)
        self.num_steps, self.num_hooks, self.draws = [0], [0], []
        self.register_step_pre_hook(self._note)
        self.register_step_post_hook(self._note)

    def _note(self, *_):
        self.num_hooks[0] += 1

    def step(self, closure=None):
        self.num_steps[0] += 1
        self.draws.append(float(torch.rand(())))
        return super().step(closure)


class Checked(Optimized):
    """Looks at its optimizer and at random numbers before the first step."""

    def __init__(self):
        super().__init__(Counting)

    def on_train_start(self):
        (self.optimizer,) = (optimizer,) = self.trainer.optimizers
        self.counted = (*optimizer.num_steps, *optimizer.num_hooks, len(optimizer.draws), len(optimizer.state))
        self.generator = torch.get_rng_state()


def tried():
    """Steps, hooks, draws and states before training and after it, and whether random numbers are as under DDP."""
    module, expected = Checked(), Checked()
    plan = plan_with(Checked, "mixed")
    for strategy, each in ((OSDPStrategy(plan=plan), module), (ddp(), expected)):
        torch.manual_seed(3)
        fitted(strategy, each, max_steps=3)
    optimizer = module.optimizer
    after = (*optimizer.num_steps, *optimizer.num_hooks, len(optimizer.draws))
    return module.counted, after, torch.equal(module.generator, expected.generator)


class Logging(Chain):
    """Takes the norms of its gradients where people do."""

    def __init__(self):
        super().__init__("sgd")
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        norms = {f"grad_{name}": p.grad.norm() for name, p in self.named_parameters()}
        squares = sum(parameter.grad.norm() ** 2 for parameter in self.parameters())
        in_place = 0.0
        for parameter in self.parameters():
            in_place += parameter.grad.norm() ** 2
        total = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()])
        self.log_dict(norms)
        for value in (*norms.values(), squares, in_place, total):
            self.norms += [float(value), value.item()]

    @property
    def losses(self):
        return [*super().losses, *self.norms, *self.logged]  # compared with DDP's as losses are

    def on_fit_end(self):
        self.logged = [float(v) for k, v in sorted(self.trainer.callback_metrics.items()) if k.startswith("grad")]


class OfLightning(Chain):
    """Takes norms of gradients by Lightning's own function."""

    def on_before_optimizer_step(self, optimizer):
        grad_norm(self, norm_type=2)


def lightnings_norms():
    """Returns the error where values of DTensors are read together."""
    plan = plan_with(OfLightning, "mixed")
    try:
        fitted(OSDPStrategy(plan=plan), OfLightning(), max_steps=1)
    except RuntimeError as error:
        return str(error)
    return None


class ClippingItself(Chain):
    """Clips as a user without Lightning would."""

    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip(list(self.parameters()))


def clip_in_two(parameters):
    """Clips by torch's two functions, one of which has returned the norm."""
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], error_if_nonfinite=True)
    assert float(norm) > 0
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)


def clip_by_hand(parameters):
    """Clips by the norm of all gradients, which is summed in place."""
    total = 0.0
    for parameter in parameters:
        total += parameter.grad.norm() ** 2
    for parameter in parameters:
        parameter.grad.mul_(0.01 / total.sqrt())


NORM, VALUE = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
CLIPS = {
    "norm": lambda parameters: NORM(parameters, 0.01),
    "norm, loop": lambda parameters: NORM(parameters, 0.01, foreach=False),
    "norm, foreach": lambda parameters: NORM(parameters, 0.01, foreach=True, error_if_nonfinite=True),
    "norm of order one": lambda parameters: NORM(parameters, 0.01, norm_type=1),
    "in two": clip_in_two,
    "by hand": clip_by_hand,
    "value": lambda parameters: VALUE(parameters, 0.001),
    "value, loop": lambda parameters: VALUE(parameters, 0.001, foreach=False),
    "value, foreach": lambda parameters: VALUE(parameters, 0.001, foreach=True),
}


def gradients(kinds, clips=tuple(CLIPS), of_lightning=("norm", "value")):
    """Differences from DDP of norms and of training with clipped gradients, in these ways of users too."""
    clipped = {"gradient_clip_val": 0.01}
    by = {name: {**clipped, "gradient_clip_algorithm": name} for name in of_lightning}
    return {
        "norms": differences(Logging, kinds, **clipped),
        **{name: differences(lambda: Chain("sgd"), kinds[:1], **options) for name, options in by.items()},
        **{f"own {name}": differences(partial(ClippingItself, CLIPS[name]), kinds[:1], max_steps=3) for name in clips},
    }


@pytest.mark.slow
def test_optimizers_that_can_update_shards_equal_ddp(ranks):
    found = ranks(2).run(optimized)[0]
    assert len(found) == 27
    check(found)


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_some_optimizers_equal_ddp(ranks, world_size):
    check(ranks(world_size).run(optimized, names=["AdamW, default", "Lamb", "BySetting", "Lookahead"])[0])


@pytest.mark.slow
def test_optimizers_equal_ddp_where_units_are_sharded_in_nodes_and_over_all_ranks(ranks):
    names = [name for name in OPTIMIZERS if name.startswith(("AdamW", "SGD", "ByForeach", "Lamb"))]
    check(ranks(4).run(optimized, names=names, kinds=["nodes"])[0])


def test_muon_equals_ddp_within_its_own_rounding(ranks):
    check(ranks(2).run(muon)[0], 5e-3)


@pytest.mark.parametrize(("world_size", "kind"), [(2, "mixed"), slow(4, "nodes")])
def test_optimizers_that_cannot_are_refused_before_training(ranks, world_size, kind):
    for found in ranks(world_size).run(refused, kind=kind):
        for name, (told, has_begun) in found.items():
            assert told is not None, name
            assert told.startswith("ConfigurationError: Expected an optimizer that"), told
            assert name.split(",")[0] in told
            assert not has_begun, name
            assert ('SearchSpace(modes=("ZDP", "hpZ", "DP"))' in told) is (kind == "nodes"), told


def test_the_trial_of_an_optimizer_leaves_no_trace(ranks):
    for before, after, is_same in ranks(2).run(tried):
        assert before == (0, 0, 0, 0)
        assert after[::2] == (3, 3)
        assert after[1] in (6, 12)  # torch may call hooks around the step that is inherited, too
        assert is_same


ON_FOUR, ON_TWO = ["norm, foreach"], ["norm, loop", "norm of order one", "in two", "value, foreach"]
"""Ways of clipping that `make test` tries where gradients are on several meshes, and on one."""
BOTH = ["norm", "value"]


@pytest.mark.parametrize(
    ("world_size", "kinds", "clips", "of_lightning"),
    [
        (4, ["nodes"], ON_FOUR, ["norm"]),
        (2, ["mixed"], ON_TWO, ["value"]),
        slow(4, ["nodes", "node"], [*CLIPS], BOTH),
        slow(2, ["mixed", "zdp", "dp"], [*CLIPS], BOTH),
        slow(4, ["mixed"], [*CLIPS], BOTH),
    ],
)
def test_norms_of_gradients_and_clipping_equal_ddp(ranks, world_size, kinds, clips, of_lightning):
    check(ranks(world_size).run(gradients, kinds=kinds, clips=clips, of_lightning=of_lightning)[0])


def test_what_reads_values_of_shards_together_is_told_how_to_read_them(ranks):
    for told in ranks(2).run(lightnings_norms):
        assert told is not None
        assert "Take each value itself, on all ranks" in told
