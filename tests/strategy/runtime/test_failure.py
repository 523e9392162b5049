"""One rank's failure, told to the others through the process group's store."""

import atexit
import json
import logging  # noqa: F401 (scripts use it)
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from multiprocessing import get_context
from types import SimpleNamespace
from unittest import mock  # noqa: F401 (scripts use it)

import pytest
import torch.distributed as dist

from lightning_osdp.strategy.runtime import failure
from lightning_osdp.strategy.runtime.error_texts import explain_echo, print_one_line
from lightning_osdp.strategy.runtime.failure import FailureWatch
from lightning_osdp.strategy.runtime.ranks import RanksTogether, SigtermWatch, _bound_exit  # noqa: F401 (scripts)
from tests.distributed.support.ranks import IMPORTED

ECHO = RuntimeError("Connection closed by peer")
WAIT_S = 60
"""Longest that a test waits for a thread that looks when it is time."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(failure, "POLL_S", 0.05)


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
    explain_echo(echo, second.report(echo))
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
        explain_echo(error, causes[rank])
        assert str(error) == "the same"


def test_the_cause_is_logged_when_it_is_learned(watches, caplog):
    first, second = watches  # which ends this process a minute later
    first.report(ValueError("no loss"))
    deadline = time.monotonic() + WAIT_S
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "Rank 0 failed: ValueError: no loss" in record.getMessage()
    assert "Rank 1" in record.getMessage()
    assert second._thread.is_alive()


def run_in_forks(scripts, folder):
    """Runs each script in a fork of this process, and writes what they print and their exit codes to the folder."""
    failure.TEARDOWN_S, failure.LAST_WORDS_S, failure.LINGER_S = 0.2, 0.2, 0.1
    names = {}
    for name, script in scripts.items():
        pid = os.fork()
        if not pid:
            _run(name, script, folder)
        names[pid] = name
    codes = {names[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.wait() for _ in scripts)}
    (folder / "codes").write_text(json.dumps(codes))


def _run(name, script, folder):
    """Runs a script in this process and ends it, with what an interpreter does as it ends."""
    code = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(folder / f"{name} {number}", os.O_WRONLY | os.O_CREAT), number)
        watch = FailureWatch(dist.HashStore(), "run", rank=0, world_size=2)
        watch.start()
        exec(script, {**globals(), "watch": watch})
        code = 0
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


SCRIPTS = {
    "another rank": """
        failure.TEARDOWN_S, store = 120, dist.HashStore()
        FailureWatch(store, "run", rank=0, world_size=2, grace_s=0.1).start()
        FailureWatch(store, "run", rank=1, world_size=2).report(ValueError("no loss"))
        time.sleep(60)
    """,
    "teardown": """
        def teardown():
            time.sleep(60)

        watch.report(ValueError("no loss"))
        teardown()
    """,
    "traceback": """
        failure.PATIENCE_S, failure.TEARDOWN_S = 0.05, 2

        def training_step():
            raise ValueError("no loss")

        ranks = RanksTogether(mock.Mock(global_rank=0))
        ranks._watch = watch
        try:
            training_step()
        except ValueError as error:
            ranks.report(error)
        time.sleep(60)
    """,
    "blocked": """
        class Blocked(logging.Handler):
            def emit(self, record):
                os.write(1, b"blocked")
                time.sleep(60)

        logging.getLogger().addHandler(Blocked())
        watch.report(ValueError("no loss"))
        time.sleep(60)
    """,
    "torn down": """
        failure.PATIENCE_S = 0.2
        watch.report(ValueError("no loss"))
        watch.tell_if_slow(ValueError("no loss"))
        watch.stop()
        time.sleep(1)
        sys.exit(3)
    """,
    "interpreter": """
        atexit.register(time.sleep, 60)
        _bound_exit()
        watch.report(ValueError("no loss"))
        watch.stop()
    """,
}
"""Processes that have failed and, but for one, cannot end by themselves."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Exit codes, standard output and standard error of all scripts, by name."""
    folder, scripts = tmp_path_factory.mktemp("forks"), {name: textwrap.dedent(code) for name, code in SCRIPTS.items()}
    context = get_context("forkserver")  # the ranks': to import torch and Lightning takes longer than all scripts
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=run_in_forks, args=(scripts, folder))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    codes = json.loads((folder / "codes").read_text())
    return {
        name: SimpleNamespace(
            returncode=codes[name],
            stdout=(folder / f"{name} 1").read_text(),
            stderr=(folder / f"{name} 2").read_text(),
        )
        for name in SCRIPTS
    }


def test_a_rank_that_cannot_end_by_itself_is_ended_with_the_others_text(ended):
    found = ended["another rank"]
    assert found.returncode == 1
    assert "Rank 1 failed: ValueError: no loss\nRank 0 has not ended by itself in 0.1 s: ending it." in found.stderr
    assert "in <module>" in found.stderr  # where it is


def test_a_failed_rank_tears_down_in_bounded_time(ended):
    found = ended["teardown"]
    assert found.returncode == 1
    assert "Rank 0 failed: ValueError: no loss\nRank 0 has not ended by itself in 0.2 s: ending it." in found.stderr
    assert "in teardown" in found.stderr


def test_an_error_is_printed_in_full_before_a_teardown_that_never_ends(ended):
    found = ended["traceback"]
    told, _, ending = found.stderr.partition("Rank 0 has not ended by itself in 2 s: ending it.")
    assert "its teardown waits, perhaps for ranks that wait for this one.\nTraceback" in told
    assert "in training_step\nValueError: no loss\n" in told
    assert "time.sleep" not in told
    assert ending


def test_output_that_is_blocked_holds_up_no_end(ended):
    assert (ended["blocked"].returncode, ended["blocked"].stdout) == (1, "blocked")


def test_a_rank_that_has_torn_down_goes_on(ended):
    assert ended["torn down"].returncode == 3
    assert "teardown waits" not in ended["torn down"].stderr


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="the timer is the kernel's")
def test_an_interpreter_that_does_not_end_is_ended(ended):
    assert ended["interpreter"].returncode == -signal.SIGALRM


def test_a_watch_that_is_stopped_leaves_no_thread():
    watch = FailureWatch(dist.HashStore(), "run", rank=0, world_size=2)
    watch.start()
    watch.stop()
    watch.stop()
    assert "osdp-failure-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def watching():
    """Starts watches, none of which ends this process."""
    started = []

    def start(store, rank, **kwargs):
        watch = FailureWatch(store, "run", rank=rank, world_size=2, grace_s=WAIT_S, **kwargs)
        watch.start()
        started.append(watch)
        return watch

    yield start
    for watch in started:
        watch.stop()


def test_a_rank_that_keeps_another_waiting_is_named(watching):
    store = dist.HashStore()
    waits = watching(store, 0, num_collectives=lambda: 5, stall_s=0.5)
    comes_late = watching(store, 1, num_collectives=lambda: 4, stall_s=0.5)
    for watch in (waits, comes_late):
        assert watch._knows.wait(WAIT_S)
        assert watch.report(ECHO).startswith("Rank 1 stalled: rank 0 has waited 0.5 s in a collective for it.")


def test_ranks_that_all_work_by_themselves_do_not_stall(watching, monkeypatch):
    monkeypatch.setattr(failure, "SILENCE_S", 1.0)
    store = dist.HashStore()
    both = [watching(store, rank, num_collectives=lambda: 5, stall_s=0.1) for rank in range(2)]
    assert not both[0]._knows.wait(2)
    assert not both[1]._knows.is_set()


def test_a_rank_that_ends_without_a_word_is_named(watching, monkeypatch):
    monkeypatch.setattr(failure, "SILENCE_S", 1.0)
    monkeypatch.setattr(failure, "LINGER_S", 0.2)  # nobody is left to learn of it
    store = dist.HashStore()
    survivor = watching(store, 0)
    FailureWatch(store, "run", rank=1, world_size=2)._beat()  # once, and never again
    assert survivor.report(ECHO) == "Rank 1 ended without reporting an error: killed, or the machine is gone."


def test_a_rank_that_is_done_is_not_taken_for_dead(watching, monkeypatch):
    monkeypatch.setattr(failure, "SILENCE_S", 1.0)
    monkeypatch.setattr(failure, "LINGER_S", 0.2)
    store = dist.HashStore()
    first, second = watching(store, 0), watching(store, 1)
    second.stop()
    assert first.report(ECHO) is None


def test_a_store_that_is_gone_was_rank_0s(watching):
    watch = watching(dist.HashStore(), 1)
    watch._store = GoneStore()
    assert watch._knows.wait(WAIT_S)
    assert watch.report(ECHO) == (
        "Rank 0, or torchrun on its node, ended without reporting an error: it was killed, or its machine is gone."
    )


def test_a_store_that_ends_when_rank_0_is_done_is_no_failure(watching):
    store = dist.HashStore()
    watching(store, 0).stop()
    second = watching(store, 1)
    second._thread.join(WAIT_S)
    second._store = GoneStore()
    assert not second._knows.wait(0.5)


def test_all_ranks_learn_of_a_sigterm_to_one(watching):
    store = dist.HashStore()
    both = [watching(store, 0), watching(store, 1, is_terminated=lambda: True)]
    for watch in both:
        assert watch._knows.wait(WAIT_S)
        assert watch.is_terminating
        assert watch.report(SystemExit()) == "Rank 1 received SIGTERM, so every rank ends."


def test_sigterm_is_noticed_by_another_thread():
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *_: handled.append(True))
    watch = SigtermWatch()
    try:
        assert not watch.is_received()
        os.kill(os.getpid(), signal.SIGTERM)
        found = []
        asks = threading.Thread(target=lambda: found.extend([watch.is_received(), watch.is_received()]))
        asks.start()
        asks.join()
    finally:
        watch.close()
        signal.signal(signal.SIGTERM, before)
    assert found == [True, False]
    assert handled == [True]
    assert signal.set_wakeup_fd(-1) == -1


def test_one_line_is_printed_of_an_error_that_another_rank_prints(capsys, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *found: told.append(found))
    mine, echo = ValueError("mine"), RuntimeError("another's")
    for _ in range(2):  # two fits in a process
        print_one_line(echo, "OSDP: rank 1 ends")
    for error in (mine, echo):
        sys.excepthook(type(error), error, None)
    assert told == [(ValueError, mine, None)]
    assert capsys.readouterr().err == "OSDP: rank 1 ends\n"
