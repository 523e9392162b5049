"""Operators that move activations instead of weights: modules of users that change their class in place.

Names, attributes and parameters' names stay. Parameters are DTensors, cut over ranks as ``fully_shard`` cuts them: in
rows or, where a kind needs it, in columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from typing_extensions import override

from lightning_osdp.core.exchange import numbers_of_operators
from lightning_osdp.errors import ConfigurationError, RanksApartError
from lightning_osdp.operations.splitting import class_name, inside_compiled, parameter_like
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
from lightning_osdp.operations.stationary.features import Features, Pair
from lightning_osdp.operations.stationary.waiting import WaitingOutputs

_STATE = "_osdp_stationary"
"""Attribute of modules that move activations."""
_GATHERED = "_osdp_gathered"
"""Attribute of an input that one of two operators has gathered for both, until the other has taken that, too."""


_NO_GRADIENTS, _WEIGHT_GRADIENTS, _INPUT_GRADIENTS = range(3)
"""Gradients that a rank wants of a call: none, of weights, and of its input, too."""
_NUM_WANTED = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks that an operator is cut over, and how it computes on them."""

    mesh: DeviceMesh
    """Mesh of these ranks; or of nodes and the ranks of a node, among which activations are exchanged."""
    numbers_of_ranks: Callable[[int], Sequence[int]]
    """Gives, for a number of this rank, those of all ranks, who all call it; raises where ranks are apart."""
    before_backward: Callable[[bool], object] = lambda _: None
    """Called before each exchange in backward, see `Call.before_backward`."""
    before_end: Callable[[], object] = lambda: None
    """Called before the exchange at the end of a pair, to which all ranks come that have begun it; raises where ranks
    are apart."""
    on_function: Callable[[int], object] = lambda _: None
    """Called with a number for each function between a pair, see `Call.on_function`."""
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
            self.before_backward(self.outputs.is_any_agreed)
            summed = gradient.to(self.reduce_dtype or gradient.dtype)
            dist.all_reduce(summed, group=self.mesh.get_group(0))
            if summed is not gradient:
                gradient.copy_(summed)
        return gradient

    def call(self, rows: Tensor) -> tuple[Tensor, Call]:
        """Begins a call of an operator with rows, which all ranks make at a time.

        Returns the call with rows that need gradients if those of any rank do.

        Raises:
            ConfigurationError: ``torch.func`` calls it.
            RanksApartError: some ranks want gradients, and others do not.
        """
        if is_in_torch_func():
            raise ConfigurationError(
                "Expected operators that move activations to be called outside of torch.func, which cannot transform"
                f" exchanges between ranks. {MOVE_WEIGHTS}"
            )
        wanted = _INPUT_GRADIENTS if rows.requires_grad else _WEIGHT_GRADIENTS
        wanted = wanted if torch.is_grad_enabled() else _NO_GRADIENTS
        number = _NUM_WANTED * len(rows) + wanted
        numbers = self.numbers_of_ranks(number) if self.mesh.size() > 1 else [number]
        wanted_by_ranks = {each % _NUM_WANTED for each in numbers}
        if len(wanted_by_ranks) > 1 and _NO_GRADIENTS in wanted_by_ranks:
            raise RanksApartError(
                "Expected all ranks or none to call an operator that moves activations under torch.no_grad, for each"
                " computes with its part of the weights for the samples of all, but some ranks want gradients of this"
                f" call. {MOVE_WEIGHTS}"
            )
        if wanted < max(wanted_by_ranks):
            rows = rows.detach().requires_grad_()  # takes part in the exchange of the others' gradients
        node = self.mesh.get_local_rank(0) if self.mesh.ndim > 1 else 0
        here = numbers[node * self.num_parts :][: self.num_parts]  # ranks of a node follow each other
        return rows, Call(
            group=self.mesh.get_group(self.mesh.ndim - 1),
            rank=self.rank,
            rows=tuple(each // _NUM_WANTED for each in here),
            before_backward=self.before_backward,
            on_function=self.on_function,
            outputs=self.outputs,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    ranks: Ranks
    whole_type: type[nn.Module]
    pair: Pair | None = None


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

    def _begin(self, x: Tensor) -> tuple[Tensor, Call]:
        """Rows of an input, in the precision to compute in, and the call.

        Raises:
            RuntimeError: the input has another number of features.
        """
        weight: Any = self._parameters["weight"]
        num_inputs, ranks = weight.shape[1 - self._out_dim], self._osdp_stationary.ranks
        if x.shape[-1:] != (num_inputs,):
            raise RuntimeError(f"Expected an input with {num_inputs} features, got one of shape {tuple(x.shape)}.")
        rows = x.reshape(-1, num_inputs)
        if ranks.casts_inputs and rows.is_floating_point():
            rows = rows.to(ranks.dtype)
        if torch.is_autocast_enabled(x.device.type) and rows.is_floating_point() and rows.dtype != torch.float64:
            rows = rows.to(torch.get_autocast_dtype(x.device.type))  # before it is sent
        return ranks.call(rows)


class _Column(_Linear):
    """Each rank has some of the outputs, and gets the inputs of all samples."""

    def _features_of(self, gathered: Tensor) -> Tensor:
        return F.linear(gathered, self._own_weight(), self._own("bias"))

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Output of the whole operator, (*, outputs), for this rank's input, (*, inputs)."""
        rows, call = self._begin(input)
        outputs = to_samples(self._features_of(gather(rows, call)), call, self._num_outputs)
        return outputs.view(*input.shape[:-1], self._num_outputs)


class _First(_Column):
    """First operator of a pair, or one of two that take the same input."""

    def _gathered(self, x: Tensor, pair: Pair) -> tuple[Tensor, Call]:
        """Input of all ranks, and the call. The first of two operators leaves them with its input, for the other."""
        key = pair, 0 if x.is_inference() else x._version  # which counts changes in place
        left = vars(x).get(_GATHERED)
        if left is not None and left[0] == key:
            del vars(x)[_GATHERED]
            return left[1]  # type: ignore[no-any-return]
        rows, call = self._begin(x)
        found = gather(rows, call), call
        if len(pair.operators) > 2:
            vars(x)[_GATHERED] = key, found
        return found

    @override
    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        """Outputs that this rank has of the samples of all ranks, (..., rows of all ranks, part of the outputs)."""
        pair = self._osdp_stationary.pair
        assert pair is not None
        gathered, call = self._gathered(input, pair)
        features = self._features_of(gathered)
        ones = [1] * (input.dim() - 2)
        return Features.of(features.view(*ones, *features.shape), pair, call, input.shape[:-1])


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
        self._osdp_stationary.ranks.before_end()
        outputs = self._outputs_of(input.plain().flatten(0, -2), input.call)
        return outputs.view(*input.lead, self._num_outputs)


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
    "embedding": ("torch.nn.modules.sparse.Embedding",),
}
"""Classes of the operators of each kind, by their qualified names so that nothing need be imported."""
_ROLES: Mapping[str, tuple[type[_Stationary], ...]] = {
    "column": (_Column,),
    "row": (_Row,),
    "pair": (_First, _Last),
    "embedding": (_Embedding,),
}
"""Classes that the operators of each kind get; where there is one more, two have the first class."""
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
    if kind == "pair":
        weights: list[Any] = [module._parameters["weight"] for module in modules]
        dims = [_OUT_DIMS[class_name(type(module))] for module in modules]
        taken = weights[-1].shape[1 - dims[-1]]
        for name, weight, dim in zip(operators[:-1], weights, dims, strict=False):
            made = weight.shape[dim]
            if made != taken or weight.dtype != weights[-1].dtype or len({*modules}) < len(modules):
                return (
                    f"{operators[-1]!r} takes {taken} features of {weights[-1].dtype}, and"
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
    pair = Pair(tuple(operators)) if kind == "pair" else None
    first, *others = _ROLES[kind]
    roles = [first] * (len(operators) - len(others)) + others
    for module, role in zip(map(root.get_submodule, operators), roles, strict=True):
        out_dim = _OUT_DIMS.get(class_name(type(module)), 0)
        # columns and the first of a pair are cut along outputs, the others along inputs; embeddings along features
        weight_dim = 1 if role is _Embedding else out_dim if issubclass(role, _Column) else 1 - out_dim
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _cut(parameter, ranks, weight_dim if name == "weight" else 0)
        vars(module)[_STATE] = _State(ranks=ranks, whole_type=type(module), pair=pair)
        module.__class__ = _class_of(role, type(module))  # type: ignore[arg-type]


def is_stationary(module: object) -> bool:
    """Tells if a module moves activations."""
    return isinstance(module, _Stationary)


@contextmanager
def as_whole(module: nn.Module) -> Iterator[None]:
    """Gives a module that moves activations the class that it had, within the context; its parameters stay."""
    kind, state = type(module), vars(module).pop(_STATE)
    module.__class__ = state.whole_type
    try:
        yield
    finally:
        module.__class__ = kind
        vars(module)[_STATE] = state


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
