"""Reductions of units on gloo that go on while backward computes, with nothing of torch changed.

``fully_shard`` calls a reduce-scatter that it waits for, and makes gradients of shards views of what that has filled.
Here it only begins (`lightning_osdp.operations.reduce_scatter`): its output is filled later, and the gradients with it.
Until then they are put aside, so that who looks at a shard's gradient inside of backward finds what was there before.
Where nodes have all of a unit, torch is told to leave gradients as they are before their all-reduce, which begins here,
too; the reduce-scatter before it is waited for, for links inside of a node are fast. Gradients of a unit that each rank
has all of are copied here, and their all-reduce begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from lightning_osdp.apply.internals import access, backward, dtensors, host_shards, resident
from lightning_osdp.operations.gloo import begin_all_to_all, is_by_gloo
from lightning_osdp.operations.reduce_scatter import ReduceScatter, add_up, can_add_up
from lightning_osdp.planner.engine import REDUCTIONS_IN_FLIGHT


class Reductions:
    """Reductions of a root's units: the latest ones are in flight in backward, and none outside of it.

    They end in the order in which they began: one when its turn comes to make room for the next one's input, all that
    are left at the end of backward. A unit whose gradients somebody takes up at once waits for its own: for a
    reduce-scatter before an all-reduce, for both where a parameter has ``register_post_accumulate_grad_hook()``.

    Args:
        root: of the units.
        groups: their parameters; those that are not reduced by gloo are left as they are.
        on_reduced: called with a group when its shards have been given gradients, if it had any; on a GPU they are
            there after the group's ``_post_reduce_event``.
        on_begun: called at the end of backward, when all have begun.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Sequence[Any],
        on_reduced: Callable[[Any], None] = access.do_nothing,
        on_begun: Callable[[], None] = access.do_nothing,
    ) -> None:
        self._most, self._on_reduced, self._on_begun = REDUCTIONS_IN_FLIGHT, on_reduced, on_begun
        self._in_flight: deque[_Begun] = deque()
        self._latest: _Begun | None = None  # in the unit whose gradients torch is about to set
        for group in groups:
            post_backward = group.post_backward
            if is_by_gloo(group.mesh_info.shard_process_group, group.device):
                group.modules[0].set_custom_reduce_scatter(_UnitReduceScatter(self, group))
                if isinstance(group.mesh_info, HSDPMeshInfo):
                    post_backward = partial(self._all_reduce, group, post_backward)
            group.post_backward = partial(self._post_backward, group, post_backward)
        for state in access.state_of(root)._state_ctx.all_states:
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)

    def make_room(self) -> None:
        """Ends the oldest reductions until one more may be in flight."""
        while len(self._in_flight) >= self._most:
            self._end_oldest()

    def finish(self) -> None:
        """Ends all reductions: shards have their gradients then."""
        while self._in_flight:
            self._end_oldest()

    def _end_oldest(self) -> None:
        begun = self._in_flight.popleft()
        begun.end()
        self._on_reduced(begun.group)

    def forget(self) -> None:
        """Waits for the reductions of a step that is given up, and drops their outputs."""
        begun = [*self._in_flight]
        self._in_flight.clear()
        for each in begun:
            each.work.wait()

    def begin(self, begun: _Begun) -> None:
        """Counts a reduction as in flight."""
        self._latest = begun
        self._in_flight.append(begun)

    def _post_backward(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        aside = _Aside(group) if host_shards.copies_gradients(group) else None
        try:
            post_backward(*unused)
        finally:
            latest, self._latest = self._latest, None
            if latest is not None:
                latest.put_aside()
            if aside is not None:
                aside.put_back()
        if latest is None:
            self._on_reduced(group)

    def _all_reduce(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Ends backward of a unit that all nodes or ranks have; begins the all-reduce that torch would wait for."""
        is_left_to_torch = group._all_reduce_hook is not None or not (group.reduce_grads and group.all_reduce_grads)
        if resident.is_replicated(group) and group.gradient_divide_factor is None and not is_left_to_torch:
            self._all_reduce_copies(group)
            return
        if is_left_to_torch or _has_hooks(group):
            post_backward(*unused)
            return
        given = [*compress(group.fsdp_params, backward.are_given_gradients(group))]
        group.all_reduce_grads = False
        try:
            post_backward(*unused)
        finally:
            group.all_reduce_grads = True
        output, group._partial_reduce_output = group._partial_reduce_output, None
        if output is not None:
            self.begin(_begun_all_reduce(group, given, output))

    def _all_reduce_copies(self, group: Any) -> None:
        """Begins the all-reduce of copies of gradients, or takes it where hooks of users are given these at once."""
        given = [*compress(group.fsdp_params, backward.are_given_gradients(group))]
        self.make_room()
        # inputs of those that have ended, which torch drops here, too
        getattr(group.comm_ctx, "reduce_scatter_states", []).clear()
        group._training_state = TrainingState.POST_BACKWARD
        if not given:
            return
        with record_function(f"FSDP::post_backward_reduce ({group._module_fqn})"):
            begun = _begun_all_reduce(group, given, _copied_gradients(group, given))
        if not _has_hooks(group):
            self.begin(begun)
            return
        begun.end()
        with torch.no_grad():
            for each in given:
                for hook in (getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(each.sharded_param)

    def _end(self, end: Callable[[], None]) -> None:
        end()
        self._on_begun()
        self.finish()


class _UnitReduceScatter(ReduceScatter):
    """Begins reduce-scatters of one unit, and leaves them in flight where nobody takes up its gradients at once."""

    def __init__(self, all_units: Reductions, group: Any) -> None:
        self._all_units, self._group = all_units, group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the input, and then the output, once one more may be in flight."""
        self._all_units.make_room()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Begins the reduce-scatter; where gradients are taken up at once, waits for it."""
        if not can_add_up(op):
            dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op)
        elif _is_taken_up(self._group):
            super().__call__(output_tensor, input_tensor, group, op)
        else:
            self._all_units.begin(_begun_reduce_scatter(self._group, output_tensor, input_tensor, group, op))


def _is_taken_up(group: Any) -> bool:
    """Tells if the output of a unit's reduce-scatter is needed at once."""
    return isinstance(group.mesh_info, HSDPMeshInfo) or _has_hooks(group)


def _has_hooks(group: Any) -> bool:
    """Tells if users are given a unit's gradients inside of backward."""
    return group._all_reduce_hook is not None or any(
        getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in group.fsdp_params
    )


class _Aside:
    """Gradients of shards on the host, which are put aside while torch sets others on the device."""

    def __init__(self, group: Any) -> None:
        self._before = [(each.sharded_param, each.sharded_param.grad) for each in host_shards.kept([group])]
        for shard, _ in self._before:
            shard.grad = None

    def put_back(self) -> None:
        """Adds to them what torch has set."""
        found = [(shard, shard.grad) for shard, _ in self._before if shard.grad is not None]
        for shard, before in self._before:
            shard.grad = before
        host_shards.add_gradients(found, is_kept=True)


class _Begun:
    """A reduction in flight, with the gradients that it will fill.

    Attributes:
        group: of the unit.
        work: that is to be waited for.
    """

    def __init__(
        self,
        group: Any,
        output: Tensor,
        work: dist.Work,
        divisor: float | None,
        *,
        add_up: Callable[[], None] = access.do_nothing,
        gradients: Iterable[tuple[nn.Parameter, DTensor]] = (),
    ) -> None:
        """Takes what was begun.

        Args:
            group: of the unit.
            output: is reduced when the work is done, ``add_up`` was called, and it was divided.
            work: of the collective.
            divisor: of the output; None: it is the mean already.
            add_up: makes the output of what was received.
            gradients: of shards, parts of the output or of what it is cast to; else `expect` them of torch.
        """
        self.group, self.work = group, work
        self._output, self._divisor, self._add_up = output, divisor, add_up
        self._name = group._module_fqn
        self._gradients = [*gradients]
        self._before: list[tuple[nn.Parameter, Any]] = []

    def expect(self) -> None:
        """Has torch set gradients anew, which `put_aside` then takes: it would add to them what is not there yet."""
        self._before = [(each.sharded_param, each.sharded_param.grad) for each in self.group.fsdp_params]
        for parameter, _ in self._before:
            parameter.grad = None

    def put_aside(self) -> None:
        """Takes the gradients that torch has just set, and puts back those of earlier micro-batches."""
        for parameter, before in self._before:
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                self._gradients.append((parameter, parameter.grad))
            parameter.grad = before
        self._before = []

    @torch.no_grad()
    def end(self) -> None:
        """Waits for the reduction, and sets the shards' gradients or adds to them."""
        try:
            self.work.wait()
        except RuntimeError as error:
            where = repr(self._name) if self._name else "the root unit"
            raise RuntimeError(
                f"The reduction of gradients of {where} failed: {error}. Expected all ranks to take part: look for the"
                " error of the one that ended first."
            ) from error
        self._add_up()
        if self._divisor not in {None, 1}:
            self._output.div_(self._divisor)
        parts = [gradient._local_tensor for _, gradient in self._gradients]
        if parts and parts[0].dtype != self._output.dtype:  # parts of what was cast before it was there
            parts[0].as_strided(self._output.shape, self._output.stride(), 0).copy_(self._output)
        host_shards.add_gradients(self._gradients, is_kept=host_shards.copies_gradients(self.group))


def _begun_reduce_scatter(
    group: Any, output: Tensor, whole: Tensor, process_group: dist.ProcessGroup, op: Any
) -> _Begun:
    _, divisor, *_ = _divide_factors(group, whole, process_group, None)
    received = torch.empty_like(whole)
    work = begin_all_to_all(received, whole, process_group)
    begun = _Begun(group, output, work, divisor, add_up=partial(add_up, output, received, op))
    begun.expect()
    return begun


@torch.no_grad()
def _copied_gradients(group: Any, parameters: Sequence[Any]) -> Tensor:
    """Copies gradients of a unit that each rank has all of into a flat tensor, and drops them.

    Torch does the same with a second tensor of that size, into which it copies the first.
    """
    flat = torch.empty(
        sum(each.padded_sharded_param_size.numel() for each in parameters),
        dtype=parameters[0].reduce_dtype or parameters[0].orig_dtype,
        device=group.device,
    )
    torch._foreach_copy_(_parts_of(flat, parameters), [_taken_gradient(each) for each in parameters])
    before, *_ = _factors_of_mesh(group, flat)
    return flat if before in {None, 1} else flat.div_(before)


def _taken_gradient(parameter: Any) -> Tensor:
    """Gradient of an unsharded parameter, which has none afterwards; zeros where backward has not come to it."""
    whole = parameter._unsharded_param
    gradient, earlier = whole.grad, parameter.unsharded_accumulated_grad
    if earlier is not None and gradient is not earlier:  # since torch 2.15 it is the one above
        gradient = earlier if gradient is None else earlier.add_(gradient)
    whole.grad = None
    if parameter.unsharded_accumulated_grad is not None:
        parameter.unsharded_accumulated_grad = None
    found: Tensor = parameter._get_grad_inner_tensor(torch.zeros_like(whole) if gradient is None else gradient)
    return found


@torch.no_grad()
def _begun_all_reduce(group: Any, parameters: Sequence[Any], output: Tensor) -> _Begun:
    """Begins the all-reduce of all gradients of a unit's shards, padded one after the other in a flat tensor."""
    number = sum(each.padded_sharded_param_size.numel() for each in parameters)
    if number != output.numel():
        raise RuntimeError(
            f"Expected parameters of {group._module_fqn!r} that have gradients to have {output.numel()} elements, as"
            f" torch reduces, got {number}. Please report it; plans with"
            ' OSDPStrategy(search_space=SearchSpace(modes=("ZDP", "DP", "resident"))) do without such a unit.'
        )
    _, divisor, _, op = _factors_of_mesh(group, output)
    dtype = parameters[0].orig_dtype
    whole = output if dtype == output.dtype else torch.empty_like(output, dtype=dtype)  # `_Begun.end` casts
    gradients = [
        (each.sharded_param, dtensors.of_spec(part, each._sharding_spec))
        for each, part in zip(parameters, _parts_of(whole, parameters), strict=True)
    ]
    work = dist.all_reduce(output, op=op, group=group.mesh_info.replicate_process_group, async_op=True)
    return _Begun(group, output, work, divisor, gradients=gradients)


def _parts_of(flat: Tensor, parameters: Iterable[Any]) -> list[Tensor]:
    """Views of the shards of parameters in a flat tensor that has them one after the other, with their paddings."""
    offset, parts = 0, []
    for each in parameters:
        parts.append(torch.as_strided(flat, each.sharded_size, each.contiguous_sharded_stride, offset))
        offset += each.padded_sharded_param_size.numel()
    return parts


def _factors_of_mesh(group: Any, whole: Tensor) -> tuple[Any, ...]:
    mesh = group.mesh_info
    return _divide_factors(group, whole, mesh.shard_process_group, mesh.replicate_process_group)


def _divide_factors(
    group: Any, whole: Tensor, scattering: dist.ProcessGroup, reducing: dist.ProcessGroup | None
) -> tuple[Any, ...]:
    """Divisors before and after reductions of a tensor, and operations of reduce-scatters and all-reduces."""
    factors: tuple[Any, ...] = _get_gradient_divide_factors(
        scattering,
        reducing,
        whole.dtype,
        whole.device.type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    return factors
