"""Trainers of tests that run in one process."""

import lightning as L


def quiet_trainer(strategy, **options):
    """A Trainer of one CPU rank that logs, saves and shows nothing."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, **{**dict.fromkeys(quiet, False), **options})
