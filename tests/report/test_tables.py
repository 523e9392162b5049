"""A literal plan in, text out."""

import dataclasses
import io
from collections import Counter

import pytest
from rich.console import Console

from lightning_osdp.core.axes import named
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.report.tables import comparison_table, plan_table, render, render_plan
from tests.support.plans import menu

MIB = 2**20


def linear(name: str, *modes: str, mib: int = 4) -> Unit:
    return Unit(
        name=name,
        operators=(name,),
        kind="Linear",
        treatments=named(*modes),
        parameter_bytes=mib * MIB,
        time_s=mib * 1e-3,
        menu=menu(mib * 3e-4, mib * MIB),
    )


PLAN = Plan(
    fingerprint={},
    world_size=2,
    units=(
        Unit(
            name="",
            operators=("wpe", "ln_f"),
            kind="Embedding, LayerNorm",
            treatments=named("ZDP"),
            parameter_bytes=70_000,
        ),
        *(linear(f"h.{i}.attn.{name}", "DP" if i < 2 else "ZDP") for i in range(4) for name in ("qkv", "proj")),
        *(linear(f"h.{i}.fc", "ZDP", "DP", mib=6) for i in range(4)),
        linear("head", "DP", mib=2),
    ),
    memory_limit_bytes=64 * MIB,
    peak_bytes=62 * MIB,
    micro_batch_size=8,
    num_micro_batches=1,
    step_time_s=0.18,
    samples_per_s=88.9,
    gap=0.003,
    solver="depth_first",
    all_zdp_step_time_s=0.2,
    all_zdp_peak_bytes=48 * MIB,
    notes=("a note",),
)

SUMMARY = """\
step time    180 ms predicted for one optimizer step
samples/s    88.9 predicted, all ranks together
peak memory  62.0 MiB of 64.0 MiB (96.9%) predicted per rank
gap          no plan in the search space is predicted to be faster by more than 0.3%
solver       depth_first
gain         11.1% more samples/s than plain FSDP: 200 ms a step, peak 48.0 MiB
batch        8 samples x 1 micro-batch x 2 ranks = 16 samples per optimizer step
note         a note
"""


def body(text: str) -> list[str]:
    """Lines of the first table, without title and headings."""
    return text.partition("\n\n")[0].split("─\n")[1].splitlines()


def test_reasons_stand_beside_the_numbers_on_a_wide_console():
    text = render_plan(PLAN, width=170)
    table, summary = text.split("\n\n")
    assert table.splitlines()[0] == "OSDP plan"
    assert table.splitlines()[1].split() == ["gathered", "time/step"]
    assert table.splitlines()[2].split() == ["operators", "count", "kind", "mode", "each", "each", "why"]
    reason = "keeping it would save 1.20 ms but take 4.00 MiB; 2.00 MiB are left"
    assert (
        body(text)[3]
        == f"h.{{2-3}}.attn.{{qkv,proj}}     x4  Linear                ZDP           4.00 MiB    4.00 ms  {reason}"
    )
    assert summary == SUMMARY


def test_reasons_follow_the_numbers_on_a_console_of_usual_width():
    numbers, reasons, summary = render_plan(PLAN, width=120).split("\n\n")
    assert numbers.split("─\n")[1] == (
        "(root) wpe                   1  Embedding, LayerNorm  ZDP           68.4 KiB       0 ms\n"
        "ln_f\n"
        "h.{0-1}.attn.{qkv,proj}     x4  Linear                DP            4.00 MiB    4.00 ms\n"
        "h.{2-3}.attn.{qkv,proj}     x4  Linear                ZDP           4.00 MiB    4.00 ms\n"
        "h.{0-3}.fc                  x4  Linear                1 ZDP + 1 DP  6.00 MiB    6.00 ms\n"
        "head                         1  Linear                DP            2.00 MiB    2.00 ms"
    )
    assert reasons.split("─\n")[1] == (
        "(root) wpe               always kept: the root unit is never freed\n"
        "ln_f\n"
        "h.{0-1}.attn.{qkv,proj}  keeping 4.00 MiB saves 1.20 ms\n"
        "h.{2-3}.attn.{qkv,proj}  keeping it would save 1.20 ms but take 4.00 MiB; 2.00 MiB are left\n"
        "h.{0-3}.fc               keeping 1 of 2 slices, 3.00 MiB, saves 900 us; keeping the rest would save 900 us"
        " but take\n                         3.00 MiB; 2.00 MiB are left\n"
        "head                     keeping 2.00 MiB saves 600 us"
    )
    assert summary == SUMMARY


@pytest.mark.parametrize("width", [40, 60, 80, 99, 100, 149, 150, 400])
def test_nothing_is_cut_off_at_any_width(width):
    text = render_plan(PLAN, width=width)
    assert max(map(len, text.splitlines())) <= width
    # the widest rendering wraps nothing; a narrower one moves its letters, and may repeat some
    missing = Counter("".join(render_plan(PLAN, width=400).split()).replace("─", "")) - Counter(text)
    assert not missing


def test_the_usual_width_is_120():
    assert render_plan(PLAN) == render_plan(PLAN, width=120)


def test_text_is_plain_wherever_it_goes(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = render_plan(PLAN)
    assert "\x1b" not in text
    assert {letter for letter in text if not letter.isprintable()} == {"\n"}
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text == render_plan(PLAN, width=120)


def test_a_terminal_gets_the_same_words_in_colours():
    terminal = io.StringIO()
    Console(file=terminal, width=120, force_terminal=True, color_system="standard").print(plan_table(PLAN))
    assert "\x1b[" in terminal.getvalue()
    assert "keeping 2.00 MiB saves 600 us" in terminal.getvalue()


def test_a_terminal_without_unicode_gets_plain_lines():
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=terminal, width=120).print(plan_table(PLAN))
    terminal.seek(0)
    assert "keeping 2.00 MiB saves 600 us" in terminal.read()


def test_brackets_and_colons_in_names_are_no_markup():
    unit = linear("[bold]net.experts[0].:smile:.fc", "DP")
    text = render_plan(dataclasses.replace(PLAN, units=(PLAN.units[0], unit), notes=("[red]note[/red]",)))
    assert "[bold]net.experts[0].:smile:.fc" in text
    assert "note         [red]note[/red]\n" in text


def test_a_plan_without_a_profile_shows_no_zeros():
    bare = dataclasses.replace(
        PLAN, step_time_s=0.0, samples_per_s=0.0, peak_bytes=0, gap=0.0, solver="", all_zdp_step_time_s=0.0, notes=()
    )
    text = render_plan(bare, width=170)
    assert "0 ms" not in text
    assert [line.count("not predicted") for line in body(text)] == [1, 0, 2, 2, 2, 2]
    assert "step time    not predicted\nsamples/s    not predicted\npeak memory  not predicted; the limit" in text


def test_one_rank_is_said_to_make_no_difference():
    text = render_plan(dataclasses.replace(PLAN, world_size=1), width=170)
    assert text.count("modes make no difference with one rank") == 5 + 1


def test_a_unit_without_operators_has_a_row_too():
    root = Unit(name="", operators=(), kind="", treatments=named("ZDP"))
    (line,) = body(render_plan(dataclasses.replace(PLAN, units=(root,)), width=170))
    assert line.split() == ["(root)", "1", "-", "ZDP", "0", "B", "0", "ms", "holds", "no", "parameters"]


# ---- predicted and measured


def test_the_measurement_stands_beside_the_prediction():
    text = render(comparison_table(PLAN, step_time_s=0.19, samples_per_s=84.2, peak_bytes=61 * MIB))
    assert text == (
        "OSDP: predicted and measured\n"
        "             predicted  measured  measured / predicted\n"
        "───────────────────────────────────────────────────────\n"
        "step time       180 ms    190 ms                  1.06\n"
        "samples/s         88.9      84.2                  0.95\n"
        "peak memory   62.0 MiB  61.0 MiB                  0.98\n"
    )


def test_what_a_race_has_corrected_stands_between_the_prediction_and_the_measurement():
    plan = dataclasses.replace(PLAN, corrected_step_time_s=0.192)
    text = render(comparison_table(plan, step_time_s=0.19, samples_per_s=84.2, more={"reserved memory": "70.0 MiB"}))
    assert [line.split() for line in text.splitlines()[1:]][::2] == [
        ["predicted", "corrected", "measured", "measured", "/", "predicted"],
        ["step", "time", "180", "ms", "192", "ms", "190", "ms", "1.06"],
        ["peak", "memory", "62.0", "MiB", "-", "not", "measured", "-"],
    ]
    assert [line.split() for line in text.splitlines()[1:]][3::2] == [
        ["samples/s", "88.9", "83.3", "84.2", "0.95"],
        ["reserved", "memory", "not", "in", "the", "plan", "-", "70.0", "MiB", "-"],
    ]


def test_other_tensors_have_a_line_if_they_are_not_negligible():
    bare = render(comparison_table(PLAN, peak_bytes=50 * MIB, other_bytes=MIB // 2))
    assert "other" not in bare
    text = render(comparison_table(PLAN, peak_bytes=50 * MIB, other_bytes=12 * MIB))
    assert " ".join(text.splitlines()[-1].split()) == "other tensors of yours not in the plan 12.0 MiB -"


def test_what_else_was_measured_has_lines_of_its_own():
    text = render(comparison_table(PLAN, more={"reserved memory": "70.0 MiB", "allocation retries": "2"}))
    assert [" ".join(line.split()) for line in text.splitlines()[-2:]] == [
        "reserved memory not in the plan 70.0 MiB -",
        "allocation retries not in the plan 2 -",
    ]


def test_what_was_not_measured_says_why():
    text = render(comparison_table(PLAN, step_time_s=0.18, why_not="fewer than 3 steps"))
    assert [line.split() for line in text.splitlines()[3:]] == [
        ["step", "time", "180", "ms", "180", "ms", "1.00"],
        ["samples/s", "88.9", "not", "measured:", "fewer", "than", "3", "steps", "-"],
        ["peak", "memory", "62.0", "MiB", "not", "measured:", "fewer", "than", "3", "steps", "-"],
    ]


def test_a_plan_without_a_profile_has_nothing_to_compare_with():
    bare = dataclasses.replace(PLAN, step_time_s=0.0, samples_per_s=0.0, peak_bytes=0)
    text = render(comparison_table(bare, step_time_s=0.19, samples_per_s=84.2, peak_bytes=61 * MIB))
    assert [line.split() for line in text.splitlines()[3:]] == [
        ["step", "time", "not", "predicted", "190", "ms", "-"],
        ["samples/s", "not", "predicted", "84.2", "-"],
        ["peak", "memory", "not", "predicted", "61.0", "MiB", "-"],
    ]


INSIDE = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "post_attention_layernorm")


def layer(index: int, mode: str, inside: tuple[str, ...] = INSIDE) -> Unit:
    name = f"model.layers.{index}"
    unit = linear(name, mode, mib=7)
    return dataclasses.replace(unit, operators=tuple(f"{name}.{each}" for each in inside))


def test_units_that_hold_whole_modules_go_by_the_modules_names():
    layers = [layer(index, "DP" if 1 <= index < 6 else "ZDP") for index in range(8)]
    plan = dataclasses.replace(PLAN, units=(PLAN.units[0], *layers))
    assert [line.split()[0] for line in body(render_plan(plan, width=80))] == [
        "(root)",
        "ln_f",
        "model.layers.{0,6-7}",
        "model.layers.{1-5}",
    ]
    joined = dataclasses.replace(
        layers[0],
        modules=("model.layers.0", "model.layers.1"),
        operators=(*layers[0].operators, *layers[1].operators),
    )
    neighbours = dataclasses.replace(plan, units=(joined, layers[2]))
    assert [line.split()[0] for line in body(render_plan(neighbours, width=80))] == [
        "model.layers.{0-1}",
        "model.layers.2",
    ]
    part = layer(0, "DP", INSIDE[1:])
    elsewhere = dataclasses.replace(linear(f"model.layers.0.{INSIDE[0]}", "ZDP", mib=1))
    names = [
        line.split()[0] for line in body(render_plan(dataclasses.replace(plan, units=(part, elsewhere)), width=80))
    ]
    assert names == [
        "model.layers.0.self_attn.",
        "{q_proj,k_proj}",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.",
        "post_attention_layernorm",
        "model.layers.0.input_layernorm",
    ]
