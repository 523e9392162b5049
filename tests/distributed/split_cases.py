"""Split operators in training and in checkpoints, as the ranks run them."""

import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, trainer
from split_models import KINDS, SplitNet, in_nodes, split_plan

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy
from lightning_osdp.errors import OSDPError
from lightning_osdp.splitting import splittable


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
    """Of five steps, split and whole."""
    losses = []
    for kind in ("four", "whole"):
        module = SplitNet("sgd")
        strategy = OSDPStrategy(plan=split_plan(kind, module, dist.get_world_size()), batch_size="keep")
        fitted(strategy, module, precision="bf16-mixed")
        losses.append(module.losses)
    return losses


def transformer_differs_by(name):
    """Operators of a model of transformers that are split, and its weights and losses in slices and under DDP."""
    from hf_models import HF_MODELS

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


class AtStart(L.Callback):
    """Calls something when everything is restored and nothing is trained."""

    def __init__(self, call):
        self.call = call

    def on_train_start(self, trainer, pl_module):
        self.call(trainer)


def differing(trainer, expected):
    """What of the model and the optimizer is not bit for bit as in a plain checkpoint (rank 0)."""
    state = trainer.strategy.lightning_module_state_dict()
    optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return [] if dist.get_rank() else unequal({"state_dict": state, "optimizer_states": [optimizer]}, expected)


def unequal(found, expected):
    """Names of entries that differ from a plain checkpoint's."""
    wrong = []
    if list(found["state_dict"]) != list(expected["state_dict"]):
        wrong.append("names")
    wrong += [n for n, v in expected["state_dict"].items() if not torch.equal(found["state_dict"][n], v)]
    (a,), (b,) = found["optimizer_states"], expected["optimizer_states"]
    if a["param_groups"] != b["param_groups"] or set(a["state"]) != set(b["state"]):
        wrong.append(f"groups: {a['param_groups']} {list(a['state'])} for {b['param_groups']} {list(b['state'])}")
    for number, fields in b["state"].items():
        same = set(a["state"][number]) == set(fields)
        if not same or not all(torch.equal(a["state"][number][name], value) for name, value in fields.items()):
            wrong.append(f"state {number}")
    return wrong


def _fit(kind, call, *, optimizer="adamw", max_steps=4, **options):
    """On three ranks with other modes, and with units that reduce in the last micro-batch; on four also in nodes."""
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
                trainer.strategy.load_checkpoint(path, weights_only=False)
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
            trainer.strategy.load_checkpoint(path, weights_only=False)
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
            trainer.strategy.load_checkpoint(Path(folder) / f"sgd-{kind}", weights_only=False)
        except (OSDPError, RuntimeError) as error:
            return str(error)

    _fit("four", load, optimizer="plain_sgd")
    return rates, refused


def reads_weights():
    """What ``module.weight`` gives after fit: its shape, the error, and the whole one as the error says."""
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
