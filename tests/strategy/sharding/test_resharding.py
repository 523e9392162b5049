"""Hooks that have code of a user's, and a reshard before them."""

from types import SimpleNamespace
from unittest import mock

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_osdp.strategy.sharding.resharding import reshard_before_hooks


class Written(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pass


def set_later():
    callback = L.Callback()
    callback.on_train_epoch_end = lambda *_: None
    return callback


@pytest.mark.parametrize(
    ("callback", "times"),
    [
        (L.Callback, 0),
        (ModelCheckpoint, 0),
        (Written, 1),
        (set_later, 1),
        (lambda: LambdaCallback(on_train_epoch_end=lambda *_: None), 1),
        (lambda: LambdaCallback(on_train_epoch_start=lambda *_: None), 0),
    ],
)
def test_hooks_that_a_user_has_written_find_shards(callback, times):
    sharded = mock.Mock()
    trainer = SimpleNamespace(callbacks=[callback()], lightning_module=L.LightningModule())
    reshard_before_hooks(trainer, sharded)
    trainer.callbacks[0].on_train_epoch_end(trainer, trainer.lightning_module)
    assert sharded.reshard.call_count == times


def test_so_do_those_of_the_module_itself():
    sharded = mock.Mock()
    module = L.LightningModule()
    module.on_train_epoch_end = lambda: None
    trainer = SimpleNamespace(callbacks=[], lightning_module=module)
    reshard_before_hooks(trainer, sharded)
    trainer.callbacks[0].on_train_epoch_end(trainer, module)
    assert sharded.reshard.call_count == 1


class Clearing(L.LightningModule):
    def optimizer_zero_grad(self, *_):
        self.zero_grad()


@pytest.mark.parametrize(("module", "times"), [(L.LightningModule, 0), (Clearing, 1)])
def test_gradients_are_cleared_of_shards(module, times):
    sharded = mock.Mock()
    trainer = SimpleNamespace(callbacks=[], lightning_module=module())
    reshard_before_hooks(trainer, sharded)
    trainer.callbacks[0].on_before_zero_grad(trainer, trainer.lightning_module, None)
    assert sharded.reshard.call_count == times


class Manual(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Looking(L.LightningModule):
    def on_after_backward(self):
        pass


@pytest.mark.parametrize(("module", "times"), [(L.LightningModule, 0), (Manual, 1), (Looking, 1)])
def test_ranks_compare_what_they_used_at_the_end_of_backward_where_somebody_may_look(module, times):
    sharded = mock.Mock()
    trainer = SimpleNamespace(callbacks=[], lightning_module=module())
    reshard_before_hooks(trainer, sharded)
    trainer.callbacks[0].on_after_backward(trainer, trainer.lightning_module)
    assert sharded.after_backward.call_count == times
    assert sharded.reshard.call_count == (module is Looking)
