"""Operators whose weights stay on their ranks, and whose inputs and outputs move between ranks; names stay."""

from __future__ import annotations

from lightning_osdp.operations.stationary.exchanges import MOVE_WEIGHTS
from lightning_osdp.operations.stationary.operators import (
    Ranks,
    as_whole,
    is_stationary,
    make_stationary,
    refusal,
    refusal_of_one,
)
from lightning_osdp.operations.stationary.waiting import Reach, WaitingOutputs

__all__ = [
    "MOVE_WEIGHTS",
    "Ranks",
    "Reach",
    "WaitingOutputs",
    "as_whole",
    "is_stationary",
    "make_stationary",
    "refusal",
    "refusal_of_one",
]
