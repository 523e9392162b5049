"""Checkpoints and what else is written down: weights, plans, random numbers, averages."""
