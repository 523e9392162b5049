"""Command ``estimate``: predictions for a model before its machine is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lightning_osdp.cli.answer import Answer, lines
from lightning_osdp.cli.estimates import Estimate, Strategies, machines_table
from lightning_osdp.cli.files import checked_output, write_output
from lightning_osdp.core.axes import DEFAULT_ACTIVATIONS
from lightning_osdp.core.batch_policy import BatchPolicy, samples_of_rank
from lightning_osdp.core.plans.document import shown
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes, parse_bytes
from lightning_osdp.core.text.duration import three_digits
from lightning_osdp.core.text.stored import CLUSTER_FILENAME, PLAN_FILENAME, PROFILE_FILENAME
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.machines import Machine

_FILES = (PLAN_FILENAME, PROFILE_FILENAME, CLUSTER_FILENAME)
_ASSUMED = (
    "Unvalidated on CUDA: rates are the data sheet's times what programs are assumed to reach, operations are"
    " those that torch runs on CPU, and computing and communication slow each other down by a published factor. A short"
    " run on the machine tells more."
)


def estimate(
    model: str,
    *,
    machine: str,
    settings: str = "{}",
    sequence: int | None = None,
    task: str | None = None,
    data: str | None = None,
    precision: str = "bf16-mixed",
    optimizer: str | None = None,
    optimizer_settings: str = "{}",
    lora: str | None = None,
    strategy: str | None = None,
    activations: str = ",".join(DEFAULT_ACTIVATIONS),
    stationary: bool | Literal["auto"] = "auto",
    memory: str | None = None,
    host_memory: str | None = None,
    batch: int | None = None,
    global_batch: int | None = None,
    accumulate: int = 1,
    out: str | None = None,
    force: bool = False,
) -> Answer:
    """Estimate how a model would train on machines that you need not have, beside what people choose by hand.

    Args:
        model: import path of a LightningModule, package.module:Name; or a configuration of transformers, as the path of
            its JSON file or the name of its class, such as LlamaConfig.
        machine: nodes, GPUs of a node, their name and the network of a node, as in "8 h100-sxm" or
            "4x8 h100-sxm, 400gbit"; in place of the name may be a TOML file with a device of yours. Several stand
            between semicolons, as in "8 a100-80; 8 h100-sxm".
        settings: arguments of the LightningModule or entries of the configuration, as JSON.
        sequence: tokens of a sample, for a configuration of transformers, or values of a sound; by default 2048 tokens.
        task: which model of a configuration, as in transformers.AutoModelFor..., such as MaskedLM; by default that of
            its architectures, or what it is mostly for.
        data: import path of a function that takes a number of samples and returns a batch, for a LightningModule
            without train_dataloader.
        precision: 32-true, bf16-mixed, bf16-true or 16-mixed.
        optimizer: import path of an optimizer of all parameters, as in torch.optim.SGD; or bytes of its state for an
            element, such as 2 for an 8-bit Adam; by default the LightningModule's own, or AdamW.
        optimizer_settings: its arguments, as JSON.
        lora: arguments of peft's LoraConfig, as JSON, such as {"r": 16, "target_modules": ["q_proj", "v_proj"]}: its
            adapters are trained, and all else is frozen.
        strategy: OSDP, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or HYBRID_SHARD_ZERO2, several between commas; by
            default all of them.
        activations: what blocks may do with what they save for backward, keep, recompute, offload, recompute_offload or
            selective (recompute all but some results, which OSDP chooses), between commas; one alone, but for the
            last, is what all of them do.
        stationary: whether OSDP may have activations of operators and of pairs move in place of their weights; auto:
            those of operators by themselves, where that is clearly faster, as in a fit.
        memory: limit of one rank, as in 70GiB; by default what the device has, less what is not for tensors.
        host_memory: memory of each host in which OSDP may keep states of the optimizer and shards of units, as
            in 256GiB; by default all are on the devices.
        batch: samples per rank and micro-batch; by default those with the most samples/s.
        global_batch: samples of all ranks in an optimizer step, divided into the fastest micro-batches.
        accumulate: micro-batches of an optimizer step, where no global batch is given.
        out: folder to write osdp_plan.json, osdp_profile.json and osdp_cluster.json to, which the other commands read;
            for one machine.
        force: whether to replace files that are there already.
    """
    machines = {spec.strip(): Machine.parse(spec) for spec in machine.split(";")}
    policies = {spec: _policy(batch, global_batch, accumulate, each.world_size) for spec, each in machines.items()}
    ways = Strategies(
        strategies=_names(strategy, str.upper),
        activations=_names(activations, str.lower) or (),
        stationary=None if stationary == "auto" else stationary,
    )
    limit_bytes = None if memory is None else parse_bytes(memory)
    host_bytes = None if host_memory is None else parse_bytes(host_memory)
    if host_bytes is not None and not ways.with_osdp:
        raise ConfigurationError(
            f"Expected OSDP among strategies for host_memory, got {strategy!r}: all others keep states on the device."
        )
    if out is not None and len(machines) > 1:
        raise ConfigurationError(f"Expected out with one machine, got {len(machines)}: {machine!r}. Ask one by one.")
    written = _FILES if out is not None else ()
    outputs = [checked_output(Path(out or "") / name, "out", force=force, inputs=[model]) for name in written]
    from lightning_osdp.profiler.without_weights import described, optimizers_by_name  # torch

    entries, optimizer_entries = _entries(settings, "settings"), _entries(optimizer_settings, "optimizer_settings")
    with Console(stderr=True).status("") as status:

        def progress(stage: str, detail: str) -> None:
            status.update(f"{stage} {detail}".strip())

        progress("building the model", "")
        described_model = described(
            model,
            settings=entries,
            sequence_length=sequence,
            data=data,
            task=task,
            optimizers=None if optimizer is None else optimizers_by_name(optimizer, optimizer_entries),
            lora=None if lora is None else _entries(lora, "lora"),
        )
        profiles: dict[str, ModelProfile] = {}  # machines of equal devices share a profile
        estimates = []
        for spec, each in machines.items():
            rates = each.rates if host_bytes is None else each.rates_with_host
            if repr(rates) not in profiles:
                profiles[repr(rates)] = described_model.profile(
                    rates,
                    precision=precision,
                    activations=ways.profiled,
                    exchanges=stationary is True,
                    on_host=host_bytes is not None,
                    progress=progress,
                )
            estimates.append(
                ways.estimate(
                    spec,
                    each,
                    profiles[repr(rates)],
                    limit_bytes=limit_bytes or each.memory_bytes,
                    host_limit_bytes=None if host_bytes is None else host_bytes // each.ranks_per_node,
                    policy=policies[spec],
                    tokens=described_model.tokens,
                    progress=progress,
                )
            )
    if outputs:
        (only,) = estimates
        for path, value in zip(outputs, (only.chosen, only.profile, only.machine.cluster), strict=True):
            if value is not None:
                write_output(value.to_json(), path, "out")
    document = described_model.document
    title = f"{model}, {document['class']}: {_format_count(document['num_parameters'])} parameters, {precision}"
    if document["inputs"]:
        inputs = (f"{name} {' x '.join(map(str, sizes)) or '1'}" for name, sizes in document["inputs"].items())
        title += f"; a sample has {', '.join(inputs)}"
    return _answer(title, {"model": document}, estimates)


def _answer(title: str, about: Mapping[str, Any], estimates: Sequence[Estimate]) -> Answer:
    fits = any(each.fits for each in estimates)
    if len(estimates) > 1:
        document = {"fits": fits, **about, "machines": [each.document for each in estimates]}
        return Answer(text=lines(title, "", machines_table(estimates), "", _ASSUMED), document=document, fits=fits)
    (only,) = estimates
    return Answer(
        text=lines(
            title,
            f"on {only.machine}, {format_bytes(only.limit_bytes)} of each for tensors",
            "",
            only.compared(),
            "",
            *([only.why_not, ""] if only.why_not else []),
            *only.sentences(),
            "",
            _ASSUMED,
        ),
        document={**about, **only.document},
        fits=fits,
    )


def _format_count(number: int) -> str:
    """Number of parameters for people.

    Example:
        >>> _format_count(1_543_000_000), _format_count(254_000_000), _format_count(12_345)
        ('1.54 billion', '254 million', '12,345')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size * 0.9995:
            return f"{three_digits(number / size)} {name}"
    return f"{number:,}"


def _names(text: str | None, spelled: Callable[[str], str]) -> list[str] | None:
    """Names that commas separate, each once."""
    return None if text is None else list(dict.fromkeys(spelled(part.strip()) for part in text.split(",")))


def _policy(batch: int | None, global_batch: int | None, accumulate: int, world_size: int) -> BatchPolicy:
    if global_batch is None:
        scaled = BatchPolicy.scale(num_micro_batches=accumulate)
        return scaled if batch is None else BatchPolicy.fixed(batch, accumulate)
    if accumulate != 1:
        raise ConfigurationError(
            f"Expected accumulate or global_batch, got both: {accumulate} and {global_batch}. Leave one out."
        )
    num_samples = samples_of_rank(global_batch, world_size, name="global_batch")
    return BatchPolicy.divide(num_samples, None if batch is None else [batch])


def _entries(text: str, name: str) -> Mapping[str, Any]:
    expected = f"Expected {name} as a JSON object, as in --settings '{{\"num_hidden_layers\": 16}}'"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{expected}, got {shown(text)}: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{expected}, got {shown(text)}.")
    return found
