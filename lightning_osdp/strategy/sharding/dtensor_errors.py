"""Sharded tensors that torch cannot compute with as a user's code wants to: what to say of them."""

from __future__ import annotations

from lightning_osdp.apply import ShardedModel

_TOLD = {
    "its data is not allocated yet": (
        "OSDP: parameters, gradients and their norms are DTensors, of which torch.tensor() cannot"
        " make a list of values, as Lightning's grad_norm does. Take each value itself, on all ranks:"
        " {name: float(p.grad.norm()) for name, p in self.named_parameters() if p.grad is not None}."
    ),
    **dict.fromkeys(
        ("got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered"),
        "OSDP: outside the forward of its own module a parameter may be a DTensor, this rank's rows of it. A term of"
        " the loss over parameters belongs into a module's forward, or into a fit without plan=, whose plan keeps"
        " whatever training_step reads gathered; to look at whole weights elsewhere: `with trainer.strategy.gathered():"
        " ...`.",
    ),
}
"""By what torch says."""


def explain_unread(error: BaseException, sharded: ShardedModel | None) -> None:
    """Appends to what torch raises where it cannot compute with DTensors: what they are, and what helps."""
    told = next((text for said, text in _TOLD.items() if said in str(error)), None)
    if sharded is not None and told is not None and told not in str(error):
        error.args = (f"{error}\n{told}", *error.args[1:])
