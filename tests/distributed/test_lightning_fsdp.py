"""What Lightning tests of its own `FSDPStrategy` holds for `OSDPStrategy`, on CPU ranks.

It follows the 44 cases of Lightning's ``tests_pytorch/strategies/test_fsdp.py``. Their units are wrapped by policies or
by hand; here they are a plan's, and what ``wrap_min_params`` is there is ``SearchSpace(min_unit_bytes=...)`` here.
What cannot apply, in whole or in part, and what is tested in its place:

case                                                why not                            in its place
--------------------------------------------------  ---------------------------------  -----------------------------
invalid_on_cpu                                      OSDP trains on CPU                 that it does
strategy_sync_batchnorm                             SyncBatchNorm needs GPUs           the refusal
modules_without_parameters,                         there is one device, the CPU       metrics, dtypes, shards, the
  module_init_context, configure_model: cuda                                             meta device
checkpoint_multi_gpus[autowrap_2x],                 the plan takes the place of        the refusal, and all stages
  [autowrap_use_orig_params]                          policies                           with a plan's units
strategy_cpu_offload, sharding_strategy,            the plan decides                   the refusals
  hybrid_shard_configuration
use_orig_params,                                    fully_shard has no flat            the refusal
  invalid_parameters_in_optimizer[False]              parameters
save_checkpoint_path_exists: shards beside          a folder is moved to its name      the refusal
  other files                                         only when it is complete
reapply_compile: that the wrapper is compiled       nothing wraps the module           that training is the same
"""

from datetime import timedelta
from unittest import mock

import lightning as L
import lightning_fsdp_cases as cases
import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import fsdp
from tiers import slow
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_osdp import ConfigurationError, OSDPStrategy

pytestmark = pytest.mark.distributed

POLICIES = [{nn.Linear}, ModuleWrapPolicy({nn.Linear})]
STRATEGIES = ["FULL_SHARD", "no_shard", ShardingStrategy.SHARD_GRAD_OP, "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def test_the_cpu_is_no_error():
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="osdp", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, OSDPStrategy)


def test_modules_may_be_made_by_the_trainer_without_a_warning():
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="osdp", logger=False, enable_checkpointing=False)
    with trainer.init_module(empty_init=True):
        assert cases.Net().layers[0].weight.is_meta


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("sharding_strategy", STRATEGIES, "the plan chooses it per operator"),
        ("process_group", [(mock.Mock(), mock.Mock())], "the plan shards over all ranks"),
        ("device_mesh", [mock.Mock(), (2, 2)], "the plan shards over all ranks"),
        ("auto_wrap_policy", POLICIES, "the plan's units say what is sharded together"),
        ("cpu_offload", [True, CPUOffload(offload_params=True), CPUOffload()], "plans keep all states on the device"),
        ("use_orig_params", [False], "needs use_orig_params=True"),
        ("state_dict_type", ["invalid", None], "must be one of"),
    ],
)
def test_arguments_that_have_no_place_beside_a_plan_are_refused(name, values, text):
    for value in values:
        with pytest.raises(ConfigurationError, match=text):
            OSDPStrategy(**{name: value})


def test_arguments_that_have_one_are_taken():
    config = MixedPrecision(param_dtype=torch.bfloat16)
    assert OSDPStrategy(mixed_precision=config).mixed_precision_config == config
    assert OSDPStrategy().kwargs["use_orig_params"]
    for policy in POLICIES:
        kwargs = OSDPStrategy(activation_checkpointing_policy=policy)._activation_checkpointing_kwargs
        assert isinstance(kwargs["auto_wrap_policy"], ModuleWrapPolicy)


def test_other_precision_plugins_are_refused():
    text = "can only work with the `FSDPPrecision"
    with pytest.raises(TypeError, match=text):
        OSDPStrategy(precision_plugin=HalfPrecision())
    strategy = OSDPStrategy()
    with pytest.raises(TypeError, match=text):
        strategy.precision_plugin = HalfPrecision()


def test_the_timeout_is_the_process_groups():
    strategy = OSDPStrategy(timeout=timedelta(seconds=30))
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, max_epochs=1)
    with mock.patch.object(fsdp, "_init_dist_connection", side_effect=KeyError) as connects, pytest.raises(KeyError):
        trainer.fit(cases.Net())
    assert connects.call_args.kwargs["timeout"] == timedelta(seconds=30)


def test_state_is_asked_of_a_strategy_that_has_any():
    with pytest.raises(ConfigurationError, match=r"^Expected a sharded model, but setup has not been yet"):
        OSDPStrategy().whole_state_dict()


@pytest.mark.parametrize(
    ("kind", "precision", "wraps"),
    [
        ("full", "16-mixed", True),
        ("sharded", "bf16-mixed", True),
        slow("full", "bf16-mixed", True),
        slow("sharded", "16-mixed", True),
        slow("full", "16-mixed", False),
    ],
)
def test_all_stages_run_with_what_is_trained_and_with_files_and_others_resume(ranks, kind, precision, wraps):
    dtype = "torch.bfloat16" if precision.startswith("bf16") else "torch.float16"
    for wrong, seen, steps in ranks(2).run(cases.all_stages, kind=kind, precision=precision, wraps=wraps):
        assert wrong == []
        assert seen == [("torch.float32", "torch.float32", "3", f"({dtype}, {dtype})")]
        assert steps == 4


@pytest.mark.parametrize(("min_unit_bytes", "num_units"), [slow(0, 2), (2048, 1), slow(10**8, 0)])
def test_full_states_go_to_ddp_and_back_bit_for_bit(ranks, min_unit_bytes, num_units):
    assert ranks(2).run(cases.states, min_unit_bytes=min_unit_bytes) == [([], num_units, 4)] * 2


@pytest.mark.slow
def test_shards_load_everywhere_and_so_do_full_checkpoints(ranks):
    for files, beside, num_callbacks, wrong in ranks(2).run(cases.sharded_checkpoints):
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
        assert "pytorch-lightning_version" in beside
        assert not {"state_dict", "optimizer_states"} & set(beside)
        assert num_callbacks == 1
        assert wrong == []


def test_a_checkpoint_takes_the_place_of_a_checkpoint_only(ranks):
    for found in ranks(2).run(cases.paths_that_exist):
        for kind, expected in (("full", "file"), ("sharded", "folder")):
            for there in ("nothing", "file", "shards", "empty folder"):
                assert found[f"{kind} over {there}"] == expected
            name, text = found[f"{kind} over folder"]
            assert name == "IsADirectoryError"
            assert text.endswith("it is a folder with 'mine.txt'. Save under another name.")
        assert found["left"] == (True, 0)
        assert found["full storage_options"][0] == "TypeError"
        assert found["sharded storage_options"][0] == "ConfigurationError"


def test_what_cannot_be_loaded_is_refused(ranks):
    for found in ranks(2).run(cases.what_is_no_checkpoint):
        for kind in ("full", "sharded"):
            for saved, configured in ((1, 2), (2, 1)):
                _, text = found[f"{kind}: {saved} for {configured}"]
                assert f"the state of {configured} optimizers, as configured, got {saved}." in text
            assert "extra.weight" in found[f"{kind}: strict"][1]
            assert found[f"{kind}: not strict"] == (True, True)
        for name in ("empty", "nowhere"):
            assert found[name][0] == "ConfigurationError"
            assert "a file with the full state, or a folder with shards" in found[name][1]
        assert found["loads"] == [True]  # from a map of the file: a rank does not read all of it


@pytest.mark.slow
def test_modules_are_made_by_the_user_and_sharded_by_the_plan(ranks):
    for found in ranks(2).run(cases.configured_modules):
        assert found["made"] == ("cpu", "torch.float32")
        assert found["fit"] == ("DTensor", "torch.float32", (16, 32))
        first, again, other_trainer = found["Anew"]
        assert first is None
        assert again == other_trainer
        assert "its parameter 'layers.0.weight' is new. Lightning calls configure_model before every" in again[1]
        assert found["Sharded"][1].startswith("Expected a model that nothing has sharded")
        assert found["Legacy"][1].startswith("Expected configure_model, got configure_sharded_model")
        assert found["Stranger"][1].startswith("Expected an optimizer of the parameters that ")
        assert found["batch statistics"][1].startswith("Expected a GPU for synchronised batch normalisation")
        assert found["metric"] == ("cpu", 2)


@pytest.mark.parametrize("precision", [slow("32-true"), slow("16-true"), "bf16-true"])
def test_modules_are_made_in_the_trainers_precision_also_on_the_meta_device(ranks, precision):
    dtype = {"32-true": "torch.float32", "16-true": "torch.float16", "bf16-true": "torch.bfloat16"}[precision]
    expected = [((device, dtype), ("cpu", dtype), True) for device in ("cpu", "meta")]
    assert ranks(2).run(cases.made_in_precision, precision=precision) == [expected] * 2


@pytest.mark.slow
def test_gradients_that_half_precision_cannot_hold_are_scaled(ranks):
    for found, scales in ranks(2).run(cases.faint_gradients):
        assert found["bf16-mixed"] > 1e-3
        assert found["16-mixed"] == pytest.approx(found["bf16-mixed"], rel=0.1)
        assert len(scales) == 1


@pytest.mark.slow
def test_what_recomputes_or_is_compiled_trains_the_same_and_mixed_precision_does_not(ranks):
    for found in ranks(2).run(cases.same_training):
        assert found["set"] == (True, ["layers.0", "layers.2"])
        assert found["policy"] == (True, ["layers.0", "layers.1", "layers.2"])
        assert found["compiled"] == (True, True)
        assert found["mixed"] == [("torch.float32", "torch.float32", "3", "(torch.bfloat16, torch.float32)")]
        assert found["mixed differs"] == (True, True)
