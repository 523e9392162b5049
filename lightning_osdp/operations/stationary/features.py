"""`Features`: what is between the operators of a pair, where each rank has some features of all ranks' samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Self, override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.stationary.between import (
    OF_GRADIENTS,
    Between,
    Pair,
    digest,
    drawn,
    is_of_one_rank,
    key_of,
    plain,
)
from lightning_osdp.operations.stationary.elementwise import (
    Elementwise,
    is_number_of_all,
    name_of,
    preserved_generators,
)
from lightning_osdp.operations.stationary.exchanges import MOVE_WEIGHTS, Call

_NUM_CHECKED = 2
"""Number of rows on which a function is checked."""


class Features(Between):
    """Tensor (..., rows of all ranks, features of this rank) that only elementwise functions can be applied to.

    Any other function would compute something else here than on the features of one rank's samples: it raises a
    `ConfigurationError`, on all ranks alike. So does a function of another tensor, which may differ
    between ranks, unless that is a parameter of one element, or of features of the same call of the pair, and a
    function that gives sizes.
    """

    lead: torch.Size
    """Shape of the input of the first operators on this rank, without its features."""

    @classmethod
    def of(cls, values: Tensor, pair: Pair, call: Call, lead: torch.Size) -> Self:
        """Features with these values."""
        with DisableTorchFunctionSubclass():
            made: Self = values.as_subclass(cls)
        made.pair, made.call, made.lead = pair, call, lead
        return made

    @override
    def _apply(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        pair, call, shape = self.pair, self.call, self.shape
        if func in OF_GRADIENTS:
            _refuse(pair, func, "of gradients")
        for each in leaves:
            if isinstance(each, Between):
                if each.call is not call:
                    _refuse(pair, func, "of features that were made of another input")
            elif isinstance(each, Tensor) and not is_number_of_all(each):
                why = f"of another tensor, of shape {tuple(each.shape)} and no parameter of one element"
                _refuse(pair, func, why)
        run = partial(func, *tree_map(plain, args), **tree_map(plain, kwargs))
        key = key_of(func, args, kwargs, lambda _: Tensor)
        is_random = pair.known(key, partial(_checked, pair, func, args, kwargs))
        result = drawn(run, call, self.device) if is_random else run()

        if is_of_one_rank(func, result):
            _refuse(pair, func, "which gives what only this rank's features have")
        if any(isinstance(each, Tensor) for each in tree_leaves(result)):
            call.on_function(digest(func, leaves, kwargs))

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.shape != shape:
                _refuse(pair, func, f"which makes shape {tuple(value.shape)} of {tuple(shape)}")
            return Features.of(value, pair, call, self.lead)

        return tree_map(wrapped, result)


def _checked(pair: Pair, func: Any, args: Any, kwargs: Any) -> bool:
    """Tells if a function draws random numbers; refuses it if it is not elementwise. It is run on a few rows."""

    def few(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, Features):
            return value.detach()
        rows = value.plain().detach()[..., :_NUM_CHECKED, :]
        # Of an empty tensor, dropout draws nothing on CPU.
        return rows.clone() if rows.numel() else rows.new_ones([max(1, size) for size in rows.shape])

    given = tree_map(few, (args, kwargs))
    with torch.no_grad(), preserved_generators(given), Elementwise() as found:
        func(*given[0], **given[1])
    if found.other:
        _refuse(pair, func, f"which runs {found.other}")
    return bool(found.is_random)


def _refuse(pair: Pair, func: Any, why: str) -> NoReturn:
    raise ConfigurationError(
        f"Expected only elementwise functions of one tensor between {pair.firsts} and {pair.operators[-1]!r}, which"
        f" move activations as a pair, got {name_of(func)}, {why}. Each rank has some features of all ranks' samples"
        f" there. {MOVE_WEIGHTS}"
    )
