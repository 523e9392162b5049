"""All sums of two numbers of two digits, as sequences of digits.

``85 + 50 = 135`` is the sequence ``8 5 5 0 5 3 1``: two digits of each number, then the digits of the sum, the last one
first, because addition finds them in that order. After minGPT's adder, https://github.com/karpathy/minGPT.
"""

from __future__ import annotations

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

NUM_DIGITS = 2
NUM_SUM_DIGITS = NUM_DIGITS + 1
PROMPT_LENGTH = 2 * NUM_DIGITS
SEQUENCE_LENGTH = PROMPT_LENGTH + NUM_SUM_DIGITS
NUM_NUMBERS = 10**NUM_DIGITS
NUM_SUMS = NUM_NUMBERS**2


class Sums(Dataset[Tensor]):
    """Sums as sequences of digits.

    Args:
        digits: (sums, SEQUENCE_LENGTH) int64, as `to_digits` returns them.
    """

    def __init__(self, digits: Tensor) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    @override
    def __getitem__(self, index: int) -> Tensor:
        """Returns one sum, (SEQUENCE_LENGTH,) int64."""
        return self.digits[index]


class AdditionDataModule(LightningDataModule):
    """Splits all 10,000 sums, in an order drawn from a seed, into those to learn and those held out.

    Args:
        num_held_out: Sums that training never shows.
        batch_size: Sums a batch, per rank.
        num_workers: Processes that load data.
        seed: Of the order of the sums.
    """

    def __init__(self, *, num_held_out: int = 1000, batch_size: int = 128, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= num_held_out < NUM_SUMS:
            raise ValueError(
                f"Expected num_held_out in [1, {NUM_SUMS}), got {num_held_out!r}. Try a tenth of the sums, 1000."
            )
        if batch_size < 1:
            raise ValueError(f"Expected batch_size of at least 1, got {batch_size!r}. Raise batch_size.")
        self.num_held_out = num_held_out
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed

    @override
    def setup(self, stage: str | None = None) -> None:
        order = torch.randperm(NUM_SUMS, generator=torch.Generator().manual_seed(self.seed))
        digits = to_digits(order // NUM_NUMBERS, order % NUM_NUMBERS)
        self.held_out_sums = Sums(digits[: self.num_held_out])
        self.train_sums = Sums(digits[self.num_held_out :])

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(
            self.train_sums, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.held_out_sums, batch_size=self.batch_size, num_workers=self.num_workers)


def to_digits(first: Tensor, second: Tensor) -> Tensor:
    """Returns the digits of two numbers and, the last one first, of their sum.

    Args:
        first: (N,) int64, each in [0, 100).
        second: Likewise.

    Returns:
        (N, SEQUENCE_LENGTH) int64, each in [0, 10).

    Raises:
        ValueError: If a number has more than two digits, or a sign.

    Example:
        >>> to_digits(torch.tensor([85]), torch.tensor([50])).tolist()
        [[8, 5, 5, 0, 5, 3, 1]]
    """
    for numbers in (first, second):
        outside = numbers[(numbers < 0) | (numbers >= NUM_NUMBERS)]
        if len(outside):
            raise ValueError(
                f"Expected numbers in [0, {NUM_NUMBERS}), got {int(outside[0])}. Add numbers of {NUM_DIGITS} digits."
            )
    columns = [*_digits(first, NUM_DIGITS)[::-1], *_digits(second, NUM_DIGITS)[::-1]]
    return torch.stack([*columns, *_digits(first + second, NUM_SUM_DIGITS)], dim=1)


def to_text(digits: Tensor) -> str:
    """Returns one sum as people write it: (SEQUENCE_LENGTH,) int64.

    Example:
        >>> to_text(torch.tensor([8, 5, 5, 0, 5, 3, 1]))
        '85 + 50 = 135'
    """
    first, second = digits[:NUM_DIGITS], digits[NUM_DIGITS:PROMPT_LENGTH]
    return f"{_number(first)} + {_number(second)} = {_number(digits[PROMPT_LENGTH:].flip(0))}"


def _digits(numbers: Tensor, num_digits: int) -> list[Tensor]:
    """Returns the digits of numbers, the last one first: (N,) -> num_digits times (N,)."""
    return [numbers // 10**place % 10 for place in range(num_digits)]


def _number(digits: Tensor) -> int:
    """Returns the number that digits, the first one first, stand for."""
    return int("".join(map(str, digits.tolist())))
