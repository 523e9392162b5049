"""A plan for people: a table of units and why each is as it is, and the prediction beside what was measured."""

from lightning_osdp.report.tables import comparison_table, plan_table, render, render_plan, show

__all__ = ["comparison_table", "plan_table", "render", "render_plan", "show"]
