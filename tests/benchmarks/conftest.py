import sys
from pathlib import Path

import pytest
import torch

# Spawned processes and pytest must find the same modules; test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread():
    """As the ranks of a test-bed: small tensors on many threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
