import pytest

from benchmarks.measures.search.problems import random_groups, with_budget
from lightning_osdp.planner.search import Choice, Group


@pytest.fixture
def distinct_operators():
    """Operators of random sizes, three to five choices each, as measured ones are: no two alike."""

    def build(num_operators, *, share=0.5, seed=0):
        return with_budget(random_groups(num_operators, seed), share)

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
