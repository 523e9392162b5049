"""What an optimizer step allocates and frees, in terms of the parameters that it updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_osdp.profiler.step.tensors import tensors_in
from lightning_osdp.profiler.tracing.live_bytes import LiveBytes

_SMALL, _BIG = 1024, 128 * 1024
"""Elements of a group's first and second parameter: sums of multiples of both tell them apart."""
_NUM_STEPS = 8
"""Steps that are looked at: RAdam, for one, takes more from its sixth step on."""

_NUM_TURNS = 3
"""Those of the small, of the big and of the one after it, which may find what the big one has left."""

Pair = tuple[float, float]
"""(x, y) as in `OptimizerProfile.temporaries`."""


def two_sizes(groups: Sequence[Sequence[Tensor]]) -> list[int]:
    """Elements of each parameter for `turn_pairs`; the only one of its group has none before it."""
    sizes: list[int] = []
    for group in groups:
        is_alone = sum(parameter.requires_grad for parameter in group) == 1
        left = iter((_BIG,) if is_alone else (_SMALL, _BIG))
        sizes += [next(left, 1) if parameter.requires_grad else 1 for parameter in group]
    return sizes


def turn_pairs(optimizer: Optimizer, updated: Sequence[Tensor]) -> set[Pair]:
    """Pairs of every moment of a step over parameters of `two_sizes`, to the quarter: masks are of bytes.

    From then on the optimizer updates only the first few parameters of each group: later ones tell nothing more.
    """
    for group in optimizer.param_groups:
        trainable = [p for p in group["params"] if p.requires_grad]
        group["params"][:] = trainable[:_NUM_TURNS] or group["params"]
    itemsize = max(parameter.element_size() for parameter in updated)
    pairs = set()
    for num_bytes in _temporary_bytes(optimizer, updated):
        own = round(num_bytes / itemsize / _BIG * 4) / 4
        rest = round((num_bytes / itemsize - own * _BIG) / _SMALL * 4) / 4
        pairs.add((rest, own) if own else (0.0, rest))  # the small one's own turn
    return pairs


def front(pairs: Collection[Pair]) -> tuple[Pair, ...]:
    """Those that no other one is above.

    Example:
        >>> front([(0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (1.0, 1.0)])
        ((0.0, 2.0), (1.0, 1.0))
    """

    def is_below(pair: Pair) -> bool:
        return any(other != pair and other[0] >= pair[0] and other[1] >= pair[1] for other in pairs)

    return tuple(sorted(pair for pair in pairs if any(pair) and not is_below(pair)))


def foreach_ratio(optimizer: Optimizer, updated: Sequence[Tensor]) -> float:
    """Most bytes of temporaries over those of the largest group."""
    groups = ([p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups)
    largest: int = max(sum(p.numel() * p.element_size() for p in group) for group in groups)
    return max(_temporary_bytes(optimizer, updated)) / largest


def _temporary_bytes(optimizer: Optimizer, updated: Sequence[Tensor]) -> set[int]:
    """Every number of bytes that live during a step besides what lives before it."""
    live = _Counts(updated[0].device.type)
    with live:
        live.track([*updated, *(p.grad for p in updated if p.grad is not None)])
        live.track(tensors_in(list(optimizer.state.values())))
        before = live.current_bytes
        live.counts = {before}
        for _ in range(_NUM_STEPS):
            optimizer.step(_no_loss)
    return {count - before for count in live.counts}


def _no_loss() -> float:
    return 0.0


class _Counts(LiveBytes):
    """Notes every number of live bytes."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.counts: set[int] = set()

    def _set(self, key: int, num_bytes: int) -> None:
        super()._set(key, num_bytes)
        self.counts.add(self.current_bytes)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self.counts.add(self.current_bytes)
