"""Model as the planner knows it: its operators, and the bytes and seconds of one micro-batch.

An *operator* is a module that owns parameters. A *segment* is the part of forward from one call of an operator until
the next call of any, with the part of backward that undoes it. Bytes of parameters are of the whole, unsharded
tensors; what grows with the samples is `Affine` in those of one rank's micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.text.stored import Stored

Span = tuple[int, int]
"""First and last segment of one call of a module, both included."""
ALIVE_BYTES = ("settled_bytes", "ending_bytes", "passed_bytes")
"""Fields of `Segment` with all live tensors, saved or not."""
CHUNKS = 8
"""Chunks of a loss: with more, the rest of it hardly matters."""


@dataclass(frozen=True, kw_only=True)
class ParameterProfile:
    """One parameter of an operator; a tied parameter is listed at its first operator only."""

    position: int
    """Index in ``named_parameters()`` of the model: the parameters of a unit are laid out in this order."""
    num_elements: int
    itemsize: int
    """Bytes of an element at rest."""
    gathered_itemsize: int
    """Bytes of an element as gathered for computing, and of its unsharded gradient."""
    reduced_itemsize: int | None = None
    """Bytes of an element of the gradient while it is reduced; None: as it is computed."""
    num_rows: int | None = None
    """Length of its first dimension; None: not known, every element counts as a row."""
    is_trainable: bool = True
    state_bytes_per_element: float = 0.0
    """Bytes of optimizer state that is sharded with the parameter, per element."""
    group: int = 0
    """Number of its parameter group, counted over all optimizers."""
    place: int = 0
    """Index of the parameter in its group."""

    @property
    def sent_itemsize(self) -> int:
        """Bytes of an element in a reduce-scatter."""
        return self.gathered_itemsize if self.reduced_itemsize is None else self.reduced_itemsize


@dataclass(frozen=True, kw_only=True)
class OptimizerProfile:
    """Seconds and temporaries of the optimizer step."""

    s_per_element: float = 0.0
    """Seconds per trainable element of the shard that this rank updates."""
    host_s_per_element: float | None = None
    """Seconds per such element where the host updates it, without copies; None: not profiled, or the host cannot."""
    host_is_ahead: bool = False
    """True: the host begins with the update of a unit once its gradients are reduced, on copies of its states, where
    the device has streams, and computes meanwhile. `simulate` counts that; `make_plan` plans as if it were False."""
    fixed_s: float = 0.0
    """Seconds of a step whatever the number of elements: each rank updates a part of every parameter."""
    is_foreach: bool = False
    """True: the parameters of a group are updated at once, with temporaries of all of them alive together."""
    temporaries: tuple[tuple[float, float], ...] = ()
    """Temporaries where parameters are updated one by one: pairs (x, y), none of which is above another. At some
    moment of a turn, temporaries of x times the bytes of the previous parameter and y times the bytes of the present
    one are alive."""
    foreach_temporaries: float = 0.0
    """Bytes of temporaries over the bytes of the group, where parameters are updated at once."""
    is_elementwise: bool = True
    """True: no element's update depends on another's, so that shards may be cut in any way; else in rows alone."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Cut of an operator into slices that are computed one after the other; bytes are of one of its calls."""

    num_features: int
    """Length of the dimension that is cut: the most slices there can be."""
    is_cut: tuple[bool, ...]
    """Parameters that are cut, in the operator's order; the others are whole, in the last slice."""
    cuts_rows: bool = False
    """True: the dimension that is cut is the parameters' first."""
    input_bytes: Affine = ZERO
    """Input as it is saved for backward."""
    input_gradient_bytes: Affine = ZERO
    output_bytes: Affine = ZERO


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One operator, in the order of its first call in forward."""

    name: str
    """Qualified module name; the empty string is the root module itself."""
    kind: str
    """Class name, for reports."""
    enclosing: tuple[str, ...]
    """Modules in whose forward *every* use of the parameters lies, innermost first, always ending with the root ``""``.

    The first is the smallest module that can be the unit of this operator: the operator itself, or an
    ancestor where the operator is never called itself (a ``ParameterList``) or shares a parameter with another one.
    """
    parameter_bytes: int
    """Parameters at rest, frozen ones included; tied parameters count at their first operator only."""
    num_trainable: int
    """Elements of the trainable parameters, counted likewise."""
    gathered_bytes: int
    """Parameters as gathered for computing: smaller than at rest under mixed precision."""
    trainable_bytes: int
    """Trainable parameters at rest: also the bytes of their reduced gradients."""
    gradient_bytes: int
    """Unsharded gradients as backward produces them: of trainable parameters, in the dtype of computing."""
    optimizer_bytes: int
    """State that the user's optimizer keeps for the trainable parameters."""
    is_read: bool = True
    """True where backward reads the parameters, or inputs need gradients: neither is so of an embedding, or of a Linear
    whose input needs no gradient."""
    parameters: tuple[ParameterProfile, ...] = ()
    """Parameters that make up the bytes. Without them paddings and the bytes of a single rank are not known."""
    dtype: str = "float32"
    """Dtype of the parameters at rest: a unit holds one dtype only. Several dtypes are separated by commas."""
    signature: str = ""
    """Text that equal operators (class, shapes, inputs) share."""
    stands_alone: bool = False
    """True: the operator is a unit of its own in any partition, as batch normalisation under mixed precision."""
    cut: Cut | None = None
    """Cut of the operator into slices; None where it cannot be split."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Forward from one operator's call until the next one's, and its backward; the last segment is the loss."""

    operator: str = ""
    """Name of the operator whose call begins it; the empty string in the loss."""
    forward_s: Affine = ZERO
    backward_s: Affine = ZERO
    saved_bytes: Affine = ZERO
    """Tensors that it saves for backward."""
    forward_workspace_bytes: Affine = ZERO
    """Most bytes of other live tensors while its forward runs."""
    handed_bytes: Affine = ZERO
    """Bytes of other live tensors when its forward has run, with which the next segment begins."""
    backward_workspace_bytes: Affine = ZERO
    """Most bytes of other live tensors while its backward runs, the operator's own gradients apart, until these are
    complete; where it makes none, to the end."""
    rerun_workspace_bytes: Affine = ZERO
    """Most bytes of other live tensors while its forward runs again in backward."""
    made_again_bytes: Affine = ZERO
    """Bytes that the segment would save if its block kept activations, and makes again where its block recomputes."""
    made_before_bytes: Affine = ZERO
    """Sum of `made_again_bytes` over the block's segments before this one."""
    evaluation_bytes: Affine = ZERO
    """Most bytes of live tensors beside parameters, buffers and batch while its forward runs without gradients."""
    settled_bytes: Affine | None = None
    """Live tensors, saved or not, once the operator's gradients are complete; None where it makes none."""
    ending_bytes: Affine | None = None
    """Most live tensors, saved or not, from then on to the end of its backward, such as that of what is between the
    operator before and this one: gradients may have been reduced by then. None as in `settled_bytes`."""
    passed_bytes: Affine | None = None
    """Live tensors, saved or not, once its backward is over, the gradient for the segment before included; None where
    they are not known."""

    def behind(self, more: Affine) -> Segment:
        """Segment before which so many bytes more are saved."""
        if more == ZERO:
            return self
        alive = {name: getattr(self, name) for name in ALIVE_BYTES}
        return replace(self, **{name: known + more for name, known in alive.items() if known is not None})


class Rerun(NamedTuple):
    """Part of forward that runs again in backward: a block, or a part that the model checkpoints itself."""

    span: Span
    is_early: bool
    """True: forward runs again before backward has reached the last unit inside, as where the block saves a tensor
    after that unit."""
    modules: tuple[str, ...]
    """Modules that may be units, and that are called again before backward has come to what they returned."""

    def surrounds(self, first: int, last: int) -> bool:
        """True if all segments from ``first`` to ``last`` run again."""
        return self.span[0] <= first and last <= self.span[1]


class Crossing(NamedTuple):
    """A tensor that a block gets or returns: several blocks, or the rest of the model, may save it."""

    num_bytes: Affine
    savers: Mapping[str, tuple[int, ...]]
    """Segments that save it, ascending, if all blocks make this choice of activations."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One of `LEVELS` of a block."""

    kept: tuple[int, ...]
    """Results that stay from forward to backward: positions, from 0 and ascending, among the block's heavy operations
    in the order in which its forward dispatches them, see `operations.recomputation.is_heavy`."""
    rerun_s: Affine = ZERO
    """Seconds of what runs again, and of keeping and finding the results."""


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """A module that need not keep what it saves for backward; forward calls it once."""

    name: str
    span: Span
    segments: Mapping[str, tuple[Segment, ...]]
    """The block's segments if this block alone makes a choice, by value of ``saves`` without ``keep``."""
    rerun_s: Affine = ZERO
    """Seconds of the part of the block's forward that runs again where the block recomputes."""
    reruns_early: bool = False
    """Value of `Rerun.is_early` where the block runs again."""
    copied_bytes: Mapping[str, Affine] = field(default_factory=dict)
    """Bytes that go to host memory in forward and come back in backward, by choice."""
    levels: Mapping[str, Level] = field(default_factory=dict)
    """Levels of the block by value of ``saves``; equal blocks have equal ones."""
    level_gap: float = 0.0
    """Fraction of `rerun_s` beyond which no mixture of other levels saves more seconds, for the same bytes."""
    borrowed_bytes: Affine = ZERO
    """Bytes that the block's backward needs if the block keeps its activations, and that blocks before save if they
    keep theirs."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile(Stored):
    """One model under one training step, with all that is needed to plan it for any number of ranks."""

    operators: tuple[OperatorProfile, ...]
    """Operators in the order of their first calls, each once."""
    segments: tuple[Segment, ...]
    """Segments in forward order; the last one is the loss."""
    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """Module -> its calls, for every module but the root that may be a unit."""
    blocks: tuple[BlockProfile, ...] = ()
    """Modules that may recompute or offload what they save, in forward order; none is inside another."""
    crossings: tuple[Crossing, ...] = ()
    """Tensors that more than one of the blocks and the rest of the model may save."""
    rerun: Mapping[str, Rerun] = field(default_factory=dict)
    """Parts of forward that run again in backward, by block, or by number of segments where the model checkpoints
    itself; `segments` has their seconds. None is inside another."""
    copied: tuple[tuple[Span, Affine], ...] = ()
    """Bytes that spans of segments move to host memory, and back; `segments` does not have the seconds of that."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Parameter name -> shape, dtype, ``frozen`` and ``tied to`` marks: what a plan must match."""
    profiled_batch_size: int = 1
    optimizer: OptimizerProfile = OptimizerProfile()
    buffer_bytes: int = 0
    batch_bytes: Affine = ZERO
    exchanges: tuple[Exchange, ...] = ()
    """Operators, by themselves and several together, whose activations can move in place of their weights; an operator
    may be in several of these. Several together are known only where the profiler was asked to look for them."""
    children_apart: bool = False
    """True: backward may run after each child of the root, as in manual optimization, and not for all at once."""
    notes: tuple[str, ...] = ()
    """Questions that profiling could not answer, each with a remedy."""

    @classmethod
    def in_turn(
        cls, operators: Sequence[OperatorProfile], segments: Mapping[str, Segment] | None = None, **fields: Any
    ) -> ModelProfile:
        """Profile of a model that calls each operator once, in this order, for models known by numbers only.

        ``segments`` are by operator, the loss under ``""``; a segment that is left out saves and takes nothing.
        """
        known = segments or {}
        called = [operator for operator in operators if operator.name]  # the root's call is all of forward
        spans: dict[str, Span] = {}
        for index, operator in enumerate(called):
            for name in operator.enclosing[:-1]:
                spans[name] = (spans.get(name, (index, index))[0], index)
        return cls(
            operators=tuple(operators),
            segments=(
                *(known.get(operator.name) or Segment(operator=operator.name) for operator in called),
                known.get("", Segment()),
            ),
            spans={name: (span,) for name, span in spans.items()},
            **fields,
        )

    def __iter__(self) -> Iterator[OperatorProfile]:
        """Iterates over the operators in forward order."""
        return iter(self.operators)

    def with_updates(self, *, ahead: bool) -> ModelProfile:
        """Profile of the same model whose updates on the host begin in backward, or do not."""
        return replace(self, optimizer=replace(self.optimizer, host_is_ahead=ahead))

    @property
    def is_plain(self) -> bool:
        """True if each backward is told of before it begins, and optimizers may be given shards that are no rows."""
        return self.optimizer.is_elementwise and not self.children_apart

    @property
    def loss(self) -> Segment:
        """Segment after the last operator's last call."""
        return self.segments[-1]

    @property
    def saved_bytes(self) -> Affine:
        """Bytes that the whole model has saved for backward at the end of forward."""
        return sum((segment.saved_bytes for segment in self.segments), ZERO)


def in_chunks(profile: ModelProfile) -> ModelProfile:
    """Profile as if the loss, and the output of the last operator, were computed in chunks, one alive at a time."""
    if len(profile.segments) < 2:
        return profile
    *before, last, loss = profile.segments
    logits = last.handed_bytes * (1 - 1 / CHUNKS)
    alive, passed = (last.settled_bytes, last.ending_bytes), loss.passed_bytes
    settled, ending = (None if each is None else each.less(logits) for each in alive)
    if passed is not None:  # with all that was saved before
        saved = sum((segment.saved_bytes for segment in (*before, last)), ZERO)
        passed = saved + (passed - saved) * (1 / CHUNKS)
    last = replace(
        last,
        forward_workspace_bytes=last.forward_workspace_bytes.less(logits),
        backward_workspace_bytes=last.backward_workspace_bytes.less(logits),
        handed_bytes=last.handed_bytes - logits,
        settled_bytes=settled,
        ending_bytes=ending,
    )
    loss = replace(
        loss,
        saved_bytes=loss.saved_bytes * (1 / CHUNKS),
        forward_workspace_bytes=loss.forward_workspace_bytes * (1 / CHUNKS),
        backward_workspace_bytes=loss.backward_workspace_bytes * (1 / CHUNKS),
        passed_bytes=passed,
    )
    return replace(profile, segments=(*before, last, loss))
