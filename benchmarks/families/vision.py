"""Families that read images: B images of C channels, H x W pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.families.base import Batch, Family
from examples.vision.model import HierarchicalViT, HierarchicalViTConfig


class Vision(Family):
    """A classifier of images."""

    image_size, num_channels, num_classes = 32, 3, 10

    def logits(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, num_classes)."""
        raise NotImplementedError

    @override
    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        images = torch.randn(num_samples, self.num_channels, self.image_size, self.image_size)
        return images, torch.randint(self.num_classes, (num_samples,))


class HierarchicalTransformer(Vision):
    """The vision transformer of examples/vision: from stage to stage a quarter of the tokens, twice as wide."""

    depths: tuple[int, ...] = (2, 2, 2)
    hidden_size = 80

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model = HierarchicalViT(
            HierarchicalViTConfig(
                image_size=self.image_size,
                num_channels=self.num_channels,
                num_classes=self.num_classes,
                depths=self.depths,
                hidden_size=self.hidden_size,
            )
        )

    @override
    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits


class WideViT(HierarchicalTransformer):
    """A stage by itself, whose blocks are wide: an image is 64 tokens."""

    depths, hidden_size = (2,), 768


class WideHead(Vision):
    """Three wide layers behind a small stem, which have nearly all parameters, as VGG's have."""

    num_classes = 100

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.stem = nn.Conv2d(self.num_channels, 32, 3, stride=4, padding=1)  # 32 channels of 8 x 8 pixels
        widths = (2048, 2048, 2048, self.num_classes)
        self.layers = nn.ModuleList(nn.Linear(old, new) for old, new in pairwise(widths))

    @override
    def logits(self, images: Tensor) -> Tensor:
        x: Tensor = self.stem(images).flatten(1)
        for layer in self.layers:
            x = layer(F.relu(x))
        return x


class VGG(Vision):
    """VGG of 11 or 16 layers: convolutions of 3 x 3, and three Linears that have most parameters.

    Images of 32 x 32 leave one pixel for the Linears, which have 25,088 inputs where images have 224 x 224.

    References:
        Very Deep Convolutional Networks (Simonyan and Zisserman 2014), configurations A and D.
    """

    num_classes, num_convolutions = 100, (1, 1, 2, 2, 2)
    """Convolutions of each stage, behind which pixels are halved."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        features, old = list[nn.Module](), self.num_channels
        for number, new in zip(self.num_convolutions, (64, 128, 256, 512, 512), strict=True):
            for _ in range(number):
                features += [nn.Conv2d(old, new, 3, padding=1), nn.ReLU()]
                old = new
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        widths = (old, 4096, 4096, self.num_classes)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    @override
    def logits(self, images: Tensor) -> Tensor:
        first, second, last = self.layers
        x = F.dropout(F.relu(first(self.features(images).flatten(1))), training=self.training)
        logits: Tensor = last(F.dropout(F.relu(second(x)), training=self.training))
        return logits


class VGG16(VGG):
    """VGG of 16 layers."""

    num_convolutions = (2, 2, 3, 3, 3)


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut: (B, in, H, W) -> (B, out, H/stride, W/stride)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the shortcut."""
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y)) + self.shortcut(x)
        return F.relu(y, inplace=True)


class Convolutional(Vision):
    """A residual network: early stages have the activations, late ones the parameters."""

    widths: ClassVar[tuple[int, ...]] = (24, 64, 160, 256)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.stem = nn.Conv2d(self.num_channels, self.widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(self.widths[0])
        before = (self.widths[0], *self.widths[:-1])
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Residual(old, new, stride=1 if old == new else 2), Residual(new, new, stride=1))
                for old, new in zip(before, self.widths, strict=True)
            )
        )
        self.head = nn.Linear(self.widths[-1], self.num_classes)

    @override
    def logits(self, images: Tensor) -> Tensor:
        x = self.stages(F.relu(self.stem_norm(self.stem(images))))
        logits: Tensor = self.head(torch.mean(x, dim=(2, 3)))
        return logits
