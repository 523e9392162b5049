"""Windows and steps that were broken off leave nothing that reaches what is trained after them."""

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_osdp import OSDPPrecision, OSDPStrategy
from tests.distributed.support.by_hand import One, compared, ddp, ours
from tests.distributed.support.fits import trainer, without_measuring
from tests.distributed.support.knotted import UNITS, Knotted, by_ddp, difference, equals_ddp, plan_with
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Leaving(Knotted):
    """Ends each epoch in the second micro-batch of its second window, without a step."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


def ended_epochs(kinds):
    """Differences from DDP where epochs end inside a window, with all units of each of these kinds."""
    return equals_ddp([[kind] * len(UNITS) for kind in kinds], num_micro_batches=3, limit_train_batches=7, kind=Leaving)


class StopAt(Callback):
    """Stops a fit after so many micro-batches."""

    def __init__(self, batch_idx):
        self.at = batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == self.at


def _fit(module, strategy, **options):
    precision = (
        {"plugins": [OSDPPrecision("64-true")]} if isinstance(strategy, OSDPStrategy) else {"precision": "64-true"}
    )
    fit = trainer(strategy, accumulate_grad_batches=3, limit_train_batches=6, **precision, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    state = fit.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def stopped_fits(kinds):
    """Differences from DDP of a second fit after one that stopped inside a window, likewise."""

    def weights(first, second):
        module = Knotted().double()
        _fit(module, first, callbacks=[StopAt(4)])
        return _fit(module, second)

    expected = weights(*(DDPStrategy(process_group_backend="gloo") for _ in range(2)))
    found = []
    for kind in kinds:
        plan = plan_with([kind] * len(UNITS), 3)
        strategies = [OSDPStrategy(plan=plan, node_size=plan.node_size) for _ in range(2)]
        found.append(difference(weights(*strategies), expected))
    return found


def _raise(_):
    raise ValueError("inside backward")


class Raising(Knotted):
    """Raises once inside backward, when some units are through with it, and the first and the root are not."""

    has_raised = False

    def training_step(self, batch, batch_idx):
        handle = None if self.has_raised else self.first.register_forward_hook(self._raise_in_backward)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            if handle is not None:
                handle.remove()

    def _raise_in_backward(self, module, given, output):
        self.has_raised = True
        output.register_hook(_raise)


def errors_in_backward(kinds):
    """Differences from a fit under DDP of one after a fit that raised in its first backward, likewise."""
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 6}
    expected, _ = by_ddp(**options)
    found = []
    for kind in kinds:
        plan, module = plan_with([kind] * len(UNITS), 3), Raising().double()
        with pytest.raises(ValueError, match="inside backward"):
            _fit(module, OSDPStrategy(plan=plan, node_size=plan.node_size))
        state = _fit(module, OSDPStrategy(plan=plan, node_size=plan.node_size), max_epochs=-1)
        found.append(difference(state, expected))
    return found


class RaisingByHand(One):
    """Raises once, inside the first backward of its first fit."""

    raises = None

    def on_train_start(self):
        self.raises = self.raises is None

    def entropy(self, x, label):
        if self.raises:
            x.register_hook(_raise)
        return super().entropy(x, label)


@without_measuring
def errors_by_hand():
    """Difference from DDP in manual optimization, of a fit after one that raised in its first backward."""

    def fit(module, strategy):
        fitting = trainer(strategy, max_steps=-1, max_epochs=1, limit_train_batches=4)
        fitting.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        return fitting

    def run(module, make):
        if isinstance(module, RaisingByHand):
            with pytest.raises(ValueError, match="inside backward"):
                fit(module, make())
        strategy = fit(module, make()).strategy
        whole = (
            strategy.whole_state_dict(on_all_ranks=True) if isinstance(strategy, OSDPStrategy) else module.state_dict()
        )
        return module, {name: value.detach().clone() for name, value in whole.items()}

    return compared(run(RaisingByHand(), ours(dry_run=False)), run(One(), ddp))


OVER_ALL = [("ZDP", "last"), ("DP", "last"), ("ZDP", "every")]
IN_NODES = [("HSDP", "node"), ("HDP", "node"), ("HDP", "last")]


@pytest.mark.parametrize(
    ("case", "world_size", "kinds"),
    [
        (ended_epochs, 2, OVER_ALL),
        slow(ended_epochs, 4, IN_NODES),
        *(slow(case, 2, OVER_ALL) for case in (stopped_fits, errors_in_backward)),
        *(slow(case, 4, IN_NODES) for case in (stopped_fits, errors_in_backward)),
    ],
)
def test_training_goes_on_as_under_ddp(ranks, case, world_size, kinds):
    found = ranks(world_size).run(case, kinds=kinds)[0]
    assert len(found) == len(kinds)
    assert max(found) < 1e-9, found


@pytest.mark.slow
def test_manual_optimization_goes_on_after_an_error_as_under_ddp(ranks):
    assert max(ranks(2).run(errors_by_hand)) < 1e-6
