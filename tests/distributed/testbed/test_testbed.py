"""Counts with one process for rank 0 of N, against counts in real ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.families import build
from benchmarks.testbed.beside_fsdp.engines import ByHand
from benchmarks.testbed.beside_fsdp.lightning_fsdp import PARALLELIZED, SPARSE, Way
from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.simulated import SimulatedLinks
from benchmarks.testbed.step import Step
from benchmarks.testbed.training import quiet, train
from lightning_osdp.apply import local
from lightning_osdp.apply.internals import in_flight
from lightning_osdp.operations.reduce_scatter import reduce_scatter
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


def counted(*, name, optimizer, modes, world_size, precision="32-true", prefetch="pre", num_micro_batches=1):
    """Peak of each phase on this rank of the default process group."""
    torch.set_num_threads(1)
    module = build(name, optimizer=optimizer)
    plan = plan_of(
        module,
        modes,
        world_size=world_size,
        micro_batch_size=2,
        num_micro_batches=num_micro_batches,
        backward_prefetch=prefetch,
    )
    return count_step(module, plan, precision=precision, num_steps=5 if dist.get_backend() == "gloo" else 1).phases


def reduced(*, num_elements, op, ranks_of_group=None):
    """Returns this rank's shard by ours and by gloo's, in a group (None: all ranks), and if ours left its input."""
    group = None if ranks_of_group is None else dist.new_group(ranks_of_group)
    if group is not None and dist.get_rank() not in ranks_of_group:
        return None
    op, num_ranks = getattr(dist.ReduceOp, op), dist.get_world_size(group)
    whole = (1.0 + dist.get_rank()) * torch.arange(num_elements * num_ranks)
    ours, expected, before = torch.empty(num_elements), torch.empty(num_elements), whole.clone()
    dist.reduce_scatter_single(expected, whole.clone(), op=op, group=group)
    reduce_scatter(ours, whole, op=op, group=group)
    return ours.tolist(), expected.tolist(), torch.equal(whole, before)


def reduced_in_flight(how):
    """Squares of weights after steps with torch's own reduce-scatter and with ours, and how many were begun.

    Args:
        how: units are sharded "by hand" or "by a plan".
    """
    found, begin = [], mock.Mock(side_effect=in_flight.begin_all_to_all)
    for is_in_flight in (False, True):
        module = build("tiny", optimizer="sgd_momentum")
        plan = plan_of(
            module,
            {f"model.blocks.{index}": mode for index, mode in enumerate(("ZDP", "DP", "ZDP"))},
            world_size=dist.get_world_size(),
            micro_batch_size=2,
        )
        with mock.patch.object(in_flight, "begin_all_to_all", begin):
            by_hand = how == "by hand" or not is_in_flight
            step = ByHand(module, plan, is_in_flight=is_in_flight) if by_hand else Step(module, plan)
            for _ in range(3):
                step()
        if not by_hand:
            step.sharded.reshard()
        found.append([float(local(parameter).detach().square().sum()) for parameter in module.parameters()])
    return *found, begin.call_count


MLP = {"layers.0": "ZDP", "layers.1": "DP", "layers.2": "ZDP", "layers.5": "ZDP"}
GPT = {f"model.blocks.{i}": mode for i, mode in enumerate(("DP", "ZDP", "DP"))}


@pytest.mark.parametrize(
    "case",
    [
        slow({"name": "odd_mlp", "optimizer": "adamw", "precision": "32-true", "modes": MLP, "world_size": 3}),
        {"name": "odd_mlp", "optimizer": "sgd_momentum", "modes": MLP, "prefetch": "none", "num_micro_batches": 3},
        slow({"name": "tied", "optimizer": "adamw_foreach", "precision": "bf16-mixed", "modes": GPT}),
    ],
)
def test_rank_0_of_n_alone_counts_what_real_ranks_count(ranks, case):
    case = {"world_size": 2, **case}
    real = ranks(case["world_size"]).run(counted, **case)[0]
    with simulated_group(case["world_size"], SimulatedLinks(copies_reduced=True)):
        alone = counted(**case)
    # the least of several steps: a thread of gloo may hold a tensor longer than the step does
    assert alone == pytest.approx(real, rel=1e-3)
    with fake_group(case["world_size"]):
        fake = counted(**case)
    for phase in ("reduce-scatter", "backward"):  # what gloo reduces is received beside it, while backward computes
        assert fake.pop(phase) < alone.pop(phase)
    assert fake == alone


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize(
    ("world_size", "group"), [(2, None), slow(3, None), slow(3, [2, 1]), slow(3, [0, 2]), slow(3, [1])]
)
def test_a_reduce_scatter_gives_what_gloos_does(ranks, world_size, group, op):
    found = ranks(world_size).run(reduced, num_elements=5, op=op, ranks_of_group=group)
    for rank, result in enumerate(found):
        if group is not None and rank not in group:
            assert result is None
            continue
        ours, expected, is_left_alone = result
        assert ours == pytest.approx(expected, rel=1e-6)
        assert is_left_alone


@pytest.mark.parametrize("how", ["by a plan", "by hand"])
def test_units_reduce_while_backward_computes(ranks, how):
    for by_torch, ours, num_begun in ranks(2).run(reduced_in_flight, how=how):
        assert num_begun == 12  # three blocks and the root, in three steps
        assert ours == pytest.approx(by_torch, rel=1e-5)


def sparse_beside_dense():
    """Difference of weights after SGD by DDP with sparse gradients from those with dense ones, and which are sparse."""
    trained = []
    for way, module in ((Way(sharding=SPARSE), build("tiny")), (Way(sharding="DDP"), build("tiny", optimizer="sgd"))):
        plan = way.plan(build("tiny"), world_size=dist.get_world_size(), micro_batch_size=1)
        with quiet():
            train(module, plan, num_steps=2, strategy=way.strategy(module))
        trained.append(module)
    pairs = zip(*(module.parameters() for module in trained), strict=True)
    off = max((sparse - dense).abs().max().item() for sparse, dense in pairs)
    return off, [name for name, child in trained[0].named_modules() if getattr(child, "sparse", False)]


def test_ddp_with_sparse_gradients_of_embeddings_trains_as_with_dense_ones(ranks):
    for off, sparse in ranks(2).run(sparse_beside_dense):
        assert off < 1e-6
        assert sparse == ["model.token_embedding", "model.position_embedding"]


def parallelized(name):
    """Difference from one process that trains on the samples of all ranks, and numbers of weights that are cut."""
    way, whole, module = Way(sharding=PARALLELIZED), build(name), build(name)
    plan = way.plan(build(name), world_size=dist.get_world_size(), micro_batch_size=1)
    with quiet():
        train(module, plan, num_steps=2, strategy=way.strategy(module))
    optimizer, batch = whole.configure_optimizers(), whole.batch(dist.get_world_size())
    for _ in range(2):
        optimizer.zero_grad()
        whole.loss(batch).backward()
        optimizer.step()
    cut = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()}
    found = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    off = max((found[name] - p).abs().max().item() for name, p in whole.named_parameters())
    return off, len(cut)


@pytest.mark.parametrize(("name", "num_cut"), [("tiny like Llama", 23), slow("tiny", 11), slow("3 wide Linears", 5)])
def test_tensor_parallelism_by_hand_trains_on_the_samples_of_all_ranks(ranks, name, num_cut):
    for off, number in ranks(2).run(parallelized, name=name):
        assert off < 1e-4
        assert number == num_cut
