"""Checkpoints between ranks and a single device, consolidated ones too."""

import pytest
import saved_cases as cases

pytestmark = pytest.mark.distributed


def test_a_single_device_and_ranks_go_on_with_each_others_checkpoints(ranks, tmp_path):
    ranks(2).run(cases.save, folder=str(tmp_path))
    names = [f"{name}.{kind}" for name in cases.OPTIMIZERS for kind in ("ckpt", "consolidated")]
    assert ranks(1).run(cases.on_one_device, folder=str(tmp_path))[0] == {name: [] for name in names}
    consolidated = {f"{name}.consolidated": [] for name in cases.OPTIMIZERS}
    assert ranks(2).run(cases.back_again, folder=str(tmp_path))[0] == consolidated
