"""`SplitModule`: an operator in slices that keeps its identity, its attributes, its hooks and its state dict.

Optimizers' state goes by the names of slices, or by those of whole operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor
from typing_extensions import Self, override

from lightning_osdp.core.slices import slice_sizes
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.splitting.sharded import JoinedShards, ShardedParameter

_BOOKKEEPING = frozenset(vars(nn.Module()))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Layout of one parameter of a whole operator in slices."""

    whole: str
    """Qualified name of the parameter in the model before the split."""
    pieces: tuple[str, ...]
    """Names of the pieces; a single one for a parameter that is moved, not cut."""
    dim: int
    sizes: tuple[int, ...]
    """Lengths of the pieces along ``dim``."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    @property
    def first_shape(self) -> tuple[int, ...]:
        """Shape of the first piece."""
        return (*self.shape[: self.dim], self.sizes[0], *self.shape[self.dim + 1 :])

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Joins pieces to one tensor; a single one is returned itself, and shards stay in place, in `JoinedShards`."""
        if len(pieces) == 1:
            return pieces[0]
        if isinstance(pieces[0], DTensor):
            return JoinedShards(pieces, self.dim, self.whole)
        return torch.cat(list(pieces), self.dim)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Cuts one tensor into pieces, as views; `JoinedShards` give the shards that they were joined of."""
        if len(self.sizes) == 1:
            return [whole]
        if isinstance(whole, JoinedShards):
            return list(whole.pieces)
        return list(torch.split(whole, list(self.sizes), self.dim))


class SplitModule(nn.Module):
    """Operator whose parameters are cut along its features, in ``slices.0``, ``slices.1`` and so on.

    The module that is split becomes one by changing its class, so that references to it stay valid. Parameters that are
    not cut live in the last slice, so that ``named_parameters`` keeps its order. State dicts are those of the whole
    operator. ``module.weight`` gives the whole parameter; where it is sharded, it gives a tensor with its shape and
    dtype that raises where values are needed.

    A kind of operator declares its own subclass and says in ``forward`` how the slices work together.
    """

    cuts_along: ClassVar[Mapping[str, int]]
    """Parameter that is cut -> its dimension of the features."""
    features: ClassVar[str]
    """Attribute with the number of features, which the slices have too, with their own."""
    slices: nn.ModuleList
    _whole_type: type[nn.Module]
    _whole_shapes: dict[str, tuple[int, ...] | None]
    """Parameter -> its shape; None for one that is left out."""

    @classmethod
    def of(cls, module: nn.Module, num_slices: int) -> Self:
        """Splits a module in place, copying its parameters, and returns it; see `splitters.split`."""
        sizes = slice_sizes(getattr(module, cls.features), num_slices)
        parameters = dict(module._parameters)
        shapes = {name: None if p is None else tuple(p.shape) for name, p in parameters.items()}
        slices = nn.ModuleList(cls._slice_of(module, size) for size in sizes)
        slices.training = module.training
        module._parameters.clear()
        whole_type, module.__class__ = type(module), cls
        assert isinstance(module, cls)
        module.slices, module._whole_type, module._whole_shapes = slices, whole_type, shapes
        module.fill(parameters)
        return module

    def fill(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        """Gives the slices copies of their parts of whole parameters, as new parameters."""
        for cut in self.cuts():
            whole = parameters[cut.whole]
            assert whole is not None
            for holder, piece in zip(self._holders(cut.whole), cut.cut(whole.detach()), strict=True):
                copied = piece.clone(memory_format=torch.contiguous_format)
                holder._parameters[cut.whole] = parameter_like(copied, whole)

    def cuts(self, prefix: str = "") -> Iterator[Cut]:
        """Layouts of the parameters in the slices, in their order; the prefix is the name of the module and a dot."""
        last = len(self.slices) - 1
        for name, shape in self._whole_shapes.items():
            if shape is None:
                continue
            is_cut = name in self.cuts_along
            dim = self.cuts_along[name] if is_cut else 0
            yield Cut(
                whole=f"{prefix}{name}",
                pieces=tuple(f"{prefix}slices.{index}.{name}" for index in (range(last + 1) if is_cut else [last])),
                dim=dim,
                sizes=self.sizes if is_cut else (shape[dim],),
                shape=shape,
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Features of each slice."""
        return slice_sizes(getattr(self, self.features), len(self.slices))

    @classmethod
    def _slice_of(cls, module: nn.Module, size: int) -> nn.Module:
        """Module of the class and configuration of another, with fewer features, and no parameters yet."""
        kind = cls._slice_type(type(module))
        part = kind.__new__(kind)
        nn.Module.__init__(part)
        part.__dict__.update({name: value for name, value in vars(module).items() if name not in _BOOKKEEPING})
        part._parameters.update(dict.fromkeys(module._parameters))
        part.training = module.training
        setattr(part, cls.features, size)
        return part

    @classmethod
    def _slice_type(cls, whole_type: type[nn.Module]) -> type[nn.Module]:
        return whole_type

    def _holders(self, name: str) -> list[nn.Module]:
        """Slices that hold a parameter, or a part of it."""
        slices = list(self.slices)
        return slices if name in self.cuts_along else slices[-1:]

    def _parameter(self, name: str) -> Tensor | None:
        cut = next((cut for cut in self.cuts() if cut.whole == name), None)
        if cut is None:
            return None
        pieces = [getattr(holder, name) for holder in self._holders(name)]
        sharded = [piece for piece in pieces if isinstance(piece, DTensor)]
        if 0 < len(sharded) < len(pieces):  # the other slices are unsharded now
            return ShardedParameter(cut.shape, sharded[0], name)
        return cut.join(pieces)

    @override
    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_whole_shapes", ()):
            return self._parameter(name)
        return super().__getattr__(name)

    @override
    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """State dict with the names and shapes of the whole operator."""
        state: dict[str, Any] = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for cut in self.cuts(prefix):
            state[cut.whole] = cut.join([state.pop(piece) for piece in cut.pieces])
        return state

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        *_, error_msgs = others
        for cut in self.cuts(prefix):
            whole = state_dict.pop(cut.whole, None)
            if whole is None:
                continue
            if tuple(whole.shape) == cut.shape:
                state_dict.update(zip(cut.pieces, cut.cut(whole), strict=True))
            else:
                error_msgs.append(
                    f"size mismatch for {cut.whole}: copying a param with shape {tuple(whole.shape)} from checkpoint,"
                    f" the shape in current model is {cut.shape}."
                )
        super()._load_from_state_dict(state_dict, prefix, *others)

    @override
    def extra_repr(self) -> str:
        return f"{self._whole_type.__name__} of {getattr(self, self.features)} features in {len(self.slices)} slices"


def parameter_like(values: Tensor, like: Tensor) -> nn.Parameter:
    """Parameter with these values, and with all attributes that users have set on another one."""
    parameter = nn.Parameter(values, requires_grad=like.requires_grad)
    vars(parameter).update(vars(like))
    return parameter


def cuts_of(root: nn.Module) -> list[Cut]:
    """Layouts of the parameters of a model's split operators, by the names of the user's own model."""
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
                if _has_shape(value, cut.first_shape)
                else value  # such as the number of steps
                for field, value in pieces[0].items()
            }
    groups = [{**group, "params": join_names(group["params"], cuts)} for group in state["param_groups"]]
    return {**state, "state": states, "param_groups": groups}


def cut_states(state: Mapping[str, Any], cuts: Sequence[Cut]) -> dict[str, Any]:
    """Undoes `join_states` of ``state["state"]``: fields by names of slices, from fields by names of operators."""
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
