"""Optimizers on shards: which can step on them, and steps on rows as plain tensors, of the device or on the host.

Operators of DTensors find out anew in each step, for each parameter, that every rank may compute with its rows alone.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_osdp.apply.internals import dtensors
from lightning_osdp.apply.units import ONE_MESH
from lightning_osdp.apply.updating.host_updates import NOTHING_HELD, HostRows, Stepped
from lightning_osdp.apply.updating.updates_ahead import UpdatesAhead
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.optimizers import arithmetic, check_supported, copied, is_elementwise

_NUM_STEPS = 2
"""Number of steps in which an optimizer is tried."""
_TOLERANCE = 0.05
"""Tolerated difference, as a part of the largest step: Muon rounds to bfloat16, norms of two shards are off by a
third."""


def share_gradients(optimizer: Optimizer, device: torch.device) -> None:
    """Copies gradients of scalars, which each rank has all of, from rank 0 by way of a device. Call it on all ranks.

    Each rank has added them up in an order of its own: rounding would drive the ranks' scalars apart.
    """
    scalars = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor) and not p.dim()]
    by_dtype = defaultdict(list)
    for gradient in (dtensors.local(p.grad) for p in scalars if p.grad is not None):
        by_dtype[gradient.dtype].append(gradient)
    for gradients in by_dtype.values():
        shared = torch.stack([each.to(device) for each in gradients])
        dist.broadcast(shared, src=0)
        torch._foreach_copy_(gradients, list(shared.unbind()))


@contextmanager
def stepping_on_rows(
    optimizer: Optimizer, host: HostRows = NOTHING_HELD, ahead: UpdatesAhead | None = None
) -> Iterator[None]:
    """Makes elementwise optimizers compute with this rank's rows, as plain tensors, within the context.

    Only the arithmetic sees rows: the closure and hooks of the step see DTensors. An optimizer that is not exactly one
    of torch's, or has a tensor without the layout of its parameter, computes with DTensors. Parameters that ``host``
    holds are updated there, when all others are: before later hooks, in what is one step to all but the arithmetic.
    Where there is ``ahead``, these updates begin in a backward within the context, such as that of a closure.

    Raises:
        ConfigurationError: a tensor has not the layout of its parameter, and the host is to update some parameters.
    """
    if not is_elementwise(optimizer):
        yield
        return
    rows, is_over = ExitStack(), False
    held: Sequence[tuple[DTensor, DTensor]] = ()

    def swap() -> None:
        nonlocal held
        if not is_over:
            held = rows.enter_context(on_rows(optimizer, host))

    def begin(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Makes the arithmetic on rows follow the closure of the step, if it has one."""
        nonlocal is_over
        is_over = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            swap()
            return None

        def closure_and_swap() -> Any:
            loss = closure()
            swap()
            return loss

        return args[:1], {**kwargs, "closure": closure_and_swap}

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True
        rows.close()

    def end_on_host(*_: object) -> None:
        nonlocal held
        end()
        _update_on_host(optimizer, held, host, ahead)
        held = ()

    # `begin` is the last hook before the step, for the closure that other hooks leave; `end_on_host` is the first
    # one after it.
    with (
        nullcontext() if ahead is None else ahead.stepping(optimizer),
        optimizer.register_step_pre_hook(begin),
        optimizer.register_step_post_hook(end_on_host) as after,
    ):
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        hooks.move_to_end(after.id, last=False)
        try:
            yield
        finally:
            end()


@contextmanager
def on_rows(optimizer: Optimizer, host: HostRows = NOTHING_HELD) -> Iterator[Sequence[tuple[DTensor, DTensor]]]:
    """Gives an elementwise optimizer this rank's rows in place of DTensors, which see all changes, within the context.

    Its groups have rows, as plain tensors with gradients, and its state is keyed by them. Nothing is copied. They have
    none of what ``host`` holds: the context gives pairs of such parameters and their gradients. Where a tensor has not
    the layout of its parameter, nothing changes.
    """
    pairs = _with_gradients(optimizer) if is_elementwise(optimizer) else None
    left_out = host.held_in(optimizer)
    if pairs is None and left_out:
        raise ConfigurationError(
            "Expected gradients and states with the layout of their parameters, and groups without DTensors, in a step"
            " of an optimizer that the plan has keep states on the host. Leave them as they are, or plan without 'host'"
            " in SearchSpace(states=...)."
        )
    if not pairs:
        yield ()
        return
    stepped = [
        Stepped(parameter, parameter._local_tensor, gradient._local_tensor)
        for parameter, gradient in pairs
        if id(parameter) not in left_out
    ]
    with _computing_with(optimizer, stepped, left_out):
        yield [pair for pair in pairs if id(pair[0]) in left_out]


def _update_on_host(
    optimizer: Optimizer, pairs: Sequence[tuple[DTensor, DTensor]], host: HostRows, ahead: UpdatesAhead | None
) -> None:
    """Takes the step of an elementwise optimizer for what the host holds, unseen by modes that count for the device."""
    if not pairs:
        return
    with torch.no_grad(), _disable_current_modes():
        taken = () if ahead is None else ahead.taken(optimizer, pairs)
        begun = {id(each.stepped.parameter) for each in taken}
        num_states = len(optimizer.state)
        stepped = host.take([pair for pair in pairs if id(pair[0]) not in begun])
        if stepped:
            for name in ("grad_scale", "found_inf"):  # of a gradient scaler, which fused optimizers read
                value = getattr(optimizer, name, None)
                if isinstance(value, Tensor):
                    setattr(optimizer, name, value.cpu())
            ours = {id(each.parameter) for each in stepped}
            others = {id(p) for group in optimizer.param_groups for p in group["params"]} - ours
            with _computing_with(optimizer, stepped, others), host.fused(optimizer):
                arithmetic(optimizer)(optimizer)
        for each, fields in taken:
            if fields:
                _take_new(optimizer.state[each.parameter], fields, each.parameter)
        if len(optimizer.state) > num_states:  # in one order on all ranks, which gather states in it
            for parameter, _ in pairs:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)
        torch.autograd.graph.increment_version([each.parameter for each, _ in taken])
        host.give_back([*stepped, *(each for each, _ in taken)])


@contextmanager
def _computing_with(optimizer: Optimizer, stepped: Sequence[Stepped], left_out: Collection[int]) -> Iterator[None]:
    """Gives an optimizer plain tensors in place of parameters, and none of the ids left out, within the context.

    Afterwards it has the DTensors, groups and states of before; a new state with the shape of the rows is a DTensor.
    """
    states, kept = optimizer.state, [group["params"] for group in optimizer.param_groups]
    rows_of = {id(each.parameter): each.rows for each in stepped}  # a tensor's own hash is slow
    local_states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    known: dict[int, list[int]] = {}  # identities of what states of these rows had, by id
    for key, fields in states.items():
        rows = rows_of.get(id(key))
        if rows is None:
            local_states[key] = fields
        else:
            local_states[rows] = of_rows = {
                name: value._local_tensor if isinstance(value, DTensor) else value for name, value in fields.items()
            }
            known[id(rows)] = [*map(id, of_rows.values())]
    try:
        for each in stepped:
            each.rows.grad = each.gradient
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = [rows_of.get(id(each), each) for each in parameters if id(each) not in left_out]
        optimizer.state = local_states
        yield
    finally:
        optimizer.state = states
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = parameters
        for rows in rows_of.values():
            rows.grad = None
        torch.autograd.graph.increment_version([each.parameter for each in stepped])
        parameter_of = {id(each.rows): each.parameter for each in stepped}
        for key, fields in local_states.items():
            stepped_parameter = parameter_of.get(id(key))
            if stepped_parameter is None:
                states[key] = fields
            elif [*map(id, fields.values())] != known.get(id(key)):
                _take_new(states[stepped_parameter], fields, stepped_parameter)


def _with_gradients(optimizer: Optimizer) -> list[tuple[DTensor, DTensor]] | None:
    """Pairs of a DTensor and its gradient; None where the step cannot be taken on the rows of all of them."""
    pairs: list[tuple[DTensor, DTensor]] = []
    for group in optimizer.param_groups:
        if group.get("differentiable") or any(isinstance(value, DTensor) for value in group.values()):
            return None
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or not isinstance(parameter, DTensor):
                continue
            if type(parameter._local_tensor) is not Tensor or not dtensors.has_layout_of(gradient, parameter):
                return None
            pairs.append((parameter, gradient))
    parameter_of = {id(parameter): parameter for parameter, _ in pairs}
    for key, fields in optimizer.state.items():
        parameter = parameter_of.get(id(key))
        if parameter is None:
            continue
        for value in fields.values():
            if not isinstance(value, Tensor) or dtensors.has_layout_of(value, parameter):
                continue
            if value.dim() > 0:  # others count steps, and the like
                return None
    return pairs


def _take_new(fields: dict[str, Any], local_fields: dict[str, Any], parameter: DTensor) -> None:
    """Puts entries that a step has made into the state of a DTensor; entries changed in place are there already."""
    for name, value in local_fields.items():
        if name in fields and value is dtensors.local(fields[name]):
            continue
        is_rows = isinstance(value, Tensor) and value.dim() > 0
        fields[name] = dtensors.of_rows_there(value, parameter) if is_rows else value


def try_optimizer(optimizer: Optimizer) -> None:
    """Checks that copies of an optimizer take the same steps on small parameters, whole and sharded.

    The small parameters have uneven rows; each group has one for each number of dimensions on each mesh. Neither the
    optimizer nor a hook of it is called, and the random state is restored. Call it on all ranks.

    Raises:
        ConfigurationError: the optimizer cannot step on shards, or takes a shard for the whole of a vector, as L-BFGS
            does.
    """
    name = type(optimizer).__name__
    check_supported(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, failure = _attempt(optimizer, is_cut=False)
        again, _ = _attempt(optimizer, is_cut=False)
        sharded, sharded_failure = _attempt(optimizer, is_cut=True)
    if failure is not None:
        warnings.warn(
            f"OSDP: whether {name} can update parameters that are cut over ranks could not be tried, for a copy of it"
            f" cannot update whole ones either: {_shown(failure)}. Compare losses with those under DDPStrategy.",
            stacklevel=2,
        )
    elif sharded_failure is not None:
        remedy = next(
            (text for said, text in ONE_MESH.items() if said in str(sharded_failure)),
            "Use another one or another of its implementations (foreach=True, fused=False).",
        )
        raise ConfigurationError(
            f"Expected an optimizer that can update parameters that are cut over ranks, but {name} cannot:"
            f" {_shown(sharded_failure)}. {remedy}"
        ) from sharded_failure
    elif _is_same(expected, again) and not _is_close(expected, sharded):
        raise ConfigurationError(
            f"Expected an optimizer that updates parameters that are cut over ranks as it does whole ones, but {name}"
            " takes other steps: it reads values of this rank's rows alone, as to_local() does, and takes them for all."
            " Compute with the DTensors themselves, or use DDPStrategy for a model that fits whole."
        )


def _attempt(optimizer: Optimizer, *, is_cut: bool) -> tuple[list[Tensor], Exception | None]:
    """Result of `_stepped`, or its error."""
    try:
        return _stepped(optimizer, is_cut=is_cut), None
    except Exception as error:
        return [], error


def _stepped(optimizer: Optimizer, *, is_cut: bool) -> list[Tensor]:
    """Differences that steps of a copy of the optimizer add to small parameters, whole or sharded."""

    def laid_out(values: Tensor, parameter: DTensor) -> Tensor:
        return distribute_tensor(values, parameter.device_mesh, parameter.placements) if is_cut else values

    memo: dict[int, Any] = {}
    tried: list[list[nn.Parameter]] = []
    starts: list[tuple[Tensor, nn.Parameter]] = []
    gradients: list[tuple[nn.Parameter, Tensor]] = []
    for group in optimizer.param_groups:
        by_kind: dict[Any, nn.Parameter] = {}
        for parameter in group["params"]:
            memo[id(parameter)] = parameter
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                kind = (parameter.dim(), parameter.device_mesh, parameter.placements)
                if kind not in by_kind:
                    start, gradient = _small(parameter)
                    by_kind[kind] = small = nn.Parameter(laid_out(start.clone(), parameter))
                    dtensors.mark_shard(small)
                    gradients.append((small, laid_out(gradient, parameter)))
                    starts.append((start, small))
                memo[id(parameter)] = by_kind[kind]
        tried.append(list(by_kind.values()))
    trial = copied(
        optimizer, memo, state=defaultdict(dict)
    )  # an empty state in place of the real one, which may be large
    for group, parameters in zip(trial.param_groups, tried, strict=True):
        group["params"] = parameters
    trial.param_groups[:] = [group for group in trial.param_groups if group["params"]]
    step = arithmetic(optimizer)

    def backward() -> Tensor:
        for small, gradient in gradients:
            small.grad = gradient.clone()  # a step may clear or change it
        return torch.zeros(())

    for _ in range(_NUM_STEPS):
        backward()
        with on_rows(trial):
            step(trial, closure=backward)
    ends = [small.detach() for _, small in starts]
    wholes = [end.full_tensor() if isinstance(end, DTensor) else end for end in ends]
    return [whole - start for whole, (start, _) in zip(wholes, starts, strict=True)]


def _small(parameter: DTensor) -> tuple[Tensor, Tensor]:
    """Values with few rows, unevenly many and more than ranks, and a gradient."""
    shape = (2 * parameter.device_mesh.size() + 1, *(3 for _ in range(parameter.dim() - 1)))[: parameter.dim()]
    device = parameter.device_mesh.device_type  # not the parameter's: its shard may be on the host
    places = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float64).view(shape)
    return places.square().cos().to(parameter.dtype), places.square().sin().to(parameter.dtype)  # both of full rank


def _is_same(steps: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(step, other) for step, other in zip(steps, others, strict=True))


def _is_close(steps: list[Tensor], others: list[Tensor]) -> bool:
    """True if steps differ by rounding alone, that of weights of about one included."""
    return all(
        bool((step - other).abs().max() <= _TOLERANCE * step.abs().max() + 4 * torch.finfo(step.dtype).eps)
        for step, other in zip(steps, others, strict=True)
    )


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
