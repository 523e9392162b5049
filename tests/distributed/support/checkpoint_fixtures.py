"""Checkpoints that an earlier version wrote, and their model; as the ranks write, load and go on with them."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPStrategy
from lightning_osdp.apply.states.state import numbered
from lightning_osdp.operations.splitting import cuts_of, join_states, split
from tests.distributed.support.fits import trainer
from tests.distributed.support.models import BATCH_SIZE, NUM_SAMPLES, Base
from tests.distributed.support.split_models import AtStart, differing

OPTIMIZERS = ("adamw", "momentum")
NUM_STEPS = 3
"""Number of steps after which checkpoints are saved."""
FOLDER = Path(__file__).parents[2] / "fixtures" / "checkpoints"


class Varied(Base):
    """A tie, a frozen operator, buffers of three kinds, sizes that nothing divides, and an operator that is split."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.tokens = nn.Embedding(19, 14)
        self.up, self.down = nn.Linear(14, 23), nn.Linear(23, 14)
        self.frozen = nn.Linear(14, 14).requires_grad_(False)
        self.norm = nn.LayerNorm(14)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(14, 19, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("shift", torch.full((3, 1), 0.1))
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("forgotten", torch.ones(2), persistent=False)

    def loss(self, batch):
        self.num_calls += 1
        x = self.tokens(batch[0])
        x = self.frozen(self.norm(x + self.down(F.gelu(self.up(x))))) + self.shift.mean()
        return F.cross_entropy(self.head(x * self.scale).flatten(0, 1), batch[1].flatten())

    def dataset(self):
        tokens = torch.randint(0, 19, (NUM_SAMPLES, 5), generator=torch.Generator().manual_seed(4))
        return TensorDataset(tokens, (tokens * 3 + 1) % 19)

    def same_loader(self):
        """Loads the same samples on every rank: gradients of two ranks are, to the bit, those of one process."""
        return DataLoader(self.dataset(), batch_size=BATCH_SIZE)

    def configure_optimizers(self):
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        names = dict(self.named_parameters())
        plain = [name for name in names if name.endswith("bias") or name.startswith("norm")]
        groups = [
            {"params": [names[name] for name in plain], "weight_decay": 0.0},
            {"params": [p for name, p in names.items() if name not in plain], "weight_decay": 0.1},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def strategy(module, kind="full"):
    """Makes a strategy with a plan of two slices of an operator."""
    modes = {"up": "ZDP", "down": ("ZDP", "DP"), "frozen": "ZDP"}
    plan = plan_of(module, modes, world_size=dist.get_world_size(), micro_batch_size=BATCH_SIZE)
    return OSDPStrategy(plan=plan, batch_size="keep", state_dict_type=kind)


def write(folder):
    """A file and a folder for each optimizer, after some steps on all ranks."""
    for name in OPTIMIZERS:
        for kind, suffix in (("full", ".pt"), ("sharded", "")):
            module = Varied(name)
            fit = trainer(strategy(module, kind), max_steps=NUM_STEPS)
            fit.fit(module, module.same_loader())
            fit.save_checkpoint(Path(folder) / f"{name}{suffix}")


def plainly_trained(name, num_steps):
    """Whole weights and a plain optimizer's state after training in one process, in the same slices."""
    module = Varied(name)
    split(module.down, 2)
    optimizer, batches = module.configure_optimizers(), list(module.same_loader())
    for step in range(num_steps):
        optimizer.zero_grad()
        module.loss(batches[step % NUM_STEPS]).backward()  # a loader without a state of its own begins anew
        optimizer.step()
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = {
        "state": {names[parameter]: fields for parameter, fields in optimizer.state.items()},
        "param_groups": [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups],
    }
    joined = numbered(join_states(state, cuts_of(module)))
    return {
        "state_dict": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer_states": [joined],
    }


def expected(name, folder):
    """State of one process that trained likewise, on the machine that wrote the checkpoints: others round otherwise."""
    return torch.load(Path(folder) / f"{name}-expected.pt", weights_only=True)


def goes_on(checkpoints, folder=FOLDER):
    """Resumes from each checkpoint: what differs from what was saved, the last step, and how far off it ends."""
    found = {}
    for checkpoint in checkpoints:
        name = checkpoint.split(".")[0].split("-")[0]
        wrong, module = [], Varied(name)

        def compare(trainer, wrong=wrong, name=name):
            wrong += [trainer.global_step, *differing(trainer, expected(name, folder))]

        fit = trainer(strategy(module), max_steps=NUM_STEPS + 2, callbacks=[AtStart(compare)])
        fit.fit(module, module.same_loader(), ckpt_path=Path(folder) / checkpoint)
        state = fit.strategy.lightning_module_state_dict()
        if dist.get_rank() == 0:
            end = plainly_trained(name, NUM_STEPS + 2)["state_dict"]
            off = max(float((state[key] - value).abs().max()) for key, value in end.items())
            found[checkpoint] = (wrong, fit.global_step, off)
    return found
