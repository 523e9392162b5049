"""Small models for the planner's tests, stated in numbers that can be added up by hand."""

import dataclasses
import gc
import os
import tempfile

# Before torch is imported, and for processes that tests start: threads on small tensors only wait for each other, and
# two processes that run tests have taken three times the seconds.
os.environ["OMP_NUM_THREADS"] = "1"
# Each of several processes that share the tests has cores of its own, with the ranks that it starts: these wake each
# other up all the time, which costs least on one core, and ranks of two tests would wait for each other's.
if "PYTEST_XDIST_WORKER" in os.environ:
    _cores, _place = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, _cores[_place % len(_cores) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.profile import Cut, ModelProfile, OperatorProfile, ParameterProfile, Segment
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting

# An example's duration says nothing of the code. Examples stay the same every time, so that a change makes tests fail;
# `pytest --hypothesis-profile=random` looks for others.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("random", deadline=None)
settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Looks for doctests in the package alone: here are none, and looking takes seconds."""
    collectors = yield
    return [each for each in collectors if not isinstance(each, DoctestModule)]


@pytest.fixture(scope="module", autouse=True)
def _left_out():
    """Leaves what was there before out of each collection: a fit looks through all other objects, and looks for few."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist  # not by the process that shares tests out

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/store")
        yield
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatedOperator(OperatorProfile):
    """An operator with the numbers of its segment, per sample."""

    num_calls: int = 1
    forward_s_per_sample: float = 0.0
    backward_s_per_sample: float = 0.0
    forward_fixed_s: float = 0.0
    backward_fixed_s: float = 0.0
    activation_bytes_per_sample: float = 0.0
    forward_workspace_bytes_per_sample: float = 0.0
    backward_workspace_bytes_per_sample: float = 0.0
    ending_bytes_per_sample: float | None = None

    @property
    def segment(self):
        return Segment(
            operator=self.name,
            forward_s=Affine(self.forward_fixed_s, self.forward_s_per_sample),
            backward_s=Affine(self.backward_fixed_s, self.backward_s_per_sample),
            saved_bytes=Affine(0.0, self.activation_bytes_per_sample),
            forward_workspace_bytes=Affine(0.0, self.forward_workspace_bytes_per_sample),
            backward_workspace_bytes=Affine(0.0, self.backward_workspace_bytes_per_sample),
            ending_bytes=None if self.ending_bytes_per_sample is None else Affine(0.0, self.ending_bytes_per_sample),
        )


@pytest.fixture(scope="session")
def operator():
    """An operator of so many float32 parameter bytes under Adam; by default it is a module of its own."""

    def build(name, parameter_bytes, *, frozen=False, **fields):
        trainable = 0 if frozen else parameter_bytes
        path = name.split(".")
        above = [".".join(path[:length]) for length in range(len(path), 0, -1)] if name else []
        defaults = StatedOperator(
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
def linear(operator):
    """An operator of ``features`` x ``outputs`` float32 weights and a bias that can be cut along its features."""

    def build(name, features, outputs, *, position=0, rows=1, **fields):
        sizes = (features * outputs, outputs)
        made = operator(name, 4 * sum(sizes), signature=f"Linear {features} {outputs}", **fields)
        parameters = (
            ParameterProfile(
                position=2 * position + index,
                num_elements=size,
                itemsize=4,
                gathered_itemsize=4,
                state_bytes_per_element=8,
            )
            for index, size in enumerate(sizes)
        )
        cut = Cut(
            num_features=features,
            is_cut=(True, False),
            input_bytes=Affine(0.0, 4.0 * rows * features),
            input_gradient_bytes=Affine(0.0, 4.0 * rows * features),
            output_bytes=Affine(0.0, 4.0 * rows * outputs),
        )
        return dataclasses.replace(made, parameters=tuple(parameters), cut=cut)

    return build


@pytest.fixture(scope="session")
def model(operator):
    """A model of operators; of a number, an operator of so many bytes named by its position."""

    def build(*operators, batch_bytes_per_sample=0.0, **fields):
        made = [
            operator(f"m{index}", given) if isinstance(given, int) else given for index, given in enumerate(operators)
        ]
        stated = {
            name: fields.pop(f"loss_{name}_per_sample", 0.0)
            for name in ("activation_bytes", "forward_workspace_bytes", "backward_workspace_bytes", "s")
        }
        loss = Segment(
            forward_s=Affine(0.0, stated["s"]),
            saved_bytes=Affine(0.0, stated["activation_bytes"]),
            forward_workspace_bytes=Affine(0.0, stated["forward_workspace_bytes"]),
            backward_workspace_bytes=Affine(0.0, stated["backward_workspace_bytes"]),
        )
        segments = {one.name: one.segment for one in made} | {"": loss}
        profile = ModelProfile.in_turn(made, segments, batch_bytes=Affine(0.0, batch_bytes_per_sample), **fields)
        calls = {one.enclosing[0]: one.num_calls for one in made if one.num_calls > 1}
        spans = {name: spans * calls.get(name, 1) for name, spans in profile.spans.items()}
        return dataclasses.replace(profile, spans=spans)

    return build


@pytest.fixture(scope="session")
def cluster():
    """Ranks whose all-gather and reduce-scatter cost the same."""

    def build(world_size, *, latency_s=0.0, seconds_per_byte=1.0):
        link = Link(latency_s=latency_s, seconds_per_byte=seconds_per_byte)
        return Cluster(world_size=world_size, all_gather=link, reduce_scatter=link)

    return build


@pytest.fixture(scope="session")
def uneven(model, operator):
    """One large operator, three small ones, and 80 bytes of activations per sample, on two ranks.

    base = 51.5 (shards) + 103 (Adam) = 154.5, and 51.5 reduced gradients in forward; the peak is at the loss,
    206 + 80 b + what is kept: 103 if everything is, 3 if all but the large one are. At a limit of 560 bytes

        b = 1, 2, 3   everything is kept:  309 + 240 = 549
        b = 4         the large one is not: 209 + 320 = 529       (kept: 629)
        b = 5         nothing fits:         206 + 400 = 606

    At 0.01 s per byte a ring takes 0.5 s for the large one, 0.015 s for the others. A sample takes 0.1 s, so

        b = 1   0.1 + 2 * 0.515       = 1.13 s     2 / 1.13 = 1.770 samples/s
        b = 3   0.3 + 2 * 0.515       = 1.33 s     6 / 1.33 = 4.511 samples/s
        b = 4   0.4 + 2 * 0.515 + 0.5 = 1.93 s     8 / 1.93 = 4.145 samples/s
    """
    return model(
        operator("large", 100),
        operator("a", 1),
        operator("b", 1),
        operator("c", 1, activation_bytes_per_sample=80, forward_s_per_sample=0.1),
    )


@pytest.fixture(scope="session")
def setting(model, operator):
    def build(*, operators, min_unit_bytes=0, loss_activation_bytes_per_sample=0.0, **fields):
        profile = model(
            *(operator(**made) for made in operators),
            loss_activation_bytes_per_sample=loss_activation_bytes_per_sample,
        )
        return Setting(profile=profile, units=partition(profile, min_unit_bytes=min_unit_bytes), **fields)

    return build
