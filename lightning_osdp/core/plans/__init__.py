"""A plan, what it may choose, and its file."""
