import pytest
import torch

from benchmarks.families import FAMILIES, OPTIMIZERS, build


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


def test_tied_weights_are_one_parameter():
    model = build("tied").model
    assert model.head.weight is model.token_embedding.weight


@pytest.mark.parametrize(
    ("name", "keys"), [("adamw", {"exp_avg", "exp_avg_sq"}), ("sgd_momentum", {"momentum_buffer"})]
)
def test_optimizers_keep_the_state_of_their_name(name, keys):
    module = build("odd_mlp", optimizer=name)
    optimizer = module.configure_optimizers()
    module.training_step(module.batch(2), 0).backward()
    optimizer.step()
    assert all(keys <= state.keys() for state in optimizer.state.values())
    assert len(optimizer.state) == len(list(module.parameters()))
    assert optimizer.param_groups[0]["foreach"] is None


def test_foreach_is_a_name_of_its_own():
    assert build("odd_mlp", optimizer="adamw_foreach").configure_optimizers().param_groups[0]["foreach"] is True
    assert set(OPTIMIZERS) == {"adamw", "adamw_foreach", "sgd_momentum"}


@pytest.mark.parametrize("wrong", [{"name": "rnn"}, {"name": "tied", "optimizer": "lion"}])
def test_an_unknown_name_is_refused_with_those_that_exist(wrong):
    with pytest.raises(ValueError, match=r"Expected .* to be one of \(.*'(mingpt|adamw)'.*, got '(rnn|lion)'"):
        build(**wrong)


def test_a_loader_gives_one_batch_again_and_again():
    module = build("odd_mlp")
    first, *others = module.loader(2, num_batches=3)
    assert len(others) == 2
    assert all(torch.equal(other[0], first[0]) for other in others)
