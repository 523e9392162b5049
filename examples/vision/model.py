"""The whole of a small hierarchical vision transformer: from stage to stage half as many tokens a side, twice as wide.

Sizes in the shape comments: B images, H x W tokens of C channels, h heads of D = C / h, windows of T = M x M tokens.
After Swin (Liu et al. 2021, https://arxiv.org/abs/2103.14030), with two simplifications: shifted windows wrap around
the border, where Swin masks what came from the other side, and there is no stochastic depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class HierarchicalViTConfig:
    """Sizes of a HierarchicalViT.

    Args:
        image_size: Pixels a side.
        num_channels: Channels of an image; 1 for grey.
        num_classes: Number of different labels.
        patch_size: Pixels a side that become one token of the first stage.
        window_size: Tokens a side that attend to each other; a stage of no more tokens is one window.
        depths: Blocks of each stage.
        hidden_size: Width of the first stage; each later one is twice as wide as the one before.
        head_size: Width of an attention head; divides ``hidden_size``.
    """

    image_size: int = 32
    num_channels: int = 1
    num_classes: int = 6
    patch_size: int = 4
    window_size: int = 4
    depths: tuple[int, ...] = (2, 2, 2)
    hidden_size: int = 48
    head_size: int = 16

    def __post_init__(self) -> None:
        for name in (
            "image_size",
            "num_channels",
            "num_classes",
            "patch_size",
            "window_size",
            "hidden_size",
            "head_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"Expected {name} of at least 1, got {getattr(self, name)!r}. Raise {name}.")
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"Expected depths of at least 1, one a stage, got {self.depths!r}. Try (2, 2, 2).")
        if self.hidden_size % self.head_size:
            raise ValueError(
                "Expected hidden_size to be a multiple of head_size, got "
                f"hidden_size={self.hidden_size!r} and head_size={self.head_size!r}. Change either one."
            )
        merged = self.patch_size * 2 ** (len(self.depths) - 1)
        if self.image_size % merged:
            raise ValueError(
                f"Expected image_size to be a multiple of {merged}, which is patch_size doubled once a merging, got "
                f"{self.image_size!r}. Change image_size or patch_size, or use fewer stages."
            )
        for size in self.grid_sizes:
            if size > self.window_size and size % self.window_size:
                raise ValueError(
                    f"Expected windows to tile the tokens of every stage, {self.grid_sizes!r} a side, got "
                    f"window_size={self.window_size!r}. Use a divisor of {size}."
                )

    @property
    def grid_sizes(self) -> tuple[int, ...]:
        """Tokens a side of each stage."""
        return tuple(self.image_size // (self.patch_size * 2**stage) for stage in range(len(self.depths)))


class WindowAttention(nn.Module):
    """Every token attends to those in its window, with a bias learned for each relative position."""

    def __init__(self, hidden_size: int, *, head_size: int, window_size: int) -> None:
        super().__init__()
        self.num_heads = hidden_size // head_size
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.position_bias = nn.Embedding((2 * window_size - 1) ** 2, self.num_heads)
        self.register_buffer("relative_positions", relative_positions(window_size), persistent=False)  # (T, T)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes information within windows: (windows, T, C) -> (windows, T, C)."""
        num_windows, length, hidden = x.shape
        # (windows, T, 3C) -> three of (windows, h, T, D)
        query, key, value = (
            part.view(num_windows, length, self.num_heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        bias = self.position_bias(self.relative_positions).permute(2, 0, 1)  # (h, T, T)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))  # (windows, h, T, D)
        output: Tensor = self.proj(mixed.transpose(1, 2).reshape(num_windows, length, hidden))
        return output


class Block(nn.Module):
    """Attention in windows, then an MLP, each normalised on entry and added to the residual stream.

    Args:
        hidden_size: C.
        head_size: D.
        window_size: M.
        shift: Tokens by which windows are moved, so that two blocks connect neighbouring windows.
    """

    def __init__(self, hidden_size: int, *, head_size: int, window_size: int, shift: int) -> None:
        super().__init__()
        self.window_size = window_size
        self.shift = shift
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = WindowAttention(hidden_size, head_size=head_size, window_size=window_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the residual stream: (B, H, W, C) -> (B, H, W, C)."""
        shifted = self.attention_norm(x).roll((-self.shift, -self.shift), dims=(1, 2))
        mixed = self.attention(to_windows(shifted, self.window_size))
        mixed = from_windows(mixed, self.window_size, grid_size=x.shape[1])
        x = x + mixed.roll((self.shift, self.shift), dims=(1, 2))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class PatchMerging(nn.Module):
    """Joins 2 x 2 tokens to one of twice the width."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * hidden_size)
        self.reduce = nn.Linear(4 * hidden_size, 2 * hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Quarters the tokens: (B, H, W, C) -> (B, H/2, W/2, 2C)."""
        windows = to_windows(x, 2)  # (B * H/2 * W/2, 4, C)
        joined = windows.reshape(x.shape[0], x.shape[1] // 2, x.shape[2] // 2, 4 * x.shape[3])
        output: Tensor = self.reduce(self.norm(joined))
        return output


class HierarchicalViT(nn.Module):
    """Images in, logits of their classes out.

    Example:
        >>> model = HierarchicalViT(HierarchicalViTConfig(depths=(1, 1), hidden_size=16))
        >>> model(torch.zeros(3, 1, 32, 32)).shape
        torch.Size([3, 6])
    """

    def __init__(self, config: HierarchicalViTConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.embedding_norm = nn.LayerNorm(config.hidden_size)
        layers: list[nn.Module] = []
        for stage, (depth, grid_size) in enumerate(zip(config.depths, config.grid_sizes, strict=True)):
            window_size = min(config.window_size, grid_size)
            for index in range(depth):
                # every other block moves its windows; where one window holds all tokens there is nothing to connect
                shift = window_size // 2 if index % 2 and window_size < grid_size else 0
                layers.append(
                    Block(
                        config.hidden_size * 2**stage, head_size=config.head_size, window_size=window_size, shift=shift
                    )
                )
            if stage + 1 < len(config.depths):
                layers.append(PatchMerging(config.hidden_size * 2**stage))
        self.layers = nn.Sequential(*layers)
        hidden_size = config.hidden_size * 2 ** (len(config.depths) - 1)
        self.final_norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, config.num_classes)
        self.apply(_initialize_weights)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of each image's class.

        Args:
            images: (B, num_channels, image_size, image_size).

        Returns:
            (B, num_classes), in the dtype of the head.
        """
        x = self.embedding_norm(self.patch_embedding(images).permute(0, 2, 3, 1))  # (B, H, W, C)
        x = self.final_norm(self.layers(x))
        logits: Tensor = self.head(x.mean(dim=(1, 2)))  # (B, num_classes)
        return logits


def to_windows(x: Tensor, size: int) -> Tensor:
    """Cuts a grid of tokens into windows: (B, H, W, C) -> (B * H/M * W/M, M * M, C)."""
    batch, height, width, channels = x.shape
    tiles = x.view(batch, height // size, size, width // size, size, channels).transpose(2, 3)
    return tiles.reshape(-1, size * size, channels)


def from_windows(windows: Tensor, size: int, *, grid_size: int) -> Tensor:
    """Joins windows to a square grid of tokens: (B * H/M * W/M, M * M, C) -> (B, H, W, C)."""
    num_tiles = grid_size // size
    tiles = windows.view(-1, num_tiles, num_tiles, size, size, windows.shape[-1]).transpose(2, 3)
    return tiles.reshape(-1, grid_size, grid_size, windows.shape[-1])


def relative_positions(window_size: int) -> Tensor:
    """Returns for every two tokens of a window the number of their relative position, (T, T) int64.

    Example:
        >>> relative_positions(2)[0].tolist()  # of the first token to itself, its right, lower and diagonal neighbour
        [4, 3, 1, 0]
    """
    axis = torch.arange(window_size)
    rows, columns = axis.repeat_interleave(window_size), axis.repeat(window_size)  # (T,) each
    down = rows[:, None] - rows[None, :] + window_size - 1
    right = columns[:, None] - columns[None, :] + window_size - 1
    return down * (2 * window_size - 1) + right


def _initialize_weights(module: nn.Module) -> None:
    """Draws weights from N(0, 0.02), as Swin does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
