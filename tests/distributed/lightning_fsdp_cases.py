"""What Lightning tests of its own FSDP strategy, under `OSDPStrategy`, as the ranks run it."""

import functools
import sys
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

sys.path.insert(0, str(Path(__file__).parent))

from cases import EVERYTHING, trainer, without_measuring
from strategy_cases import shared_folder

from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.strategy.checkpointing import load


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
    """Trains what is not in it."""

    def configure_optimizers(self):
        return torch.optim.Adam(nn.Linear(4, 5).parameters())


class Faint(Net):
    """Whose gradients are zero in half precision, but for a scaler."""

    def step(self, batch, batch_idx):
        return 1e-9 * self.layers(batch).float().square().mean()

    training_step = step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e8)


class Counting(Net):
    """With a metric, which has no parameters."""

    def __init__(self):
        super().__init__()
        self.metric = MulticlassAccuracy(num_classes=10)

    def step(self, batch, batch_idx):
        self.metric(torch.rand(2, 10, device=self.device), torch.zeros(2, dtype=torch.long, device=self.device))
        return super().step(batch, batch_idx)

    training_step = step


class Normalised(Net):
    """With batch statistics."""

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
    """Whether these have the same keys and, bit for bit, values."""
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
    """What is wrong where a model is trained, saved, and evaluated as it is and from files, also without gradients."""
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
    """What saving over something gives, by what was there; and what it refuses."""
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
    """What loading refuses: other numbers of optimizers, what is no checkpoint, weights that are not there."""
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
    """What modules see of where they are made and sharded, and what is refused of what they do themselves."""
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
    """How far weights move, in bf16 and half precision, and whether the scale of losses is in a checkpoint."""
    found, before = {}, Net().layers[0].weight.detach()
    for precision in ("bf16-mixed", "16-mixed"):
        fit = fitted(Faint(), precision=precision, max_epochs=4)
        found[precision] = float((weights(fit)["layers.0.weight"] - before).norm())
    saved = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return found, [entry["scale"] for entry in saved.values() if isinstance(entry, dict) and "scale" in entry]


@ranks_case
def same_training():
    """Whether weights are bit for bit the same where modules recompute or are compiled, and what recomputes."""
    expected = weights(fitted(Net()))
    found, strategies = {}, {"set": {nn.Linear}, "policy": ModuleWrapPolicy({nn.Linear, nn.ReLU})}
    for name, policy in strategies.items():
        module = Net()
        fit = fitted(module, osdp(activation_checkpointing_policy=policy))
        found[name] = is_equal(weights(fit), expected), sorted(fit.strategy._sharded.recomputed)
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
