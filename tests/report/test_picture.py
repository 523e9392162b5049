"""A literal plan in, SVG out, which is read back as XML."""

import dataclasses
import re
from xml.etree import ElementTree as ET

import pytest

from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.plan import Plan, Unit
from lightning_osdp.cost import Moment
from lightning_osdp.report import draw_plan, save_picture
from lightning_osdp.report.memory_picture import BANDS
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import simulate

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"
BLUE, ORANGE, GREY = "#0072B2", "#F0B84C", "#BBBBBB"


def unit(name, *modes, mib=4):
    return Unit(
        name=name,
        operators=(name,),
        kind="Linear",
        modes=modes,
        parameter_bytes=int(mib * MIB),
        time_s=mib * 1e-3,
        keep_saves_s=mib * 3e-4,
        keep_costs_bytes=int(mib * MIB),
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


def read(svg):
    return ET.fromstring(svg)


def words(svg):
    return [element.text for element in read(svg).iter(f"{SVG}text")]


def paint(root, element):
    """The colour that a box is filled with, through its pattern if it has one, and whether it is hatched."""
    fill = element.get("fill")
    pattern = next((p for p in root.iter(f"{SVG}pattern") if fill == f"url(#{p.get('id')})"), None)
    return (fill, False) if pattern is None else (pattern.find(f"{SVG}rect").get("fill"), True)


def boxes(svg):
    """Name, left, width, height and paint of each box that tells of a unit."""
    root = read(svg)
    return [
        (
            box.find(f"{SVG}title").text.split(":")[0],
            *(float(box.get(key)) for key in ("x", "width", "height")),
            *paint(root, box),
        )
        for box in root.iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    ]


def test_units_are_boxes_in_forward_order_as_wide_as_their_parameters():
    found = boxes(draw_plan(PLAN))
    assert [name for name, *_ in found] == ["(root)", "wide", "h.fc", "head"]
    widths = [width for _, _, width, *_ in found]
    assert widths == pytest.approx([101, 606, 202, 101])
    lefts = [left for _, left, *_ in found]
    assert lefts == pytest.approx([70, 171, 777, 979])


def test_modes_differ_in_colour_and_without_it():
    painted = {name: marks for name, _, _, _, *marks in boxes(draw_plan(PLAN))}
    assert painted == {"(root)": [GREY, True], "wide": [BLUE, False], "h.fc": [ORANGE, True], "head": [BLUE, False]}


def test_slices_of_a_unit_are_stacked():
    split = dataclasses.replace(PLAN, units=(*PLAN.units[:3], unit("head", "DP", "ZDP", "ZDP", "ZDP")))
    found = [(height, colour) for name, _, _, height, colour, _ in boxes(draw_plan(split)) if name == "head"]
    assert found == [(16, BLUE), (48, ORANGE)]


def test_a_unit_tells_its_mode_bytes_time_and_reason():
    (told,) = (title.text for title in read(draw_plan(PLAN)).iter(f"{SVG}title") if title.text.startswith("h.fc"))
    assert told.splitlines() == [
        "h.fc: Linear",
        "ZDP",
        "2.00 MiB",
        "2.00 ms a step",
        "keeping it would save 600 us and take 2.00 MiB; 2.00 MiB are left",
    ]


def test_the_title_says_what_is_predicted():
    title, subtitle, *_ = words(draw_plan(PLAN))
    assert title == "OSDP plan: 2 units DP, 1 unit ZDP"
    assert subtitle == (
        "8 x 1 x 2 samples (micro-batch x micro-batches x ranks) a step; 180 ms and 88.9 samples/s predicted;"
        " 11.1% more than plain FSDP at its best"
    )


def test_the_peak_stands_below_the_limit():
    svg = draw_plan(PLAN, memory=MOMENTS)
    assert "peak 62.0 MiB, 96.9% of the limit, in the backward of wide" in words(svg)
    assert "limit is 64.0 MiB" in words(svg)
    (limit,) = (line for line in read(svg).iter(f"{SVG}line") if line.get("stroke-dasharray") == "7 4")
    heights = [float(y) for d in bands(svg) for y in re.findall(r" ([\d.]+)", d)]
    assert float(limit.get("y1")) < min(heights)
    bottom = max(heights)
    assert (bottom - min(heights)) / (bottom - float(limit.get("y1"))) == pytest.approx(62 / 64, abs=1e-3)


def bands(svg):
    """Outlines of the bands of memory, from the highest."""
    return [path.get("d") for path in read(svg).iter(f"{SVG}path") if path.get("stroke")]


def test_each_part_that_there_is_makes_a_band():
    assert len(bands(draw_plan(PLAN, memory=MOMENTS))) == 2


def test_every_part_of_a_simulated_step_belongs_to_a_band(model, cluster):
    profile = model(40, 80)
    ring = cluster(2)
    plan = make_plan(profile, ring, memory_limit_bytes=10**4, micro_batch_size=BatchPolicy.fixed(1, 3))
    assert {unit.sync for unit in plan.units} == {"every", "last"}
    drawn = {part for _, parts in BANDS.values() for part in parts}
    for _, moment in simulate(plan, profile, ring).moments:
        assert sum(moment.parts[part] for part in drawn) == pytest.approx(moment.num_bytes)


def test_forward_backward_and_the_optimizer_are_named_once():
    phases = ("forward", "backward", "optimizer step", "reduce-scatter")
    found = [text for text in words(draw_plan(PLAN, memory=MOMENTS)) if text in phases]
    assert found == ["forward", "backward", "optimizer step"]


@pytest.mark.parametrize("memory", [(), MOMENTS])
def test_a_limit_far_above_is_said_rather_than_drawn(memory):
    svg = draw_plan(dataclasses.replace(PLAN, memory_limit_bytes=2**40), memory=memory)
    assert "limit is 1.00 TiB, far above" in words(svg)
    assert not [line for line in read(svg).iter(f"{SVG}line") if line.get("stroke-dasharray") == "7 4"]


def test_without_moments_the_peaks_are_bars():
    svg = draw_plan(PLAN)
    assert {"this plan", "62.0 MiB", "plain FSDP at its best", "48.0 MiB", "limit is 64.0 MiB"} <= {*words(svg)}
    assert bands(svg) == []


def test_a_plan_that_says_a_time_and_no_peak_can_be_drawn():
    assert "this plan" in words(draw_plan(dataclasses.replace(PLAN, peak_bytes=0, all_zdp_peak_bytes=0)))


def test_a_plan_without_prediction_has_its_strip():
    svg = draw_plan(dataclasses.replace(PLAN, step_time_s=0.0, samples_per_s=0.0, peak_bytes=0))
    assert len(boxes(svg)) == 4
    assert "Memory of one rank: not predicted; the limit is 64.0 MiB" in words(svg)
    assert any("time and memory not predicted" in text for text in words(svg))


def test_one_unit_and_units_without_sizes():
    alone = dataclasses.replace(PLAN, units=(unit("", "DP"),))
    assert [(name, width) for name, _, width, *_ in boxes(draw_plan(alone))] == [("(root)", 1010)]
    assert words(draw_plan(alone))[0] == "OSDP plan: one unit"
    unsized = dataclasses.replace(PLAN, units=(unit("", "DP", mib=0), unit("a", "DP", mib=0)))
    assert [width for _, _, width, *_ in boxes(draw_plan(unsized))] == [505, 505]


def test_names_are_escaped_and_shortened():
    name = "a<b>&" + "x" * 40
    svg = draw_plan(dataclasses.replace(PLAN, units=(unit("", "DP", mib=0), unit(name, "DP"))))
    assert "…" + "x" * 29 in words(svg)
    assert boxes(svg)[0][0] == name


def test_five_hundred_units_stay_one_page_with_its_peak():
    many = tuple(unit(f"h.{i}", "DP" if i % 3 else "ZDP") for i in range(500))
    moments = [moment("forward", 1 + i % 7, f"h.{i % 500}") for i in range(1500)]
    moments[1234] = moment("forward", 52, "h.peak")
    plan = dataclasses.replace(PLAN, units=(PLAN.units[0], *many))
    svg = draw_plan(plan, memory=[*moments, MOMENTS[-1]])
    assert len(boxes(svg)) == 501
    assert len(svg) < 250_000
    assert "peak 62.0 MiB, 96.9% of the limit, in the forward of h.peak" in words(svg)
    # too narrow for a name each
    assert not any(text.startswith("h.") for text in words(svg))


def test_it_is_saved_where_there_was_no_folder(tmp_path):
    save_picture(PLAN, tmp_path / "new" / "plan.svg", memory=MOMENTS)
    assert read((tmp_path / "new" / "plan.svg").read_text(encoding="utf-8")).tag == f"{SVG}svg"
