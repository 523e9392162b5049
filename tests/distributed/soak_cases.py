"""A soak of seconds."""

from benchmarks import soak


def soaked(folder, seconds):
    """Whether this is rank 0; the samples are in the folder."""
    return soak.train(folder, seconds)
