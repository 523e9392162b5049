import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_osdp.apply import ShardedModel, apply_plan
from lightning_osdp.apply.internals import access
from lightning_osdp.errors import ConfigurationError, PlanFormatError, PlanMismatchError
from tests.support.wrapped_units import NESTED, NESTED_PARAMETERS, Nested, plan, units_of

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_rank")


def test_units_hold_exactly_what_the_plan_says():
    found = units_of(apply_plan(Nested(), plan(NESTED), device=CPU))
    assert {name: held for name, (held, _) in found.items()} == NESTED_PARAMETERS


def test_everything_may_be_in_the_root():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    found = units_of(apply_plan(model, plan({"": (["0", "1"], "DP")}), device=CPU))
    assert found == {"": (["0.weight", "0.bias", "1.weight", "1.bias"], "DP")}


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
    assert root[0][0].weight is root[0][1].weight


def test_names_frozen_parameters_and_buffers_stay():
    plain, model = Nested(), Nested()
    assert apply_plan(model, plan(NESTED), device=CPU) is model
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == [
        (name, p.requires_grad) for name, p in plain.named_parameters()
    ]
    assert [b.dtype for b in model.buffers()] == [b.dtype for b in plain.buffers()]
    x = torch.randn(3, 4)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("prefetch", "forward"), [("pre", True), ("pre", False), ("none", False)])
def test_prefetching_is_the_plans(prefetch, forward):
    """Compares the forward prefetch of the units' states with the plan's."""
    chosen = dataclasses.replace(plan(NESTED), backward_prefetch=prefetch, forward_prefetch=forward)
    root = apply_plan(Nested(), chosen, device=CPU)
    states = [access.state_of(module) for module in root.modules() if isinstance(module, FSDPModule)]
    assert len(states) == len(NESTED)
    assert any(state._states_to_forward_prefetch for state in states) == forward


def test_an_argument_without_a_counterpart_is_refused():
    with pytest.raises(ConfigurationError, match=r"^OSDPStrategy cannot take limit_all_gathers=False: .*Leave it out"):
        apply_plan(Nested(), plan(NESTED), device=CPU, limit_all_gathers=False)


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


def test_a_plan_that_no_file_could_have_is_refused():
    chosen = dataclasses.replace(plan(NESTED), num_micro_batches=0)
    with pytest.raises(PlanFormatError, match=r"^Expected 'num_micro_batches' of the plan to be at least 1, got 0\."):
        apply_plan(Nested(), chosen, device=CPU)


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


def test_a_unit_of_two_dtypes_is_refused_before_anything_is_sharded():
    model = Nested()
    model.block[1][1].double()
    text = (
        r"unit 'block\.1' would hold 'block\.1\.0\.weight' \(torch\.float32\) and 'block\.1\.1\.weight'"
        r" \(torch\.float64\)\. Give them one dtype, .*min_unit_bytes=0\)\.$"
    )
    with pytest.raises(ConfigurationError, match=text):
        apply_plan(model, plan(NESTED), device=CPU)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_units_reduced_last_add_up_whole_gradients_until_one_micro_batch_reduces():
    made = plan(NESTED)
    units = [unit.treated(sync="last" if unit.name == "block.1" else "every") for unit in made.units]
    sharded = ShardedModel.planned(Nested(), dataclasses.replace(made, units=tuple(units)), device=CPU)

    def reducing():
        groups = {unit.name: access.group_of(unit.handle) for unit in sharded.units}
        return {name: group.reduce_grads for name, group in groups.items() if group is not None}

    with sharded.accumulating():
        assert [name for name, reduces in reducing().items() if not reduces] == ["block.1"]
    assert all(reducing().values())
