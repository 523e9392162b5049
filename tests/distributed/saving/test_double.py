"""Numbers of float64, which nothing rounds on the way: through checkpoints, hooks that rename them, and steps."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_osdp import OSDPPrecision, OSDPStrategy
from tests.distributed.support.fits import largest_difference, plan_for, shared_folder, trainer, without_measuring
from tests.distributed.support.models import Base, OddMLP
from tests.distributed.support.user_runs import TOLERANCE, WIDTH, Chain, ddp, planned
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Fading(nn.Module):
    """A layer whose outputs fade from call to call: by how much is its extra state, a number or a tensor."""

    def __init__(self, as_tensor):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(1))
        self.gain = torch.tensor(0.1) if as_tensor else 0.1

    def forward(self, x):
        if self.training:
            self.gain = self.gain * 0.9 + 0.1 / 3
            self.mean = self.mean * 0.9 + x.detach().mean()
        return torch.tanh(self.linear(x)) * self.gain + self.mean

    def get_extra_state(self):
        return self.gain

    def set_extra_state(self, gain):
        self.gain = gain


class Shared(Base):
    """Has one module under two names, and saves it under others."""

    def __init__(self, as_tensor):
        super().__init__()
        self.first, self.fading, self.last = nn.Linear(7, WIDTH), Fading(as_tensor), nn.Linear(WIDTH, 3)
        self.again = self.fading

    def loss(self, batch):
        x, y = (tensor.to(self.last.weight.dtype) for tensor in batch)
        return F.mse_loss(self.last(self.again(torch.tanh(self.fading(self.first(x))))), y) * torch.tensor(0.7)

    def dataset(self):
        return OddMLP().dataset()

    def on_save_checkpoint(self, checkpoint):
        self._rename(checkpoint["state_dict"], lambda name: f"old_{name}")

    def on_load_checkpoint(self, checkpoint):
        self._rename(checkpoint["state_dict"], lambda name: name.removeprefix("old_"))

    @staticmethod
    def _rename(state, rename):
        for name in [name for name in state if name.removeprefix("old_").startswith(("fading.", "again."))]:
            state[rename(name)] = state.pop(name)


def run(module, in_double, *, kind=None, max_epochs=2, path=None):
    """Epochs of two steps under DDP, or in shards saved as this kind: the Trainer, losses, and whole weights.

    Args:
        in_double: "flag" of the Trainer, the module "by hand" or "both".
    """
    if in_double != "flag":
        module.double()
    options = {"max_epochs": max_epochs, "max_steps": -1, "limit_train_batches": 2}
    if kind is None:
        options |= {"precision": "64-true"} if in_double != "by hand" else {}
        fit = trainer(ddp(), **options)
    else:
        options |= {"plugins": [OSDPPrecision("64-true")]} if in_double != "by hand" else {}
        plan = plan_for(type(module)(False).double(), "mixed", world_size=dist.get_world_size())
        fit = trainer(OSDPStrategy(plan=plan, batch_size="keep", state_dict_type=kind), **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=path)
    state = fit.strategy.lightning_module_state_dict() if kind is None else fit.strategy.whole_state_dict()
    tensors = {name: torch.as_tensor(value).clone() for name, value in sorted((state or {}).items())}
    return fit, module.losses, tensors


def difference(found, expected):
    """Largest difference in losses and, on rank 0, in weights."""
    (_, losses, state), (_, expected_losses, expected_state) = found, expected
    off = max(abs(a - b) for a, b in zip(losses, expected_losses[-len(losses) :], strict=True))
    return max(off, largest_difference(state, expected_state) if dist.get_rank() == 0 else 0.0)


def resumed(in_double, kinds, as_tensor):
    """Differences of a resumed run from an uninterrupted one and from DDP's, by kind of checkpoint; None: DDP."""
    of_ddp, found = run(Shared(as_tensor), in_double), {}
    uninterrupted = run(Shared(as_tensor), in_double, kind=kinds[0])
    for kind in (None, *kinds):
        folder = shared_folder()
        fit, *_ = run(Shared(as_tensor), in_double, kind=kind, max_epochs=1)
        fit.save_checkpoint(folder / "one.ckpt")
        dist.barrier()
        again = run(Shared(as_tensor), in_double, kind=kind, path=folder / "one.ckpt")
        found[kind] = difference(again, of_ddp if kind is None else uninterrupted), difference(again, of_ddp)
    return found


@pytest.mark.parametrize("as_tensor", [False, slow(True)])
@pytest.mark.parametrize(
    ("in_double", "world_size"),
    [("both", 2), *(slow(*case) for case in itertools.product(("flag", "by hand", "both"), (1, 2, 4)))],
)
def test_a_run_that_is_resumed_under_renamed_keys_goes_on_to_the_bit(ranks, world_size, in_double, as_tensor):
    for found in ranks(world_size).run(resumed, in_double=in_double, kinds=("full", "sharded"), as_tensor=as_tensor):
        off_by_ddp, _ = found.pop(None)
        assert {kind: off for kind, (off, _) in found.items()} == {"full": 0.0, "sharded": 0.0}
        # more than two gradients are added up in another order than DDP's
        assert max(from_ddp for _, from_ddp in found.values()) <= (1e-14 if world_size > 2 else 0.0)
        # DDP loads a checkpoint before the Trainer's flag makes the module float64, so it rounds what it loads
        assert off_by_ddp < 1e-6
        assert (off_by_ddp > 1e-14) == (in_double == "flag")


class Timed(Base):
    """Keeps the time in float64, in its batches and in a buffer; all else is in float32, or in the default dtype."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("now", torch.tensor(1.7e9, dtype=torch.float64))

    def loss(self, batch):
        x, y = batch
        since = x[:, :1] - self.now
        self.now = self.now + since.detach().mean() / 3
        x = torch.cat([since, x[:, 1:]], 1).to(self.first.weight.dtype)
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y.to(x.dtype)) * torch.tensor(0.7)

    def dataset(self):
        x, y = OddMLP().dataset().tensors
        return TensorDataset(x + 1.7e9 * (torch.arange(7) == 0), y)


@without_measuring
def timed(default):
    """Losses, the time and the dtype of weights, under DDP and under a plan of the strategy's own."""
    found, before = [], torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, default))
    try:
        for strategy in (ddp(), OSDPStrategy()):
            module = Timed()
            fit = trainer(strategy, max_steps=3)
            fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
            found.append((module.losses, float(module.now), str(module.last.weight.dtype)))
    finally:
        torch.set_default_dtype(before)
    return found


@pytest.mark.parametrize(("default", "tolerance"), [slow("float32", 1e-6), ("float64", 1e-14)])
def test_what_is_in_float64_stays_there_as_under_ddp(ranks, default, tolerance):
    found = ranks(2).run(timed, default=default)
    for (losses, _, dtype), (own_losses, _, own_dtype) in found:
        assert own_losses == pytest.approx(losses, rel=tolerance)
        assert own_dtype == dtype == f"torch.{default}"
    (_, now, _), (_, own_now, _) = found[0]  # rank 0's, whose buffers are those of all
    assert own_now == now != 1.7e9


class Making(Chain):
    """Makes a matrix in the default dtype, which is float64 in a step."""

    def features(self, x):
        return super().features(x) @ torch.eye(WIDTH)


def made():
    return planned(Making)[0]


def test_a_step_makes_tensors_in_float64_also_where_micro_batches_are_compared(ranks):
    assert ranks(2).run(made)[0] < TOLERANCE


@without_measuring
def refused():
    """Error of inputs in float64 for weights in float32."""
    module = Timed()
    module.loss = lambda batch: module.last(torch.tanh(module.first(batch[0]))).square().mean()
    try:
        trainer(OSDPStrategy(), max_steps=1).fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    except RuntimeError as error:
        return str(error)
    return None


def test_inputs_in_float64_for_weights_in_float32_are_told(ranks):
    for told in ranks(1).run(refused):
        assert "the same dtype, but got Double and Float\nOSDP: training_step gets float64 as the loader" in told
        assert "Cast it there, as in x.float(), or train in float64: plugins=OSDPPrecision" in told
