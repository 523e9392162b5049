"""Users' hooks that see a checkpoint: on every rank when it is saved, and before anything is loaded, as under DDP."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy.runtime.error_texts import explain_step_error
from tests.distributed.support.fits import failure, largest_difference, plan_for, shared_folder, trainer
from tests.distributed.support.models import OddMLP

pytestmark = pytest.mark.distributed

OLD = "layers.0.weight"


class Renaming(OddMLP):
    """Saves a weight under an old name and leaves out another, which is zero when it is loaded."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state["old"] = state.pop(OLD)
        del state["last.bias"]
        self.num_elements = sum(value.numel() for value in state.values())

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        state[OLD] = state.pop("old")
        state["last.bias"] = torch.zeros(3, dtype=state[OLD].dtype)


class Slower(L.Callback):
    """Halves learning rates and leaves out momenta where training is resumed, and sees them where it is saved."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.saved = [group["lr"] for each in checkpoint["optimizer_states"] for group in each["param_groups"]]

    def on_load_checkpoint(self, trainer, module, checkpoint):
        for each in checkpoint["optimizer_states"]:
            for group in each["param_groups"]:
                group["lr"] /= 2
            each["state"] = {}


def resumed(make, callbacks, path=None):
    """Two steps, or as many more from a checkpoint: the Trainer, its module, and whole weights."""
    module = Renaming("sgd")
    options = {"max_steps": 4 if path else 2, "callbacks": callbacks}
    fit = trainer(make(), **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=path)
    strategy = fit.strategy
    is_sharded = isinstance(strategy, OSDPStrategy)
    state = strategy.whole_state_dict(on_all_ranks=True) if is_sharded else strategy.lightning_module_state_dict()
    return fit, module, {name: value.clone() for name, value in state.items()}


def osdp(**options):
    plan = plan_for(OddMLP("sgd"), "mixed", world_size=dist.get_world_size())
    return OSDPStrategy(plan=plan, batch_size="keep", **options)


def like_ddp(kind):
    """Differences from DDP of what is saved and what is trained after it, with hooks of the module and a callback."""
    found = []
    for make in (lambda: DDPStrategy(process_group_backend="gloo"), lambda: osdp(state_dict_type=kind)):
        callbacks = [Slower()] if kind == "full" else []
        fit, module, _ = resumed(make, callbacks)
        folder = shared_folder()
        fit.save_checkpoint(folder / "one.ckpt")
        _, again, state = resumed(make, callbacks, folder / "one.ckpt")
        rates = [each.saved for each in callbacks]
        found.append((module.num_elements, rates, again.losses, state))
    (*same, losses, state), (*own, own_losses, own_state) = found
    off = [abs(loss - other) for loss, other in zip(own_losses, losses, strict=True)]
    return own == same, max(off), largest_difference(own_state, state)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_hooks_see_what_is_saved_and_change_what_is_loaded(ranks, kind):
    for is_same, off_losses, off_weights in ranks(2).run(like_ddp, kind=kind):
        assert is_same
        assert off_losses < 1e-6
        assert off_weights < 1e-6


class Reading(OddMLP):
    """Reads values of what is saved, on all ranks or where they are."""

    reads_everywhere = True

    def on_save_checkpoint(self, checkpoint):
        if self.reads_everywhere or self.trainer.is_global_zero:
            checkpoint["norm"] = float(checkpoint["state_dict"]["last.weight"].norm())


class Computing(OddMLP):
    """Changes values of what is loaded, before shards are read."""

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["last.weight"] = 2 * checkpoint["state_dict"]["last.weight"]


def values(kind):
    """Error on this rank of reading values on all ranks, what is saved where rank 0 reads, and values doubled."""
    module, folder = Reading("sgd"), shared_folder()
    fit = trainer(osdp(state_dict_type=kind), max_steps=1)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    text = ""
    if kind == "full":
        try:
            fit._checkpoint_connector.dump_checkpoint()
        except RuntimeError as error:
            explain_step_error(error, fit.strategy, fit.strategy._sharded)
            text = str(error)
        dist.barrier()
        module.reads_everywhere = False
    fit.save_checkpoint(folder / "one.ckpt")
    again = Computing("sgd")
    validating = trainer(osdp(), limit_val_batches=1)
    loader = again.loader(dist.get_rank(), dist.get_world_size())
    refused = failure(lambda: validating.validate(again, loader, ckpt_path=folder / "one.ckpt", verbose=False))
    whole = fit.strategy.whole_state_dict(on_all_ranks=True)["last.weight"]
    if refused is None:
        doubled = validating.strategy.whole_state_dict(on_all_ranks=True)["last.weight"]
        refused = torch.equal(doubled, 2 * whole)
    saved = torch.load(folder / "one.ckpt", weights_only=True)["norm"] if kind == "full" else None
    asked = fit.strategy.lightning_module_state_dict()
    assert (asked == {}) == (kind == "full" and dist.get_rank() > 0)
    return text, saved == pytest.approx(float(whole.norm())), refused


def test_values_of_what_is_saved_are_rank_zeros_and_those_of_shards_are_not_read_yet(ranks):
    for rank, (text, is_saved, doubled) in enumerate(ranks(2).run(values, kind="full")):
        assert ("within `if trainer.is_global_zero: ...`" in text) == (rank == 1)
        assert is_saved
        assert doubled is True
    for *_, (kind, refused) in ranks(2).run(values, kind="sharded"):
        assert kind == "ConfigurationError"
        assert "but 'last.weight' was computed from them, before each rank reads its shards" in refused
