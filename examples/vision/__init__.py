"""A small hierarchical vision transformer that tells drawn shapes apart: operators of very different sizes."""
