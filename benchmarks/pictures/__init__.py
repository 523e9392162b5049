"""Pictures of what benchmarks have measured; they need matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

MB = 1e6


def save(figure: Figure, path: Path) -> None:
    """Writes a picture as SVG, always the same for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "lightning-osdp"}):
        figure.savefig(path, metadata={"Date": None})
