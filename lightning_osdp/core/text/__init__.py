"""Sizes, durations, names and progress as text."""
