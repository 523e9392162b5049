"""Bytes that CUDA's caching allocator reserves, without CUDA: what it does with the tensors of torch's own steps.

Training runs on fake tensors on this rank of a group of ranks that do not exist, under torch's ``fully_shard``. Every
storage that comes and goes is told to `CachingAllocator`, with the stream that ``fully_shard`` has chosen for it.
Nothing is assumed or fitted but the rules of the allocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from typing_extensions import override

from benchmarks.measures.simulated.models import Sizes, made, selective
from benchmarks.testbed.groups import fake_group
from lightning_osdp.profiler import LiveBytes

_MIB = 2**20
_LEAST = 512
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_MIDDLE, _MIDDLE_SEGMENT = 10 * _MIB, 20 * _MIB
NUM_STEPS = 3
"""Steps, of which the last one's live bytes count: optimizer state and the first gradients are there by then."""


@dataclass(kw_only=True, eq=False)
class Block:
    """Part of a segment: a tensor, free, or the end of a segment that grows."""

    start: int
    size: int
    pool: tuple[Hashable, bool]
    """Stream, and whether it is the pool of small blocks."""
    is_free: bool = True
    before: Block | None = None
    """Block of the same segment that ends where this one starts."""
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Order in which free blocks are taken."""
        return self.size, self.start


class CachingAllocator:
    """The rules of ``PYTORCH_CUDA_ALLOC_CONF``, on a device that never runs out of memory.

    Sizes are multiples of 512 bytes. A stream has two pools, one of them for tensors up to 1 MiB. A tensor gets the
    smallest free block of its pool that is large enough, the first of equal ones, and what it leaves of the block is a
    block of its own. Free neighbours become one block. No segment is given back.

    By default a segment of the pool of small tensors has 2 MiB. One of the other pool has 20 MiB, or for tensors of 10
    MiB and more as many as they need, in multiples of 2 MiB; of its blocks a rest up to 1 MiB is not split off.

    With ``expandable_segments`` a pool is one segment, which grows behind its last block by pages of 2 MiB, for larger
    tensors of 20 MiB. The last block is taken where no other one is large enough, and every rest is split off.

    References:
        c10/cuda/CUDACachingAllocator.cpp (``malloc``, ``get_free_block``, ``alloc_found_block``, ``free_block``,
        ``try_allocate_expandable_block``). [Read, and not compared with CUDA.]
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.reserved_bytes = 0
        self.by_stream: dict[Hashable, int] = defaultdict(int)
        """Reserved bytes of each stream."""
        self._free: dict[tuple[Hashable, bool], list[tuple[tuple[int, int], Block]]] = defaultdict(list)
        self._is_expandable = expandable_segments
        self._ends: dict[tuple[Hashable, bool], Block] = {}
        """Empty block at the end of a segment that grows, by pool."""

    def allocate(self, num_bytes: int, stream: Hashable) -> Block:
        """Returns the block that a tensor of so many bytes, more than none, gets in a stream."""
        size = -(-num_bytes // _LEAST) * _LEAST
        is_small = size <= _SMALL
        pool = (stream, is_small)
        free = self._free[pool]
        place = bisect_left(free, (size, -1), key=lambda each: each[0])
        if self._is_expandable and place + 1 < len(free) and free[place][1].after is self._ends[pool]:
            place += 1
        if place < len(free):
            block = free.pop(place)[1]
        else:
            block = self._grown(size, pool) if self._is_expandable else self._segment(size, pool)
        left = block.size - size
        if left >= _LEAST if is_small or self._is_expandable else left > _SMALL:
            rest = Block(start=block.start + size, size=left, pool=pool, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._give_back(rest)
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        """Gives a block back to the pool that it is of."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._take(neighbour)
        before, after = block.before, block.after
        if before is not None and before.is_free:
            block.start, block.size, block.before = before.start, before.size + block.size, before.before
        if after is not None and after.is_free:
            block.size, block.after = block.size + after.size, after.after
        for neighbour, side in ((block.before, "after"), (block.after, "before")):
            if neighbour is not None:
                setattr(neighbour, side, block)
        self._give_back(block)

    def _segment(self, size: int, pool: tuple[Hashable, bool]) -> Block:
        if size <= _SMALL:
            whole = _SMALL_SEGMENT
        else:
            whole = _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // (2 * _MIB)) * 2 * _MIB
        block = Block(start=self.reserved_bytes, size=whole, pool=pool)
        self._reserve(whole, pool)
        return block

    def _grown(self, size: int, pool: tuple[Hashable, bool]) -> Block:
        """The last block of the segment of a pool, with as many pages more as it needs for this size."""
        end = self._ends.setdefault(pool, Block(start=0, size=0, pool=pool, is_free=False))
        last = end.before
        if last is not None and last.is_free:
            self._take(last)
        else:
            last = Block(start=end.start, size=0, pool=pool, before=last, after=end)
            if last.before is not None:
                last.before.after = last
            end.before = last
        page = _SMALL_SEGMENT if size <= _SMALL else _MIDDLE_SEGMENT
        more = -(-(size - last.size) // page) * page
        last.size, end.start = last.size + more, end.start + more
        self._reserve(more, pool)
        return last

    def _reserve(self, num_bytes: int, pool: tuple[Hashable, bool]) -> None:
        self.reserved_bytes += num_bytes
        self.by_stream[pool[0]] += num_bytes

    def _give_back(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.pool], (block.key, block), key=lambda each: each[0])

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, block.key, key=lambda each: each[0]))


class _Allocated(LiveBytes):
    """Live bytes, of which each storage has a block of an allocator."""

    def __init__(self, *, expandable_segments: bool) -> None:
        super().__init__("cpu")
        self.allocator = CachingAllocator(expandable_segments=expandable_segments)
        self._blocks: dict[int, tuple[int, Block]] = {}

    @override
    def _set(self, key: int, num_bytes: int) -> None:
        super()._set(key, num_bytes)
        if key in self._blocks and self._blocks[key][0] == num_bytes:
            return
        self._drop(key)
        if num_bytes:
            self._blocks[key] = num_bytes, self.allocator.allocate(num_bytes, torch.cpu.current_stream())

    @override
    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._drop(key)

    def _drop(self, key: int) -> None:
        if key in self._blocks:
            self.allocator.free(self._blocks.pop(key)[1])


class Reserved(NamedTuple):
    """Memory of one rank over a step."""

    live_bytes: int
    """Most bytes of live tensors."""
    reserved_bytes: int
    """Bytes that the allocator has reserved."""
    by_stream: tuple[int, ...]
    """Reserved bytes of each stream, the largest first."""


def reserved(
    sizes: Sizes,
    *,
    sequence: int,
    batch: int,
    world_size: int,
    checkpointed: frozenset[int],
    by_operation: bool,
    resharded: frozenset[int],
    zeroes_first: bool,
    expandable_segments: bool,
) -> Reserved:
    """Counts what a step of a `LanguageModel` reserves, in bf16-mixed with gradients reduced in float32, and AdamW.

    Args:
        sizes: of the model.
        sequence: tokens of a sample.
        batch: samples of a rank.
        world_size: number of ranks.
        checkpointed: indices of blocks that recompute.
        by_operation: whether these keep what `selective` says.
        resharded: indices of blocks that are resharded after forward; the root, which has all else, is not.
        zeroes_first: whether gradients are zeroed before forward, and not, as Lightning does, before backward.
        expandable_segments: whether the allocator's segments grow, see `CachingAllocator`.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy, options = MixedPrecisionPolicy() if sizes.is_bfloat16 else mixed, dict[str, Any](preserve_rng_state=False)
    if by_operation:
        options["context_fn"] = selective
    with fake_group(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        with FakeTensorMode():
            module = made(sizes, sequence=sequence)
            if sizes.is_bfloat16:
                module = module.bfloat16()
            layers = module.get_submodule("layers")
            assert isinstance(layers, nn.ModuleList)
            for index, layer in enumerate(layers):
                if index in checkpointed:
                    layers[index] = checkpoint_wrapper(layer, **options)
                fully_shard(layers[index], mesh=mesh, mp_policy=policy, reshard_after_forward=index in resharded)
            fully_shard(module, mesh=mesh, mp_policy=policy)
            optimizer = AdamW([each for each in module.parameters() if each.requires_grad], foreach=False)
            live = _Allocated(expandable_segments=expandable_segments)
            with live:
                live.track(module.parameters())
                tokens = torch.zeros(batch, sequence, dtype=torch.long)
                labels = tokens.clone()
                for _ in range(NUM_STEPS):
                    live.reset_peak()
                    if zeroes_first:
                        optimizer.zero_grad()
                    loss = module((tokens, labels))
                    if not zeroes_first:
                        optimizer.zero_grad()
                    loss.backward()
                    del loss
                    optimizer.step()
            found = live.allocator
            return Reserved(
                live_bytes=live.peak_bytes,
                reserved_bytes=found.reserved_bytes,
                by_stream=tuple(sorted(found.by_stream.values(), reverse=True)),
            )
