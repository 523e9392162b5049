"""Models of Hugging Face ``transformers`` with random weights, unchanged inside a LightningModule."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.utils.data import TensorDataset

from tests.distributed.support.models import MODELS, NUM_SAMPLES, Base

VOCABULARY, LENGTH = 64, 6


class HuggingFace(Base):
    """Model of the library: the batch is (inputs, labels), and forward returns the loss."""

    inputs, length = "input_ids", LENGTH

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.model = self.build()
        self.model.train()

    def loss(self, batch):
        return self.model(**{self.inputs: batch[0]}, labels=batch[1]).loss

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, self.length), generator=generator)
        return TensorDataset(tokens, (tokens * 3 + 1) % VOCABULARY)


class GPT2(HuggingFace):
    """Head tied to the embedding; Conv1D of its own."""

    def build(self):
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)


class LongGPT2(GPT2):
    """Saves more than it has parameters; with dropout. Not among the models that all plans are tried on."""

    num_layers, length = 4, 48

    def build(self):
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=self.length, n_embd=32, n_layer=self.num_layers, n_head=2,
            use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)


class Llama(HuggingFace):
    """Rotary positions in buffers that are not saved, fewer key heads than query heads, nothing tied."""

    def build(self):
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)


class T5(HuggingFace):
    """One embedding module registered three times, its weight tied to the head; a bias that all layers read."""

    def build(self):
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)


class Swin(HuggingFace):
    """Windows and patch merging: stages of different sizes."""

    inputs = "pixel_values"

    def build(self):
        config = transformers.SwinConfig(
            image_size=16, patch_size=2, num_channels=3, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4,
            drop_path_rate=0.0, num_labels=5,
        )  # fmt: skip
        return transformers.SwinForImageClassification(config)

    def dataset(self):
        pixels = torch.randn(NUM_SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return TensorDataset(pixels, pixels[:, :, 0, 0].argmax(1))

    def loss(self, batch):
        pixels = batch[0].to(next(self.parameters()).dtype)
        return super().loss((pixels, batch[1]))


HF_MODELS = {model.__name__: model for model in (GPT2, Llama, T5, Swin)}
MODELS |= HF_MODELS
