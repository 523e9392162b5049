"""A model on a machine that is not there."""

import json
import math
import sys

import pytest
import torch

from lightning_osdp.machines import PUBLISHED_RATES
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.timing.operation_time import OperationRecorder
from lightning_osdp.profiler.without_weights import described
from tests.support.tiers import slow

MODULE = """
import torch
from lightning import LightningModule
from torch import nn

class Tower(LightningModule):
    def __init__(self, width=512, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.width = width

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = batch + block(batch)
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Frozen(Tower):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.blocks[0].requires_grad_(False)

class WithData(Tower):
    def train_dataloader(self):
        return [batch(3, self.width)]

class Broken(Tower):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("no such step")

def batch(num_samples, width=512):
    return torch.zeros(num_samples, width)

class Exits(Tower):
    def training_step(self, batch, batch_idx):
        raise SystemExit(0)

class Recurses(Tower):
    def training_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

class Interrupted(Tower):
    def training_step(self, batch, batch_idx):
        raise KeyboardInterrupt

class NoOptimizer(Tower):
    def configure_optimizers(self):
        raise ValueError("no such optimizer")

class Prints(Tower):
    def training_step(self, batch, batch_idx):
        print("{a line of the user's}")
        return super().training_step(batch, batch_idx)

NUMBER = 3
"""


@pytest.fixture
def towers(tmp_path, monkeypatch):
    (tmp_path / "towers.py").write_text(MODULE)
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    (tmp_path / "raises.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delitem(sys.modules, "towers", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


ARGUMENTS = ("estimate", "towers:Tower", "--data", "towers:batch", "--machine", "4 a100-40")


def test_what_fits_is_told_beside_what_people_choose(towers, run, answer):
    code, out, err = run(*ARGUMENTS, "--batch", "64")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert all(word in out for word in ("A100", "bf16-mixed", "OSDP", "FULL_SHARD", "SHARD_GRAD_OP", "computes"))
    found = answer(*ARGUMENTS, "--batch", "64")
    assert found["fits"]
    assert (found["plan"]["world_size"], found["plan"]["micro_batch_size"]) == (4, 64)
    assert found["step"]["time_s"] == pytest.approx(found["plan"]["step_time_s"])
    best = max(each["samples_per_s"] for each in found["by_hand"] if each["fits"])
    assert found["plan"]["samples_per_s"] >= best * (1 - 1e-9)


@pytest.mark.slow
def test_a_slower_device_takes_longer_and_float32_longer_than_bfloat16(towers, answer):
    def step_s(machine, *more):
        return answer(*ARGUMENTS[:-1], machine, "--batch", "4096", *more)["step"]["compute_s"]

    assert step_s("4 h100-sxm") < step_s("4 a100-40") < step_s("4 l4")
    assert step_s("4 a100-40") < step_s("4 a100-40", "--precision", "32-true")


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 4), ("bf16-true", 2)])
def test_weights_and_states_at_rest_have_the_one_dtype_of_a_true_precision(towers, answer, precision, itemsize):
    found = answer(*ARGUMENTS, "--batch", "64", "--strategy", "OSDP", "--precision", precision)
    shard_bytes, parts = found["model"]["num_parameters"] * itemsize / 4, found["plan"]["peak_parts"]
    assert parts["parameter shards"] == pytest.approx(shard_bytes, rel=0.01)
    assert parts["optimizer state"] == pytest.approx(2 * shard_bytes, rel=0.01)


def test_settings_and_data_are_the_modules(towers, answer):
    found = answer("estimate", "towers:WithData", "--machine", "2 l4", "--settings", '{"width": 256, "depth": 2}')
    assert len(found["plan"]["decisions"]) == 4
    assert found["plan"]["micro_batch_size"] > 1


def test_a_global_batch_is_shared_by_all_ranks(towers, answer, run):
    found = answer(*ARGUMENTS, "--global_batch", "96")
    assert found["plan"]["micro_batch_size"] * found["plan"]["num_micro_batches"] == 24
    code, _, err = run(*ARGUMENTS, "--global_batch", "98")
    assert code == 2
    assert "multiple of 4" in err


def test_where_nothing_fits_the_exit_code_is_1_with_what_would(towers, run, answer):
    code, out, err = run(*ARGUMENTS, "--batch", "8", "--memory", "10MiB")
    assert (code, err) == (1, "")
    assert "raise memory_limit" in " ".join(out.split())
    assert out.count("does not fit") >= 2
    code, out, _ = run(*ARGUMENTS, "--batch", "8", "--memory", "10MiB", "--json")
    assert code == 1
    assert not json.loads(out)["fits"]


def test_what_does_not_fit_on_devices_fits_with_states_on_the_host_or_it_is_told_what_lacks(towers, run, answer):
    given = (*ARGUMENTS, "--batch", "8", "--strategy", "OSDP")
    # parameters, two states and gradients of 4199424 elements take 16.02 MiB on each of four devices
    code, out, err = run(*given, "--memory", "16MiB", "--host_memory", "1GiB")
    assert (code, err) == (0, "")
    assert "OSDP without" in out
    assert "does not fit" in out
    text = " ".join(out.split())
    assert "The host updates " in text
    assert "each may take 256 MiB. Where gradients are not clipped" in text
    assert "with all" in out
    code, out, _ = run(*given, "--memory", "16MiB", "--host_memory", "1MiB", "--json")
    lacking = json.loads(out)
    assert (code, lacking["fits"]) == (1, False)
    assert "and may take 256 KiB" in lacking["why"]
    assert "are lacking" in lacking["why"]
    plenty = answer(*given, "--memory", "1GiB", "--host_memory", "1MiB")
    assert (plenty["host_bytes"], plenty["host_limit_bytes"]) == (0, 2**18)
    assert plenty["on_device"]["step_time_s"] == plenty["plan"]["step_time_s"]


def test_on_one_gpu_frozen_shards_are_on_the_host_where_they_do_not_fit(towers, run, answer):
    given = ("estimate", "towers:Frozen", "--data", "towers:batch", "--machine", "1 a100-40", "--batch", "8")
    least_bytes = answer(*given, "--strategy", "OSDP")["peak_bytes"]
    given = (*given, "--strategy", "OSDP", "--memory", f"{least_bytes // 2**20 - 3}MiB")
    found = answer(*given, "--host_memory", "1GiB")
    places = {
        (unit["gradient_bytes"] > 0, each.get("shard"))
        for unit in found["plan"]["units"]
        for each in unit["treatments"]
    }
    assert (False, "host") in places
    assert (True, "host") not in places
    code, out, err = run(*given, "--host_memory", "1GiB")
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert " units and has the shards of " in text
    assert ", for which it takes" in text


def test_a_plan_whose_blocks_offload_has_none_without_the_host_beside_it(towers, run, answer):
    given = (*ARGUMENTS, "--batch", "8", "--strategy", "OSDP", "--activations", "offload")
    code, out, err = run(*given)
    assert (code, err) == (0, "")
    assert "OSDP without" not in out
    found = answer(*given, "--host_memory", "1GiB")
    assert found["host_bytes"] > 0
    assert found["on_device"]["step_time_s"] == found["plan"]["step_time_s"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "towers:Towr"}, "Tower"),
        ({"model": "tower:Tower"}, "tower"),
        ({"model": "towers:NUMBER"}, "class or a function"),
        ({"model": "towers:batch"}, "towers:batch"),
        ({"model": "towers:Broken"}, "no such step"),
        ({"model": "Tower"}, "Tower"),
        ({"model": "towers:Exits"}, "ended the program with 0"),
        ({"model": "towers:Recurses"}, "recursion"),
        ({"model": "towers:NoOptimizer"}, "no such optimizer"),
        ({"model": "exits:Tower"}, "ended the program with 0"),
        ({"model": "raises:Tower"}, "division by zero"),
        ({"--settings": "[" * 100_000}, "JSON"),
        ({"--batch": "[" * 100_000}, "batch"),
        ({"--batch": "9" * 30}, "at least one"),
        ({"--memory": "9" * 5000}, "2^63"),
        ({"--machine": f"{2**20 + 1} a100-40"}, "at most 2^20"),
        ({"--machine": "9" * 5000 + " a100-40"}, "device"),
        ({"--machine": "-4 a100-40"}, "device"),
        ({"model": "nothing.json"}, "nothing.json"),
        ({"--machine": "4 a100-50"}, "a100-40"),
        ({"--machine": "2x4 a100-40"}, "gbit"),
        ({"--machine": "4 titan-rtx"}, "bfloat16"),
        ({"--settings": "width"}, "JSON"),
        ({"--settings": "[1]"}, "object"),
        ({"--settings": '{"height": 3}'}, "height"),
        ({"--precision": "8-true"}, "bf16-mixed"),
        ({"--memory": "much"}, "GiB"),
        ({"--host_memory": "much"}, "GiB"),
        ({"--host_memory": "1GiB", "--strategy": "FULL_SHARD"}, "Expected OSDP among strategies for host_memory"),
        ({"--batch": "0"}, "at least one"),
        ({"--data": "towers:nothing"}, "nothing"),
        ({"--strategy": "DDP"}, "SHARD_GRAD_OP"),
        ({"--strategy": "HYBRID_SHARD"}, "one node"),
        ({"--activations": "drop"}, "recompute"),
        ({"--activations": "recompute,offload"}, "keep among activations"),
        ({"--sequence": "8"}, "with a configuration"),
        ({"--task": "CausalLM"}, "with a configuration"),
        ({"--optimizer": "torch.optim.Adm"}, "Adam"),
        ({"--optimizer": "torch.nn.Linear"}, "torch.nn.Linear"),
        ({"--optimizer": "torch.optim.SGD", "--optimizer_settings": '{"rate": 1}'}, "rate"),
        ({"--optimizer": "100"}, "64 bytes"),
        ({"--machine": "4 a100-40; 4 a100-50"}, "a100-40"),
        ({"--machine": "4 a100-40; 3 a100-40", "--global_batch": "8"}, "multiple of 3"),
        ({"--machine": "4 a100-40; 8 a100-40", "--out": "folder"}, "one machine"),
        ({"--out": "towers.py"}, "towers.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(towers, run, changed, told):
    given = {"--data": "towers:batch", "--machine": "4 a100-40", "--batch": "2", **changed}
    model = given.pop("model", "towers:Tower")
    if model in ("Tower", "nothing.json"):
        pytest.importorskip("transformers")
        del given["--data"]
    code, out, err = run("estimate", model, *(part for pair in given.items() for part in pair))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert len(err) < 3000


BY_HAND = ("--strategy", "full_shard", "--activations", "recompute", "--batch", "8")


def test_a_row_that_others_have_measured_can_be_asked_for(towers, answer, run):
    everything = answer(*ARGUMENTS, "--batch", "8")
    found = answer(*ARGUMENTS, *BY_HAND)
    (only,) = found["by_hand"]
    assert only in everything["by_hand"]
    assert (only["name"], found["chosen"], found["fits"]) == (*["FULL_SHARD, checkpointing"] * 2, True)
    assert (found["peak_bytes"], found["plan"]["peak_bytes"]) == (only["peak_bytes"], only["peak_bytes"])
    assert found["step"]["time_s"] == pytest.approx(only["step_time_s"])
    assert len(found["plan"]["blocks"]) == 2
    kept = answer(*ARGUMENTS, *BY_HAND, "--activations", "keep")
    assert [each["name"] for each in kept["by_hand"]] == ["FULL_SHARD"]
    assert len(kept["plan"]["units"]) == len(found["plan"]["units"]) == 3  # blocks and the root
    assert found["saving_bytes"]["full"] == found["saving_bytes"]["sharded"] * 4
    code, out, _ = run(*ARGUMENTS, *BY_HAND, "--memory", "10MiB")
    assert code == 1
    assert "does not fit" in out
    assert "Its peak is in" in out


SLOW = """
[devices.mine]
title = "Mine"
memory_mib = 16384
memory_gb_per_s = 1000.0
tflops = { float32 = 10.0, bfloat16 = 100.0 }
compute_reached = 0.5
memory_reached = 0.5
peers = "cable"
host = "pcie4"
source = "the test"

[links.cable]
gb_per_s = 0.1
reached = 1.0
latency_us = 20.0
source = "the test"
"""


def test_activations_move_where_links_are_slow_unless_that_is_ruled_out(towers, answer):
    (towers / "slow.toml").write_text(SLOW)
    found = [
        answer(*ARGUMENTS[:-1], "4 slow.toml", "--strategy", "OSDP", "--batch", "8", *more)
        for more in ([], ["--stationary", "false"], ["--stationary", "true"])
    ]
    modes = [{mode for each in one["plan"]["decisions"] for mode in each["modes"]} for one in found]
    assert ["stationary" in each for each in modes] == [True, False, True]
    unasked_s, never_s, asked_s = (one["step"]["time_s"] for one in found)
    assert asked_s <= unasked_s < never_s


def test_optimizers_are_counted_by_what_they_keep(towers, answer):
    def state_bytes(*more):
        plan = answer(*ARGUMENTS, *BY_HAND, *more)["plan"]
        return round(plan["peak_parts"].get("optimizer state", 0) * 4 / 4.2e6, 1)  # bytes of an element

    assert state_bytes() == state_bytes("--optimizer", "torch.optim.Adam") == 8
    assert state_bytes("--optimizer", "torch.optim.SGD") == 0
    assert state_bytes("--optimizer", "torch.optim.SGD", "--optimizer_settings", '{"momentum": 0.9}') == 4
    assert state_bytes("--optimizer", "2") == 2


@pytest.mark.slow
def test_several_machines_stand_beside_each_other(towers, answer, run):
    arguments = ("estimate", "towers:Tower", "--data", "towers:batch", *BY_HAND, "--machine")
    asked = ["2x4 a100-40, 400gbit", "2 l4"]
    code, out, err = run(*arguments, "; ".join(asked))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    found = answer(*arguments, "; ".join(asked))
    assert found["fits"]
    alone = [answer(*arguments, each) for each in asked]
    assert [{"model": found["model"], **each} for each in found["machines"]] == alone


def test_what_is_written_is_what_other_commands_read(towers, answer, run):
    found = answer(*ARGUMENTS, "--batch", "8", "--out", "there")
    assert sorted(path.name for path in (towers / "there").iterdir()) == [
        "osdp_cluster.json", "osdp_plan.json", "osdp_profile.json"
    ]  # fmt: skip
    assert answer("simulate", "--plan", "there/osdp_plan.json")["time_s"] == found["step"]["time_s"]
    assert answer("show", "there/osdp_plan.json")["units"] == found["plan"]["units"]
    explained = ("explain", "blocks.1", "--plan", "there/osdp_plan.json", "--price", "false")
    assert answer(*explained)["others"]
    plan, made_of = "there/osdp_plan.json", ("there/osdp_profile.json", "--cluster", "there/osdp_cluster.json")
    for command in (
        ("show", plan),
        explained,
        ("simulate", "--plan", plan),
        ("diff", plan, plan),
        ("plan", "--profile", *made_of),
        ("what-if", "--profile", *made_of),
    ):
        document = answer(*command)
        (notes,) = [each["notes"] for each in (document if isinstance(document, list) else [document])]
        assert any("unvalidated on CUDA" in note for note in notes)
        assert "unvalidated on CUDA" in " ".join(run(*command)[1].split())
    code, _, err = run(*ARGUMENTS, *BY_HAND, "--out", "there")
    assert code == 2
    assert "osdp_plan.json' is there" in err
    assert answer("simulate", "--plan", "there/osdp_plan.json")["time_s"] == found["step"]["time_s"]
    assert run(*ARGUMENTS, *BY_HAND, "--out", "there", "--force")[0] == 0
    assert answer("simulate", "--plan", "there/osdp_plan.json")["time_s"] != found["step"]["time_s"]


def test_what_the_model_prints_is_no_part_of_the_answer(towers, run):
    code, out, err = run("estimate", "towers:Prints", *ARGUMENTS[2:], *BY_HAND, "--json")
    assert code == 0
    assert json.loads(out)["fits"]
    assert "a line of the user's" in err


def test_an_interrupted_command_ends_with_130(towers, run):
    code, out, err = run("estimate", "towers:Interrupted", *ARGUMENTS[2:], *BY_HAND)
    assert (code, out, err) == (130, "", "lightning-osdp: interrupted\n")


def test_accumulate_and_a_global_batch_exclude_each_other(towers, run):
    code, _, err = run(*ARGUMENTS, "--global_batch", "8", "--accumulate", "2")
    assert code == 2
    assert "accumulate" in err


def test_a_model_of_transformers_leaves_its_causal_mask_to_the_kernel_of_attention():
    """It does on real tensors without padding, whose positions say that a sample is one sequence."""
    pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = described(
        "LlamaConfig", settings=small, sequence_length=16, data=None, task=None, optimizers=None, lora=None
    )
    with faked(found.module, found.batch, torch.device("cpu")) as batch, OperationRecorder() as recorder:
        found.run(batch)
    given = [each.given for each in recorder.operations[0] if "attention" in str(each.function)]
    assert given
    assert all(each["is_causal"] and each.get("attn_mask") is None for each in given)


def test_a_configuration_of_transformers_is_a_model_without_weights(towers, answer, run):
    pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    arguments = ("--sequence", "16", *FIXED)
    by_name = answer("estimate", "LlamaConfig", "--settings", json.dumps(small), *arguments)
    (towers / "config.json").write_text(json.dumps({"model_type": "llama", **small, "num_hidden_layers": 2}))
    changed = answer("estimate", "config.json", "--settings", '{"num_hidden_layers": 3}', *arguments)
    assert by_name["plan"]["decisions"] == changed["plan"]["decisions"]
    assert math.isclose(by_name["step"]["time_s"], changed["step"]["time_s"])
    assert by_name["tokens_per_s_range"] == [by_name["tokens_per_s"] * each for each in PUBLISHED_RATES]
    code, _, err = run("estimate", "LlamaConfg", *arguments)
    assert code == 2
    assert "LlamaConfig" in err
    code, _, err = run("estimate", "LlamaConfig", "--data", "towers:batch", *arguments)
    assert code == 2
    assert "towers:batch" in err


def test_adapters_of_peft_alone_are_trained_and_the_rest_is_resident(towers, answer, run):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
    arguments = ("--settings", json.dumps(small), "--machine", "2 l4", "--sequence", "16", "--batch", "4")
    arguments += ("--activations", "keep")
    lora = ("--lora", json.dumps({"r": 4, "target_modules": ["q_proj", "v_proj"]}))
    whole = answer("estimate", "LlamaConfig", "--settings", json.dumps(small), "--sequence", "16", *FIXED)
    adapted = answer("estimate", "LlamaConfig", *arguments, *lora)
    # two adapters in each layer, from 256 features to 4 and on to 256, and to 128 for the keys' two heads
    added = 2 * (256 * 4 + 4 * 256 + 256 * 4 + 4 * 128)
    assert adapted["model"]["num_parameters"] - whole["model"]["num_parameters"] == added
    modes = {mode for unit in adapted["plan"]["decisions"] for mode in unit["modes"]}
    assert "resident" in modes
    assert adapted["plan"]["peak_parts"]["optimizer state"] == 2 * 4 * added / 2
    for wrong, told in (('{"rank": 4}', "rank"), ('{"target_modules": ["q"]}', "q"), ("4", "lora")):
        code, _, err = run("estimate", "LlamaConfig", *arguments, "--lora", wrong)
        assert (code, told in err) == (2, True), err


@pytest.mark.slow
def test_adapters_of_peft_are_in_any_module(towers, answer):
    pytest.importorskip("peft")
    tower = answer(
        "estimate", *ARGUMENTS[1:], *BY_HAND, "--lora", '{"r": 4, "target_modules": "blocks[.][0-9]+[.][02]"}'
    )
    assert tower["model"]["num_parameters"] > answer("estimate", *ARGUMENTS[1:], *BY_HAND)["model"]["num_parameters"]


SMALL = {
    "BertConfig": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "T5Config": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    "BartConfig": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
                   "decoder_ffn_dim": 128},
    "WhisperConfig": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                      "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
    "ViTConfig": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Wav2Vec2Config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "num_conv_pos_embedding_groups": 4},
    "CLIPConfig": {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    "GPT2Config": {"n_layer": 2, "n_embd": 64, "n_head": 4},
    "OPTConfig": {"num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 128, "num_attention_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "task", "sequence", "kind", "inputs"),
    [
        ("ViTConfig", None, None, "ViTForImageClassification", {"pixel_values": [3, 224, 224], "labels": []}),
        *(
            slow(*case)
            for case in (
                ("BertConfig", None, 512, "BertForMaskedLM", {"input_ids": [512], "labels": [512]}),
                ("WhisperConfig", None, 16, "WhisperForConditionalGeneration",
                 {"input_features": [80, 3000], "labels": [16]}),
                ("T5Config", None, 16, "T5ForConditionalGeneration", {"input_ids": [16], "labels": [16]}),
                ("Wav2Vec2Config", None, 16000, "Wav2Vec2ForCTC", {"input_values": [16000]}),
                ("BertConfig", "QuestionAnswering", 8, "BertForQuestionAnswering",
                 {"input_ids": [8], "start_positions": [], "end_positions": []}),
                ("BertConfig", "SequenceClassification", 8, "BertForSequenceClassification",
                 {"input_ids": [8], "labels": []}),
                ("BartConfig", None, 16, "BartForConditionalGeneration", {"input_ids": [16], "labels": [16]}),
                ("CLIPConfig", None, 77, "CLIPModel", {"input_ids": [77], "pixel_values": [3, 224, 224]}),
            )
        ),
    ],
)  # fmt: skip
def test_a_configuration_is_built_as_what_it_is(towers, answer, name, task, sequence, kind, inputs):
    transformers = pytest.importorskip("transformers")
    arguments = ["estimate", name, "--settings", json.dumps(SMALL[name]), *FIXED]
    for option, value in (("--task", task), ("--sequence", sequence)):
        arguments += [] if value is None else [option, value]
    found = answer(*arguments)["model"]
    with torch.device("meta"):
        whole = getattr(transformers, kind)(getattr(transformers, name)(**SMALL[name])).num_parameters()
    assert found == {"class": kind, "num_parameters": whole, "inputs": inputs}


FIXED = ("--machine", "2 l4", "--batch", "2", "--strategy", "FULL_SHARD", "--activations", "keep")


@pytest.mark.slow
def test_the_class_is_that_of_the_architectures(towers, answer):
    pytest.importorskip("transformers")
    entries = {"model_type": "bert", "architectures": ["BertForTokenClassification"], **SMALL["BertConfig"]}
    (towers / "config.json").write_text(json.dumps(entries))
    found = answer("estimate", "config.json", "--sequence", "16", *FIXED)["model"]
    assert (found["class"], found["inputs"]) == ("BertForTokenClassification", {"input_ids": [16], "labels": [16]})


@pytest.mark.slow
def test_without_architectures_the_class_is_that_of_the_settings(towers, run):
    pytest.importorskip("transformers")
    entries = {"model_type": "bert", "architectures": None, "is_decoder": True, **SMALL["BertConfig"]}
    (towers / "config.json").write_text(json.dumps(entries))
    out = " ".join(run("estimate", "config.json", "--sequence", "16", *FIXED)[1].split())
    assert "config.json, BertLMHeadModel: " in out
    assert "a sample has input_ids 16, labels 16" in out


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("GPT2Config", ("--sequence", "4096"), "--sequence 1024"),
        ("OPTConfig", ("--sequence", "2049"), "--sequence 2048"),  # two rows of its table are no positions
        ("BertConfig", (), "at most 512"),
        ("WhisperConfig", ("--sequence", "449"), "--sequence 448"),
        ("WhisperConfig", ("--sequence", "0"), "at least 1"),
        ("WhisperConfig", ("--task", "CausalLM"), "SpeechSeq2Seq"),  # its decoder alone
        ("ViTConfig", ("--sequence", "16"), "takes none"),
        ("Wav2Vec2Config", (), "--sequence 160000"),
        ("DetrConfig", (), "LightningModule"),
        ("Speech2TextConfig", (), "LightningModule"),
        ("BertConfig", ("--settings", '{"architectures": ["BertModel"]}'), "SequenceClassification"),
        ("BertConfig", ("--settings", '{"hidden_size": -8}'), "negative dimension -8"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_way_out(towers, run, name, options, told):
    pytest.importorskip("transformers")
    settings = () if "--settings" in options else ("--settings", json.dumps(SMALL.get(name, {})))
    code, out, err = run("estimate", name, *settings, *options, *FIXED)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
