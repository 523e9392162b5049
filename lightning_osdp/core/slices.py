"""How an operator is cut: the sizes of its slices along the features that are cut."""

from __future__ import annotations

from lightning_osdp.errors import ConfigurationError


def slice_sizes(num_features: int, num_slices: int) -> tuple[int, ...]:
    """Features of each slice: as even as possible, the larger ones first.

    Args:
        num_features: length of the dimension that is cut, such as the input features of a Linear.
        num_slices: k, from 1 to ``num_features``.

    Raises:
        ConfigurationError: there are not as many features as slices, or no slice is asked for.

    Example:
        >>> slice_sizes(10, 4)
        (3, 3, 2, 2)
    """
    if not 1 <= num_slices <= num_features:
        raise ConfigurationError(
            f"Expected between 1 and {num_features} slices, one feature in each at least, got {num_slices}."
            " Ask for fewer slices, or leave the operator whole."
        )
    size, rest = divmod(num_features, num_slices)
    return (size + 1,) * rest + (size,) * (num_slices - rest)
