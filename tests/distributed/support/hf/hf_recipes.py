"""Models of ``transformers`` as people train them: masks in the batch, blocks that are checkpointed, experts."""

import torch
import transformers
from torch.utils.data import TensorDataset

from tests.distributed.support.hf import hf_models
from tests.distributed.support.hf.hf_models import LENGTH, VOCABULARY, HuggingFace
from tests.distributed.support.user_runs import moved, planned


class Masked:
    """Blocks are checkpointed. Sequences of different lengths are padded; the padding is masked, and has no loss."""

    def build(self):
        model = super().build()
        model.gradient_checkpointing_enable()
        return model

    def loss(self, batch):
        tokens, labels, mask = batch
        return self.model(input_ids=tokens, labels=labels, attention_mask=mask).loss

    def dataset(self):
        tokens, labels = super().dataset().tensors
        lengths = 2 + torch.arange(len(tokens)) % (LENGTH - 1)
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        return TensorDataset(tokens, labels.masked_fill(mask == 0, -100), mask)


class GPT2(Masked, hf_models.GPT2):
    pass


class Llama(Masked, hf_models.Llama):
    pass


class Mixtral(HuggingFace):
    """A router and experts in each layer."""

    def build(self):
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
            use_cache=False,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config)


def trained():
    """Differences from DDP, and how far training moved weights.

    Experts are in float32, for torch multiplies grouped matrices in no float64.
    """
    found = {}
    for make, dtype in ((GPT2, "float64"), (Llama, "float64"), (Mixtral, "float32")):
        off, _, state = planned(make, dtype=dtype)
        found[make.__name__] = off, moved(state, make)
    return found
