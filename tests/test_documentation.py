"""What the documents say of the tree is there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import lightning_osdp

ROOT = Path(__file__).parents[1]
PAPER_MAP = (ROOT / "docs/research/paper_map.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs/options.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/research").glob("*.md")])


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
    drawn = re.search(r"^cli >.*?errors$", ARCHITECTURE, re.MULTILINE | re.DOTALL).group()
    layers = re.search(r"^layers = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.split(r"\s+>\s+", drawn) == re.findall(r'"([^"]+)"', layers.group(1))


def test_the_manual_lists_every_option():
    table, *_ = OPTIONS.split("\n## ")
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)
    parameters = inspect.signature(lightning_osdp.OSDPStrategy).parameters.values()
    options = [(p.name, repr(p.default).replace("'", '"')) for p in parameters if p.kind is not p.VAR_KEYWORD]
    assert listed == options


@pytest.mark.parametrize("name", sorted(lightning_osdp.__all__))
def test_every_public_name_is_documented(name):
    assert _resolve(f"lightning_osdp.{name}").__doc__
    api = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    is_error = name.endswith("Error")  # documented with their module
    assert is_error or re.search(rf"auto\w+:: lightning_osdp\.{name}$", api, re.MULTILINE)


def test_the_manual_plans_without_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/plans.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "make_plan(" in block)
    exec(compile(code, "plans.md", "exec"), {})
    assert lightning_osdp.Plan.load("osdp_plan.json").world_size == 64


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
