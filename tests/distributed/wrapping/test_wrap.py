"""Plans made from profiles, applied on two and four ranks: parameters that a unit frees are never read past it."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.apply import apply_plan
from lightning_osdp.profiler import profile_model
from tests.distributed.support.fits import plan_for, trainer
from tests.distributed.support.models import NUM_SAMPLES, Base
from tests.profiler.entangled_models import MODELS
from tests.profiler.wrapped import compare, plan_of
from tests.support.tiers import slow
from tests.support.wrapped_units import NESTED, NESTED_IN_NODES, NESTED_PARAMETERS, Nested, plan, units_of

pytestmark = pytest.mark.distributed


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
    plan = plan_of(profile_model(model, batch, activations=("keep",)), world_size=dist.get_world_size())
    root = apply_plan(model, plan, device=torch.device("cpu")).eval()
    with torch.no_grad():
        return float((root(batch["x"]) - plain(batch["x"])).abs().max()), [unit.name for unit in plan.units]


def padded_encoder_validates(share_units):
    """Units; validation's loss in fit, after fit, and of the plain model with the trained weights (rank 0)."""
    module, rank, world_size = PaddedEncoder(), dist.get_rank(), dist.get_world_size()
    space = SearchSpace(min_unit_bytes=0, share_units=share_units)
    plan = plan_for(PaddedEncoder(), "mixed", world_size=world_size, space=space)
    fit = trainer(OSDPStrategy(plan=plan), limit_val_batches=1.0, val_check_interval=5)
    batches = DataLoader(module.dataset(), batch_size=20)
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


CPU = torch.device("cpu")


def gradients_differ_by(name, modes):
    """Largest difference of loss and gradients from the unwrapped model's, and the units' names."""
    return compare(name, world_size=dist.get_world_size(), modes=modes)


def nested_units(units, node_size=None):
    """Units, their parameters and modes, after applying these of `Nested`; gradients of what is frozen and is not."""
    root = apply_plan(Nested(), plan(units, dist.get_world_size(), node_size), device=CPU)
    root(torch.ones(4, 4)).sum().backward()
    frozen = [p.grad is None for name, p in root.named_parameters() if "frozen" in name]
    return units_of(root), all(frozen)


ON_TWO, IN_NODES = (("DP", "ZDP"), 2), (("HSDP", "HDP", "hpZ", "ZDP", "DP"), 4)
KNOTTED = ("ManyCallingStyles", "SharedModule", "TiedInside", "FunctionalTie")
"""Models that `make test` wraps in nodes, others on two ranks: units free and gather parameters alike on both."""


@pytest.mark.parametrize(
    ("name", "modes", "world_size"),
    [
        *((name, *(IN_NODES if name in KNOTTED else ON_TWO)) for name in MODELS),
        *(slow(name, *(ON_TWO if name in KNOTTED else IN_NODES)) for name in MODELS),
        *(slow(name, *more) for name in MODELS for more in ((("ZDP",), 2), (("DP", "ZDP"), 4))),
    ],
)
def test_gradients_equal_the_unwrapped_models(ranks, name, modes, world_size):
    for difference, units in ranks(world_size).run(gradients_differ_by, name=name, modes=modes):
        assert difference < 1e-6
        assert units[0] == ""


@pytest.mark.parametrize(
    ("world_size", "node_size", "nested"),
    [(2, None, NESTED), (4, 2, NESTED_IN_NODES), slow(4, None, NESTED)],
    ids=["two", "nodes", "four"],
)
def test_units_and_modes_are_exactly_the_plans(ranks, world_size, node_size, nested):
    for units, frozen_without_gradient in ranks(world_size).run(nested_units, units=nested, node_size=node_size):
        assert units == {name: (NESTED_PARAMETERS[name], mode) for name, (_, mode) in nested.items()}
        assert frozen_without_gradient


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_encoder_layers_whose_linears_are_units_evaluate_like_the_unwrapped_model(ranks, world_size):
    for difference, units in ranks(world_size).run(encoder_in_evaluation):
        assert "encoder.layers.0.linear1" in units
        assert difference < 1e-6


@pytest.mark.parametrize(
    ("share_units", "unit", "world_size"),
    [
        (False, "encoder.layers.0.linear1", 2),
        slow(False, "encoder.layers.0.linear1", 4),
        slow(True, "encoder.layers.0", 2),
    ],
)
def test_encoders_that_pack_padded_sequences_validate_like_the_unwrapped_model(ranks, share_units, unit, world_size):
    found = ranks(world_size).run(padded_encoder_validates, share_units=share_units)[0]
    assert unit in found["units"]
    assert found["times_packed"] >= 16  # validation in fit and after it, of 8 batches each
    in_fit, after_fit, expected = found["losses"]
    assert in_fit == pytest.approx(expected, rel=1e-5)
    assert after_fit == pytest.approx(expected, rel=1e-5)
