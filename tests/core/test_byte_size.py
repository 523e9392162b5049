"""Bytes as people write and read them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.text.byte_size import format_at_least, format_bytes, parse_bytes
from lightning_osdp.errors import ConfigurationError, OSDPError


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1, 1),
        (123_456_789_012, 123_456_789_012),
        ("42", 42),
        ("42B", 42),
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1 kB", 1000),
        ("1KB", 1000),
        ("1 KiB", 1024),
        ("2TB", 2 * 10**12),
        ("2tib", 2 * 2**40),
        ("  1.5  MiB ", 3 * 2**19),
        (".5GiB", 2**29),
        ("3.GiB", 3 * 2**30),
        ("1.001kB", 1001),  # 1.001 * 1000 is 1000.9999999999999
        ("9007199254740993", 2**53 + 1),  # no float holds it
        ("0.7kB", 700),
        ("1.0001KiB", 1024),  # rounded down to whole bytes
    ],
)
def test_sizes_are_read_as_whole_bytes(value, num_bytes):
    assert parse_bytes(value) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8 gibibytes", "8G", "-8GiB", "8GiB8", "1e9", "1,5GiB", "0x10", "8 GiB GiB", "nan", "inf", "1.2.3"],
)
def test_other_texts_are_refused_with_the_forms_that_work(text):
    message = (
        "A memory size must be a number followed by B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB"
        f" (powers of 1024), such as '8GiB' or '500MB', got {text!r}."
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [0, -1, "0", "0.0GiB", "0.5B", "0.0001kB"])
def test_less_than_a_byte_is_refused(value):
    with pytest.raises(ConfigurationError, match=f"^A memory size must be at least one byte, got {value!r}\\.$"):
        parse_bytes(value)


@pytest.mark.parametrize("value", [True, False, 8e9, None, b"8GiB", ["8GiB"], float("nan")])
def test_other_types_are_refused(value):
    message = f"A memory size must be a number of bytes (int) or a text such as '8GiB' or '500MB', got {value!r}."
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        parse_bytes(value)


def test_a_size_that_cannot_be_used_is_a_value_error_of_this_package():
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(ConfigurationError, OSDPError)


@pytest.mark.parametrize("value", [2**63, "9" * 400, "8388608 TiB"])
def test_more_than_any_memory_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"^A memory size must be less than 2\^63 bytes \(8 EiB\), got .*\.$"):
        parse_bytes(value)


@settings(deadline=None)
@given(st.integers(1, 2**60))
def test_plain_numbers_are_themselves_as_int_and_as_text(num_bytes):
    assert parse_bytes(num_bytes) == parse_bytes(str(num_bytes)) == parse_bytes(f"{num_bytes} B") == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (9.996 * 1024, "10.0 KiB"),
        (99.96 * 1024, "100 KiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "0.98 MiB"),
        (2**20, "1.00 MiB"),
        (62.9 * 2**20, "62.9 MiB"),
        (8 * 2**30, "8.00 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**40, "1.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-3 * 2**30, "-3.00 GiB"),
        (-5, "-5 B"),
    ],
)
def test_bytes_are_shown_in_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@settings(deadline=None)
@given(st.integers(1, 2**50))
def test_what_is_shown_reads_back_within_its_last_digit(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@given(st.integers(1, 2**60) | st.integers(-5, 5).map(lambda more: 2**40 - 2**29 + more) | st.integers(1000, 1030))
def test_a_text_that_is_rounded_up_is_read_as_no_fewer_bytes_and_hardly_more(num_bytes):
    read = parse_bytes(format_at_least(num_bytes))
    assert num_bytes <= read <= num_bytes * 1.011 + 1
