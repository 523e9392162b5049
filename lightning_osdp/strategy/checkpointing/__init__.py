"""Checkpoints: weights, plans, random numbers and averages."""
