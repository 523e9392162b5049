"""Exchanges: how ranks can move activations of operators in place of their weights.

Each rank keeps its part of the weights for good, and computes with it for the samples of all ranks. Tensors have rows,
one for each token or sample, and features.

- ``column``: inputs are gathered, each rank makes its features of the output for all rows, and rows go back to the rank
  that they are of. The other way around for gradients.
- ``row``: each rank gets its features of all rows, and makes partial sums of the output, which are added up on the rank
  that they are of.
- ``pair``: an operator by columns, operations that treat each element by itself, and an operator by rows: features in
  between stay where they are. Two operators by columns may feed the last one, if they take the same input, as those of
  a gated MLP do.
- ``embedding``: by columns, with indices for inputs.

References:
    Megatron-LM (Shoeybi et al. 2019), section 3, for columns, rows and pairs; AutoDDL (Chen et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.errors import ConfigurationError

KINDS = ("column", "row", "pair", "embedding")


def numbers_of_operators(kind: str) -> tuple[int, ...]:
    """Numbers of operators that an exchange of this kind may have."""
    return (2, 3) if kind == "pair" else (1,)


@dataclass(frozen=True)
class Exchange:
    """One operator, or a pair whose last one the others feed; bytes are of one rank's micro-batch.

    Raises:
        ConfigurationError: there is no such kind, or it is of another number of operators.
    """

    kind: str
    """One of `KINDS`."""
    operators: tuple[str, ...]
    """Qualified names, in forward order."""
    input_bytes: Affine = ZERO
    """Input of the first operator, or of the first two, in the dtype of computing."""
    input_gradient_bytes: Affine = ZERO
    """Gradient of that input; none where it needs none."""
    output_bytes: Affine = ZERO
    """Output of the last operator."""
    saved_bytes: Affine = ZERO
    """Part of the input that stays for the backward of these operators alone, where weights move."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or len(self.operators) not in numbers_of_operators(self.kind):
            raise ConfigurationError(
                f"Expected an exchange of one of {KINDS} with one operator, or two or three for a pair, got"
                f" {self.kind!r} with {self.operators}."
            )

    @property
    def gathers_inputs(self) -> bool:
        """True if each rank gets all features of all inputs; else its own features of these."""
        return self.kind != "row"

    @property
    def sums_outputs(self) -> bool:
        """True if ranks add up what they make of the output; else each makes its own features of it."""
        return self.kind in {"row", "pair"}

    @property
    def reads_weights(self) -> bool:
        """True if backward reads weights, which are then held as forward has cast them."""
        return self.kind != "embedding"
