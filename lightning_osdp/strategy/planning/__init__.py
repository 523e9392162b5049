"""From a Trainer about to fit to a plan."""
