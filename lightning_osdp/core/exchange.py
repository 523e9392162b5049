"""Exchanges: how ranks can move activations of operators in place of their weights.

Each rank keeps its part of the weights for good, and computes with it for the samples of all ranks. Tensors have rows,
one for each token or sample, and features.

- ``column``: inputs are gathered, each rank makes its features of the output for all rows, and rows go back to the rank
  that they are of. The other way around for gradients. Two or three operators that take the same input, as projections
  to queries, keys and values do, may share what is gathered.
- ``row``: each rank gets its features of all rows, and makes partial sums of the output, which are added up on the rank
  that they are of.
- ``pair``: an operator by columns, operations that treat each element by itself, and an operator by rows: features in
  between stay where they are. Two operators by columns may feed the last one, if they take the same input, as those of
  a gated MLP do.
- ``attention``: three operators by columns of one input, for queries, keys and values, or one that makes all three,
  attention, which treats each head of each sample by itself, and an operator by rows: each rank has some of the heads
  of all samples in between.
- ``heads``: the same with one operator whose features of a head are all beside each other, as queries, keys and values
  of one head in GPT-NeoX; and whatever else treats each head of each sample by itself.
- ``gated``: one operator that makes gates and then as many values, as one of a gated MLP may, and an operator by rows.
- ``embedding``: by columns, with indices for inputs.

References:
    Megatron-LM (Shoeybi et al. 2019), section 3, for columns, rows and pairs; AutoDDL (Chen et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.errors import ConfigurationError

KINDS = ("column", "row", "pair", "attention", "heads", "gated", "embedding")
BY_HEADS = frozenset({"attention", "heads", "gated"})
"""Kinds of which each rank has some heads of all samples, or features where each is treated by itself."""
FED_KINDS = BY_HEADS | {"pair"}
"""Kinds whose last operator takes what the others make: all ranks meet again where it begins."""
MOST_COLUMNS = 3
"""Columns that may share one input, at most."""
NUM_PROJECTED, NUM_GATED = 3, 2
"""Queries, keys and values; gates and values."""


def numbers_of_operators(kind: str) -> tuple[int, ...]:
    """Numbers of operators that an exchange of this kind may have."""
    columns = tuple(range(1, MOST_COLUMNS + 1))
    numbers = {"pair": (2, 3), "attention": (2, NUM_PROJECTED + 1), "heads": (2,), "gated": (2,), "column": columns}
    return numbers.get(kind, (1,))


def num_parts(kind: str, num_operators: int) -> int:
    """Number of equal parts of the first operator's output, such as queries, keys and values.

    Where there are several, each becomes an operator with parameters of its own.
    """
    return {"gated": NUM_GATED, "attention": NUM_PROJECTED if num_operators == 2 else 1}.get(kind, 1)


@dataclass(frozen=True)
class Exchange:
    """One operator, columns of one input, or several that feed a last one; bytes are of one rank's micro-batch.

    Raises:
        ConfigurationError: there is no such kind, or it is of another number of operators.
    """

    kind: str
    """One of `KINDS`."""
    operators: tuple[str, ...]
    """Qualified names, in forward order."""
    input_bytes: Affine = ZERO
    """Input of the first operator, and of others that take the same, in the dtype of computing."""
    input_gradient_bytes: Affine = ZERO
    """Gradient of that input; none where it needs none."""
    output_bytes: Affine = ZERO
    """Output of the last operator, or outputs of all columns."""
    saved_bytes: Affine = ZERO
    """Part of the input that stays for the backward of these operators alone, where weights move."""
    saved_again: tuple[Affine, ...] = ()
    """Likewise what each further operator that takes it saves in addition, such as a copy of its own."""
    outputs: tuple[Affine, ...] = ()
    """Output of each column where there are several, and of each operator that makes heads; empty for all else."""
    fed_bytes: Affine = ZERO
    """Input of the operator that takes heads."""
    num_heads: int = 0
    """Number of heads, those of keys if these are fewer, or of features where each is treated by itself; 0 where there
    are none, which ranks may cut anywhere."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or len(self.operators) not in numbers_of_operators(self.kind):
            raise ConfigurationError(
                f"Expected an exchange of one of {KINDS} with one operator, up to three columns of one input, two or"
                f" three operators for a pair, two or four for attention, or two for heads and gated, got {self.kind!r}"
                f" with {self.operators}."
            )
        if (self.num_heads > 0) != (self.kind in BY_HEADS):
            raise ConfigurationError(
                f"Expected a number of heads of one of {sorted(BY_HEADS)}, and of nothing else, got {self.num_heads}"
                f" for a {self.kind!r} with {self.operators}. Profile the model again."
            )
        num_outputs = len(self.operators) - 1 if self.num_heads else len(self.operators) * self.is_shared
        if len(self.outputs) != num_outputs:
            raise ConfigurationError(
                f"Expected the output of each of several columns, and of nothing else, got {len(self.outputs)} for"
                f" {self.operators}."
            )

    @property
    def is_shared(self) -> bool:
        """True where several columns share the input that is gathered for them."""
        return self.kind == "column" and len(self.operators) > 1

    @property
    def cuts_parameters(self) -> bool:
        """True if parts of what one operator makes get parameters of their own."""
        return self.num_parts > 1

    @property
    def num_parts(self) -> int:
        """Number of parts of the first operator's output, see the function of this name."""
        return num_parts(self.kind, len(self.operators))

    @property
    def gathers_inputs(self) -> bool:
        """True if each rank gets all features of all inputs; else its own features of these."""
        return self.kind != "row"

    @property
    def sums_outputs(self) -> bool:
        """True if ranks add up what they make of the output; else each makes its own features of it."""
        return self.kind == "row" or self.is_fed

    @property
    def is_fed(self) -> bool:
        """True if its last operator takes what the others make, which stays where it is."""
        return self.kind in FED_KINDS

    @property
    def reads_weights(self) -> bool:
        """True if backward reads weights, which are then held as forward has cast them."""
        return self.kind != "embedding"

    def divides_over(self, num_ranks: int) -> bool:
        """Tells if so many ranks can have parts of it: heads of attention cannot be cut."""
        return self.num_heads % num_ranks == 0
