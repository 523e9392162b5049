"""Evaluation under a plan against the plain model, as the ranks run it."""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from cases import plan_for, trainer
from entangled_models import MODELS
from models import NUM_SAMPLES, Base
from wrapped import plan_of

from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.apply import apply_plan
from lightning_osdp.profiler import profile_model

WIDTH, VOCABULARY, LENGTH = 8, 12, 6


class PaddedEncoder(Base):
    """torch's encoder on sequences of different lengths: in evaluation it packs them into a nested tensor."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch):
        (tokens,) = batch
        out = self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))
        return F.cross_entropy(out.flatten(0, 1), tokens.flatten(), ignore_index=0)

    def dataset(self):
        tokens = torch.randint(1, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
        lengths = 2 + torch.arange(NUM_SAMPLES) % (LENGTH - 1)
        return TensorDataset(tokens * (torch.arange(LENGTH) < lengths.unsqueeze(1)))


def encoder_in_evaluation():
    """Largest difference of torch's encoder in evaluation, wrapped against plain."""
    batch = MODELS["Transformer"].batch()
    plain, model = (MODELS["Transformer"]().eval() for _ in range(2))
    model.train()
    plan = plan_of(profile_model(model, batch), world_size=dist.get_world_size())
    root = apply_plan(model, plan, device=torch.device("cpu")).eval()
    with torch.no_grad():
        return float((root(batch["x"]) - plain(batch["x"])).abs().max()), [unit.name for unit in plan.units]


def padded_encoder_validates(share_units):
    """Units; validation's loss in fit, after fit, and of the plain model with the trained weights (rank 0)."""
    module, rank, world_size = PaddedEncoder(), dist.get_rank(), dist.get_world_size()
    space = SearchSpace(min_unit_bytes=0, share_units=share_units)
    plan = plan_for(PaddedEncoder(), "mixed", world_size=world_size, space=space)
    fit = trainer(OSDPStrategy(plan=plan), limit_val_batches=1.0, val_check_interval=5)
    batches = DataLoader(module.dataset(), batch_size=8)
    with mock.patch.object(torch, "_nested_tensor_from_mask", wraps=torch._nested_tensor_from_mask) as packed:
        fit.fit(module, module.loader(rank, world_size), batches)
        in_fit = float(fit.callback_metrics["val_loss"])
        after_fit = fit.validate(module, batches, verbose=False)[0]["val_loss"]
    state = fit.strategy.lightning_module_state_dict()
    if rank != 0:
        return None
    plain = PaddedEncoder().eval()
    plain.load_state_dict(state)
    with torch.no_grad():
        expected = float(torch.stack([plain.loss(batch) for batch in batches]).mean())
    return {
        "units": [name for unit in plan.units for name in unit.modules or (unit.name,)],
        "losses": (in_fit, after_fit, expected),
        "times_packed": packed.call_count,
    }
