"""Parameters of other kinds than most: as under DDP, or an error before training."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, vjp, vmap
from torch.nn import functional as F

from lightning_osdp import OSDPStrategy
from tests.distributed.support.user_runs import (
    TOLERANCE,
    WIDTH,
    Chain,
    check,
    differences,
    fitted,
    plan_with,
    planned,
    refusal,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

ROWS = 11


class Embedded(Chain):
    """Embeddings whose gradients are sparse, of a module and of a function, some of whose rows no rank uses."""

    units = ("first", "rows", "bag", "norm", "last")

    def __init__(self, make=None):
        super().__init__()
        self.make = make or partial(torch.optim.SGD, lr=0.3, momentum=0.9)
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        del self.second, self.third

    def features(self, x):
        rows = (x[:, :2].abs() * 3).long().clamp(max=ROWS - 1)
        return torch.tanh(self.first(x) + self.rows(rows).sum(1) + self.bag(rows))

    def configure_optimizers(self):
        return self.make(self.parameters())


class Convolved(Chain):
    """Convolutions in channels_last."""

    units = ("first", "second", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        del self.third, self.norm
        self.to(memory_format=torch.channels_last)

    def features(self, x):
        x = x[:, None, :, None].expand(-1, 1, 7, 7).to(memory_format=torch.channels_last)
        return self.second(torch.tanh(self.first(x))).mean((2, 3))

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        return F.mse_loss(self.last(self.features(x)) * self.scale, y)


class Filter(nn.Module):
    """Complex parameters, one of them a scalar."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.cdouble))
        self.gain = nn.Parameter(torch.tensor(1 + 1j, dtype=torch.cdouble))

    def forward(self, x):
        return torch.view_as_real(x.to(self.weight.dtype) @ self.weight.T * self.gain).flatten(1)


class Complex(Chain):
    """Complex parameters between real ones."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.second, self.third = Filter(), nn.Linear(10, WIDTH)


class Shared(Chain):
    """Two weights in one memory, one of them transposed."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.double()
        self.third.weight = nn.Parameter(self.second.weight.detach().t())


class Func(Chain):
    """Chain whose loss asks torch.func for derivatives."""

    def __init__(self, kind="grad", optimizer="adamw"):
        super().__init__(optimizer)
        self.kind = kind

    def told(self, x):
        return self.last(self.norm(self.features(x))) * self.scale

    def first_told(self, sample):
        return self.told(sample[None])[0, 0]

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        found = {
            "grad": lambda: vmap(grad(self.first_told))(x),
            "hessian": lambda: vmap(hessian(self.first_told))(x),
            "vjp": lambda: vjp(self.told, x)[1](torch.ones_like(y))[0],
        }[self.kind]()
        return F.mse_loss(self.told(x), y) + found.square().mean()


KINDS_OF_PARAMETERS = {
    "sparse, SGD": Embedded,
    "sparse, Adagrad": partial(Embedded, partial(torch.optim.Adagrad, lr=0.1)),
    "channels_last": Convolved,
    "complex": Complex,
}
KINDS_OF_DERIVATIVES = ("grad", "hessian", "vjp")


def of_all_kinds(kinds):
    """Differences from DDP, with windows of accumulation, too."""
    found = {name: differences(make, kinds, max_steps=3) for name, make in KINDS_OF_PARAMETERS.items()}
    windows = {"accumulate_grad_batches": 2, "plan_options": {"num_micro_batches": 2}, "sync": "last"}
    found["sparse, in windows"] = differences(Embedded, kinds, max_steps=3, **windows)
    found["complex, clipped"] = differences(partial(Complex, "sgd"), kinds, max_steps=3, gradient_clip_val=0.2)
    for name in KINDS_OF_DERIVATIVES:
        found[name] = differences(partial(Func, name), kinds, max_steps=3)
    return found


def planned_of_kinds(names):
    """Differences from DDP under plans of the strategy's own."""
    makes = KINDS_OF_PARAMETERS | {"hessian": partial(Func, "hessian")}
    return {name: planned(makes[name])[0] for name in names}


def refused():
    """Returns errors of an optimizer that takes sparse gradients alone, and of two parameters in one memory."""
    found = []
    for make in (partial(Embedded, torch.optim.SparseAdam), Shared):
        plan = plan_with(make, "zdp")
        found.append(refusal(lambda make=make, plan=plan: fitted(OSDPStrategy(plan=plan), make(), max_steps=1)))
    return [*found, refusal(lambda: planned(partial(Embedded, torch.optim.SparseAdam)))]


@pytest.mark.parametrize(("world_size", "kinds"), [slow(2, ["mixed"]), slow(4, ["nodes", "zdp"])])
def test_all_kinds_of_parameters_and_derivatives_equal_ddp(ranks, world_size, kinds):
    check(ranks(world_size).run(of_all_kinds, kinds=kinds)[0])


@pytest.mark.parametrize("names", [("sparse, Adagrad", "complex", "hessian"), slow(("sparse, SGD", "channels_last"))])
def test_all_kinds_of_parameters_and_derivatives_are_planned(ranks, names):
    found = ranks(2).run(planned_of_kinds, names=names)[0]
    assert tuple(found) == names
    assert max(found.values()) < TOLERANCE, found


def test_parameters_that_cannot_be_trained_are_refused_before_training(ranks):
    for sparse, shared, planned_sparse in ranks(2).run(refused):
        assert planned_sparse == sparse
        assert sparse.startswith("ConfigurationError: Expected an optimizer that takes dense gradients, got SparseAdam")
        assert "Use SGD or Adagrad, which take the same steps on both, or sparse=False with Adam" in sparse
        assert shared.startswith("ConfigurationError: Expected parameters with memory of their own")
        assert "Give it its own" in shared
