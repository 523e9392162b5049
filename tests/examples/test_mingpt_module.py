import math

import pytest
import torch
from lightning import Trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.mingpt.data import ByteSequences
from examples.mingpt.module import MinGPT, cross_entropy, learning_rate_factor

# advice of Lightning, given on machines that have more cores or a GPU
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The '\w+_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

SIZES = {"sequence_length": 8, "num_layers": 2, "num_heads": 2, "hidden_size": 16}


def names_of(module, parameters):
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in module.named_parameters() if id(parameter) in wanted}


def test_cross_entropy_is_the_mean_over_all_tokens():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -sum(functional.log_softmax(logits[b, t], dim=0)[targets[b, t]] for b in range(2) for t in range(3))
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand / 6)


def test_only_weights_of_linear_layers_decay():
    module = MinGPT(weight_decay=0.1, **SIZES)
    optimizer = module.configure_optimizers()["optimizer"]
    decay, keep = optimizer.param_groups
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)
    decaying = names_of(module, decay["params"])
    assert "model.head.weight" in decaying
    assert "model.blocks.1.attention.qkv.weight" in decaying
    assert len(decaying) == 2 * 4 + 1
    everything = {name for name, _ in module.named_parameters()}
    assert names_of(module, keep["params"]) == everything - decaying


@pytest.mark.parametrize(
    ("step", "decay_steps", "factor"),
    [(0, 110, 0.1), (9, 110, 1.0), (10, 110, 1.0), (60, 110, 0.55), (110, 110, 0.1), (500, None, 1.0)],
)
def test_learning_rate_rises_along_a_line_and_falls_along_a_cosine(step, decay_steps, factor):
    assert learning_rate_factor(step, warmup_steps=10, decay_steps=decay_steps) == pytest.approx(factor)


def test_validation_metrics_equal_the_ones_of_all_tokens_at_once(tmp_path):
    module = MinGPT(**SIZES)
    sequences = ByteSequences(bytes(range(8 * 7 + 1)), sequence_length=8)  # the last batch is smaller
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    (logged,) = trainer.validate(module, DataLoader(sequences, batch_size=3), verbose=False)
    tokens, targets = (torch.stack(parts) for parts in zip(*sequences, strict=True))
    with torch.no_grad():
        logits = module(tokens)
    loss = cross_entropy(logits, targets).item()
    assert logged["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["val_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert logged["val_accuracy"] == pytest.approx((logits.argmax(-1) == targets).double().mean().item())
