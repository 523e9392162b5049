"""Units of one operator, and what the terms of the cost are called with."""

import pytest

from lightning_osdp.core.units import partition
from lightning_osdp.planner.cost import Workload


@pytest.fixture(scope="session")
def unit(model, operator):
    """A unit of one operator of so many bytes."""

    def build(parameter_bytes, **fields):
        return partition(model(operator("m", parameter_bytes, **fields)), min_unit_bytes=0)[1]

    return build


@pytest.fixture(scope="session")
def workload():
    """Returns a function that makes a workload of so many samples in so many micro-batches."""

    def build(micro_batch_size=1, num_micro_batches=1):
        return Workload(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches)

    return build
