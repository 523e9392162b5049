"""Seconds of one unit in an optimizer step if nothing overlaps: functions that add up, listed in `TERMS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_osdp.core.axes import ZDP, Treatment
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import BlockProfile, ModelProfile, OptimizerProfile
from lightning_osdp.core.step import Step, Workload
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.engine import (
    COLLECTIVES,
    COPY,
    DEFAULT,
    EXCHANGES,
    FSDP2,
    Collective,
    block_effects,
    effects_of,
    messages,
)

_NUMBER_BYTES = 4
"""Bytes of each number on which ranks agree before inputs are exchanged."""
_BACK = 2
"""Bytes of the host's memory that are moved for each byte of an updated copy that becomes the shard there."""


def communication_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2 = DEFAULT
) -> float:
    """All-gathers and reduce-scatters, or exchanges of activations.

    Equation 2, with alpha and beta of each collective apart, for each of K micro-batches that reduces gradients:

        t_ZDP = 2 AG(S) + RS(S) = 3 (N-1) alpha + 3 (N-1)/N S beta    where both collectives cost the same
        t_DP  = 1 AG(S) + RS(S) = 2 (N-1) alpha + 2 (N-1)/N S beta

    Where only the last one reduces them, a step takes 2 K AG(S) + RS(S) of a ZDP unit and AG(S) + RS(S) of a DP one.
    An hpZ unit takes as a ZDP one, but backward's all-gathers are over the ranks of a node, on the links inside of it.
    So are all collectives of a unit that is sharded in the node, on m ranks, and each reduce-scatter is followed by an
    all-reduce of S/m between N/m nodes.

    A unit that moves activations takes 2 K (exchange of inputs + exchange of outputs), gradients included, which grow
    with the micro-batch, see `engine.exchanges`. Where it is sharded in the node, these are over the ranks of a node,
    and each micro-batch is followed by an all-reduce of S/m between N/m nodes.

    How many collectives there are where forward calls a module again, or backward runs a block again, and how many
    bytes they carry, is the engine's. A unit without trainable parameters reduces nothing.

    References:
        OSDP (Jiang et al. 2022), equation 2.
    """
    seconds = collectives_s(unit, mode, cluster=cluster, workload=workload, engine=engine)
    return sum(each_s for each, each_s in seconds.items() if each is not COPY)


def copies_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2 = DEFAULT
) -> float:
    """Copies of a shard on the host to the device: in the dtype that is gathered, for each all-gather of it."""
    seconds = collectives_s(unit, mode, cluster=cluster, workload=workload, engine=engine)
    return seconds.get(COPY, 0.0)


def collectives_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2 = DEFAULT
) -> Mapping[Collective, float]:
    """Seconds of `communication_s` by collective, in the order of `COLLECTIVES`, with those of `copies_s`."""
    numbers = effects_of(mode).collectives(unit, num_micro_batches=workload.num_micro_batches)
    return {each: number * collective_s(unit, each, cluster, workload, engine) for each, number in numbers.items()}


def resource_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2
) -> tuple[float, ...]:
    """Seconds of an optimizer step that a unit takes of computing, its operators' own apart, and of each link's use."""
    seconds = collectives_s(unit, mode, cluster=cluster, workload=workload, engine=engine)
    own_s = sum(
        term(unit, mode, cluster=cluster, workload=workload, engine=engine) for term in (overhead_s, activations_s)
    )
    return own_s, *(seconds.get(each, 0.0) for each in dict.fromkeys(COLLECTIVES.values()))


def collective_s(
    unit: UnitProfile, collective: Collective, cluster: Cluster, workload: Workload, engine: FSDP2
) -> float:
    """Seconds of one of a unit's collectives.

    An all-gather inside of nodes has a little less padding where the unit is sharded in the node; that is left out. An
    all-reduce is of what a reduce-scatter inside of nodes leaves a rank. Exchanges of a unit that has none take none.
    """
    operation, over, _ = collective
    if operation in EXCHANGES:
        return 0.0 if unit.exchange is None else exchange_s(unit.exchange, operation, cluster, workload, over=over)
    if operation == "all_gather":
        num_bytes = engine.all_gather_bytes(unit, cluster.world_size)
        return cluster.all_gather_s(num_bytes, over=over) if num_bytes else 0.0
    if operation == "reduce_scatter":
        num_bytes = engine.reduce_scatter_bytes(unit, cluster.num_ranks(over))
        return cluster.reduce_scatter_s(num_bytes, over=over) if num_bytes else 0.0
    if operation == COPY.operation:
        return unit.gathered_bytes / cluster.num_ranks(over) * cluster.host_copy_s_per_byte
    if over == "all":
        num_bytes = engine.reduce_scatter_bytes(unit, cluster.num_ranks("one"))
        return cluster.all_reduce_s(num_bytes) if num_bytes else 0.0
    num_shards = cluster.num_ranks("node")
    num_bytes = engine.reduce_scatter_bytes(unit, num_shards) / num_shards
    return cluster.all_reduce_between_s(num_bytes) if num_bytes else 0.0


def exchange_s(exchange: Exchange, kind: str, cluster: Cluster, workload: Workload, *, over: str = "all") -> float:
    """Seconds of one exchange, of ``EXCHANGES``, over all ranks or those of a node; none where nothing is sent.

    Before inputs, all ranks tell each other how many rows they have and what they are about to exchange, by way of
    their hosts, which each of several columns does; before the last operator that others feed likewise that all come
    to it.
    """
    of_operation = {"all_gather": cluster.all_gather_s, "all_to_all": cluster.all_to_all_s}
    seconds = 0.0
    for message in messages(exchange, cluster.num_ranks(over))[kind]:
        num_bytes = message.num_bytes.at(workload.micro_batch_size)
        seconds += of_operation[message.operation](num_bytes, over=over) if num_bytes else 0.0
    num_agreed = 0
    if kind == EXCHANGES[0]:
        num_agreed = len(exchange.operators) if exchange.is_shared else 1
    elif kind == EXCHANGES[1]:
        num_agreed = int(exchange.is_fed)
    return seconds + num_agreed * cluster.agreement_s(_NUMBER_BYTES * (cluster.world_size + 2))


def exchanged_bytes(exchange: Exchange, cluster: Cluster, workload: Workload, *, over: str) -> float:
    """Bytes that a rank sends in an optimizer step to move activations over all ranks, or those of a node."""
    num_ranks = cluster.num_ranks(over)
    sent = (
        each.num_bytes.at(workload.micro_batch_size)
        for of_kind in messages(exchange, num_ranks).values()
        for each in of_kind
    )
    return workload.num_micro_batches * sum(sent) * (num_ranks - 1) / num_ranks


def compute_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2 = DEFAULT
) -> float:
    """Forward and backward of the unit's operators, ``K (fixed + b gamma)``; the same in every mode.

    The paper's time is proportional to the batch; small ones do not fill the device, so it is affine here.

    References:
        OSDP (Jiang et al. 2022), equation 2.
    """
    del mode, cluster, engine
    return workload.num_micro_batches * unit.compute_s.at(workload.micro_batch_size)


def optimizer_s(profile: ModelProfile, cluster: Cluster) -> float:
    """Seconds of the optimizer step on this rank's shards, where all units are sharded over all ranks."""
    trainable = sum(operator.num_trainable for operator in profile)
    return profile.optimizer.fixed_s + profile.optimizer.s_per_element * trainable / cluster.world_size


def more_optimizer_s(step: Step, unit: UnitProfile, mode: Treatment, *, host_rent_s_per_byte: float = 0.0) -> float:
    """Seconds that the optimizer step takes beyond `optimizer_s` for a unit over fewer ranks, or updated on the host.

    Where the host updates a rank's shard of n elements in B bytes, it waits for the device, copies the shard and its
    gradient, updates, and copies the shard back: nothing is computed meanwhile.

        t = n host_s_per_element + 3 B host_copy_s_per_byte

    It is taken to be no faster than the device. Where it may begin in backward, see `host_updates`, the shard is still
    to be copied back.

        t = B host_copy_s_per_byte

    A shard on the host is updated in place, and its gradient is copied there each of R times that it is reduced, here
    where nothing is computed meanwhile, see `copied_out_s`. It is cast to the C bytes that are gathered, if these are
    others; an update that has begun in backward is copied back in memory of the host. By bytes, as of `_host_s`,

        t = n host_s_per_element + R B host_copy_s_per_byte + (B + C as cast)
        t = (2 B + B + C as cast)    where it may begin in backward

    Each byte of the host's memory takes ``host_rent_s_per_byte`` on top, in the search for a bound under a limit of
    that memory. [Measured on CPU alone, where copies are in one memory.]
    """
    optimizer, cluster, effects = step.profile.optimizer, step.cluster, effects_of(mode)
    num_ranks, trainable = cluster.num_ranks(effects.sharded_over), sum(each.num_trainable for each in unit.operators)
    own_s = optimizer.s_per_element * trainable / num_ranks
    host_s_per_element = optimizer.host_s_per_element if effects.updates_on_host else None
    if host_s_per_element is not None:
        copy_s = unit.trainable_bytes / num_ranks * cluster.host_copy_s_per_byte
        update_s = host_s_per_element * trainable / num_ranks
        if effects.shard_on_host:
            num_reduced = effects.counts(unit, num_micro_batches=step.workload.num_micro_batches)["reduce"]
            copied_s = 0.0 if _copies_out_beside(cluster, num_reduced) else num_reduced * copy_s
            is_cast = unit.gathered_bytes != unit.parameter_bytes
            copied_s += _host_s(unit, optimizer, (unit.trainable_bytes + unit.gathered_bytes) * is_cast) / num_ranks
            back_s = _host_s(unit, optimizer, _BACK * unit.trainable_bytes) / num_ranks
            own_s = max(own_s, copied_s + (back_s if is_ahead(optimizer, cluster) else update_s))
        else:
            own_s = max(own_s, copy_s if is_ahead(optimizer, cluster) else update_s + 3 * copy_s)
    if host_rent_s_per_byte:
        held = DEFAULT.layout(
            [unit],
            optimizer,
            num_ranks,
            on_host=[host_s_per_element is not None],
            shards_on_host=[effects.shard_on_host],
            pins=cluster.host_copies_overlap,
        )
        own_s += host_rent_s_per_byte * held.host
    return own_s - optimizer.s_per_element * trainable / cluster.world_size


def update_s(step: Step, modes: Sequence[Treatment], *, host_rent_s_per_byte: float = 0.0) -> float:
    """Seconds of the optimizer step in these modes, one per unit; ``host_rent_s_per_byte`` as of `more_optimizer_s`."""
    more_s = (
        more_optimizer_s(step, *each, host_rent_s_per_byte=host_rent_s_per_byte)
        for each in zip(step.units, modes, strict=True)
    )
    return optimizer_s(step.profile, step.cluster) + sum(more_s)


def is_ahead(optimizer: OptimizerProfile, cluster: Cluster) -> bool:
    """True if updates on the host begin in backward and go on beside computing, which without streams is the host's."""
    return optimizer.host_is_ahead and cluster.has_streams and _is_beside_computing(cluster)


def copied_out_s(step: Step, modes: Sequence[Treatment]) -> Mapping[int, float]:
    """Seconds in which gradients are copied to a shard on the host beside computing, once they are reduced, by unit.

    References:
        torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (``foreach_reduce``): gradients that are added to
        others on the host are waited for.
    """
    cluster, found = step.cluster, dict[int, float]()
    for place, (unit, effects) in enumerate(zip(step.units, map(effects_of, modes), strict=True)):
        if effects.shard_on_host and unit.trainable_bytes:
            num_reduced = effects.counts(unit, num_micro_batches=step.workload.num_micro_batches)["reduce"]
            if _copies_out_beside(cluster, num_reduced):
                shard_bytes = unit.trainable_bytes / cluster.num_ranks(effects.sharded_over)
                found[place] = shard_bytes * cluster.host_copy_s_per_byte
    return found


def _copies_out_beside(cluster: Cluster, num_reduced: float) -> bool:
    return cluster.host_copies_overlap and num_reduced == 1 and _is_beside_computing(cluster)


def _is_beside_computing(cluster: Cluster) -> bool:
    """True if anything may go on beside computing: one rank has no collectives of which that could be measured."""
    return cluster.overlaps or cluster.world_size == 1


class HostUpdate(NamedTuple):
    """Seconds of a unit's update on the host, copying back left out."""

    beside_s: float
    """Seconds if it begins in backward."""
    after_s: float
    """Seconds if backward is over before."""


def host_updates(step: Step, modes: Sequence[Treatment]) -> Mapping[int, HostUpdate]:
    """Updates on the host that may begin in backward, by unit.

    For a rank's shard of n elements in B bytes, with states of S bytes, it copies the shard, its gradient and the
    states, and updates. All but the copies from the device takes the memory of the host: by its bytes, of which an
    update in place moves 3 B + 2 S,

        t = 2 B host_copy_s_per_byte + n host_s_per_element (1 + 2 S / (3 B + 2 S))

    A shard and a gradient that are on the host are copied there, as 4 B more. Updates that have not begun when backward
    is over are computed in the step, where states, and what is on the host, are not copied:

        t = 2 B host_copy_s_per_byte + n host_s_per_element
        t = n host_s_per_element    of a shard on the host, of which nothing is copied back, either
    """
    optimizer, cluster, found = step.profile.optimizer, step.cluster, dict[int, HostUpdate]()
    if optimizer.host_s_per_element is None or not is_ahead(optimizer, cluster):
        return found
    for place, (unit, mode) in enumerate(zip(step.units, modes, strict=True)):
        effects, shard_bytes, states_bytes = effects_of(mode), unit.trainable_bytes, unit.optimizer_bytes
        if effects.updates_on_host and shard_bytes:
            num_ranks, after_bytes = cluster.num_ranks(effects.sharded_over), 3 * shard_bytes + 2 * states_bytes
            beside_bytes, copied_s = after_bytes + 2 * states_bytes, 2 * shard_bytes * cluster.host_copy_s_per_byte
            if effects.shard_on_host:
                beside_bytes, copied_s = beside_bytes + 4 * shard_bytes, 0.0
                after_bytes -= _BACK * shard_bytes
            found[place] = HostUpdate(
                beside_s=(copied_s + _host_s(unit, optimizer, beside_bytes)) / num_ranks,
                after_s=(copied_s + _host_s(unit, optimizer, after_bytes)) / num_ranks,
            )
    return found


def _host_s(unit: UnitProfile, optimizer: OptimizerProfile, num_bytes: float) -> float:
    """Seconds that the host takes to move so many bytes of a unit, at the rate of an update, which moves 3 B + 2 S."""
    updated_bytes = 3 * unit.trainable_bytes + 2 * unit.optimizer_bytes
    update_s = (optimizer.host_s_per_element or 0.0) * sum(each.num_trainable for each in unit.operators)
    return num_bytes * update_s / updated_bytes if updated_bytes else 0.0


def overhead_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2 = DEFAULT
) -> float:
    """Hooks, views and copies beside collectives and operators, as measured on the cluster; none where it was not.

    With G all-gathers and R reduce-scatters in K micro-batches, and C calls of the unit's modules in each:

        t = G gather + K (flatten + (C - 1) call) + R reduce + (K - R) accumulate
        t = stay + call    where it is resident
        t = K stay + R reduce + call    where it is replicated

    The paper has no such term. [Empirical, measured by `profiler.measure_unit_overhead` in every run.]
    """
    del engine
    numbers = effects_of(mode).overheads(unit, num_micro_batches=workload.num_micro_batches)
    return sum(number * overhead_part_s(unit, part, cluster) for part, number in numbers.items())


def overhead_part_s(unit: UnitProfile, part: str, cluster: Cluster) -> float:
    """Seconds of one part of `Cluster.unit_overhead`, once.

    One rank sends nothing, but its units have hooks and copies, too. All parameters are gathered; all else is done with
    gradients, of which what is frozen has none. For a unit that is frozen as a whole, hooks alone run in backward:
    there is nothing to reduce, nor to leave for the next micro-batch.
    Hooks around the first call of a unit's modules are in the part of flattening, and those of further calls beside it.
    A resident unit has none after the first call in a step.
    Gradients are copied to be reduced: read in the dtype of computing, and written in that of reducing.

    References:
        torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``post_backward``), _fsdp_collectives.py
        (``foreach_reduce_scatter_copy_in``).
    """
    overhead = cluster.unit_overhead.get(part)
    if overhead is None or not unit.operators:
        return 0.0
    calls_s = cluster.call_s * max(len(unit.modules), len(unit.calls))
    if part == "stay":
        return overhead.seconds(0, max(1, len(unit.parameters))) + cluster.call_s
    if part == "gather":
        return overhead.seconds(unit.gathered_bytes, max(1, len(unit.parameters)))
    again_s = calls_s - cluster.call_s if part == "flatten" and not unit.is_root else 0.0
    if not unit.gradient_bytes:
        return overhead.fixed_s + again_s if part == "flatten" else 0.0
    num_trained = max(1, sum(each.is_trainable for each in unit.parameters))
    written_bytes = DEFAULT.reduce_scatter_bytes(unit, 1) if part == "reduce" else unit.gradient_bytes
    return overhead.seconds((unit.gradient_bytes + written_bytes) / 2, num_trained) + again_s


def activations_s(
    unit: UnitProfile, mode: Treatment, *, cluster: Cluster, workload: Workload, engine: FSDP2 = DEFAULT
) -> float:
    """Seconds that the unit's block takes for running again, and for copies to host memory and back."""
    del engine
    return workload.num_micro_batches * block_s(unit.block, mode["saves"], cluster, workload.micro_batch_size)


def block_s(block: BlockProfile | None, choice: str, cluster: Cluster, micro_batch_size: int) -> float:
    """Seconds of `activations_s` of a block, in one micro-batch."""
    if block is None:
        return 0.0
    rerun_s = block_effects(block, choice).rerun_s.at(micro_batch_size)
    return rerun_s + 2 * copied_s(block, choice, cluster, micro_batch_size)


def copied_s(block: BlockProfile | None, choice: str, cluster: Cluster, micro_batch_size: int) -> float:
    """Seconds of copies to host memory in one micro-batch's forward; those back in its backward take as long."""
    if block is None:
        return 0.0
    return block_effects(block, choice).copied_bytes.at(micro_batch_size) * cluster.host_copy_s_per_byte


def apart_s(num_units: int, *, cluster: Cluster, workload: Workload) -> float:
    """Most seconds of an optimizer step that so many units take for being units of their own.

    These are the latencies of the collectives of units that reduce their gradients in every micro-batch, and what of
    the runtime's overhead does not depend on bytes and tensors.
    """
    latency_s = 2 * cluster.all_gather_s(0.0) + cluster.reduce_scatter_s(0.0)
    latency_s += cluster.all_reduce_between_s(0.0) if cluster.has_nodes else 0.0
    numbers = effects_of(ZDP).overheads()
    fixed_s = sum(numbers[part] * overhead.fixed_s for part, overhead in cluster.unit_overhead.items())
    return num_units * workload.num_micro_batches * (latency_s + fixed_s)


TERMS: dict[str, Callable[..., float]] = {
    "communication": communication_s,
    "copies": copies_s,
    "compute": compute_s,
    "overhead": overhead_s,
    "activations": activations_s,
}
"""Seconds of an optimizer step by name."""


def unit_s(
    unit: UnitProfile,
    mode: Treatment,
    *,
    cluster: Cluster,
    workload: Workload,
    engine: FSDP2 = DEFAULT,
    terms: Iterable[str] = TERMS,
) -> float:
    """Seconds of an optimizer step that one unit takes in one mode: the sum of these `TERMS`."""
    return sum(TERMS[name](unit, mode, cluster=cluster, workload=workload, engine=engine) for name in terms)
