"""Rectangles, lines and words on a white page: as much of SVG as a picture of a plan takes.

Written here rather than with a plotting library: every process that imports torchmetrics would import that, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

Anchor = Literal["start", "middle", "end"]

_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_HATCH_PX = 7


@dataclass(frozen=True)
class Fill:
    """A colour, and lines across it for those who do not see colours or print in grey."""

    colour: str
    hatch: Literal["", "lines", "dots"] = ""


class Drawing:
    """An SVG picture in pixels, from the top left.

    Example:
        >>> drawing = Drawing(100, 50)
        >>> drawing.box(0, 0, 40, 20, Fill("#0072B2"), tooltip="a unit")
        >>> "<title>a unit</title>" in drawing.to_text()
        True
    """

    def __init__(self, width: float, height: float) -> None:
        size = {"width": _px(width), "height": _px(height), "viewBox": f"0 0 {_px(width)} {_px(height)}"}
        self._root = ET.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": _FONT, "font-size": "12", **size}
        )
        self._definitions = ET.SubElement(self._root, "defs")
        self._patterns: dict[Fill, str] = {}
        self.box(0, 0, width, height, Fill("white"), outline=0)

    def box(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        fill: Fill,
        *,
        outline: float = 0.5,
        tooltip: str = "",
    ) -> None:
        """A rectangle; pointing at it shows the tooltip."""
        places = {"x": _px(left), "y": _px(top), "width": _px(width), "height": _px(height)}
        self._tooltip(self._add("rect", fill=self._paint(fill), **places, **_outline(outline)), tooltip)

    def area(self, points: Iterable[tuple[float, float]], fill: Fill, *, outline: float = 0.5) -> None:
        """A polygon."""
        path = "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points) + "Z"
        self._add("path", d=path, fill=self._paint(fill), **_outline(outline))

    def line(
        self, start: tuple[float, float], end: tuple[float, float], *, colour: str, width: float = 1, dashes: str = ""
    ) -> None:
        """A straight line; dashes as in ``stroke-dasharray``."""
        ends = {"x1": _px(start[0]), "y1": _px(start[1]), "x2": _px(end[0]), "y2": _px(end[1])}
        dashed = {"stroke-dasharray": dashes} if dashes else {}
        self._add("line", stroke=colour, **ends, **{"stroke-width": _px(width)}, **dashed)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        anchor: Anchor = "start",
        colour: str = "black",
        bold: bool = False,
        upwards: bool = False,
    ) -> None:
        """Words on the baseline through a point, or upwards beside it."""
        style = {"font-size": _px(size), "text-anchor": anchor}
        style |= {"font-weight": "bold"} if bold else {}
        style |= {"transform": f"rotate(-90 {_px(x)} {_px(y)})"} if upwards else {}
        self._add("text", x=_px(x), y=_px(y), fill=colour, **style).text = words

    def to_text(self) -> str:
        """The picture as SVG."""
        return ET.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, **attributes: str) -> ET.Element:
        return ET.SubElement(self._root, tag, attributes)

    @staticmethod
    def _tooltip(element: ET.Element, words: str) -> None:
        if words:
            ET.SubElement(element, "title").text = words

    def _paint(self, fill: Fill) -> str:
        """What to give as ``fill``: the colour, or a pattern that is defined when it is first used."""
        if not fill.hatch:
            return fill.colour
        if fill not in self._patterns:
            name = self._patterns[fill] = f"hatch{len(self._patterns)}"
            size = {"width": str(_HATCH_PX), "height": str(_HATCH_PX), "patternUnits": "userSpaceOnUse"}
            pattern = ET.SubElement(
                self._definitions, "pattern", {"id": name, "patternTransform": "rotate(45)", **size}
            )
            ET.SubElement(pattern, "rect", {"width": str(_HATCH_PX), "height": str(_HATCH_PX), "fill": fill.colour})
            mark = {"fill": "black", "fill-opacity": "0.75"}
            shape = {"height": str(_HATCH_PX), "width": "1"} if fill.hatch == "lines" else {"height": "2", "width": "2"}
            ET.SubElement(pattern, "rect", mark | shape)
        return f"url(#{self._patterns[fill]})"


def _outline(width: float) -> dict[str, str]:
    return {"stroke": "black", "stroke-width": _px(width)} if width else {}


def _px(length: float) -> str:
    """Two digits behind the point are more than anybody sees."""
    return f"{length:.2f}".rstrip("0").rstrip(".")
