"""Exports of sharded models by their libraries' own functions, as the ranks run them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from cases import EVERYTHING, without_measuring
from hf_models import GPT2
from strategy_cases import failure, shared_folder
from user_runs import fitted

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
