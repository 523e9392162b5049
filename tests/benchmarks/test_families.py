import pytest
import torch

from benchmarks.families import FAMILIES, build


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_gives_every_parameter_a_gradient(name):
    module = build(name)
    assert 4e6 < sum(p.nbytes for p in module.parameters()) < 4e7
    batch = module.batch(3)
    assert [len(tensor) for tensor in batch] == [3, 3]
    loss = module.training_step(batch, 0)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(("name", "large"), [("3 wide Linears", "layers"), ("200,000 rows", "tokens")])
def test_shapes_of_large_layers_have_nearly_all_parameters_there(name, large):
    module = build(name)
    module.training_step(module.batch(2), 0).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    of_large, of_all = (sum(p.numel() for p in part.parameters()) for part in (module.get_submodule(large), module))
    assert of_large > 0.9 * of_all


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_decides_weights_and_batch_and_leaves_the_generator_alone(name):
    before = torch.get_rng_state()
    first, again, other = (build(name, seed=seed) for seed in (1, 1, 2))
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert torch.equal(first.batch(2, seed=3)[0], first.batch(2, seed=3)[0])
    assert not torch.equal(first.batch(2, seed=3)[0], first.batch(2, seed=4)[0])
    assert torch.equal(torch.get_rng_state(), before)
