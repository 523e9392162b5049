"""Pictures of what benchmarks have measured; they need matplotlib."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

MB = 1e6
_PLACES = re.compile(r'(?<= )(?:d|x|y|transform)="[^"]*"')
_LONG = re.compile(r"-?\d+\.\d{2,}")
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_UNSAID = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|\n\s*(?=\n|<)", re.DOTALL)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture as SVG, small, and always the same for the same figure.

    Letters are text in a font of the viewer's, and places are tenths of a point.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "lightning-osdp", "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata=_NO_METADATA)
    text = _PLACES.sub(lambda attribute: _LONG.sub(_tenths, attribute[0]), _UNSAID.sub("", written.getvalue()))
    path.write_text(text, encoding="utf-8")


def _tenths(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")
