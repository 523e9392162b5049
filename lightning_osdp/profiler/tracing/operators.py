"""Operators of a model in the order of forward, and the modules that may be their units.

``fully_shard`` gathers a unit's parameters for the time of its module's forward, and puts into the unit all parameters
that lie below that module in the tree and in no unit of their own. So a module can be the unit of an operator only if

- it is at or above the operator on every path from the root (a module may be registered twice),
- it runs whenever the operator's parameters are read, and
- it captures no parameter of another operator for which these do not hold (a tied one that is read elsewhere).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from lightning_osdp.core.text.names import upwards
from lightning_osdp.errors import ProfileError
from lightning_osdp.operations.splitting import compiled_whole
from lightning_osdp.profiler.tracing.calls import Calls


@dataclass(frozen=True)
class Operator:
    """Module that owns parameters, as found in the tree and seen in one forward."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]
    """Parameters that count here; a tied parameter counts at its first operator only."""
    gradients: list[nn.Parameter]
    """Parameters whose gradients its backward makes first; for a tied one that is its last operator."""
    enclosing: tuple[str, ...]
    """See `OperatorProfile.enclosing`."""
    signature: str


def fingerprint(module: nn.Module) -> dict[str, str]:
    """Parameter name -> dtype, shape and marks, for every name, tied ones included.

    Example:
        >>> fingerprint(nn.Linear(3, 2, bias=False))
        {'weight': 'float32[2, 3]'}
    """
    first: dict[nn.Parameter, str] = {}
    described = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        text = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
        if not parameter.requires_grad:
            text += " frozen"
        if parameter in first:
            text += f" tied to {first[parameter]}"
        first.setdefault(parameter, name)
        described[name] = text
    return described


def check_parameters(module: nn.Module) -> None:
    """Raises a `ProfileError` if a module has no parameters, or one that ``fully_shard`` cannot shard."""
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ProfileError(
            f"Expected {type(module).__name__} to have parameters to shard, but it has none."
            " Create its layers in __init__ or configure_model, or use another strategy."
        )
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ProfileError(
                f"Expected parameters of known shapes, but {name!r} is created by the first batch (a lazy module)."
                " Run one batch through the model in configure_model, or state the layer's sizes."
            )


def find_operators(module: nn.Module, calls: Calls) -> list[Operator]:
    """Operators in forward order; operators that are never called stand where the nearest module around them does."""
    tree = _Tree(module)
    owners = {
        name: parameters
        for name, child in tree.modules.items()
        if (parameters := [p for p in child._parameters.values() if p is not None])
    }
    enclosing = _enclosing(tree, owners, calls)
    rank = {name: index for index, name in enumerate(["", *calls.signatures])}
    order = sorted(owners, key=lambda name: rank[next(n for n in (name, *enclosing[name]) if n in rank)])
    first = {parameter: name for name in reversed(order) for parameter in owners[name]}
    last = {parameter: name for name in order for parameter in owners[name]}
    return [
        Operator(
            name=name,
            module=tree.modules[name],
            parameters=[p for p in owners[name] if first[p] == name],
            gradients=[p for p in owners[name] if p.requires_grad and last[p] == name],
            enclosing=enclosing[name],
            signature=calls.signatures.get(name, f"{name} is never called"),
        )
        for name in order
    ]


class _Tree:
    """Modules by name (the first, where there are several), and the modules above each."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules())
        self.parameter_names = {parameter: name for name, parameter in module.named_parameters()}
        self._names = {child: name for name, child in self.modules.items()}
        self._paths: dict[str, list[list[str]]] = {}
        by_path = dict(module.named_modules(remove_duplicate=False))
        for path, child in by_path.items():
            self._paths.setdefault(self._names[child], []).append([self._names[by_path[p]] for p in upwards(path)])
        # A unit is named by its only place in the tree. A parametrization belongs to the module whose tensor it makes.
        num_places = Counter(child for parent in self.modules.values() for child in parent._modules.values())
        self.unwrappable = {
            name
            for name, child in self.modules.items()
            if num_places[child] > 1 or isinstance(child, ParametrizationList)
        }
        # Hooks of a unit are inside its compiled code, unless the unit is the module that compiles it.
        for child in self.modules.values():
            if isinstance(child, OptimizedModule):
                self.unwrappable.add(self._names[child._orig_mod])
        for name in compiled_whole(module):
            self.unwrappable.update(other for other in self.modules if other.startswith(f"{name}."))

    def dominators(self, name: str) -> list[str]:
        """Module and the modules above it on every path, innermost first, the root left out."""
        first, *others = self._paths[name]
        return [above for above in first if all(above in path for path in others)]

    def around(self, name: str) -> set[str]:
        """Module and the modules above it on any path, the root left out."""
        return {above for path in self._paths[name] for above in path}


def _enclosing(tree: _Tree, owners: Mapping[str, list[nn.Parameter]], calls: Calls) -> dict[str, tuple[str, ...]]:
    """Modules that can be the unit of each operator, innermost first, the root last."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameters in owners.items():
        for parameter in parameters:
            users.setdefault(parameter, []).append(name)
    enclosing = {name: tree.dominators(name) for name in owners}
    for name in owners:
        names = [tree.parameter_names[parameter] for parameter in owners[name]]
        stacks = _stacks(name, names, calls, above=enclosing[name])
        enclosing[name] = [n for n in enclosing[name] if n not in tree.unwrappable and all(n in s for s in stacks)]
    before = None
    while enclosing != before:  # a module that one tie or capture rules out may rule out others
        before = {name: list(above) for name, above in enclosing.items()}
        for tied in users.values():
            common = [n for n in enclosing[tied[0]] if all(n in enclosing[other] for other in tied)]
            enclosing.update((name, list(common)) for name in tied)
        # a unit between an operator and its innermost possible unit would take the parameters away from that one
        captures = {
            n for name, above in enclosing.items() for n in tree.around(name) - tree.around(above[0] if above else "")
        }
        enclosing = {name: [n for n in above if n not in captures] for name, above in enclosing.items()}
    return {name: (*above, "") for name, above in enclosing.items()}


def _stacks(name: str, parameters: Iterable[str], calls: Calls, *, above: list[str]) -> set[tuple[str, ...]]:
    """Modules that run while the parameters are needed: at reads of them and at calls of their module."""
    stacks = {stack for parameter in parameters for stack in calls.reads.get(parameter, ())}
    stacks |= calls.stacks.get(name, set())
    if stacks:
        return stacks
    # neither read nor called on this batch; another batch may need it wherever its surroundings run
    nearest = next((n for n in above if n in calls.stacks), None)
    return {("",)} if nearest is None else calls.stacks[nearest]
