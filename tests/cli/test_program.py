"""Exit codes, help, and files that are none."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

import lightning_osdp
from lightning_osdp.cli import program
from lightning_osdp.cli.program import COMMANDS
from lightning_osdp.core.plans.plan import SCHEMA_VERSION
from lightning_osdp.report.advice import advise
from lightning_osdp.report.tables import render_plan


def shown(run, *arguments):
    code, out, err = run("show", *arguments)
    assert (code, err) == (0, "")
    return [line.rstrip() for line in out.splitlines()]


def test_show_prints_the_table_of_the_plan_with_advice(folder, run, answer, planned, profile, ranks):
    advice = advise(planned(), profile, ranks)
    assert advice
    assert shown(run, "osdp_plan.json") == render_plan(planned(), advice=advice, width=80).splitlines()
    expected = [dataclasses.asdict(each) for each in advice]
    assert answer("show", "osdp_plan.json") == {**json.loads(planned().to_json()), "advice": expected}
    assert answer("plan", "--memory", "80MiB")["advice"] == expected
    assert answer("explain", "wte", "--price", "false")["advice"] == expected


def test_without_a_profile_and_a_cluster_of_the_plan_there_is_no_advice(folder, run, planned, profile, ranks):
    plain = render_plan(planned(), width=80).splitlines()
    dataclasses.replace(profile, fingerprint={}).save("osdp_profile.json")  # another run has written over it
    assert shown(run, "osdp_plan.json") == plain
    assert run("show", "osdp_plan.json", "--profile", "osdp_profile.json")[0] == 2
    profile.save("osdp_profile.json")
    dataclasses.replace(ranks, world_size=2).save("osdp_cluster.json")
    assert shown(run, "osdp_plan.json") == plain
    (folder / "osdp_cluster.json").unlink()
    assert shown(run, "osdp_plan.json") == plain


def test_no_operator_looks_like_markup(folder, run, planned):
    plan = planned()
    units = (dataclasses.replace(plan.units[0], operators=("[bold]a[/bold]",)), *plan.units[1:])
    dataclasses.replace(plan, units=units).save("marked.json")
    (folder / "osdp_profile.json").unlink()  # which has no such operator
    assert "[bold]a[/bold]" in run("show", "marked.json")[1]


BAD_FILES = {
    "missing": (None, "cannot be read"),
    "not text": (b"\xff\xfe", "cannot be read"),
    "not JSON": (b"{", "cannot be parsed"),
    "a list": (b"[]", "JSON object"),
    "another schema version": (b'{"schema_version": 2}', f"schema_version {SCHEMA_VERSION}, got 2"),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize(
    "command", ["show {}", "diff {} osdp_plan.json", "explain wte --plan {}", "simulate --plan {}"]
)
def test_a_file_that_is_no_plan_is_one_sentence_and_exit_code_2(folder, run, case, command):
    content, text = BAD_FILES[case]
    if content is not None:
        (folder / "bad.json").write_bytes(content)
    code, out, err = run(*command.format("bad.json").split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err


@pytest.mark.parametrize("name", ["osdp_profile.json", "osdp_cluster.json"])
def test_a_file_of_another_kind_is_told(folder, run, name):
    (folder / name).write_text((folder / "osdp_plan.json").read_text())
    code, out, err = run("explain", "wte")
    assert (code, out) == (2, "")
    assert f"file '{name}' to be a " in err


def test_a_run_without_a_profile_says_what_writes_one(folder, run):
    (folder / "osdp_profile.json").unlink()
    code, _, err = run("simulate")
    assert code == 2
    assert "A fit that plans writes one beside its plan" in err


def test_a_profile_of_another_model_or_number_of_ranks_is_told(folder, run, profile, ranks):
    dataclasses.replace(profile, fingerprint={}).save("other.json")
    assert run("simulate", "--profile", "other.json")[0] == 2
    dataclasses.replace(ranks, world_size=2).save("two.json")
    code, _, err = run("simulate", "--cluster", "two.json")
    assert code == 2
    assert "the plan is for 4 ranks, this run has 2" in err


def edited(profile):
    block = profile.blocks[0]
    yield dataclasses.replace(profile, segments=())
    yield dataclasses.replace(profile, operators=(*profile.operators, profile.operators[0]))
    yield dataclasses.replace(profile, segments=(dataclasses.replace(profile.segments[0], operator="x"),))
    yield dataclasses.replace(profile, spans={"h.0": ((0, 99),)})
    yield dataclasses.replace(profile, blocks=(dataclasses.replace(block, span=(3, 2)),))
    yield dataclasses.replace(profile, blocks=(dataclasses.replace(block, segments={"recompute": ()}),))


@pytest.mark.parametrize("number", range(6))
def test_a_profile_whose_parts_do_not_belong_together_is_told(folder, run, profile, number):
    [*edited(profile)][number].save("osdp_profile.json")
    code, _, err = run("simulate")
    assert code == 2
    assert "belong together" in err


def test_a_cluster_without_ranks_is_told(folder, run, ranks):
    dataclasses.replace(ranks, world_size=0).save("osdp_cluster.json")
    assert "at least one rank" in run("simulate")[2]


def test_a_cluster_whose_nodes_do_not_make_up_its_ranks_is_told(folder, run, ranks):
    dataclasses.replace(ranks, node_size=3).save("osdp_cluster.json")
    assert "divides the 4 ranks" in run("simulate")[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "subcommand"),
        (("shw", "x"), "'shw'"),
        (("show",), "plan"),
        (("show", "osdp_plan.json", "--colour"), "--colour"),
        (("plan", "--batch", "two"), "batch"),
    ],
)
def test_arguments_that_are_none_are_one_sentence_and_exit_code_2(folder, run, arguments, text):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lightning-osdp: ")
    assert text in err
    assert "Traceback" not in err


def test_help_names_every_command_and_argument_and_nothing_internal(capsys):
    for arguments in ((), *((name,) for name in COMMANDS)):
        with pytest.raises(SystemExit) as ended:
            lightning_osdp.cli.main([*arguments, "--help"])
        assert ended.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert not any(internal in text for internal in ("lightning_osdp.cli", "type:", "null", "None"))
        if not arguments:
            assert all(name in text for name in COMMANDS)
        assert arguments != ("plan",) or "as in 8GiB" in text


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        lightning_osdp.cli.main(["--version"])
    assert ended.value.code == 0
    assert version("lightning-osdp") in capsys.readouterr().out
    assert lightning_osdp.__version__ == version("lightning-osdp")


RUN = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning", "fairscale", "torchmetrics"):
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
from lightning_osdp.cli import main
sys.exit(main({arguments!r}))
"""


def fresh(*arguments, **options):
    """A process in which torch and Lightning cannot be imported."""
    code = textwrap.dedent(RUN.format(arguments=[*arguments]))
    return subprocess.run([sys.executable, "-c", code], text=True, check=False, timeout=120, **options)


def test_no_command_needs_torch_or_lightning(folder):
    done = fresh("explain", "wte", capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wte: unit ")


def test_a_mistake_of_the_program_is_one_line_and_exit_code_70(folder, run, monkeypatch):
    def broken(plan: str):
        raise TypeError(f"of {plan}\nin two lines")

    monkeypatch.setattr(program, "COMMANDS", {**COMMANDS, "show": broken})
    code, out, err = run("show", "osdp_plan.json")
    assert (code, out, err.count("\n")) == (70, "", 1)
    assert "internal error, TypeError" in err
    assert "test_program.py" in err


def edited_numbers():
    yield "osdp_profile.json", "segments", lambda value: value[0].update(saved_bytes={"per_sample": -1.0})
    yield "osdp_profile.json", "operators", lambda value: value[0].update(parameter_bytes=-1)
    yield "osdp_profile.json", "optimizer", lambda value: value.update(s_per_element=-1e-9)
    yield "osdp_cluster.json", "all_gather", lambda value: value.update(seconds_per_byte=-3e-9)
    yield "osdp_plan.json", "units", lambda value: value[1].update(time_s=-1.0)
    yield "osdp_plan.json", "peak_parts", lambda value: value.update(batch=-1)


@pytest.mark.parametrize("number", range(6))
def test_negative_numbers_are_refused(folder, run, number):
    name, entry, edit = [*edited_numbers()][number]
    document = json.loads((folder / name).read_text())
    edit(document.get("value", document)[entry])
    (folder / name).write_text(json.dumps(document))
    code, out, err = run("simulate")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "at least 0" in err


def test_numbers_of_ranks_have_bounds(folder, run, ranks):
    code, _, err = run("what-if", "--ranks", f"{2**20 + 1}")
    assert (code, "at most 2^20" in err) == (2, True)
    dataclasses.replace(ranks, world_size=2**40).save("osdp_cluster.json")
    code, _, err = run("plan")
    assert (code, "at most 2^20" in err) == (2, True)


def test_large_and_deep_files_are_told(folder, run):
    (folder / "osdp_profile.json").write_text("[" * 2**20)
    (folder / "osdp_cluster.json").write_text('{"kind": "Cluster", "value": ' + "[0]," * 2**20)
    for command in (("simulate",), ("plan", "--profile", "osdp_cluster.json")):
        code, out, err = run(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert len(err) < 500


@pytest.mark.parametrize("columns", ["40", "20"])
def test_narrow_terminals_have_all_of_it(folder, run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for command in (("show", "osdp_plan.json"), ("explain", "wte", "--price", "false"), ("simulate",)):
        code, out, _ = run(*command)
        assert code == 0
        assert max(map(len, out.splitlines())) <= int(columns)


def test_other_locales_full_disks_and_closed_outputs(folder):
    ascii_only = fresh("simulate", capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "-----" in ascii_only.stdout
    with Path("/dev/full").open("w") as full:
        done = fresh("simulate", stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left" in done.stderr
    code = RUN.format(arguments=["simulate"])
    closed = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code], check=False, timeout=120)
    assert closed.returncode == 0


def test_whoever_reads_may_stop_early(folder):
    command = [sys.executable, "-c", RUN.format(arguments=["show", "osdp_plan.json"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(timeout=120), errors) == (0, "")
