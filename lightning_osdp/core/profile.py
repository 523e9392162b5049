"""What the planner knows of the model: bytes and seconds per operator.

An *operator* is a module that owns parameters. Bytes are of the whole, unsharded tensors; "per sample" is per sample
of the micro-batch of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One operator, in the order of its first call in forward."""

    name: str
    """Qualified module name; the empty string is the root module itself."""
    kind: str
    """Class name, for reports."""
    enclosing: tuple[str, ...]
    """Modules in whose forward *every* use of the parameters lies, innermost first, always ending with the root ``""``.

    The first is the smallest module that an FSDP unit for this operator can wrap: the operator itself, or an
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
    forward_s_per_sample: float = 0.0
    backward_s_per_sample: float = 0.0
    forward_fixed_s: float = 0.0
    """Seconds of one micro-batch's forward that do not grow with it: time is affine in the micro-batch."""
    backward_fixed_s: float = 0.0
    activation_bytes_per_sample: float = 0.0
    """Tensors saved for backward from this operator's first call until the next operator's, or the end of its own."""
    forward_workspace_bytes_per_sample: float = 0.0
    """Most bytes of other live tensors while this operator's part of forward runs."""
    backward_workspace_bytes_per_sample: float = 0.0
    """The same for backward, the operator's own gradients apart."""
    num_calls: int = 1
    signature: str = ""
    """Equal operators (class, shapes, inputs) share one signature; it was measured once for all of them."""

    @property
    def compute_s_per_sample(self) -> float:
        """Forward and backward seconds per sample: gamma of equation 2."""
        return self.forward_s_per_sample + self.backward_s_per_sample

    @property
    def compute_fixed_s(self) -> float:
        """Forward and backward seconds of a micro-batch, whatever its size."""
        return self.forward_fixed_s + self.backward_fixed_s


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """One model under one training step, with all that is needed to plan it for any number of ranks."""

    operators: tuple[OperatorProfile, ...]
    """In forward order, each once."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Parameter name -> shape, dtype, ``frozen`` and ``tied to`` marks: what a plan must match."""
    profiled_batch_size: int = 1
    other_s_per_sample: float = 0.0
    """Forward and backward seconds outside every operator: attention, activation functions, the loss."""
    other_fixed_s: float = 0.0
    """The same per micro-batch, whatever its size."""
    optimizer_s_per_element: float = 0.0
    """Seconds of the optimizer step per trainable element of the shard that this rank updates."""
    optimizer_is_foreach: bool = False
    """Whether the optimizer updates all parameters at once, with temporaries of all of them alive together."""
    optimizer_workspace_ratio: float = 0.0
    """Bytes of temporaries in the optimizer step over those of the parameters updated at once: all or the largest."""
    loss_activation_bytes_per_sample: float = 0.0
    """Tensors saved for backward after the last operator's call: by the loss."""
    loss_forward_workspace_bytes_per_sample: float = 0.0
    loss_backward_workspace_bytes_per_sample: float = 0.0
    buffer_bytes: int = 0
    batch_bytes_per_sample: float = 0.0

    def __iter__(self) -> Iterator[OperatorProfile]:
        """Iterates over the operators in forward order."""
        return iter(self.operators)

    @property
    def activation_bytes_per_sample(self) -> float:
        """Bytes saved for backward by the whole model at the end of forward."""
        saved = sum(operator.activation_bytes_per_sample for operator in self.operators)
        return saved + self.loss_activation_bytes_per_sample
