"""Messages and files of a plan that was made."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_osdp import Cluster, Link, ModelProfile
from lightning_osdp.core.axes import named
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.profile import Segment
from lightning_osdp.strategy.planning import publish
from tests.support.plans import bare_plan


@pytest.fixture
def told(monkeypatch, tmp_path):
    texts = []
    monkeypatch.setattr(publish, "rank_zero_info", texts.append)
    monkeypatch.setattr(publish, "show", lambda _: None)

    def tell(*, state_dict_type="full", device="cpu", limit_bytes=2**20, saves=True):
        trainer = SimpleNamespace(
            log_dir=tmp_path,
            fast_dev_run=True,
            checkpoint_callbacks=[None] * saves,
            state=SimpleNamespace(fn=None),
            strategy=SimpleNamespace(root_device=torch.device(device)),
        )
        estimate = SimpleNamespace(saving_bytes={"full": 3 * 2**20, "sharded": 2 * 2**20})
        monkeypatch.setattr(publish, "simulate", lambda *_: estimate)
        monkeypatch.setattr(publish, "advise", lambda *_: ())
        plan = dataclasses.replace(PLAN, memory_limit_bytes=limit_bytes)
        publish.publish(trainer, plan, PROFILE, CLUSTER, state_dict_type=state_dict_type)
        return texts

    return tell


def test_a_checkpoint_that_takes_more_than_the_limit_is_told_of_with_what_takes_less(told):
    (text,) = told()
    assert text == (
        "OSDP: saving a full checkpoint may take 3.00 MiB on rank 0, more than memory_limit (1.00 MiB), which is about"
        ' training. OSDPStrategy(state_dict_type="sharded") takes 2.00 MiB.'
    )


def test_of_a_sharded_checkpoint_there_is_no_smaller_one(told):
    assert told(state_dict_type="sharded")[0].endswith("more than memory_limit (1.00 MiB), which is about training.")


@pytest.mark.parametrize("given", [{"limit_bytes": 4 * 2**20}, {"device": "cuda"}, {"saves": False}])
def test_nothing_is_said_where_it_fits_or_goes_to_the_host_or_nothing_is_saved(told, given):
    assert told(**given) == []


ROOT = Unit(name="", operators=("net",), kind="Linear", treatments=named("DP"), parameter_bytes=4, time_s=0.0)
PLAN = bare_plan([ROOT], memory_limit_bytes=2**20)
LINK = Link(latency_s=1e-5, seconds_per_byte=1e-9)
CLUSTER = Cluster(world_size=2, all_gather=LINK, reduce_scatter=LINK)
PROFILE = ModelProfile(operators=(), segments=(Segment(),), fingerprint={"a": "[1] float32"})


def published(monkeypatch, folder):
    """Publishes a plan, and returns what is said and the names of the files that are written."""
    texts = []
    monkeypatch.setattr(publish, "rank_zero_info", texts.append)
    trainer = SimpleNamespace(log_dir=folder, fast_dev_run=False, state=SimpleNamespace(fn=None))
    publish.publish(trainer, PLAN)
    return texts, sorted(path.name for path in folder.iterdir())


def test_the_plan_is_written_and_drawn(monkeypatch, tmp_path):
    text = f"OSDP: plan written to {tmp_path / 'osdp_plan.json'}; drawn beside it as osdp_plan.svg"
    assert published(monkeypatch, tmp_path) == ([text], ["osdp_plan.json", "osdp_plan.svg"])


def test_without_matplotlib_the_plan_is_written_and_a_line_says_how_to_get_a_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (text,), written = published(monkeypatch, tmp_path)
    assert text.endswith('osdp_plan.json; a picture of it needs matplotlib: pip install "lightning-osdp[plots]"')
    assert written == ["osdp_plan.json"]


@pytest.mark.parametrize("fast_dev_run", [False, True])
def test_what_the_plan_was_made_of_is_written_beside_it(monkeypatch, tmp_path, fast_dev_run):
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(
        log_dir=str(tmp_path),
        fast_dev_run=fast_dev_run,
        checkpoint_callbacks=[],
        state=SimpleNamespace(fn=None),
        strategy=strategy,
    )
    monkeypatch.setattr(publish, "simulate", lambda *_: SimpleNamespace(moments=[]))
    monkeypatch.setattr(publish, "advise", lambda *_: ())
    publish.publish(trainer, PLAN, PROFILE, CLUSTER)
    written = {path.name: path for path in tmp_path.glob("*.json")}
    names = ["osdp_cluster.json", "osdp_plan.json", "osdp_profile.json"]
    assert sorted(written) == ([] if fast_dev_run else names)
    if written:
        assert Cluster.load(written["osdp_cluster.json"]) == CLUSTER
        assert ModelProfile.load(written["osdp_profile.json"]) == PROFILE
