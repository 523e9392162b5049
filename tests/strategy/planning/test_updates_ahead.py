"""Fits in which the host may begin in backward with updates, and the reasons why it may not."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, LearningRateMonitor, Timer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.planning.updates_ahead import why_updates_wait


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


class Stepping(Module):
    def optimizer_step(self, *_):
        pass


class Zeroing(Module):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Clipping(Module):
    def configure_gradient_clipping(self, *_):
        pass


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Watched(Module):
    def __init__(self):
        super().__init__()
        self.layer.weight.register_hook(print)


class Hooked(Module):
    def __init__(self):
        super().__init__()
        self.layer.register_full_backward_hook(print)


class Looking(Callback):
    def on_after_backward(self, *_):
        pass


class OwnStrategy(OSDPStrategy):
    pass


def sgd(module):
    return torch.optim.SGD(module.parameters())


def scheduled(module):
    torch.optim.lr_scheduler.LinearLR(optimizer := sgd(module))
    return optimizer


def hooked(module):
    (optimizer := sgd(module)).register_step_pre_hook(print)
    return optimizer


def patched(module):
    (optimizer := sgd(module)).step = print
    return optimizer


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize(
    ("module", "options", "makers", "why"),
    [
        (Module, {"gradient_clip_val": 1.0}, [scheduled], None),
        (Module, {"callbacks": [Timer(), LearningRateMonitor()]}, [sgd], None),
        (Manual, {}, [sgd], "optimization is manual"),
        (Module, {"strategy": OwnStrategy}, [sgd], "OwnStrategy is not Lightning's own"),
        (Module, {"precision": "16-mixed"}, [sgd], "the precision '16-mixed' may change gradients"),
        (
            Module,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            [sgd],
            "gradients are clipped by value",
        ),
        (Module, {"callbacks": [Looking()]}, [sgd], "on_after_backward of Looking may change gradients"),
        (
            Module,
            {"callbacks": [LambdaCallback(on_before_optimizer_step=print)]},
            [sgd],
            "on_before_optimizer_step of LambdaCallback may change gradients",
        ),
        (Stepping, {}, [sgd], "optimizer_step of Stepping may change gradients"),
        (Zeroing, {}, [sgd], "optimizer_zero_grad of Zeroing may change gradients"),
        (Clipping, {}, [sgd], "configure_gradient_clipping of Clipping may change gradients"),
        (Hooked, {}, [sgd], "there are hooks of modules for backward"),
        (Watched, {}, [sgd], "there are hooks of parameters"),
        (Module, {}, [sgd, sgd], "there are 2 optimizers"),
        (Module, {}, [patched], "the optimizer has a step of its own"),
        (Module, {}, [hooked], "there may be hooks of optimizer steps"),
    ],
)
def test_updates_begin_in_backward_where_nothing_unknown_comes_between(module, options, makers, why):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    strategy = options.pop("strategy", OSDPStrategy)()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **quiet, **options)
    trainer.strategy.connect(own := module())
    own.trainer = trainer
    assert why_updates_wait(trainer, [make(own) for make in makers]) == why


def test_hooks_of_all_optimizers_have_updates_wait():
    handle = register_optimizer_step_pre_hook(print)
    try:
        why = "there may be hooks of optimizer steps"
        test_updates_begin_in_backward_where_nothing_unknown_comes_between(Module, {}, [sgd], why)
    finally:
        handle.remove()
