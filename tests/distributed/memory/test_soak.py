"""The soak, ten seconds long: what it must find takes longer, but it runs, and counts do not grow."""

import json

import pytest

from benchmarks import soak
from benchmarks.measures.leaks import HELD

pytestmark = pytest.mark.distributed


def soaked(folder, seconds):
    """Trains, with samples written to the folder, and tells if this is rank 0."""
    return soak.train(folder, seconds)


@pytest.mark.slow
def test_ten_seconds_of_training_hold_on_to_no_file_thread_or_process(ranks, tmp_path):
    assert ranks(soak.NUM_RANKS).run(soaked, folder=tmp_path, seconds=10.0) == [True, False, False, False]
    result = json.loads(soak.as_text(soak.found_in(tmp_path, 10 / 60)))
    for columns, grown in zip(result["ranks"], soak.growths(result), strict=True):
        assert columns["step"] == sorted(columns["step"])
        assert columns["seconds"][-1] > 5
        assert set(grown) == set(HELD)
        for quantity in ("num_open_files", "num_threads", "num_processes"):
            assert soak.is_flat(quantity, grown[quantity]), (quantity, grown[quantity])
    assert soak.table(result).row_count == soak.NUM_RANKS * len(HELD)
