"""Manual optimization: each child sharded by itself trains what DDP trains."""

import manual_cases as cases
import pytest

pytestmark = pytest.mark.distributed


def test_manual_optimization_with_one_and_two_optimizers_equals_ddp_and_resumes(ranks):
    for found in ranks(2).run(cases.manual_training):
        assert found["GAN moved"] > 1e-3
        assert found["One moved"] > 1e-3
        for name in ("GAN", "Once", "One", "GAN resumed", "Once resumed", "One resumed", "averaged"):
            assert found[name] < 1e-6, name
        assert found["optimizers"] == [4, 4]
        names = [name.replace("_fsdp_wrapped_module.", "") for name in found["units"]]
        blocks = ["generator", "generator.0", "generator.2"]
        assert names == [*blocks, "discriminator.body", "discriminator.head"]


def test_what_manual_optimization_cannot_shard_is_refused(ranks):
    for found in ranks(2).run(cases.refused):
        assert "'scale' is in none. Put it into a module that is called" in found["direct"][1]
        assert "'discriminator.body' and 'discriminator.head' do" in found["shared"][1]
        assert "Expected no plan= with automatic_optimization=False" in found["plan"][1]
