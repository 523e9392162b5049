"""Cases of a test that `make test` runs; `make test-all` runs all of them."""

import pytest


def slow(*values):
    """A case that only `make test-all` runs, for another one of the same test goes through the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


def in_turn(values, others):
    """Cases of two values: each of the first with one of the others, which take turns; all further ones are slow."""
    values, others = [*values], [*others]
    assert len(values) >= len(others), "some of the others would be in slow cases alone"
    return [
        (value, other) if index % len(others) == place else slow(value, other)
        for index, value in enumerate(values)
        for place, other in enumerate(others)
    ]


def but_slow(values, *, slow):
    """Cases of one value, of which these are slow; all of those must be among them."""
    unknown = set(slow) - set(values)
    assert not unknown, f"not among the cases: {unknown}"
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]


def examples(number):
    """Settings of a property test with so many examples, of which `make test` runs the first third each time."""
    from hypothesis import settings  # ranks import this file, and have no use for it

    return settings(deadline=None, max_examples=number // 3 if settings().derandomize else number)
