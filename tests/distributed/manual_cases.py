"""Manual optimization under the strategy, as the ranks run it, and the same under DDP."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, plan_for, trainer
from models import Base, OddMLP, build
from strategy_cases import failure, shared_folder
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy, SearchSpace

SPACE = SearchSpace(min_unit_bytes=0)


class GAN(Base):
    """Two optimizers that take turns, each with the other's parameters frozen."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Sequential(nn.Linear(13, 7), nn.Tanh()))
        self.discriminator = nn.ModuleDict({"body": nn.Linear(7, 11), "head": nn.Linear(11, 1)})
        self.register_buffer("one", torch.ones(1))

    def judged(self, x):
        return self.discriminator["head"](self.discriminator["body"](x).relu())

    def entropy(self, x, label):
        judged = self.judged(x)
        return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, label) * self.one)

    def training_step(self, batch, batch_idx):
        real = batch[0].float()
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.entropy(self.generator(real.flip(1)), 1.0)
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = self.entropy(real, 1.0) + self.entropy(self.generator(real.flip(1)).detach(), 0.0)
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.found += [loss.detach().clone(), other.detach().clone()]

    def validation_step(self, batch, batch_idx):
        self.found.append(self.entropy(batch[0].float(), 1.0))

    def configure_optimizers(self):
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.generator.parameters(), lr=1e-3), discriminator

    def dataset(self):
        return build("odd_mlp").dataset()


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


class One(GAN):
    """One optimizer, which steps in every second batch."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.entropy(self.generator(batch[0].float()), 1.0)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        self.found.append(loss.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def ddp():
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)


def ours(**options):
    return lambda: OSDPStrategy(search_space=SPACE, **options)


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


def compared(found, expected):
    """Largest difference of losses and weights."""
    pairs = zip(found[0].losses, expected[0].losses, strict=True)
    return max(*(abs(a - b) for a, b in pairs), largest_difference(found[1], expected[1]))


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
    """What cannot be sharded in manual optimization."""

    def told(module, **options):
        loader = module.loader(dist.get_rank(), dist.get_world_size())
        return failure(lambda: trainer(OSDPStrategy(**options)).fit(module, loader))

    plan = plan_for(OddMLP(), "mixed", world_size=dist.get_world_size())
    return {"direct": told(Direct()), "plan": told(GAN(), plan=plan)}


def shared():
    """Difference from DDP where two children share a parameter."""
    return compared(trained(Shared, ours(), 1), trained(Shared, ddp, 1))
