"""Real text without a download: the sources of Python's own standard library, as bytes.

A token is a byte, so the vocabulary has 256 entries and needs no tokenizer.
"""

from __future__ import annotations

import sysconfig
from itertools import compress
from pathlib import Path

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

VOCABULARY_SIZE = 256


class ByteSequences(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text, each with the same window one byte later.

    Args:
        text: The bytes to cut.
        sequence_length: Bytes a window.
    """

    def __init__(self, text: bytes, *, sequence_length: int) -> None:
        self.tokens = _to_tensor(text)
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        # the last window also needs the byte after it
        return max(0, len(self.tokens) - 1) // self.sequence_length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and the tokens that follow them, (T,) int64 each."""
        if not 0 <= index < len(self):
            raise IndexError(f"Expected an index in [0, {len(self)}), got {index!r}.")
        start = index * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].long()
        return window[:-1], window[1:]


class TextDataModule(LightningDataModule):
    """Byte sequences for training and validation.

    Without ``path`` the text is the top level of the standard library: every n-th file is kept for
    validation. The end of a text file is kept.

    Args:
        path: A text file; the standard library's sources by default.
        max_bytes: Use at most so much of the text.
        validation_fraction: Share of the text (or of its files) kept for validation, in (0, 0.5].
        sequence_length: Bytes a sequence.
        batch_size: Sequences a batch, per rank.
        num_workers: Processes that load data.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        max_bytes: int = 4_000_000,
        validation_fraction: float = 0.1,
        sequence_length: int = 128,
        batch_size: int = 16,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("max_bytes", max_bytes),
            ("sequence_length", sequence_length),
            ("batch_size", batch_size),
        ):
            if value < 1:
                raise ValueError(f"Expected {name} of at least 1, got {value!r}. Raise {name}.")
        if not 0.0 < validation_fraction <= 0.5:
            raise ValueError(f"Expected validation_fraction in (0, 0.5], got {validation_fraction!r}. Try 0.1.")
        self.path = path
        self.max_bytes = max_bytes
        self.validation_fraction = validation_fraction
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_workers = num_workers

    @override
    def setup(self, stage: str | None = None) -> None:
        train_text, validation_text = self.split_text()
        self.train_dataset = self._sequences(train_text, "training")
        self.validation_dataset = self._sequences(validation_text, "validation")

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            self.train_dataset,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
        )

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.validation_dataset, batch_size=self.batch_size, num_workers=self.num_workers)

    def split_text(self) -> tuple[bytes, bytes]:
        """Returns the text for training and the text for validation."""
        if self.path is None:
            files = read_standard_library(max_bytes=self.max_bytes)
            return split_files(files, validation_fraction=self.validation_fraction)
        text = read_text_file(Path(self.path), max_bytes=self.max_bytes)
        train_bytes = round(len(text) * (1.0 - self.validation_fraction))
        return text[:train_bytes], text[train_bytes:]

    def byte_frequency_loss(self) -> float:
        """Returns the validation loss, in nats a byte, of a model that knows byte counts only."""
        return byte_frequency_loss(*self.split_text())

    def _sequences(self, text: bytes, purpose: str) -> ByteSequences:
        sequences = ByteSequences(text, sequence_length=self.sequence_length)
        if not len(sequences):
            raise ValueError(
                f"Expected more than sequence_length={self.sequence_length} bytes of {purpose} "
                f"text, got {len(text)}. Use a longer text, a larger max_bytes or "
                "validation_fraction, or a shorter sequence_length."
            )
        return sequences


def read_standard_library(*, max_bytes: int) -> list[bytes]:
    """Returns the top-level sources of Python's standard library, in order of their names.

    Args:
        max_bytes: Stop after so many bytes; the last file may be cut.

    Raises:
        ValueError: If this Python has no sources on disk.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    # files with a leading underscore: some are generated for the machine at hand
    paths = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not paths:
        raise ValueError(
            f"Expected the standard library's .py files in {str(folder)!r}, got none. "
            "Name a text file with the option path."
        )
    files: list[bytes] = []
    for path in paths:
        if max_bytes <= 0:
            break
        files.append(path.read_bytes()[:max_bytes])
        max_bytes -= len(files[-1])
    return files


def read_text_file(path: Path, *, max_bytes: int) -> bytes:
    """Returns the first ``max_bytes`` of a file.

    Raises:
        ValueError: If there is no such file.
    """
    if not path.is_file():
        raise ValueError(
            f"Expected path to name a text file, got {str(path)!r}, which is none. "
            "Correct path, or leave it out to train on Python's standard library."
        )
    with path.open("rb") as file:
        return file.read(max_bytes)


def split_files(files: list[bytes], *, validation_fraction: float) -> tuple[bytes, bytes]:
    """Returns the training and the validation text: every n-th file is for validation.

    Example:
        >>> split_files([b"a", b"b", b"c", b"d"], validation_fraction=0.5)
        (b'ac', b'bd')
    """
    period = round(1.0 / validation_fraction)
    held_out = [index % period == period - 1 for index in range(len(files))]
    kept = [not is_held_out for is_held_out in held_out]
    return b"".join(compress(files, kept)), b"".join(compress(files, held_out))


def byte_frequency_loss(train_text: bytes, validation_text: bytes) -> float:
    r"""Returns the cross entropy, in nats a byte, of the byte frequencies of one text on another.

    Each of the 256 bytes counts one more than it occurs, so that none is impossible:
    :math:`-\frac{1}{|v|} \sum_{b \in v} \ln \frac{n_b + 1}{|t| + 256}` with :math:`n_b` the
    occurrences of byte b in the training text t and v the validation text.

    Example:
        >>> round(byte_frequency_loss(b"", b"any"), 4)  # nothing known: ln 256
        5.5452
    """
    if not validation_text:
        raise ValueError(
            "Expected a validation text of at least 1 byte, got none. "
            "Use a longer text or a larger validation_fraction."
        )
    frequencies = (_count_bytes(train_text) + 1.0) / (len(train_text) + VOCABULARY_SIZE)
    return float(-(_count_bytes(validation_text) * frequencies.log()).sum() / len(validation_text))


def _count_bytes(text: bytes) -> Tensor:
    """Returns the occurrences of each byte, (256,) float64."""
    return torch.bincount(_to_tensor(text).long(), minlength=VOCABULARY_SIZE).double()


def _to_tensor(text: bytes) -> Tensor:
    """Returns the bytes of a text, (len(text),) uint8."""
    if not text:  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
