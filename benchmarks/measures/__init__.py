"""What `benchmarks/accuracy.py` compares with predictions: one file per quantity."""
