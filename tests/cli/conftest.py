"""A run's folder: a plan with the profile and the cluster that it was made of, all stated."""

import dataclasses
import functools
import json

import pytest

from lightning_osdp.cli import main
from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import LEVELS
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Link, UnitOverhead
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import BlockProfile, Level, OperatorProfile, OptimizerProfile
from lightning_osdp.planner.scheduler import make_plan

MIB = 2**20


@pytest.fixture(scope="session")
def profile(model, operator):
    """Four blocks of two operators, an embedding and a head; blocks may recompute or offload."""
    costs = {"activation_bytes_per_sample": MIB, "forward_s_per_sample": 2e-3, "backward_s_per_sample": 4e-3}
    names = [f"h.{block}.{name}" for block in range(4) for name in ("attn", "mlp")]
    operators = [
        operator("wte", 6 * MIB, forward_s_per_sample=1e-4),
        *(operator(name, 4 * MIB, **costs) for name in names),
        operator("head", 2 * MIB, **costs),
    ]
    stated = model(
        *operators,
        batch_bytes_per_sample=64.0,
        loss_activation_bytes_per_sample=3 * MIB,
        loss_s_per_sample=1e-3,
        fingerprint=dict.fromkeys(["wte", *names, "head"], "[1024, 1024] float32"),
        profiled_batch_size=2,
        optimizer=OptimizerProfile(s_per_element=1e-9),
    )
    fields = [field.name for field in dataclasses.fields(OperatorProfile)]
    plain = tuple(OperatorProfile(**{name: getattr(each, name) for name in fields}) for each in operators)
    blocks = tuple(_block(stated, f"h.{block}") for block in range(4))
    return dataclasses.replace(stated, operators=plain, blocks=blocks)


def _block(stated, name):
    ((first, last),) = stated.spans[name]
    ways = {
        choice: tuple(
            dataclasses.replace(segment, saved_bytes=Affine(0.0, share * MIB))
            for segment in stated.segments[first : last + 1]
        )
        for choice, share in (("recompute", 0.25), ("offload", 0.0))
    }
    copied = {"offload": Affine(0.0, 2.0 * MIB)}
    return BlockProfile(name=name, span=(first, last), segments=ways, rerun_s=Affine(0.0, 4e-3), copied_bytes=copied)


@pytest.fixture(scope="session")
def at_levels(profile):
    """The profile, whose blocks may also keep a result without which half of their forward runs again."""
    blocks = tuple(
        dataclasses.replace(
            block,
            segments={**block.segments, LEVELS[0]: block.segments["recompute"]},
            levels={LEVELS[0]: Level(kept=(0,), rerun_s=block.rerun_s * 0.5)},
        )
        for block in profile.blocks
    )
    return dataclasses.replace(profile, blocks=blocks)


@pytest.fixture(scope="session")
def ranks():
    """Four ranks whose links are about as busy as their devices."""
    link = Link(latency_s=20e-6, seconds_per_byte=3e-9)
    return Cluster(
        world_size=4,
        all_gather=link,
        reduce_scatter=link,
        unit_overhead=dict.fromkeys(UNIT_PARTS, UnitOverhead(fixed_s=5e-5)),
        overlaps=True,
        host_copy_s_per_byte=5e-11,
        memory_bytes=90 * MIB,
    )


@pytest.fixture(scope="session")
def planned(profile, ranks):
    """Makes a plan, each once; in micro-batches of two samples."""

    @functools.cache
    def make(limit_mib=80, *, number=1, **space):
        return make_plan(
            profile,
            ranks,
            memory_limit_bytes=limit_mib * MIB,
            micro_batch_size=BatchPolicy.fixed(2, number),
            search_space=SearchSpace(**space),
        )

    return make


@pytest.fixture
def folder(tmp_path, profile, ranks, planned, monkeypatch):
    """Returns a folder with the files of a run, in which commands run."""
    planned().save(tmp_path / "osdp_plan.json")
    profile.save(tmp_path / "osdp_profile.json")
    ranks.save(tmp_path / "osdp_cluster.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def run(capsys):
    """Exit code, standard output and standard error of a command."""

    def command(*arguments):
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return command


@pytest.fixture
def answer(run):
    """The JSON that a command prints."""

    def command(*arguments):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return command
