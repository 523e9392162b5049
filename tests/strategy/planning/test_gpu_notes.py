"""Notes about GPUs before training; no device is needed to compile for one."""

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn

from benchmarks.testbed.plans import plan_of
from lightning_osdp.strategy.planning.gpu_notes import warn_of_gpu
from lightning_osdp.strategy.planning.plan_fit import UNVALIDATED, with_note

CUDA = torch.device("cuda")


def told(module, device=CUDA):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_gpu(module, device)
    return [str(each.message) for each in found]


class Model(L.LightningModule):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)


def in_place(**options):
    layer = nn.Linear(2, 2)
    layer.compile(**options)
    return Model(nn.Linear(2, 2), layer)


def wrapped(**options):
    return Model(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), **options))


def by_lightning(**options):
    return from_compiled(torch.compile(Model(nn.Linear(2, 2)), **options))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's compiler, imported
@pytest.mark.parametrize(
    ("make", "name"), [(in_place, "'layers.1'"), (wrapped, "'layers.1'"), (by_lightning, "'the model'")]
)
def test_cuda_graphs_are_told_of(make, name):
    for options in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        module = make(**options)
        assert told(module, torch.device("cpu")) == []
        (text,) = told(module)
        assert text.startswith(f"OSDP: {name} is compiled with CUDA graphs, which hold addresses of parameters.")
        assert 'mode="default" or "max-autotune-no-cudagraphs"' in text
    for options in ({}, {"mode": "max-autotune-no-cudagraphs"}, {"backend": "eager"}):
        assert told(make(**options)) == []


def test_algorithms_of_convolutions_that_are_tried_are_told_of(monkeypatch):
    module = Model(nn.Conv2d(1, 1, 3))
    assert told(module) == []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert told(Model(nn.Linear(2, 2))) == []
    (text,) = told(module)
    assert "(benchmark=True), with workspaces that no plan counts." in text


def test_a_plan_that_was_made_elsewhere_says_on_a_gpu_that_it_is_unvalidated():
    plan = plan_of(Model(nn.Linear(2, 2)), {}, world_size=1, micro_batch_size=1)
    assert with_note(plan, torch.device("cpu")) is plan
    noted = with_note(plan, CUDA)
    assert noted.notes == (UNVALIDATED,)
    assert with_note(noted, CUDA) is noted
