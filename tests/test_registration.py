"""Names of the strategy, whichever is imported first, and what importing costs."""

import subprocess
import sys
import textwrap

import pytest

from tests.support.tiers import slow

FIRST = """
    import sys
    import lightning_osdp
    slow = [name for name in ("torch", "lightning", "transformers", "matplotlib") if name in sys.modules]
    assert not slow, slow
    import lightning as L
    assert "lightning_osdp.strategy" not in sys.modules
"""
LAST = """
    import lightning as L
    import lightning_osdp
"""
THEN = """
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import StrategyRegistry

    names = ("osdp", "osdp_spawn", "osdp_fork", "osdp_notebook")
    assert all(StrategyRegistry.available_strategies().count(name) == 1 for name in names)
    rest = {"accelerator": "cpu", "devices": 2, "logger": False}
    made = [L.Trainer(strategy=strategy, **rest).strategy for strategy in ("osdp", "osdp_spawn")]
    named = {"class_path": "OSDPStrategy", "init_args": {"memory_limit": "1GiB"}}
    made.append(LightningCLI(BoringModel, run=False, args={"trainer": {"strategy": named, **rest}}).trainer.strategy)
    assert {type(each) for each in made} == {lightning_osdp.OSDPStrategy}
    assert made[1]._units.options.start_method == "spawn"
    assert lightning_osdp.OSDPStrategy is sys.modules["lightning_osdp.strategy"].OSDPStrategy
    assert set(lightning_osdp.__all__) <= {*dir(lightning_osdp)}
"""


@pytest.mark.parametrize("imports", [FIRST, slow(LAST)], ids=["first", "last"])  # test_packaging.py imports it last
def test_the_strategy_has_its_names_in_whatever_order(imports):
    code = textwrap.dedent(imports) + "import sys\n" + textwrap.dedent(THEN)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


def test_what_there_is_not_is_told():
    with pytest.raises(ImportError, match="OSDPStrateggy"):
        from lightning_osdp import OSDPStrateggy  # noqa: F401
