import pytest

from benchmarks.measures.search.problems import paper_groups, random_groups, with_budget


@pytest.fixture
def distinct_operators():
    """Operators of random sizes, three to five choices each, as measured ones are: no two alike."""

    def build(num_operators, *, share=0.5, seed=0):
        return with_budget(random_groups(num_operators, seed), share)

    return build


@pytest.fixture
def paper_blocks():
    """48 blocks of attention and MLP, hidden size 1024, equation 2 on 8 ranks, each operator in `slices`."""

    def build(*, share=0.5, slices=4, num_blocks=48):
        return with_budget(paper_groups(slices, num_blocks=num_blocks), share)

    return build
