import math
import re

import pytest
import torch

from examples.mingpt.data import (
    ByteSequences,
    TextDataModule,
    byte_frequency_loss,
    read_standard_library,
    split_files,
)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"aaab" * 5)
    return path


def test_targets_are_the_next_bytes():
    tokens, targets = ByteSequences(b"0123456", sequence_length=3)[1]
    assert bytes(tokens.tolist()) == b"345"
    assert bytes(targets.tolist()) == b"456"
    assert tokens.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize(("num_bytes", "num_sequences"), [(0, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_every_sequence_has_a_byte_after_it(num_bytes, num_sequences):
    sequences = ByteSequences(b"x" * num_bytes, sequence_length=3)
    assert len(list(sequences)) == len(sequences) == num_sequences


def test_two_data_modules_hold_the_same_bytes():
    first, second = (TextDataModule(max_bytes=300_000) for _ in range(2))
    assert first.split_text() == second.split_text()
    train_text, validation_text = first.split_text()
    assert len(train_text) + len(validation_text) == 300_000
    assert 0.01 < len(validation_text) / 300_000 < 0.2


def test_the_standard_library_is_cut_at_max_bytes():
    files = read_standard_library(max_bytes=50_000)
    assert sum(len(file) for file in files) == 50_000
    assert b"import" in b"".join(files)


def test_validation_takes_every_nth_file():
    files = [b"0", b"1", b"2", b"3", b"4"]
    assert split_files(files, validation_fraction=0.25) == (b"0124", b"3")


def test_validation_takes_the_end_of_a_text_file(text_file):
    data = TextDataModule(path=str(text_file), validation_fraction=0.2, sequence_length=3)
    assert data.split_text() == (b"aaab" * 4, b"aaab")


def test_loaders_yield_batches_of_the_given_sizes(text_file):
    data = TextDataModule(path=str(text_file), validation_fraction=0.5, sequence_length=2, batch_size=3)
    data.setup("fit")
    assert [tokens.shape for tokens, _ in data.train_dataloader()] == [(3, 2)]  # an incomplete batch is dropped
    assert [tokens.shape for tokens, _ in data.val_dataloader()] == [(3, 2), (1, 2)]


def test_byte_frequency_loss_equals_the_value_by_hand(text_file):
    data = TextDataModule(path=str(text_file), validation_fraction=0.2)
    # training text: 12 a and 4 b, each counted once more, of 16 + 256; validation text: 3 a and 1 b
    by_hand = -(3 * math.log(13 / 272) + math.log(5 / 272)) / 4
    assert data.byte_frequency_loss() == pytest.approx(by_hand, rel=1e-12)


def test_byte_frequency_loss_is_finite_for_bytes_never_seen():
    assert byte_frequency_loss(b"aaaa", b"b") == pytest.approx(math.log(260))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "Expected max_bytes of at least 1, got 0. Raise max_bytes."),
        ({"sequence_length": 0}, "Expected sequence_length of at least 1, got 0. Raise sequence_length."),
        ({"batch_size": -1}, "Expected batch_size of at least 1, got -1. Raise batch_size."),
        ({"validation_fraction": 0.9}, "Expected validation_fraction in (0, 0.5], got 0.9. Try 0.1."),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextDataModule(**options)


def test_a_missing_file_is_refused():
    message = (
        "Expected path to name a text file, got 'no/such/file.txt', which is none. "
        "Correct path, or leave it out to train on Python's standard library."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextDataModule(path="no/such/file.txt").setup("fit")


def test_too_short_a_text_is_refused(text_file):
    message = (
        "Expected more than sequence_length=16 bytes of training text, got 16. Use a longer text, "
        "a larger max_bytes or validation_fraction, or a shorter sequence_length."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextDataModule(path=str(text_file), validation_fraction=0.2, sequence_length=16).setup("fit")


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    message = (
        f"Expected the standard library's .py files in {str(tmp_path)!r}, got none. "
        "Name a text file with the option path."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextDataModule().setup("fit")


def test_no_validation_text_has_no_byte_frequency_loss():
    message = (
        "Expected a validation text of at least 1 byte, got none. Use a longer text or a larger validation_fraction."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        byte_frequency_loss(b"text", b"")
