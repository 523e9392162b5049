"""Rows of DTensors, and operations on DTensors that torch refuses or computes from the rows of one rank alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_osdp.errors import ConfigurationError

_SHARD = "_osdp_shard"
"""Attribute that marks parameters as shards of a unit, and gradients of which updates have begun: how often somebody
asked for what may be written to unseen."""
_PIECES = 2**14, 2**17
"""Least and most words of 8 bytes that are hashed at once, beside 16 to 24 bytes for each; between, a 64th of a tensor
is."""
_SMALL_BYTES, _JOINED_BYTES = 2**15, 2**18
"""Most bytes of tensors that are hashed together, and bytes beyond which no other one joins them."""
_PIECES_ON_GPU = 16
"""Pieces that a GPU hashes at once."""
_MIXING = (-7046029254386353131, -4658895280553007687)
"""Odd factors that mix numbers of 64 bits, signed.

References:
    Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
"""


def read_whole_values() -> None:
    """Makes ``item()`` and ``float()`` of a DTensor give the value over all ranks; all ranks must call them.

    torch gives the value of this rank's rows: ``float(parameter.grad.norm())`` would be the norm of one shard.
    """
    item = torch.ops.aten._local_scalar_dense.default
    _handlers().setdefault(item, lambda operation, args, _: operation(args[0].full_tensor()))


def set_values() -> None:
    """Makes ``parameter.data = value`` of a marked shard write this rank's rows of the value into the shard.

    torch would change the metadata of the DTensor, and neither its rows nor the memory that the unit gathers. DTensors
    without the mark of `mark_shard` behave as ever.
    """
    if "data" not in vars(DTensor):
        DTensor.data = property(_get_data, _set_data)  # type: ignore[assignment]
        DTensor.to_local = partialmethod(_to_local, DTensor.to_local)  # type: ignore[assignment]


def mark_shard(parameter: Tensor) -> None:
    """Marks a parameter as a shard for `set_values` and `num_accesses`."""
    vars(parameter)[_SHARD] = 0


def unmark(tensor: Tensor) -> None:
    """Takes that mark away."""
    vars(tensor).pop(_SHARD, None)


def num_accesses(parameter: Tensor) -> int:
    """Number of times that a shard was asked for ``data`` or ``to_local()``; no version tells of writes to these."""
    number: int = vars(parameter).get(_SHARD, 0)
    return number


def mark_of(shard: Tensor) -> tuple[int, ...]:
    """Mark of a shard, which is another one once somebody has written to it, or might have."""
    rows = local(shard)
    return id(shard), shard._version, id(rows), rows._version, num_accesses(shard)


def _get_data(tensor: DTensor) -> Any:
    _note_access(tensor)
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _to_local(tensor: DTensor, to_local: Callable[..., Tensor], **kwargs: Any) -> Tensor:
    _note_access(tensor)
    return to_local(tensor, **kwargs)


def _note_access(tensor: DTensor) -> None:
    if _SHARD in vars(tensor):
        vars(tensor)[_SHARD] += 1


def _set_data(tensor: DTensor, value: Any) -> None:
    if _SHARD not in vars(tensor):
        Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
        return
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        told = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
        raise ConfigurationError(
            f"Expected the data of a parameter to be set to all of it, {tensor.dtype}{list(tensor.shape)}, got {told}."
            " Set it to a result of operations on parameters, or to the whole tensor on every rank."
        )
    with torch.no_grad():
        if isinstance(value, DTensor):
            tensor.copy_(value)
        else:
            write_rows(tensor, value)


def mix_meshes() -> None:
    """Makes DTensors on several meshes be added, stacked, averaged and scaled together; all ranks must do so.

    ``clip_grad_norm_`` and ``get_total_norm`` of torch combine norms of gradients in this way, and user code combines
    weights that it averages. DTensors refuse it. Sums and stacks of norms become plain tensors. Other operands are
    moved to the mesh of the first one with the most dimensions, which is the operand that an operation in place
    changes: each is gathered, one at a time. Operands on one mesh, and operands that need autograd, are left to torch.
    """

    def added(operation: Any, args: Any, kwargs: Any) -> Any:
        if _are_numbers(args):
            return operation(*(each.full_tensor() for each in args), **kwargs)
        return moved(operation, args, kwargs)

    def moved(operation: Any, args: Any, kwargs: Any) -> Any:
        mesh = max(_tensors(args), key=Tensor.dim).device_mesh
        return operation(*(_on_mesh(each, mesh) for each in args), **kwargs)

    def stacked(operation: Any, args: Any, kwargs: Any) -> Any:
        (tensors, *others), places = args, defaultdict(list)
        for place, tensor in enumerate(tensors):
            places[tensor.device_mesh].append(place)
        values: dict[int, Tensor] = {}
        for on_mesh in places.values():
            stack: Any = torch.stack([tensors[place] for place in on_mesh])
            values.update(zip(on_mesh, stack.full_tensor(), strict=True))
        return operation([values[place] for place in range(len(tensors))], *others, **kwargs)

    def scaled(operation: Any, args: Any, _: Any) -> None:
        tensors, factor = args
        operation([local(tensor) for tensor in tensors], factor)

    def one_by_one(operation: Any, _: Any, args: Any, kwargs: Any) -> None:
        tensors, others, *rest = args
        for tensor, other in zip(tensors, others, strict=True):
            operation(tensor, other, *rest, **kwargs)

    aten = torch.ops.aten
    _handle_meshes(aten.add.Tensor, lambda args: args if _are_numbers(args) else _untaped(args), added)
    _handle_meshes(aten.stack.default, lambda args: args[0], stacked)
    _handle_meshes(aten._foreach_mul_.Tensor, lambda args: args[0], scaled)
    _handle_meshes(aten._foreach_add_.List, _pair_apart, partial(one_by_one, aten.add_.Tensor))
    _handle_meshes(aten._foreach_lerp_.Scalar, _pair_apart, partial(one_by_one, aten.lerp_.Scalar))
    of_two = [getattr(aten, name).Tensor for name in ("add_", "sub", "sub_", "mul", "mul_", "div", "div_")]
    for operation in (*of_two, aten.lerp.Scalar, aten.lerp_.Scalar, aten.copy_.default):
        _handle_meshes(operation, _untaped, moved)


def _handle_meshes(
    operation: Any, tensors_of: Callable[[Any], Sequence[Any]], handle: Callable[[Any, Any, Any], Any]
) -> None:
    """Replaces an operation by a function where its DTensors are not all on one mesh."""

    def handled(operation: Any, args: Any, kwargs: Any) -> Any:
        meshes = [each.device_mesh if isinstance(each, DTensor) else None for each in tensors_of(args)]
        if None not in meshes and any(mesh != meshes[0] for mesh in meshes):
            return handle(operation, args, kwargs)
        handler = _handlers().pop(operation)  # without it, torch runs the operation itself
        try:
            return operation(*args, **kwargs)
        finally:
            _handlers()[operation] = handler

    _handlers().setdefault(operation, handled)


def _tensors(args: Any) -> list[Any]:
    return [each for each in args if isinstance(each, Tensor)]


def _are_numbers(args: Any) -> bool:
    return all(isinstance(each, Tensor) and each.dim() == 0 for each in args)


def _untaped(args: Any) -> list[Any]:
    """Tensors among the arguments; none where autograd needs them, whose gradients would be on one mesh."""
    tensors = _tensors(args)
    return [] if torch.is_grad_enabled() and any(each.requires_grad for each in tensors) else tensors


def _pair_apart(args: Any) -> Sequence[Any]:
    """First pair of operands, one from each of two lists, that are on different meshes; empty without one."""
    pairs = (pair for pair in zip(*args[:2], strict=True) if all(isinstance(each, DTensor) for each in pair))
    return next((pair for pair in pairs if pair[0].device_mesh != pair[1].device_mesh), ())


def _on_mesh(value: Any, mesh: DeviceMesh) -> Any:
    """Copy of a DTensor that is whole on each rank of a mesh; any other value, or one on that mesh, unchanged."""
    if not isinstance(value, DTensor) or value.device_mesh == mesh:
        return value
    return DTensor.from_local(value.full_tensor(), mesh, [Replicate()] * mesh.ndim)


def _handlers() -> Any:
    """Functions that DTensors call in place of operations, by operation."""
    return DTensor._op_dispatcher._custom_op_handlers


def write_rows(sharded: DTensor, whole: Tensor) -> None:
    """Copies this rank's rows of a whole tensor into a shard."""
    rows = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    with torch.no_grad():
        sharded.to_local().copy_(rows.to_local())


def hash_of(*tensors: Tensor) -> int:
    """Hash of the bits of tensors and of their order, below 2^64, the same on all devices.

    It is a sum with a factor for each place, which is as good as random: with those of a line, changes of all signs
    would cancel out in some small tensors. The device is waited for once, however many tensors there are.
    """
    sums: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    factors: dict[torch.device, Tensor] = {}
    for flat in _joined(tensors):
        num_words, in_word = -(-flat.nbytes // 8), max(1, 8 // flat.itemsize)
        least, most = _PIECES
        size = min(max(least, -(-num_words // 64)), most, num_words)
        if flat.device not in factors or factors[flat.device].numel() < size:
            factors[flat.device] = _factors(size, flat.device)
        own = factors[flat.device][:size]
        # a GPU launches few kernels for many pieces, of which a processor's cache has room for one
        for chunk in flat.split((1 if flat.device.type == "cpu" else _PIECES_ON_GPU) * size * in_word):
            words = _words(chunk, in_word)
            num_rest = words.numel() % size
            whole, rest = words.split([words.numel() - num_rest, num_rest])
            if whole.numel():
                sums[flat.device].append(whole.view(-1, size).mul_(own).sum(1))
            if num_rest:
                sums[flat.device].append(rest.mul_(own[:num_rest]).sum(0, keepdim=True))
    found = 0
    for each in (number for of_device in sums.values() for number in torch.cat(of_device).tolist()):
        found = (found * 1_000_003 + each) % 2**64
    return found


def _joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Flat tensors without empty ones, where small ones that follow each other are copied into one."""
    small: list[Tensor] = []
    for flat in (tensor.detach().flatten() for tensor in tensors):
        is_small = flat.nbytes <= _SMALL_BYTES
        is_alike = small and (flat.dtype, flat.device) == (small[0].dtype, small[0].device)
        if small and not (is_small and is_alike and sum(each.nbytes for each in small) < _JOINED_BYTES):
            yield torch.cat(small)
            small = []
        if is_small:
            small += [flat] if flat.numel() else []
        else:
            yield flat.contiguous()
    if small:
        yield torch.cat(small)


def _factors(number: int, device: torch.device) -> Tensor:
    """Odd factors of places, the same for a place however many there are."""
    factors = torch.arange(1, number + 1, device=device)
    for shift, times in ((33, _MIXING[0]), (29, _MIXING[1])):  # overflow is meant
        factors.mul_(times)
        factors ^= factors >> shift
    factors |= 1
    return factors


def _words(flat: Tensor, in_word: int) -> Tensor:
    """Elements as integers of 8 bytes of their own, ``in_word`` in each, the last filled up with zeros.

    Integers of 4 bytes would be cast to multiply them, which takes a processor several times as long. The last bit of
    an integer is mixed into others: an odd factor leaves it alone, so that two that change would cancel out.
    """
    if len(flat) % in_word or flat.storage_offset() % in_word:
        filled = flat.new_zeros(-(-len(flat) // in_word) * in_word)
        filled[: len(flat)] = flat
        flat = filled
    words = flat.view(torch.int64)
    mixed = words >> 33
    mixed ^= words
    return mixed


def num_copies(tensor: Tensor) -> int:
    """Number of ranks that hold the same part of a tensor as this rank."""
    if not isinstance(tensor, DTensor):
        return 1
    copied = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return math.prod(tensor.device_mesh.size(dim) for dim in copied)


def local(tensor: Tensor) -> Tensor:
    """Part of a tensor that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def of_rows(rows: Tensor, like: DTensor) -> DTensor:
    """DTensor made of the rows of each rank, with the layout of another DTensor."""
    mesh, placements = like.device_mesh, like.placements
    found: DTensor = DTensor.from_local(rows, mesh, placements, shape=like.shape, stride=like.stride())
    return found


def of_rows_there(rows: Tensor, like: DTensor) -> DTensor:
    """DTensor likewise, whose rows stay on their device: `of_rows` moves them to that of the mesh."""
    spec = like._spec  # the same object where it can be: `has_layout_of` need not look into it
    if rows.dtype != like.dtype:
        meta = TensorMeta(like.shape, like.stride(), rows.dtype)
        spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return of_spec(rows, spec)


def of_spec(rows: Tensor, spec: Any) -> DTensor:
    """DTensor of a layout with these rows, made as torch's own operations make theirs, but at half the overhead.

    ``__init__`` has nothing to do.
    """
    new: Any = DTensor.__new__
    found: DTensor = new(DTensor, rows, spec, requires_grad=False)
    return found


def whole_there(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """DTensor that is whole on each rank of a mesh, likewise."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return of_spec(whole, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))


def on_mesh_device(tensor: DTensor) -> DTensor:
    """DTensor with its rows on the device of its mesh, which collectives need; itself where they are there."""
    if tensor.device.type == tensor.device_mesh.device_type:
        return tensor
    return of_rows(local(tensor), tensor)


def has_layout_of(value: Tensor, parameter: DTensor) -> bool:
    """True if each rank holds, of a DTensor, a plain tensor with the rows that it holds of a parameter."""
    if (
        not isinstance(value, DTensor) or type(value._local_tensor) is not Tensor
    ):  # such as the result of a collective that goes on
        return False
    spec, other = value._spec, parameter._spec
    return spec is other or (
        value.shape == parameter.shape and spec.placements == other.placements and spec.mesh == other.mesh
    )
