"""A literal plan in, a figure out, whose boxes, bands, lines and words are read; and the file that it is saved to."""

import dataclasses
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from lightning_osdp.core.axes import LEVELS, Treatment, named
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.planner.engine import Moment
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.picture import BANDS, HATCHES, KINDS, LIMIT_COLOUR, draw_plan, save_picture
from tests.support.plans import menu

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def unit(name, *modes, mib=4):
    return Unit(
        name=name,
        operators=(name,),
        kind="Linear",
        treatments=named(*modes),
        parameter_bytes=int(mib * MIB),
        time_s=mib * 1e-3,
        menu=menu(mib * 3e-4, int(mib * MIB)),
    )


PLAN = Plan(
    fingerprint={},
    world_size=2,
    units=(unit("", "ZDP", mib=1), unit("wide", "DP", mib=6), unit("h.fc", "ZDP", mib=2), unit("head", "DP", mib=1)),
    memory_limit_bytes=64 * MIB,
    peak_bytes=62 * MIB,
    micro_batch_size=8,
    num_micro_batches=1,
    step_time_s=0.18,
    samples_per_s=88.9,
    gap=0.0,
    all_zdp_step_time_s=0.2,
    all_zdp_peak_bytes=48 * MIB,
)


def moment(phase, mib, operator="wide"):
    parts = {"parameter shards": 10 * MIB, "gathered parameters": mib * MIB}
    return Moment(num_bytes=sum(parts.values()), phase=phase, operator=operator, parts=parts)


MOMENTS = (
    moment("forward", 20),
    moment("forward", 30, ""),
    moment("backward", 52),
    moment("reduce-scatter", 40),
    moment("optimizer step", 0, ""),
)

RECOMPUTING = dataclasses.replace(
    PLAN,
    blocks=(
        Block(name="wide", treatment=Treatment(saves="recompute"), frees_bytes=MIB, costs_s=1e-3),
        Block(name="h", treatment=Treatment(saves="recompute_offload")),
    ),
)


def words(figure):
    from matplotlib.text import Text

    return [line for text in figure.findobj(Text) for line in text.get_text().split("\n")]


def boxes(figure):
    """Left, width, height, kind and hatch of each box of a unit."""
    from matplotlib.colors import same_color

    return [
        (
            box.get_x(),
            box.get_width(),
            box.get_height(),
            next(kind for kind, (colour, _) in KINDS.items() if same_color(colour, box.get_facecolor())),
            box.get_hatch(),
        )
        for box in figure.axes[0].patches
    ]


def bands(figure):
    """Words and highest value of each band of memory, from below."""
    return [(band.get_label(), max(band.get_data().values)) for band in figure.axes[1].patches]


def limits(figure):
    """Returns the heights at which lines of the limit are."""
    return [line.get_ydata()[0] for line in figure.axes[1].lines if line.get_color() == LIMIT_COLOUR]


def names(figure):
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def told(figure):
    """Entries of the legend of units."""
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_units_are_boxes_in_forward_order_as_wide_as_their_parameters():
    figure = draw_plan(PLAN)
    assert names(figure) == ["(root)", "wide", "h.fc", "head"]
    assert [width for _, width, *_ in boxes(figure)] == pytest.approx([0.1, 0.6, 0.2, 0.1])
    assert [left for left, *_ in boxes(figure)] == pytest.approx([0, 0.1, 0.7, 0.9])
    assert [kind for *_, kind, _ in boxes(figure)] == ["root", "DP", "ZDP", "DP"]
    assert told(figure) == ["root: always gathered", "ZDP: freed, gathered again", "DP: gathered once, kept"]


def test_a_colour_means_one_thing():
    colours = [colour for colour, _ in (*KINDS.values(), *BANDS.values())]
    assert len({*colours, LIMIT_COLOUR}) == len(colours) + 1


def test_slices_of_a_unit_are_stacked():
    split = dataclasses.replace(PLAN, units=(*PLAN.units[:3], unit("head", "DP", "ZDP", "ZDP", "ZDP")))
    assert [(height, kind) for _, _, height, kind, _ in boxes(draw_plan(split))[3:]] == [(0.25, "DP"), (0.75, "ZDP")]


def test_units_in_which_blocks_recompute_or_offload_are_hatched():
    recompute, in_part, offload = (HATCHES[each][0] for each in ("recompute", "selective", "offload"))
    at_level = Block(name="head", treatment=Treatment(saves=LEVELS[0]), kept=(0,))
    figure = draw_plan(dataclasses.replace(RECOMPUTING, blocks=(*RECOMPUTING.blocks, at_level)))
    assert [hatch or "" for *_, hatch in boxes(figure)] == ["", recompute, recompute + offload, in_part]
    assert told(figure)[3:] == ["blocks in it recompute", "blocks in it recompute in part", "blocks in it offload"]
    assert (
        "activations: wide recomputed in backward: 1.00 MiB fewer at the end of forward, 1.00 ms more a step"
        in words(figure)
    )
    assert "activations: h recomputed in backward, inputs offloaded to host memory" in words(figure)


def test_the_title_says_what_is_predicted():
    assert draw_plan(PLAN).get_suptitle().split("\n") == [
        "OSDP plan: 2 units DP, 1 unit ZDP",
        "step time: 180 ms predicted for one optimizer step",
        "samples/s: 88.9 predicted, all ranks together",
        "gain: 11.1% more samples/s than plain FSDP: 200 ms a step, peak 48.0 MiB",
        "batch: 8 samples x 1 micro-batch x 2 ranks = 16 samples per optimizer step",
    ]


def test_the_peak_stands_below_the_limit():
    figure = draw_plan(PLAN, memory=MOMENTS)
    assert {"peak 62.0 MiB, 96.9% of the limit, in the backward of wide", "limit is 64.0 MiB"} <= {*words(figure)}
    assert bands(figure) == [("shards, optimizer state, buffers, batch", 10), ("gathered parameters", 62)]
    assert limits(figure) == [64]
    assert figure.axes[1].get_ylabel() == "MiB"


def test_every_part_of_a_simulated_step_belongs_to_a_band(model, cluster):
    profile = model(40, 80)
    ring = cluster(2)
    plan = make_plan(profile, ring, memory_limit_bytes=10**4, micro_batch_size=BatchPolicy.fixed(1, 3))
    assert {unit.sync for unit in plan.units} == {"every", "last"}
    drawn = {part for _, parts in BANDS.values() for part in parts}
    for _, moment in simulate(plan, profile, ring).moments:
        assert sum(moment.parts[part] for part in drawn) == pytest.approx(moment.num_bytes)


def test_forward_backward_and_the_optimizer_are_named_once():
    labels = draw_plan(PLAN, memory=MOMENTS).axes[1].get_xticklabels()
    assert [label.get_text() for label in labels] == ["forward", "backward", "optimizer step"]


def test_a_limit_far_above_is_said_rather_than_drawn():
    figure = draw_plan(dataclasses.replace(PLAN, memory_limit_bytes=2**40), memory=MOMENTS)
    assert "limit is 1.00 TiB, far above" in words(figure)
    assert limits(figure) == []


def test_without_moments_the_peak_is_told_in_words():
    figure = draw_plan(PLAN)
    (axes,) = figure.axes
    assert "62.0 MiB of 64.0 MiB (96.9%)" in axes.get_xlabel()
    assert any("than plain FSDP: 200 ms a step, peak 48.0 MiB" in line for line in words(figure))
    (axes,) = draw_plan(dataclasses.replace(PLAN, peak_bytes=0, all_zdp_peak_bytes=0)).axes
    assert "0 B of 64.0 MiB" in axes.get_xlabel()


def test_a_plan_without_prediction_has_its_units():
    figure = draw_plan(dataclasses.replace(PLAN, step_time_s=0.0, samples_per_s=0.0, peak_bytes=0))
    assert len(boxes(figure)) == 4
    assert "peak memory: not predicted; the limit is 64.0 MiB" in words(figure)
    assert "step time: not predicted" in words(figure)


def test_one_unit_and_units_without_sizes():
    alone = draw_plan(dataclasses.replace(PLAN, units=(unit("", "DP"),)))
    assert [box[:2] for box in boxes(alone)] == [(0, 1)]
    assert alone.get_suptitle().startswith("OSDP plan: one unit\n")
    unsized = draw_plan(dataclasses.replace(PLAN, units=(unit("", "DP", mib=0), unit("a", "DP", mib=0))))
    assert [box[:2] for box in boxes(unsized)] == [(0, 0.5), (0.5, 0.5)]


@pytest.mark.slow
def test_five_hundred_units_stay_one_page_with_its_peak(tmp_path):
    many = tuple(unit(f"h.{i}", "DP" if i % 3 else "ZDP") for i in range(500))
    moments = [moment("forward", 1 + i % 7, f"h.{i % 500}") for i in range(1500)]
    moments[1234] = moment("forward", 52, "h.peak")
    plan, memory = dataclasses.replace(PLAN, units=(PLAN.units[0], *many)), [*moments, MOMENTS[-1]]
    figure = draw_plan(plan, memory=memory)
    assert len(boxes(figure)) == 501
    assert "peak 62.0 MiB, 96.9% of the limit, in the forward of h.peak" in words(figure)
    assert names(figure) == []  # too narrow for a name each
    save_picture(plan, tmp_path / "plan.svg", memory=memory)
    assert (tmp_path / "plan.svg").stat().st_size < 500_000


def saved(plan, path, memory=MOMENTS):
    """The file's text, its words, and what pointing at its units shows."""
    save_picture(plan, path, memory=memory)
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    return text, [each.text for each in root.iter(f"{SVG}text")], [each.text for each in root.iter(f"{SVG}title")]


def test_the_file_has_words_and_tells_of_units(tmp_path):
    _, found, (title, *tooltips) = saved(RECOMPUTING, tmp_path / "new" / "plan.svg")
    assert title == "OSDP plan: 2 units DP, 1 unit ZDP"
    assert {"h.fc", "gathered parameters", "blocks in it offload", "limit is 64.0 MiB"} <= {*found}
    assert tooltips[2].split("\n") == [
        "h.fc: Linear",
        "ZDP",
        "2.00 MiB",
        "2.00 ms a step",
        "blocks in it recompute",
        "blocks in it offload",
        "keeping it would save 600 us and take 2.00 MiB; 2.00 MiB are left",
    ]


def test_the_file_is_the_same_each_time_whatever_the_user_has_set(tmp_path):
    first, *_ = saved(PLAN, tmp_path / "first.svg")
    with mpl.rc_context({"figure.facecolor": "black", "svg.fonttype": "path", "font.size": 20}):
        second, *_ = saved(PLAN, tmp_path / "second.svg")
        assert mpl.rcParams["font.size"] == 20
    assert first == second


def test_names_are_escaped_and_shortened(tmp_path):
    name = "a<b>&$x$\u4e2d" + "x" * 40
    plan = dataclasses.replace(PLAN, units=(unit("", "DP", mib=0), unit(name, "DP"), unit("b$x$\u4e2d", "DP")))
    _, found, (_, tooltip, _) = saved(plan, tmp_path / "plan.svg")
    assert {"\u2026" + "x" * 29, "b$x$\u4e2d"} <= {*found}
    assert tooltip.startswith(f"{name}: Linear")
