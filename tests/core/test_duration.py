"""Seconds as people read them."""

import pytest

from lightning_osdp.core.text.duration import format_seconds, three_digits


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (1.234, "1.23 s"),
        (0.9996, "1.00 s"),
        (0.9994, "999 ms"),
        (0.182, "182 ms"),
        (0.0012, "1.20 ms"),
        (0.00099996, "1.00 ms"),
        (8e-5, "80.0 us"),
        (1.5e-9, "0.00 us"),
        (3600, "3,600 s"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds_are_shown_in_the_unit_that_fits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (9.994, "9.99"), (9.996, "10.0"), (87.91, "87.9"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_are_shown_in_three_digits(value, text):
    assert three_digits(value) == text
