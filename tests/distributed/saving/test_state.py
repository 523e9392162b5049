"""State of modules under ``fully_shard``: whole, in shards, from and to plain ones, within memory."""

import copy
import itertools
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from lightning_osdp.apply import StoredShards
from lightning_osdp.apply.states import state
from lightning_osdp.apply.states.state import numbered
from lightning_osdp.errors import OSDPError
from lightning_osdp.operations.splitting import JoinedShards, split
from lightning_osdp.profiler import LiveBytes
from tests.distributed.support import checkpoint_fixtures
from tests.distributed.support.checkpoint_fixtures import Varied
from tests.distributed.support.split_models import consolidate, unequal
from tests.support.tiers import slow
from tests.support.transposed import Conv1D
from tests.support.wrapped_units import mesh_of_nodes

pytestmark = pytest.mark.distributed


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "nadam": (torch.optim.NAdam, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"foreach": False}),
}


class Everything(Varied):
    """Model with all that `Varied` has, rows that are cut, an extra state, and an old name that its own hook knows."""

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


def sharded(module, num_slices, *, kept=(), in_nodes=False):
    """Shards with ``fully_shard``, split operators in as many units as slices; the named units stay gathered.

    In nodes of two ranks, every second unit and the root are sharded in each node.
    """
    meshes = [mesh := init_device_mesh("cpu", (dist.get_world_size(),))]
    if in_nodes:
        meshes.append(mesh := mesh_of_nodes())
    names = ["up", "frozen"]
    for name, count in num_slices.items():
        split(module.get_submodule(name), count)
        names += [f"{name}.slices.{index}" for index in range(count)]
    for name, of in zip(names, itertools.cycle(meshes), strict=False):
        fully_shard(module.get_submodule(name), mesh=of, reshard_after_forward=name not in kept)
    fully_shard(module, mesh=mesh)
    state.takes_whole(module)
    register_fsdp_forward_method(module, "loss")
    return module


SLICES = {2: {"down": 2, "mix": 3}, 3: {"down": 3, "mix": 2}, 0: {}, "nodes": {"down": 2, "mix": 3}}


def load_shards(path, module, optimizers=(), *, strict=True):
    stored = StoredShards(path)
    stored.load_model(module, stored.weights, strict=strict)
    if optimizers:
        stored.load_optimizers(module, optimizers)


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
    """Whole state; that of other ranks must be without values."""
    model, moments = state.model_state(module, "full"), state.optimizer_state(module, optimizer, "full")
    if dist.get_rank():
        tensors = [value for each in (model, *moments["state"].values()) for value in each.values()]
        assert all(value.is_meta for value in tensors if isinstance(value, torch.Tensor))
    return {"state_dict": dict(model), "optimizer_states": [moments]}


def differing(module, optimizer, expected):
    """Returns names of entries that are not bit for bit as expected (rank 0)."""
    found = found_in(module, optimizer)
    if dist.get_rank():
        return []
    found, expected = [
        {**each, "state_dict": {n: v for n, v in each["state_dict"].items() if n != "_extra_state"}}
        for each in (found, expected)
    ]
    return unequal(found, expected)


def loaded(name, dtype, expected, slices):
    module = sharded(Everything(name).to(dtype), SLICES[slices], in_nodes=slices == "nodes")
    optimizer = module.configure_optimizers()
    module.load_state_dict(expected["state_dict"], strict=True)
    state.load_optimizer(module, optimizer, expected["optimizer_states"][0])
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
        wrong[name] += [
            n for n, v in tensors.items() if v.data_ptr() in own or v.untyped_storage().nbytes() != v.nbytes
        ]
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
        module = sharded(Everything(name).to(getattr(torch, dtype)), SLICES[slices], in_nodes=slices == "nodes")
        optimizer = module.configure_optimizers()
        load_shards(Path(folder) / f"{name}-{saved}", module, [optimizer])
        wrong[name] = differing(module, optimizer, expected)
        wrong[name] += [] if module.extra == ["three", 3] else [module.extra]
    return wrong


def trained(folder, names):
    """Trains in these shards and returns differences from one process, taken while units are gathered; saves both."""
    wrong = {}
    for name in names:
        module = sharded(Varied(name), {"down": 2}, kept=("up", "down.slices.1"))
        optimizer = module.configure_optimizers()
        train(module, optimizer, checkpoint_fixtures.NUM_STEPS)
        num_calls = module.num_calls.clone()
        with torch.no_grad():
            module.loss(next(iter(module.same_loader())))
        module.num_calls.copy_(num_calls)
        assert not isinstance(module.up.weight, DTensor)
        expected = checkpoint_fixtures.plainly_trained(name, checkpoint_fixtures.NUM_STEPS)
        wrong[name] = differing(module, optimizer, expected)
        saved = {"model": state.model_state(module, "sharded")}
        saved["optimizer_0"] = state.optimizer_state(module, optimizer, "sharded")
        dcp.save(saved, checkpoint_id=Path(folder) / name)
        if dist.get_rank() == 0:
            shutil.copy(checkpoint_fixtures.FOLDER / name / "meta.pt", Path(folder) / name)
            torch.save(expected, Path(folder) / f"{name}-expected.pt")
    return wrong


def refusal(work):
    """Type and text of an error; all ranks must get the same one."""
    try:
        work()
    except (OSDPError, RuntimeError, CheckpointException) as error:
        return type(error).__name__, str(error)
    return None


def misfits(folder):
    """Returns errors of states that do not fit, by what is wrong; for the model those of a plain module, too."""
    module, reference = sharded(Everything(), SLICES[2]), Everything()
    optimizer, whole = module.configure_optimizers(), reference.state_dict()
    wrong = {
        "missing": {name: value for name, value in whole.items() if name != "up.bias"},
        "unexpected": {**whole, "down.more": torch.ones(1)},
        "shape": {**whole, "up.weight": torch.ones(23, 13)},
    }
    said = {
        key: (
            refusal(lambda each=each: module.load_state_dict(each, strict=True)),
            refusal(lambda each=each: reference.load_state_dict(each)),
        )
        for key, each in wrong.items()
    }
    said["cut shape"] = refusal(lambda: module.load_state_dict({**whole, "mix.weight": torch.ones(1)}, strict=True))
    stored = {"model": state.model_state(module, "sharded")}
    del stored["model"]["up.bias"]
    dcp.save(stored, checkpoint_id=Path(folder) / "misfits")
    said["missing shards"] = refusal(lambda: load_shards(Path(folder) / "misfits", module))
    load_shards(Path(folder) / "misfits", module, strict=False)
    train(module, optimizer, 1)
    by_name = state.optimizer_state(module, optimizer, "sharded")
    swapped = {**by_name, "param_groups": by_name["param_groups"][::-1]}
    said["groups"] = refusal(lambda: state.load_optimizer(module, optimizer, swapped))
    before = torch.optim.SGD(reference.parameters())
    said["before"] = refusal(lambda: state.optimizer_state(module, before, "full"))
    named = dict(module.named_parameters())
    apart = torch.optim.SGD([{"params": [named.pop("down.slices.0.weight")]}, {"params": named.values()}])
    said["apart"] = refusal(lambda: state.optimizer_state(module, apart, "full"))
    return said


def partly():
    """Loads some weights, one under a name and in a shape that only the module's own hook knows; the rest stays."""
    module, reference = sharded(Everything(), SLICES[3]), Everything()
    before = state.whole_state(module, on_all_ranks=True)
    gain = torch.arange(14.0)[:, None]
    module.load_state_dict({"norm.gain": gain, "down.weight": reference.down.weight.detach() + 1}, strict=False)
    changed = {**before, "norm.weight": gain.flatten(), "down.weight": reference.down.weight.detach() + 1}
    after = state.whole_state(module, on_all_ranks=True)
    return [n for n, value in after.items() if n != "_extra_state" and not torch.equal(value, changed[n])]


def hooked():
    """Returns names that differ from a plain module's where hooks leave out, change and add entries, also of a tie."""

    def change(module, state_dict, prefix, _):
        del state_dict[f"{prefix}frozen.bias"], state_dict[f"{prefix}num_calls"]
        state_dict[f"{prefix}head.weight"] = state_dict[f"{prefix}head.weight"].half()
        state_dict[f"{prefix}up.bias"] = -state_dict[f"{prefix}up.bias"]
        state_dict[f"{prefix}turned"] = state_dict[f"{prefix}up.weight"].t()
        state_dict[f"{prefix}added"] = "text"

    def move(module, state_dict, prefix, _):
        state_dict[f"{prefix}tokens.weight"] = state_dict.pop(f"{prefix}tokens.weight")

    wrong = []
    for hook in (change, move):
        module, reference = sharded(Everything(), SLICES[2]), Everything()
        for each in (module, reference):
            each.register_state_dict_post_hook(hook)
        found, expected = state.whole_state(module, on_all_ranks=True), reference.state_dict()
        assert list(found) == list(expected)
        assert found._metadata[""] == expected._metadata[""]
        wrong += [
            n for n, v in expected.items() if not (torch.equal(v, found[n]) if torch.is_tensor(v) else v == found[n])
        ]
    return wrong


def reads_weights():
    """Returns shapes of split operators, if their values are right, and the errors of using them."""
    module, reference = sharded(Everything(), SLICES[2]), Everything()
    found = {}
    for name in ("down", "mix"):
        operator = module.get_submodule(name)
        same = torch.equal(operator.weight.full_tensor(), reference.get_submodule(name).weight)
        found[name] = tuple(operator.weight.shape), same, refusal(operator.weight.sum)
    return found


def consolidated(folder, names):
    """Returns names that are not as expected in one file made of shards, as a single device gets it."""
    wrong = {}
    for name in names:
        consolidate(Path(folder) / name)
        saved = torch.load(Path(folder) / f"{name}.consolidated", weights_only=True)
        saved["optimizer_states"] = [numbered(each) for each in saved["optimizer_states"]]
        expected = checkpoint_fixtures.expected(name, folder)
        for each in (saved, expected):  # in no order that is told
            each["state_dict"] = dict(sorted(each["state_dict"].items()))
        wrong[name] = unequal(saved, expected)
    return wrong


def odd_fields(folder):
    """Fields of an optimizer's state that are no tensors, or not of a parameter's shape, after all ways round."""
    found = []
    module = sharded(Everything("sgd"), SLICES[2])
    optimizer = module.configure_optimizers()
    fields = {"none": None, "count": 3, "rows": torch.arange(5.0)}
    optimizer.state[module.norm.weight].update(fields)
    full = [state.optimizer_state(module, optimizer, "full")]
    dist.broadcast_object_list(full)
    by_name = state.optimizer_state(module, optimizer, "sharded")
    stored = {"model": state.model_state(module, "sharded"), "optimizer_0": by_name}
    dcp.save(stored, checkpoint_id=Path(folder) / "odd")
    for way in (
        lambda: state.load_optimizer(module, optimizer, full[0]),
        lambda: state.load_optimizer(module, optimizer, by_name),
        lambda: load_shards(Path(folder) / "odd", module, [optimizer]),
    ):
        way()
        found.append({key: str(value) for key, value in optimizer.state[module.norm.weight].items()})
        optimizer.state.clear()
    return found, {key: str(value) for key, value in fields.items()}


class Averaging(torch.optim.SGD):
    """Keeps averages of parameters, by their order and by their numbers, and a count, beside its states."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.averages, self.more = [], {"count": torch.tensor(0), "by": {}, "rates": [0.5, 0.25]}

    def step(self):
        super().step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.averages:
            self.averages = [p.detach().clone() for p in parameters]
        self.more["count"] += 1
        for number, (p, average) in enumerate(zip(parameters, self.averages, strict=True)):
            average.lerp_(p.detach(), 0.3)
            self.more["by"].setdefault(number, {"first": p.detach().clone(), "steps": 0})["steps"] += 1

    def state_dict(self):
        return {**super().state_dict(), "averages": self.averages, "more": self.more}

    def load_state_dict(self, state):
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.averages, self.more = state["averages"], state["more"]


class Averaged(Everything):
    def configure_optimizers(self):
        return Averaging(self.parameters(), lr=0.05, momentum=0.9)


def own_entries(folder):
    """Entries of an optimizer that are not a plain one's, after all ways round and in other slices, and later."""
    reference = Averaged()
    optimizer_of_it = reference.configure_optimizers()
    train(reference, optimizer_of_it, 2)
    expected, wrong = copy.deepcopy(checkpoint_of(reference, optimizer_of_it)), {}
    train(reference, optimizer_of_it, 2)
    later = checkpoint_of(reference, optimizer_of_it)
    for slices, others in ((2, 3), (0, 2), (3, 0)):
        module = sharded(Averaged(), SLICES[slices])
        optimizer = module.configure_optimizers()
        module.load_state_dict(expected["state_dict"], strict=True)
        state.load_optimizer(module, optimizer, copy.deepcopy(expected["optimizer_states"][0]))
        name = f"{slices} from plain"
        wrong[name] = far(found_in(module, optimizer), expected, atol=0.0)
        by_name = state.optimizer_state(module, optimizer, "sharded")
        stored = {"model": state.model_state(module, "sharded"), "optimizer_0": by_name}
        dcp.save(stored, checkpoint_id=Path(folder) / f"own-{slices}")
        again = sharded(Averaged(), SLICES[others])
        optimizer_of_it = again.configure_optimizers()
        load_shards(Path(folder) / f"own-{slices}", again, [optimizer_of_it])
        wrong[f"{others} from shards of {slices}"] = far(found_in(again, optimizer_of_it), expected, atol=0.0)
        train(module, optimizer, 2)
        train(again, optimizer_of_it, 2)
        for found in (found_in(module, optimizer), found_in(again, optimizer_of_it)):
            wrong[name] += far(found, later, atol=1e-6)
    return wrong


def far(found, expected, *, atol):
    """Paths in states of optimizers, on rank 0, at which two checkpoints differ by more than this."""
    if dist.get_rank():
        return []
    leaves, others = (dict(tree_flatten_with_path(each["optimizer_states"])[0]) for each in (found, expected))
    wrong = [*map(str, leaves.keys() ^ others.keys())]
    for path in leaves.keys() & others.keys():
        one, other = leaves[path], others[path]
        if isinstance(other, torch.Tensor):
            is_same = one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=atol)
        else:
            is_same = one == other
        wrong += [] if is_same else [str(path)]
    return wrong


def names_in_groups():
    """Returns names in groups of named_parameters(), whole and in shards, and if the optimizer keeps its own."""
    module = sharded(Everything(), SLICES[2])
    optimizer = torch.optim.SGD(module.named_parameters())
    full, by_name = (state.optimizer_state(module, optimizer, kind) for kind in ("full", "sharded"))
    states = [full]
    dist.broadcast_object_list(states)
    for each in (*states, by_name):
        state.load_optimizer(module, optimizer, each)
    saved = [each["param_groups"][0]["param_names"] for each in (*states, by_name)]
    return saved, optimizer.param_groups[0]["param_names"] == list(dict(module.named_parameters()))


class Wide(Varied):
    """Equal operators that outweigh all else, whose rows no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(65, 65, bias=False) for _ in range(8)))


PARAMETER_BYTES = 65 * 65 * 4


class Live(LiveBytes):
    """Counts the shards in DTensors, whose own storage is as large as the whole tensor and is not there."""

    def _count(self, tensor):
        if not isinstance(tensor, JoinedShards):
            super()._count(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def taken(num_slices):
    """Bytes beyond what was there, at most, while state is taken and loaded, and those kept; in parameters."""
    module, world_size = Wide(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in module.layers:
        if num_slices > 1:
            split(layer, num_slices)
        for unit in layer.slices if num_slices > 1 else [layer]:
            fully_shard(unit, mesh=mesh)
    fully_shard(module, mesh=mesh)
    state.takes_whole(module)
    optimizer, found = torch.optim.AdamW(module.layers.parameters(), foreach=False), {}
    for parameter in module.layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with Live("cpu") as live:
        moments = [v for fields in optimizer.state.values() for v in fields.values()]
        held = [*module.parameters(), *moments]
        live.track(held)
        del moments, held

        def measure(name, work):
            """Notes the least peak of some, for threads of gloo may hold what they have sent for a moment more."""
            peaks = []
            for _ in range(5):
                dist.barrier()
                time.sleep(0.02)
                before = live.current_bytes
                live.reset_peak()
                made = work()
                peaks.append((live.peak_bytes - before) / PARAMETER_BYTES)
            found[name] = min(peaks)
            return made

        def load_moments():
            optimizer.state.clear()
            state.load_optimizer(module, optimizer, moments)

        measure("model", lambda: state.model_state(module, "full"))
        full = [measure("moments", lambda: state.optimizer_state(module, optimizer, "full"))]
        measure("shards", lambda: state.model_state(module, "sharded"))
        weights = measure("model on all ranks", lambda: state.whole_state(module, on_all_ranks=True))
        measure("load model", lambda: module.load_state_dict(weights, strict=True))
        dist.broadcast_object_list(full)
        (moments,) = full
        live.track(v for fields in moments["state"].values() for v in fields.values())
        measure("load moments", load_moments)
    sizes = {"model": sum(v.nbytes for v in weights.values()), "moments": 2 * 8 * PARAMETER_BYTES}
    return found, {name: size / PARAMETER_BYTES for name, size in sizes.items()}


SOME = ["adamw", "momentum"]


@pytest.mark.parametrize(
    ("world_size", "dtype", "slices", "then", "names"),
    [
        (2, "float32", 2, (4, 3), ["nadam", "sgd", "adagrad"]),
        slow(2, "float32", 2, (4, 3), [*OPTIMIZERS]),
        slow(4, "float32", 3, (2, 0), SOME),
        (1, "float32", 2, (2, 2), SOME),
        slow(2, "bfloat16", 0, (1, 3), SOME),
        slow(4, "float32", "nodes", (2, 3), SOME),
        (4, "float32", "nodes", (4, 0), SOME),
        slow(4, "float32", "nodes", (1, 2), SOME),
        slow(2, "float32", 3, (4, "nodes"), SOME),
        slow(1, "float32", 0, (4, "nodes"), SOME),
        slow(4, "bfloat16", 2, (4, "nodes"), SOME),
    ],
)
def test_state_goes_into_shards_and_out_again(ranks, tmp_path, world_size, dtype, slices, then, names):
    found = ranks(world_size).run(round_trips, names=names, dtype=dtype, slices=slices, folder=str(tmp_path))
    assert found == [{name: [] for name in names}] * world_size
    other_size, others = then
    found = ranks(other_size).run(
        read_again, names=names, dtype=dtype, slices=others, folder=str(tmp_path), saved=slices
    )
    assert found == [{name: [] for name in names}] * other_size


def test_trained_state_is_bit_for_bit_that_of_one_process_and_resumes(ranks, tmp_path):
    names = list(checkpoint_fixtures.OPTIMIZERS)
    assert ranks(2).run(trained, folder=str(tmp_path), names=names) == [{name: [] for name in names}] * 2
    assert ranks(1).run(consolidated, folder=str(tmp_path), names=names) == [{name: [] for name in names}]
    for world_size in (2, 4):
        found = ranks(world_size).run(checkpoint_fixtures.goes_on, checkpoints=names, folder=str(tmp_path))[0]
        for wrong, _, off in found.values():
            assert wrong == [checkpoint_fixtures.NUM_STEPS]
            assert off < 1e-5


def test_misfits_are_told(ranks, tmp_path):
    remedy = "Configure the groups that were saved, or load the weights alone."
    for said in ranks(2).run(misfits, folder=str(tmp_path)):
        for key in ("missing", "unexpected", "shape"):
            (kind, text), plain = said[key]
            assert (kind, text.replace("FSDPEverything", "Everything")) == plain
        assert "size mismatch for mix.weight: copying a param with shape (1,) from checkpoint" in said["cut shape"][1]
        assert 'Missing key(s) in state_dict: "up.bias".' in said["missing shards"][1]
        kind, text = said["groups"]
        assert kind == "PlanMismatchError"
        assert text == (
            "Expected a checkpoint whose optimizer has in group 0 the parameters that are configured, but"
            f" ['down.bias', 'down.weight', 'frozen.bias'] are in one of both only. {remedy}"
        )
        kind, text = said["before"]
        assert kind == "ConfigurationError"
        assert text == (
            "Expected an optimizer of the parameters that FSDPEverything has now that it is sharded, got one with 12"
            " others, the first of shape (1,). Configure the optimizer after the module is sharded, and not while"
            " parameters are gathered, as after an evaluation."
        )
        assert said["apart"][1].startswith("Expected the slices of 'down.weight' in one parameter group")


def test_some_weights_load_and_own_hooks_see_whole_ones(ranks):
    assert ranks(2).run(partly) == [[]] * 2


def test_hooks_of_state_dict_change_what_is_whole(ranks):
    assert ranks(2).run(hooked) == [[]] * 2


def test_weights_of_split_operators_are_read_on_all_ranks(ranks):
    for found in ranks(2).run(reads_weights):
        assert {name: (shape, same) for name, (shape, same, _) in found.items()} == {
            "down": ((14, 23), True),
            "mix": ((14, 14), True),
        }
        for _, _, used in found.values():
            assert used[0] == "ShardedParameterError"
            assert "Call its full_tensor() on all ranks, or read trainer.strategy.whole_state_dict();" in used[1]


def test_odd_fields_of_optimizer_states_survive(ranks, tmp_path):
    for found, expected in ranks(2).run(odd_fields, folder=str(tmp_path)):
        assert found == [expected] * 3


def test_own_entries_of_optimizers_are_those_of_a_plain_one_in_any_slices(ranks, tmp_path):
    for found in ranks(2).run(own_entries, folder=str(tmp_path)):
        assert len(found) == 6
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_names_that_an_optimizer_holds_are_those_of_whole_operators(ranks):
    names = [name for name, _ in Everything().named_parameters()]
    assert ranks(2).run(names_in_groups) == [([names, names], True)] * 2


@pytest.mark.parametrize(("world_size", "num_slices"), [slow(2, 1), (2, 3), slow(4, 1)])
def test_no_rank_holds_more_than_it_keeps_and_two_parameters(ranks, world_size, num_slices):
    for rank, (found, sizes) in enumerate(ranks(world_size).run(taken, num_slices=num_slices)):
        few = 2.1  # what is gathered, with padding; a thread of gloo may still hold the one before
        for name in ("model", "moments"):
            assert found[name] < few + (sizes[name] if rank == 0 else 0)
        assert found["model on all ranks"] < few + sizes["model"]
        assert max(found["shards"], found["load model"]) < 0.01
        assert found["load moments"] < 0.01
