import os

import pytest
import torch.distributed as dist


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs an example's ``main`` in this process, on one rank and in an empty folder; returns what it prints."""
    before = dict(os.environ)
    # LightningCLI 2.6 calls what jsonargparse 4.49 has renamed
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.chdir(tmp_path)

    def run(main, *arguments):
        main(["fit", *arguments])
        return capsys.readouterr().out

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
