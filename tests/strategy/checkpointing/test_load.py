"""Checkpoints that another strategy was killed over, under their real names."""

import os
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_osdp import ConfigurationError
from lightning_osdp.strategy.checkpointing.load import complete_checkpoint, read_checkpoint_file, why_incomplete


def written(path, kind, *, mtime):
    """A checkpoint as far as its files go, last changed then."""
    file = path
    if kind == "sharded":
        path.mkdir()
        for name in ("__0_0.distcp", ".metadata"):
            (path / name).write_bytes(b"shards")
        file = path / "meta.pt"
    torch.save({"epoch": 1, "entries": torch.ones(100)}, file)
    os.utime(path, (mtime, mtime))
    return path


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


HALVES = {
    "a file": ("full", cut_short, "its file ends too early"),
    "an empty file": ("full", lambda path: path.write_bytes(b""), "its file ends too early"),
    "shards alone": ("sharded", lambda path: (path / ".metadata").unlink(), ".metadata is not there"),
    "no rest": ("sharded", lambda path: (path / "meta.pt").unlink(), "meta.pt is not there or ends too early"),
    "half of the rest": ("sharded", lambda path: cut_short(path / "meta.pt"), "meta.pt is not there or ends too early"),
}


@pytest.fixture
def trainer(tmp_path):
    return mock.Mock(callbacks=[mock.Mock(), ModelCheckpoint(dirpath=tmp_path)], default_root_dir=tmp_path)


@pytest.mark.parametrize("name", HALVES)
def test_last_takes_the_newest_complete_one(tmp_path, trainer, name):
    kind, spoil, missing = HALVES[name]
    broken = written(tmp_path / "last-v2.ckpt", kind, mtime=40)
    spoil(broken)
    written(tmp_path / "last.ckpt", "full", mtime=10)
    newest = written(tmp_path / "last-v1.ckpt", "sharded", mtime=20)
    written(tmp_path / "epoch=9.ckpt", "full", mtime=50)
    with pytest.warns(UserWarning, match=f"last-v2.ckpt is not complete, {missing}: .* last-v1.ckpt is used, the new"):
        assert complete_checkpoint(broken, trainer) == newest


@pytest.mark.parametrize("name", HALVES)
def test_what_was_asked_for_by_name_is_not_replaced(tmp_path, trainer, name):
    kind, spoil, missing = HALVES[name]
    broken = written(tmp_path / "epoch=1.ckpt", kind, mtime=40)
    spoil(broken)
    written(tmp_path / "last.ckpt", "full", mtime=10)
    with pytest.raises(ConfigurationError, match=f"complete checkpoint at .*epoch=1.ckpt', but {missing}: a run was"):
        complete_checkpoint(broken, trainer)


def test_without_a_complete_one_nothing_starts_anew(tmp_path, trainer):
    broken = written(tmp_path / "last.ckpt", "full", mtime=40)
    cut_short(broken)
    with pytest.raises(ConfigurationError, match="Delete it, and resume from another one"):
        complete_checkpoint(broken, trainer)


def test_a_file_of_another_format_is_not_called_half_written(tmp_path, trainer):
    path = tmp_path / "last.ckpt"
    torch.save({"epoch": 1}, path, _use_new_zipfile_serialization=False)
    assert complete_checkpoint(path, trainer) == path
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_checkpoint_file(path, weights_only=None)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_complete_ones_and_what_is_none_are_as_they_are(tmp_path, trainer, kind):
    complete = written(tmp_path / "last.ckpt", kind, mtime=40)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").touch()
    for path in (complete, tmp_path / "work", tmp_path / "none.ckpt"):
        assert why_incomplete(path) is None
        assert complete_checkpoint(path, trainer) == path
