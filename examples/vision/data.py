"""Drawn shapes: grey images of one shape each, in any place, size, orientation and brightness, under noise.

The images are computed, so nothing is downloaded, and the same seed draws the same images. A shape is the set of points
at which a signed distance is negative: the distance to its border, in pixels, negative inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

Image = tuple[Tensor, Tensor]  # pixels (1, size, size) float32 and label () int64; of a batch (B, 1, ...) and (B,)


def disc(x: Tensor, y: Tensor) -> Tensor:
    """Returns the signed distance to a circle of radius 1."""
    return torch.hypot(x, y) - 1.0


def ring(x: Tensor, y: Tensor) -> Tensor:
    """Returns the signed distance to two circles around one centre."""
    return (torch.hypot(x, y) - 0.8).abs() - 0.2


def square(x: Tensor, y: Tensor) -> Tensor:
    """Returns the signed distance to a square; near its corners, a bound on it."""
    return torch.maximum(x.abs(), y.abs()) - 0.85


def triangle(x: Tensor, y: Tensor) -> Tensor:
    """Returns the signed distance to a triangle of equal sides; near its corners, a bound on it."""
    slope = math.sqrt(3.0) / 2.0
    return torch.maximum(slope * x.abs() + 0.5 * y, -y) - 0.55


def cross(x: Tensor, y: Tensor) -> Tensor:
    """Returns the signed distance to two crossing bars; near their corners, a bound on it."""
    upright = torch.maximum(x.abs() - 0.3, y.abs() - 1.0)
    lying = torch.maximum(x.abs() - 1.0, y.abs() - 0.3)
    return torch.minimum(upright, lying)


def crescent(x: Tensor, y: Tensor) -> Tensor:
    """Returns the signed distance to a disc without another one; near its tips, a bound on it."""
    return torch.maximum(torch.hypot(x, y) - 1.0, 0.8 - torch.hypot(x - 0.55, y))


SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    shape.__name__: shape for shape in (disc, ring, square, triangle, cross, crescent)
}
"""Shapes by name, in the order of their labels."""


def draw(num_images: int, *, size: int, noise: float, generator: torch.Generator) -> Image:
    """Returns images of shapes drawn at random.

    Args:
        num_images: N.
        size: Pixels a side.
        noise: Standard deviation of each pixel's noise, where the shape differs from the ground by 0.5 to 1.
        generator: Source of all randomness.

    Returns:
        Pixels (N, 1, size, size) float32 and labels (N,) int64.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num_images, 1, 1, generator=generator)

    labels = torch.randint(len(SHAPES), (num_images,), generator=generator)
    radius = uniform(0.2, 0.35) * size
    centre_x, centre_y = uniform(0.4, 0.6) * size, uniform(0.4, 0.6) * size
    angle = uniform(0.0, 2.0 * math.pi)
    contrast = uniform(0.5, 1.0) * torch.where(uniform(0.0, 1.0) < 0.5, -1.0, 1.0)
    axis = torch.arange(size) + 0.5
    x, y = (axis[None, None, :] - centre_x) / radius, (axis[None, :, None] - centre_y) / radius  # (N, 1, size) each
    turned_x, turned_y = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()
    distance = torch.empty(num_images, size, size)
    for label, signed_distance in enumerate(SHAPES.values()):
        chosen = labels == label
        distance[chosen] = signed_distance(turned_x[chosen], turned_y[chosen])
    # the border is one pixel wide
    inside = (0.5 - distance * radius).clamp(0.0, 1.0)
    pixels = contrast * inside + noise * torch.randn(inside.shape, generator=generator)
    return pixels[:, None], labels


class DrawnShapes(Dataset[Image]):
    """Images and labels, as `draw` returns them."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    @override
    def __getitem__(self, index: int) -> Image:
        """Returns one image and its label."""
        return self.images[index], self.labels[index]


class ShapesDataModule(LightningDataModule):
    """Drawn shapes for training and validation, each from a seed of its own.

    Args:
        num_train: Images to learn from.
        num_validation: Images kept for validation.
        image_size: Pixels a side.
        noise: Standard deviation of each pixel's noise.
        batch_size: Images a batch, per rank.
        num_workers: Processes that load data.
        seed: Of the images.
    """

    def __init__(
        self,
        *,
        num_train: int = 12_000,
        num_validation: int = 2000,
        image_size: int = 32,
        noise: float = 0.1,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_train", num_train),
            ("num_validation", num_validation),
            ("image_size", image_size),
            ("batch_size", batch_size),
        ):
            if value < 1:
                raise ValueError(f"Expected {name} of at least 1, got {value!r}. Raise {name}.")
        if noise < 0.0:
            raise ValueError(f"Expected noise of at least 0, got {noise!r}. Use 0.0 for clean images.")
        self.num_train = num_train
        self.num_validation = num_validation
        self.image_size = image_size
        self.noise = noise
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed

    @override
    def setup(self, stage: str | None = None) -> None:
        self.train_shapes = self._draw(self.num_train, seed=2 * self.seed)
        self.validation_shapes = self._draw(self.num_validation, seed=2 * self.seed + 1)

    @override
    def train_dataloader(self) -> DataLoader[Image]:
        return DataLoader(
            self.train_shapes, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    @override
    def val_dataloader(self) -> DataLoader[Image]:
        return DataLoader(self.validation_shapes, batch_size=self.batch_size, num_workers=self.num_workers)

    def _draw(self, num_images: int, *, seed: int) -> DrawnShapes:
        generator = torch.Generator().manual_seed(seed)
        return DrawnShapes(*draw(num_images, size=self.image_size, noise=self.noise, generator=generator))
