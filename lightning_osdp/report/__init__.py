"""A plan for people: a table of units and why each is as it is, a picture, and predictions beside what was measured."""

from lightning_osdp.report.accumulation import tell_accumulation
from lightning_osdp.report.picture import draw_plan, save_picture
from lightning_osdp.report.tables import comparison_table, plan_table, render, render_plan, show

__all__ = [
    "comparison_table",
    "draw_plan",
    "plan_table",
    "render",
    "render_plan",
    "save_picture",
    "show",
    "tell_accumulation",
]
