"""Which operators can be split, and how: `SPLITTERS`; and which modules torch compiles whole."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getclosurevars

from torch import nn
from torch._dynamo import OptimizedModule

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.splitting.embedding import SplitEmbedding
from lightning_osdp.splitting.linear import SplitLinear
from lightning_osdp.splitting.module import SplitModule
from lightning_osdp.splitting.transposed import SplitConv1D

SPLITTERS: dict[str, type[SplitModule]] = {
    "torch.nn.modules.linear.Linear": SplitLinear,
    "torch.nn.modules.sparse.Embedding": SplitEmbedding,
    "transformers.pytorch_utils.Conv1D": SplitConv1D,
}
"""Class of an operator, by its qualified name so that nothing need be imported -> how it is split."""

_READ_WEIGHTS_OF_CHILDREN = (nn.TransformerEncoderLayer,)
"""Modules that compute with the weights of their children instead of calling them."""
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def cut_dims(module: nn.Module) -> Mapping[str, int]:
    """Parameters of an operator that are cut -> the dimension; the others live in its last slice.

    Raises:
        ConfigurationError: the operator cannot be split.
    """
    return _checked(module).cuts_along


def split(module: nn.Module, num_slices: int) -> SplitModule:
    """Splits an operator in place and returns it, or raises a `ConfigurationError` if that cannot be."""
    return _checked(module).of(module, num_slices)


def splittable(root: nn.Module) -> dict[str, int]:
    """Qualified names of a model's operators that can be split -> the most slices each can have, one feature in each.

    Left out are those that are not *exactly* of a class in `SPLITTERS`, those that are changed in a way that slices
    would not share, such as a parametrization, a hook of a parameter or a forward of its own, those that share a
    parameter with another module, and those whose parent computes with their weights instead of calling them.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    read_directly: set[nn.Module] = set()
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(module)
        if isinstance(module, _READ_WEIGHTS_OF_CHILDREN):
            read_directly.update(module.children())
    found = {}
    for name, module in root.named_modules():
        splitter = _splitter(module)
        alone = all(len(owners[p]) == 1 for p in module._parameters.values() if p is not None)
        if name and splitter is not None and alone and module not in read_directly:
            found[name] = int(getattr(module, splitter.features))
    return found


def compiled_whole(module: nn.Module) -> list[str]:
    """Names of the modules in a model that are compiled with ``fullgraph=True``, wrapped or in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[0].compile(fullgraph=True)
        >>> compiled_whole(net)
        ['0']
    """
    return [name for name, child in module.named_modules() if _is_whole(child)]


def _splitter(module: nn.Module) -> type[SplitModule] | None:
    """How a module is split, whatever else uses its parameters; None where it cannot be."""
    splitter = SPLITTERS.get(_qualified(module))
    if splitter is None or not splitter.accepts(module) or _is_changed(module, splitter):
        return None
    return splitter


def _checked(module: nn.Module) -> type[SplitModule]:
    splitter = _splitter(module)
    if splitter is None:
        raise ConfigurationError(
            f"Expected an operator that can be split, exactly of a class in SPLITTERS ({', '.join(SPLITTERS)}) and not"
            f" changed, got {_qualified(module)}. Leave it whole."
        )
    return splitter


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_changed(module: nn.Module, splitter: type[SplitModule]) -> bool:
    """Whether something about this one module would be lost in slices."""
    cuts = splitter.cuts_along
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return (
        not set(cuts) <= parameters.keys() <= {*cuts, "bias"}
        or any(type(parameter) is not nn.Parameter or parameter.dim() == 0 for parameter in parameters.values())
        or any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters.values())
        or bool(module._modules or module._buffers)
        or "forward" in vars(module)
        or any(vars(module)[hooks] for hooks in _HOOKS)
        or any(parameters[name].shape[dim] != getattr(module, splitter.features) for name, dim in cuts.items())
    )


def _is_whole(module: nn.Module) -> bool:
    if isinstance(module, OptimizedModule):
        return bool(module.dynamo_ctx.fullgraph)
    call = module._compiled_call_impl
    # what compiles it is known to that function alone; elsewhere than in torch 2.13, perhaps not even to it
    return call is not None and getattr(getclosurevars(call).nonlocals.get("self"), "fullgraph", False)
