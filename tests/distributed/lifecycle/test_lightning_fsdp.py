"""Lightning's tests of its own `FSDPStrategy` hold for `OSDPStrategy`, on CPU ranks.

Cases follow the 44 of Lightning's ``tests_pytorch/strategies/test_fsdp.py``. Its units are wrapped by policies or
by hand; here they are a plan's, and what ``wrap_min_params`` is there is ``SearchSpace(min_unit_bytes=...)`` here.
Cases that cannot apply, in whole or in part, and what is tested in their place:

case                                                why not                            in its place
--------------------------------------------------  ---------------------------------  -----------------------------
invalid_on_cpu                                      OSDP trains on CPU                 that it does
strategy_sync_batchnorm                             SyncBatchNorm needs GPUs           the refusal
modules_without_parameters,                         there is one device, the CPU       metrics, dtypes, shards, the
  module_init_context, configure_model: cuda                                             meta device
checkpoint_multi_gpus[autowrap_2x],                 the plan takes the place of        the refusal, and all stages
  [autowrap_use_orig_params]                          policies                           with a plan's units
sharding_strategy, hybrid_shard_configuration       the plan decides                   the refusals
strategy_cpu_offload                                states alone are on the host       that they are
use_orig_params,                                    fully_shard has no flat            the refusal
  invalid_parameters_in_optimizer[False]              parameters
save_checkpoint_path_exists: shards beside          a folder is moved to its name      the refusal
  other files                                         only when it is complete
reapply_compile: that the wrapper is compiled       nothing wraps the module           that training is the same
"""

import functools
from datetime import timedelta
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, fsdp
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn
from torch.distributed.fsdp import CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_osdp import ConfigurationError, OSDPStrategy, SearchSpace
from lightning_osdp.strategy.checkpointing import load
from tests.distributed.support.fits import EVERYTHING, shared_folder, trainer, without_measuring
from tests.support.tiers import slow
from tests.support.wrapped_units import block_forwards

pytestmark = pytest.mark.distributed


def layers():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class Net(L.LightningModule):
    """Two layers, its own loaders, and what every kind of batch has found."""

    def __init__(self, optimizer="adamw"):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layers, self.seen = self.first_layers(), set()

    def first_layers(self):
        return layers()

    def step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    training_step = validation_step = test_step = predict_step = step

    def on_train_batch_end(self, outputs, batch, *_):
        policies = [unit._get_fsdp_state()._mp_policy for unit in self.modules() if isinstance(unit, FSDPModule)]
        dtypes = {(policy.param_dtype, policy.reduce_dtype) for policy in policies}
        self.seen.add((batch.dtype, self.layers[0].weight.dtype, len(policies), *dtypes))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def configure_optimizers(self):
        if self.hparams.optimizer == "two":
            return [torch.optim.Adam(layer.parameters()) for layer in (self.layers[0], self.layers[2])]
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(dist.get_rank())
        return DataLoader(torch.randn(16, 32, generator=generator), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Wrapped(Net):
    """Makes its layers in configure_model, and wraps them there as FSDPStrategy would have it."""

    def first_layers(self):
        return None

    def configure_model(self):
        if self.layers is None:
            self.layers = layers()
        for index in (0, 2):
            self.layers[index] = wrap(self.layers[index])
        self.layers = wrap(self.layers)


class Anew(Net):
    """Makes its layers in every stage."""

    def configure_model(self):
        self.layers = layers()


class Sharded(Net):
    """Shards a layer itself."""

    def configure_model(self):
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers)


class Legacy(Net):
    """Has the hook that came before configure_model."""

    def configure_sharded_model(self):
        pass


class Stranger(Net):
    """Net that trains parameters of another module."""

    def configure_optimizers(self):
        return torch.optim.Adam(nn.Linear(4, 5).parameters())


class Faint(Net):
    """Net whose gradients are zero in half precision, but for a scaler."""

    def step(self, batch, batch_idx):
        return 1e-9 * self.layers(batch).float().square().mean()

    training_step = step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e8)


class Counting(Net):
    """Net with a metric, which has no parameters."""

    def __init__(self):
        super().__init__()
        self.metric = MulticlassAccuracy(num_classes=10)

    def step(self, batch, batch_idx):
        self.metric(torch.rand(2, 10, device=self.device), torch.zeros(2, dtype=torch.long, device=self.device))
        return super().step(batch, batch_idx)

    training_step = step


class Normalised(Net):
    """Net with batch statistics."""

    def first_layers(self):
        return nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class AtStart(L.Callback):
    """Keeps the whole state that training begins with, where there is one."""

    def on_train_start(self, trainer, pl_module):
        self.weights = copied(trainer.strategy.lightning_module_state_dict())
        self.moments = copied(trainer.strategy.optimizer_state(pl_module.optimizers(use_pl_optimizer=False)))


def copied(value):
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_equal(found, expected):
    """Tells if two values have the same keys and, bit for bit, values."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_equal(found[key], expected[key]) for key in expected)
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def osdp(**options):
    return OSDPStrategy(**{"search_space": EVERYTHING, **options})


def ddp():
    return DDPStrategy(process_group_backend="gloo")


def run(strategy, **options):
    few = {f"limit_{stage}_batches": 2 for stage in ("train", "val", "test", "predict")}
    return trainer(strategy, **{**few, "max_steps": -1, "max_epochs": 1, **options})


def fitted(module, strategy=None, ckpt_path=None, **options):
    fit = run(osdp() if strategy is None else strategy, **options)
    fit.fit(module, ckpt_path=ckpt_path)
    return fit


def weights(fit):
    return copied(fit.strategy.whole_state_dict(on_all_ranks=True))


def refused(work):
    """Kind and text of the error that this raises; None if it raises none."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def ranks_case(function):
    """A case that plans by stated links."""

    @functools.wraps(function)
    @without_measuring
    def case(**kwargs):
        return function(**kwargs)

    return case


@ranks_case
def all_stages(kind, precision, wraps):
    """Names faults of a model that is trained, saved, and evaluated as it is and from files, also without gradients."""
    folder, module = shared_folder(), Wrapped() if wraps else Net()
    keep = ModelCheckpoint(folder, save_last=True)
    strategy = osdp(state_dict_type=kind)
    fit = fitted(module, strategy, precision=precision, enable_checkpointing=True, callbacks=[keep])
    fit.test(module, verbose=False)
    path = Path(fit.strategy.broadcast(keep.last_model_path))
    trained = weights(fit)
    fit.save_checkpoint(folder / "after-test")
    fit.save_checkpoint(path, weights_only=True)
    wrong = []
    if kind == "full" and dist.get_rank() == 0:
        loaded = type(module).load_from_checkpoint(path).state_dict()
        wrong += [] if is_equal(dict(loaded), dict(fit.strategy.lightning_module_state_dict() or trained)) else ["file"]
    elif kind == "full":
        fit.strategy.lightning_module_state_dict()
    with torch.inference_mode():
        for stage in (functools.partial(fit.test, verbose=False), fit.predict):
            stage(module)
            stage(ckpt_path=path)
            wrong += [] if is_equal(weights(fit), trained) else ["weights after a stage"]
    # other processes go on where this one was
    resumed, start = type(module)(), AtStart()
    fit = fitted(
        resumed, osdp(state_dict_type=kind), folder / "after-test", precision=precision, max_epochs=2, callbacks=[start]
    )
    with fit.strategy.gathered():
        moved = {name: not torch.equal(value, trained[name]) for name, value in resumed.named_parameters()}
    wrong += [name for name, has_moved in moved.items() if not has_moved]
    if kind == "full" and dist.get_rank() == 0:
        wrong += [] if is_equal(start.weights, trained) else ["resumed weights"]
    return wrong, [tuple(map(str, entry)) for entry in module.seen], fit.global_step


@ranks_case
def states(min_unit_bytes):
    """Units, and what is wrong with full states of OSDP under DDP and of DDP under OSDP, bit for bit."""
    folder, module, start, wrong = shared_folder(), Net(), AtStart(), []
    space = SearchSpace(min_unit_bytes=min_unit_bytes, share_units=False)
    fit = fitted(module, osdp(search_space=space), precision="16-mixed", barebones=True)
    num_units = sum(isinstance(child, FSDPModule) for child in module.layers)
    fit.save_checkpoint(folder / "osdp.ckpt")
    ours = fit.strategy.lightning_module_state_dict(), fit.strategy.optimizer_state(module.optimizers())
    fitted(Net(), ddp(), folder / "osdp.ckpt", max_epochs=2, callbacks=[start])
    if dist.get_rank() == 0:
        wrong += [] if list(ours[0]) == list(Net().state_dict()) else ["names"]
        wrong += [] if is_equal(start.weights, ours[0]) else ["weights under DDP"]
        wrong += [] if is_equal(start.moments, ours[1]) else ["moments under DDP"]
    else:
        wrong += [] if ours == ({}, {}) else ["state on another rank"]
    module = Net()
    plain = fitted(module, ddp())
    plain.save_checkpoint(folder / "ddp.ckpt")
    theirs = plain.strategy.lightning_module_state_dict(), plain.strategy.optimizer_state(module.optimizers())
    fit = fitted(Net(), osdp(search_space=space), folder / "ddp.ckpt", max_epochs=2, callbacks=[start])
    if dist.get_rank() == 0:
        wrong += [] if is_equal(start.weights, theirs[0]) else ["weights of DDP"]
        wrong += [] if is_equal(start.moments, theirs[1]) else ["moments of DDP"]
    return wrong, num_units, fit.global_step


@ranks_case
def sharded_checkpoints():
    """Files of a sharded checkpoint, what is beside tensors, and what is wrong where others load it."""
    folder, module, start, wrong = shared_folder(), Net(), AtStart(), []
    keep = ModelCheckpoint(folder)
    fit = fitted(module, osdp(state_dict_type="sharded"), enable_checkpointing=True, callbacks=[keep])
    path = Path(fit.strategy.broadcast(keep.best_model_path))
    trained = weights(fit)
    fit.strategy._state_dict_type = "full"
    fit.save_checkpoint(folder / "full.ckpt")
    moments = copied(fit.strategy.optimizer_state(module.optimizers()))
    if dist.get_rank() == 0:
        torch.save(_format_checkpoint(_load_distributed_checkpoint(path)), folder / "consolidated.ckpt")
    dist.barrier()
    for strategy, file in (
        (osdp(state_dict_type="sharded"), path),
        (osdp(state_dict_type="sharded"), folder / "full.ckpt"),
        (osdp(), path),
        (osdp(), folder / "consolidated.ckpt"),
        (ddp(), folder / "consolidated.ckpt"),
    ):
        kind = getattr(strategy, "_state_dict_type", None)
        if kind == "sharded":  # whose states are shards: they are compared at the end of no step
            fit = fitted(Net(), strategy, file, max_epochs=1)
            wrong += [] if is_equal(weights(fit), trained) else [f"weights of {file.name}, sharded"]
            continue
        fit = fitted(Net(), strategy, file, max_epochs=2, callbacks=[start])
        if dist.get_rank() == 0:
            name = type(strategy).__name__
            wrong += [] if is_equal(start.weights, trained) else [f"weights of {file.name}, {name}"]
            wrong += [] if is_equal(start.moments, moments) else [f"moments of {file.name}, {name}"]
        wrong += [] if fit.global_step == 4 else [fit.global_step]
    metadata = torch.load(path / "meta.pt", weights_only=True)
    return sorted(entry.name for entry in path.iterdir()), list(metadata), len(metadata["callbacks"]), wrong


@ranks_case
def paths_that_exist():
    """Returns what saving over something gives, by what was there, and what saving refuses."""
    folder, found = shared_folder(), {}
    fits = {kind: fitted(Net(), osdp(state_dict_type=kind)) for kind in ("full", "sharded")}
    for kind, fit in fits.items():
        for there in ("nothing", "file", "shards", "empty folder", "folder"):
            path = folder / f"{kind} over {there}"
            if dist.get_rank() == 0 and there == "file":
                path.touch()
            if dist.get_rank() == 0 and "folder" in there:
                path.mkdir()
                _ = there == "folder" and (path / "mine.txt").touch()
            if there == "shards":
                fits["sharded"].save_checkpoint(path)
            dist.barrier()
            found[path.name] = refused(lambda fit=fit, path=path: fit.save_checkpoint(path))
            if found[path.name] is None:
                module = Net()
                run(osdp()).test(module, ckpt_path=path, verbose=False)
                found[path.name] = "folder" if path.is_dir() else "file"
            dist.barrier()
        options = {"storage_options": {"some": "thing"}}
        found[f"{kind} storage_options"] = refused(lambda fit=fit, o=options: fit.save_checkpoint(folder / "x", **o))
    found["left"] = (folder / "full over folder" / "mine.txt").exists(), len(list(folder.glob("*.part")))
    return found


@ranks_case
def what_is_no_checkpoint():
    """Returns refusals to load other numbers of optimizers, what is no checkpoint, and weights that are not there."""
    folder, found = shared_folder(), {}
    for kind in ("full", "sharded"):
        path, two = folder / f"one {kind}", folder / f"two {kind}"
        fitted(Net(), osdp(state_dict_type=kind)).save_checkpoint(path)
        manual = Net("two")
        manual.automatic_optimization = False
        fitted(manual, osdp(state_dict_type=kind)).save_checkpoint(two)
        more = Net("two")
        more.automatic_optimization = False
        found[f"{kind}: 1 for 2"] = refused(lambda more=more, path=path: fitted(more, None, path))
        found[f"{kind}: 2 for 1"] = refused(lambda two=two: fitted(Net(), None, two))
        wider = Net()
        wider.extra = nn.Linear(2, 2)
        found[f"{kind}: strict"] = refused(
            lambda wider=wider, path=path: run(osdp()).test(wider, ckpt_path=path, verbose=False)
        )
        wider = Net()
        wider.extra, wider.strict_loading = nn.Linear(2, 2), False
        wider.extra.weight.data.fill_(7.0)
        nn.init.zeros_(wider.layers[0].weight)
        fit = run(osdp())
        fit.test(wider, ckpt_path=path, verbose=False)
        state = weights(fit)
        found[f"{kind}: not strict"] = bool(state["extra.weight"].eq(7).all()), bool(state["layers.0.weight"].any())
    if dist.get_rank() == 0:
        (folder / "empty").mkdir()
    dist.barrier()
    for name in ("empty", "nowhere"):
        found[name] = refused(lambda name=name: run(osdp()).test(Net(), ckpt_path=folder / name, verbose=False))
    with mock.patch.object(load.torch, "load", wraps=torch.load) as loads:
        run(osdp()).test(Net(), ckpt_path=folder / "one full", verbose=False)
    found["loads"] = [call.kwargs["mmap"] for call in loads.call_args_list]
    return found


@ranks_case
def configured_modules():
    """Returns what modules see of where they are made and sharded, and refusals of what they do themselves."""
    found = {}

    class Made(Net):
        def configure_model(self):
            if self.layers is not None:
                return
            self.layers = layers()
            found["made"] = str(self.layers[0].weight.device), str(self.layers[0].weight.dtype)

        first_layers = Wrapped.first_layers

        def on_fit_start(self):
            weight = self.layers[0].weight
            found["fit"] = type(weight.data).__name__, str(weight.dtype), tuple(weight.to_local().shape)

    fitted(Made())
    for kind in (Anew, Sharded, Legacy, Stranger):
        module = kind()
        fit = run(osdp())
        found[kind.__name__] = refused(lambda fit=fit, module=module: fit.fit(module))
        if kind is Anew:
            again = refused(lambda fit=fit, module=module: fit.test(module, verbose=False))
            anew = refused(lambda module=module: fitted(module))
            found["Anew"] = found["Anew"], again, anew
    found["batch statistics"] = refused(lambda: fitted(Normalised(), sync_batchnorm=True))
    counting = Counting()
    fitted(counting)
    found["metric"] = str(counting.metric.device), int(counting.metric._update_count)
    return found


@ranks_case
def made_in_precision(precision):
    """Device and dtype of weights made under `Trainer.init_module`, before and in fit, and whether ranks are equal."""
    found = []
    for empty_init in (False, True):
        fit = run(osdp(), precision=precision, barebones=True)
        with fit.init_module(empty_init=empty_init):
            module = Net()
        weight = module.layers[0].weight
        before = str(weight.device), str(weight.dtype)
        fit.fit(module)
        state = weights(fit)["layers.0.weight"].float()
        others = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(others, state)
        is_same = all(torch.equal(other, state) or other.isnan().any() for other in others)
        found.append((before, (str(module.layers[0].weight.device), str(module.layers[0].weight.dtype)), is_same))
    return found


@ranks_case
def faint_gradients():
    """Returns how far weights move, in bf16 and half precision, and the scales of losses in a checkpoint."""
    found, before = {}, Net().layers[0].weight.detach()
    for precision in ("bf16-mixed", "16-mixed"):
        fit = fitted(Faint(), precision=precision, max_epochs=4)
        found[precision] = float((weights(fit)["layers.0.weight"] - before).norm())
    saved = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return found, [entry["scale"] for entry in saved.values() if isinstance(entry, dict) and "scale" in entry]


@ranks_case
def same_training():
    """Tells if weights are bit for bit the same where modules recompute or are compiled, and what recomputes."""
    expected = weights(fitted(Net()))
    found, strategies = {}, {"set": {nn.Linear}, "policy": ModuleWrapPolicy({nn.Linear, nn.ReLU})}
    for name, policy in strategies.items():
        module = Net()
        fit = fitted(module, osdp(activation_checkpointing_policy=policy))
        names = {child: path for path, child in module.named_modules()}
        recomputing = sorted(names[forward.block] for forward in block_forwards(module))
        found[name] = is_equal(weights(fit), expected), recomputing
    module = Net()
    fit = fitted(torch.compile(module, backend="eager"))
    found["compiled"] = is_equal(weights(fit), expected), fit.strategy.model is module
    config = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = Net()
    fit = fitted(module, osdp(mixed_precision=config))
    found["mixed"] = [tuple(map(str, entry)) for entry in module.seen]
    difference = max(float((value - expected[name]).abs().max()) for name, value in weights(fit).items())
    found["mixed differs"] = 0 < difference < 0.05, isinstance(module.layers[0].weight, DTensor)
    return found


POLICIES = [{nn.Linear}, ModuleWrapPolicy({nn.Linear})]
STRATEGIES = ["FULL_SHARD", "no_shard", ShardingStrategy.SHARD_GRAD_OP, "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def test_the_cpu_is_no_error():
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="osdp", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, OSDPStrategy)


def test_modules_may_be_made_by_the_trainer_without_a_warning():
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="osdp", logger=False, enable_checkpointing=False)
    with trainer.init_module(empty_init=True):
        assert Net().layers[0].weight.is_meta


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("sharding_strategy", STRATEGIES, "the plan chooses it per operator"),
        ("process_group", [(mock.Mock(), mock.Mock())], "the plan shards over all ranks"),
        ("device_mesh", [mock.Mock(), (2, 2)], "the plan shards over all ranks"),
        ("auto_wrap_policy", POLICIES, "the plan's units say what is sharded together"),
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
    for offloads in (True, CPUOffload(offload_params=True)):
        assert OSDPStrategy(cpu_offload=offloads)._units.options.search_space.states == ("host",)
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
        trainer.fit(Net())
    assert connects.call_args.kwargs["timeout"] == timedelta(seconds=30)


def test_state_is_asked_of_a_strategy_that_has_any():
    with pytest.raises(ConfigurationError, match=r"^Expected a sharded model, but setup has not been yet"):
        OSDPStrategy().whole_state_dict()


@pytest.mark.parametrize(
    ("kind", "precision", "wraps"),
    [
        slow("full", "16-mixed", True),
        ("sharded", "bf16-mixed", True),
        slow("full", "bf16-mixed", True),
        slow("sharded", "16-mixed", True),
        slow("full", "16-mixed", False),
    ],
)
def test_all_stages_run_with_what_is_trained_and_with_files_and_others_resume(ranks, kind, precision, wraps):
    dtype = "torch.bfloat16" if precision.startswith("bf16") else "torch.float16"
    for wrong, seen, steps in ranks(2).run(all_stages, kind=kind, precision=precision, wraps=wraps):
        assert wrong == []
        assert seen == [("torch.float32", "torch.float32", "3", f"({dtype}, {dtype})")]
        assert steps == 4


@pytest.mark.parametrize(("min_unit_bytes", "num_units"), [slow(0, 2), (2048, 1), slow(10**8, 0)])
def test_full_states_go_to_ddp_and_back_bit_for_bit(ranks, min_unit_bytes, num_units):
    assert ranks(2).run(states, min_unit_bytes=min_unit_bytes) == [([], num_units, 4)] * 2


@pytest.mark.slow
def test_shards_load_everywhere_and_so_do_full_checkpoints(ranks):
    for files, beside, num_callbacks, wrong in ranks(2).run(sharded_checkpoints):
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
        assert "pytorch-lightning_version" in beside
        assert not {"state_dict", "optimizer_states"} & set(beside)
        assert num_callbacks == 1
        assert wrong == []


def test_a_checkpoint_takes_the_place_of_a_checkpoint_only(ranks):
    for found in ranks(2).run(paths_that_exist):
        for kind, expected in (("full", "file"), ("sharded", "folder")):
            for there in ("nothing", "file", "shards", "empty folder"):
                assert found[f"{kind} over {there}"] == expected
            name, text = found[f"{kind} over folder"]
            assert name == "IsADirectoryError"
            assert text.endswith("it is a folder with 'mine.txt'. Save under another name.")
        assert found["left"] == (True, 0)
        assert found["full storage_options"][0] == "TypeError"
        assert found["sharded storage_options"][0] == "ConfigurationError"


@pytest.mark.slow  # tests/strategy/test_bad_input.py has more such checkpoints, on one rank
def test_what_cannot_be_loaded_is_refused(ranks):
    for found in ranks(2).run(what_is_no_checkpoint):
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
    for found in ranks(2).run(configured_modules):
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
    assert ranks(2).run(made_in_precision, precision=precision) == [expected] * 2


@pytest.mark.slow
def test_gradients_that_half_precision_cannot_hold_are_scaled(ranks):
    for found, scales in ranks(2).run(faint_gradients):
        assert found["bf16-mixed"] > 1e-3
        assert found["16-mixed"] == pytest.approx(found["bf16-mixed"], rel=0.1)
        assert len(scales) == 1


@pytest.mark.slow
def test_what_recomputes_or_is_compiled_trains_the_same_and_mixed_precision_does_not(ranks):
    for found in ranks(2).run(same_training):
        assert found["set"] == (True, ["layers.0", "layers.2"])
        assert found["policy"] == (True, ["layers.0", "layers.1", "layers.2"])
        assert found["compiled"] == (True, True)
        assert found["mixed"] == [("torch.float32", "torch.float32", "3", "(torch.bfloat16, torch.float32)")]
        assert found["mixed differs"] == (True, True)
