"""The precision plugin: device of autocast, clipping by norm, double precision."""

import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch.distributed.fsdp import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp import OSDPPrecision, OSDPStrategy


def test_autocast_runs_on_the_device_in_use():
    plugin = OSDPPrecision("bf16-mixed")
    plugin.use_device(torch.device("cpu"))
    with plugin.forward_context():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16


def test_true_precision_computes_in_the_parameters_own_dtype():
    # whose dtypes callbacks of Lightning read
    assert OSDPPrecision("32-true").mixed_precision_config == MixedPrecision()
    assert OSDPPrecision("64-true").mixed_precision_config == MixedPrecision()
    assert OSDPPrecision("bf16-mixed").mixed_precision_config.param_dtype == torch.bfloat16


def test_double_precision_converts_module_and_inputs():
    plugin = OSDPPrecision("64-true")
    assert plugin.convert_module(torch.nn.Linear(2, 2)).weight.dtype == torch.float64
    assert plugin.convert_input(torch.ones(2)).dtype == torch.float64


def test_the_strategy_takes_lightnings_plugin_for_its_own():
    strategy = OSDPStrategy()
    assert isinstance(strategy.precision_plugin, OSDPPrecision)
    strategy.precision_plugin = FSDPPrecision("bf16-mixed")
    assert isinstance(strategy.precision_plugin, OSDPPrecision)
    assert strategy.precision_plugin.precision == "bf16-mixed"


def clip(parameters, limit):
    plugin = OSDPPrecision("32-true")
    plugin.use_device(torch.device("cpu"))
    plugin.clip_grad_by_norm(torch.optim.SGD(parameters, lr=1.0), limit)


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    num = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.num += 1
        return operation(*args, **(kwargs or {}))


def test_clipping_takes_as_many_operations_whatever_the_number_of_parameters():
    counted = []
    for number in (2, 20):
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        with Operations() as operations:
            clip(parameters, 0.5)
        counted.append(operations.num)
        torch.testing.assert_close(torch.stack([p.grad for p in parameters]).norm(), torch.tensor(0.5))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_norm_is_torchs_on_one_rank(dtype, limit):
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 5)]
    for parameter in parameters:
        parameter.grad = torch.arange(parameter.numel(), dtype=dtype) + 1
    expected = [parameter.grad.clone() for parameter in parameters]
    norm = float(torch.cat(expected).norm())
    clip(parameters, limit)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * min(1.0, limit / (norm + 1e-6)))


def test_no_gradient_and_no_limit_change_nothing():
    parameter = torch.nn.Parameter(torch.zeros(3))
    clip([parameter], 1.0)
    assert parameter.grad is None
    parameter.grad = torch.full((3,), 7.0)
    clip([parameter], 0.0)
    assert parameter.grad.tolist() == [7.0, 7.0, 7.0]
