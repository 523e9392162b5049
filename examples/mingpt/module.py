"""Training of minGPT: loss, metrics, optimizer. The module knows nothing of distribution."""

from __future__ import annotations

import math
from functools import partial

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity
from typing_extensions import override

from examples.mingpt.model import GPT, GPTConfig

Batch = tuple[Tensor, Tensor]  # tokens and the tokens that follow them, (B, T) int64 each


class MinGPT(LightningModule):
    """A GPT that learns to predict the next byte.

    Args:
        vocabulary_size: Number of different tokens.
        sequence_length: Tokens a sequence.
        num_layers: Number of transformer blocks.
        num_heads: Attention heads a block.
        hidden_size: Width of the residual stream.
        dropout: Probability of dropping an activation.
        learning_rate: Highest learning rate.
        weight_decay: Of the weights of Linear layers; nothing else decays.
        beta1: AdamW's decay of the gradient's mean.
        beta2: AdamW's decay of the squared gradient's mean.
        warmup_steps: Optimizer steps in which the learning rate rises.
        decay_steps: Optimizer step at which its fall, along a cosine, has reached a tenth;
            None keeps it constant after the warmup.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int = 256,
        sequence_length: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        hidden_size: int = 192,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.95,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = (beta1, beta2)
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.model = GPT(
            GPTConfig(
                vocabulary_size=vocabulary_size,
                sequence_length=sequence_length,
                num_layers=num_layers,
                num_heads=num_heads,
                hidden_size=hidden_size,
                dropout=dropout,
            )
        )
        self.val_perplexity = Perplexity()
        self.val_accuracy = MulticlassAccuracy(num_classes=vocabulary_size, average="micro")

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token: (B, T) int64 -> (B, T, V)."""
        logits: Tensor = self.model(tokens)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = cross_entropy(self(tokens), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        self.val_perplexity.update(logits, targets)
        self.val_accuracy.update(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", cross_entropy(logits, targets), prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.val_perplexity)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        # Asking the layers, not parameter.dim() >= 2: embeddings do not decay, and under FSDPStrategy, which
        # configs/fsdp.yaml compares with, sharded parameters are flat.
        decaying = {id(layer.weight) for layer in self.modules() if isinstance(layer, nn.Linear)}
        decay = [weight for weight in self.parameters() if id(weight) in decaying]
        keep = [parameter for parameter in self.parameters() if id(parameter) not in decaying]
        optimizer = AdamW(
            [
                {"params": decay, "weight_decay": self.weight_decay},
                {"params": keep, "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
            betas=self.betas,
        )
        factor = partial(learning_rate_factor, warmup_steps=self.warmup_steps, decay_steps=self.decay_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss in nats a token: (B, T, V) and (B, T) int64 -> ()."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate_factor(step: int, *, warmup_steps: int, decay_steps: int | None) -> float:
    """Returns what multiplies the learning rate at an optimizer step: up a line, down a cosine.

    Example:
        >>> [learning_rate_factor(step, warmup_steps=2, decay_steps=4) for step in (0, 1, 2, 4, 9)]
        [0.5, 1.0, 1.0, 0.1, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))
