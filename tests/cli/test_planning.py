import dataclasses
from itertools import product
from pathlib import Path

import pytest

from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.scheduler import make_plan

MIB = 2**20


def faster(link, rate):
    return dataclasses.replace(link, seconds_per_byte=link.seconds_per_byte / rate)


def test_plan_is_make_plan(folder, run, answer, profile, ranks):
    code, _, err = run("plan", "--memory", "120MiB", "--batch", "4", "--accumulate", "2", "--out", "new/plan.json")
    assert (code, err) == (0, "")
    expected = make_plan(
        profile, ranks, memory_limit_bytes=120 * MIB, micro_batch_size=BatchPolicy.fixed(4, num_micro_batches=2)
    )
    assert Plan.load("new/plan.json").to_json() == expected.to_json()
    found = answer("plan")  # the memory of the cluster, and the batch of the profile
    assert (found["memory_limit_bytes"], found["micro_batch_size"]) == (90 * MIB, 2)


def test_where_nothing_fits_the_exit_code_is_1_with_what_would(folder, run):
    code, out, err = run("plan", "--memory", "10MiB")
    assert (code, out) == (1, "")
    assert "10.0 MiB" in err


@pytest.mark.parametrize(
    "arguments",
    [("--out", "osdp_plan.json/x"), ("--memory", "many"), ("--batch", "0"), ("--batch", "two"), ("--batch", "2,4")],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, run, arguments):
    code, out, err = run("plan", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)


def linked(folder):
    (folder / "link.json").symlink_to("osdp_profile.json")
    return "link.json"


@pytest.mark.parametrize("option", ["plan", "simulate"])
@pytest.mark.parametrize("output", ["osdp_profile.json", "./osdp_cluster.json", linked, "other.json"])
def test_nothing_of_the_users_is_overwritten(folder, run, option, output):
    output = output if isinstance(output, str) else output(folder)
    (folder / "other.json").write_text("kept")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    arguments = {"plan": ("plan", "--memory", "120MiB", "--out"), "simulate": ("simulate", "--trace")}[option]
    code, out, err = run(*arguments, output)
    assert (code, out, err.count("\n")) == (2, "", 1)
    is_input = output != "other.json"
    assert ("that the command reads" in err) == is_input
    code, _, _ = run(*arguments, output, "--force")
    assert code == (2 if is_input else 0)
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed == (set() if is_input else {"other.json"})


def test_what_cannot_be_written_whole_is_not_there(folder, run, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
    before = sorted(folder.iterdir())
    code, _, err = run("plan", "--memory", "120MiB", "--out", "new.json")
    assert code == 2
    assert "no space left" in err
    assert sorted(folder.iterdir()) == before


def test_without_a_limit_and_a_cluster_that_knows_none_one_is_asked_for(folder, run, ranks):
    dataclasses.replace(ranks, memory_bytes=None).save("osdp_cluster.json")
    code, _, err = run("plan")
    assert code == 2
    assert "--memory 8GiB" in err


@pytest.mark.slow
def test_every_row_is_a_plan(folder, answer, profile, ranks):
    rows = answer(
        "what-if", "--ranks", "2,8", "--rate", "0.5,4", "--memory", "40MiB,70MiB", "--batch", "1", "--accumulate", "2"
    )
    assert len(rows) == 8
    assert {row["fits"] for row in rows} == {True, False}
    expected = product((2, 8), (0.5, 4.0), (40 * MIB, 70 * MIB), (1,))
    for row, (world_size, rate, memory, batch) in zip(rows, expected, strict=True):
        cluster = dataclasses.replace(
            ranks,
            world_size=world_size,
            all_gather=faster(ranks.all_gather, rate),
            reduce_scatter=faster(ranks.reduce_scatter, rate),
        )
        assert (row["world_size"], row["link_rate"]) == (world_size, rate)
        assert (row["memory_limit_bytes"], row["micro_batch_size"], row["num_micro_batches"]) == (memory, batch, 2)
        options = {"memory_limit_bytes": memory, "micro_batch_size": BatchPolicy.fixed(batch, 2)}
        if not row["fits"]:
            with pytest.raises(InfeasibleError) as caught:
                make_plan(profile, cluster, **options)
            assert row["why_not"] == str(caught.value)
            continue
        plan = make_plan(profile, cluster, **options)
        names = ("step_time_s", "samples_per_s", "peak_bytes", "predicted_gain")
        assert [row[name] for name in names] == [getattr(plan, name) for name in names]


def test_the_table_is_within_80_columns_and_says_what_does_not_fit(folder, run):
    code, out, err = run("what-if", "--memory", "10MiB,1GiB", "--rate", "1,10")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert [line.split()[:3] for line in out.splitlines() if "x1" in line] == [
        ["4", rate, size] for rate, size in product(("x1", "x10"), ("10.0", "1.00"))
    ]
    assert out.count("does not fit") >= 2
    assert run("what-if", "--memory", "10MiB")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "two"), "numbers between commas"),
        (("--ranks", "0"), "at least one rank"),
        (("--rate", "0"), "positive rate"),
        (("--rate", "1,inf"), "positive rate"),
        (("--rate", ""), "for rate, got ''"),
        (("--batch", "2,"), "for batch, got '2,'"),
        (("--memory", "1GiB,x"), "got 'x'"),
    ],
)
def test_numbers_that_make_no_sense_are_told(folder, run, arguments, text):
    code, out, err = run("what-if", *arguments)
    assert (code, out) == (2, "")
    assert text in err


def test_links_that_were_not_measured_are_told(folder, run, ranks):
    dataclasses.replace(ranks, world_size=1).save("osdp_cluster.json")
    code, _, err = run("what-if", "--ranks", "1,2")
    assert code == 2
    assert "links were measured for 2 ranks" in err
