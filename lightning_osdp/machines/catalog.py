"""Devices and links by name: those of ``catalog.toml``, and those of a file of the user's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from lightning_osdp.core.plans.document import read_value
from lightning_osdp.core.text.nearest import nearest
from lightning_osdp.errors import ConfigurationError, PlanFormatError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Entry = TypeVar("_Entry")


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Link between two devices, or between a device and its host."""

    gb_per_s: float
    """10^9 bytes per second in one direction, as its specification says."""
    reached: float
    """Fraction of `gb_per_s` that collectives reach."""
    latency_us: float
    """10^-6 seconds of one step of a ring, whatever its bytes."""
    source: str

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that collectives reach, in one direction."""
        return self.gb_per_s * 1e9 * self.reached


@dataclass(frozen=True, kw_only=True)
class Device:
    """Memory and rates of a GPU."""

    title: str
    memory_mib: int
    """2^20 bytes that the driver reports."""
    memory_gb_per_s: float
    """10^9 bytes per second to and from its memory, as its data sheet says."""
    tflops: Mapping[str, float]
    """10^12 floating-point operations per second of dense matrix products by dtype, as its data sheet says."""
    compute_reached: float
    """Fraction of `tflops` that large matrix products reach."""
    memory_reached: float
    """Fraction of `memory_gb_per_s` that programs reach."""
    peers: str
    """Name of the `Interconnect` to the other devices of a node."""
    host: str
    """Name of the `Interconnect` to the host's memory."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Devices and links by name."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    links: Mapping[str, Interconnect] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """The device of this name, or a `ConfigurationError` with the nearest names."""
        return _find(self.devices, name, "device")

    def link(self, name: str) -> Interconnect:
        """The link of this name, or a `ConfigurationError` with the nearest names."""
        return _find(self.links, name, "link")


def read_catalog(path: str | Path | None = None) -> Catalog:
    """Catalog of the package, with entries of a user's file added or in place of equal names.

    Args:
        path: a TOML file with tables ``[devices.NAME]`` and ``[links.NAME]`` of the fields above.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is missing, unknown or of another type.
    """
    packaged = _parse(files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8"), "catalog.toml")
    if path is None:
        return packaged
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Expected a TOML file of devices at {str(path)!r}, but it cannot be read: {error}."
        ) from error
    users = _parse(text, f"file {str(path)!r}")
    return Catalog(devices={**packaged.devices, **users.devices}, links={**packaged.links, **users.links})


def _parse(text: str, source: str) -> Catalog:
    try:
        found = read_value(Catalog, tomllib.loads(text), source)
    except (tomllib.TOMLDecodeError, PlanFormatError, RecursionError) as error:
        raise ConfigurationError(f"Expected tables [devices.NAME] and [links.NAME] in {source}: {error}") from error
    assert isinstance(found, Catalog)
    for table in (found.devices, found.links):
        for name, entry in table.items():
            _check_positive(vars(entry), f"{source} at {name!r}")
    return found


def _check_positive(values: Mapping[str, object], where: str) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_positive(value, f"{where}, {name}")
        elif isinstance(value, (int, float)) and not 0 < value <= (1 if name.endswith("reached") else float("inf")):
            expected = "a fraction above 0 and at most 1" if name.endswith("reached") else "a number above 0"
            raise ConfigurationError(f"Expected {expected} for {name} in {where}, got {value!r}.")


def _find(table: Mapping[str, _Entry], name: str, kind: str) -> _Entry:
    if name not in table:
        hint = nearest(name, table, f"There are {', '.join(table)}.")
        raise ConfigurationError(f"Expected the name of a {kind}, got {name!r}. {hint}")
    return table[name]
