"""What the ranks run to check models whose tensors are on the meta device until they are wrapped."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from cases import trainer
from meta_models import LAYERS, VOCABULARY, WIDTH, Evaluated, InitialisesAll, Net, Recurrent
from wrapped import whole
from wrapped_units import plan, units_of

from lightning_osdp import OSDPStrategy
from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.modes import NAMED_MODES
from lightning_osdp.errors import OSDPError
from lightning_osdp.profiler import LiveBytes

CPU = torch.device("cpu")


def plan_of(module, *, modes=("ZDP", "DP"), blocks=True):
    """Every block a unit, the modes in turn, or the whole model one."""
    owners = [name for name, child in module.named_modules() if list(child.parameters(recurse=False))]
    units = {"": ([name for name in owners if not (blocks and name.startswith("blocks."))], "DP")}
    for index in range(LAYERS if blocks else 0):
        name = f"blocks.{index}"
        units[name] = ([o for o in owners if o.startswith(f"{name}.")], modes[index % len(modes)])
    node_size = 2 if any(NAMED_MODES[mode].needs_nodes for mode in modes) else None
    return plan(units, dist.get_world_size(), node_size=node_size)


def made(start, *, seed=0):
    """The model with ``start`` "meta", "real", or "rank 0": real on rank 0 alone; ranks have seeds of their own."""
    torch.manual_seed(seed + dist.get_rank())
    is_meta = start == "meta" or (start == "rank 0" and dist.get_rank() > 0)
    with torch.device("meta" if is_meta else "cpu"):
        return Net()


def values(sharded):
    """Whole state dict in memory of its own on every rank, and the buffers that it leaves out."""
    state = sharded.whole_state(on_all_ranks=True)
    return state | {name: buffer.clone() for name, buffer in sharded.module.named_buffers()}


def planned(module, plan):
    return ShardedModel.planned(module, plan, device=CPU)


def wrapped(start, **options):
    module = made(start)
    return planned(module, plan_of(module, **options))


def memory_while_wrapping(start):
    """Bytes on this rank: the most while wrapping, shards and buffers at the end, the largest unit, the whole model."""
    module = made(start)
    chosen = plan_of(module)
    parameters = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    with LiveBytes("cpu") as live:
        live.track([*module.parameters(), *module.buffers()])
        sharded = planned(module, chosen)
    units = [sum(parameters[name] for name in held) for held, _ in units_of(sharded.module).values()]
    return {
        "peak": live.peak_bytes,
        "end": live.current_bytes,
        "unit": max(units),
        "whole": sum(parameters.values()),
    }


def starts(start, modes=("ZDP", "DP")):
    """What a model starts with: its values, whether they are those of rank 0 and of other units, ties, attributes."""
    module = made(start)
    expected = {name: value.clone() for name, value in module.state_dict().items()} if start == "rank 0" else {}
    sharded = planned(module, plan_of(module, modes=modes))
    after = torch.get_rng_state()
    found = values(sharded)
    from_zero = [found]
    dist.broadcast_object_list(from_zero, src=0)
    other = values(wrapped(start, blocks=False))
    net = sharded.module
    is_rank_zeros = dist.get_rank() > 0 or all(torch.equal(found[name], expected[name]) for name in expected)
    torch.manual_seed(dist.get_rank())
    torch.randint(2**62, ())
    return {
        "equal": found.keys() == from_zero[0].keys() and all(torch.equal(found[n], v) for n, v in from_zero[0].items()),
        "rank 0's": is_rank_zeros,
        "any units": all(torch.equal(found[name], value) for name, value in other.items()),
        "tied": net.head.weight is net.tokens.weight,
        "shared": len({block.shared.offset.data_ptr() for block in net.blocks}),
        "no_decay": all(hasattr(block.scale.gain, "no_decay") for block in net.blocks),
        "ramp": found["blocks.3.scale.ramp"][:, 0].tolist() == list(range(0, 4 * WIDTH, 4)),
        "std": (found["tokens.weight"].std().item(), found["blocks.0.scale.gain"].std().item()),
        "one draw": torch.equal(after, torch.get_rng_state()),
    }


def trains(start, steps=4, modes=("ZDP", "DP")):
    """Largest difference from the unwrapped model after some steps of AdamW in float64, all starting alike."""
    module = made(start).double()
    sharded = planned(module, plan_of(module, modes=modes))
    plain = made("real").double()
    before = values(sharded)
    plain.load_state_dict(before, strict=False)
    plain.load_state_dict({name: before[name] for name, _ in plain.named_buffers()}, strict=False)
    tokens = torch.randint(VOCABULARY, (steps, dist.get_world_size(), 3, 6), generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded.module, plain))
    for step in range(steps):
        for optimizer, loss in (
            (ours, lambda batch: sharded.module(batch[dist.get_rank()])),
            (theirs, lambda batch: plain(batch.flatten(0, 1))),
        ):
            optimizer.zero_grad()
            loss(tokens[step]).backward()
            optimizer.step()
    found = values(sharded)
    reached = plain.state_dict()
    moved = max((reached[name] - before[name]).abs().max().item() for name in reached if "weight" in name)
    return max((found[name] - value).abs().max().item() for name, value in reached.items() if value.numel()), moved


def loads_a_checkpoint():
    """Whether a model from meta tensors has exactly the weights of another one after loading its whole state."""
    source = values(wrapped("real", modes=("DP",)))
    sources = [source]
    dist.broadcast_object_list(sources, src=0)
    sharded = wrapped("meta")
    differed = not torch.equal(values(sharded)["positions"], sources[0]["positions"])
    persistent = sharded.whole_state(on_all_ranks=True).keys()
    sharded.load_model({name: sources[0][name] for name in persistent}, strict=True)
    found = values(sharded)
    return differed, all(torch.equal(found[name], sources[0][name]) for name in persistent)


def initialises_other_units():
    """The error of a root that initialises what is below it, on each rank."""
    with torch.device("meta"):
        module = InitialisesAll()
    try:
        planned(module, plan_of(module))
    except OSDPError as error:
        return type(error).__name__, str(error)
    return None


def torch_modules():
    """Finite gradients of layers from the meta device, and whether attention's own initialisation prevailed."""
    with torch.device("meta"):
        module = Recurrent()
    owners = [name for name, child in module.named_modules() if list(child.parameters(recurse=False))]
    units = {unit: ([name for name in owners if name.split(".")[0] == unit], "ZDP") for unit in ("lstm", "layer")}
    sharded = planned(module, plan({"": ([], "DP"), **units}, dist.get_world_size()))
    zero = not values(sharded)["layer.self_attn.out_proj.bias"].any()
    sharded.module(torch.randn(2, 3, 8)).sum().backward()
    _, gradients = whole(sharded.module)
    return zero, all(bool(gradient.isfinite().all()) for gradient in gradients.values() if gradient is not None)


def evaluates_without_a_plan():
    """Validation loss of the model as one unit, that of an unwrapped one with its weights, and whether ties stay."""
    module = Evaluated()
    torch.manual_seed(dist.get_rank())
    fit = trainer(OSDPStrategy(), limit_val_batches=1.0)
    data = module.dataset()
    found = fit.validate(module, DataLoader(data, batch_size=len(data)), verbose=False)[0]["val_loss"]
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    plain = Evaluated()
    plain.configure_model()
    plain.to_empty(device=CPU)
    plain.load_state_dict(state)
    return found, float(plain.loss(data[:])), torch.equal(state["net.0.weight"], state["net.2.weight"])
