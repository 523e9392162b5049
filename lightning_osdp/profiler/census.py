"""Which tensors are alive that were not before, whoever holds them: the package, torch, Lightning or the user."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_osdp.splitting import JoinedShards


class Census:
    """Storages on one kind of device that are alive now; `newer` tells what has come since then.

    Python's objects are looked through for tensors, and these for gradients. Not found is what nothing but a graph of
    autograd holds, and what is sparse. A million objects take less than a second.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; tensors elsewhere do not count.

    Example:
        >>> census = Census("cpu")
        >>> kept = torch.zeros(2, 3)
        >>> [tensor.shape for tensor in census.newer()]
        [torch.Size([2, 3])]
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known = {key: weakref.ref(storage) for key, (_, storage) in self._found().items()}

    def newer(self, *, besides: Iterable[Tensor] = ()) -> list[Tensor]:
        """One tensor of each storage that is alive now, was not then, and is none of those of other tensors.

        Args:
            besides: tensors that are counted elsewhere, as are their gradients.
        """
        found = self._found()
        old = {key: known for key, reference in self._known.items() if (known := reference()) is not None}
        left_out = old.keys() | _storages(besides, self._device_type).keys()
        addresses = {storage.data_ptr() for storage in old.values()}  # what numpy allocated may have several storages
        newer = []
        for key, (tensor, storage) in found.items():
            if key not in left_out and storage.data_ptr() not in addresses:
                addresses.add(storage.data_ptr())
                newer.append(tensor)
        return newer

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Takes these for what was alive before."""
        found = _storages(tensors, self._device_type)
        self._known |= {key: weakref.ref(storage) for key, (_, storage) in found.items()}

    def _found(self) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
        """What is alive, but for the tensors in which torch notes who the ranks of a mesh are."""
        # the type itself: what stands in for another object may say that it is a tensor
        objects = [each for each in gc.get_objects() if issubclass(type(each), (Tensor, DeviceMesh))]
        meshes = _storages((each.mesh for each in objects if isinstance(each, DeviceMesh)), self._device_type)
        found = _storages((each for each in objects if isinstance(each, Tensor)), self._device_type)
        return {key: each for key, each in found.items() if key not in meshes}


def _storages(tensors: Iterable[Tensor], device_type: str) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
    """Storages that have memory on such a device, each with a tensor, by what tells them apart while they are alive."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in chain.from_iterable(map(_with_gradient, tensors)):
            storage = tensor.untyped_storage()
            if storage.device.type == device_type and storage.nbytes() > 0:  # a fake tensor's is elsewhere
                found[storage._cdata] = tensor, storage
    return found


def _with_gradient(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor that has the memory of another, if one does, and that of its gradient."""
    if isinstance(tensor, DTensor):
        yield from _with_gradient(tensor._local_tensor)
    elif _has_memory(tensor):
        yield tensor
    if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
        yield from _with_gradient(tensor.grad)


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is no sparse tensor, and none that is made of others."""
    if isinstance(tensor, JoinedShards) or tensor.layout is not torch.strided:
        return False
    return not is_traceable_wrapper_subclass(tensor)
