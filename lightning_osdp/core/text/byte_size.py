"""Bytes at the edge: what people write and read."""

from __future__ import annotations

import re
from decimal import Decimal

from lightning_osdp.core.plans.document import shown
from lightning_osdp.errors import ConfigurationError

_FACTORS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_PATTERN = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | str) -> int:
    """Bytes from an int or a text.

    Args:
        value: bytes, or a number with a unit: ``"8GiB"`` is 8 * 2^30, ``"500MB"`` is 500 * 10^6.

    Raises:
        ConfigurationError: the text has no such form, or the number of bytes is below 1, or 2^63 or more.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("500MB"), parse_bytes(42)
        (1536, 500000000, 42)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigurationError(
            f"A memory size must be a number of bytes (int) or a text such as '8GiB' or '500MB', got {shown(value)}."
        )
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _PATTERN.fullmatch(value)
        if match is None or match["unit"].lower() not in _FACTORS:
            raise ConfigurationError(
                "A memory size must be a number followed by B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB"
                f" (powers of 1024), such as '8GiB' or '500MB', got {shown(value)}."
            )
        # binary fractions would lose a byte: 1.001 * 1000 is 1000.9999999999999
        num_bytes = int(Decimal(match["number"]) * _FACTORS[match["unit"].lower()])
    if num_bytes < 1:
        raise ConfigurationError(f"A memory size must be at least one byte, got {shown(value)}.")
    if num_bytes >= 2**63:
        raise ConfigurationError(f"A memory size must be less than 2^63 bytes (8 EiB), got {shown(value)}.")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024 and three digits.

    Example:
        >>> format_bytes(1536), format_bytes(5), format_bytes(-3 * 2**30)
        ('1.50 KiB', '5 B', '-3.00 GiB')
    """
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < (1024 if unit == "B" else 999.5):
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{size:.0f} B"
    decimals = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


def format_at_least(num_bytes: int) -> str:
    """Bytes for people, rounded up: `parse_bytes` of the text gives no fewer bytes.

    Example:
        >>> format_at_least(1536), format_at_least(1537), format_at_least(2**30 + 1)
        ('1.50 KiB', '1.51 KiB', '1.01 GiB')
    """
    text = format_bytes(num_bytes)
    if parse_bytes(text) >= num_bytes:
        return text
    number, unit = text.split()
    _, _, decimals = number.partition(".")
    return f"{Decimal(number) + Decimal(1).scaleb(-len(decimals))} {unit}"
