"""Samples of what ranks hold in a soak, and judgements of how the numbers grow."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from benchmarks import soak
from benchmarks.measures.leaks import HELD, Sample, growth, sample

HELD_AT_FIRST = Sample(
    seconds=0.0,
    step=0,
    resident_bytes=500_000_000,
    tensor_bytes=1_000_000,
    num_open_files=20,
    num_threads=8,
    num_processes=0,
    num_checkpoints=6,
)


def samples_with(quantity, growing):
    """Returns a hundred samples, of which one quantity changes with the seconds."""
    first = getattr(HELD_AT_FIRST, quantity)
    return [replace(HELD_AT_FIRST, seconds=float(s), **{quantity: first + growing(s)}) for s in range(1, 101)]


def test_a_sample_sees_everything_that_a_process_holds(tmp_path):
    before = sample(0.0, 0, [tmp_path, tmp_path / "none"])
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with (
        (tmp_path / "file").open("w"),
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
    ):
        thread.start()
        kept = torch.ones(8_000_000, dtype=torch.float64)  # more than malloc keeps of what was freed
        after = sample(0.0, 0, [tmp_path, tmp_path / "none"])
        stop.set()
        thread.join()
        child.communicate(b"\n")
    assert after.tensor_bytes - before.tensor_bytes == kept.nbytes
    assert after.resident_bytes - before.resident_bytes > 0.9 * kept.nbytes
    assert after.num_open_files - before.num_open_files == 2  # the file, and the pipe to the process
    assert after.num_threads - before.num_threads == 1
    assert after.num_processes - before.num_processes == 1
    assert after.num_checkpoints - before.num_checkpoints == 1


@pytest.mark.parametrize("quantity", HELD)
def test_what_grows_all_the_time_is_seen_and_what_grows_in_the_warm_up_is_not(quantity):
    grown = growth(samples_with(quantity, lambda s: 100_000 * s), quantity)
    assert not soak.is_flat(quantity, grown)
    settled = growth(samples_with(quantity, lambda s: 100_000 * min(s, 20)), quantity)
    assert settled.first == settled.last
    assert soak.is_flat(quantity, settled)


@pytest.mark.parametrize(("leak_bytes", "verdict", "code"), [(0, "yes", 0), (100_000, "NO", 1)])
def test_a_result_is_shown_drawn_and_judged(tmp_path, capsys, leak_bytes, verdict, code):
    columns = soak.in_columns(samples_with("resident_bytes", lambda s: leak_bytes * s))
    (tmp_path / "soak.json").write_text(soak.as_text({"date": "2026-11-21", "ranks": [columns]}))
    with pytest.raises(SystemExit) as ended:
        soak.main(output=tmp_path / "soak.json", picture=tmp_path / "soak.svg", draw_only=True)
    assert ended.value.code == code
    line = next(line for line in capsys.readouterr().out.splitlines() if "resident_bytes" in line)
    assert verdict in line
    assert "<svg" in (tmp_path / "soak.svg").read_text()
