"""States that users leave something out of: saved so, and resumed, as under DDP."""

import pytest
import torch.distributed as dist

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import shared_folder
from tests.distributed.support.user_runs import Chain, ddp, fitted, plan_with

pytestmark = pytest.mark.distributed


class WithoutBackbone(Chain):
    """Saves what it trains alone."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("first.")}


def saved(kind):
    """Losses before and after a resumption, under DDP and here, and names that were saved."""
    found = []
    plan = plan_with(WithoutBackbone, "mixed")
    for make in (ddp, lambda: OSDPStrategy(plan=plan, state_dict_type=kind)):
        folder = shared_folder()
        _, losses, fit = fitted(make(), WithoutBackbone(), max_steps=2)
        fit.save_checkpoint(folder / "one.ckpt")
        state, again, _ = fitted(make(), WithoutBackbone(), max_steps=4, ckpt_path=folder / "one.ckpt")
        found.append((list(state) if dist.get_rank() == 0 else [], [*losses, *again]))
    return found


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_states_without_a_backbone_are_saved_and_resumed(ranks, kind):
    for (names, losses), (own_names, own_losses) in ranks(2).run(saved, kind=kind):
        assert own_names == names
        assert not any(name.startswith("first.") for name in names)
        assert own_losses == pytest.approx(losses, abs=1e-10)
        assert len(losses) == 4
