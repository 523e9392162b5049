"""`ShardedModel`: a module after ``fully_shard``, with all operations that the strategy runs on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision
from torch.optim import Optimizer

from lightning_osdp.apply.activations.blocks import BlockForwards, check_blocks
from lightning_osdp.apply.exchanging import ExchangingUnits
from lightning_osdp.apply.internals import (
    access,
    backward,
    calls,
    dtensors,
    gathering,
    host_shards,
    in_flight,
    resident,
    sharding,
    shortcuts,
    unsharded,
)
from lightning_osdp.apply.preparing.checks import call_layers_in_evaluation
from lightning_osdp.apply.preparing.prepare import (
    begin,
    executed,
    planned_treatments,
    planned_units,
    treatments_by_name,
)
from lightning_osdp.apply.ranks.agreement import Agreement
from lightning_osdp.apply.states import state
from lightning_osdp.apply.states.stored import StoredShards
from lightning_osdp.apply.treatments import accumulate, arguments_of, change
from lightning_osdp.apply.units import Meshes, ShardedUnit, children_and_blocks, policy_of, set_prefetch, shard
from lightning_osdp.apply.updating.host_updates import NOTHING_HELD, HostRows
from lightning_osdp.apply.updating.updates import share_gradients, stepping_on_rows, try_optimizer
from lightning_osdp.apply.updating.updates_ahead import UpdatesAhead
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.units import SMALL_UNIT_BYTES
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.optimizers import is_elementwise
from lightning_osdp.operations.splitting import cuts_of, join_names
from lightning_osdp.planner.engine import DEFAULT, check_change, effects_of, engine_of

T = TypeVar("T")


class ShardedModel:
    """Module whose parameters are sharded, over all ranks or in each node.

    Call methods on all ranks unless they say otherwise. Units are given root first, then in forward order.

    Args:
        min_unit_bytes: least size of a block in a child that is a unit of its own where there is no plan.
        recomputed: names of modules that recompute whatever a plan says.
        **kwargs: ``param_init_fn`` and ``sync_module_states``; all other arguments as of `apply_plan`.

    Attributes:
        plan: the plan as `executed`; None without one.
        reusable: data that a strategy keeps with the model from one Trainer to the next.
        check_options: raises where a plan contradicts other options of the user.
        host: rows of parameters that the host updates, and shards that it has.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan | None,
        *,
        device: torch.device,
        min_unit_bytes: int = SMALL_UNIT_BYTES,
        recomputed: Sequence[str] = (),
        mixed_precision: MixedPrecision | None = None,
        **kwargs: Any,
    ) -> None:
        plan = None if plan is None else executed(plan, recomputed)
        initialize = begin(module, device, **kwargs)
        if plan is None:
            call_layers_in_evaluation(module)
            units = [ShardedUnit("", (module,)), *children_and_blocks(module, min_unit_bytes=min_unit_bytes)]
        else:
            units = list(planned_units(module, plan, initialize, mixed_precision))
        self.module, self.plan, self.units = module, plan, tuple(units)
        self._recomputed = recomputed
        self.reusable: Any = None
        self.check_options: Callable[[Plan], None] = access.do_nothing
        self._forwards, self._meshes, self._world = BlockForwards(module, device), Meshes(device), dist.group.WORLD
        if plan is not None:
            self._meshes.add_nodes(plan)
        self._exchanging = ExchangingUnits(
            module,
            plan,
            self._meshes,
            precision=mixed_precision,
            initialize=initialize,
            # the agreement is not there yet
            numbers_of_ranks=lambda *given, **more: self._agreement.numbers_of_ranks(*given, **more),  # noqa: PLW0108
            before_backward=lambda *given: self._agreement.note_exchange(*given),  # noqa: PLW0108
            on_function=lambda number: self._agreement.note_function(number),  # noqa: PLW0108
        )
        if plan is not None:
            self._forwards.choose(plan.blocks, units=[unit.name for unit in units])
        arguments = partial(arguments_of, meshes=self._meshes)
        shard(self.units, arguments, mixed_precision, initialize, self._exchanging.parameters)
        access.begin(module)
        access.check_units(module)
        for unit in self.units:
            sharding.copy_replicas(unit.handle)
            change(unit, self._meshes, None)
            gathering.set_read(unit.handle, is_read=self._is_read(unit))
        self._exchanging.copy_replicas()
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.set_reduce_scatter_unused_params(True, recurse=False)
        hosted = [access.group_of(unit.handle) for unit in self.units if effects_of(unit.treatment).updates_on_host]
        shards = (shard for group in hosted if group is not None for shard, _ in access.parameters_of(group))
        self.host = HostRows(shards, device, self._on_host)
        self._ahead = UpdatesAhead(self.host, device)
        self._ahead.room_bytes = _room_on_host(plan)
        self._set_prefetch()
        gathering.set_asynchronous(module, is_asynchronous=plan is not None and plan.asynchronous_unshard)
        # All wrappers of methods of units are put on here, each around those before it. They come after begin(), which
        # makes the list of units whose methods backward calls. Only `wait_for_unshard` and the methods that free a unit
        # are wrapped more than once: for what is resident, for the inference mode, for values and for requires_grad.
        # The first of these is the innermost, as it may do without torch's own. No two of the others read what another
        # one changes, so that their order among each other is free.
        for unit in self.units:
            sharding.pass_inputs(unit.handle)
        shortcuts.take(access.states_in(module), self._groups)
        self._residence = resident.Residence(
            self._groups,
            lambda values: self._agreement.largest(values),  # noqa: PLW0108 (it is not there yet)
        )
        for unit in self.units:
            if unit.name:
                calls.shorten(unit.modules, self._residence, policy_of(unit, mixed_precision))
        gathering.gather_where_read(self._groups)
        gathering.gather_for_training(self._groups)
        gathering.enter_once(self._groups)
        self._writes = unsharded.GatheredWrites(self._groups)
        for group in self._groups:
            unsharded.Freezing(group)
        self._reductions = in_flight.Reductions(
            module, self._groups, self._update_ahead if len(self.host) else access.do_nothing, self._begin_agreement
        )
        self._agreement = Agreement(
            module,
            self._groups,
            self._writes,
            self._residence,
            num_exchanging=self._exchanging.num_units,
            in_nodes=self._exchanging.in_nodes,
        )
        self._waiting = backward.WaitingForwards(module, self._exchanging.add_outputs)
        self._taking = self._take_over(module)
        self._is_opened = self._agrees_early = self._accumulates = False
        self._may_be_planned = True

    def _take_over(self, module: nn.Module) -> list[Any]:
        access.set_owner(module, self)
        self.carry_hooks()
        return state.takes_whole(module)

    @classmethod
    def planned(cls, module: nn.Module, plan: Plan, **kwargs: Any) -> ShardedModel:
        """Shards a module as a plan says; arguments as of `apply_plan`."""
        engine_of(plan)  # raises if the plan has settings that fully_shard lacks
        return cls(module, plan, **kwargs)

    @classmethod
    def unplanned(cls, module: nn.Module, **kwargs: Any) -> ShardedModel:
        """Makes each child a unit, and each block in it, all freed after forward; other parameters are in the root."""
        return cls(module, None, **kwargs)

    @classmethod
    def separated(cls, module: nn.Module, blocks: Sequence[Block], **kwargs: Any) -> ShardedModel:
        """Shards as `unplanned` does, for steps that run backward between the calls of the children of the module."""
        sharded = cls(module, None, **kwargs)
        sharded._forwards.choose(blocks, units=())
        sharded._may_be_planned = False
        return sharded

    @property
    def num_units(self) -> int:
        """Number of units with parameters."""
        return len(self._groups)

    @property
    def is_whole(self) -> bool:
        """True if it was sharded without a plan, but not for manual optimization; `undo` makes it plain again."""
        return self.plan is None and self._may_be_planned

    @property
    def shares_world(self) -> bool:
        """True if the module is sharded over the default process group of now."""
        return dist.group.WORLD is self._world

    @cached_property
    def _groups(self) -> tuple[Any, ...]:
        """Groups of parameters, of all units that have some."""
        groups = (access.group_of(unit.handle) for unit in self.units)
        return tuple(group for group in groups if group is not None)

    @cached_property
    def _on_host(self) -> Sequence[Any]:
        """Parameters whose shards are on the host."""
        return host_shards.kept(self._groups)

    @property
    def is_opened(self) -> bool:
        """True if ``state_dict()`` of the module may be called: it gives whole tensors, or shards are wanted."""
        return self._is_opened or dist.get_world_size() == 1

    def undo(self) -> None:
        """Gives the module whole parameters of its own again."""
        for handle in self._taking:
            handle.remove()
        self.free()
        sharding.undo_fully_shard(self.module)

    def carry_hooks(self) -> None:
        """Makes hooks that were registered on parameters, before or after sharding, run on their gradients."""
        sharding.carry_hooks(self._groups)

    def begin_fit(self, *, updates_ahead: bool = False) -> None:
        """Begins training, with nothing left of a step that an error or the end of a fit broke off.

        With ``updates_ahead`` the host begins in backward with updates of the optimizer step that follows.

        Nodes begin with the same weights, even if their ranks have changed shards since, and all ranks begin with the
        scalars and buffers of rank 0.
        """
        self._forget_step()
        self._ahead.begin_fit(is_on=updates_ahead)
        self._residence.open()
        self._writes.begin_fit()
        for unit in self.units:
            sharding.copy_replicas(unit.handle)
        self._exchanging.copy_replicas()
        self._agreement.begin_fit()

    def end_fit(self) -> None:
        """Ends a fit without errors; raises a `ConfigurationError` about its last step, see `before_optimizer_step`."""
        self.free()
        self._ahead.end_fit()
        self._exchanging.outputs.release()
        self._agreement.end_fit()

    def run(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user, with the root unit unsharded."""
        self._exchanging.outputs.release()  # of a step without backward
        self._residence.opens_itself = False  # units that are resharded in backward show nobody their shards
        self._residence.settle()
        result: T = gathering.run_as_forward(self.module, step, args, kwargs, calls.without_views)
        return result

    def evaluate(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of an evaluation; raises `RanksApartError` if some ranks run units more often."""
        with self._agreement.evaluating():
            result = self.run(step, *args, **kwargs)
        self._exchanging.outputs.release()
        host_shards.wait_for_copies(self._on_host)
        return result

    def forget_gradients(self) -> None:
        """Drops gradients that wait to be reduced, which ``zero_grad()`` does not find; gradients of shards stay."""
        backward.forget_gradients(self._groups)

    @contextmanager
    def reaching_alike(self, loss: Tensor) -> Iterator[Tensor]:
        """Context of a backward; gives the loss for it, which comes to the same units as those of all other ranks.

        Raises:
            RanksApartError: it cannot, or ranks have not run the same units.
        """
        reach = self._agreement.agree_on_backward(self._exchanging.outputs.reach(loss))
        # ranks report each exchange of a backward that may come to some that nobody has counted
        loss, numbers = reach.loss, set[int]() if reach.has_slopes else reach.numbers
        del reach  # backward frees what nothing refers to
        if loss.requires_grad:
            loss.register_hook(self._enter_backward)
        with self._exchanging.outputs.agreed(numbers):
            yield loss

    def _enter_backward(self, _: Tensor) -> None:
        """Hook of a loss: hooks before backward, which come after `reaching_alike`, may have written to weights."""
        self._residence.settle()
        self._residence.show_all()
        backward.announce_end(self.module)

    def before_backward(self, *, is_followed: bool = False) -> None:
        """Prepares backward, after forward.

        Args:
            is_followed: `before_optimizer_step` is called right after this backward, if it is not in `accumulating`:
                what ranks agree on there they then begin with beside the last reduce-scatters.
        """
        self._agrees_early = is_followed and not self._accumulates
        self._agreement.begin_backward()

    def _begin_agreement(self) -> None:
        """Begins, at the end of backward, to agree on what `before_optimizer_step` needs."""
        if self._agrees_early:
            self._agrees_early = False
            self._agreement.begin_settling()

    def after_backward(self) -> None:
        """Drops gradients of parameters that no rank has used, before users look at gradients or assign others."""
        self._residence.hide()
        self._agreement.end_backward()
        host_shards.wait_for_copies(self._on_host)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Prepares a step of an optimizer, for which gradients are complete.

        Raises:
            RanksApartError: ranks have not run the same units, or nodes have drifted apart.
            ConfigurationError: the step before has written to parameters that are gathered in low precision, or
                gradients of replicated units are not reduced.
        """
        self._reductions.finish()
        backward.check_reduced(self._groups)
        # shards take over writes to unsharded parameters before the optimizer changes them
        self.reshard(may_write=False)
        self._residence.outdate(each for group in optimizer.param_groups for each in group["params"])
        self._agreement.settle(optimizer)
        share_gradients(optimizer, self._meshes.device)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context for calls of ``step()`` of an optimizer, with or without a closure."""
        return stepping_on_rows(optimizer, self.host, self._ahead)

    def _update_ahead(self, group: Any) -> None:
        """Begins updates on the host of a unit whose gradients are reduced, if an optimizer is stepping."""
        ready = None
        if group.device.type == "cuda":  # no event: earlier micro-batches have left all gradients that there are
            ready = group._post_reduce_event or torch.cuda.current_stream(group.device).record_event()
        self._ahead.begin((parameter for parameter, _ in access.parameters_of(group)), ready)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leaves gradients unreduced, within the context, that the plan reduces in the last micro-batch only.

        Where each micro-batch reduces gradients inside of nodes, they stay reduced so.
        """
        accumulate(self.units, is_last=False)
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
            accumulate(self.units, is_last=True)

    def reshard(self, *, may_write: bool = True) -> None:
        """Reshards all units, and drops results of all-gathers that nobody waited for; gradients stay.

        Unsharded weights of resident units stay, too, though their modules do not show them.

        Args:
            may_write: tell ranks to agree, before the next step, on which of these somebody has written to. False where
                no rank runs code of users before the next step, nor before this is called again.
        """
        self._residence.hide()
        gathering.reshard(self.module, self._groups)
        host_shards.wait_for_copies(self._on_host)
        if may_write:
            self._residence.open()

    def free(self) -> None:
        """Reshards, and keeps nothing of resident units either: they are gathered when they are needed again."""
        self.reshard()
        self._residence.free()

    def use(self, plan: Plan, *, may_divide: bool = False, in_window: bool = False, is_known: bool = False) -> None:
        """Continues under another plan, between two steps; after an error, under the one before, on all ranks.

        Args:
            plan: the new plan, the same on all ranks; it may differ from the one in use in `FLIPS` only.
            may_divide: allow other micro-batches; the caller changes those.
            in_window: allow the change between two micro-batches of one step, too, where gradients wait to be reduced
                that both plans reduce at the same time.
            is_known: True if all ranks have been under this plan before, and so know that they can be.

        Raises:
            OSDPError: the plan cannot follow the one in use, see `change_plan`.
        """
        self._exchanging.outputs.release()
        plan = executed(plan, self._recomputed)
        check = partial(self._check_use, plan, may_divide=may_divide, in_window=in_window, is_known=is_known)
        self._agreement.check_plan(None if is_known else plan, check)
        self.free()
        self._forwards.choose(plan.blocks, units=[unit.name for unit in self.units])
        self.plan, before, self._ahead.room_bytes = plan, self.units, _room_on_host(plan)
        treatments = planned_treatments(plan)
        read = {name: unit.is_read for unit in plan.units for name, _ in treatments_by_name(unit)}
        self.units = tuple(
            dataclasses.replace(unit, treatment=treatments[unit.name], is_read=read[unit.name]) for unit in before
        )
        self._meshes.add_nodes(plan)
        for unit, was in zip(self.units, before, strict=True):
            change(unit, self._meshes, was.treatment)
            gathering.set_read(unit.handle, is_read=self._is_read(unit))
        gathering.set_asynchronous(self.module, is_asynchronous=plan.asynchronous_unshard)
        self._set_prefetch()

    def meeting(self) -> AbstractContextManager[None]:
        """Context of a micro-batch in which ranks meet before each collective; see `call_off`.

        Raises:
            CalledOffError: another rank has called all ranks off.
        """
        return self._agreement.meeting()

    def call_off(self) -> bool:
        """Calls off all ranks, after an error of this one within `meeting`; returns whether all have come.

        All then `forget_step`; where they have not come, nothing but the end of all ranks is left.
        """
        return self._agreement.call_off()

    def forget_step(self) -> None:
        """Forgets a micro-batch that all ranks have been called off from, with gradients that are not reduced yet."""
        self._forget_step()
        self._agreement.forget_step()
        self.free()

    @property
    def hands_gradients_over(self) -> bool:
        """True if hooks of parameters or the host get gradients within backward, and may step optimizers there."""
        return len(self.host) > 0 or any(getattr(shard, "_post_accumulate_grad_hooks", None) for shard in self.shards)

    def copy_gradients(self) -> Callable[[], None]:
        """Copies this rank's gradients to the host; returns a function that puts them back after `forget_step`."""
        return backward.copy_gradients(self._groups, self._exchanging.parameters)

    def largest(self, values: Sequence[int]) -> Sequence[int]:
        """Returns the largest of each value over all ranks, by way of their hosts: no device is waited for."""
        return self._agreement.largest(values)

    def _check_use(self, plan: Plan, *, may_divide: bool, in_window: bool, is_known: bool) -> None:
        """Raises an error if this rank cannot go on under another plan, see `use`."""
        if self.plan is None:
            raise ConfigurationError(
                "Expected a module that was sharded by a plan, got one that was sharded without: there are no units"
                " whose plan could change. Make a new module, and apply the plan to it."
            )
        if not is_known:
            plan.check()
            check_change(self.plan, plan, may_divide=may_divide)
            check_blocks(self.module, plan.blocks)
            self.check_options(plan)
        place, treatments = self.place_in_step(), planned_treatments(plan)
        waiting = (
            unit
            for unit in self.units
            if not in_window or effects_of(treatments[unit.name]).reductions != effects_of(unit.treatment).reductions
        )
        unreduced = [unit.name for unit in waiting if backward.has_unreduced_gradients(unit.handle)]
        if place:
            where = f"is in {place}"
        elif unreduced:
            where = f"holds gradients of {_shown(unreduced[0])} that are not reduced yet"
        elif self._waiting.are_there:
            where = "has outputs of a forward that backward has not come to"
        else:
            return
        raise ConfigurationError(
            f"Expected a plan to change between two optimizer steps, but rank {dist.get_rank()} {where}. Change it"
            " after the optimizer's step, when nothing holds on to outputs that no backward is called for."
        )

    def _is_read(self, unit: ShardedUnit) -> bool:
        """Tells whether backward reads a unit: where its own module runs again, it does so whatever was profiled."""
        blocks = () if self.plan is None else self.plan.blocks
        return unit.is_read or any(block.name == unit.name for block in blocks)

    def _set_prefetch(self) -> None:
        plan = self.plan
        set_prefetch(self.units, DEFAULT if plan is None else engine_of(plan), () if plan is None else plan.reached)

    @property
    def refused(self) -> tuple[str, ...]:
        """Names of blocks that recompute everything on this rank though the plan has them keep results.

        A result that a block of their class has kept was not what running its operation again returned.
        """
        levels = [block.name for block in (() if self.plan is None else self.plan.blocks) if block.kept]
        return tuple(name for name in levels if type(self.module.get_submodule(name)) in self._forwards.refused)

    def place_in_step(self) -> str:
        """Place in a step where this rank is, such as ``forward of 'layers.2'``; empty outside of one. For errors."""
        phases = {unit.name: backward.phase_of(unit.handle) for unit in self.units}
        reached = [name for name, phase in phases.items() if phase == "backward" and name]
        running = [name for name, phase in phases.items() if phase == "forward"]
        if backward.is_in_backward(self.module):
            return f"backward of {_shown(reached[0] if reached else '')}"
        return f"forward of {_shown(running[-1])}" if running else ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps all collectives on this rank within the context; afterwards all is as before, errors or not."""
        self.free()
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        self._writes.is_paused = True
        with self._meshes.faked(self._groups), self._agreement.paused():
            try:
                yield
            finally:
                self._forget_step()
                self.free()
                self._writes.is_paused = False
                for parameter, gradient in gradients:
                    parameter.grad = gradient

    def _forget_step(self) -> None:
        self._reductions.forget()
        backward.forget_step(self.module, self._groups)
        self._waiting.forget()
        self._exchanging.outputs.forget()

    @contextmanager
    def kept_shards(self) -> Iterator[None]:
        """Restores this rank's shards of trainable weights at the end; within `alone`."""
        shards = [dtensors.local(parameter) for parameter in self.shards if parameter.requires_grad]
        copies = [shard.to("cpu", copy=True) for shard in shards]
        try:
            yield
        finally:
            for shard, copy in zip(shards, copies, strict=True):
                shard.copy_(copy)

    def shard_gradients(self) -> None:
        """Gives trainable parameters gradients of zero, such as a step leaves; within `alone`."""
        for group in self._groups:
            for parameter, gradient in backward.sharded_zeros(group):
                parameter.grad = gradient
        self._exchanging.set_zero_gradients()

    @property
    def shards(self) -> list[nn.Parameter]:
        """Shards of all parameters that this rank holds."""
        gathered = [parameter for group in self._groups for parameter, _ in access.parameters_of(group)]
        return gathered + self._exchanging.parameters

    def names_by_group(self, optimizer: Optimizer) -> list[list[str]]:
        """Names, in the user's own module, of the parameters in each group of an optimizer.

        Raises:
            ConfigurationError: there are other parameters in it, or some slices of an operator and not the others.
        """
        cuts = cuts_of(self.module)
        return [join_names(names, cuts) for names in state.names_by_group(self.module, optimizer)]

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises a `ConfigurationError` if one of these cannot update the shards, or the host cannot as planned.

        Warns of one that may look at whole parameters, where operators are cut into several.
        """
        names = {name for cut in cuts_of(self.module) for name in cut.pieces if len(cut.pieces) > 1}
        pieces = {parameter for name, parameter in self.module.named_parameters() if name in names}
        for optimizer in optimizers:
            of_groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if not (is_elementwise(optimizer) or pieces.isdisjoint(of_groups)):
                rank_zero_warn(
                    f"OSDP: the plan cuts operators into slices that {type(optimizer).__name__} updates one by one. If"
                    " it looks at whole parameters, as at their norms, it takes other steps than under DDP: plan anew"
                    " with SearchSpace(slices=(1,)), without 'stationary' where one operator makes queries, keys and"
                    " values, or gates and values."
                )
            self.host.check(optimizer)
            try_optimizer(optimizer)

    @contextmanager
    def gathered(self, module: nn.Module, *, writes: bool) -> Iterator[None]:
        """Gives a module of the model whole parameters within the context; ``writes`` keeps their changes."""
        with (
            self._opened(),
            sharding.without_fully_shard(module, self._groups, writes=writes),
            self._exchanging.whole(module, writes=writes),
        ):
            yield

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Allows ``state_dict()`` of the module to give DTensors, within the context."""
        self.reshard()
        was_opened, self._is_opened = self._is_opened, True
        try:
            yield
        finally:
            self._is_opened = was_opened

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Context of `_opened` outside of inference mode, in which DTensors have no views."""
        with torch.inference_mode(mode=False), self._opened():
            yield

    def whole_state(self, *, on_all_ranks: bool) -> dict[str, Any] | None:
        """Whole state dict in memory of its own, on rank 0 or on all ranks; None on the others."""
        with self._reading():
            whole = state.whole_state(self.module, on_all_ranks=on_all_ranks)
        return whole if on_all_ranks or dist.get_rank() == 0 else None

    def model_state(self, state_dict_type: str) -> dict[str, Any]:
        """State dict for a checkpoint: whole on rank 0 and meta elsewhere (``"full"``), or shards (``"sharded"``)."""
        with self._reading():
            return state.model_state(self.module, state_dict_type)

    def optimizer_state(self, optimizer: Optimizer, state_dict_type: str) -> dict[str, Any]:
        """State of one optimizer, likewise; whole states are keyed by parameter index, as a plain optimizer's are."""
        with self._reading():
            return state.optimizer_state(self.module, optimizer, state_dict_type)

    def load_model(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        """Loads a whole state dict, which every rank has on CPU; hooks of the module see whole tensors.

        Each rank reads only its rows of tensors that are mapped from a file.
        """
        with self._reading():
            self.module.load_state_dict(state_dict, strict=strict)

    def load_optimizer(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads a whole state by name or number; raises `PlanMismatchError` if it has other parameter groups."""
        with self._reading():
            state.load_optimizer(self.module, optimizer, state_dict, self.host)

    def load_stored(self, stored: StoredShards, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Loads weights of a sharded checkpoint, under the names that they have in ``weights``."""
        with self._reading():
            stored.load_model(self.module, weights, strict=strict)

    def load_stored_optimizers(self, stored: StoredShards, optimizers: Sequence[Optimizer]) -> None:
        """Loads states of all optimizers from a sharded checkpoint."""
        with self._reading():
            stored.load_optimizers(self.module, optimizers, self.host)


def _room_on_host(plan: Plan | None) -> int | None:
    """Bytes of the host's memory that a plan leaves of its limit; None without one."""
    return None if plan is None or plan.host_limit_bytes is None else plan.host_limit_bytes - plan.host_bytes


def sharded_as(module: nn.Module) -> ShardedModel | None:
    """Sharded model that a module is the root of; None where it is of none."""
    owner = access.owner_of(module)
    return owner if isinstance(owner, ShardedModel) else None


def host_rows_of(module: nn.Module) -> HostRows:
    """Rows of parameters that the host updates, of the sharded model that a module is the root of; else of none."""
    sharded = sharded_as(module)
    return NOTHING_HELD if sharded is None else sharded.host


def _shown(name: str) -> str:
    return repr(name) if name else "the root unit"
