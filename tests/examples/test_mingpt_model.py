import math
import re

import pytest
import torch
from torch.nn import functional

from examples.mingpt.model import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary_size=256, sequence_length=16, num_layers=2, num_heads=2, hidden_size=32)


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(CONFIG).eval()


def random_tokens(*, sequences, length):
    return torch.randint(256, (sequences, length), generator=torch.Generator().manual_seed(1))


def test_logits_have_one_row_per_position(model):
    assert model(random_tokens(sequences=3, length=11)).shape == (3, 11, 256)


def test_a_later_token_does_not_change_earlier_logits(model):
    tokens = random_tokens(sequences=1, length=16)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :10], before[:, :10])
    assert not torch.allclose(after[:, 10:], before[:, 10:])


def test_loss_at_initialization_is_that_of_a_uniform_guess(model):
    tokens = random_tokens(sequences=8, length=16)
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, dims=1).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_every_parameter_receives_a_gradient(model):
    model(random_tokens(sequences=2, length=16)).square().mean().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_generation_keeps_the_prompt_and_follows_its_generator(model):
    prompt = random_tokens(sequences=2, length=5)
    first, again, other = (
        model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert first.shape == (2, 25)  # beyond sequence_length, too
    assert torch.equal(first[:, :5], prompt)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_low_temperature_takes_the_likeliest_token(model):
    prompt = random_tokens(sequences=1, length=5)
    assert model.generate(prompt, 1, temperature=1e-6)[0, -1] == model(prompt)[0, -1].argmax()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "Expected num_layers of at least 1, got 0. Raise num_layers."),
        (
            {"hidden_size": 30, "num_heads": 4},
            (
                "Expected hidden_size to be a multiple of num_heads, got hidden_size=30 and num_heads=4. "
                "Change either one."
            ),
        ),
        ({"dropout": 1.0}, "Expected dropout in [0, 1), got 1.0. Use 0.0 to switch it off."),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GPTConfig(**options)


def test_too_long_a_sequence_is_refused(model):
    message = (
        "Expected at most sequence_length=16 tokens, got 17. "
        "Crop the tokens or build the model with a longer sequence_length."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(random_tokens(sequences=1, length=17))


def test_a_temperature_of_zero_is_refused(model):
    message = "Expected a positive temperature, got 0.0. Use a small one, such as 0.01, for nearly greedy text."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model.generate(random_tokens(sequences=1, length=2), 1, temperature=0.0)
