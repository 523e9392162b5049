"""No code of a step waits for its device: whatever could is listed here, with why it may."""

import ast
from pathlib import Path

import pytest

import lightning_osdp

PACKAGE = Path(lightning_osdp.__file__).parent
LAYERS = ("apply", "callbacks", "strategy")
"""Layers that run in a step; the profiler measures before the first step, and waits on purpose."""
ON_THE_HOST = "the tensor is on the host"
IN_SETUP = "before the first step"
CHECKPOINT = "while a checkpoint is made"
NO_TENSOR = "no tensor"
FOR_THE_HOST = "the host takes a part of the optimizer's step, where a plan keeps states there"
IN_A_TRIAL = "in the first step of a plan's turn in a race, which may be taken again"
ON_THE_DEVICE = "from one place on the device to another"
ALLOWED = {
    ("apply/activations/blocks.py", "updated"): "in the first forward of a block",
    ("apply/ranks/agreement.py", "end"): ON_THE_HOST,
    ("apply/ranks/agreement.py", "_check"): ON_THE_HOST,
    ("apply/ranks/agreement.py", "_meet"): ON_THE_HOST,
    ("apply/internals/backward.py", "copy_gradients"): IN_A_TRIAL,
    ("apply/internals/backward.py", "restore"): IN_A_TRIAL,
    ("apply/ranks/buffers.py", "_copy_from_rank_zero"): ON_THE_DEVICE,
    ("apply/internals/unsharded.py", "_move_back"): ON_THE_DEVICE,
    ("apply/internals/dtensors.py", "_set_data"): ON_THE_DEVICE,
    ("apply/internals/dtensors.py", "hash_of"): "of what may have changed unseen, some of it in each step",
    ("apply/internals/sharding.py", "copy_replicas"): IN_SETUP,
    ("apply/internals/unsharded.py", "differ"): "of shards on the host some elements alone",
    ("apply/internals/unsharded.py", "reports"): "for what the step before has copied to the host",
    ("apply/internals/dtensors.py", "write_rows"): "at the end of gathered(), from one place on the device to another",
    ("apply/internals/host_shards.py", "_copy"): "from pinned memory, which is not waited for",
    ("apply/internals/host_shards.py", "wait_for_copies"): "where shards are on the host, which anybody may write to",
    ("apply/internals/host_shards.py", "_sent"): ON_THE_HOST,
    ("apply/internals/in_flight.py", "end"): "on the CPU: only gloo's reductions end there",
    ("apply/updating/host_updates.py", "fill"): FOR_THE_HOST,
    ("apply/updating/updates_ahead.py", "_after"): "in a thread of its own",
    ("apply/updating/updates_ahead.py", "_wait_for_device"): "in an optimizer's step, where updates have begun",
    ("apply/updating/updates_ahead.py", "_update"): "in a thread of its own",
    ("apply/updating/updates_ahead.py", "mark"): ON_THE_HOST,
    ("apply/updating/updates_ahead.py", "values"): "options of the optimizer",
    ("apply/preparing/initialize.py", "_copy_from_rank_zero"): IN_SETUP,
    ("apply/preparing/initialize.py", "_initialize"): IN_SETUP,
    ("apply/preparing/initialize.py", "_with_storage"): IN_SETUP,
    ("apply/preparing/initialize.py", "check_initializable"): IN_SETUP,
    ("apply/units.py", "faked"): "in a dry run; ranks of a mesh are on the host",
    ("apply/updating/updates.py", "_is_same"): IN_SETUP,
    ("apply/updating/updates.py", "_update_on_host"): FOR_THE_HOST,
    ("apply/updating/updates.py", "share_gradients"): "of scalars on the host, where a plan has any there",
    ("apply/sharded.py", "kept_shards"): "in a dry run",
    ("apply/preparing/prepare.py", "begin"): IN_SETUP,
    ("apply/states/state.py", "_own_rows"): "while a checkpoint is loaded",
    ("apply/states/state.py", "_whole"): CHECKPOINT,
    ("callbacks/plan_monitor.py", "finished"): "at the end of a fit alone",
    ("strategy/checkpointing/averaging.py", "__init__"): IN_SETUP,
    ("strategy/checkpointing/averaging.py", "_swap"): "around an evaluation, from one place on the device to another",
    ("strategy/checkpointing/entries.py", "_states"): CHECKPOINT,
    ("strategy/options.py", "_percent"): NO_TENSOR,
    ("strategy/planning/profile_fit.py", "_is_moved"): IN_SETUP,
    ("strategy/planning/profile_fit.py", "first"): IN_SETUP,
    ("strategy/planning/same_training.py", "is_part"): IN_SETUP,
    ("strategy/precision.py", "clip_grad_by_norm"): ON_THE_DEVICE,
    ("strategy/runtime/all_ranks.py", "broadcast_number"): ON_THE_HOST,
}
WAITING = {"item", "tolist", "numpy", "cpu", "cuda", "synchronize", "nonzero", "equal"}
"""Methods that end when the device has come to them, or that copy to it."""


def is_constant(node):
    """Tells if a call has constants alone, such as ``float("inf")``."""
    return all(isinstance(each, ast.Constant) for each in node.args)


def is_of_dtype(node):
    """Tells if a call converts on the device."""
    return all(ast.unparse(each).split(".")[-1].startswith(("dtype", "float", "accumulate")) for each in node.args)


def waits(node):
    """Tells if a call may wait for a device, or copy to it what is not pinned."""
    function, given = node.func, {each.arg: ast.unparse(each.value) for each in node.keywords}
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Name):
        return name == "synchronize" or (name == "float" and not is_constant(node))
    if ast.unparse(function) in {"torch.tensor", "torch.as_tensor", "torch.from_numpy"}:
        return given.get("device") != "'cpu'"
    if name == "to":
        return "copy" in given or not is_of_dtype(node)
    if name == "copy_":
        return given.get("non_blocking") != "True"
    if name in {"log", "log_dict"} and ast.unparse(function) != "_log.log":  # Lightning makes tensors of numbers
        return len(node.args) > 1 and not ast.unparse(node.args[1]).startswith("torch.tensor(")
    return name in WAITING


def found_in(source):
    """Names of the functions with such calls."""
    found = set()

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            if isinstance(child, ast.Call) and waits(child):
                found.add(inside)
            visit(child, inside)

    visit(ast.parse(source), "")
    return found


def test_what_may_wait_for_a_device_is_not_in_a_step():
    files = [file for layer in LAYERS for file in sorted((PACKAGE / layer).rglob("*.py"))]
    assert len(files) > 40
    found = {
        (file.relative_to(PACKAGE).as_posix(), name) for file in files for name in found_in(file.read_text("utf-8"))
    }
    assert found - ALLOWED.keys() == set(), "Let it not wait, or say here why it may."
    assert ALLOWED.keys() - found == set(), "It does not wait any more: strike it out."


@pytest.mark.parametrize(
    "call",
    [
        "loss.item()",
        "torch.stack(norms).sum().cpu()",
        "float(loss)",
        "torch.tensor(told, device=device)",
        "torch.tensor(1.0)",
        "batch.to(device)",
        "batch.to(device, torch.float32)",
        "shard.to('cpu', copy=True)",
        "weights.copy_(host)",
        "module.log('osdp/step_time_s', seconds)",
        "torch.cuda.synchronize()",
    ],
)
def test_such_calls_are_found(call):
    assert found_in(f"class A:\n    def on_train_batch_end(self):\n        x = [{call}]") == {"on_train_batch_end"}


@pytest.mark.parametrize(
    "call",
    [
        "float('inf')",
        "torch.tensor(1.0, device='cpu')",
        "gradient.to(weight.dtype)",
        "total.to(torch.float64)",
        "host.copy_(there, non_blocking=True)",
        "module.log('name', torch.tensor(1.0, device='cpu'))",
        "event.query()",
    ],
)
def test_others_are_not(call):
    assert found_in(f"def hook():\n    {call}") == set()
