"""Training of the adder: loss on the digits of the sum, accuracy of whole sums. Nothing here knows of distribution."""

from __future__ import annotations

from functools import partial

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassExactMatch
from typing_extensions import override

from examples.addition.data import NUM_SUM_DIGITS, PROMPT_LENGTH, SEQUENCE_LENGTH
from examples.mingpt.model import GPT, GPTConfig
from examples.mingpt.module import cross_entropy, learning_rate_factor


class Adder(LightningModule):
    """A GPT that continues two numbers by their sum.

    Args:
        num_layers: Number of transformer blocks.
        num_heads: Attention heads a block.
        hidden_size: Width of the residual stream.
        learning_rate: Highest learning rate.
        weight_decay: Of all parameters.
        warmup_steps: Optimizer steps in which the learning rate rises.
        decay_steps: Optimizer step at which its fall, along a cosine, has reached a tenth;
            None keeps it constant after the warmup.
    """

    def __init__(
        self,
        *,
        num_layers: int = 2,
        num_heads: int = 4,
        hidden_size: int = 128,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.model = GPT(
            GPTConfig(
                vocabulary_size=10,
                sequence_length=SEQUENCE_LENGTH - 1,  # nothing follows the last digit
                num_layers=num_layers,
                num_heads=num_heads,
                hidden_size=hidden_size,
            )
        )
        self.val_accuracy = MulticlassExactMatch(num_classes=10)

    @override
    def forward(self, digits: Tensor) -> Tensor:
        """Returns the logits of the next digit: (B, T) int64 -> (B, T, 10)."""
        logits: Tensor = self.model(digits)
        return logits

    @torch.no_grad()
    def add(self, prompts: Tensor) -> Tensor:
        """Returns the most likely sums, each digit after the ones before: (B, PROMPT_LENGTH) -> (B, NUM_SUM_DIGITS)."""
        digits = prompts
        for _ in range(NUM_SUM_DIGITS):
            next_digit = self(digits)[:, -1:].argmax(dim=-1)  # (B, 1)
            digits = torch.cat((digits, next_digit), dim=1)
        return digits[:, PROMPT_LENGTH:]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        # only the sum follows from what comes before it; the two numbers are random
        loss = cross_entropy(logits[:, -NUM_SUM_DIGITS:], batch[:, -NUM_SUM_DIGITS:])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_accuracy.update(self.add(batch[:, :PROMPT_LENGTH]), batch[:, PROMPT_LENGTH:])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        factor = partial(learning_rate_factor, warmup_steps=self.warmup_steps, decay_steps=self.decay_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }
