"""Reduce-scatters of units on gloo that go on while backward computes, with nothing of torch changed.

``fully_shard`` calls a reduce-scatter that it waits for, and makes gradients of shards views of what that has filled.
Here it only begins (`lightning_osdp.operations.reduce_scatter`): its output is filled later, and the gradients with it.
Until then they are put aside, so that who looks at a shard's gradient inside of backward finds what was there before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor

from lightning_osdp.apply.internals import access, host_shards
from lightning_osdp.operations.gloo import begin_all_to_all, is_by_gloo
from lightning_osdp.operations.reduce_scatter import ReduceScatter, add_up, can_add_up
from lightning_osdp.planner.engine import REDUCTIONS_IN_FLIGHT


class ReduceScatters:
    """Reduce-scatters of a root's units: the latest ones are in flight in backward, and none outside of it.

    They end in the order in which they began: one when its turn comes to make room for the next one's input, all that
    are left at the end of backward. A unit whose gradients somebody takes up at once waits for its own: where nodes
    have all of it, and are all-reduced, or where a parameter has ``register_post_accumulate_grad_hook()``.

    Args:
        root: of the units.
        groups: their parameters; reduce-scatters of those that are not reduced by gloo are left as they are.
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
            if is_by_gloo(group.mesh_info.shard_process_group, group.device):
                group.modules[0].set_custom_reduce_scatter(_UnitReduceScatter(self, group))
            group.post_backward = partial(self._post_backward, group, group.post_backward)
        for state in access.state_of(root)._state_ctx.all_states:
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)

    def make_room(self) -> None:
        """Ends the oldest reduce-scatters until one more may be in flight."""
        while len(self._in_flight) >= self._most:
            self._end_oldest()

    def finish(self) -> None:
        """Ends all reduce-scatters: shards have their gradients then."""
        while self._in_flight:
            self._end_oldest()

    def _end_oldest(self) -> None:
        begun = self._in_flight.popleft()
        begun.end()
        self._on_reduced(begun.group)

    def forget(self) -> None:
        """Waits for the reduce-scatters of a step that is given up, and drops their outputs."""
        begun = [*self._in_flight]
        self._in_flight.clear()
        for each in begun:
            each.work.wait()

    def begin(self, begun: _Begun) -> None:
        """Counts a reduce-scatter as in flight."""
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

    def _end(self, end: Callable[[], None]) -> None:
        end()
        self._on_begun()
        self.finish()


class _UnitReduceScatter(ReduceScatter):
    """Begins reduce-scatters of one unit, and leaves them in flight where nobody takes up its gradients at once."""

    def __init__(self, all_units: ReduceScatters, group: Any) -> None:
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
            self._all_units.begin(_Begun(self._group, output_tensor, input_tensor, group, op))


def _is_taken_up(group: Any) -> bool:
    """Tells if the output of a unit's reduce-scatter is needed at once."""
    return (
        isinstance(group.mesh_info, HSDPMeshInfo)
        or group._all_reduce_hook is not None
        or any(getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in group.fsdp_params)
    )


class _Aside:
    """Gradients of shards on the host, which are put aside while torch sets others on the device."""

    def __init__(self, group: Any) -> None:
        self._before = [(each.sharded_param, each.sharded_param.grad) for each in host_shards.kept([group])]
        for shard, _ in self._before:
            shard.grad = None

    def put_back(self) -> None:
        """Adds to them what torch has set."""
        for shard, before in self._before:
            gradient, shard.grad = shard.grad, before
            if gradient is not None:
                host_shards.add_gradient(shard, gradient, is_kept=True)


class _Begun:
    """A reduce-scatter in flight, with the gradients that it will fill."""

    def __init__(self, group: Any, output: Tensor, whole: Tensor, process_group: dist.ProcessGroup, op: Any) -> None:
        self.group, self._output, self._whole, self._op = group, output, whole, op
        self._name = group._module_fqn
        _, self._divisor, *_ = _get_gradient_divide_factors(
            process_group,
            None,
            whole.dtype,
            whole.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        self._received = torch.empty_like(whole)
        self.work = begin_all_to_all(self._received, whole, process_group)
        self._gradients: list[tuple[nn.Parameter, DTensor]] = []
        self._before = [(each.sharded_param, each.sharded_param.grad) for each in group.fsdp_params]
        for parameter, _ in self._before:
            parameter.grad = None  # else torch adds to it what is not there yet

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
        """Waits for the reduce-scatter, and sets the shards' gradients or adds to them."""
        try:
            self.work.wait()
        except RuntimeError as error:
            where = repr(self._name) if self._name else "the root unit"
            raise RuntimeError(f"The reduce-scatter of gradients of {where} failed: {error}") from error
        add_up(self._output, self._received, self._op)
        if self._divisor not in {None, 1}:
            self._output.div_(self._divisor)
        parts = [gradient._local_tensor for _, gradient in self._gradients]
        if parts and parts[0].dtype != self._output.dtype:  # parts of what torch has cast before it was there
            parts[0].as_strided(self._output.shape, self._output.stride(), 0).copy_(self._output)
        is_kept = host_shards.copies_gradients(self.group)
        for parameter, gradient in self._gradients:
            host_shards.add_gradient(parameter, gradient, is_kept=is_kept)
