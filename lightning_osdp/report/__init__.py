"""A plan for people: a table of units and why each is as it is, a picture, and predictions beside what was measured."""

from lightning_osdp.report.advice import Advice, advise
from lightning_osdp.report.alternatives import Alternative, Alternatives, find_alternatives
from lightning_osdp.report.cases import Case, Price, memory_price, what_if
from lightning_osdp.report.difference import Decided, Difference, compare_plans
from lightning_osdp.report.picture import draw_plan, save_picture
from lightning_osdp.report.sentences import tell_accumulation
from lightning_osdp.report.tables import comparison_table, plan_table, render, render_plan, show
from lightning_osdp.report.trace import chrome_trace

__all__ = [
    "Advice",
    "Alternative",
    "Alternatives",
    "Case",
    "Decided",
    "Difference",
    "Price",
    "advise",
    "chrome_trace",
    "compare_plans",
    "comparison_table",
    "draw_plan",
    "find_alternatives",
    "memory_price",
    "plan_table",
    "render",
    "render_plan",
    "save_picture",
    "show",
    "tell_accumulation",
    "what_if",
]
