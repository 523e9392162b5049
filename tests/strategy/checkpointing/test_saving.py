"""Checkpoints appear under their name only when they are complete, whatever stops the process."""

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.distributed.checkpoint import CheckpointException

from lightning_osdp import ConfigurationError
from lightning_osdp.strategy.checkpointing import saving
from lightning_osdp.strategy.checkpointing.saving import CompleteFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

CHANGES = ["rename", "replace", "unlink", "rmdir", "fsync"]


class Killed(BaseException):
    """Error from which on the process changes nothing."""


@pytest.fixture
def killed_at(monkeypatch):
    """Returns a context in which the n-th change of the file system and all later ones do not happen."""

    @contextmanager
    def at(number):
        left = [number]

        def counted(change):
            def changed(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return change(*args, **kwargs)

            return changed

        with monkeypatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, counted(getattr(os, name)))
            patch.setattr(torch, "save", counted(torch.save))
            yield

    return at


def save(value, path, kind):
    checkpoint = {"state_dict": {"weight": torch.full((3,), float(value))}, "value": value}
    if kind == "full":
        CompleteFiles().save_checkpoint(checkpoint, str(path))
    else:
        saving.save_shards(checkpoint, path)


def read(path):
    """The value that was saved, if all of the checkpoint is there."""
    if path.is_file():
        return torch.load(path)["value"]
    state = {"model": {"weight": torch.zeros(3)}}
    _distributed_checkpoint_load(state, path)
    value = torch.load(path / "meta.pt")["value"]
    assert state["model"]["weight"].tolist() == [float(value)] * 3
    return value


def found_by_last(folder):
    """Returns the path that ``ckpt_path="last"`` resumes from."""
    paths = ModelCheckpoint(dirpath=folder)._find_last_checkpoints(mock.Mock())
    return Path(max(paths, key=os.path.getmtime))


@pytest.mark.parametrize("before", ["full", "sharded"])
@pytest.mark.parametrize("after", ["full", "sharded"])
def test_a_kill_at_any_moment_leaves_the_checkpoint_before_or_the_new_one(tmp_path, killed_at, before, after):
    found = []
    for number in range(60):
        folder = tmp_path / str(number)
        path = folder / "last.ckpt"
        save(1, path, before)
        try:
            with killed_at(number):
                save(2, path, after)
        except (Killed, CheckpointException):
            found.append(read(found_by_last(folder)))
            assert read(saving.existing_checkpoint(path)) == found[-1] if path.exists() else found[-1] == 1
            save(3, path, after)
            assert [entry.name for entry in folder.iterdir()] == ["last.ckpt"]
            assert read(path) == 3
        else:
            break
    assert read(path) == 2
    assert found == sorted(found)
    assert found[0] == 1
    # A file takes the place of a file at the very last change but one, the sync of the folder.
    assert found[-1] == 2


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_kill_while_a_job_saves_before_it_is_requeued_leaves_what_it_resumes_from(tmp_path, killed_at, kind):
    resumed_from = []
    for number in range(60):
        folder = tmp_path / str(number)
        save(1, folder / "hpc_ckpt_1.ckpt", kind)
        trainer = SimpleNamespace(default_root_dir=str(folder))
        try:
            with killed_at(number):
                save(2, folder / "hpc_ckpt_2.ckpt", kind)
        except (Killed, CheckpointException):
            resumed_from.append(read(Path(_CheckpointConnector(trainer)._hpc_resume_path)))
        else:
            break
    assert set(resumed_from) == {1, 2}
    assert resumed_from == sorted(resumed_from)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_kill_while_a_checkpoint_is_removed_leaves_all_of_it_or_nothing_that_is_resumed_from(
    tmp_path, killed_at, kind
):
    for number in range(20):
        folder = tmp_path / str(number)
        save(1, folder / "last-v1.ckpt", kind)
        save(2, folder / "last.ckpt", kind)
        try:
            with killed_at(number):
                CompleteFiles().remove_checkpoint(folder / "last.ckpt")
        except Killed:
            assert read(found_by_last(folder)) == (2 if number == 0 else 1)
        else:
            break
    assert number > 0
    assert [entry.name for entry in folder.iterdir()] == ["last-v1.ckpt"]


def test_the_checkpoint_before_is_used_where_a_kill_left_no_other(tmp_path):
    save(1, tmp_path / "last.osdp-replaced.ckpt", "sharded")
    with pytest.warns(UserWarning, match=r"last.ckpt was being replaced .* last.osdp-replaced.ckpt is used"):
        assert saving.existing_checkpoint(tmp_path / "last.ckpt") == tmp_path / "last.osdp-replaced.ckpt"
    assert saving.existing_checkpoint(tmp_path / "none.ckpt") == tmp_path / "none.ckpt"


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_backup_beside_a_checkpoint_is_left_alone(tmp_path, kind):
    backup = tmp_path / "last.old.ckpt"
    backup.write_text("mine")
    for number in range(2):
        save(number, tmp_path / "last.ckpt", kind)
    assert backup.read_text() == "mine"


def test_what_a_killed_run_left_half_written_is_told_of_once_per_folder(tmp_path):
    save(1, tmp_path / "last.ckpt", "full")
    callbacks = [ModelCheckpoint(dirpath=tmp_path), ModelCheckpoint(dirpath=tmp_path, monitor="loss"), mock.Mock()]
    trainer = mock.Mock(callbacks=callbacks)
    saving.warn_of_incomplete(trainer)
    (tmp_path / "last.ckpt.part").mkdir()
    (tmp_path / "best.ckpt.part").touch()
    with pytest.warns(UserWarning, match="wrote or removed best.ckpt.part, last.ckpt.part in ") as warned:
        saving.warn_of_incomplete(trainer)
    assert len(warned) == 1


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_folder_with_something_else_is_never_replaced(tmp_path, kind):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").touch()
    with pytest.raises(IsADirectoryError, match=r"it is a folder with 'thesis.tex'. Save under another name."):
        save(1, tmp_path / "work", kind)
    assert (tmp_path / "work" / "thesis.tex").exists()


def test_a_link_is_replaced_and_not_what_it_links_to(tmp_path):
    for kind in ("full", "sharded"):
        first, last = tmp_path / f"{kind}.ckpt", tmp_path / f"last-{kind}.ckpt"
        save(1, first, kind)
        last.symlink_to(first.name)
        save(2, last, kind)
        assert (read(first), read(last), last.is_symlink()) == (1, 2, False)


def test_shards_take_no_storage_options(tmp_path):
    with pytest.raises(ConfigurationError, match="Expected no storage_options with state_dict_type"):
        saving.save_shards({}, tmp_path, storage_options={})
