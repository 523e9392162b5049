"""Seconds at the edge: what people read."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Seconds for people, in s, ms or us and three digits.

    Example:
        >>> format_seconds(0.00123), format_seconds(2), format_seconds(5.6e-5), format_seconds(0)
        ('1.23 ms', '2.00 s', '56.0 us', '0 ms')
    """
    if seconds == 0:
        return "0 ms"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 0.9995:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} us"


def three_digits(value: float) -> str:
    """A number for people: three digits, or all digits before the point where it has more.

    Example:
        >>> three_digits(1.005), three_digits(99.96), three_digits(12345.6)
        ('1.00', '100', '12,346')
    """
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{decimals}f}"
