"""Seconds of segments, of the operations in them, and of blocks that run again."""
