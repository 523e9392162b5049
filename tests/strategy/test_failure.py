"""One rank's failure, told to the others through the process group's store."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch.distributed as dist

from lightning_osdp.strategy.failure import FailureWatch, explain


@pytest.fixture
def watches():
    store = dist.HashStore()
    both = [FailureWatch(store, "run", rank=rank, world_size=2, grace_s=60) for rank in range(2)]
    for watch in both:
        watch.start()
    yield both
    for watch in both:
        watch.stop()


def test_another_rank_learns_who_failed_first(watches):
    first, second = watches
    assert first.report(ValueError("no loss")) is None
    echo = RuntimeError("Connection closed by peer")
    explain(echo, second.report(echo))
    assert str(echo) == "Connection closed by peer\nRank 0 failed: ValueError: no loss"


class GoneStore:
    """Stands for a store whose process has ended."""

    def __getattr__(self, name):
        def gone(*_):
            raise RuntimeError("Connection reset by peer")

        return gone


def test_what_a_rank_knows_outlives_the_store(watches):
    first, second = watches
    assert first.report(ValueError("no loss")) is None  # waits until the other one knows, and may end with the store
    second._store = GoneStore()
    assert second.report(RuntimeError("Connection closed by peer")) == "Rank 0 failed: ValueError: no loss"


def test_ranks_that_fail_alike_keep_their_own_errors(watches):
    errors = [ValueError("the same"), ValueError("the same")]
    causes = {}

    def report(rank):
        causes[rank] = watches[rank].report(errors[rank])

    threads = [threading.Thread(target=report, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, error in enumerate(errors):
        explain(error, causes[rank])
        assert str(error) == "the same"


def test_a_rank_that_cannot_end_by_itself_is_ended_with_the_others_text():
    script = """
        import time
        import torch.distributed as dist
        from lightning_osdp.strategy.failure import FailureWatch

        store = dist.HashStore()
        FailureWatch(store, "run", rank=0, world_size=2, grace_s=0.1).start()
        FailureWatch(store, "run", rank=1, world_size=2).report(ValueError("no loss"))
        time.sleep(60)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1
    assert "Rank 1 failed: ValueError: no loss\nRank 0 still waits for it after 0.1 s: ending." in ended.stderr


def test_a_watch_that_is_stopped_leaves_no_thread():
    watch = FailureWatch(dist.HashStore(), "run", rank=0, world_size=2)
    watch.start()
    watch.stop()
    watch.stop()
    assert "osdp-failure-watch" not in {thread.name for thread in threading.enumerate()}
