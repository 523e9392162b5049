"""Documents name what is in the tree, and sentences of docstrings begin with verbs and nouns."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import lightning_osdp

ROOT = Path(__file__).parents[2]
PAPER_MAP = (ROOT / "docs/research/paper_map.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs/reference/options.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def _resolve(path):
    """The object at a dotted path, whatever part of it is modules."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


PAPER_MAP_ROWS = re.findall(r"^\|.*\| `([\w.]+)` \| `([\w/]+\.py)` \|$", PAPER_MAP, re.MULTILINE)


def test_the_paper_map_is_found():
    assert len(PAPER_MAP_ROWS) > 10


@pytest.mark.parametrize(("function", "tests"), PAPER_MAP_ROWS, ids=lambda name: name)
def test_the_paper_map_names_what_exists(function, tests):
    assert callable(_resolve(f"lightning_osdp.{function}"))
    assert (ROOT / "tests" / tests).is_file()


def test_the_architecture_shows_every_top_level_module():
    tree = ARCHITECTURE.split("```text")[1].split("```")[0]
    shown = set(re.findall(r"^  (\w+)(?:/|\.py) ", tree, re.MULTILINE))
    package = ROOT / "lightning_osdp"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert shown == there


def test_the_architecture_shows_the_layers_that_are_checked():
    drawn = re.findall(r"^(?:(planner|operations): )?(\w.* > .*)$", ARCHITECTURE, re.MULTILINE)
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'^containers = \["lightning_osdp\.?(\w*)"\]\nlayers = \[(.*)\]$', contracts, re.MULTILINE)
    assert len(layers) == 3
    assert [(room, each.split(" > ")) for room, each in drawn] == [
        (room, re.findall(r'"([^"]+)"', each)) for room, each in layers
    ]


def test_the_manual_lists_every_option():
    table, *_ = OPTIONS.split("\n## ")
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)
    parameters = inspect.signature(lightning_osdp.OSDPStrategy).parameters.values()
    options = [(p.name, repr(p.default).replace("'", '"')) for p in parameters if p.kind is not p.VAR_KEYWORD]
    assert listed == options


MIGRATING_PAGE = (ROOT / "docs/guide/migrating.md").read_text(encoding="utf-8")
MIGRATING = re.findall(r"`(OSDPStrategy\(.*?\))`", MIGRATING_PAGE)


@pytest.mark.parametrize("written", sorted({*MIGRATING}))
def test_what_replaces_another_strategys_settings_is_taken(written):
    known = {"OSDPStrategy": lightning_osdp.OSDPStrategy, "SearchSpace": lightning_osdp.SearchSpace, "Block": nn.Linear}
    assert isinstance(eval(written, known), lightning_osdp.OSDPStrategy)


@pytest.mark.parametrize(
    "kind",
    [FSDPStrategy, FullyShardedDataParallel, ModelParallelStrategy, DeepSpeedStrategy],
    ids=lambda kind: kind.__name__,
)
def test_the_manual_says_what_becomes_of_another_strategys_arguments(kind):
    arguments = inspect.signature(kind.__init__).parameters.keys() - {"self", "module", "kwargs"}
    assert {name for name in arguments if not re.search(rf"\b{name}\b", MIGRATING_PAGE)} == set()


@pytest.mark.parametrize("name", sorted(lightning_osdp.__all__))
def test_every_public_name_is_documented(name):
    assert _resolve(f"lightning_osdp.{name}").__doc__
    api = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    is_error = name.endswith("Error")  # documented with their module
    assert is_error or re.search(rf"auto\w+:: lightning_osdp\.{name}$", api, re.MULTILINE)


def shown_on(page):
    """Objects that a page documents by name -> the names of the members that it shows of them."""
    for name, options in re.findall(
        r"^\.\. auto(?:class|function):: lightning_osdp\.(\w+)\n((?:   .*\n)*)", page, re.M
    ):
        found, chosen = getattr(lightning_osdp, name), re.search(r":members:(.*)", options)
        hidden = re.search(r":exclude-members:(.*)", options)
        if chosen is None:
            members = []
        else:
            every = {**vars(found).get("__annotations__", {}), **vars(found)}
            members = re.findall(r"\w+", chosen[1]) or [member for member in every if not member.startswith("_")]
        yield name, [member for member in members if hidden is None or member not in hidden[1]]


def hints_of(found):
    """Returns annotations; matplotlib's are imported where a picture is drawn."""
    return typing.get_type_hints(found, localns={"Figure": Figure})


def classes_in(hint):
    """Classes of this package that an annotation consists of."""
    if isinstance(hint, type) and hint.__module__.partition(".")[0] == "lightning_osdp":
        yield hint
    for part in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from classes_in(part)


def needed_by(name, members):
    """Classes of this package that somebody needs to know who uses an object and these members of it."""
    found = getattr(lightning_osdp, name)
    hints = hints_of(found)
    functions = [found] if inspect.isfunction(found) else [found.__init__]
    own = (inspect.getattr_static(found, each, None) for each in members if each not in hints)
    functions += [getattr(each, "fget", None) or getattr(each, "__func__", None) or each for each in own]
    shown = list(hints.values()) if hasattr(found, "_fields") else [hints[each] for each in members if each in hints]
    for function in functions:
        hinted = hints_of(function) if inspect.isfunction(function) else {}
        shown += [hint for each, hint in hinted.items() if not each.startswith("_")]  # private fields are not passed
    return {each for hint in shown for each in classes_in(hint)}


SHOWN = dict(shown_on((ROOT / "docs/reference/api.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_public_signature_needs_is_public(name):
    missing = {each for each in needed_by(name, SHOWN[name]) if each.__name__ not in SHOWN}
    assert not missing
    assert {each.__name__ for each in needed_by(name, SHOWN[name])} <= {*lightning_osdp.__all__}


def test_what_signatures_need_is_found():
    assert len(SHOWN) > 50
    needed = {each.__name__ for each in needed_by("Plan", SHOWN["Plan"])}
    assert {"Unit", "Block", "Decision", "SearchSpace"} <= needed
    assert {each.__name__ for each in needed_by("make_plan", [])} >= {"ModelProfile", "Cluster", "BatchPolicy", "FSDP2"}
    assert {each.__name__ for each in needed_by("Interval", [])} == {"Event"}
    assert {each.__name__ for each in needed_by("PlanMonitor", ["measured"])} == {"Measured"}


def test_the_manual_plans_without_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/reference/plans.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "make_plan(" in block)
    exec(compile(code, "plans.md", "exec"), {})
    assert lightning_osdp.Plan.load("osdp_plan.json").world_size == 64


@pytest.mark.slow
def test_the_program_of_the_quick_start_trains_and_has_units_of_both_modes(tmp_path):
    page = (ROOT / "docs/quick_start.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    written = subprocess.check_output(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, text=True, timeout=300
    )
    plan, measured = written.split("OSDP: predicted and measured")
    assert " ZDP " in plan
    assert re.search(r"layers\S* .* DP ", plan)
    assert "step time" in measured


@pytest.mark.parametrize("page", ["README.md", "docs/reference/plans.md"])
def test_the_demo_is_shown_under_its_limit(page):
    config = (ROOT / "examples/mingpt/configs/osdp_cpu.yaml").read_text(encoding="utf-8")
    (limit,) = re.findall(r"memory_limit: (\d+)MiB", config)
    assert re.search(rf"^peak memory .* of {limit}\.0 MiB ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


BEGINS_WITHOUT_A_NOUN = re.compile(r"(?:\A\s*|[.!?]\s+)(Of|Such|That|The same|Those|What|Whether)\b")
"""A docstring's first sentence, or a later one."""


def docstrings_of(source):
    """Line and text of each string that is a statement: of modules, classes and functions, and after assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "lightning_osdp", "tests"])
def test_sentences_of_docstrings_begin_with_verbs_and_nouns(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings_of(path.read_text(encoding="utf-8"))
        if BEGINS_WITHOUT_A_NOUN.search(text)
    ]
    assert found == []


def test_all_docstrings_are_found():
    parts = ['"""Of."""', "X = 1", '"""What."""', "class A:", '  """', '  Those."""', "  y: int", '  """That."""']
    source = "\n".join([*parts, '  def f(self): "The same."'])
    found = dict(docstrings_of(source))
    assert sorted(found) == [1, 3, 5, 8, 9]
    assert all(map(BEGINS_WITHOUT_A_NOUN.search, [*found.values(), "A noun. Of that.", "A noun.\n  Those."]))
    others = ["Offers.", "Thatched. Offers.", "Whatever is.", "The samples.", "Suchlike.", "Number of"]
    assert not any(map(BEGINS_WITHOUT_A_NOUN.search, others))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_tests_that_documents_name_exist():
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)(?:::(\w+))?`", "".join(map(Path.read_text, DOCUMENTS)))
    named = {(path, function) for path, function in named if path.rpartition("/")[2].startswith("test_")}
    assert len(named) > 40
    for path, function in named:
        files = [ROOT / "tests" / path, ROOT / "tests/distributed" / path]
        (found,) = (file.read_text(encoding="utf-8") for file in files if file.is_file())
        assert f"def {function}" in found, (path, function)
