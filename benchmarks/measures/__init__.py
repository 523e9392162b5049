"""Quantities that `benchmarks/accuracy.py` compares with predictions: one file per quantity."""
