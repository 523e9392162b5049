"""Predictions beside measurements: memory, the fit of plans, step time, and the cost of planning."""
