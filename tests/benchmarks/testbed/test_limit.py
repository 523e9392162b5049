import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.families import build
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.limit import data_segment_bytes, lives_under
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from tests.benchmarks.testbed.linears import LAYER_BYTES

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the data segment is limited on Linux")


@pytest.mark.slow
def test_training_lives_above_its_peak_and_dies_below():
    # all rows divide by the ranks: on CPU torch pads what does not in copies inside of one operation, past the count
    module = build("mingpt")
    blocks = {f"model.blocks.{index}": "ZDP" for index in range(2)}
    plan = plan_of(module, blocks, world_size=8, micro_batch_size=3)
    with fake_group(8):
        peak_bytes = count_step(module, plan).peak_bytes
    with ThreadPoolExecutor(2) as pool:
        limits = (int(share * peak_bytes) for share in (1.05, 0.95))
        above, below = pool.map(lambda limit: lives_under(limit, "mingpt", plan), limits)
    assert above.lived, above.reason
    assert not below.lived
    assert "memory" in below.reason


@pytest.mark.slow
def test_another_failure_is_no_lack_of_memory():
    plan = plan_of(build("odd_mlp"), {}, world_size=8, micro_batch_size=3)
    with pytest.raises(RuntimeError, match="Expected training to live or to run out of memory, but it ended"):
        lives_under(2**30, "tied", plan)


def test_the_data_segment_grows_with_private_memory_that_nobody_touched():
    before = data_segment_bytes()
    with mmap.mmap(-1, 64 * LAYER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert data_segment_bytes() - before >= 64 * LAYER_BYTES
