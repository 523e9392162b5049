"""One optimizer step of each rank alone before the first, to see that memory suffices."""
