"""Exit codes, help, and files that are none."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest

import lightning_osdp
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


def test_whoever_reads_may_stop_early(folder):
    command = [sys.executable, "-c", RUN.format(arguments=["show", "osdp_plan.json"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(timeout=120), errors) == (0, "")
