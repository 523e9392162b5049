"""Small models for the planner's tests, stated in numbers that can be added up by hand."""

import dataclasses

import pytest

from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.profile import ModelProfile, OperatorProfile


@pytest.fixture(scope="session")
def operator():
    """An operator of so many float32 parameter bytes under Adam; by default it is a module of its own."""

    def build(name, parameter_bytes, *, frozen=False, **fields):
        trainable = 0 if frozen else parameter_bytes
        path = name.split(".")
        above = [".".join(path[:length]) for length in range(len(path), 0, -1)] if name else []
        defaults = OperatorProfile(
            name=name,
            kind="Linear",
            enclosing=(*above, ""),
            parameter_bytes=parameter_bytes,
            num_trainable=trainable // 4,
            gathered_bytes=parameter_bytes,
            trainable_bytes=trainable,
            gradient_bytes=trainable,
            optimizer_bytes=2 * trainable,
        )
        return dataclasses.replace(defaults, **fields)

    return build


@pytest.fixture(scope="session")
def model(operator):
    """A model of operators; of a number, an operator of so many bytes named by its position."""

    def build(*operators, **fields):
        made = (
            operator(f"m{index}", given) if isinstance(given, int) else given for index, given in enumerate(operators)
        )
        return ModelProfile(operators=tuple(made), **fields)

    return build


@pytest.fixture(scope="session")
def cluster():
    """Ranks whose all-gather and reduce-scatter cost the same."""

    def build(world_size, *, latency_s=0.0, seconds_per_byte=1.0):
        link = Link(latency_s=latency_s, seconds_per_byte=seconds_per_byte)
        return Cluster(world_size=world_size, all_gather=link, reduce_scatter=link)

    return build
