"""Training of the vision transformer: loss, metric, optimizer. The module knows nothing of distribution."""

from __future__ import annotations

from functools import partial

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from examples.mingpt.module import learning_rate_factor
from examples.vision.data import Image
from examples.vision.model import HierarchicalViT, HierarchicalViTConfig


class ShapeClassifier(LightningModule):
    """A hierarchical vision transformer that names the shape in an image.

    Args:
        num_classes: Number of different labels.
        image_size: Pixels a side.
        patch_size: Pixels a side that become one token.
        window_size: Tokens a side that attend to each other.
        depths: Blocks of each stage.
        hidden_size: Width of the first stage; it doubles with each later one.
        head_size: Width of an attention head.
        learning_rate: Highest learning rate.
        weight_decay: Of all parameters.
        warmup_steps: Optimizer steps in which the learning rate rises.
        decay_steps: Optimizer step at which its fall, along a cosine, has reached a tenth;
            None keeps it constant after the warmup.
    """

    def __init__(
        self,
        *,
        num_classes: int = 6,
        image_size: int = 32,
        patch_size: int = 4,
        window_size: int = 4,
        depths: tuple[int, ...] = (2, 2, 2),
        hidden_size: int = 48,
        head_size: int = 16,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.model = HierarchicalViT(
            HierarchicalViTConfig(
                image_size=image_size,
                num_classes=num_classes,
                patch_size=patch_size,
                window_size=window_size,
                depths=tuple(depths),
                hidden_size=hidden_size,
                head_size=head_size,
            )
        )
        self.val_accuracy = MulticlassAccuracy(num_classes=num_classes, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of each image's class: (B, 1, size, size) -> (B, num_classes)."""
        logits: Tensor = self.model(images)
        return logits

    @override
    def training_step(self, batch: Image, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Image, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        factor = partial(learning_rate_factor, warmup_steps=self.warmup_steps, decay_steps=self.decay_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }
