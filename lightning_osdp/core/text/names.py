"""Names of modules: which are inside of others, and many as few patterns, as in ``h.{0-1}.mlp.fc``."""

from __future__ import annotations

from collections.abc import Iterable

_Pattern = tuple[frozenset[str], ...]


def upwards(name: str) -> list[str]:
    """Names of a module and of those around it, the innermost first; without the root.

    Example:
        >>> upwards("h.0.mlp")
        ['h.0.mlp', 'h.0', 'h']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """True if the module of this name is one of these, or inside one; the root counts as none of them."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def fold_names(names: Iterable[str]) -> list[str]:
    """Patterns that stand for exactly these dotted names, in the order of their first members.

    Names of equal length are folded wherever they differ in one part only, part by part, so that a pattern with
    several braces stands for every combination, and nothing is named that is not there.

    Example:
        >>> fold_names(["h.0.q", "h.0.k", "h.1.q", "h.1.k", "h.2.q", "head"])
        ['h.{0-2}.q', 'h.{0-1}.k', 'head']
    """
    parts = [tuple(name.split(".")) for name in dict.fromkeys(names)]
    rank = {part: i for i, part in enumerate(dict.fromkeys(part for name in parts for part in name))}
    patterns: list[_Pattern] = [tuple(frozenset({part}) for part in name) for name in parts]
    for position in range(max((len(name) for name in parts), default=0)):
        patterns = _merge(patterns, position)
    return [".".join(_braces(part, rank) for part in pattern) for pattern in patterns]


def _merge(patterns: list[_Pattern], position: int) -> list[_Pattern]:
    """Joins the patterns that differ at ``position`` only; words that are whole names stay apart."""
    merged: dict[_Pattern, _Pattern] = {}
    for pattern in patterns:
        whole_word = len(pattern) == 1 and not all(map(_is_index, pattern[0]))
        apart = whole_word or len(pattern) <= position
        key = pattern if apart else (*pattern[:position], frozenset(), *pattern[position + 1 :])
        seen = merged.get(key)
        merged[key] = (
            pattern if seen is None else (*key[:position], seen[position] | pattern[position], *key[position + 1 :])
        )
    return list(merged.values())


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and str(int(part)) == part


def _braces(parts: frozenset[str], rank: dict[str, int]) -> str:
    """``x`` for one part, else ``{0-2,4,x}``: indices as runs, words in the order in which they came."""
    if len(parts) == 1:
        return next(iter(parts))
    runs: list[list[int]] = []
    for index in sorted(int(part) for part in parts if _is_index(part)):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = sorted((part for part in parts if not _is_index(part)), key=rank.__getitem__)
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs] + words
    return "{" + ",".join(shown) + "}"
