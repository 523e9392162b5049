"""Evaluation under a plan against the plain model, as the ranks run it."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from entangled_models import MODELS
from wrapped import plan_of

from lightning_osdp.apply import apply_plan
from lightning_osdp.profiler import profile_model


def encoder_in_evaluation():
    """Largest difference of torch's encoder in evaluation, wrapped against plain."""
    batch = MODELS["Transformer"].batch()
    plain, model = (MODELS["Transformer"]().eval() for _ in range(2))
    model.train()
    plan = plan_of(profile_model(model, batch), world_size=2)
    root = apply_plan(model, plan, device=torch.device("cpu")).eval()
    with torch.no_grad():
        return float((root(batch["x"]) - plain(batch["x"])).abs().max()), [unit.name for unit in plan.units]
