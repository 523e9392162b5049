"""Blocks that save less: what the profile says of them is what a model that checkpoints them itself is profiled as."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.slices import split_operators
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.recomputation import KeptResults
from lightning_osdp.planner.cost import exact_peak
from lightning_osdp.planner.engine import FSDP2, freed_bytes, with_activations
from lightning_osdp.planner.search.levels import ENOUGH
from lightning_osdp.profiler import profile_model
from lightning_osdp.profiler.tracing.calls import recorded_calls
from lightning_osdp.profiler.tracing.trace import find_blocks
from tests.support.steps import step_of
from tests.support.tiers import slow

EVERYTHING = ("keep", "recompute", "offload", "recompute_offload")
WIDTH, LENGTH = 16, 8
INPUT_BYTES = 4 * LENGTH * WIDTH


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, scale=1.0):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + scale * self.out(F.scaled_dot_product_attention(q, k, v)), None


class Model(nn.Module):
    """Blocks of two kinds in turn, between a first and a last layer."""

    def __init__(self, num_blocks=4, recomputed=()):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.mlps = nn.ModuleList(Mlp() for _ in range(num_blocks))
        self.attentions = nn.ModuleList(Attention() for _ in range(num_blocks))
        self.recomputed = dict.fromkeys(recomputed, ()) if isinstance(recomputed, tuple) else recomputed

    def run(self, name, x, **kwargs):
        """Blocks that recompute keep these results of heavy operations."""
        block = self.get_submodule(name)
        if name not in self.recomputed:
            return block(x, **kwargs)
        if self.recomputed[name]:
            kwargs["context_fn"] = KeptResults(self.recomputed[name]).contexts
        return checkpoint(block, x, use_reentrant=False, **kwargs)

    def training_step(self, batch, batch_idx):
        x = self.first(batch)
        for index in range(len(self.mlps)):
            x, _ = self.run(f"attentions.{index}", x, scale=0.5)
            x = self.run(f"mlps.{index}", x)
        return self.last(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def profiled(model, activations=("keep",), **options):
    return profile_model(model, torch.randn(4, LENGTH, WIDTH), activations=activations, **options)


def peak(profile, mode, world_size):
    step = step_of(profile, world_size=world_size, micro_batch_size=32)
    modes = [DP if unit.is_root else mode for unit in step.units]
    return exact_peak(step, modes, engine=FSDP2(backward_prefetch="none"))


@pytest.fixture(scope="module")
def model():
    return profiled(Model(), EVERYTHING)


@pytest.mark.parametrize(
    "recomputed",
    [
        slow(()),
        slow(("mlps.0",)),
        slow(("attentions.0", "mlps.0")),
        slow(("mlps.3",)),
        slow(("attentions.1", "mlps.2", "attentions.3")),
        tuple(f"{kind}.{index}" for index in range(4) for kind in ("attentions", "mlps")),
    ],
)
def test_the_peak_is_that_of_a_model_that_checkpoints_these_blocks_itself(model, recomputed):
    own = profiled(Model(recomputed=recomputed))
    mixed = with_activations(model, dict.fromkeys(recomputed, "recompute"))
    for mode, world_size in ((DP, 1), (DP, 4), (ZDP, 4)):
        found, expected = peak(mixed, mode, world_size), peak(own, mode, world_size)
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=2e-3)
        assert (found.phase, found.operator) == (expected.phase, expected.operator)


@pytest.fixture(scope="module")
def with_levels():
    """Profile with levels, by rates by which products take nearly all seconds and each byte of a result as many."""
    rates = DeviceRates(flops_per_s={"float32": 1e9}, bytes_per_s=1e12)
    return profiled(Model(), ("keep", "recompute", "selective"), rates=rates)


def test_equal_blocks_have_equal_levels_that_keep_more_and_run_less_again(with_levels):
    by_kind = {}
    for block in with_levels.blocks:
        by_kind.setdefault(block.name.partition(".")[0], []).append(block)
    for kind, (first, *others) in by_kind.items():
        assert first.levels, kind
        assert all(other.levels == first.levels for other in others)
        freed = [freed_bytes(with_levels, first, choice).at(4) for choice in ("recompute", *first.levels)]
        seconds = [first.rerun_s.at(4), *(level.rerun_s.at(4) for level in first.levels.values())]
        assert freed == sorted(freed, reverse=True)
        assert len({*freed}) == len(freed)
        assert seconds == sorted(seconds, reverse=True)
        assert len({*seconds}) == len(seconds)
        assert first.level_gap <= ENOUGH
    # the product of the first layer and the two of attention, of four; the last one does not run again
    assert [*by_kind["attentions"][0].levels.values()][-1].kept == (0, 1, 2)
    assert [*by_kind["mlps"][0].levels.values()][-1].kept == (0, 1)


def test_the_bytes_of_a_level_are_those_of_its_results(with_levels):
    """Elements of 4 bytes: as wide as the layers, and as long as the sequence between the products of attention."""
    widths = {"attentions": {0: 3 * WIDTH, 1: LENGTH, 2: WIDTH}, "mlps": {0: 4 * WIDTH, 1: WIDTH}}
    for block in with_levels.blocks:
        whole = freed_bytes(with_levels, block, "recompute").at(4)
        for value, level in block.levels.items():
            kept = sum(4 * LENGTH * 4 * widths[block.name.partition(".")[0]][position] for position in level.kept)
            assert whole - freed_bytes(with_levels, block, value).at(4) == pytest.approx(kept)


@pytest.mark.parametrize("everywhere", [False, slow(True)])
def test_the_peak_at_levels_is_that_of_a_model_that_keeps_these_results_itself(with_levels, everywhere):
    chosen = {}
    for number, block in enumerate(with_levels.blocks):
        values = [*block.levels] if everywhere else ["keep", "recompute", *block.levels]
        chosen[block.name] = values[number // 2 % len(values)]
    blocks = {block.name: block for block in with_levels.blocks}
    recomputed = {
        name: blocks[name].levels[value].kept if value in blocks[name].levels else ()
        for name, value in chosen.items()
        if value != "keep"
    }
    own = profiled(Model(recomputed=recomputed))
    mixed = with_activations(with_levels, chosen)
    for mode, world_size in ((DP, 1), (DP, 4), (ZDP, 4)):
        found, expected = peak(mixed, mode, world_size), peak(own, mode, world_size)
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=2e-3)
        assert (found.phase, found.operator) == (expected.phase, expected.operator)


def test_a_block_that_recomputes_saves_its_inputs(model):
    assert [block.name for block in model.blocks] == [
        f"{kind}.{index}" for index in range(4) for kind in ("attentions", "mlps")
    ]
    for block in model.blocks:
        saved = [segment.saved_bytes for segment in block.segments["recompute"]]
        assert saved == [Affine(0.0, INPUT_BYTES), Affine(), Affine()]
        first, last = block.span
        forward_s = [segment.forward_s.at(4) for segment in model.segments[first : last + 1]]
        if block.name.startswith("attentions."):  # nothing is saved from the last layer on
            assert block.rerun_s.at(4) == pytest.approx(sum(forward_s[:-1]))
        else:
            assert sum(forward_s[:-1]) < block.rerun_s.at(4) < sum(forward_s)
        kept = sum(segment.saved_bytes.at(4) for segment in model.segments[first : last + 1])
        assert freed_bytes(model, block, "recompute").at(4) == pytest.approx(kept - 4 * INPUT_BYTES)


def test_what_is_offloaded_is_what_would_have_been_saved(model):
    for block in model.blocks:
        assert not any(segment.saved_bytes.at(4) for segment in block.segments["offload"])
        assert freed_bytes(model, block, "offload").at(4) == block.copied_bytes["offload"].at(4) > 0
        assert block.copied_bytes["recompute_offload"] == Affine(0.0, INPUT_BYTES)
        assert freed_bytes(model, block, "recompute_offload").at(4) > freed_bytes(model, block, "recompute").at(4)
    everything = {block.name: "offload" for block in model.blocks}
    moved = peak(with_activations(model, everything), DP, 1).peak_bytes
    recomputed = peak(with_activations(model, dict.fromkeys(everything, "recompute")), DP, 1).peak_bytes
    assert moved < recomputed < peak(model, DP, 1).peak_bytes


def test_profiling_blocks_changes_nothing_else(model):
    plain = profiled(Model())
    assert plain.blocks == ()
    for found, expected in zip(model.segments, plain.segments, strict=True):
        assert found.saved_bytes == expected.saved_bytes
        assert found.backward_workspace_bytes == expected.backward_workspace_bytes


def test_slices_and_blocks_go_together(model):
    chosen = with_activations(model, {"mlps.1": "recompute", "mlps.2": "offload"})
    split = split_operators(chosen, {"mlps.1.up": 4, "first": 2})
    (first, last), is_early, modules = split.rerun["mlps.1"]
    assert ((first, last),) == split.spans["mlps.1"]
    assert (last - first + 1, is_early) == (3 + 3, True)
    slices = {f"mlps.1.up.slices.{index}" for index in range(4)}
    assert {*modules} == {"mlps.1.norm", "mlps.1.down", *slices}
    assert split.copied[0][0] == split.spans["mlps.2"][0]


def test_what_was_not_profiled_is_refused(model):
    with pytest.raises(
        ConfigurationError, match=r"block 'first' to be one that was profiled with activations='offload'"
    ):
        with_activations(model, {"first": "offload"})
    only = profiled(Model(num_blocks=2), ("keep", "recompute"))
    with pytest.raises(ConfigurationError, match=r"'mlps.0'.*activations='offload', got those of \[\]"):
        with_activations(only, {"mlps.0": "offload"})


class Nested(nn.Module):
    """Containers inside blocks, a block that is called twice, and layers that are no blocks."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Mlp(), Mlp()) for _ in range(2))
        self.twice = nn.ModuleList([Mlp(), Mlp()])
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.alone = nn.ModuleList([Mlp(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        for block in (*self.twice, *self.twice, *self.alone):
            x = block(x)
        return self.layers(x)


def test_blocks_are_the_outermost_repeated_modules_that_are_called_once():
    model = Nested()
    with recorded_calls(model) as calls:
        model(torch.randn(2, LENGTH, WIDTH))
    assert find_blocks(model, calls) == {"stages.0": (0, 5), "stages.1": (6, 11)}


def test_a_model_that_cannot_be_run_again_keeps_what_it_saves(monkeypatch, caplog):
    forward = Mlp.forward

    def once(self, x):
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("called in backward\nand so on")
        return forward(self, x)

    monkeypatch.setattr(Mlp, "forward", once)
    found = profiled(Model(num_blocks=2), ("keep", "recompute"))
    assert found.blocks == ()
    note = "blocks are not planned to recompute, for the step fails then: called in backward"
    assert found.notes == (note,)
    assert f"OSDP: {note}\n" in caplog.text
    model = Model(num_blocks=2)
    model.config = SimpleNamespace(use_cache=True)
    (note,) = profiled(model, ("keep", "recompute")).notes
    assert note.endswith("set model.config.use_cache = False)")


class Heads(Attention):
    def forward(self, x, *, scale=1.0):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        return x + scale * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


def test_blocks_that_run_compiled_code_have_no_levels_and_none_are_inside_of_what_is_compiled_whole():
    rates = DeviceRates(flops_per_s={"float32": 1e9}, bytes_per_s=1e12)
    found = []
    for compiled, options in ("mlps.0.up", {}), ("mlps.1", {"fullgraph": True}), ("mlps", {"fullgraph": True}):
        model = Model(num_blocks=2)
        model.get_submodule(compiled).compile(backend="eager", **options)
        found.append(profiled(model, ("keep", "recompute", "selective"), rates=rates).blocks)
    assert [[block.name for block in blocks] for blocks in found] == [
        *[["attentions.0", "mlps.0", "attentions.1", "mlps.1"]] * 2,
        ["attentions.0", "attentions.1"],
    ]
    assert not any(block.levels for blocks in found[:2] for block in blocks)
    assert all(block.levels for block in found[2])


def test_blocks_whose_kernels_only_forward_chooses_keep_what_they_save():
    class Chosen(Model):
        def __init__(self):
            super().__init__(num_blocks=2)
            self.attentions = nn.ModuleList(Heads() for _ in self.attentions)

        def training_step(self, batch, batch_idx):
            with sdpa_kernel(SDPBackend.MATH):
                return super().training_step(batch, batch_idx)

    found = profiled(Chosen(), ("keep", "recompute", "selective"))
    assert found.blocks == ()
    (note,) = found.notes
    assert note.startswith("blocks are not planned to recompute, for the step fails then: ")
    assert "different" in note


@pytest.mark.slow
def test_of_many_equal_blocks_a_few_are_traced():
    deep = profiled(Model(num_blocks=12), ("keep", "recompute"))
    assert len(deep.blocks) == 24
    assert {block.segments["recompute"][0].saved_bytes for block in deep.blocks} == {Affine(0.0, INPUT_BYTES)}


def test_a_block_that_saves_something_after_its_last_operator_is_run_again_early(model):
    early = {block.name.split(".")[0]: block.reruns_early for block in model.blocks}
    assert early == {"attentions": False, "mlps": True}  # the dropout after its last layer makes it so
