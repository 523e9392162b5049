"""LightningCLI with both spellings of the strategy."""

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_osdp import OSDPStrategy, Plan, SearchSpace

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),  # one process loads at once
]

BY_NAME = "strategy: osdp"
BY_CLASS = """
  strategy:
    class_path: lightning_osdp.OSDPStrategy
    init_args:
      memory_limit: 64MiB
      batch_size: {batch_size}
      search: greedy
      race: auto
      search_space:
        modes: [ZDP, DP]
        min_unit_bytes: 0
      state_dict_type: full
"""


def run(tmp_path, monkeypatch, strategy):
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        f"trainer:\n  accelerator: cpu\n  devices: 1\n  logger: false\n  max_steps: 2\n  limit_val_batches: 1\n"
        f"  enable_progress_bar: false\n  enable_checkpointing: false\n  enable_model_summary: false\n"
        f"  default_root_dir: {tmp_path}\n  {strategy.strip()}\n"
    )
    cli = LightningCLI(
        BoringModel,
        args=["fit", "--config", str(config)],
        seed_everything_default=False,
        save_config_callback=None,
    )
    return cli.trainer


@pytest.mark.parametrize("batch_size", ["auto", "keep", "1"])
def test_by_class_path_with_options(tmp_path, monkeypatch, batch_size):
    trainer = run(tmp_path, monkeypatch, BY_CLASS.format(batch_size=batch_size))
    assert isinstance(trainer.strategy, OSDPStrategy)
    assert trainer.global_step == 2
    plan = Plan.load(tmp_path / "osdp_plan.json")
    assert plan == trainer.strategy.plan
    assert plan.memory_limit_bytes == 64 * 2**20
    assert plan.solver == "greedy"
    assert trainer.strategy._units.options.race == "auto"
    assert trainer.strategy._units.options.search_space == SearchSpace(modes=("ZDP", "DP"), min_unit_bytes=0)


def test_by_name(tmp_path, monkeypatch):
    trainer = run(tmp_path, monkeypatch, BY_NAME)
    assert isinstance(trainer.strategy, OSDPStrategy)
    assert trainer.global_step == 2
    assert trainer.strategy.plan.world_size == 1
