"""`SPLITTERS`: operators that can be split, and how slices work together; and modules that torch compiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import getclosurevars
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.splitting.module import SplitModule


class SplitLinear(SplitModule):
    """y = x_1 W_1^T + x_2 W_2^T + ... + b: OSDP's operator splitting, added up in one output."""

    cuts_along: ClassVar = {"weight": 1}
    features = "in_features"

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator.

        Args:
            input: (*, in_features), any float dtype; autocast holds for the slices as it does for a Linear.

        Returns:
            (*, out_features).
        """
        x = input
        total: Tensor | None = None
        # torch fuses the bias into the product of a matrix, and not into that of a view with more dimensions.
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        for part, features in zip(self.slices, _cut_features(rows, self.sizes), strict=True):
            # In place: products save their inputs for backward, not their results. No name holds on to a partial one.
            total = part(features) if total is None else total.add_(part(features))
        assert total is not None
        if rows is x:
            return total
        # F.linear does so, too. A view for autograd would lose fully_shard's hooks where it is changed in place.
        output: Tensor = torch.ops.aten._unsafe_view(total, [*x.shape[:-1], total.shape[-1]])
        return output


def _cut_features(x: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Views ``x[..., start : start + size]``, each made when it is asked for.

    In backward they fill one gradient of x. With ``narrow`` each would make a gradient as large as x, zeros around its
    own features. With ``split`` all gradients would be alive until they are put together. All of the views must be
    used.

    Raises:
        RuntimeError: x has another number of features.
    """
    if x.shape[-1:] != (sum(sizes),):
        raise RuntimeError(f"Expected an input with {sum(sizes)} features, got one of shape {tuple(x.shape)}.")
    joint = _JointGradient(len(sizes))
    start = 0
    for size in sizes:
        if x.requires_grad and torch.is_grad_enabled():
            yield _View.apply(x, start, size, joint)  # type: ignore[no-untyped-call]
        else:
            yield x.narrow(-1, start, size)
        start += size


class _JointGradient:
    """Gradient of all features while slices fill it."""

    def __init__(self, num_slices: int) -> None:
        self._num_slices = num_slices
        self._num_missing = 0
        self._whole: Tensor | None = None

    def fill(self, shape: torch.Size, start: int, gradient: Tensor) -> Tensor | None:
        """Stores the gradient of the features from ``start`` on; the last one returns the gradient of all features."""
        if self._whole is None:
            self._whole, self._num_missing = gradient.new_empty(shape), self._num_slices
        self._whole.narrow(-1, start, gradient.shape[-1]).copy_(gradient)
        self._num_missing -= 1
        if self._num_missing:
            return None
        whole, self._whole = self._whole, None
        return whole


class _View(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, start: int, size: int, joint: _JointGradient) -> Tensor:
        ctx.shape, ctx.start, ctx.joint = x.shape, start, joint
        return x.narrow(-1, start, size)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        return ctx.joint.fill(ctx.shape, ctx.start, gradient), None, None, None


class SplitConv1D(SplitLinear):
    """y = x_1 W_1 + x_2 W_2 + ... + b."""

    cuts_along: ClassVar = {"weight": 0}
    features = "nx"

    @override
    def forward(self, x: Tensor) -> Tensor:  # as transformers names it
        """Output of the whole operator; as of `SplitLinear.forward`."""
        return super().forward(x)

    @classmethod
    @override
    def _slice_type(cls, whole_type: type[nn.Module]) -> type[nn.Module]:
        return _without_bias_too(whole_type)  # type: ignore[arg-type]


@cache
def _without_bias_too(whole_type: Any) -> type[nn.Module]:
    """Subclass whose forward needs no bias; the forward of the class always adds one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)

    return type(whole_type.__name__, (whole_type,), {"forward": forward})


class SplitEmbedding(SplitModule):
    """Embedding whose slices give features side by side."""

    cuts_along: ClassVar = {"weight": 1}
    features = "embedding_dim"

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator.

        Args:
            input: (*), integers.

        Returns:
            (*, embedding_dim).
        """
        return torch.cat([part(input) for part in self.slices], dim=-1)


class LinearByOutputs(SplitModule):
    """y = (x W_1^T + b_1, x W_2^T + b_2, ...): parts of the outputs beside each other."""

    cuts_along: ClassVar = {"weight": 0, "bias": 0}
    features = "out_features"

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, out_features), for an input of shape (*, in_features)."""
        return torch.cat([part(input) for part in self.slices], -1)


class Conv1DByOutputs(LinearByOutputs):
    """y = (x W_1 + b_1, x W_2 + b_2, ...)."""

    cuts_along: ClassVar = {"weight": 1, "bias": 0}
    features = "nf"


SPLITTERS: dict[str, type[SplitModule]] = {
    "torch.nn.modules.linear.Linear": SplitLinear,
    "torch.nn.modules.sparse.Embedding": SplitEmbedding,
    "transformers.pytorch_utils.Conv1D": SplitConv1D,
}
"""Class of an operator, by its qualified name so that nothing need be imported -> how it is split."""
BY_OUTPUTS: dict[str, type[SplitModule]] = {
    "torch.nn.modules.linear.Linear": LinearByOutputs,
    "transformers.pytorch_utils.Conv1D": Conv1DByOutputs,
}
"""Class of an operator -> how it is split into parts of its outputs, which `split` does not do."""

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

    Operators are left out that are not *exactly* of a class in `SPLITTERS`, that are changed in a way that slices would
    not share, such as a parametrization, a hook of a parameter or a forward of its own, that share a parameter with
    another module, or whose parent computes with their weights instead of calling them.
    """
    num_owners = Counter(parameter for module in root.modules() for parameter in module.parameters(recurse=False))
    reading = (module for module in root.modules() if isinstance(module, _READ_WEIGHTS_OF_CHILDREN))
    read_directly = {child for module in reading for child in module.children()}
    num_features = {}
    for name, module in root.named_modules():
        splitter = _splitter(module)
        alone = all(num_owners[parameter] == 1 for parameter in module.parameters(recurse=False))
        if name and splitter is not None and alone and module not in read_directly:
            num_features[name] = int(getattr(module, splitter.features))
    return num_features


def compiled(module: nn.Module) -> list[str]:
    """Names of the compiled modules in a model: by ``torch.compile(module)``, in place, or by Lightning.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[0].compile(backend="eager")
        >>> compiled(net)
        ['0']
    """
    marks = ("_compiled_call_impl", "_compiler_ctx")
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, OptimizedModule) or any(getattr(child, mark, None) is not None for mark in marks)
    ]


def inside_compiled(module: nn.Module) -> set[nn.Module]:
    """Compiled modules in a model, and all modules inside them, by whatever name they are called."""
    return {inside for name in compiled(module) for inside in module.get_submodule(name).modules()}


def compiled_whole(module: nn.Module) -> list[str]:
    """Names of the modules in a model that are compiled with ``fullgraph=True``, in any way that `compiler_of` knows.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[0].compile(fullgraph=True, backend="eager")
        >>> compiled_whole(net)
        ['0']
    """
    return [name for name, child in module.named_modules() if getattr(compiler_of(child), "fullgraph", False)]


def compiler_of(module: nn.Module) -> Any:
    """Context of dynamo that compiles a module: by ``torch.compile(module)``, in place, or by Lightning; else None."""
    if isinstance(module, OptimizedModule):
        return module.dynamo_ctx
    if getattr(module, "_compiler_ctx", None) is not None:
        return module._compiler_ctx["dynamo_ctx"]  # type: ignore[index]
    call = module._compiled_call_impl
    if call is None or hasattr(call, "compiler"):  # of a block that recomputes, see `apply.activations.blocks`
        return getattr(call, "compiler", None)
    # Only this function knows the compiler, as a variable that it encloses; other versions of torch may differ.
    return getclosurevars(call).nonlocals.get("self")


def _splitter(module: nn.Module) -> type[SplitModule] | None:
    """Class that splits a module, whatever else uses its parameters; None where it cannot be split."""
    splitter = SPLITTERS.get(class_name(type(module)))
    return None if splitter is None or _is_changed(module, splitter) else splitter


def _checked(module: nn.Module) -> type[SplitModule]:
    splitter = _splitter(module)
    if splitter is None:
        raise ConfigurationError(
            f"Expected an operator that can be split, exactly of a class in SPLITTERS ({', '.join(SPLITTERS)}) and not"
            f" changed, got {class_name(type(module))}. Leave it whole."
        )
    return splitter


def class_name(kind: type[nn.Module]) -> str:
    """Qualified name of a class, by which operators are told without importing what defines them."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_changed(module: nn.Module, splitter: type[SplitModule]) -> bool:
    """True if slices would lose something about this one module."""
    cuts = splitter.cuts_along
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return (
        not set(cuts) <= parameters.keys() <= {*cuts, "bias"}
        or any(type(parameter) is not nn.Parameter or parameter.dim() == 0 for parameter in parameters.values())
        or any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters.values())
        or bool(module._modules or module._buffers)
        or "forward" in vars(module)
        or getattr(module, "max_norm", None) is not None  # an embedding normalises whole rows
        or any(vars(module)[hooks] for hooks in _HOOKS)
        or any(parameters[name].shape[dim] != getattr(module, splitter.features) for name, dim in cuts.items())
    )
