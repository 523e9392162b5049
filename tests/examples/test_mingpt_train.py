import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.mingpt import train
from examples.mingpt.data import TextDataModule

# advice of Lightning, given on machines that have more cores or a GPU
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The '\w+_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

CONFIGS = sorted((Path(train.__file__).parent / "configs").glob("*.yaml"))
SMALL_RUN = [
    "fit",
    "--seed_everything=false",  # a seed would stay in the environment of the tests that follow
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--model.num_layers=1",
    "--model.num_heads=1",
    "--model.hidden_size=8",
    "--data.max_bytes=20000",
    "--data.validation_fraction=0.5",
    "--data.sequence_length=16",
]


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    # LightningCLI 2.6 calls what jsonargparse 4.49 has renamed
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the training script in an empty folder and returns what it prints."""

    def run_in_empty_folder(*arguments):
        monkeypatch.chdir(tmp_path)
        train.main([*SMALL_RUN, *arguments])
        return capsys.readouterr().out

    return run_in_empty_folder


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_understood(config, capsys):
    with pytest.raises(SystemExit) as exit_info:
        train.main(["fit", f"--config={config}", "--print_config"])
    assert exit_info.value.code == 0
    parsed = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load(config.read_text())
    assert parsed["trainer"]["max_steps"] == given["trainer"]["max_steps"]
    assert parsed["data"]["sequence_length"] == given["data"]["sequence_length"]


def test_the_report_loads_the_checkpoint_and_shows_a_sample(run, tmp_path):
    printed = run("--trainer.max_steps=2", "--trainer.limit_val_batches=2", "--trainer.val_check_interval=2")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert re.search(
        r"Validation loss: 5\.\d{3} nats a byte; of a model that knows byte frequencies only: 3\.", printed
    )
    assert f"Sample:\n{train.PROMPT.decode()}" in printed
    assert f"Checkpoint: {checkpoint}" in printed


def test_a_fast_dev_run_says_that_there_is_no_checkpoint(run, tmp_path):
    printed = run("--trainer.fast_dev_run=true")
    assert "No checkpoint was written (fast_dev_run writes none), so there is no sample." in printed
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_the_report_names_a_sharded_checkpoint_without_a_sample(tmp_path):
    # a sharded checkpoint is a folder
    checkpoint = ModelCheckpoint()
    checkpoint.best_model_path = str(tmp_path)
    trainer = SimpleNamespace(callback_metrics={}, checkpoint_callback=checkpoint)
    printed = train.report(trainer, TextDataModule(max_bytes=300_000))
    assert "Validation loss: not measured; of a model" in printed
    assert "The checkpoint is sharded: for a sample, train with the strategy's state_dict_type: full." in printed
    assert printed.endswith(f"Checkpoint: {tmp_path}")
