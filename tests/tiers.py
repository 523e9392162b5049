"""Cases of a test that `make test` runs; `make test-all` runs all of them."""

import pytest


def slow(*values):
    """A case that only `make test-all` runs, for another one of the same test goes through the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


def but_slow(values, *, slow):
    """Cases of one value, of which these are slow; all of those must be among them."""
    unknown = set(slow) - set(values)
    assert not unknown, f"not among the cases: {unknown}"
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]
