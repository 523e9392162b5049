import pytest
import torch
from torch import nn

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler import fingerprint
from lightning_osdp.profiler.tracing.operators import check_parameters


def test_fingerprint_names_shape_dtype_frozen_and_tied():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2, bias=False).double(), nn.Linear(3, 2))
    model[1].weight.requires_grad_(False)
    model[2].weight = model[0].weight
    assert fingerprint(model) == {
        "0.weight": "float32[2, 3]",
        "0.bias": "float32[2]",
        "1.weight": "float64[2, 3] frozen",
        "2.weight": "float32[2, 3] tied to 0.weight",
        "2.bias": "float32[2]",
    }


def test_fingerprint_of_a_shared_module_has_both_names():
    shared = nn.Linear(2, 2, bias=False)
    names = fingerprint(nn.ModuleDict({"a": shared, "b": shared}))
    assert names == {"a.weight": "float32[2, 2]", "b.weight": "float32[2, 2] tied to a.weight"}


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ProfileError, match=r"^Expected ReLU to have parameters to shard, but it has none\. Create its"):
        check_parameters(nn.ReLU())


def test_a_scalar_parameter_is_refused():
    model = nn.ParameterDict({"temperature": torch.tensor(1.0)})
    text = (
        r"^fully_shard cannot shard a scalar parameter, but 'temperature' has shape \[\]\. .*value\.reshape\(1\)\)\.$"
    )
    with pytest.raises(ProfileError, match=text):
        check_parameters(model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_is_refused():
    with pytest.raises(ProfileError, match=r"'0\.weight' is created by the first batch .*in configure_model"):
        check_parameters(nn.Sequential(nn.LazyLinear(3)))
