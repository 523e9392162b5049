"""Other units than operators: blocks, neighbours, slices."""
