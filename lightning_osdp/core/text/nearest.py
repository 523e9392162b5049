"""Known names that are close to an unknown one, for errors."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """A sentence for an error: which known names are nearest, whatever their case; `otherwise` where none is near.

    Example:
        >>> nearest("H100-SXN", ["h100-sxm", "h100-pcie", "l4"], "")
        'The nearest are h100-sxm, h100-pcie.'
        >>> nearest("tpu", ["h100-sxm", "l4"], "There are h100-sxm, l4.")
        'There are h100-sxm, l4.'
    """
    spelled = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), spelled, n=3, cutoff=0.4)
    return f"The nearest are {', '.join(spelled[each] for each in near)}." if near else otherwise
