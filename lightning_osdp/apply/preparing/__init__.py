"""Preparation of a module before it is sharded."""
