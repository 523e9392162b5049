"""Blocks that do different things with what they save: what crosses from one to another is counted once."""

from itertools import product

import pytest

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.profile import BlockProfile, Crossing, ModelProfile, Segment
from lightning_osdp.planner.engine import with_activations

OUTPUT, INSIDE = 100.0, 7.0


def chain(num_blocks):
    """Makes a profile of blocks that save input and output where they keep what they save, else the input."""
    kept = [Segment(saved_bytes=Affine(INSIDE + OUTPUT + (OUTPUT if i == 0 else 0.0))) for i in range(num_blocks)]
    recomputing = [Segment(saved_bytes=Affine(OUTPUT)) for _ in range(num_blocks)]
    crossings = [
        Crossing(
            Affine(OUTPUT),
            {
                "keep": tuple(i for i in (made, made + 1) if 0 <= i < num_blocks),
                "recompute": (made + 1,) if made + 1 < num_blocks else (),
            },
        )
        for made in range(-1, num_blocks)
    ]
    return ModelProfile(
        operators=(),
        segments=(*kept, Segment()),
        blocks=tuple(
            BlockProfile(name=f"b{i}", span=(i, i), segments={"recompute": (recomputing[i],)})
            for i in range(num_blocks)
        ),
        crossings=tuple(crossings),
    )


@pytest.mark.parametrize("choices", [*product(("keep", "recompute"), repeat=4)])
def test_a_tensor_between_blocks_is_saved_once(choices):
    found = with_activations(chain(4), {f"b{i}": choice for i, choice in enumerate(choices)})
    tensors = {made for i, choice in enumerate(choices) for made in ((i, i + 1) if choice == "keep" else (i,))}
    expected = len(tensors) * OUTPUT + choices.count("keep") * INSIDE
    assert found.saved_bytes == Affine(expected)
    for before, segment in enumerate(found.segments[:-1]):
        assert segment.saved_bytes.fixed >= 0, before


def test_what_a_block_makes_again_is_told_without_its_inputs():
    found = with_activations(chain(2), dict.fromkeys(("b0", "b1"), "recompute"))
    assert [segment.made_again_bytes for segment in found.segments] == [
        Affine(INSIDE + OUTPUT),
        Affine(INSIDE + OUTPUT),
        ZERO,
    ]
