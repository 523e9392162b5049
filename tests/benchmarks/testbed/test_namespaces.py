import subprocess

import pytest

from benchmarks.testbed.namespaces import Hosts, why_unavailable

MBIT, SIZE_BYTES, BURST_BYTES = 40, 2**20, 32 * 2**10


@pytest.fixture(scope="module", autouse=True)
def _available():
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts():
    with Hosts(2, rate_mbit=MBIT) as made:
        yield made


def names():
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@pytest.mark.slow
def test_no_message_is_faster_than_its_link(hosts):
    # each of two ranks sends its half of the gathered tensor
    seconds = hosts.run("benchmarks.measures.links:time_all_gather", {"sizes_bytes": [SIZE_BYTES], "num_runs": 2})
    assert len(seconds) == 2
    assert max(found for [found] in seconds) > (SIZE_BYTES / 2 - BURST_BYTES) * 8 / (MBIT * 1e6)


@pytest.mark.slow
def test_ranks_of_a_host_reach_each_other_without_its_link():
    sizes = {"node_size": 2, "num_bytes": SIZE_BYTES, "num_runs": 1}
    with Hosts(2, rate_mbit=MBIT, ranks_per_host=2) as made:
        found = made.run("benchmarks.measures.links:time_all_reduces", sizes)
    for each in found:
        assert each["within"]["sent_bytes"] < 0.05 * SIZE_BYTES
        # two ranks, each of which sends half of it there and half of it back
        assert each["between"]["sent_bytes"] == pytest.approx(2 * SIZE_BYTES, rel=0.05)
        assert each["between"]["seconds"] > (2 * SIZE_BYTES - BURST_BYTES) * 8 / (MBIT * 1e6)


@pytest.mark.slow
def test_a_failing_rank_ends_the_others_and_says_why(hosts):
    with pytest.raises(RuntimeError, match=r"Rank [01] of 2 ended with 1(.|\n)*no attribute 'nothing'"):
        hosts.run("benchmarks.measures.links:nothing")


def test_hosts_are_removed_after_an_error_and_after_their_process(hosts):
    before = names()
    subprocess.run(["ip", "netns", "add", "osdp-bed99999999-0-0"], check=True)  # named after a process that cannot be
    with pytest.raises(KeyboardInterrupt):
        interrupted(before)
    assert names() == before


def interrupted(before):
    with Hosts(1):
        assert len(names() - before) == 2
        raise KeyboardInterrupt
