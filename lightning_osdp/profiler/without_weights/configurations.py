"""Models of configurations of transformers, each with the class and the task that the configuration is for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_osdp.core.text.nearest import nearest
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.without_weights.imported import SETTINGS_ADVICE, built
from lightning_osdp.profiler.without_weights.inputs import DATA_ADVICE, batch_for
from lightning_osdp.profiler.without_weights.model import DescribedModel

_TASKS = (
    "Seq2SeqLM",
    "SpeechSeq2Seq",
    "MaskedLM",
    "CausalLM",
    "CTC",
    "ZeroShotImageClassification",
    "ImageClassification",
    "AudioClassification",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)
"""Tasks of ``transformers.AutoModelFor...`` with a loss and with inputs that can be made; where a configuration has
several tasks and names none, the first is taken."""
_AS_TRAINED = {
    "use_cache": False,
    # ranks that shard need all layers in every step
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    # masks of random sizes read values
    "apply_spec_augment": False,
}


def from_configuration(
    model: str, settings: Mapping[str, Any], sequence_length: int | None, task: str | None
) -> DescribedModel:
    """Model of a configuration, given by its class or its file, with a batch of inputs."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"Expected transformers for the configuration {model!r}, but it is not installed: pip install transformers."
        ) from error
    config = _configuration(transformers, model, settings)
    kind, task = _class_of(transformers, config, task)
    for name, value in _AS_TRAINED.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # only configurations for generating have one
    with torch.device("meta"):
        module = built(f"configuration {model!r}", SETTINGS_ADVICE, kind, config)
    module.train()
    batch = built(f"inputs of {kind.__name__}", SETTINGS_ADVICE, batch_for, module, task, sequence_length)

    def run(batch: Mapping[str, Any]) -> Tensor:
        with _one_sequence_each():
            found = module(**batch)
        if task == "CTC":  # sizes in CTC's loss depend on values; this has all of its tensors but that of alignments
            return -found.logits.float().log_softmax(-1).mean()  # type: ignore[no-any-return]
        return found.loss  # type: ignore[no-any-return]

    return DescribedModel(
        module=module,
        batch=batch,
        run=run,
        optimizers=lambda module: [AdamW(module.parameters())],
        tokens=batch["input_ids"].shape[1] if task in ("MaskedLM", "CausalLM") else 0,
    )


@contextmanager
def _one_sequence_each() -> Iterator[None]:
    """Context in which no sample has several sequences, as transformers finds by values, which fake tensors have not.

    It then has kernels of attention leave out what is to come, in place of a mask that it makes for them.
    """
    try:
        masking: Any = import_module("transformers.masking_utils")
    except ImportError:  # older versions have no such samples
        yield
        return
    before = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = before


def _configuration(transformers: ModuleType, model: str, settings: Mapping[str, Any]) -> Any:
    if model.endswith(".json"):
        try:
            entries = json.loads(Path(model).read_text(encoding="utf-8"))
            name = entries["model_type"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"Expected a configuration of transformers at {model!r}, with its model_type, but it cannot be read:"
                f" {error!r}."
            ) from error
        entries = {**{key: value for key, value in entries.items() if key != "model_type"}, **settings}
        return built(f"configuration {model!r}", SETTINGS_ADVICE, transformers.AutoConfig.for_model, name, **entries)
    kind = getattr(transformers, model, None) if model.endswith("Config") else None
    if kind is None:
        names = [name for name in dir(transformers) if name.endswith("Config")]
        hint = nearest(model, names, "Its name ends in Config.")
        raise ConfigurationError(
            "Expected the name of a configuration of transformers, the path of its .json, or package.module:Name, got"
            f" {model!r}. {hint}"
        )
    return built(f"configuration {model!r}", SETTINGS_ADVICE, kind, **settings)


def _class_of(transformers: ModuleType, config: Any, task: str | None) -> tuple[type[nn.Module], str]:
    """Class of a configuration, and its task: the given one, that of its architectures, or its first one."""
    classes = dict(_classes(transformers, config))
    title = type(config).__name__
    there_are = f"There are {', '.join(classes) or 'none'}. {DATA_ADVICE}"
    if task is not None:
        if task not in classes:
            raise ConfigurationError(f"Expected a task of {title}, got {task!r}. {there_are}")
        return classes[task], task
    named = getattr(config, "architectures", None) or []
    for name in named:
        found = next((each for each, kind in classes.items() if kind.__name__ == name), None)
        if found is not None:
            return classes[found], found
    if named:
        raise ConfigurationError(
            f"Expected architectures of {title} with a loss for which inputs can be made, got {', '.join(named)}. Give"
            f" one of its tasks as --task. {there_are}"
        )
    if not classes:
        raise ConfigurationError(f"Expected a configuration of a model with a loss, got {title}. {DATA_ADVICE}")
    is_decoder = getattr(config, "is_decoder", False)
    first = next((each for each in classes if not (is_decoder and each == "MaskedLM")), next(iter(classes)))
    return classes[first], first


def _classes(transformers: ModuleType, config: Any) -> Iterator[tuple[str, type[nn.Module]]]:
    for task in _TASKS:
        if task == "CausalLM" and getattr(config, "is_encoder_decoder", False):
            continue  # the class of this task is the decoder alone
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping
        if type(config) in mapping:
            kinds = mapping[type(config)]
            yield task, kinds[0] if isinstance(kinds, (tuple, list)) else kinds
