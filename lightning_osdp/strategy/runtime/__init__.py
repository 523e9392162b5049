"""Processes of ranks: their start, agreement, failure and end."""
