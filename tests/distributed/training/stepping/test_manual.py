"""Manual optimization: each child sharded by itself trains what DDP trains."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from tests.distributed.support.by_hand import GAN, One, compared, ddp, ours
from tests.distributed.support.fits import (
    failure,
    largest_difference,
    plan_for,
    shared_folder,
    trainer,
    without_measuring,
)
from tests.distributed.support.models import Base, OddMLP
from tests.distributed.support.user_runs import check, differences

pytestmark = pytest.mark.distributed


class Once(GAN):
    """Generates once for both losses, and freezes nothing."""

    def training_step(self, batch, batch_idx):
        real = batch[0].float()
        first, second = self.optimizers()
        made = self.generator(real.flip(1))
        other = self.entropy(real, 1.0) + self.entropy(made.detach(), 0.0)
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        loss = self.entropy(made, 1.0)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.found += [loss.detach().clone(), other.detach().clone()]


class Frozen(GAN):
    """Freezes the generator after it was called, and the discriminator from before a call until backward."""

    def training_step(self, batch, batch_idx):
        real = batch[0].float()
        first, second = self.optimizers()
        made = self.generator(real.flip(1))
        self.toggle_optimizer(second)
        other = self.entropy(real, 1.0) + self.entropy(self.generator(real.flip(1)), 0.0) + made.detach().mean()
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.discriminator.requires_grad_(False)
        loss = self.entropy(self.generator(real.flip(1)), 1.0)
        self.discriminator.requires_grad_(True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.found += [loss.detach().clone(), other.detach().clone()]


class Wasserstein(GAN):
    """A critic whose slope is penalised, twice for each step of the generator."""

    def training_step(self, batch, batch_idx):
        real = batch[0].float()
        first, second = self.optimizers()
        for weight in (0.3, 0.7):
            made = self.generator(real.flip(1)).detach()
            mixed = (weight * real + (1 - weight) * made).requires_grad_()
            (slope,) = torch.autograd.grad(self.judged(mixed).sum(), mixed, create_graph=True)
            other = self.judged(made).mean() - self.judged(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            self.found.append(other.detach().clone())
        loss = -self.judged(self.generator(real.flip(1))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.found.append(loss.detach().clone())


@without_measuring
def trained(kind, make, epochs, *, averaging=(), **resumed):
    """Losses, whole weights and the checkpoint's path after epochs of four batches, validated before and after."""
    module, folder = kind(), shared_folder()
    keeper = ModelCheckpoint(dirpath=folder, filename="one", save_on_train_epoch_end=True)
    fit = trainer(
        make(),
        max_steps=-1,
        max_epochs=epochs,
        limit_train_batches=4,
        callbacks=[keeper, *averaging],
        enable_checkpointing=True,
        limit_val_batches=2,
        num_sanity_val_steps=0,
    )
    data = DataLoader(module.dataset(), batch_size=8)
    fit.validate(module, data, verbose=False)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), **resumed)
    fit.validate(module, data, verbose=False)
    own = fit.strategy
    whole = own.whole_state_dict(on_all_ranks=True) if isinstance(own, OSDPStrategy) else module.state_dict()
    state = {name: value.detach().clone() for name, value in whole.items()}
    return module, state, keeper.best_model_path


def manual_training():
    """Differences from DDP, at once and resumed; what the units are, and how far training went."""
    found = {}
    for kind in (GAN, Once, One):
        own, expected = trained(kind, ours(), 2), trained(kind, ddp, 2)
        found[kind.__name__] = compared(own, expected)
        found[f"{kind.__name__} moved"] = largest_difference(expected[1], kind().state_dict())
        options = {"state_dict_type": "sharded"} if kind is One else {}
        half = trained(kind, ours(**options), 1)
        resumed = trained(kind, ours(**options), 2, ckpt_path=half[2])
        found[f"{kind.__name__} resumed"] = largest_difference(resumed[1], own[1])
        if kind is GAN:
            plain = torch.load(half[2], weights_only=False)
            found["optimizers"] = [len(state["state"]) for state in plain["optimizer_states"]]
            module = own[0]
            found["plan"] = module.trainer.strategy.plan
            found["units"] = [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]
    averaged = [trained(GAN, make, 1, averaging=[WeightAveraging()]) for make in (ours(), ddp)]
    found["averaged"] = compared(*averaged)
    return found


class Direct(GAN):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Shared(GAN):
    """Two children that share a parameter."""

    def __init__(self):
        super().__init__()
        self.discriminator = nn.ModuleDict({"body": nn.Linear(7, 7), "head": nn.Linear(7, 7)})
        self.discriminator["body"].weight = self.discriminator["head"].weight

    def judged(self, x):
        return super().judged(x).mean(1)


def refused():
    """Returns errors of what cannot be sharded in manual optimization."""

    def told(module, **options):
        loader = module.loader(dist.get_rank(), dist.get_world_size())
        return failure(lambda: trainer(OSDPStrategy(**options)).fit(module, loader))

    plan = plan_for(OddMLP(), "mixed", world_size=dist.get_world_size())
    return {"direct": told(Direct()), "plan": told(GAN(), plan=plan)}


def shared():
    """Difference from DDP where two children share a parameter."""
    return compared(trained(Shared, ours(), 1), trained(Shared, ddp, 1))


def penalised_and_frozen():
    """Differences from DDP of GANs whose critic's slope is penalised, and that freeze what they have called."""
    kinds = {"penalised": Wasserstein, "frozen": Frozen}
    return {name: compared(trained(kind, ours(), 1), trained(kind, ddp, 1)) for name, kind in kinds.items()}


class Surgery(Base):
    """Has one backward for each of its tasks, and assigns the mean of their gradients; one head has no loss."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.body, self.heads = nn.Linear(7, 6), nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])

    def task_losses(self, batch):
        x, y = (tensor.to(self.dtype) for tensor in batch)
        x = torch.tanh(self.body(x))
        losses = [F.mse_loss(head(x), y * (place + 1)) for place, head in enumerate(self.heads)]
        return losses[:3]

    def training_step(self, batch, batch_idx):
        optimizer, found = self.optimizers(), []
        losses = self.task_losses(batch)
        for loss in losses:
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            found.append([parameter.grad for parameter in self.parameters()])
        for parameter, gradients in zip(self.parameters(), zip(*found, strict=True), strict=True):
            given = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(given) / len(losses) if given else None
        optimizer.step()
        self.found += [loss.detach().clone() for loss in losses]

    def validation_step(self, batch, batch_idx):
        self.found += self.task_losses(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)

    def dataset(self):
        return OddMLP().dataset()


def assigned():
    """Differences from DDP where gradients are assigned that no backward gave last."""
    options = {"max_steps": 12, "limit_val_batches": 1, "val_check_interval": 2}
    return {"surgery": differences(Surgery, ("mixed",), ddp_options={"find_unused_parameters": True}, **options)}


class Sharpness(torch.optim.Optimizer):
    """Looks where a step up the gradient would be, takes the closure's gradients there, and steps from where it was."""

    def __init__(self, parameters, base, rho=0.1, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in moved]).norm()
        for p in moved:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        loss = closure()
        for p in moved:
            p.data = self.state[p]["before"]
        self.base.step()
        return loss


class Sharp(GAN):
    """GAN with one optimizer, whose step needs the closure's gradients."""

    def judge(self, batch):
        loss = self.entropy(self.generator(batch[0].float()), 1.0)
        self.manual_backward(loss)
        self.found.append(loss.detach().clone())
        return loss

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.judge(batch)
        optimizer.step(lambda: self.judge(batch))
        optimizer.zero_grad()

    def configure_optimizers(self):
        return Sharpness(self.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)


def sharp():
    """Difference from DDP of an optimizer that clears gradients and needs those of its closure."""
    own, expected = trained(Sharp, ours(), 1), trained(Sharp, ddp, 1)
    return compared(own, expected), largest_difference(expected[1], Sharp().state_dict()), len(own[0].losses)


@pytest.mark.slow
def test_manual_optimization_with_one_and_two_optimizers_equals_ddp_and_resumes(ranks):
    for found in ranks(2).run(manual_training):
        assert found["GAN moved"] > 1e-3
        assert found["One moved"] > 1e-3
        for name in ("GAN", "Once", "One", "GAN resumed", "Once resumed", "One resumed", "averaged"):
            assert found[name] < 1e-6, name
        assert found["optimizers"] == [4, 4]
        root, *names = found["units"]
        assert root == ""
        assert {name.split(".")[0] for name in names} == {"generator", "discriminator"}
        assert [unit.name for unit in found["plan"].units] == [root, *names]
        assert found["plan"].units[0].operators == ()  # nothing that the first backward of a step would free


def test_what_manual_optimization_cannot_shard_is_refused(ranks):
    for found in ranks(2).run(refused):
        assert "'scale' is in none. Put it into a module that is called" in found["direct"][1]
        assert found["plan"][0] == "PlanMismatchError"


def test_children_that_share_a_parameter_are_one_unit(ranks):
    assert max(ranks(2).run(shared)) < 1e-6


def test_gradients_that_a_step_assigns_are_those_that_train(ranks):
    check(ranks(2).run(assigned)[0])


def test_slopes_that_are_penalised_and_parameters_that_are_frozen_in_a_step_equal_ddp(ranks):
    for found in ranks(2).run(penalised_and_frozen):
        assert found["penalised"] < 1e-6
        assert found["frozen"] < 1e-6


def test_an_optimizer_that_needs_the_gradients_of_its_closure_equals_ddp(ranks):
    for off, moved, num_losses in ranks(2).run(sharp):
        assert off < 1e-6
        assert moved > 1e-3
        assert num_losses == 12
