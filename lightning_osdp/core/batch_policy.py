"""Micro-batches that a plan may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_osdp.core.step import Workload
from lightning_osdp.errors import ConfigurationError

MOST_SAMPLES = 2**20
"""Largest micro-batch that is chosen where the user sets no limit."""


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """Micro-batches of one rank that a plan may have: those of `fixed`, of `divide` or of `scale`."""

    micro_batch_sizes: tuple[int, ...] = ()
    """Samples of a micro-batch that may be chosen, the preferred one first; empty: any number."""
    max_micro_batch_size: int | None = None
    num_micro_batches: int = 1
    """Micro-batches of an optimizer step, where `num_samples` is None."""
    num_samples: int | None = None
    """Samples of an optimizer step, which has as many micro-batches as these samples fill."""

    @classmethod
    def fixed(cls, micro_batch_size: int, num_micro_batches: int = 1) -> BatchPolicy:
        """Policy of one micro-batch size and one number of micro-batches (gradient accumulation).

        Raises:
            ConfigurationError: one of these is below 1.
        """
        _check("micro_batch_size", micro_batch_size, "a BatchPolicy or a number of samples, at least one")
        _check("num_micro_batches", num_micro_batches)
        return cls(micro_batch_sizes=(micro_batch_size,), num_micro_batches=num_micro_batches)

    @classmethod
    def divide(cls, num_samples: int, micro_batch_sizes: Sequence[int] | None = None) -> BatchPolicy:
        """Policy of a fixed number of samples in every optimizer step, in the micro-batches that are fastest.

        Args:
            num_samples: samples of a rank in an optimizer step.
            micro_batch_sizes: divisors of it that may be chosen, the preferred one first; None: all up to 2^20.

        Raises:
            ConfigurationError: there are no samples, no sizes, or sizes that do not divide the samples.
        """
        _check("num_samples", num_samples)
        sizes = range(1, min(num_samples, MOST_SAMPLES) + 1) if micro_batch_sizes is None else micro_batch_sizes
        divisors = tuple(size for size in sizes if size >= 1 and num_samples % size == 0)
        if not divisors or (micro_batch_sizes is not None and len(divisors) < len(micro_batch_sizes)):
            raise ConfigurationError(
                f"micro_batch_sizes must be divisors of num_samples={num_samples}, at least one, got"
                f" {micro_batch_sizes!r}."
            )
        return cls(micro_batch_sizes=divisors, num_samples=num_samples)

    @classmethod
    def scale(cls, max_micro_batch_size: int | None = None, num_micro_batches: int = 1) -> BatchPolicy:
        """Policy of the fastest micro-batch size for a fixed number of micro-batches.

        Args:
            max_micro_batch_size: the most that may be chosen; None: as far as memory allows, at most 2^20.
            num_micro_batches: micro-batches of an optimizer step.

        Raises:
            ConfigurationError: one of these is below 1.
        """
        if max_micro_batch_size is not None:
            _check("max_micro_batch_size", max_micro_batch_size, "None or at least 1")
        _check("num_micro_batches", num_micro_batches)
        return cls(max_micro_batch_size=max_micro_batch_size, num_micro_batches=num_micro_batches)

    def workload(self, micro_batch_size: int) -> Workload:
        """Samples and micro-batches of a rank in one optimizer step with micro-batches of this size."""
        num_micro_batches = self.num_micro_batches if self.num_samples is None else self.num_samples // micro_batch_size
        return Workload(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches)


def samples_of_rank(global_batch: int, world_size: int, *, name: str) -> int:
    """Samples of one rank in an optimizer step of ``global_batch`` samples, which the user gives as option ``name``.

    Raises:
        ConfigurationError: not all ranks would have as many, or none would have any.
    """
    of_rank, rest = divmod(global_batch, world_size)
    if rest or of_rank < 1:
        raise ConfigurationError(
            f"Expected a {name} that {world_size} ranks can share, got {global_batch}. Use a multiple of {world_size}."
        )
    return of_rank


def largest_fitting(fits: Callable[[int], bool], most: int = MOST_SAMPLES) -> int:
    """Largest size up to ``most`` that fits, or 0, by doubling and halving; a size that fails rules out larger ones."""
    fitting, fails = 0, 1
    while fails <= most and fits(fails):
        fitting, fails = fails, fails * 2
    fails = min(fails, most + 1)
    while fails - fitting > 1:
        middle = (fitting + fails) // 2
        if fits(middle):
            fitting = middle
        else:
            fails = middle
    return fitting


def _check(name: str, number: object, expected: str = "at least 1") -> None:
    if not isinstance(number, int) or not 1 <= number < 2**63:
        raise ConfigurationError(f"{name} must be {expected}, got {number!r}.")
