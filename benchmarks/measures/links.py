"""Cases on links of a chosen rate, and ranks that are joined by them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.measures.section import Row
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.namespaces import Hosts, why_unavailable
from benchmarks.testbed.rank import call

_log = logging.getLogger(__name__)


class _OnLinks(Protocol):
    @property
    def rate_mbit(self) -> float | None: ...


_CaseT = TypeVar("_CaseT", bound=_OnLinks)


def on_links_that_can_be_had(cases: Sequence[_CaseT]) -> list[_CaseT]:
    """Of cases with a ``rate_mbit``, those that can be measured on this machine; says why where others are left out."""
    reason = why_unavailable() if any(case.rate_mbit is not None for case in cases) else None
    if reason is not None:
        _log.warning("Nothing is measured on shaped links: %s.", reason)
    return [case for case in cases if reason is None or case.rate_mbit is None]


def on_ranks(
    num_ranks: int, rate_mbit: float | None, function: str, *, root: Path | None = None, **arguments: Any
) -> Any:
    """What a function returns on rank 0 of so many, one thread each; plain processes where links are not shaped.

    Args:
        num_ranks: N.
        rate_mbit: 10^6 bit/s; None: not shaped.
        function: ``"package.module:function"``.
        root: folder of another version of this project, whose function it is, on network namespaces at any rate; None:
            of this one.
        **arguments: of the function, as JSON can write them.
    """
    if root is not None:
        with Hosts(num_ranks, rate_mbit=rate_mbit, root=root) as hosts:
            return hosts.run(function, arguments, timeout_s=3600)[0]
    if rate_mbit is None:
        return local_ranks(num_ranks).run(call, target=function, arguments=arguments)[0]
    with Hosts(num_ranks, rate_mbit=rate_mbit) as hosts:
        return hosts.run(function, arguments, timeout_s=3600)[0]


def rate_of(row: Row) -> str:
    """Of the links of its case, for people."""
    rate = row["case"]["rate_mbit"]
    return "not shaped" if rate is None else f"{rate:g} Mbit/s"
