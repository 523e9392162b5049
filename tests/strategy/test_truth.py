"""Plans that are shown, saved and logged are those that run: fitted, resumed, after a dry run, and fitted again."""

import dataclasses

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy, PlanMonitor
from lightning_osdp.core.axes import freed_and_kept
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.strategy.checkpointing import entries
from tests.strategy.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("one_rank")


class Block(nn.Module):
    """Counts its forwards: one that recomputes has two in a step."""

    def __init__(self):
        super().__init__()
        self.layers, self.count = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)), [0]

    def forward(self, x):
        self.count[0] += 1
        return x + self.layers(x)


class Net(L.LightningModule):
    """`steps` has the size of each micro-batch, and the names of blocks that ran once more for its backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.steps = []

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            block.count[0] = 0
            x = block(x)
        return x.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        ran_again = {f"blocks.{index}" for index, block in enumerate(self.blocks) if block.count[0] > 1}
        self.steps.append((len(batch), ran_again))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def fit(tmp_path, stated_links):
    """Fits a model, or goes on with a Trainer; links are stated. Checks all that is said of the plan."""

    def run(folder, *, module=None, trainer=None, loader_size=32, ckpt_path=None, accumulate=1, length=4, **options):
        module = module or Net()
        trainer = trainer or quiet_trainer(
            OSDPStrategy(**options),
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            default_root_dir=tmp_path / folder,
        )
        trainer.fit_loop.max_epochs = trainer.current_epoch + (2 if ckpt_path else 1)
        module.steps.clear()
        trainer.fit(module, DataLoader(torch.ones(128, length, 256), batch_size=loader_size), ckpt_path=ckpt_path)
        path = tmp_path / folder / f"{loader_size}-{trainer.current_epoch}.ckpt"
        trainer.save_checkpoint(path)
        check(trainer, module, path)
        return trainer, module, path

    return run


def check(trainer, module, path):
    plan = trainer.strategy.plan
    (monitor,) = [callback for callback in trainer.callbacks if isinstance(callback, PlanMonitor)]
    assert Plan.load(path.with_name("osdp_plan.json")) == entries.read_plan(path) == monitor._plan == plan
    assert {size for size, _ in module.steps} == {plan.micro_batch_size}
    assert trainer.accumulate_grad_batches == plan.num_micro_batches
    assert entries.stored_division(torch.load(path, weights_only=True)) in (None, workload_of(plan))
    assert all(ran_again == {block.name for block in plan.blocks} for _, ran_again in module.steps)
    run = {unit.name: (unit.treatment,) for unit in trainer.strategy._sharded.units}
    assert {unit.name: unit.treatments for unit in plan.units} == run


def test_what_is_said_of_the_plan_is_what_runs(fit):
    trainer, module, path = fit("fit")
    plan = trainer.strategy.plan
    assert plan.micro_batch_size == 32
    fit("fit", trainer=trainer, module=module)
    fit("fit", trainer=trainer, module=module, loader_size=16)
    fit("resumed", ckpt_path=path)

    # a plan is given, whose root is sharded as no root is, whose micro-batches are not the loader's, without the blocks
    root, *others = plan.units
    root = dataclasses.replace(root, treatments=tuple(freed_and_kept(each)[0] for each in root.treatments))
    given = dataclasses.replace(plan, units=(root, *others), blocks=())
    fit("given", plan=given)
    assert fit("kept", plan=given, batch_size="keep", loader_size=16)[0].strategy.plan.micro_batch_size == 16
    policy = {"activation_checkpointing_policy": {Block}}
    for options in ({"plan": given}, {}):
        trainer, module, _ = fit(f"policy{len(options)}", **policy, **options)
        assert [block.name for block in trainer.strategy.plan.blocks] == ["blocks.0", "blocks.1"]
    fit("policy0", trainer=trainer, module=module)


@pytest.mark.filterwarnings("ignore:OSDP. dry run. rank 0 ran out of memory")
def test_what_is_said_after_a_dry_run_has_changed_the_plan_is_what_runs(fit):
    plan = fit("fit", length=16)[0].strategy.plan
    short = dataclasses.replace(plan, memory_limit_bytes=round(0.8 * plan.peak_bytes))
    trainer, module, _ = fit("dry", plan=short, dry_run=True, length=16)
    assert trainer.strategy.plan.notes[-1].startswith("dry run: rank 0 ran out of memory")
    fit("dry", trainer=trainer, module=module, length=16)
