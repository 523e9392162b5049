"""Functions of tensors of which one dimension has a block for each rank, and where these blocks are in their results.

Each rank has some heads of all ranks' samples between projections and the output of attention. They are laid out as
one rank's samples with all heads are, block by block along the heads: so modules compute with the sizes that they know.
This is right as long as every function does the same to each block, and does not mix them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_osdp.core.exchange import NUM_GATED
from lightning_osdp.operations.stationary.elementwise import Elementwise, name_of, preserved_generators

_RESHAPES = frozenset({"_unsafe_view", "flatten", "reshape", "unflatten", "view"})
_VIEWS = frozenset(
    {
        "T", "__getitem__", "chunk", "expand", "mT", "moveaxis", "movedim", "narrow", "permute", "select", "split",
        "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unsqueeze",
    }
)  # fmt: skip
"""Functions that return views, whose strides tell where a dimension has gone to."""
_JOINS = frozenset({"cat", "concat", "concatenate"})
_OVER_DIMS = frozenset({"amax", "amin", "log_softmax", "logsumexp", "mean", "softmax", "sum"})
"""Functions of the elements along dimensions, which are the second argument."""
_NORMS = frozenset({"layer_norm", "rms_norm"})
"""Functions of the elements along last dimensions, whose sizes are the second argument."""
_PRODUCTS = frozenset({"__matmul__", "matmul"})
_NUM_LAST = {"view_as_complex": 1, "view_as_real": -1}
"""Functions that take away as many last dimensions."""
_OF_ONE = _RESHAPES | _VIEWS | _OVER_DIMS | _NUM_LAST.keys() | {"glu", "repeat_interleave"}
_SIZES = frozenset({"__len__", "is_contiguous", "nelement", "numel", "shape", "size", "stride"})
"""Functions that give sizes, which are those that one rank's samples have with all heads."""
_INDICES = (int, slice, type(None), type(...))


class Blocks(NamedTuple):
    """Dimension of a tensor that has a block for each rank."""

    dim: int
    """Counted from the end, so below 0."""
    number: int
    """Most blocks that there can be; there can be any of its divisors."""
    num_parts: int = 1
    """Number of equal parts of the dimension that follow each other, each of which has these blocks: queries, keys and
    values that one operator makes."""

    @property
    def are_features(self) -> bool:
        """True if they are all of the last dimension, as what an operator takes has to have them."""
        return self.dim == -1 and self.num_parts == 1


class Followed(NamedTuple):
    """Blocks of a function's results, in their order."""

    blocks: tuple[Blocks, ...]
    is_random: bool = False
    """True if the function draws random numbers."""


class _Function(NamedTuple):
    """Function of torch with its arguments."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return name_of(self.func)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Argument by its place or name; raises `MixedError` where it is not given."""
        found = self.args[place] if len(self.args) > place else self.kwargs.get(name, default)
        _check(found is not None, f"without {name}")
        return found

    def of_copies(self, copy: Callable[[Tensor], Tensor]) -> _Function:
        """Function with copies of the tensors that it is given."""
        args, kwargs = tree_map(lambda each: copy(each) if isinstance(each, Tensor) else each, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def results(self) -> list[Tensor]:
        """Tensors that it gives."""
        return [each for each in tree_leaves(self.func(*self.args, **self.kwargs)) if isinstance(each, Tensor)]


class MixedError(Exception):
    """Raised where a function mixes blocks, knows them apart, or is not known; the text follows its name."""


def gives_sizes(func: Any) -> bool:
    """Tells if a function gives sizes of tensors."""
    return name_of(func) in _SIZES


def follow(func: Any, args: Any, kwargs: Mapping[str, Any], blocks_of: Callable[[Tensor], Blocks | None]) -> Followed:
    """Blocks of the results of a function that does the same to each block of the tensors that it is given.

    It is called with tensors without values, or, where it does not run with these, with copies.

    Args:
        func: a function of torch, as ``__torch_function__`` gets it.
        args: its arguments by place.
        kwargs: its arguments by name.
        blocks_of: gives the blocks of a tensor; None for one that has none.

    Raises:
        MixedError: it may do anything else.
    """
    function, leaves = _Function(func, args, kwargs), tree_leaves((args, kwargs))
    name, tensors = function.name, [each for each in leaves if isinstance(each, Tensor)]
    given = [(tensor, blocks) for tensor in tensors if (blocks := blocks_of(tensor)) is not None]
    others = [tensor for tensor in tensors if blocks_of(tensor) is None]
    dims = {(blocks.dim, blocks.num_parts) for _, blocks in given}
    _check(len(dims) == 1, "of heads that are not in one dimension")
    _check(kwargs.get("out") is None, "which writes to a tensor that it is given")
    _check(not any(isinstance(each, torch.Generator) for each in leaves), "with random numbers of its own")
    first, own = given[0]
    own = own._replace(number=math.gcd(*(blocks.number for _, blocks in given)))
    if name in _NORMS:
        sizes = function.argument(1, "normalized_shape")
        _check(own.dim < -(1 if isinstance(sizes, int) else len(sizes)), "over heads")
        return Followed((own,))
    if name == "scaled_dot_product_attention":
        _check(len(given) == 3 and own.dim < -2, "of something else than queries, keys and values by heads")
        _check(all(_is_alike(each, own.dim) for each in others), "with a mask of each head")
        return Followed((own,), float(function.argument(4, "dropout_p", 0.0)) > 0)
    if name in _PRODUCTS:
        _check(len(given) == 2 and not others and own.dim < -2, "of something else than two tensors by heads")
        return Followed((own,))
    if name in _JOINS:
        is_known = kwargs.keys() <= {"tensors", "dim"} and len({tensor.dim() for tensor in tensors}) == 1
        _check(is_known and not others, "of other tensors, too")
        _check(own.dim not in _dims(function.argument(1, "dim", 0), first.dim()), "along heads")
        return Followed((own,))
    if name in _OF_ONE:
        _check(len(given) == 1 and not others, "of several tensors")
        return Followed(tuple(_moved(function, first, own)))
    return _elementwise(function, [tensor for tensor, _ in given], others, own)


def _moved(function: _Function, given: Tensor, own: Blocks) -> Iterable[Blocks]:
    """Blocks of results of a function of one tensor that has other dimensions."""
    name = function.name
    if name in _RESHAPES:
        return [_reshaped(given.shape, own, each.shape) for each in _without_values(function)]
    if name in _VIEWS:
        indices = function.args[1] if name == "__getitem__" else ()
        of_places = indices if isinstance(indices, tuple) else (indices,)
        _check(all(isinstance(each, _INDICES) and not isinstance(each, bool) for each in of_places), "by a list")
        strides = [int(dim == given.dim() + own.dim) for dim in range(given.dim())]
        return [_where_stride_is_one(each, given, own) for each in _without_values(function, strides)]
    if name in _NUM_LAST:
        _check(own.dim < -_NUM_LAST[name], "over heads")
        return [own._replace(dim=own.dim + _NUM_LAST[name])]
    if name == "glu":
        is_along = own.dim in _dims(function.argument(1, "dim", -1), given.dim())
        _check(not is_along or own.num_parts == NUM_GATED, "along heads")
        return [own._replace(num_parts=1) if is_along else own]
    if name == "repeat_interleave":
        are_numbers = all(isinstance(function.argument(*each), int) for each in ((1, "repeats"), (2, "dim")))
        _check(are_numbers, "without a number and a dimension")
        return [own]
    over = _dims(function.argument(1, "dim"), given.dim())
    _check(bool(over) and own.dim not in over, "over heads")
    (made,) = _without_values(function)
    num_behind = sum(dim > own.dim for dim in over) if made.dim() < given.dim() else 0
    return [own._replace(dim=own.dim + num_behind)]


def _elementwise(function: _Function, given: Sequence[Tensor], others: Sequence[Tensor], own: Blocks) -> Followed:
    """Blocks of results of a function that treats all elements alike, which is tried without values."""
    name, args = function.name, function.args
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    _check(not writes or any(args[:1] and args[0] is tensor for tensor in given), "which writes to another tensor")
    _check(all(_is_alike(each, own.dim) for each in others), "with a tensor that has something else for each head")
    with _disable_current_modes(), torch.no_grad(), preserved_generators((args, function.kwargs)):
        try:
            tried = function.of_copies(_empty)
            with Elementwise() as found:
                results = tried.results()
        except (NotImplementedError, RuntimeError):  # such as a move to a device
            tried = function.of_copies(lambda tensor: tensor.detach().clone())
            with Elementwise() as found:
                results = tried.results()
    _check(not found.other, f"which runs {found.other}")
    shape = torch.broadcast_shapes(*(each.shape for each in (*given, *others)))
    _check(all(each.shape == shape for each in results), "which makes another shape")
    return Followed((own,) * len(results), found.is_random)


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise MixedError(otherwise)


def _dims(dims: Any, num_dims: int) -> set[int]:
    """Dimensions counted from the end."""
    every = [dims] if isinstance(dims, int) else dims
    return {dim - num_dims if dim >= 0 else dim for dim in every}


def _is_alike(tensor: Tensor, dim: int) -> bool:
    """Tells if a tensor has the same for all blocks along a dimension."""
    return tensor.dim() < -dim or tensor.shape[dim] == 1


def _empty(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Tensor without values, with these strides or its own."""
    return torch.empty_strided(tensor.shape, strides or tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_values(function: _Function, strides: Sequence[int] | None = None) -> list[Tensor]:
    """Results of a function of one tensor, with these strides, without values."""
    with _disable_current_modes(), torch.no_grad():
        return function.of_copies(partial(_empty, strides=strides)).results()


def _reshaped(shape: Sequence[int], own: Blocks, new_shape: Sequence[int]) -> Blocks:
    """Blocks of a tensor that got another shape, whose elements stay in their order.

    As many elements are before the dimension, and parts of it that follow each other are blocks if the first
    dimension that they are cut into can be cut into as many. Where that has all of its parts, blocks are in the next.
    """
    before, num_parts = math.prod(shape[: len(shape) + own.dim]), own.num_parts
    for dim, size in enumerate(new_shape):
        if size > 1 and math.prod(new_shape[:dim]) == before:
            if size == num_parts:
                before, num_parts = before * size, 1
                continue
            number = math.gcd(own.number, size // num_parts) if size % num_parts == 0 else 1
            _check(number > 1, "which cuts heads, or joins them with something else")
            return Blocks(dim - len(new_shape), number, num_parts)
    raise MixedError("which cuts heads, or joins them with something else")


def _where_stride_is_one(result: Tensor, given: Tensor, own: Blocks) -> Blocks:
    """Blocks of a view of a tensor that had strides of 0 but along its blocks."""
    strides = enumerate(zip(result.shape, result.stride(), strict=True))
    found = [dim for dim, (size, stride) in strides if stride and size > 1]
    _check(len(found) == 1 and result.stride(found[0]) == 1, "which takes some heads")
    part, size = given.shape[own.dim] // own.num_parts, result.shape[found[0]]
    _check(size % part == 0 and result.storage_offset() % part == 0, "which takes some heads")
    return own._replace(dim=found[0] - result.dim(), num_parts=size // part)
