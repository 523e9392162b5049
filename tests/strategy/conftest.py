import os

import pytest
import torch.distributed as dist

from lightning_osdp import Cluster
from lightning_osdp.core.cluster import Link
from lightning_osdp.strategy.planning import plan_fit, publish


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


@pytest.fixture
def stated_links(monkeypatch):
    """States the links of one rank, which would take long to measure."""
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    stated = Cluster(world_size=1, all_gather=link, reduce_scatter=link, memory_bytes=2**34)
    monkeypatch.setattr(plan_fit, "measure_cluster", lambda *_, **__: stated)
