import contextlib
import dataclasses
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from wrapped_units import NESTED, NESTED_PARAMETERS, Nested, plan, units_of

from lightning_osdp.apply import apply_plan, units_reduced_last, without_reducing
from lightning_osdp.errors import ConfigurationError, PlanMismatchError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/store")
        yield
        dist.destroy_process_group()


def test_units_hold_exactly_what_the_plan_says():
    found = units_of(apply_plan(Nested(), plan(NESTED), device=CPU))
    assert {name: held for name, (held, _) in found.items()} == NESTED_PARAMETERS


def test_everything_may_be_in_the_root():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    found = units_of(apply_plan(model, plan({"": (["0", "1"], "DP")}), device=CPU))
    assert found == {"": (["0.weight", "0.bias", "1.weight", "1.bias"], "none")}


def test_a_root_without_parameters_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4))
    found = units_of(apply_plan(model, plan({"": ([], "DP"), "0": (["0"], "ZDP")}), device=CPU))
    assert {name: held for name, (held, _) in found.items()} == {"": [], "0": ["0.weight", "0.bias"]}


def test_tied_parameters_are_in_one_unit():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), nn.Linear(4, 2))
    model[0][1].weight = model[0][0].weight
    root = apply_plan(model, plan({"": ([], "DP"), "0": (["0.0", "0.1"], "ZDP"), "1": (["1"], "DP")}), device=CPU)
    assert units_of(root)["0"][0] == ["0.0.weight"]
    root(torch.ones(1, 4)).sum().backward()
    assert root.module[0].module[0].weight is root.module[0].module[1].weight


def test_names_frozen_parameters_and_buffers_stay():
    plain, model = Nested(), Nested()
    root = apply_plan(model, plan(NESTED), device=CPU)
    assert {n.replace("_fsdp_wrapped_module.", "") for n, _ in root.named_parameters()} == dict(
        plain.named_parameters()
    ).keys()
    trainable = {n.replace("_fsdp_wrapped_module.", ""): p.requires_grad for n, p in root.named_parameters()}
    assert trainable == {name: p.requires_grad for name, p in plain.named_parameters()}
    assert [b.dtype for b in root.buffers()] == [b.dtype for b in plain.buffers()]
    x = torch.randn(3, 4)
    assert torch.equal(root(x), plain(x))


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [("pre", BackwardPrefetch.BACKWARD_PRE), ("post", BackwardPrefetch.BACKWARD_POST), ("none", None)],
)
def test_prefetching_is_the_plans(prefetch, expected):
    chosen = dataclasses.replace(plan(NESTED), backward_prefetch=prefetch, forward_prefetch=prefetch == "pre")
    root = apply_plan(Nested(), chosen, device=CPU)
    for module in FullyShardedDataParallel.fsdp_modules(root):
        assert module.backward_prefetch == expected
        assert module.forward_prefetch == (prefetch == "pre")


def test_further_arguments_reach_every_unit():
    root = apply_plan(Nested(), plan(NESTED), device=CPU, limit_all_gathers=False)
    assert not any(module.limit_all_gathers for module in FullyShardedDataParallel.fsdp_modules(root))


def test_meta_tensors_are_left_to_an_initialisation_of_the_callers():
    with torch.device("meta"):
        model = Nested()

    def ones(module):
        if list(module.parameters(recurse=False)):
            module.to_empty(device=CPU, recurse=False)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data.fill_(1)

    root = apply_plan(model, plan(NESTED), device=CPU, param_init_fn=ones)
    assert all(parameter.eq(1).all() for parameter in root.parameters())


def test_a_missing_module_is_named():
    for units, missing in (({**NESTED, "tail": ([], "DP")}, "tail"), ({"": (["gone", ""], "DP")}, "gone")):
        unit = "tail" if missing == "tail" else ""
        text = f"^Expected the model to have the modules of the plan's unit '{unit}', but '{missing}' is not there."
        with pytest.raises(PlanMismatchError, match=text):
            apply_plan(Nested(), plan(units), device=CPU)


def test_an_operator_that_fsdp_would_put_elsewhere_is_named():
    units = {**NESTED, "": (["", "block.1.0"], "DP"), "block.1": (["block.1.1"], "DP")}
    text = (
        r"^Expected operator 'block\.1\.0' inside unit '', as the plan says, but fully_shard would .* into unit"
        r" 'block\.1'\."
    )
    with pytest.raises(PlanMismatchError, match=text):
        apply_plan(Nested(), plan(units), device=CPU)


def test_a_parameter_that_the_plan_does_not_know_is_named():
    units = {name: unit for name, unit in NESTED.items() if name != "head"}
    text = r"^Expected the plan to say where every parameter goes, but no unit holds the operator of 'head\.weight'\."
    with pytest.raises(PlanMismatchError, match=text):
        apply_plan(Nested(), plan(units), device=CPU)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_unit_of_two_dtypes_is_refused_before_anything_is_wrapped(where):
    with torch.device(where):
        model = Nested()
    model.block[1][1].double()
    text = (
        r"unit 'block\.1' would hold 'block\.1\.0\.weight' \(torch\.float32\) and 'block\.1\.1\.weight'"
        r" \(torch\.float64\)\. Give them one dtype, .*min_unit_bytes=0\)\.$"
    )
    with pytest.raises(ConfigurationError, match=text):
        apply_plan(model, plan(NESTED), device=CPU)
    assert not any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    assert {parameter.device.type for parameter in model.parameters()} == {where}


def test_a_root_that_does_not_reduce_in_every_micro_batch_is_refused():
    good = plan(NESTED)
    bad = dataclasses.replace(good, units=(dataclasses.replace(good.units[0], sync="last"), *good.units[1:]))
    with pytest.raises(
        ConfigurationError, match=r"^Expected the root unit to reduce .*, got sync='last': .*'every'\.$"
    ):
        apply_plan(Nested(), bad, device=CPU)


def test_units_reduced_last_add_up_whole_gradients_until_one_micro_batch_reduces():
    made = plan(NESTED)
    units = [dataclasses.replace(unit, sync="last" if unit.name == "block.1" else "every") for unit in made.units]
    last = dataclasses.replace(made, units=tuple(units))
    root = apply_plan(Nested(), last, device=CPU)
    found = units_reduced_last(root, last)
    assert [unit is root.module.block[1] for unit in found] == [True]
    units = FullyShardedDataParallel.fsdp_modules(root)
    with contextlib.suppress(RuntimeError), without_reducing(found):
        before = [unit._sync_gradients for unit in units]
        raise RuntimeError
    assert before.count(False) == 1
    assert all(unit._sync_gradients for unit in units)
