"""States of a module under ``fully_shard`` and of its optimizers, saved and loaded under the user's own names.

Whole state is gathered one parameter at a time: besides the state that a rank keeps, it holds one parameter and the
memory of its all-gather. Loading takes this rank's rows of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path
from torch.utils.hooks import RemovableHandle

from lightning_osdp.apply.internals import dtensors
from lightning_osdp.apply.updating.host_updates import NOTHING_HELD, HostRows
from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.operations.splitting import (
    JoinedShards,
    cut_of,
    cut_states,
    cuts_of,
    gathered,
    join_names,
    join_states,
)


def whole_state(module: nn.Module, *, on_all_ranks: bool) -> dict[str, Any]:
    """Whole state dict in memory of its own on CPU, on rank 0 or on all ranks; its tensors are on meta on the others.

    All ranks must call it. ``state_dict`` hooks of the module see and return DTensors.
    """
    keeps = on_all_ranks or dist.get_rank() == 0
    state: dict[str, Any] = module.state_dict()
    whole: dict[str, Any] = {}
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    ties = {name: first_names[parameter] for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name, value in state.items():
        first = ties.get(name, name)
        is_tied = first in whole and _is_same(state[first], value)
        whole[name] = whole[first] if is_tied else _whole(value, keeps=keeps)
    state.update(whole)  # the dict may know versions of modules, which are saved with it
    return state


def model_state(module: nn.Module, state_dict_type: str) -> dict[str, Any]:
    """State dict with tensors whole on rank 0 and on meta on the others ("full"), or each rank's shards ("sharded").

    Hooks that see a checkpoint run on all ranks, and find the same names and shapes on each. All ranks must call it.
    Shards are DTensors in the parameters' own memory, or `JoinedShards` of split operators.
    """
    return module.state_dict() if state_dict_type == "sharded" else whole_state(module, on_all_ranks=False)


def optimizer_state(module: nn.Module, optimizer: Optimizer, state_dict_type: str) -> dict[str, Any]:
    """State of one optimizer: whole and by parameter index ("full"), or in shards and by name ("sharded").

    Raises:
        ConfigurationError: the optimizer is not one of this module's parameters, or the slices of an operator are in
            several of its parameter groups.
    """
    names, cuts = [name for group in names_by_group(module, optimizer) for name in group], cuts_of(module)
    state = join_states(_renamed(optimizer.state_dict(), dict(enumerate(names))), cuts)
    wholes = [name for group in state["param_groups"] for name in group["params"]]

    def joined(fields: dict[str, Any]) -> Mapping[str, Any]:
        states: dict[str, Any] = join_states({"state": fields, "param_groups": ()}, cuts)["state"]
        return states

    state.update(_rearranged(_extra_entries(state), _shapes(module, names), wholes, joined))
    for group in state["param_groups"]:
        if "param_names" in group:  # the optimizer got named_parameters(), with names of slices
            group["param_names"] = list(group["params"])
    if state_dict_type == "sharded":
        return state
    keeps = dist.get_rank() == 0
    whole = {
        name: {field: _whole(value, keeps=keeps) for field, value in fields.items()}
        for name, fields in state["state"].items()
    }
    extra = tree_map(partial(_whole, keeps=keeps), _extra_entries(state))
    return numbered({**extra, "state": whole, "param_groups": state["param_groups"]})


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """State by number, as a plain optimizer has it, from state by name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    return _renamed(state, {name: number for number, name in enumerate(names)})


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """State of an optimizer under other names or numbers."""
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in state["param_groups"]]
    fields = {names[each]: values for each, values in state["state"].items()}
    return {**state, "state": fields, "param_groups": groups}


def _extra_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that an optimizer's own ``state_dict`` adds."""
    return {key: value for key, value in state.items() if key not in ("state", "param_groups")}


def _rearranged(
    value: Any,
    shapes: Mapping[str, Sequence[int]],
    names: Sequence[str],
    change: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> Any:
    """Gives containers with an entry for each parameter the entries of other parameters; anything else stays.

    A container is a list in the order of parameters, or a dict by their numbers or names, in which a tensor has
    the shape of its parameter. It may stand in other lists and dicts.

    Args:
        value: an optimizer's own entries.
        shapes: of the parameters that containers have entries of, by name.
        names: of the parameters that containers are to have entries of.
        change: takes and gives fields of entries by the names of parameters.
    """
    entries = _by_parameter(value, shapes)
    if entries is None:
        again = partial(_rearranged, shapes=shapes, names=names, change=change)
        if type(value) is dict:
            return {key: again(each) for key, each in value.items()}
        return type(value)(map(again, value)) if type(value) in (list, tuple) else value
    fields = change({name: each if type(each) is dict else {None: each} for name, each in entries.items()})
    found = {name: fields[name].get(None, fields[name]) for name in names if name in fields}
    if type(value) is not dict:
        return type(value)(found.values())
    is_numbered = _is_number(next(iter(value)))
    return {names.index(name): each for name, each in found.items()} if is_numbered else found


def _by_parameter(value: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """Entries of a container by the names of parameters; None where it has something else."""
    names, found = [*shapes], dict[str, Any]()
    if type(value) in (list, tuple) and len(value) == len(names):
        found = dict(zip(names, value, strict=True))
    elif type(value) is dict and all(_is_number(key) and int(key) < len(names) for key in value):
        found = {names[int(number)]: each for number, each in value.items()}
    elif type(value) is dict and value.keys() <= shapes.keys():
        found = value
    tensors = ((name, leaf) for name, each in found.items() for leaf in tree_leaves(each) if isinstance(leaf, Tensor))
    return found if any(leaf.dim() and tuple(leaf.shape) == tuple(shapes[name]) for name, leaf in tensors) else None


def _is_number(key: object) -> bool:
    """Tells numbers of parameters, which ``torch.distributed.checkpoint`` reads as texts."""
    return str(key).isdecimal()


def _shapes(module: nn.Module, names: Sequence[str]) -> dict[str, Sequence[int]]:
    """Shapes of parameters, of slices or of whole operators, by these names."""
    parameters = {**dict(module.named_parameters()), **whole_parameters(module)}
    return {name: parameters[name].shape for name in names}


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by their names in the user's own module, as DTensors or `JoinedShards`; tied ones under each name."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}
    for cut in cuts_of(module):
        parameters[cut.whole] = cut.join([parameters.pop(piece) for piece in cut.pieces])
    return parameters


def names_by_group(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters in each group of an optimizer, as the module has them; a tied one has its first name.

    Raises:
        ConfigurationError: there are other parameters in it.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    other = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if other:
        raise ConfigurationError(
            f"Expected an optimizer of the parameters that {type(module).__name__} has now that it is sharded, got one"
            f" with {len(other)} others, the first of shape {tuple(other[0].shape)}. Configure the optimizer after the"
            " module is sharded, and not while parameters are gathered, as after an evaluation."
        )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _is_same(shards: Any, other: Any) -> bool:
    """True if two entries of a state dict are one parameter; all ranks find the same."""
    return (
        isinstance(shards, DTensor)
        and isinstance(other, DTensor)
        and (shards.shape, shards.dtype) == (other.shape, other.dtype)
        and shards.to_local().untyped_storage()._cdata == other.to_local().untyped_storage()._cdata
    )


def _whole(value: Any, *, keeps: bool) -> Any:
    """Whole tensor in memory of its own or on meta; any other value unchanged. All ranks must call it."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, JoinedShards):
        whole = value.full_tensor()
    elif isinstance(value, DTensor):
        whole = gathered(value.detach())
    else:
        return value.detach().to("cpu" if keeps else "meta", copy=True)
    is_part = whole.untyped_storage().nbytes() != whole.nbytes  # the gathered buffer has padding
    return whole.to("cpu", copy=is_part) if keeps else whole.to("meta")


def takes_whole(module: nn.Module) -> list[RemovableHandle]:
    """Makes ``load_state_dict`` of a module take whole tensors; returns the handles that end it.

    The hooks run as the last ones of each module: hooks of users may rename or reshape whole tensors before.
    """
    return [
        part.register_load_state_dict_pre_hook(_take_rows)
        for part in module.modules()
        if any(isinstance(parameter, DTensor) for parameter in part._parameters.values())
    ]


def load_optimizer(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], host: HostRows = NOTHING_HELD
) -> None:
    """Loads state of one optimizer of the module's sharded parameters; all ranks must call it.

    The state is by name, or by index as a plain optimizer has it, for whole operators; whole or in shards. States that
    ``host`` holds stay on the host.

    Raises:
        ConfigurationError: the optimizer is not one of this module's parameters.
        PlanMismatchError: the state has other parameter groups.
    """
    cuts, groups = cuts_of(module), names_by_group(module, optimizer)
    entries = _by_name(state, [join_names(names, cuts) for names in groups])
    pieces = cut_states(entries, cuts)
    parameters = dict(module.named_parameters())
    numbers = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    names, extra, likes = [*numbers], _extra_entries(state), dict[Any, Any]()
    if extra:
        extra = _rearranged(extra, _shapes(module, join_names(names, cuts)), names, partial(cut_states, cuts=cuts))
        own = _rearranged(
            extra,
            _shapes(module, names),
            names,
            lambda entries: {name: dict.fromkeys(fields, parameters[name]) for name, fields in entries.items()},
        )
        for tree in (own, _extra_entries(optimizer.state_dict())):
            likes.update(tree_flatten_with_path(tree)[0])
    loaded = {
        **tree_map_with_path(lambda path, value: _own_rows(value, likes.get(path)), extra),
        "state": {
            numbers[name]: {
                field: _own_rows(value, parameters[name], on_host=host.holds(parameters[name]))
                for field, value in fields.items()
            }
            for name, fields in pieces.items()
        },
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [numbers[name] for name in names],
            }
            for group, names in zip(state["param_groups"], groups, strict=True)
        ],
    }
    with host.loading(optimizer):
        optimizer.load_state_dict(loaded)


def _take_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Replaces whole parameters of a module by shards, but for those of another shape."""
    parameters: dict[str, Any] = dict(module._parameters)
    for name, parameter in parameters.items():
        whole = state_dict.get(f"{prefix}{name}")
        if not isinstance(parameter, DTensor) or not isinstance(whole, Tensor) or isinstance(whole, DTensor):
            continue
        if whole.shape == parameter.shape:
            state_dict[f"{prefix}{name}"] = dtensors.of_rows(_rows(whole, parameter), parameter)


def _rows(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor, as a view, with the layout of a DTensor."""
    cut = cut_of(like)
    if cut is None:  # a scalar
        return whole.detach()
    group, dim = cut
    first = min(group.rank() * -(-like.shape[dim] // group.size()), like.shape[dim])  # as torch.chunk cuts
    return whole.detach().narrow(dim, first, like.to_local().shape[dim])


def _own_rows(value: Any, parameter: object, *, on_host: bool = False) -> Any:
    """Field of an optimizer's state in memory of its own, sharded as its parameter where it has the same shape."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        rows = _rows(value, parameter)
        if on_host:  # the device need not have room for them
            return dtensors.of_rows_there(rows.to("cpu", copy=True), parameter)
        return dtensors.of_rows(rows, parameter).clone()
    return value.clone()


def _by_name(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Entries by name, from a state by name or by number.

    Numbers are those of the optimizer's own groups, as ``Optimizer.state_dict`` counts them: neither the order of the
    model's parameters nor frozen ones matter. A stored optimizer without state may have no ``state``. ``groups`` are
    the names of the parameters in each group of the optimizer that is loaded.
    """
    entries: Mapping[Any, Any] = state.get("state", {})
    saved = [list(group["params"]) for group in state["param_groups"]]
    if len(saved) != len(groups):
        raise PlanMismatchError(
            f"Expected a checkpoint whose optimizer has {len(groups)} parameter groups, as configured, got"
            f" {len(saved)}. Configure the groups that were saved, or load the weights alone."
        )
    if not all(isinstance(number, int) for group in saved for number in group):
        for index, (saved_names, names) in enumerate(zip(saved, groups, strict=True)):
            if differing := sorted(set(saved_names).symmetric_difference(names)):
                raise PlanMismatchError(
                    f"Expected a checkpoint whose optimizer has in group {index} the parameters that are configured,"
                    f" but {differing[:3]} are in one of both only. Configure the groups that were saved, or load the"
                    " weights alone."
                )
        return entries
    if [len(group) for group in saved] != [len(group) for group in groups]:
        raise PlanMismatchError(
            f"Expected a checkpoint whose optimizer has {[len(group) for group in groups]} parameters in its groups, as"
            f" configured, got {[len(group) for group in saved]}. Configure the groups that were saved, or load the"
            " weights alone."
        )
    names_of = dict(zip(chain.from_iterable(saved), chain.from_iterable(groups), strict=True))
    return {names_of[number]: fields for number, fields in entries.items()}


def check_number(num_stored: int, num_optimizers: int) -> None:
    """Raises a `RuntimeError` if a checkpoint has another number of optimizers."""
    if num_stored != num_optimizers:
        raise RuntimeError(
            f"Expected a checkpoint with the state of {num_optimizers} optimizers, as configured, got {num_stored}."
            " Configure as many as were saved, or load the weights alone."
        )
