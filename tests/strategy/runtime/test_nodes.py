"""Ranks of a node: what the user says, or else what the ranks were started with."""

from types import SimpleNamespace

import pytest

from lightning_osdp import ConfigurationError, OSDPStrategy
from lightning_osdp.strategy.runtime import all_ranks


def strategy(world_size, num_processes, rank=0):
    environment = SimpleNamespace(local_rank=lambda: rank)
    return SimpleNamespace(world_size=world_size, num_processes=num_processes, cluster_environment=environment)


@pytest.fixture
def told(monkeypatch):
    """Sets what the ranks tell each other: ranks of their node, and their place in it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def tell(*of_ranks):
        monkeypatch.setattr(all_ranks, "all_gather_values", lambda _: list(of_ranks))

    return tell


def test_ranks_that_follow_each_other_node_by_node_are_nodes(told):
    told((2, 0), (2, 1), (2, 0), (2, 1))
    assert all_ranks.ranks_of_node(strategy(4, 2), None) == 2


def test_what_the_launcher_says_counts_more_than_the_number_of_devices(told, monkeypatch):
    told((2, 0), (2, 1), (2, 0), (2, 1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert all_ranks.ranks_of_node(strategy(4, 4), None) == 2


def test_one_node_is_none(told):
    assert all_ranks.ranks_of_node(strategy(4, 4), None) is None
    assert all_ranks.ranks_of_node(strategy(4, 2), 4) is None


@pytest.mark.parametrize(
    "of_ranks",
    [
        [(2, 0), (2, 0), (2, 1), (2, 1)],  # in turn
        [(2, 0), (2, 1), (1, 0), (1, 0)],  # nodes of one and of two
    ],
)
def test_nodes_that_are_not_alike_are_told_of_and_left_out_of_account(told, of_ranks):
    told(*of_ranks)
    with pytest.warns(UserWarning, match=r"as if all ranks were on one node.*\(2, 0\)"):
        assert all_ranks.ranks_of_node(strategy(4, 2), None) is None


def test_users_may_take_ranks_for_nodes(told):
    assert all_ranks.ranks_of_node(strategy(8, 8), 2) == 2
    with pytest.raises(ConfigurationError, match="a node_size that divides the 8 ranks, got 3"):
        all_ranks.ranks_of_node(strategy(8, 8), 3)


@pytest.mark.parametrize("node_size", [0, -1, "2", 2.0, True])
def test_a_size_that_no_node_has_is_refused(node_size):
    with pytest.raises(ConfigurationError, match=f"node_size must be None or at least 1, got {node_size!r}"):
        OSDPStrategy(node_size=node_size)
