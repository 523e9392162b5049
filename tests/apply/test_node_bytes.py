"""Peaks of steps on several nodes, counted on rank 0 of up to 16 nodes of 8, against the predicted ones."""

from dataclasses import replace

import pytest

from benchmarks.measures.accuracy.memory import draw_cases, measure


@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), (8, 4), (128, 8)])
@pytest.mark.parametrize("family", ["odd_mlp", "tied"])
@pytest.mark.slow  # tests/distributed/nodes/test_nodes.py has one on ranks
def test_peaks_are_what_was_predicted(family, world_size, node_size):
    errors = {}
    for case in draw_cases(family, 6, seed=25):
        nodes = replace(case, modes="nodes", world_size=world_size, node_size=node_size, micro_batch_size=1)
        errors[nodes] = measure(nodes)["error"]
    wrong = {case: error for case, error in errors.items() if not -0.01 < error < 0.02}
    assert not wrong
