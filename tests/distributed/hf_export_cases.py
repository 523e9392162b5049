"""Exports of sharded models by their libraries' own functions, as the ranks run them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import peft
import transformers
from cases import EVERYTHING, largest_difference, without_measuring
from hf_models import GPT2
from strategy_cases import failure, shared_folder
from user_runs import ddp, fitted

from lightning_osdp import OSDPStrategy


@without_measuring
def exported():
    """Largest difference of logits between what was trained and what was saved, and what saving shards is refused."""
    folder, module = shared_folder(), GPT2()
    space = {"search_space": EVERYTHING, "batch_size": "keep"}
    _, _, fit = fitted(OSDPStrategy(**space), module, dtype="float32", max_steps=2)
    refused = failure(lambda: module.model.save_pretrained(folder / "refused"))
    tokens = module.dataset().tensors[0][:2]
    with fit.strategy.gathered(), torch.no_grad():
        expected = module.model.eval()(tokens).logits
        if dist.get_rank() == 0:
            module.model.save_pretrained(folder / "saved")
    dist.barrier()
    with torch.no_grad():
        found = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved").eval()(tokens).logits
    moved = (GPT2().model.eval()(tokens).logits - expected).abs().max()
    return float((found - expected).abs().max()), float(moved), refused


class Adapted(GPT2):
    """With LoRA of PEFT."""

    def build(self):
        adapters = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        return peft.get_peft_model(super().build(), adapters)


@without_measuring
def adapted():
    """The same of adapters, saved by PEFT and loaded into a plain model; and how far training is from DDP's."""
    folder, module = shared_folder(), Adapted()
    expected, losses, _ = fitted(ddp(), Adapted(), max_steps=4)
    own, own_losses, fit = fitted(OSDPStrategy(search_space=EVERYTHING, batch_size="keep"), module, max_steps=4)
    off = max(abs(a - b) for a, b in zip(own_losses, losses, strict=True))
    off = max(off, largest_difference(own, expected) if dist.get_rank() == 0 else 0.0)
    refused = failure(lambda: module.model.save_pretrained(folder / "refused"))
    tokens = module.dataset().tensors[0][:2]
    with fit.strategy.gathered(), torch.no_grad():
        trained = module.model.eval()(tokens).logits
        if dist.get_rank() == 0:
            module.model.save_pretrained(folder / "saved")
    dist.barrier()
    plain = GPT2().model.double().eval()
    with torch.no_grad():
        start = plain(tokens).logits
        loaded = peft.PeftModel.from_pretrained(plain, folder / "saved").double().eval()(tokens).logits
    return off, float((loaded - trained).abs().max()), float((start - trained).abs().max()), refused
