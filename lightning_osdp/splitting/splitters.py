"""Which operators can be split, and how: `SPLITTERS`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

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


def num_features(module: nn.Module) -> int | None:
    """Length of the dimension along which an operator is cut, which is the most slices it can have.

    None where it cannot be split: it is not *exactly* of a class in `SPLITTERS`, or it is changed in a way that its
    slices would not share, such as a parametrization, a hook of a parameter or a forward of its own. Whether its
    parameters belong to it alone takes the whole model: `splittable`.
    """
    splitter = _splitter(module)
    if splitter is None or not splitter.accepts(module) or _is_changed(module, splitter):
        return None
    return int(getattr(module, splitter.features))


def cut_dims(module: nn.Module) -> Mapping[str, int]:
    """Parameters of an operator that are cut -> the dimension; the others live in its last slice.

    Raises:
        ConfigurationError: the operator cannot be split.
    """
    return _checked(module).cuts_along


def split(module: nn.Module, num_slices: int) -> SplitModule:
    """Splits an operator in place, and returns it; ``split(...).whole()`` undoes it, exactly.

    Args:
        module: an operator, on any device.
        num_slices: from 1 to `num_features`.

    Raises:
        ConfigurationError: the operator cannot be split, or has fewer features.
    """
    return _checked(module).of(module, num_slices)


def splittable(root: nn.Module) -> dict[str, int]:
    """Qualified names of the operators of a model that can be split -> `num_features`.

    Left out are also those that share a parameter with another module, and those whose parent computes with their
    weights instead of calling them.
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
        features = num_features(module)
        alone = all(len(owners[p]) == 1 for p in module._parameters.values() if p is not None)
        if name and features is not None and alone and module not in read_directly:
            found[name] = features
    return found


def _splitter(module: nn.Module) -> type[SplitModule] | None:
    return SPLITTERS.get(f"{type(module).__module__}.{type(module).__qualname__}")


def _checked(module: nn.Module) -> type[SplitModule]:
    splitter = _splitter(module)
    if splitter is None or num_features(module) is None:
        raise ConfigurationError(
            f"Expected an operator that can be split, exactly of a class in SPLITTERS ({', '.join(SPLITTERS)}) and not"
            f" changed, got {type(module).__module__}.{type(module).__qualname__}. Leave it whole."
        )
    return splitter


def _is_changed(module: nn.Module, splitter: type[SplitModule]) -> bool:
    """Whether something about this one module would be lost in slices."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    return (
        not set(splitter.cuts_along) <= names <= {*splitter.cuts_along, "bias"}
        or any(type(parameter) is not nn.Parameter or parameter.dim() == 0 for parameter in parameters)
        or any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)
        or bool(module._modules or module._buffers)
        or "forward" in vars(module)
        or any(vars(module)[hooks] for hooks in _HOOKS)
        or any(
            module._parameters[name].shape[dim] != getattr(module, splitter.features)  # type: ignore[union-attr]
            for name, dim in splitter.cuts_along.items()
        )
    )
