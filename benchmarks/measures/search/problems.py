"""Problems for the solvers, made from a seed: operators of random costs, of equation 2, and the paper's own."""

from __future__ import annotations

import math
import random

from lightning_osdp.core.cluster import Link
from lightning_osdp.planner.search import Choice, Group, Problem

LINK = Link(latency_s=20e-6, seconds_per_byte=1 / 10e9)
"""Ethernet-like: 20 us a ring step, 10 GB/s."""
WORLD_SIZE = 8
STATES_PER_PARAMETER_BYTE = 4
"""Parameter, gradient and two moments of Adam, all in one dtype."""


def random_groups(num_operators: int, seed: int) -> tuple[Group, ...]:
    """Returns operators of random seconds and bytes, 3 to 5 choices each, over two to three orders of magnitude."""
    draw = random.Random(seed)
    groups = []
    for _ in range(num_operators):
        time_s, num_bytes, choices = 10 ** draw.uniform(-4, -2), 0, []
        for _ in range(draw.randint(3, 5)):
            choices.append(Choice(time_s, float(num_bytes)))
            time_s *= draw.uniform(0.6, 1.0)
            num_bytes += int(10 ** draw.uniform(5, 8))
        groups.append(Group(choices=tuple(choices)))
    return tuple(groups)


def sliced_groups(num_operators: int, seed: int) -> tuple[Group, ...]:
    """Returns operators of random sizes, priced by equation 2 and cut into 2 to 4 slices: 3 to 5 choices each."""
    draw = random.Random(seed)
    return tuple(
        Group(choices=equation_2(4 * int(10 ** draw.uniform(4, 8)), num_slices=draw.randint(2, 4)))
        for _ in range(num_operators)
    )


def paper_groups(num_slices: int, *, merged: bool = True) -> tuple[Group, ...]:
    """Returns the paper's narrow and deep model: 48 blocks of an attention and an MLP of width 1024.

    Args:
        num_slices: Slices of each operator; 1 for the two choices ZDP and DP.
        merged: Whether equal operators are one group, as the planner merges them.
    """
    num_blocks, width = 48, 1024
    attention = 4 * (4 * width**2 + 4 * width)
    mlp = 4 * (8 * width**2 + 5 * width)
    menus = [equation_2(num_bytes, num_slices=num_slices) for num_bytes in (attention, mlp)]
    if merged:
        return tuple(Group(choices=choices, count=num_blocks) for choices in menus)
    return tuple(Group(choices=choices) for _ in range(num_blocks) for choices in menus)


def equation_2(num_bytes: int, *, num_slices: int) -> tuple[Choice, ...]:
    r"""Returns the choices of one operator, of which ``z`` of ``num_slices`` equal slices are ZDP and the others DP.

    .. math:: t = (2 k + z) \left((N-1) \alpha + \frac{N-1}{N} \frac{S}{k} \beta\right)

    Seconds of computation are left out: they are the same in every mode.

    Args:
        num_bytes: S, bytes of the operator's parameters.
        num_slices: k.

    References:
        OSDP (Jiang et al. 2022), equation 2 and section 2.2.
    """
    collective_s = LINK.ring_s(num_bytes / num_slices, WORLD_SIZE)
    sharded_bytes = STATES_PER_PARAMETER_BYTE * num_bytes / WORLD_SIZE
    gathered_bytes = num_bytes * (WORLD_SIZE - 1) / WORLD_SIZE
    return tuple(
        Choice((2 * num_slices + num_zdp) * collective_s, sharded_bytes + (1 - num_zdp / num_slices) * gathered_bytes)
        for num_zdp in range(num_slices + 1)
    )


def with_budget(groups: tuple[Group, ...], share: float) -> Problem:
    """Returns a problem whose budget lies that share of the way from every smallest to every largest choice."""
    least = Problem(groups=groups, budget_bytes=0).least_bytes
    most = math.fsum(group.count * max(choice.memory_bytes for choice in group.choices) for group in groups)
    return Problem(groups=groups, budget_bytes=float(int(least + share * (most - least))))
