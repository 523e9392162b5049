"""The values that flow through the planner: frozen dataclasses on the standard library alone."""
