"""The user's training step, run for its cost alone."""
