"""What the ranks run to check apply and measure_cluster."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from wrapped import compare


def gradients_differ_by(name, modes):
    """Largest difference of loss and gradients from the unwrapped model's, and the units' names."""
    import torch.distributed as dist

    return compare(name, world_size=dist.get_world_size(), modes=modes)
