"""State of modules under ``fully_shard``, against a plain module's, as the ranks run it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parent))

import fixture_cases
from fixture_cases import Varied
from split_cases import unequal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transposed import Conv1D

from lightning_osdp.apply.fsdp2 import load, state
from lightning_osdp.errors import OSDPError
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.splitting import JoinedShards, split

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "capturable": (torch.optim.NAdam, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"foreach": False}),
}


class Everything(Varied):
    """What `Varied` has, rows that are cut, an extra state, and an old name that its own hook knows."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.mix, self.extra = Conv1D(14, 14), ["one"]
        self.norm.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state_dict, prefix, *_):
        if f"{prefix}gain" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}gain").flatten()

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra

    def loss(self, batch):
        return super().loss(batch) + self.mix(self.tokens(batch[0])).square().mean()

    def configure_optimizers(self):
        """Two groups that are not in the model's order; frozen parameters are in one."""
        kind, options = OPTIMIZERS[self.optimizer_name]
        named = list(self.named_parameters())
        groups = [
            {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
        ]
        return kind(groups, lr=0.02, **options)


def sharded(module, num_slices, *, kept=()):
    """Under ``fully_shard``, split operators in as many units as slices; the named units stay gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = ["up", "frozen"]
    for name, count in num_slices.items():
        split(module.get_submodule(name), count)
        names += [f"{name}.slices.{index}" for index in range(count)]
    for name in names:
        fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=name not in kept)
    return fully_shard(module, mesh=mesh)


SLICES = {2: {"down": 2, "mix": 3}, 3: {"down": 3, "mix": 2}, 0: {}}


def train(module, optimizer, num_steps):
    for batch, _ in zip(module.same_loader(), range(num_steps), strict=False):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()


def plain(name, dtype):
    """Module and optimizer of a single process that have state, the module's of three steps."""
    module = Everything(name).to(dtype)
    optimizer = module.configure_optimizers()
    train(module, optimizer, 3)
    module.extra = ["three", 3]
    return module, optimizer


def checkpoint_of(module, optimizer):
    return {"state_dict": dict(module.state_dict()), "optimizer_states": [optimizer.state_dict()]}


def found_in(module, optimizer):
    """Whole state on rank 0; what comes back on other ranks must be empty."""
    model, moments = state.model_state(module, "full"), state.optimizer_state(module, optimizer, "full")
    if dist.get_rank():
        assert (model, moments) == ({}, {})
    return {"state_dict": dict(model), "optimizer_states": [moments]}


def differing(module, optimizer, expected):
    """What is not bit for bit as expected (rank 0)."""
    found = found_in(module, optimizer)
    if dist.get_rank():
        return []
    found, expected = [
        {**each, "state_dict": {n: v for n, v in each["state_dict"].items() if n != "_extra_state"}}
        for each in (found, expected)
    ]
    return unequal(found, expected)


def loaded(name, dtype, expected, slices):
    module = sharded(Everything(name).to(dtype), SLICES[slices])
    optimizer = module.configure_optimizers()
    load.load_model(module, expected["state_dict"], strict=True)
    load.load_optimizer(module, optimizer, expected["optimizer_states"][0])
    return module, optimizer


def round_trips(names, dtype, slices, folder):
    """Plain into shards, and out in every form; what differs on the way."""
    wrong = {}
    dtype = getattr(torch, dtype)
    for name in names:
        reference, optimizer_of_it = plain(name, dtype)
        expected = checkpoint_of(reference, optimizer_of_it)
        torch.save(expected, Path(folder) / f"{name}-{dist.get_rank()}.pt")
        mapped = torch.load(Path(folder) / f"{name}-{dist.get_rank()}.pt", mmap=True, weights_only=True)
        module, optimizer = loaded(name, dtype, mapped, slices)
        wrong[name] = differing(module, optimizer, expected)
        wrong[name] += [] if module.extra == ["three", 3] else [module.extra]
        whole = state.whole_state(module, on_all_ranks=True)
        again = Everything(name).to(dtype)
        again.load_state_dict(whole)
        wrong[name] += [] if list(whole) == list(expected["state_dict"]) else [list(whole)]
        own = {p.to_local().data_ptr() for p in module.parameters()} | {b.data_ptr() for b in module.buffers()}
        tensors = {n: v for n, v in whole.items() if isinstance(v, torch.Tensor)}
        wrong[name] += [n for n, v in tensors.items() if v.data_ptr() in own or v.untyped_storage().nbytes() != v.nbytes]
        wrong[name] += [n for n, v in again.state_dict().items() if n in tensors and not torch.equal(v, tensors[n])]
        if whole["head.weight"].data_ptr() != whole["tokens.weight"].data_ptr():
            wrong[name].append("the tie is two tensors")
        shards = state.model_state(module, "sharded")
        kinds = {n: type(v) for n, v in shards.items() if n in dict(reference.named_parameters())}
        joined = {n for n, kind in kinds.items() if kind is JoinedShards}
        assert joined == {f"{operator}.weight" for operator in SLICES[slices]}
        assert set(kinds.values()) <= {DTensor, JoinedShards}
        by_name = state.optimizer_state(module, optimizer, "sharded")
        dcp.save({"model": shards, "optimizer_0": by_name}, checkpoint_id=Path(folder) / f"{name}-{slices}")
        wrong[name] += differing(module, optimizer, expected)
    return wrong


def read_again(names, dtype, slices, folder, saved):
    """Shards of any number of ranks and slices into these; what differs from the plain one."""
    wrong = {}
    for name in names:
        expected = torch.load(Path(folder) / f"{name}-0.pt", weights_only=True)
        module = sharded(Everything(name).to(getattr(torch, dtype)), SLICES[slices])
        optimizer = module.configure_optimizers()
        load.load_sharded(Path(folder) / f"{name}-{saved}", module, [optimizer], strict=True)
        wrong[name] = differing(module, optimizer, expected)
        wrong[name] += [] if module.extra == ["three", 3] else [module.extra]
    return wrong
