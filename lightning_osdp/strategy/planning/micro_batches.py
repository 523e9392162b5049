"""What micro-batches a fit may be planned for: by its options, its loaders and its loss."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_osdp.core.batch_policy import BatchPolicy, samples_of_rank
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.batching.division import Windows, possible_sizes, why_not_divided
from lightning_osdp.strategy.batching.loaders import samples_per_rank, why_kept
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.runtime.all_ranks import from_all_ranks


def allowed_micro_batches(
    trainer: pl.Trainer,
    options: Options,
    loaders: CombinedLoader,
    current: int,
    *,
    why_not_mean: Callable[[], str | None],
) -> tuple[BatchPolicy, Windows | None]:
    """What may be chosen, the user's own size first; and what the user has, if the Trainer's number may change, too.

    The same on all ranks. Says why where it is less than was asked for. ``why_not_mean`` tells why the loss of a
    micro-batch is not the mean over its samples, and is called on all ranks or none.

    Raises:
        ConfigurationError: ``batch_size`` or ``global_batch_size`` cannot be had.
    """
    number, wanted, world_size = trainer.accumulate_grad_batches, options.batch_size, trainer.world_size
    num_samples = samples_per_step(trainer, options, current)
    if wanted == "auto":
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows, why_not_mean)
        if reason is not None:
            _check_divides(current, num_samples, world_size, reason)
            if num_samples > 1:
                rank_zero_info(f"OSDP: micro-batches stay {current} x {num_samples // current}: {reason}.")
        return BatchPolicy.divide(num_samples, sizes), windows
    reason = None if wanted in ("keep", current) else why_kept(loaders)
    if reason is not None:
        rank_zero_warn(f"OSDP: batch_size={wanted!r} is ignored, the loader keeps {current}: {reason}.")
    elif wanted == "scale":
        return BatchPolicy.scale(samples_per_rank(loaders, world_size=world_size), number), None
    size = wanted if isinstance(wanted, int) and reason is None else current
    if size != current:
        most = samples_per_rank(loaders, world_size=world_size)
        if most is not None and size > most:
            raise ConfigurationError(
                f"Expected a batch_size of which each of {world_size} ranks has at least one, got {size}: the training"
                f" data have {most} samples for a rank. Use at most {most}."
            )
    if options.global_batch_size is None:
        return BatchPolicy.fixed(size, number), None
    _check_divides(size, num_samples, world_size, reason)
    return BatchPolicy.divide(num_samples, (size,)), Windows(current, number, num_samples, {})


def divisions(
    trainer: pl.Trainer,
    loaders: CombinedLoader,
    windows: Windows,
    why_not_mean: Callable[[], str | None] = lambda: None,
) -> tuple[tuple[int, ...], str | None]:
    """Sizes that make up the user's optimizer steps, on all ranks alike; and why there is none but the user's own."""
    own = windows.micro_batch_size
    reason = _first_of_ranks(why_not_divided(trainer, loaders, windows)) or _first_of_ranks(why_not_mean())
    if reason is not None:
        return (own,), reason
    sizes = set.intersection(*map(set, from_all_ranks(possible_sizes(loaders, windows))))
    if not sizes - {own}:
        return (own,), f"no other size divides {windows.num_samples} samples and gives every epoch the same windows"
    return tuple(sorted(sizes, key=lambda size: (size != own, size))), None


def samples_per_step(trainer: pl.Trainer, options: Options, current: int) -> int:
    """B: samples of one rank in the optimizer step that the user wants, whose loaders give `current` at once.

    Raises:
        ConfigurationError: ``global_batch_size`` contradicts what the Trainer accumulates, or ranks cannot share it.
    """
    number, wanted = trainer.accumulate_grad_batches, options.global_batch_size
    if wanted is None:
        return current * number
    num_samples = samples_of_rank(wanted, trainer.world_size, name="global_batch_size")
    found = current * number * trainer.world_size
    if number > 1 and found != wanted:
        raise ConfigurationError(
            f"Expected global_batch_size={wanted}, but batches of {current} with accumulate_grad_batches={number} on"
            f" {trainer.world_size} ranks are {found} samples. Leave out one of the two."
        )
    return num_samples


def _check_divides(size: int, num_samples: int, world_size: int, reason: str | None) -> None:
    if num_samples % size:
        why = f" ({reason})" if reason else ""
        raise ConfigurationError(
            f"Expected micro-batches that divide global_batch_size={num_samples * world_size}, which is {num_samples}"
            f" samples a rank, got {size}{why}. Let the loader give a divisor of it."
        )


def _first_of_ranks(text: str | None) -> str | None:
    """The text of the first rank that has one."""
    return next((each for each in from_all_ranks(text) if each is not None), None)
