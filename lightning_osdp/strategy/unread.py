"""Values of sharded tensors that torch cannot read: what to say of them."""

from __future__ import annotations

from lightning_osdp.apply import ShardedModel

_TORCH_SAYS = "its data is not allocated yet"


def explain_unread(error: BaseException, sharded: ShardedModel | None) -> None:
    """Appends to what torch raises where ``torch.tensor([...])`` is to read DTensors: what they are, and what helps."""
    if sharded is None or _TORCH_SAYS not in str(error):
        return
    told = (
        "OSDP: parameters, gradients and their norms are DTensors, of which torch.tensor() cannot"
        " make a list of values, as Lightning's grad_norm does. Take each value itself, on all ranks:"
        " {name: float(p.grad.norm()) for name, p in self.named_parameters() if p.grad is not None}."
    )
    error.args = (f"{error}\n{told}", *error.args[1:])
