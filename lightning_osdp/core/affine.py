"""A quantity of one micro-batch as a function of its samples: affine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Affine:
    """``fixed + samples * per_sample``, in seconds or bytes."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, num_samples: float) -> float:
        """The quantity for a micro-batch of so many samples."""
        return self.fixed + num_samples * self.per_sample

    def __add__(self, other: Affine) -> Affine:
        """Sum of two quantities."""
        return Affine(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def __sub__(self, other: Affine) -> Affine:
        """Difference of two quantities."""
        return Affine(self.fixed - other.fixed, self.per_sample - other.per_sample)

    def less(self, other: Affine) -> Affine:
        """Difference with each part at least 0."""
        return Affine(max(0.0, self.fixed - other.fixed), max(0.0, self.per_sample - other.per_sample))

    def __mul__(self, factor: float) -> Affine:
        """Quantity times a number."""
        return Affine(self.fixed * factor, self.per_sample * factor)

    @classmethod
    def through(cls, size: int, value: float, other_size: int, other_value: float) -> Affine:
        """Line that is exact at ``size`` and as close to the other point as parts of at least 0 allow.

        Example:
            >>> Affine.through(8, 10.0, 4, 6.0)
            Affine(fixed=2.0, per_sample=1.0)
            >>> Affine.through(8, 10.0, 4, 11.0)
            Affine(fixed=10.0, per_sample=0.0)
            >>> Affine.through(8, 8.0, 4, 1.0)
            Affine(fixed=0.0, per_sample=1.0)
        """
        slope = (value - other_value) / (size - other_size)
        slope = min(max(slope, 0.0), value / size)
        return cls(fixed=max(0.0, value - size * slope), per_sample=slope)  # which rounding may take below

    @classmethod
    def proportional(cls, size: int, value: float) -> Affine:
        """Line through the origin, where only one size is known."""
        return cls(per_sample=value / size)


ZERO = Affine()
