"""Groups of ranks beside the default one: counted, warmed up, and used where the default one reaches devices only."""

import group_cases as cases
import pytest

pytestmark = pytest.mark.distributed


def test_collectives_are_counted_in_all_groups_of_all_ranks(ranks):
    for found in ranks(2).run(cases.counted):
        assert found == {"default": 1, "beside": 3, "some ranks": 3, "warm-up": 6, "nodes": 8}


def test_ranks_tell_each_other_by_their_hosts_where_devices_may_have_failed(ranks):
    for rank, (found, through_default, groups) in enumerate(ranks(2).run(cases.told_beside_a_device)):
        text = "Rank 1 failed, so every rank stops: ValueError: on one rank" if rank == 0 else "on one rank"
        assert found == {"all": [0, 1], "one": "of 1", "first": "of 0", "error": text}
        assert through_default == 0
        assert groups == (["gloo", "gloo"], True, True)
