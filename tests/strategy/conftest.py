import os

import pytest
import torch.distributed as dist

from lightning_osdp.strategy.planning import publish


@pytest.fixture
def one_rank(monkeypatch):
    """A Trainer may run in this process: what Lightning leaves behind is removed."""
    before = dict(os.environ)
    # Lightning 2.6 calls what jsonargparse 4.49 deprecates.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(publish, "save_picture", lambda *_, **__: None)  # which takes longer than many a fit
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
