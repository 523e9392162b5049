"""Callbacks that watch a training under a plan."""
