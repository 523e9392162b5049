"""Training with units that move activations is training: equal to DDP, saved and resumed under any plan."""

import copy
import dataclasses
import re
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from lightning_osdp import Cluster, OSDPStrategy, SearchSpace
from lightning_osdp.apply import change_plan
from lightning_osdp.core.axes import NODE_STATIONARY, STATIONARY, Treatment
from lightning_osdp.core.cluster import Link
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.operations.stationary import is_stationary
from lightning_osdp.strategy.dry_run import run_dry
from lightning_osdp.strategy.planning import plan_fit
from tests.distributed.support.fits import largest_difference, moving, shared_folder
from tests.distributed.support.models import GPT, Attending, AttendingByHead, WideAttention, WideGated, WideMLP
from tests.distributed.support.user_runs import Chain, ddp, difference, fitted, moved, plan_with, refusal
from tests.distributed.users.test_user_models import Adversarial, Curvature, Penalty
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

EXCHANGES = {
    GPT: [
        ("embedding", ("tokens",)),
        ("attention", ("blocks.0.qkv", "blocks.0.proj")),
        ("pair", ("blocks.0.fc", "blocks.0.out")),
        ("column", ("blocks.1.qkv",)),
        ("row", ("blocks.1.proj",)),
        ("pair", ("blocks.1.fc", "blocks.1.out")),
        ("column", ("head",)),
    ],
    Chain: [("pair", ("first", "second")), ("row", ("third",)), ("column", ("last",))],
    WideGated: [("pair", ("gate", "up", "down"))],
    WideAttention: [("column", ("query", "key", "value"))],
    Attending: [
        ("attention", tuple(f"blocks.{index}.1.{name}" for name in ("query", "key", "value", "output")))
        for index in range(2)
    ],
    AttendingByHead: [
        *(("heads", (f"blocks.{index}.1.qkv", f"blocks.{index}.1.output")) for index in range(2)),
        *(("gated", (f"blocks.{index}.2.gate_up", f"blocks.{index}.2.down")) for index in range(2)),
    ],
}


def stationary_plan(make, kind="mixed", *, exchanges=None, blocks=(), mode=STATIONARY, **options):
    """A plan whose other units take turns in the modes of a kind."""
    plan = plan_with(make, kind, **options)
    found = moving(plan, EXCHANGES[type(make())] if exchanges is None else exchanges, mode)
    return dataclasses.replace(found, blocks=tuple(blocks))


def differences(make, *, optimizer="adamw", kind="mixed", blocks=(), dtype="float64", mode=STATIONARY, **options):
    """Difference of weights and losses from DDP's, how far weights moved, and what moved activations."""
    make = partial(make, optimizer)
    number = options.get("accumulate_grad_batches", 1)
    plan = stationary_plan(make, kind, blocks=blocks, dtype=dtype, mode=mode, num_micro_batches=number)
    by_ddp = fitted(ddp(), make(), dtype=dtype, **options)
    own = fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), make(), dtype=dtype, **options)
    module = own[2].lightning_module
    return {
        "ddp": difference(own, by_ddp),
        "moved": moved(by_ddp[0], make),
        "stationary": sum(is_stationary(child) for child in module.modules()),
        "plan": own[2].strategy.plan == Plan.from_json(plan.to_json()),
    }


CASES = {
    "adamw": {"optimizer": "adamw"},
    "accumulated": {"optimizer": "sgd", "accumulate_grad_batches": 2},
    "norm": {"optimizer": "sgd", "gradient_clip_val": 0.05},
    "value": {"optimizer": "sgd", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated norm": {"optimizer": "sgd", "accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "recomputed": {"blocks": [Block(name="blocks.0", treatment=Treatment(saves="recompute"))]},
    "offloaded": {"blocks": [Block(name="blocks.0", treatment=Treatment(saves="offload"))]},
}


def cases(names, make=GPT, kind="mixed", mode=STATIONARY):
    return {name: differences(make, kind=kind, mode=mode, max_steps=3, **CASES[name]) for name in names}


TWO = ["accumulated norm"]


@pytest.mark.parametrize(
    ("world_size", "kind", "mode", "names"),
    [
        (2, "mixed", STATIONARY, ["value", "recomputed", "offloaded", *TWO]),  # AdamW where blocks recompute
        (4, "nodes", STATIONARY, TWO),
        (4, "nodes", NODE_STATIONARY, TWO),
        *(
            slow(*case, [*CASES])
            for case in (
                (2, "mixed", STATIONARY),
                (4, "mixed", STATIONARY),
                (4, "nodes", STATIONARY),
                (4, "nodes", NODE_STATIONARY),
            )
        ),
    ],
)
def test_training_equals_ddp(ranks, world_size, kind, mode, names):
    """Beside units that are sharded over all ranks, or in nodes of two; activations move over all, or in nodes."""
    for found in ranks(world_size).run(cases, names=names, kind=kind, mode=mode):
        for name, each in found.items():
            assert each["stationary"] == 13, name  # with three slices of the operator of queries, keys and values
            assert each["plan"], name
            assert each["moved"] > 1e-3, name
            assert each["ddp"] < (1e-7 if "norm" in name else 1e-9), name  # torch adds 1e-6 to a norm


@pytest.mark.parametrize("make", [WideGated, WideAttention])
def test_training_of_operators_that_take_one_input_equals_ddp(ranks, make):
    for found in ranks(2).run(cases, names=["adamw", *TWO], make=make):
        for name, each in found.items():
            assert each["stationary"] == 3, name
            assert each["moved"] > 1e-5, name
            assert each["ddp"] < (1e-7 if "norm" in name else 1e-9), name


@pytest.mark.parametrize(
    ("world_size", "kind", "mode", "names"),
    [
        (2, "mixed", STATIONARY, ["adamw", *TWO]),
        (4, "mixed", STATIONARY, ["adamw"]),
        slow(4, "mixed", STATIONARY, ["value", "accumulated", *TWO]),
        slow(4, "nodes", NODE_STATIONARY, ["adamw", *TWO]),
    ],
)
def test_training_of_attention_by_heads_equals_ddp(ranks, world_size, kind, mode, names):
    for found in ranks(world_size).run(cases, names=names, make=Attending, kind=kind, mode=mode):
        for name, each in found.items():
            assert each["stationary"] == 8, name
            assert each["plan"], name
            assert each["moved"] > 1e-4, name
            assert each["ddp"] < (1e-7 if "norm" in name else 1e-9), name


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_training_of_operators_that_make_a_head_or_gates_and_values_equals_ddp(ranks, world_size):
    for found in ranks(world_size).run(cases, names=["adamw", *TWO], make=AttendingByHead):
        for name, each in found.items():
            assert each["stationary"] == 12, name  # with two slices of the operators of gates and values
            assert each["plan"], name
            assert each["moved"] > 1e-4, name
            assert each["ddp"] < (1e-7 if "norm" in name else 1e-9), name


class OfTransformers(GPT):
    """A decoder of transformers, with two heads of keys and values for four of queries."""

    def __init__(self, optimizer="adamw"):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__(optimizer, layers=0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        self.model = LlamaForCausalLM(config)
        del self.tokens, self.positions, self.norm, self.head

    def loss(self, batch):
        return self.model(input_ids=batch[0], labels=batch[1]).loss


PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o")]
EXCHANGES[OfTransformers] = [
    ("attention", tuple(f"model.model.layers.{index}.self_attn.{name}" for name in PROJECTIONS)) for index in range(2)
]


def test_training_of_attention_of_transformers_equals_ddp(ranks):
    pytest.importorskip("transformers")
    for found in ranks(2).run(differences, make=OfTransformers, max_steps=3):
        assert found["stationary"] == 8
        assert found["moved"] > 1e-3
        assert found["ddp"] < 1e-9


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_training_of_single_precision_equals_ddp(ranks, world_size):
    for found in ranks(world_size).run(differences, make=Chain, optimizer="sgd", dtype="float32"):
        assert found["stationary"] == 4
        assert found["moved"] > 1e-3
        assert found["ddp"] < 1e-5


EXCHANGES |= dict.fromkeys((Adversarial, Curvature, Penalty), EXCHANGES[Chain])


def asking():
    """Differences of models that ask for gradients of their inputs within a step, and learn from these."""
    return [differences(make, max_steps=4) for make in (Adversarial, Curvature, Penalty)]


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_training_with_slopes_of_slopes_equals_ddp(ranks, world_size):
    for found in ranks(world_size).run(asking):
        for each in found:
            assert each["stationary"] == 4
            assert each["moved"] > 1e-3
            assert each["ddp"] < 1e-9


def mixed_precision():
    """As DDP's to the precision of bfloat16, beside a plan that moves weights."""
    make = partial(GPT, "sgd")
    options = {"precision": "bf16-mixed", "dtype": None}
    by_ddp = fitted(ddp(), make(), **options)
    plans = {"weights": plan_with(make, "mixed", dtype=None), "activations": stationary_plan(make, dtype=None)}
    found = {
        name: difference(fitted(OSDPStrategy(plan=plan), make(), **options), by_ddp) for name, plan in plans.items()
    }
    return {**found, "moved": moved(by_ddp[0], make)}


@pytest.mark.slow
def test_mixed_precision_is_as_near_to_ddp_as_where_weights_move(ranks):
    for found in ranks(2).run(mixed_precision):
        assert 0 < found["activations"] < max(2 * found["weights"], 2e-2)
        assert found["moved"] > 5e-2


class GatheringHeads(GPT):
    """Reads and writes whole weights of one operator of queries, keys and values, which is a plain one meanwhile."""

    def on_train_batch_end(self, *_):
        if self.trainer.global_step != 2:
            return
        strategy, qkv = self.trainer.strategy, self.blocks[0].qkv
        if not isinstance(strategy, OSDPStrategy):
            qkv.weight.data.mul_(0.5)
            return
        whole = strategy.whole_state_dict(on_all_ranks=True)
        with strategy.gathered(write_back=True):
            assert type(qkv) is nn.Linear
            assert [*dict(self.named_parameters())] == [name for name in whole if name in dict(self.named_parameters())]
            assert all(torch.equal(value, whole[name]) for name, value in self.state_dict().items())
            qkv.weight.data.mul_(0.5)
            assert type(copy.deepcopy(self.blocks)[0].qkv) is nn.Linear
        assert [*dict(qkv.named_children())] == ["slices"]
        copy.deepcopy(nn.ModuleList())  # a class that slices are held by


EXCHANGES[GatheringHeads] = EXCHANGES[GPT]


def warned_of(optimizer):
    """Warnings before a plan trains, one of whose operators makes queries, keys and values, with this optimizer."""
    make = partial(GPT, "sgd")
    plan, module = stationary_plan(make), make()
    module.configure_optimizers = lambda: optimizer(module.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(OSDPStrategy(plan=plan), module, max_steps=1)
    return [str(each.message) for each in told if "looks at whole parameters" in str(each.message)]


class OwnSGD(torch.optim.SGD):
    """SGD that nobody knows to be one."""


@pytest.mark.parametrize(("optimizer", "is_told"), [(torch.optim.SGD, False), (OwnSGD, True)])
def test_optimizers_that_may_look_at_whole_parameters_are_warned_of(ranks, optimizer, is_told):
    found = ranks(2).run(warned_of, optimizer=optimizer)
    assert [len(texts) for texts in found] == [int(is_told), 0]
    assert all(f"slices that {optimizer.__name__} updates one by one" in text for text in found[0])


class Gathering(Chain):
    """Reads and writes whole weights while it trains."""

    def on_train_batch_end(self, *_):
        if self.trainer.global_step != 2:
            return
        strategy = self.trainer.strategy
        if not isinstance(strategy, OSDPStrategy):
            self.first.weight.data.mul_(0.5)
            return
        whole = strategy.whole_state_dict(on_all_ranks=True)
        with strategy.gathered(write_back=True):
            assert type(self.first) is nn.Linear
            assert not any(isinstance(parameter, DTensor) for parameter in self.parameters())
            assert all(torch.equal(value, whole[name]) for name, value in self.state_dict().items())
            self.first.weight.data.mul_(0.5)
            self.first(torch.zeros(1, 7, dtype=torch.float64))  # each rank by itself
        with strategy.gathered():
            self.first.weight.data.mul_(7)  # is not kept
        assert is_stationary(self.first)


EXCHANGES[Gathering] = EXCHANGES[Chain]


@pytest.mark.parametrize("make", [Gathering, GatheringHeads])
def test_gathered_modules_are_whole_and_write_back(ranks, make):
    for found in ranks(2).run(differences, make=make):
        assert found["ddp"] < 1e-10
        assert found["moved"] > 1e-3


def saves(strategy):
    """Trains three steps; returns the path of what it saves."""
    folder = shared_folder()
    keeper = ModelCheckpoint(dirpath=folder, filename="saved", every_n_train_steps=3, save_top_k=-1)
    fitted(strategy, GPT("adamw"), callbacks=[keeper], enable_checkpointing=True, max_steps=3)
    return str(folder / "saved.ckpt")


def whole_round(kind, mode=STATIONARY):
    """Differences of five steps from DDP's, all resumed after three: under a plan of this kind and under another."""
    make = partial(GPT, "adamw")
    others = ("mixed", "zdp") if mode == STATIONARY else ("nodes", "nodes")
    expected = fitted(ddp(), make(), ckpt_path=saves(ddp()), max_steps=5)[0]
    saved, again = (stationary_plan(make, of_others, mode=mode) for of_others in others)
    path = saves(OSDPStrategy(plan=saved, node_size=saved.node_size, state_dict_type=kind))
    plans = {"activations": again, "weights": plan_with(make, "mixed")}
    found = {
        name: fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), make(), ckpt_path=path, max_steps=5)[0]
        for name, plan in plans.items()
    }
    if dist.get_rank():
        return {}
    return {name: largest_difference(state, expected) for name, state in found.items()} | {"path": path}


@pytest.mark.parametrize(
    ("world_size", "kind", "mode"),
    [
        slow(2, "full", STATIONARY),
        (2, "sharded", STATIONARY),
        *(slow(4, kind, NODE_STATIONARY) for kind in ("full", "sharded")),
    ],
)
def test_checkpoints_are_resumed_under_either_plan(ranks, world_size, kind, mode):
    found = ranks(world_size).run(whole_round, kind=kind, mode=mode)[0]
    assert found["activations"] < 1e-9
    assert found["weights"] < 1e-9


def weights_of(path):
    """Whole weights and moments that a fit of no more steps loads, summed."""
    make = partial(GPT, "adamw")
    state, _, fit = fitted(OSDPStrategy(plan=stationary_plan(make)), make(), ckpt_path=path, max_steps=3)
    (optimizer,) = fit.optimizers
    moments = [fields["exp_avg"].full_tensor().abs().sum() for fields in optimizer.state.values()]
    return state, float(sum(moments))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints_are_loaded_by_other_numbers_of_ranks(ranks, kind):
    path = ranks(2).run(whole_round, kind=kind)[0]["path"]
    of_two, of_four = ranks(2).run(weights_of, path=path), ranks(4).run(weights_of, path=path)
    assert largest_difference(of_two[0][0], of_four[0][0]) == 0.0
    assert of_two[0][1] == pytest.approx(of_four[0][1], rel=1e-12)


def loads_under_plain_names():
    """Loads whole weights into the module as it trains, and gives a state dict of the same."""
    make = partial(Chain, "sgd")
    module = make().double()
    fit = fitted(OSDPStrategy(plan=stationary_plan(make)), module, max_steps=1)[2]
    state = {name: value + 1 for name, value in fit.strategy.whole_state_dict(on_all_ranks=True).items()}
    module.load_state_dict(state)
    found = fit.strategy.whole_state_dict(on_all_ranks=True)
    return max(float((found[name] - state[name]).abs().max()) for name in state), [*found] == [*make().state_dict()]


def test_whole_state_dicts_are_loaded_into_parts(ranks):
    assert ranks(2).run(loads_under_plain_names) == [(0.0, True)] * 2


class Skipping(Chain):
    """Does not call a layer on one rank, in one step. Between that layer and the next one that moves activations no
    unit is gathered, which ranks would wait for after the first steps."""

    units = ("first", "second", "third", "last")

    def __init__(self, optimizer="adamw", *, step=0, in_evaluation=False):
        super().__init__(optimizer)
        self.step, self.in_evaluation = step, in_evaluation

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        at = self.trainer.global_step >= self.step and self.in_evaluation != self.training
        skips = at and dist.get_rank() == 1
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.second(hidden))
        hidden = hidden if skips else self.third(hidden)
        return F.mse_loss(self.last(self.norm(hidden)) * self.scale, y)


EXCHANGES[Skipping] = EXCHANGES[Chain]


def skips(step, in_evaluation):
    make = partial(Skipping, step=step, in_evaluation=in_evaluation)
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 1} if in_evaluation else {}
    return refusal(lambda: fitted(OSDPStrategy(plan=stationary_plan(make, "dp"), dry_run=False), make(), **options))


@pytest.mark.parametrize(("step", "in_evaluation"), [(0, False), (4, False), (0, True)])
def test_ranks_that_do_not_call_an_operator_are_told_apart_before_the_exchange(ranks, step, in_evaluation):
    for text in ranks(2).run(skips, step=step, in_evaluation=in_evaluation):
        assert text is not None
        assert text.startswith("RanksApartError: Expected every rank to run the same modules in the same order")


BETWEEN = {
    "number": lambda h: h * (1.0 + dist.get_rank()),
    "function": lambda h: torch.relu(h) if dist.get_rank() else torch.tanh(h),
    "text": lambda h: F.gelu(h, approximate="tanh" if dist.get_rank() else "none"),
}


class Differing(Chain):
    """Applies other functions on each rank between a pair, in training or in an evaluation."""

    def __init__(self, optimizer="adamw", *, between="number", in_evaluation=False):
        super().__init__(optimizer)
        self.between, self.in_evaluation = BETWEEN[between], in_evaluation

    def features(self, x):
        h = self.first(x)
        h = self.between(h) if self.training != self.in_evaluation else torch.tanh(h)
        return torch.tanh(self.third(self.second(h)))


EXCHANGES[Differing] = EXCHANGES[Chain]


def differs(between, in_evaluation):
    make = partial(Differing, between=between, in_evaluation=in_evaluation)
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 1} if in_evaluation else {}
    return refusal(lambda: fitted(OSDPStrategy(plan=stationary_plan(make), dry_run=False), make(), **options))


@pytest.mark.parametrize(("between", "in_evaluation"), [*((name, False) for name in BETWEEN), ("number", True)])
def test_ranks_that_apply_other_functions_between_a_pair_are_told_apart(ranks, between, in_evaluation):
    for text in ranks(2).run(differs, between=between, in_evaluation=in_evaluation):
        assert text is not None
        assert text.startswith(
            "RanksApartError: Expected every rank to apply the same functions, with the same numbers"
        )


class Masked(Attending):
    """Attention with a mask that is of each rank, in training or in an evaluation."""

    def __init__(self, optimizer="adamw", *, in_evaluation=False):
        super().__init__(optimizer)
        self.in_evaluation = in_evaluation

    def loss(self, batch):
        mask = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        mask[-1, 0] = dist.get_rank() == 0 or self.training == self.in_evaluation
        for block in self.blocks:
            block[1].mask = mask
        return super().loss(batch)


EXCHANGES[Masked] = EXCHANGES[Attending]


def masked(in_evaluation):
    make = partial(Masked, in_evaluation=in_evaluation)
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 1} if in_evaluation else {}
    return refusal(lambda: fitted(OSDPStrategy(plan=stationary_plan(make), dry_run=False), make(), **options))


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_masks_that_differ_between_ranks_are_told_apart(ranks, in_evaluation):
    for text in ranks(2).run(masked, in_evaluation=in_evaluation):
        assert text is not None
        assert text.startswith("RanksApartError: Expected every rank to apply the same functions")


class DryRunning(Chain):
    """Runs a step dry when training starts, and keeps what it returns."""

    def on_train_start(self):
        before = self.trainer.strategy.whole_state_dict(on_all_ranks=True)
        state = torch.get_rng_state()
        self.dry = run_dry(self.trainer, self.trainer.strategy._sharded)
        after = self.trainer.strategy.whole_state_dict(on_all_ranks=True)
        self.stayed = torch.equal(state, torch.get_rng_state()) and all(
            torch.equal(before[name], after[name]) for name in before
        )


class Indexed(GPT):
    on_train_start = DryRunning.on_train_start


EXCHANGES |= {DryRunning: EXCHANGES[Chain], Indexed: EXCHANGES[GPT]}


def runs_dry(kind, mode):
    found = []
    for make in (DryRunning, Indexed):
        module, plan = make(), stationary_plan(make, kind, mode=mode)
        fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), module, max_steps=1)
        found.append((module.dry.error, module.dry.place, module.stayed))
    return found


@pytest.mark.parametrize(("world_size", "kind", "mode"), [(2, "mixed", STATIONARY), slow(4, "nodes", NODE_STATIONARY)])
def test_a_dry_run_takes_a_step_alone_and_leaves_all_as_it_was(ranks, world_size, kind, mode):
    assert ranks(world_size).run(runs_dry, kind=kind, mode=mode) == [[("", "", True)] * 2] * world_size


class OfItsOwn(Chain):
    """Begins with other weights on each rank; one rank may change its part of some after the first steps."""

    def __init__(self, optimizer="adamw", *, drifts=False):
        super().__init__(optimizer)
        self.drifts = drifts
        with torch.no_grad():
            self.first.weight.add_(dist.get_rank())

    def on_train_batch_start(self, batch, index):
        if self.drifts and index == 1 and dist.get_rank() == 3:
            self.first.weight.data.mul_(2)


EXCHANGES[OfItsOwn] = EXCHANGES[Chain]


def in_nodes():
    """Tells if weights are cut in nodes, and if nodes have the same after two steps; gives the error of others."""
    make, drifting = OfItsOwn, partial(OfItsOwn, drifts=True)
    plan = stationary_plan(make, "nodes", mode=NODE_STATIONARY)
    fit = fitted(OSDPStrategy(plan=plan, node_size=2), make(), max_steps=2)[2]
    module = fit.lightning_module
    parts = [None] * 4
    dist.all_gather_object(parts, [each.to_local().detach() for each in (module.first.weight, module.third.weight)])
    are_equal = all(torch.equal(*each) for each in zip(parts[0] + parts[1], parts[2] + parts[3], strict=True))
    cut = [module.first.weight.placements, module.third.weight.placements]
    are_cut = cut == [(Replicate(), Shard(0)), (Replicate(), Shard(1))]
    error = refusal(lambda: fitted(OSDPStrategy(plan=plan, node_size=2), drifting(), max_steps=4))
    return are_cut, are_equal, error


@pytest.mark.slow
def test_nodes_begin_with_the_same_weights_and_are_told_apart_where_these_differ_later(ranks):
    for are_cut, are_equal, error in ranks(4).run(in_nodes):
        assert are_cut
        assert are_equal
        assert error is not None
        assert error.startswith("RanksApartError: Expected every node to have the same values of each parameter")
        assert "'first.weight'" in error


class Normalized(Chain):
    """Something between a pair that is not elementwise."""

    def __init__(self, optimizer="adamw", *, between="batch"):
        super().__init__(optimizer)
        self.between = nn.BatchNorm1d(6) if between == "batch" else nn.Softmax(-1)

    def features(self, x):
        return torch.tanh(self.third(self.second(self.between(self.first(x)))))


class Hooked(Chain):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.third.register_forward_hook(lambda *_: None)


class Compiled(Chain):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.third.compile(backend="eager")


def refused(plan, make):
    """The error of a fit of a model under a plan."""
    return refusal(lambda: fitted(OSDPStrategy(plan=plan, dry_run=False), make()))


def refusals():
    found = {}
    for name, make, exchanges in (
        ("batch", partial(Normalized, between="batch"), [("pair", ("first", "second"))]),
        ("softmax", partial(Normalized, between="softmax"), [("pair", ("first", "second"))]),
        ("hooked", Hooked, [("row", ("third",))]),
        ("norm", Chain, [("column", ("norm",))]),
        ("compiled", Compiled, [("row", ("third",))]),
    ):
        found[name] = refused(stationary_plan(make, exchanges=exchanges), make)
    return found


TEXTS = {
    "batch": "ConfigurationError: Expected only elementwise functions of one tensor between 'first' and 'second'",
    "softmax": "got softmax, which runs _softmax",
    "hooked": "ConfigurationError: Expected unit 'third' to be able to move activations as 'row', .* 'third' has hooks",
    "compiled": "Expected unit 'third' to be able to move activations as 'row', .* 'third' is compiled, or inside",
    "norm": "'norm' is torch.nn.modules.normalization.LayerNorm",
}


def test_models_that_cannot_are_refused_on_all_ranks_with_the_reason(ranks):
    for found in ranks(2).run(refusals):
        for name, text in TEXTS.items():
            assert found[name] is not None, name
            assert re.search(text, found[name]), (name, found[name])


def averages():
    """Difference of averaged weights from DDP's."""
    found = []
    for strategy in (ddp(), OSDPStrategy(plan=stationary_plan(Chain))):
        averaging = EMAWeightAveraging(decay=0.5)
        fitted(strategy, Chain(), callbacks=[averaging])
        found.append(averaged(averaging))
    return largest_difference(*found) if dist.get_rank() == 0 else 0.0


def averaged(averaging):
    state = averaging._average_model.module.state_dict()
    return {name.removeprefix("module."): value.detach().clone() for name, value in sorted(state.items())}


def test_averages_of_weights_equal_those_of_ddp(ranks):
    assert max(ranks(2).run(averages)) < 1e-10


def evaluates():
    """Losses of an evaluation under both strategies, and the error of a change to a plan that moves weights."""
    make = Chain
    module, plain = make().double(), make().double()
    plan = stationary_plan(make)
    options = {"max_steps": 2, "limit_val_batches": 2}
    fit = fitted(OSDPStrategy(plan=plan), module, **options)[2]
    other = fitted(ddp(), plain, **options)[2]
    loader = DataLoader(module.dataset(), batch_size=7)
    (own,), (expected,) = (
        each.validate(model, loader, verbose=False) for each, model in ((fit, module), (other, plain))
    )
    changed = refusal(lambda: change_plan(module, plan_with(make, "mixed")))
    return abs(own["val_loss"] - expected["val_loss"]), changed


def test_evaluations_equal_ddp_and_what_moves_cannot_change(ranks):
    for difference_of_losses, text in ranks(2).run(evaluates):
        assert difference_of_losses < 1e-10
        assert text.startswith("PlanMismatchError: Expected a plan that differs from the one in use only in what may")


def alone():
    """One rank trains under such a plan as plain torch does."""
    make = partial(Chain, "adamw")
    return difference(fitted(OSDPStrategy(plan=stationary_plan(make)), make()), fitted(ddp(), make()))


def test_one_rank_exchanges_nothing(ranks):
    assert ranks(1).run(alone)[0] < 1e-10


SPACE = SearchSpace(modes=("ZDP", "DP", "stationary"), min_unit_bytes=0, slices=(1,), activations=("keep",))


def searched(make, space=SPACE):
    """Difference from DDP, and the operators that move activations in a plan of the strategy's own."""
    with mock.patch.object(plan_fit, "measure_cluster", return_value=slow_cluster()):
        own = fitted(OSDPStrategy(search_space=space, dry_run=True), make("sgd"), max_steps=3)
    by_ddp = fitted(ddp(), make("sgd"), max_steps=3)
    units = own[2].strategy.plan.units
    return difference(own, by_ddp), [unit.operators for unit in units if "moves" in unit.treatments[0]]


def slow_cluster():
    link = Link(latency_s=1e-6, seconds_per_byte=1e-6)
    return Cluster(world_size=dist.get_world_size(), all_gather=link, reduce_scatter=link, memory_bytes=2**34)


def test_plans_of_the_strategys_own_train_as_ddp(ranks):
    for off, names in ranks(2).run(searched, make=WideMLP):
        assert off < 1e-10
        assert names
    for off, names in ranks(2).run(searched, make=WideGated):
        assert off < 1e-10
        assert ("gate", "up", "down") in names
    for off, names in ranks(2).run(searched, make=WideAttention):
        assert off < 1e-10
        assert ("query", "key", "value") in names


def unasked():
    return [searched(make, None) for make in (WideMLP, WideGated, GPT)]


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_plans_for_which_nobody_has_named_modes_train_as_ddp(ranks, world_size):
    for found in ranks(world_size).run(unasked):
        assert max(off for off, _ in found) < 1e-10
        assert all(names for _, names in found[:2])


class PartlyCompiled(WideMLP):
    """Its second and its third layer, which would be a pair, are compiled together."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        first, second, third, *others = self.layers
        self.layers = nn.Sequential(first, nn.Sequential(second, third), *others)
        self.layers[1].compile(backend="eager")


def test_what_is_compiled_moves_weights_beside_others_that_move_activations(ranks):
    for off, names in ranks(2).run(searched, make=PartlyCompiled):
        assert off < 1e-10
        assert names
        assert not any(name.startswith("layers.1.") for each in names for name in each)
