"""Callbacks that watch training under a plan."""
