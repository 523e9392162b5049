"""A plan for people: a table of units and why each is as it is, a picture, and predictions beside what was measured."""

from lightning_osdp.report.picture import save_picture
from lightning_osdp.report.sentences import tell_accumulation
from lightning_osdp.report.tables import comparison_table, plan_table, render, show

__all__ = [
    "comparison_table",
    "plan_table",
    "render",
    "save_picture",
    "show",
    "tell_accumulation",
]
