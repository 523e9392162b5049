"""Operators in slices on several ranks: training, checkpoints of any kind into any other, whole parameters."""

from importlib.util import find_spec

import pytest
import split_cases as cases
from tiers import slow

pytestmark = pytest.mark.distributed

DDP_CASES = [
    (("four", "float64", "adamw", False, {"gradient_clip_val": 0.05}), 1e-9),
    (("three", "float64", "adamw", True, {"accumulate_grad_batches": 2}), 1e-9),
    (("four", "float32", "sgd", True, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}), 1e-6),
    (("three", "float32", "adamw", False, {}), 1e-4),
]


@pytest.mark.parametrize(("world_size", "chosen"), [(2, DDP_CASES), slow(4, DDP_CASES[1:3])])
def test_training_in_slices_equals_ddp(ranks, world_size, chosen):
    found = ranks(world_size).run(cases.differences, cases=[case for case, _ in chosen])[0]
    for (difference, moved), (case, tolerance) in zip(found, chosen, strict=True):
        assert difference < tolerance, case
        assert moved > 0.01, case


def test_in_bf16_slices_train_like_the_whole_operators(ranks):
    split, whole = ranks(2).run(cases.losses_in_bf16)[0]
    assert split == pytest.approx(whole, rel=2e-2)
    assert split != whole


@pytest.mark.slow
def test_checkpoints_of_any_slices_load_into_any_others(ranks, tmp_path):
    ranks(1).run(cases.save_plain, folder=str(tmp_path))
    sizes, kinds = (1, 2, 4, 3), list(cases.KINDS)
    for world_size in sizes:
        found = ranks(world_size).run(cases.resaved, folder=str(tmp_path))[0]
        assert found == {name: [] for kind in kinds for name in (kind, f"{kind} saved")}
    # Full ones equal the plain one. Of the sharded ones an orthogonal array: all pairs of kinds, all pairs of numbers
    # of ranks, and all pairs of one of them before and the other after.
    for row, world_size in enumerate(sizes):
        sources = {kind: [] for kind in kinds}
        for column, saved_by in enumerate(sizes):
            before, after = column ^ row, column ^ (0, 2, 3, 1)[row]
            sources[kinds[after % 3]].append(f"{saved_by}-{kinds[before % 3]}")
        found = ranks(world_size).run(cases.reloaded, folder=str(tmp_path), sources=sources)[0]
        assert found == {f"{name} as {kind}": [] for kind, names in sources.items() for name in names}


@pytest.mark.slow
def test_an_optimizer_without_state_is_saved_and_loaded(ranks, tmp_path):
    for rates, refused in ranks(2).run(cases.without_state, folder=str(tmp_path)):
        assert rates == [0.25, 0.25]
        *counted, text = refused
        expected = (
            "Expected a checkpoint with the state of 2 optimizers, as configured, got 1. Configure as many as were"
        )
        assert [error.startswith(expected) for error in counted] == [True, True]
        assert (
            "Expected a checkpoint whose optimizer has [4, 5] parameters in its groups, as configured, got [5, 5]."
            in text
        )


@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: python -m pip install --group models"
)
@pytest.mark.parametrize("name", ["GPT2", slow("T5")])
def test_models_of_transformers_train_and_validate_in_slices(ranks, name):
    """GPT-2's operators are transposed; T5 asks for the dtype and the device of weights that are sharded."""
    kinds, difference, losses = ranks(2).run(cases.transformer_differs_by, name=name)[0]
    assert {"GPT2": {"c_attn", "c_fc", "c_proj"}, "T5": {"relative_attention_bias", "wi", "wo"}}[name] <= kinds
    assert difference < 1e-6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_whole_parameters_are_read_where_they_are(ranks):
    for shape, text, same, names, decayed in ranks(2).run(cases.reads_weights):
        assert shape == (19, 14)
        assert "Expected the whole 'weight' of a split operator" in text
        assert same
        assert names == [
            "blocks.0.up.slices.3.weight",
            "blocks.0.up.slices.3.bias",
            "blocks.1.up.slices.3.weight",
            "blocks.1.up.slices.3.bias",
            *(f"head.slices.{index}.weight" for index in range(4)),
        ]
        operators = ("blocks.0.up", "blocks.1.up", "frozen", "head")
        assert decayed == {f"{name}.slices.{index}.weight" for name in operators for index in range(4)}
