"""The plan in a checkpoint."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch

from lightning_osdp import PlanFormatError
from lightning_osdp.core.axes import named
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.strategy.checkpointing import entries
from tests.support.plans import bare_plan

PLAN = bare_plan(
    [Unit(name="", operators=("",), kind="Linear", treatments=named("DP"))],
    fingerprint={"weight": "float32[3]"},
    world_size=2,
    peak_bytes=100,
    micro_batch_size=4,
)


def saved(tmp_path, plan, kind):
    checkpoint = {"hyper": {"path": tmp_path}}
    entries.store_plan(plan, checkpoint)
    if kind == "sharded":
        (tmp_path / "last.ckpt").mkdir()
        torch.save(checkpoint, tmp_path / "last.ckpt" / "meta.pt")
    else:
        torch.save({**checkpoint, "state_dict": {"weight": torch.ones(3)}}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_plan_is_read_from_its_checkpoint(tmp_path, kind):
    assert entries.read_plan(saved(tmp_path, PLAN, kind)) == PLAN


def test_a_plan_is_read_from_its_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert entries.read_plan(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_without_a_plan_is_refused(tmp_path, kind):
    with pytest.raises(PlanFormatError, match=r"at '.*last.ckpt', got one without a plan. Plan anew"):
        entries.read_plan(saved(tmp_path, None, kind))


def test_a_folder_that_is_no_checkpoint_has_no_plan(tmp_path):
    with pytest.raises(PlanFormatError, match="got one without a plan"):
        entries.read_plan(tmp_path)


class Executed:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["full", "sharded", "pickled", "protocol 0"])
def test_nothing_of_what_is_given_as_a_plan_is_executed(tmp_path, kind):
    given, written = tmp_path / "given", tmp_path / "written"
    checkpoint = {"osdp_plan": Executed(written)}
    if kind in {"pickled", "protocol 0"}:
        given.write_bytes(pickle.dumps(checkpoint, protocol=0 if kind == "protocol 0" else 4))
    else:
        file = given / "meta.pt" if kind == "sharded" else given
        file.parent.mkdir(exist_ok=True)
        torch.save(checkpoint, file)
    with pytest.raises(PlanFormatError, match=r"Expected a plan file|Expected plan file .* to be a JSON document"):
        entries.read_plan(given)
    assert not written.exists()
    if kind == "full":  # as the test is made, it would be
        torch.load(given, weights_only=False)
        assert written.exists()


def test_a_plan_is_read_from_among_anything_that_can_be_saved(tmp_path):
    objects = {
        "list": [PLAN],
        "set": {PLAN.units[0].modes},
        "ordered": OrderedDict(a=1),
        "module": torch.nn.Linear(1, 2),
    }
    checkpoint = {**objects, "class": Executed, torch.float16: range(3), "optimizer": torch.optim.SGD([torch.ones(1)])}
    entries.store_plan(PLAN, checkpoint)
    torch.save(checkpoint, tmp_path / "last.ckpt")
    assert entries.read_plan(tmp_path / "last.ckpt") == PLAN


def test_a_damaged_checkpoint_is_refused_or_read(tmp_path):
    path = saved(tmp_path, PLAN, "full")
    whole = path.read_bytes()
    num_refused = 0
    for position in range(0, len(whole), 37):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            entries.read_plan(path)
        except PlanFormatError:
            num_refused += 1
    assert num_refused > 10
    for length in range(0, len(whole), 101):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanFormatError):
            entries.read_plan(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "none/plan.json"])
def test_a_path_that_cannot_be_a_file_is_refused(tmp_path, name):
    with pytest.raises(PlanFormatError, match="cannot be read"):
        entries.read_plan(tmp_path / name)


def test_the_entry_can_be_read_with_weights_only():
    checkpoint = {}
    entries.store_plan(PLAN, checkpoint)
    assert all(type(value) is str for value in checkpoint.values())
