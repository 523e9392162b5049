import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.addition import train
from examples.addition.data import NUM_SUMS, AdditionDataModule, to_digits, to_text
from examples.addition.module import Adder

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The '\w+_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

CONFIG = Path(train.__file__).parent / "configs" / "osdp_cpu.yaml"
SMALL_RUN = [
    f"--config={CONFIG}",
    "--seed_everything=false",  # a seed would stay in the environment of the tests that follow
    "--trainer.devices=1",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.callbacks=null",
    "--trainer.default_root_dir=.",
    "--trainer.strategy.init_args.memory_limit=1GiB",
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--data.num_held_out=128",
]


class Knowing(Adder):
    """Adds without a model."""

    def forward(self, digits):
        first, second = (10 * digits[:, place] + digits[:, place + 1] for place in (0, 2))
        answers = to_digits(first, second)[:, 4:]
        return torch.nn.functional.one_hot(answers[:, digits.shape[1] - 4], 10)[:, None].float()


def test_sums_are_written_with_their_last_digit_first():
    digits = to_digits(torch.tensor([85, 7, 0]), torch.tensor([50, 94, 0]))
    assert digits.tolist() == [[8, 5, 5, 0, 5, 3, 1], [0, 7, 9, 4, 1, 0, 1], [0] * 7]
    assert digits.dtype == torch.int64
    assert [to_text(row) for row in digits] == ["85 + 50 = 135", "7 + 94 = 101", "0 + 0 = 0"]


def test_every_sum_is_learned_or_held_out():
    data = AdditionDataModule(num_held_out=1000)
    data.setup("fit")
    assert (len(data.train_sums), len(data.held_out_sums)) == (9000, 1000)
    assert (
        len({tuple(row) for sums in (data.train_sums, data.held_out_sums) for row in sums.digits.tolist()}) == NUM_SUMS
    )


def test_a_seed_fixes_what_is_held_out():
    first, again, other = (AdditionDataModule(seed=seed) for seed in (3, 3, 4))
    for data in (first, again, other):
        data.setup("fit")
    assert torch.equal(first.held_out_sums.digits, again.held_out_sums.digits)
    assert not torch.equal(first.held_out_sums.digits, other.held_out_sums.digits)


def test_loaders_yield_batches_of_the_given_size():
    data = AdditionDataModule(num_held_out=20, batch_size=16)
    data.setup("fit")
    assert [len(batch) for batch in data.val_dataloader()] == [16, 4]
    assert {batch.shape for batch in data.train_dataloader()} == {(16, 7)}  # an incomplete batch is dropped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_held_out": 0},
            "Expected num_held_out in [1, 10000), got 0. Try a tenth of the sums, 1000.",
        ),
        (
            {"num_held_out": 10_000},
            "Expected num_held_out in [1, 10000), got 10000. Try a tenth of the sums, 1000.",
        ),
        ({"batch_size": 0}, "Expected batch_size of at least 1, got 0. Raise batch_size."),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AdditionDataModule(**options)


@pytest.mark.parametrize("number", [-1, 100])
def test_a_number_of_other_than_two_digits_is_refused(number):
    message = f"Expected numbers in [0, 100), got {number}. Add numbers of 2 digits."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        to_digits(torch.tensor([5]), torch.tensor([number]))


def test_digits_are_added_one_after_the_other():
    digits = to_digits(torch.arange(100), torch.arange(100).flip(0))
    assert torch.equal(Knowing(num_layers=1, hidden_size=8).add(digits[:, :4]), digits[:, 4:])


def test_the_loss_is_that_of_the_sums_digits_alone(monkeypatch):
    module = Adder(num_layers=1, hidden_size=8)
    monkeypatch.setattr(module, "log", lambda *arguments, **options: None)
    sure = torch.full((1, 6, 10), -100.0)
    for position, digit in zip((3, 4, 5), (5, 3, 1), strict=True):
        sure[0, position, digit] = 100.0
    monkeypatch.setattr(module, "forward", lambda digits: sure)
    assert module.training_step(torch.tensor([[8, 5, 5, 0, 5, 3, 1]]), 0) == 0
    assert module.training_step(torch.tensor([[8, 5, 5, 0, 4, 3, 1]]), 0) > 50


def test_a_fast_dev_run_under_the_config(example):
    printed = example(train.main, *SMALL_RUN, "--trainer.fast_dev_run=true")
    assert "OSDP plan" in printed
    assert "No checkpoint was written (fast_dev_run writes none), so there is nothing to add with." in printed


def test_the_report_adds_with_the_checkpoint(example, tmp_path):
    printed = example(
        train.main,
        *SMALL_RUN,
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1",
    )
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert re.search(r"^Held-out sums: \d+ of 128 are right, \d+\.\d\d%$", printed, re.MULTILINE)
    assert len(re.findall(r"^  \d+ \+ \d+ = \d+  (?:right|WRONG)$", printed, re.MULTILINE)) == 5
    assert f"Checkpoint: {checkpoint.relative_to(tmp_path)}" in printed


def test_the_report_names_a_sharded_checkpoint_without_a_sum(tmp_path):
    # a sharded checkpoint is a folder
    checkpoint = ModelCheckpoint()
    checkpoint.best_model_path = str(tmp_path)
    assert train.report(SimpleNamespace(checkpoint_callback=checkpoint), AdditionDataModule()) == (
        f"Checkpoint: {tmp_path}\nIt is sharded: to add with it, train with the strategy's state_dict_type: full."
    )
