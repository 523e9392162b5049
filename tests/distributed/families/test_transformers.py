"""Hugging Face models with random weights train unchanged, as under DDP."""

import importlib.util

import pytest

from tests.distributed.support.families import check, family

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="needs transformers: python -m pip install --group models",
    ),
]


def hf_exported():
    """Runs `hf_exports`, which needs ``transformers`` and ``peft``."""
    from tests.distributed.support.hf import hf_exports

    return hf_exports.exported(), *map(hf_exports.adapted, (hf_exports.Adapted, hf_exports.AdaptedBesideWhole))


def hf_family(**kwargs):
    """Runs `family` on a model of ``transformers``."""
    from tests.distributed.support.hf import hf_models  # noqa: F401 (registers its models)

    return family(**kwargs)


MIXED = {"given": ["mixed"], "own": 0}
TIED = {
    "GPT2": {"model.transformer.wte", "model.lm_head"},
    "T5": {"model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "model.lm_head"},
}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {"given": ["mixed"]}), (2, {"given": ["zdp", "mixed"]}), (4, MIXED)],
    ids=["2", "2, zdp too", "4"],
)
@pytest.mark.parametrize("name", ["GPT2", "Llama", "T5", "Swin"])
@pytest.mark.slow  # tests/distributed/memory/test_splitting.py trains one of them, too
def test_every_plan_equals_ddp_and_one_process(ranks, name, world_size, options):
    found = ranks(world_size).run(hf_family, name=name, optimizer="adamw", dtype="float64", **options)[0]
    # Llama and T5 normalise in float32 whatever their parameters are.
    check(found, 1e-9 if name in ("GPT2", "Swin") else 1e-6)
    assert len(found["plans"]["mixed"]["units"]) > 10
    assert not TIED.get(name, set()) & set(found["plans"]["mixed"]["units"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: python -m pip install --group models")
def test_what_is_gathered_can_be_saved_by_transformers_and_peft_themselves(ranks):
    for whole, *adapted in ranks(2).run(hf_exported):
        assert all(from_ddp < 1e-9 for from_ddp, *_ in adapted)
        for off, moved, (kind, told) in (whole, *(each[1:] for each in adapted)):
            assert off < 1e-12
            assert moved > 1e-3
            assert kind == "ConfigurationError"
            assert "with trainer.strategy.gathered()" in told
