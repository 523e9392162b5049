"""Parts of a training step in place of torch's own, which the profiler and `apply` share."""
