"""Units without a plan: the children of a module, and the blocks inside each."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def called_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Children with parameters, by name; of a list or dictionary of modules, which nobody calls, each entry."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_children(child, f"{prefix}{name}.")
        elif not isinstance(child, _NOT_CALLED) and any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def blocks_in(root: nn.Module, min_unit_bytes: int) -> Iterator[nn.Module]:
    """Entries of lists and sequences, the outermost, whose parameters are theirs alone."""
    num_holders: dict[nn.Parameter, int] = {}
    for inner in root.modules():
        for parameter in inner.parameters(recurse=False):
            num_holders[parameter] = num_holders.get(parameter, 0) + 1
    pending = [root]
    while pending:
        inner = pending.pop()
        for child in inner.children():
            parameters = list(child.parameters())
            is_block = isinstance(inner, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _NOT_CALLED)
            num_bytes = sum(parameter.nbytes for parameter in parameters)
            if is_block and num_bytes >= max(1, min_unit_bytes) and all(num_holders[each] == 1 for each in parameters):
                yield child
            else:
                pending.append(child)
