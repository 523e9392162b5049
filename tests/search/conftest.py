import math
import random

import pytest

from lightning_osdp.search import Choice, Group, Problem


def with_budget(groups, share):
    """A problem whose budget lies that share of the way from all smallest to all largest choices."""
    least = Problem(groups=groups, budget_bytes=0).least_bytes
    most = math.fsum(group.count * max(choice.memory_bytes for choice in group.choices) for group in groups)
    return Problem(groups=groups, budget_bytes=float(int(least + share * (most - least))))


@pytest.fixture
def distinct_operators():
    """Operators of random sizes, three to five choices each, as measured ones are: no two alike."""

    def build(num_operators, *, share=0.5, seed=0):
        draw = random.Random(seed)
        groups = []
        for _ in range(num_operators):
            time_s, num_bytes, choices = 10 ** draw.uniform(-4, -2), 0, []
            for _ in range(draw.randint(3, 5)):
                choices.append(Choice(time_s, float(num_bytes)))
                time_s *= draw.uniform(0.6, 1.0)
                num_bytes += int(10 ** draw.uniform(5, 8))
            groups.append(Group(choices=tuple(choices)))
        return with_budget(tuple(groups), share)

    return build


@pytest.fixture
def paper_blocks():
    """48 blocks of attention and MLP, hidden size 1024, equation 2 on 8 ranks, each operator in `slices`."""

    def build(*, share=0.5, slices=4, hidden=1024, num_blocks=48):
        alpha_s, beta_s_per_byte, ranks = 2e-5, 1 / 40e9, 8
        groups = []
        for num_parameters in (4 * hidden**2 + 4 * hidden, 8 * hidden**2 + 5 * hidden):
            size = 4 * num_parameters
            choices = []
            for num_zdp in range(slices + 1):
                latency_s = (2 * slices + num_zdp) * (ranks - 1) * alpha_s
                transfer_s = (2 + num_zdp / slices) * (ranks - 1) / ranks * size * beta_s_per_byte
                num_bytes = 4 * size / ranks + (1 - num_zdp / slices) * (ranks - 1) / ranks * size
                choices.append(Choice(latency_s + transfer_s, num_bytes))
            groups.append(Group(choices=tuple(choices), count=num_blocks))
        return with_budget(tuple(groups), share)

    return build
