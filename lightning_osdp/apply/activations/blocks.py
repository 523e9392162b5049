"""Blocks that recompute or offload the tensors that they save for backward, by a forward that is replaced in place.

Nothing is wrapped, so that names of modules and parameters stay. Units are around this: a block that is a unit is
gathered once for recomputing and for its backward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self, override

from lightning_osdp.apply.activations.offload import HostMemory
from lightning_osdp.apply.ranks.buffers import version_of
from lightning_osdp.core.axes import KEEP
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.text.names import is_inside, upwards
from lightning_osdp.errors import PlanMismatchError
from lightning_osdp.operations.recomputation import KeptResults
from lightning_osdp.operations.splitting import compiler_of
from lightning_osdp.planner.engine import SAVING

_log = logging.getLogger(__name__)

Place = tuple[nn.Module, str]
"""Owner of a buffer, and the name of the buffer there."""
_PLAIN = (Tensor, bool, int, float, str, type(None))
"""Outputs that a reentrant block can hand on, in tuples, lists and dicts."""


class BlockForwards:
    """Forwards of the blocks of a model, each of which can save other tensors from one step to the next.

    Evaluation is not changed: without gradients a block runs its own forward. A forward that has replaced one stays
    there, also while the block keeps all it saves: somebody may have wrapped it.

    Attributes:
        memory: host memory of all blocks.
        refused: classes of blocks whose results cannot be kept: all of their blocks recompute everything.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self.memory = module, HostMemory(device)
        self.refused: set[type[nn.Module]] = set()
        self._replaced: dict[nn.Module, BlockForward] = {}

    def choose(self, blocks: Sequence[Block], *, units: Collection[str]) -> None:
        """Sets what these blocks do with saved tensors; all others keep them. Errors are those of `check_blocks`.

        ``units`` are the names of the modules that are units of their own.
        """
        check_blocks(self._module, blocks)
        chosen = {self._module.get_submodule(block.name): block for block in blocks}
        for module, block in chosen.items():
            if module not in self._replaced:
                is_unit = block.name in units and not any(unit.startswith(f"{block.name}.") for unit in units)
                compiler = self._compiler_around(block.name)
                forward = BlockForward(module, self.memory, is_unit=is_unit, compiler=compiler)
                self._replaced[module] = module.forward = forward
        for module, forward in self._replaced.items():
            if module not in chosen:
                forward.choose(KEEP)
            elif type(module) in self.refused or not chosen[module].kept:
                forward.choose(chosen[module].activations)
            else:
                kept = KeptResults(chosen[module].kept, functools.partial(self._refuse, type(module)))
                forward.choose(chosen[module].activations, kept)

    def _compiler_around(self, name: str) -> Any:
        """Compiler of the nearest of a block and the modules around it; None where none of them is compiled."""
        compilers = (compiler_of(self._module.get_submodule(each)) for each in (*upwards(name), ""))
        return next((each for each in compilers if each is not None), None)

    def _refuse(self, kind: type[nn.Module]) -> None:
        """Has all blocks of a class recompute everything from now on."""
        for module, forward in self._replaced.items():
            if type(module) is kind:
                forward.refuse()
        if kind not in self.refused:
            self.refused.add(kind)
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            _log.log(
                logging.WARNING if is_first else logging.INFO,
                "OSDP: blocks of class %s recompute everything: a result that one keeps for backward is not what"
                " running its operation again returns. Something writes to it past torch's version counters, as through"
                " `.data`, or the operation is not deterministic.",
                kind.__name__,
            )


class BlockForward:
    """Forward of a block, which can keep less for backward than the block's own.

    Hooks of the block do not run again when it recomputes. ``is_unit`` says that the block is a unit with none inside.
    A ``compiler`` compiles the block's own forward alone: code around it drops and restores tensors, which no graph can
    have. Where some results are kept, the block runs as eager code.
    """

    def __init__(self, block: nn.Module, memory: HostMemory, *, is_unit: bool, compiler: Any = None) -> None:
        self.block, self.memory, self.activations = block, memory, KEEP
        self.kept: KeptResults | None = None
        self._own: Callable[..., Any] = block.forward
        self._compiled = self._own
        if compiler is not None and not isinstance(block, OptimizedModule):  # whose forward is compiled as it is
            self._compiled = compiler(self._own)
            if block._compiled_call_impl is not None:
                block._compiled_call_impl = _Call(block, compiler)
        self._buffers = Buffers(block)
        self._is_unit = is_unit
        self._reentrant: Reentrant | None = None
        functools.update_wrapper(self, self._own, updated=())

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy, which is not compiled, as copies of modules are not."""
        return {**vars(self), "_compiled": self._own}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block as if it kept everything."""
        return self._compiled(*args, **kwargs)

    def choose(self, activations: str, kept: KeptResults | None = None) -> None:
        """Sets what the next forward does with the tensors that the block saves, and which results it keeps."""
        self.kept = kept
        if activations != self.activations:
            takes_reentrant = self._is_unit and all(SAVING[activations])
            self._reentrant = Reentrant(self.block, self._run, self._buffers) if takes_reentrant else None
            self.activations = activations

    def refuse(self) -> None:
        """Keeps no results any more, and hands none back."""
        if self.kept is not None:
            self.kept.is_refused = True
            self.kept = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block; returns its outputs."""
        if self.activations == KEEP or not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        return self._saving_less(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else a compiled block would compile the hooks that drop and restore
    def _saving_less(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        saving = SAVING[self.activations]
        with self.memory.saves_for(self.block) if saving.copies else nullcontext():
            if not saving.reruns:
                return self._run(*args, **kwargs)
            if self._reentrant is not None and self._reentrant.takes(args, kwargs):
                return self._reentrant(args, kwargs)
            return self._non_reentrant(args, kwargs)

    def _non_reentrant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: dict[Place, Tensor] = {}
        reentrant, kept = self._reentrant, self.kept
        keeping, again = (
            (nullcontext(), nullcontext()) if kept is None else kept.contexts(is_training=self.block.training)
        )
        num_args, names = len(args), tuple(kwargs)  # the function that runs again must not hold the inputs
        forward = self._run if kept is None else self._own

        def run(*given: Any) -> Any:
            return forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        # Tensors are saved as inputs, and so go to the host, only if they are given by position.
        outputs = checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (
                self._first(values, keeping),
                _Anew(lambda: self._again(values, reentrant, again)),
            ),
        )
        if reentrant is not None:
            reentrant.learn_from(outputs)
        return outputs

    @contextmanager
    def _first(self, values: dict[Place, Tensor], keeping: AbstractContextManager[object]) -> Iterator[None]:
        with self._buffers.updated(values), keeping:
            yield

    @contextmanager
    def _again(
        self, values: dict[Place, Tensor], reentrant: Reentrant | None, handing_back: AbstractContextManager[object]
    ) -> Iterator[None]:
        if reentrant is not None:
            reentrant.is_learning = False
        with self._buffers.as_they_were(values), handing_back:
            yield


class _Call:
    """Call of a block that is compiled in place, when its forward alone is to be compiled."""

    def __init__(self, block: nn.Module, compiler: Any) -> None:
        self._block, self.compiler = block, compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs hooks and forward of the block; returns its outputs."""
        return self._block._call_impl(*args, **kwargs)


class _Anew(ExitStack):
    """Context that is made anew each time: more than one backward may go through a block."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._make = make

    @override
    def __enter__(self) -> Self:
        self.enter_context(self._make())
        return self


def with_recomputed(blocks: Sequence[Block], names: Collection[str]) -> tuple[Block, ...]:
    """Blocks of a plan, and these modules as recomputing blocks where the plan has none of them or around them."""
    planned = [block.name for block in blocks]
    more = [name for name in names if not is_inside(name, planned)]
    kept = [block for block in blocks if not is_inside(block.name, more)]
    return (*kept, *Block.recomputing(more))


def check_blocks(module: nn.Module, blocks: Sequence[Block]) -> None:
    """Raises `PlanMismatchError` unless all blocks are modules of a model, none the root and none inside another."""
    modules = dict(module.named_modules())
    names = [block.name for block in blocks]
    for name in names:
        around = next((other for other in names if name.startswith(f"{other}.")), None)
        if not name:
            wrong = "the root"
        elif name not in modules:
            wrong = "not there"
        elif around is not None:
            wrong = f"inside block {around!r}"
        else:
            continue
        raise PlanMismatchError(
            f"Expected each block of the plan to be a module of the model, not the root and in no other block, but"
            f" {name!r} is {wrong}. Plan anew by leaving out `plan=`."
        )


class Reentrant:
    """Forward of a block in fairscale's form, which makes no graph and saves nothing but its inputs.

    The form is *reentrant*: backward of the block is a backward of its own, inside that of the model. It is sound only
    for a block that is one unit and is called once, outside of autocast (fairscale restores CUDA's, and that as
    float16). Tensors that need gradients must be among its arguments themselves, and its outputs must be tensors and
    not objects that have some. All other calls take torch's non-reentrant form. The first steps take it, too, and this
    class learns from them.

    Attributes:
        is_learning: True until backward has come to the block, so that forward does not call it again.
    """

    def __init__(self, block: nn.Module, run: Callable[..., Any], buffers: Buffers) -> None:
        from fairscale.nn.checkpoint import checkpoint_wrapper  # only such blocks need fairscale

        self._body = _Body(block, run, buffers)
        # Its own offload_to_cpu copies to memory that is not pinned, for which the host waits; `HostMemory` does it.
        self._wrapped = checkpoint_wrapper(self._body, offload_to_cpu=False)
        self._num_calls = 0
        self._is_plain = True
        self.is_learning = True

    def learn_from(self, outputs: Any) -> None:
        """Learns from the outputs of a call in the non-reentrant form."""
        if self.is_learning:
            self._num_calls += 1
            self._is_plain &= all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(outputs))

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if this form is sound for a call with these arguments."""
        if self.is_learning or self._num_calls > 1 or not self._is_plain:
            return False
        given = [*args, *kwargs.values()]
        needing = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.requires_grad]
        identities = {id(each) for each in given}
        in_autocast = any(torch.is_autocast_enabled(kind) for kind in {"cpu", *(each.device.type for each in needing)})
        return bool(needing) and not in_autocast and all(id(each) in identities for each in needing)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the block; returns its outputs."""
        values: dict[Place, Tensor] = {}
        leaves = self._wrapped(values, *args, **kwargs)
        return tree_unflatten(list(leaves), self._body.outputs)


class _Body(nn.Module):
    """Module that fairscale runs: the block's forward with its outputs flat, because fairscale takes tuples only."""

    outputs: TreeSpec

    def __init__(self, block: nn.Module, run: Callable[..., Any], buffers: Buffers) -> None:
        super().__init__()
        # Not as a child: fairscale puts hooks on batch normalisation that it finds.
        self._block = (block, run)
        self._buffers_of_block = buffers

    def forward(self, values: dict[Place, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs the block; returns the leaves of its outputs."""
        from fairscale.nn.checkpoint import is_recomputing

        buffers = self._buffers_of_block
        with buffers.as_they_were(values) if is_recomputing() else buffers.updated(values):
            leaves, self.outputs = tree_flatten(self._block[1](*args, **kwargs))
        return tuple(leaves)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of the block: where any needs a gradient, so do the outputs."""
        return self._block[0].parameters(recurse)


class Buffers:
    """Buffers of a block that its forward changes, such as running statistics.

    Where forward runs twice, buffers are updated once, and the second run reads the values that the first has read. A
    buffer that is changed in place for the first time in a later step is updated once, too; in that step the second run
    begins with the values that the first has left.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changing: set[Place] | None = None  # unknown before the first forward
        self._learned_in: tuple[bool, ...] = ()

    @contextmanager
    def updated(self, values: dict[Place, Tensor]) -> Iterator[None]:
        """Context of the first run of a forward; puts the former values of buffers that it changes into ``values``."""
        training = tuple(child.training for child in self._block.modules())
        if training != self._learned_in:  # evaluation may leave buffers alone that training updates
            self._changing, self._learned_in = None, training
        buffers = {
            (owner, name): buffer
            for owner in self._block.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }
        versions = {place: version_of(buffer) for place, buffer in buffers.items()}
        copied = buffers.keys() if self._changing is None else self._changing & buffers.keys()
        values.update((place, buffers[place].clone()) for place in copied)
        yield
        replaced = {place for place, buffer in buffers.items() if place[0]._buffers[place[1]] is not buffer}
        changed = replaced | {place for place, buffer in buffers.items() if version_of(buffer) != versions[place]}
        if self._changing is None:
            self._changing = changed | {
                place
                for place, buffer in buffers.items()
                if isinstance(place[0], _NormBase)  # it may be frozen now and trained later
                # not every operation counts versions
                or not (isinstance(buffer, FakeTensor) or torch.equal(buffer, values[place]))
            }
            for place in buffers.keys() - self._changing:
                del values[place]
        else:
            for place in changed - self._changing:
                values[place] = buffers[place] if place in replaced else buffers[place].clone()
            self._changing |= changed

    @contextmanager
    def as_they_were(self, values: Mapping[Place, Tensor]) -> Iterator[None]:
        """Context of a second run of a forward, whose changes of buffers are dropped."""
        updated = {(owner, name): owner._buffers[name] for owner, name in values}
        for (owner, name), value in values.items():
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (owner, name), buffer in updated.items():
                owner._buffers[name] = buffer
