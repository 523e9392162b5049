"""Wheel and source distribution are built, installed where nothing of this checkout is, and tried."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.support.tiers import slow

ROOT = Path(__file__).parents[2]

PLACE = """
import lightning_osdp

print(lightning_osdp.__file__)
"""
TRAINS = """
import lightning, torch, lightning_osdp
from lightning.pytorch.demos.boring_classes import BoringModel

print(lightning_osdp.__file__)
trainer = lightning.Trainer(
    strategy="osdp", accelerator="cpu", devices=1, max_steps=2, limit_val_batches=0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
assert trainer.global_step == 2 and trainer.strategy.plan is not None
"""


def _run(*command, cwd, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel, which is built from the source distribution, and that."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.parametrize("code", [PLACE, slow(TRAINS)], ids=["answers", "trains"])
def test_the_wheel_trains_and_answers_where_there_is_no_checkout(distributions, tmp_path, code):
    wheel, _ = distributions
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    dependencies = sysconfig.get_path("purelib")  # not as a site folder: the checkout's own .pth file has no effect
    place = _run(python, "-W", "ignore", "-c", code, cwd=tmp_path, PYTHONPATH=dependencies, OMP_NUM_THREADS="1")
    assert f"{tmp_path / 'env'}" in place
    script = tmp_path / "env/bin/lightning-osdp"
    told = _run(script, "--version", cwd=tmp_path, PYTHONPATH=dependencies)
    assert re.search(r"\d+\.\d+", told)


def test_both_hold_what_they_should(distributions):
    wheel, sdist = distributions
    packaged = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_osdp").rglob("*.py")}
    assert ours <= packaged
    assert {"lightning_osdp/py.typed", "lightning_osdp/machines/catalog.toml"} <= packaged
    assert {name.split("/")[0].split("-")[0] for name in packaged} == {"lightning_osdp"}
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"lightning_osdp", "tests", "examples", "benchmarks", "docs", "Makefile", "README.md", "LICENSE"} <= top


def test_what_a_package_index_shows_links_to_no_file(distributions):
    wheel, _ = distributions
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    shown = message_from_bytes(zipfile.ZipFile(wheel).read(name)).get_payload()
    assert "make demo" in shown
    assert re.search(r"keeping [\d.]+ MiB saves", shown), "the picture's place is taken by the table"
    assert [target for target in re.findall(r"\]\(([^)]*)\)", shown) if not target.startswith("http")] == []
