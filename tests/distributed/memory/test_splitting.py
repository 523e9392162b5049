"""Operators in slices on several ranks: training, checkpoints of any kind into any other, whole parameters."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy
from lightning_osdp.errors import OSDPError
from lightning_osdp.operations.splitting import splittable
from tests.distributed.support.fits import largest_difference, trainer
from tests.distributed.support.split_models import KINDS, AtStart, SplitNet, differing, in_nodes, split_plan, unequal
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


def fitted(strategy, module, **options):
    fit = trainer(strategy, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return {name: value.detach().clone() for name, value in fit.strategy.lightning_module_state_dict().items()}


def differences(cases):
    """Largest differences of weights after five steps from DDP's, by case: a kind, a dtype, an optimizer, options."""
    found = []
    for kind, dtype, optimizer, is_checkpointed, options in cases:
        num_micro_batches = options.get("accumulate_grad_batches", 1)
        plugins = [OSDPPrecision("64-true")] if dtype == "float64" else None
        modules = [SplitNet(optimizer, is_checkpointed=is_checkpointed).to(getattr(torch, dtype)) for _ in range(2)]
        plan = split_plan(kind, modules[0], dist.get_world_size(), num_micro_batches=num_micro_batches)
        split = fitted(OSDPStrategy(plan=plan, batch_size="keep"), modules[0], plugins=plugins, **options)
        precision = "64-true" if dtype == "float64" else "32-true"
        ddp = fitted(DDPStrategy(process_group_backend="gloo"), modules[1], precision=precision, **options)
        moved = largest_difference(
            ddp, SplitNet(is_checkpointed=is_checkpointed).to(getattr(torch, dtype)).state_dict()
        )
        found.append((largest_difference(split, ddp) if dist.get_rank() == 0 else 0.0, moved))
    return found


def losses_in_bf16():
    """Returns losses of five steps, split and whole."""
    losses = []
    for kind in ("four", "whole"):
        module = SplitNet("sgd")
        strategy = OSDPStrategy(plan=split_plan(kind, module, dist.get_world_size()), batch_size="keep")
        fitted(strategy, module, precision="bf16-mixed")
        losses.append(module.losses)
    return losses


def transformer_differs_by(name):
    """Operators of a model of transformers that are split, and its weights and losses in slices and under DDP."""
    from tests.distributed.support.hf.hf_models import HF_MODELS

    losses, states = [], []
    operators = splittable(HF_MODELS[name]())
    modes = {path: ("ZDP", "DP", "ZDP")[index % 2 :] for index, path in enumerate(operators)}
    for is_split in (True, False):
        module = HF_MODELS[name]("sgd")
        strategy = DDPStrategy(process_group_backend="gloo")
        if is_split:
            plan = plan_of(module, modes, world_size=dist.get_world_size(), micro_batch_size=4)
            strategy = OSDPStrategy(plan=plan, batch_size="keep")
        loader = module.loader(dist.get_rank(), dist.get_world_size())
        fit = trainer(strategy, max_steps=-1, max_epochs=1, limit_train_batches=4, limit_val_batches=2)
        fit.fit(module, loader, loader)
        states.append(
            {key: value.detach().clone() for key, value in fit.strategy.lightning_module_state_dict().items()}
        )
        losses.append(float(fit.callback_metrics["val_loss"]))
    kinds = {path.rpartition(".")[2] for path in operators}
    return kinds, largest_difference(*states) if dist.get_rank() == 0 else 0.0, losses


def _fit(kind, call, *, optimizer="adamw", max_steps=4, **options):
    """Fits on three ranks with other modes and units that reduce in the last micro-batch, on four also in nodes."""
    module, world_size = SplitNet(optimizer, num_blocks=1), dist.get_world_size()
    is_odd = world_size == 3
    plan = split_plan(kind, module, world_size, num_micro_batches=1 + is_odd, is_shifted=is_odd)
    plan = in_nodes(plan) if world_size == 4 else plan
    fit = trainer(
        OSDPStrategy(plan=plan, batch_size="keep", node_size=plan.node_size),
        callbacks=[AtStart(call)],
        max_steps=max_steps,
        accumulate_grad_batches=1 + is_odd,
    )
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), **options)
    return fit


def save_plain(folder):
    """Three steps on a single device, saved."""
    module = SplitNet(num_blocks=1)
    fit = trainer("auto", max_steps=3)
    fit.fit(module, module.loader(0, 1))
    fit.save_checkpoint(Path(folder) / "plain.ckpt")


def resaved(folder):
    """Resumes from the plain checkpoint in slices of all kinds, and saves full and sharded ones; what differs then."""
    plain, world_size, wrong = torch.load(Path(folder) / "plain.ckpt", weights_only=False), dist.get_world_size(), {}
    for kind in KINDS:

        def save(trainer, kind=kind):
            wrong[kind] = differing(trainer, plain)
            trainer.save_checkpoint(Path(folder) / f"{world_size}-{kind}.ckpt")
            trainer.strategy._state_dict_type = "sharded"
            trainer.save_checkpoint(Path(folder) / f"{world_size}-{kind}")
            trainer.strategy._state_dict_type = "full"

        _fit(kind, save, ckpt_path=Path(folder) / "plain.ckpt")
        if dist.get_rank() == 0:
            saved = torch.load(Path(folder) / f"{world_size}-{kind}.ckpt", weights_only=False)
            wrong[f"{kind} saved"] = unequal(saved, plain)
    return wrong


def load_into(trainer, path):
    """Loads a checkpoint as Lightning does where it resumes."""
    content = trainer.strategy.load_checkpoint(path, weights_only=False)
    trainer.strategy.load_model_state_dict(content)
    trainer.strategy.load_optimizer_state_dict(content)


def reloaded(folder, sources):
    """Loads sharded checkpoints, some into slices of each kind; what differs from the plain one then."""
    plain, wrong = torch.load(Path(folder) / "plain.ckpt", weights_only=False), {}
    for kind, names in sources.items():

        def load(trainer, kind=kind, names=names):
            for path in (Path(folder) / name for name in names):
                with torch.no_grad():
                    for parameter in trainer.model.parameters():
                        parameter.fill_(7.0)
                trainer.optimizers[0].state.clear()
                load_into(trainer, path)
                wrong[f"{path.name} as {kind}"] = differing(trainer, plain)

        _fit(kind, load, max_steps=1)
    return wrong


def without_state(folder):
    """Saves and loads SGD that has no state; the learning rate that comes back, and a refused number of parameters."""
    rates, refused = [], []
    for kind in ("full", "sharded"):
        path = Path(folder) / f"sgd-{kind}"

        def change(trainer, kind=kind, path=path):
            trainer.strategy._state_dict_type = kind
            trainer.optimizers[0].param_groups[0]["lr"] = 0.25
            trainer.save_checkpoint(path)
            trainer.optimizers[0].param_groups[0]["lr"] = 0.5
            load_into(trainer, path)
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        _fit("four", change, optimizer="plain_sgd")

    def load(trainer):
        optimizer = trainer.optimizers[0]
        trainer.optimizers = [optimizer, optimizer]
        refused.extend(refusal(trainer, kind) for kind in ("full", "sharded"))
        trainer.optimizers = [optimizer]
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
        refused.append(refusal(trainer, "full"))

    def refusal(trainer, kind):
        try:
            load_into(trainer, Path(folder) / f"sgd-{kind}")
        except (OSDPError, RuntimeError) as error:
            return str(error)

    _fit("four", load, optimizer="plain_sgd")
    return rates, refused


def reads_weights():
    """Reads ``module.weight`` after fit: its shape, the error, and the whole one as the error says."""
    module = SplitNet()
    fit = trainer(OSDPStrategy(plan=split_plan("four", module, dist.get_world_size()), batch_size="keep"), max_steps=1)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    weight = module.head.weight
    try:
        weight.sum()
    except OSDPError as error:
        text = str(error)
    whole = module.head.weight.full_tensor()
    state = fit.strategy.lightning_module_state_dict()
    names = [name for name, _ in module.named_parameters() if "head" in name or "up.slices.3" in name]
    same = dist.get_rank() != 0 or torch.equal(whole, state["head.weight"])
    linears = {path for path, child in module.named_modules() if isinstance(child, nn.Linear)}
    paths = {path.rpartition(".")[0] for path, _ in module.named_parameters() if path.endswith("weight")}
    decayed = {f"{path}.weight" for path in linears & paths}
    return tuple(weight.shape), text, same, names, decayed


DDP_CASES = [
    (("four", "float64", "adamw", False, {"gradient_clip_val": 0.05}), 1e-9),
    (("three", "float64", "adamw", True, {"accumulate_grad_batches": 2}), 1e-9),
    (("four", "float32", "sgd", True, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}), 1e-6),
    (("three", "float32", "adamw", False, {}), 1e-4),
]


@pytest.mark.parametrize(
    ("world_size", "chosen"),
    [(2, DDP_CASES[1:2]), slow(2, DDP_CASES[:1]), slow(2, DDP_CASES[2:]), slow(4, DDP_CASES[1:3])],
)
def test_training_in_slices_equals_ddp(ranks, world_size, chosen):
    found = ranks(world_size).run(differences, cases=[case for case, _ in chosen])[0]
    for (difference, moved), (case, tolerance) in zip(found, chosen, strict=True):
        assert difference < tolerance, case
        assert moved > 0.01, case


@pytest.mark.slow
def test_in_bf16_slices_train_like_the_whole_operators(ranks):
    split, whole = ranks(2).run(losses_in_bf16)[0]
    assert split == pytest.approx(whole, rel=2e-2)
    assert split != whole


@pytest.mark.slow
def test_checkpoints_of_any_slices_load_into_any_others(ranks, tmp_path):
    ranks(1).run(save_plain, folder=str(tmp_path))
    sizes, kinds = (1, 2, 4, 3), list(KINDS)
    for world_size in sizes:
        found = ranks(world_size).run(resaved, folder=str(tmp_path))[0]
        assert found == {name: [] for kind in kinds for name in (kind, f"{kind} saved")}
    # Full checkpoints equal the plain one. An orthogonal array of the sharded ones is loaded: all pairs of kinds, all
    # pairs of numbers of ranks, and all pairs of a kind before and a number after.
    for row, world_size in enumerate(sizes):
        sources = {kind: [] for kind in kinds}
        for column, saved_by in enumerate(sizes):
            before, after = column ^ row, column ^ (0, 2, 3, 1)[row]
            sources[kinds[after % 3]].append(f"{saved_by}-{kinds[before % 3]}")
        found = ranks(world_size).run(reloaded, folder=str(tmp_path), sources=sources)[0]
        assert found == {f"{name} as {kind}": [] for kind, names in sources.items() for name in names}


@pytest.mark.slow
def test_an_optimizer_without_state_is_saved_and_loaded(ranks, tmp_path):
    for rates, refused in ranks(2).run(without_state, folder=str(tmp_path)):
        assert rates == [0.25, 0.25]
        *counted, text = refused
        expected = (
            "Expected a checkpoint with the state of 2 optimizers, as configured, got 1. Configure as many as were"
        )
        assert [error.startswith(expected) for error in counted] == [True, True]
        assert (
            "Expected a checkpoint whose optimizer has [4, 5] parameters in its groups, as configured, got [5, 5]."
            in text
        )


@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: python -m pip install --group models"
)
@pytest.mark.parametrize("name", ["GPT2", slow("T5")])
def test_models_of_transformers_train_and_validate_in_slices(ranks, name):
    """GPT-2's operators are transposed; T5 asks for the dtype and the device of weights that are sharded."""
    kinds, difference, losses = ranks(2).run(transformer_differs_by, name=name)[0]
    assert {"GPT2": {"c_attn", "c_fc", "c_proj"}, "T5": {"relative_attention_bias", "wi", "wo"}}[name] <= kinds
    assert difference < 1e-6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_whole_parameters_are_read_where_they_are(ranks):
    for shape, text, same, names, decayed in ranks(2).run(reads_weights):
        assert shape == (19, 14)
        assert "Expected the whole 'weight' of a split operator" in text
        assert same
        assert names == [
            "blocks.0.up.slices.3.weight",
            "blocks.0.up.slices.3.bias",
            "blocks.1.up.slices.3.weight",
            "blocks.1.up.slices.3.bias",
            *(f"head.slices.{index}.weight" for index in range(4)),
        ]
        operators = ("blocks.0.up", "blocks.1.up", "frozen", "head")
        assert decayed == {f"{name}.slices.{index}.weight" for name in operators for index in range(4)}
