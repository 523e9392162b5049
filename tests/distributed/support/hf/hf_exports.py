"""Exports of sharded models by their libraries' own functions, as the ranks run them."""

import peft
import torch
import torch.distributed as dist
import transformers

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import EVERYTHING, failure, shared_folder, without_measuring
from tests.distributed.support.hf.hf_models import GPT2
from tests.distributed.support.user_runs import ddp, difference, fitted


class Adapted(GPT2):
    """GPT-2 with LoRA of PEFT."""

    whole = ()
    """Modules of which a copy is trained as a whole."""

    def build(self):
        options = {"target_modules": ["c_attn", "c_fc"], "modules_to_save": [*self.whole] or None}
        return peft.get_peft_model(super().build(), peft.LoraConfig(r=4, fan_in_fan_out=True, **options))


class AdaptedBesideWhole(Adapted):
    """Has a norm and the head trained as a whole, which is tied to the embedding before."""

    whole = ("ln_f", "lm_head")


def saved(module, fit, load):
    """Largest difference of logits between what was trained and what was saved, and what saving shards is refused.

    Args:
        module: whose model saves itself.
        fit: that has trained it.
        load: makes a model of the folder.
    """
    folder, tokens = shared_folder(), module.dataset().tensors[0][:2]
    refused = failure(lambda: module.model.save_pretrained(folder / "refused"))
    with fit.strategy.gathered(), torch.no_grad():
        trained = module.model.eval()(tokens).logits
        if dist.get_rank() == 0:
            module.model.save_pretrained(folder / "saved")
    dist.barrier()
    with torch.no_grad():
        start = GPT2().model.eval()(tokens).logits
        loaded = load(folder / "saved").to(trained.dtype).eval()(tokens).logits
    return float((loaded - trained).abs().max()), float((start - trained).abs().max()), refused


@without_measuring
def exported():
    """Compares an exported whole model with what was trained."""
    module = GPT2()
    strategy = OSDPStrategy(search_space=EVERYTHING, batch_size="keep")
    _, _, fit = fitted(strategy, module, dtype="float32", max_steps=2)
    return saved(module, fit, transformers.GPT2LMHeadModel.from_pretrained)


@without_measuring
def adapted(make):
    """Compares exported adapters, loaded into a plain model, with what was trained; and training with DDP's."""
    module = make()
    own = fitted(OSDPStrategy(search_space=EVERYTHING, batch_size="keep"), module, max_steps=4)
    off = difference(own, fitted(ddp(), make(), max_steps=4))
    return off, *saved(module, own[2], lambda folder: peft.PeftModel.from_pretrained(GPT2().model.double(), folder))
