"""Optimizer state by parameter name: of slices as of whole operators, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.splitting.module import Cut, SplitModule


def cuts_of(root: nn.Module) -> list[Cut]:
    """How the parameters of a model's split operators lie in slices, by the names of the user's own model."""
    return [
        cut
        for path, module in root.named_modules()
        if isinstance(module, SplitModule)
        for cut in module.cuts(clean_tensor_name(f"{path}."))
    ]


def join_names(names: Sequence[str], cuts: Iterable[Cut]) -> list[str]:
    """Names of parameters, with the whole operator's name in place of its slices', where the first of them is.

    Raises:
        ConfigurationError: some slices of an operator are among them and others are not.
    """
    present = set(names)
    whole: dict[str, str] = {}
    for cut in cuts:
        if not present.isdisjoint(cut.pieces) and not present.issuperset(cut.pieces):
            raise ConfigurationError(
                f"Expected the slices of {cut.whole!r} in one parameter group, so that their state can be saved as that"
                f" of the whole operator, but a group has only {sorted(present.intersection(cut.pieces))}. Choose"
                " groups by operators or by kinds of parameters."
            )
        whole.update(dict.fromkeys(cut.pieces, cut.whole))
    return list(dict.fromkeys(whole.get(name, name) for name in names))


def join_states(state: Mapping[str, Any], cuts: Sequence[Cut]) -> dict[str, Any]:
    """State of an optimizer by names of parameters, as if no operator was split.

    Raises:
        ConfigurationError: the slices of an operator are in several parameter groups.
    """
    states = dict(state["state"])
    for cut in cuts:
        if all(piece in states for piece in cut.pieces):
            pieces = [states.pop(piece) for piece in cut.pieces]
            states[cut.whole] = {
                field: cut.join([piece[field] for piece in pieces])
                if _has_shape(value, cut.piece_shapes[0])
                else value  # such as the number of steps
                for field, value in pieces[0].items()
            }
    groups = [{**group, "params": join_names(group["params"], cuts)} for group in state["param_groups"]]
    return {"state": states, "param_groups": groups}


def cut_states(state: Mapping[str, Any], cuts: Sequence[Cut]) -> dict[str, Any]:
    """Undoes `join_states` of ``state["state"]``: fields by names of whole parameters, as by those of their slices."""
    states = dict(state)
    for cut in cuts:
        if cut.whole in states:
            fields = {name: _cut(value, cut) for name, value in states.pop(cut.whole).items()}
            for index, piece in enumerate(cut.pieces):
                states[piece] = {name: values[index] for name, values in fields.items()}
    return states


def _cut(value: Any, cut: Cut) -> list[Any]:
    if _has_shape(value, cut.shape):
        return list(cut.cut(value))
    # Each slice counts its own steps: a tensor that they shared would count all of them.
    return [value.clone() if isinstance(value, Tensor) else value for _ in cut.pieces]


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
