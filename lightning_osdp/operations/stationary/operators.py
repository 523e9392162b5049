"""Operators that move activations instead of weights: modules of users that change their class in place.

Names and attributes stay, and names of parameters, but for an operator that makes queries, keys and values, or gates
and values: it is cut into slices, as a split one is. Parameters are DTensors, cut over ranks as ``fully_shard`` cuts
them: in rows or, where a kind needs it, in columns.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from typing_extensions import Self, override

from lightning_osdp.core.exchange import (
    BY_HEADS,
    FED_KINDS,
    MOST_COLUMNS,
    num_parts,
    numbers_of_operators,
)
from lightning_osdp.errors import ConfigurationError, RanksApartError
from lightning_osdp.operations.splitting import (
    BY_OUTPUTS,
    Cut,
    SplitModule,
    class_name,
    inside_compiled,
    parameter_like,
)
from lightning_osdp.operations.stationary.between import Pair
from lightning_osdp.operations.stationary.exchanges import (
    MOVE_WEIGHTS,
    Call,
    gather,
    is_in_torch_func,
    own_part,
    part_sizes,
    sum_up,
    to_features,
    to_samples,
)
from lightning_osdp.operations.stationary.features import Features
from lightning_osdp.operations.stationary.heads import Heads
from lightning_osdp.operations.stationary.waiting import NUM_GATHERS, WaitingOutputs

_Any = TypeVar("_Any")
_STATE = "_osdp_stationary"
"""Attribute of modules that move activations."""
_GATHERED = "_osdp_gathered"
"""Attribute of an input that one of several operators has gathered for all: by operators, until all have taken it."""

_NO_GRADIENTS, _WEIGHT_GRADIENTS, _INPUT_GRADIENTS = range(3)
"""Gradients that a rank wants of a call: none, of weights, and of its input, too."""
_NUM_WANTED = 3
_NUM_SHAPES = 2**20
"""Numbers by which ranks tell apart of what shape their rows are."""


class _Coming(NamedTuple):
    """Report of a rank that comes to an operator, which is one number for the others."""

    num_rows: int
    place: int
    gathered: int
    wanted: int
    shape: int
    """Number of the shape of its rows."""

    def packed(self) -> int:
        number = (self.num_rows * MOST_COLUMNS + self.place) * (NUM_GATHERS + 1) + self.gathered
        return (number * _NUM_WANTED + self.wanted) * _NUM_SHAPES + self.shape

    @classmethod
    def unpacked(cls, number: int) -> Self:
        number, shape = divmod(number, _NUM_SHAPES)
        number, wanted = divmod(number, _NUM_WANTED)
        number, gathered = divmod(number, NUM_GATHERS + 1)
        return cls(*divmod(number, MOST_COLUMNS), gathered, wanted, shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks that an operator is cut over, and how it computes on them."""

    mesh: DeviceMesh
    """Mesh of these ranks; or of nodes and the ranks of a node, among which activations are exchanged."""
    numbers_of_ranks: Callable[[int], Sequence[int]]
    """Gives, for a number of this rank, those of all ranks, who all call it; raises where ranks are apart."""
    before_backward: Callable[[bool, int], object] = lambda _, __: None
    """Called before each exchange in backward, see `Call.before_backward`."""
    numbers_at_end: Callable[[int], Sequence[int]] | None = None
    """Like ``numbers_of_ranks``, before the last of operators that feed each other, to which all ranks come that have
    begun; None for that itself."""
    on_function: Callable[[int], object] = lambda _: None
    """Called with a number for each function between operators that feed each other, see `Call.on_function`."""
    outputs: WaitingOutputs = field(default_factory=WaitingOutputs)
    """Has the outputs of exchanges until backward comes to them."""
    dtype: torch.dtype | None = None
    """Precision to compute in; None for that of the parameters."""
    casts_inputs: bool = False
    """True if inputs are cast to that precision."""
    reduce_dtype: torch.dtype | None = None
    """Precision in which gradients are summed between nodes; None for that of the parameters."""

    @property
    def num_parts(self) -> int:
        """Number of ranks that exchange activations, each of which has a part of the weights."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def sum_between(self, gradient: Tensor) -> Tensor:
        """Sums gradients of the same part of a parameter over nodes, in place."""
        if self.mesh.ndim > 1:
            self.before_backward(self.outputs.is_any_agreed, 0)
            summed = gradient.to(self.reduce_dtype or gradient.dtype)
            dist.all_reduce(summed, group=self.mesh.get_group(0))
            if summed is not gradient:
                gradient.copy_(summed)
        return gradient

    def end(self, num_rows: int) -> Sequence[int]:
        """Numbers of rows with which ranks come to the last of operators that feed each other.

        Raises:
            RanksApartError: some come to another one.
        """
        numbers = (self.numbers_at_end or self.numbers_of_ranks)(num_rows) if self.mesh.size() > 1 else [num_rows]
        return self._here(numbers)

    def _here(self, of_ranks: Sequence[_Any]) -> Sequence[_Any]:
        """Values of the ranks of this node, which follow each other, of those of all ranks."""
        node = self.mesh.get_local_rank(0) if self.mesh.ndim > 1 else 0
        return of_ranks[node * self.num_parts :][: self.num_parts]

    def call(self, rows: Tensor, lead: Sequence[int] = (), *, place: int = 0, gathered: int = 0) -> tuple[Tensor, Call]:
        """Begins a call of an operator with rows, which all ranks make at a time.

        Returns the call with rows that need gradients if those of any rank do. ``lead`` is the shape of the rows,
        ``place`` that of the operator among those that take one input, and ``gathered`` the number of what another of
        them has gathered, see `_Left`.

        Raises:
            ConfigurationError: ``torch.func`` calls it.
            RanksApartError: some ranks want gradients, and others do not; or some call another operator.
        """
        if is_in_torch_func():
            raise ConfigurationError(
                "Expected operators that move activations to be called outside of torch.func, which cannot transform"
                f" exchanges between ranks. {MOVE_WEIGHTS}"
            )
        wanted = _INPUT_GRADIENTS if rows.requires_grad else _WEIGHT_GRADIENTS
        wanted = wanted if torch.is_grad_enabled() else _NO_GRADIENTS
        shape = zlib.crc32(repr(tuple(lead)).encode()) % _NUM_SHAPES
        number = _Coming(len(rows), place, gathered, wanted, shape).packed()
        numbers = self.numbers_of_ranks(number) if self.mesh.size() > 1 else [number]
        coming = [_Coming.unpacked(each) for each in numbers]
        wanted_by_ranks = {each.wanted for each in coming}
        if {each.place for each in coming} != {place}:
            raise RanksApartError(
                "Expected all ranks to call operators that move activations in the same order, for each computes with"
                " its part of the weights for the samples of all, but they call several of one input in another order."
                f" {MOVE_WEIGHTS}"
            )
        if len(wanted_by_ranks) > 1 and _NO_GRADIENTS in wanted_by_ranks:
            raise RanksApartError(
                "Expected all ranks or none to call an operator that moves activations under torch.no_grad, for each"
                " computes with its part of the weights for the samples of all, but some ranks want gradients of this"
                f" call. {MOVE_WEIGHTS}"
            )
        if wanted < max(wanted_by_ranks):
            rows = rows.detach().requires_grad_()  # takes part in the exchange of the others' gradients
        return rows, Call(
            group=self.mesh.get_group(self.mesh.ndim - 1),
            rank=self.rank,
            rows=tuple(each.num_rows for each in self._here(coming)),
            have_gathered={each.gathered for each in coming} == {gathered} != {0},
            are_alike={(each.num_rows, each.shape) for each in coming} == {(len(rows), shape)},
            before_backward=self.before_backward,
            on_function=self.on_function,
            outputs=self.outputs,
        )


@dataclass(frozen=True, eq=False)
class _Columns:
    """Several operators that take the same input, which is gathered once for all of them."""

    number: int
    """Number of these operators."""


class _Left(NamedTuple):
    """Input of all ranks, which the first of several columns has left with its own input for the others."""

    gathered: Tensor
    number: int
    """Number of the gather, see `WaitingOutputs.next_gather`."""
    version: Any
    """Tells changes in place of the own input, and of what it is cast to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    ranks: Ranks
    whole_type: type[nn.Module]
    pair: Pair | None = None
    columns: _Columns | None = None
    """Operators that take its input; None where it has that alone."""
    place: int = 0
    """Place among them."""


class _Stationary(nn.Module):
    """Module whose class was changed."""

    _osdp_stationary: _State

    def _own(self, name: str) -> Any:
        """This rank's part of a parameter, in the precision to compute in; None where there is no such parameter."""
        parameter: Any = self._parameters[name]
        if parameter is None:
            return None
        own = own_part(parameter, self._osdp_stationary.ranks.sum_between)
        return own if self._osdp_stationary.ranks.dtype is None else own.to(self._osdp_stationary.ranks.dtype)


class _Linear(_Stationary):
    """y = x W^T + b."""

    _out_dim = 0
    """Dimension of the outputs in the weight."""

    @property
    def _num_outputs(self) -> int:
        weight: Any = self._parameters["weight"]
        return int(weight.shape[self._out_dim])

    def _own_weight(self) -> Tensor:
        weight: Tensor = self._own("weight")
        return weight.t() if self._out_dim else weight

    def _begin(self, x: Tensor, gathered: int = 0) -> tuple[Tensor, Call]:
        """Rows of an input, in the precision to compute in, and the call.

        Raises:
            RuntimeError: the input has another number of features.
        """
        weight: Any = self._parameters["weight"]
        num_inputs, ranks = weight.shape[1 - self._out_dim], self._osdp_stationary.ranks
        if x.shape[-1:] != (num_inputs,):
            raise RuntimeError(f"Expected an input with {num_inputs} features, got one of shape {tuple(x.shape)}.")
        rows = self._to_compute(x.reshape(-1, num_inputs))
        return ranks.call(rows, x.shape[:-1], place=self._osdp_stationary.place, gathered=gathered)

    def _to_compute(self, rows: Tensor) -> Tensor:
        """Rows in the precision to compute in, before they are sent."""
        ranks, device = self._osdp_stationary.ranks, rows.device.type
        if ranks.casts_inputs and rows.is_floating_point():
            rows = rows.to(ranks.dtype)
        if torch.is_autocast_enabled(device) and rows.is_floating_point() and rows.dtype != torch.float64:
            rows = rows.to(torch.get_autocast_dtype(device))
        return rows


def _leave_with(x: Tensor, operators: Pair | _Columns, value: Any) -> None:
    vars(x).setdefault(_GATHERED, {})[operators] = value


def _taken_from(x: Tensor, operators: Pair | _Columns) -> Any:
    """Takes from an input what was left with it for these operators; None if there is nothing."""
    left = vars(x).get(_GATHERED, {})
    found = left.pop(operators, None)
    if _GATHERED in vars(x) and not left:
        del vars(x)[_GATHERED]
    return found


class _Column(_Linear):
    """Each rank has some of the outputs, and gets the inputs of all samples."""

    def _features_of(self, gathered: Tensor) -> Tensor:
        return F.linear(gathered, self._own_weight(), self._own("bias"))

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, outputs), for this rank's input, (*, inputs)."""
        gathered, call = self._gathered(input)
        features = self._features_of(gathered)
        del gathered  # which nothing else holds in evaluations
        outputs = to_samples(features, call, self._num_outputs)
        return outputs.view(*input.shape[:-1], self._num_outputs)

    def _gathered(self, x: Tensor) -> tuple[Tensor, Call]:
        """Input of all ranks, and the call. The first of several columns leaves it with its own input, for the others.

        Without gradients each gathers its own: changes in place are not known of inference tensors.
        """
        columns, place = self._osdp_stationary.columns, self._osdp_stationary.place
        if columns is None or not torch.is_grad_enabled() or x.is_inference():
            rows, call = self._begin(x)
            return gather(rows, call), call
        autocasts = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
        version = x._version, x.requires_grad, autocasts
        left: _Left | None = _taken_from(x, columns)
        is_same = left is not None and left.version == version
        rows, call = self._begin(x, left.number if left is not None and is_same else 0)
        if left is None or not call.have_gathered:
            left = _Left(gather(rows, call), call.outputs.next_gather(), version)
        if place < columns.number - 1:
            _leave_with(x, columns, left)
        return left.gathered, call


class _First(_Column):
    """First operator of a pair, or one of several that take the same input."""

    def _gathered_for(self, pair: Pair, x: Tensor) -> tuple[Tensor, Call]:
        """Input of all ranks, and the call. The first of several operators leaves them with its input, for others."""
        version = 0 if x.is_inference() else x._version  # which counts changes in place
        left = _taken_from(x, pair)
        if left is None or left[0] != version:
            rows, call = self._begin(x)
            left = version, (gather(rows, call), call)
        if self._osdp_stationary.place < len(pair.operators) - 2:
            _leave_with(x, pair, left)
        return left[1]  # type: ignore[no-any-return]

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Outputs that this rank has of the samples of all ranks, (..., rows of all ranks, part of the outputs)."""
        pair = self._osdp_stationary.pair
        assert pair is not None
        gathered, call = self._gathered_for(pair, input)
        features = self._features_of(gathered)
        ones = [1] * (input.dim() - 2)
        return Features.of(features.view(*ones, *features.shape), pair, call, input.shape[:-1])


class _Projection(_First):
    """Operator of queries, keys or values, which makes this rank's heads of the samples of all.

    Where these differ in shape it makes all heads of this rank's samples, as a column does.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Outputs of the shape of those of the whole operator, (*, outputs), for an input of shape (*, inputs)."""
        return _projected([self], input)


def _projected(parts: Sequence[_Projection], x: Tensor) -> Tensor:
    """Outputs beside each other of operators that gather one input, as those of `_Projection`."""
    first, lead = parts[0], x.shape[:-1]
    pair = first._osdp_stationary.pair
    assert pair is not None
    gathered, call = first._gathered_for(pair, x)
    taken = _Summed(len(parts)).taken if len(parts) > 1 else lambda x: x
    features = [part._features_of(taken(gathered)) for part in parts]
    pair.by_itself = None if call.are_alike and len(gathered) and len(call.rows) > 1 else call
    if pair.by_itself is None:
        return Heads.from_rows(features, pair, call, lead)
    outputs = (to_samples(own, call, part._num_outputs) for own, part in zip(features, parts, strict=True))
    return torch.cat([each.view(*lead, each.shape[1]) for each in outputs], -1)


class _Summed:
    """Gradients of a tensor that several operators take, all of which have one: they are added up in place.

    Autograd would hold two of them and their sum.
    """

    def __init__(self, number: int) -> None:
        self._number, self._num_missing = number, number
        self._total: Tensor | None = None

    def taken(self, tensor: Tensor) -> Tensor:
        """The tensor as one of the operators takes it."""
        found: Tensor = _Taken.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    def add(self, gradient: Tensor) -> Tensor | None:
        """Adds a gradient; the last one returns their sum."""
        self._total = gradient if self._total is None else self._total.add_(gradient)
        self._num_missing -= 1
        if self._num_missing:
            return None
        total, self._total, self._num_missing = self._total, None, self._number
        return total


class _Taken(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, summed: _Summed) -> Tensor:
        ctx.summed = summed
        return tensor.view_as(tensor)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.summed.add(gradient), None


class _Projections(_Stationary):
    """Operator that makes queries, keys and values, or the like, each by a slice of its own that is cut over ranks."""

    slices: nn.ModuleList

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Outputs of the shape of those of the whole operator, (*, outputs), for an input of shape (*, inputs)."""
        return _projected([*self.slices], input)


class _Row(_Linear):
    """Each rank has some of the inputs, of all samples, and makes summands of all outputs."""

    def _outputs_of(self, features: Tensor, call: Call) -> Tensor:
        own = self._own("bias")
        bias = None
        if own is not None:  # each rank adds its part of the bias to its summands, so that it is added once
            sizes = part_sizes(self._num_outputs, len(call.rows))
            before = sum(sizes[: call.rank])
            bias = F.pad(own, (before, self._num_outputs - before - len(own)))
        return sum_up(F.linear(features, self._own_weight(), bias), call)

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, outputs), for this rank's input, (*, inputs)."""
        rows, call = self._begin(input)
        outputs = self._outputs_of(to_features(rows, call), call)
        return outputs.view(*input.shape[:-1], self._num_outputs)


class _Last(_Row):
    """Last operator of a pair."""

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, outputs), for features that the first operators made.

        Raises:
            ConfigurationError: the input is something else.
        """
        pair = self._osdp_stationary.pair
        assert pair is not None
        if not isinstance(input, Features) or input.pair is not pair:
            raise ConfigurationError(
                f"Expected {pair.operators[-1]!r} to be given what {pair.firsts} made, with elementwise functions"
                f" between, for they move activations as a pair; got another {type(input).__name__}."
                f" {MOVE_WEIGHTS}"
            )
        self._osdp_stationary.ranks.end(0)
        outputs = self._outputs_of(self._to_compute(input.plain().flatten(0, -2)), input.call)
        return outputs.view(*input.lead, self._num_outputs)


class _Attended(_Row):
    """Operator that takes what attention makes."""

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, outputs), for what attention makes of the heads of projections.

        Raises:
            ConfigurationError: the input is something else.
        """
        pair, lead = self._osdp_stationary.pair, input.shape[:-1]
        assert pair is not None
        heads = input if isinstance(input, Heads) else None
        call = pair.by_itself if heads is None else heads.call
        if call is None or (heads is not None and heads.pair is not pair):
            raise ConfigurationError(
                f"Expected {pair.operators[-1]!r} to be given what is made head by head of what {pair.firsts} made, for"
                f" they move activations by heads; got another {type(input).__name__}. {MOVE_WEIGHTS}"
            )
        # attention may leave fewer rows than it was given
        call = replace(call, rows=tuple(self._osdp_stationary.ranks.end(lead.numel())))
        if heads is None:
            features = to_features(self._to_compute(input.reshape(-1, input.shape[-1])), call)
        elif len({*call.rows}) > 1:
            raise RanksApartError(
                f"Expected {pair.operators[-1]!r} to be given as many rows on each rank, for it has some heads of"
                f" all ranks' samples, got {call.rows}. Cut samples by what is the same on all ranks. {MOVE_WEIGHTS}"
            )
        else:
            features = self._to_compute(heads.rows())
        return self._outputs_of(features, call).view(*lead, self._num_outputs)


class _Embedding(_Stationary):
    """Each rank has some of the features of all rows, and gets the indices of all samples."""

    padding_idx: int | None

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, features), for this rank's indices, (*)."""
        parameter: Any = self._parameters["weight"]
        num_features = int(parameter.shape[1])
        rows, call = self._osdp_stationary.ranks.call(input.reshape(-1, 1))
        indices = gather(rows, call)[:, 0]
        found = F.embedding(indices, self._own("weight"), self.padding_idx)
        return to_samples(found, call, num_features).view(*input.shape, num_features)


_LINEAR = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
_OUT_DIMS = dict(zip(_LINEAR, (0, 1), strict=True))
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "column": _LINEAR,
    "row": _LINEAR,
    "pair": _LINEAR,
    "attention": _LINEAR,
    "heads": _LINEAR,
    "gated": _LINEAR,
    "embedding": ("torch.nn.modules.sparse.Embedding",),
}
"""Classes of the operators of each kind, by their qualified names so that nothing need be imported."""
_ROLES: Mapping[str, tuple[type[_Stationary], ...]] = {
    "column": (_Column,),
    "row": (_Row,),
    "pair": (_First, _Last),
    "attention": (_Projection, _Attended),
    "heads": (_Projection, _Attended),
    "gated": (_Projection, _Attended),
    "embedding": (_Embedding,),
}
"""Classes that the operators of each kind get; where there are more, the others have the first class."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refusal(root: nn.Module, kind: str, operators: Sequence[str]) -> str:
    """Reason why operators of a model, not changed yet, cannot move activations; empty where they can.

    ``kind`` is one of ``core.exchange.KINDS``, and operators are given by their qualified names in forward order.
    """
    owners = Counter(parameter for module in root.modules() for parameter in module.parameters(recurse=False))
    in_graphs = inside_compiled(root)
    numbers = numbers_of_operators(kind)
    if len(operators) not in numbers:
        return f"{kind!r} is of {' or '.join(map(str, numbers))} operators, not of {list(operators)}"
    modules = [root.get_submodule(name) for name in operators]
    for name, module in zip(operators, modules, strict=True):
        found = class_name(type(module))
        if found not in _CLASSES[kind]:
            return f"{name!r} is {found} and not exactly of one of {_CLASSES[kind]}"
        reason = refusal_of_one(root, name)
        if not reason and any(owners[parameter] > 1 for parameter in module.parameters(recurse=False)):
            reason = "shares its weights"
        if not reason and module in in_graphs:
            reason = "is compiled, or inside of a module that is: torch.compile knows no exchanges"
        if reason:
            return f"{name!r} {reason}"
    return _refusal_together(kind, operators, modules)


def _refusal_together(kind: str, operators: Sequence[str], modules: Sequence[nn.Module]) -> str:
    """Reason why modules, each of which may be an operator of this kind, cannot be those of one exchange, if any."""
    weights: list[Any] = [module._parameters["weight"] for module in modules]
    dims = [_OUT_DIMS.get(class_name(type(module)), 0) for module in modules]
    taken = [weight.shape[1 - dim] for weight, dim in zip(weights, dims, strict=True)]
    number = num_parts(kind, len(modules))
    if number > 1:
        made = weights[0].shape[dims[0]]
        if made % number or made != getattr(modules[0], BY_OUTPUTS[class_name(type(modules[0]))].features):
            return f"{operators[0]!r} does not make {number} parts of as many features"
    if len({*modules}) < len(modules):
        return f"{list(operators)} are not modules of their own"
    of_one_input = {"column": taken, "attention": taken[:-1]}.get(kind, ())
    if len({*of_one_input}) > 1:
        return " and ".join(f"{name!r} takes {number}" for name, number in zip(operators, of_one_input, strict=False))
    for name, weight, dim in zip(operators[:-1], weights, dims, strict=False) if kind == "pair" else ():
        made = weight.shape[dim]
        if made != taken[-1] or weight.dtype != weights[-1].dtype:
            return (
                f"{operators[-1]!r} takes {taken[-1]} features of {weights[-1].dtype}, and"
                f" {name!r} makes {made} of {weight.dtype}"
            )
    return ""


def refusal_of_one(root: nn.Module, name: str) -> str:
    """Reason why one operator cannot move activations; empty where it can.

    Its class, other users of its weights and compiled modules around it are left out.
    """
    module, parent = root.get_submodule(name), root.get_submodule(name.rpartition(".")[0])
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    reasons = {
        "is the layer that an adapter is around": getattr(parent, "base_layer", None) is module,
        "has a forward of its own": "forward" in vars(module),
        "has hooks": any(vars(module)[hooks] for hooks in _HOOKS),
        "has hooks of its weights": any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters),
        "has weights of another class than torch's": any(type(p) is not nn.Parameter for p in parameters),
        "has other parameters than a weight and a bias": not {"weight"}
        <= module._parameters.keys()
        <= {"weight", "bias"},
        "has modules or buffers inside": bool(module._modules or module._buffers),
        "has max_norm, scale_grad_by_freq or sparse": any(
            getattr(module, option, None) for option in ("max_norm", "scale_grad_by_freq", "sparse")
        ),
    }
    return next((text for text, is_so in reasons.items() if is_so), "")


def make_stationary(root: nn.Module, kind: str, operators: Sequence[str], ranks: Ranks) -> None:
    """Makes operators of a model move activations, in place; they can, see `refusal`. Call it on all ranks.

    Each rank keeps its part of the parameters that it has, in memory of its own on the device of the mesh.
    """
    pair = Pair(tuple(operators)) if kind in FED_KINDS else None
    if kind in BY_HEADS:
        _check_heads(root, kind, operators, ranks)
    columns = _Columns(len(operators)) if kind == "column" and len(operators) > 1 else None
    first, *others = _ROLES[kind]
    roles = [first] * (len(operators) - len(others)) + others
    for place, (module, role) in enumerate(zip(map(root.get_submodule, operators), roles, strict=True)):
        state = _State(ranks=ranks, whole_type=type(module), pair=pair, columns=columns, place=place)
        parts, number = [module], num_parts(kind, len(operators)) if place == 0 else 1
        if number > 1:
            parts = [*BY_OUTPUTS[class_name(type(module))].of(module, number).slices]
            _change(module, _Projections, state)
        for part in parts:
            out_dim = _OUT_DIMS.get(class_name(type(part)), 0)
            # columns and the first of a pair are cut along outputs, the others along inputs; embeddings along features
            weight_dim = 1 if role is _Embedding else out_dim if issubclass(role, _Column) else 1 - out_dim
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = _cut(parameter, ranks, weight_dim if name == "weight" else 0)
            _change(part, role, state)


def _change(module: nn.Module, role: type[_Stationary], state: _State) -> None:
    """Gives a module a class of this role."""
    vars(module)[_STATE] = state
    module.__class__ = _class_of(role, type(module))  # type: ignore[arg-type]


def _check_heads(root: nn.Module, kind: str, operators: Sequence[str], ranks: Ranks) -> None:
    """Raises `ConfigurationError` unless each rank has as many features of attention."""
    *firsts, last = ((name, root.get_submodule(name)) for name in operators)
    dims = [(name, module, 0) for name, module in firsts] + [(*last, 1)]
    num_made = num_parts(kind, len(operators))
    for name, module, dim in dims:
        weight: Any = module._parameters["weight"]
        number = weight.shape[abs(_OUT_DIMS[class_name(type(module))] - dim)]
        number = number if dim else number // num_made
        if number % ranks.num_parts:
            raise ConfigurationError(
                f"Expected features that {ranks.num_parts} ranks divide, for each is to have some heads, got {number}"
                f" of {name!r}. {MOVE_WEIGHTS}"
            )


def is_stationary(module: object) -> bool:
    """Tells if a module moves activations."""
    return isinstance(module, _Stationary)


@contextmanager
def as_whole(
    module: nn.Module, whole_of: Callable[[Any], nn.Parameter], write: Callable[[Any, Tensor], object] | None
) -> Iterator[None]:
    """Gives a module that moves activations whole parameters and the class that it had, within the context.

    Args:
        module: an operator, not a slice of one.
        whole_of: gives the whole parameter of a part that this rank has; all ranks call it.
        write: takes at the end such a part, and its values in whole ones; not called after an error.
    """
    kind, state, parts, inside = type(module), vars(module)[_STATE], {**module._parameters}, {**module._modules}
    cuts = {cut.whole: cut for cut in module.cuts()} if isinstance(module, SplitModule) else {}
    names = module._whole_shapes if isinstance(module, SplitModule) else parts  # with those that are left out
    pieces: dict[str, list[Any]] = {name: [part] for name, part in parts.items() if part is not None}
    pieces |= {name: [module.get_parameter(piece) for piece in cut.pieces] for name, cut in cuts.items()}
    wholes = {name: _joined([*map(whole_of, own)], cuts.get(name)) for name, own in pieces.items()}
    module._modules.clear()
    module._parameters.clear()
    module._parameters.update({name: wholes.get(name) for name in names})
    del vars(module)[_STATE]
    module.__class__ = state.whole_type
    try:
        yield
        for name, own in pieces.items() if write else ():
            whole = wholes[name].detach()
            for each in zip(own, cuts[name].cut(whole) if name in cuts else [whole], strict=True):
                write(*each)  # type: ignore[misc]
    finally:
        module.__class__ = kind
        vars(module)[_STATE] = state
        module._modules.update(inside)
        module._parameters.clear()
        module._parameters.update(parts)


def _joined(wholes: Sequence[nn.Parameter], cut: Cut | None) -> nn.Parameter:
    """Parameter of an operator, of those of its slices; itself where there are none."""
    return wholes[0] if cut is None else parameter_like(cut.join([each.detach() for each in wholes]), wholes[0])


def _cut(parameter: nn.Parameter, ranks: Ranks, dim: int) -> nn.Parameter:
    """Parameter of this rank's part of a whole one, with the attributes that users have set."""
    sizes = part_sizes(parameter.shape[dim], ranks.num_parts)
    own = parameter.detach().split(sizes, dim)[ranks.rank]
    copy = own.to(ranks.mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    placements = [*[Replicate()] * (ranks.mesh.ndim - 1), Shard(dim)]  # each node has all parts
    cut = DTensor.from_local(copy, ranks.mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return parameter_like(cut, parameter)


@cache
def _class_of(role: type[_Stationary], whole_type: type[nn.Module]) -> type[nn.Module]:
    """Subclass of a role and of the module's own class."""
    # The compiler knows neither what ranks agree on nor `Features`: it goes around.
    forward = torch.compiler.disable(role.forward)
    return type(
        whole_type.__name__,
        (role, whole_type),
        {"_out_dim": _OUT_DIMS.get(class_name(whole_type), 0), "forward": forward},
    )
