"""State of an optimizer under the names of the user's own model, or in a plain optimizer's numbers.

Numbers are those of the optimizer's own groups, as ``Optimizer.state_dict`` counts them: neither the order of the
model's parameters nor frozen ones matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_osdp.errors import PlanMismatchError


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """State by number, as a plain optimizer's, from state by name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: state["state"][name] for name in names if name in state["state"]},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def named(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """State by name, from state by name or by number.

    Args:
        state: of an optimizer; what is stored of one without state may have no ``state``.
        groups: names of the parameters in each group of the optimizer that it is for.

    Raises:
        PlanMismatchError: its parameter groups are others.
    """
    entries = state.get("state", {})
    saved = [list(group["params"]) for group in state["param_groups"]]
    if len(saved) != len(groups):
        raise PlanMismatchError(
            f"Expected a checkpoint whose optimizer has {len(groups)} parameter groups, as configured, got"
            f" {len(saved)}. Configure the groups that were saved, or load the weights alone."
        )
    if not all(isinstance(number, int) for group in saved for number in group):
        return {"state": entries, "param_groups": state["param_groups"]}
    if [len(group) for group in saved] != [len(group) for group in groups]:
        raise PlanMismatchError(
            f"Expected a checkpoint whose optimizer has {[len(group) for group in groups]} parameters in its groups, as"
            f" configured, got {[len(group) for group in saved]}. Configure the groups that were saved, or load the"
            " weights alone."
        )
    names = {number: name for a, b in zip(saved, groups, strict=True) for number, name in zip(a, b, strict=True)}
    return {
        "state": {names[number]: fields for number, fields in entries.items()},
        "param_groups": [
            {**group, "params": list(names)} for group, names in zip(state["param_groups"], groups, strict=True)
        ],
    }
