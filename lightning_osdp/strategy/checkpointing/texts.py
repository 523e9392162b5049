"""Texts in a file of ``torch.save``, read without executing what is pickled in it."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch


def read_text(path: Path, key: str) -> str | None:
    """The text under a key of a saved dict; None where it has none.

    Whatever is no text, number, list or dict is passed over: neither its class nor any function is looked up, so that
    a checkpoint with classes of its own can be read, and one that was made to do harm does none.

    Raises:
        Exception: of many kinds, where the file is damaged.
    """
    content = torch.PyTorchFileReader(str(path)).get_record("data.pkl")
    saved = _InertUnpickler(BytesIO(content)).load()
    value = saved.get(key) if isinstance(saved, dict) else None
    return value if isinstance(value, str) else None


class _Ignored:
    """Stands for every class, function and object, and can be called, filled and set as any of them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __new__(cls, *_: Any, **__: Any) -> _Ignored:
        return super().__new__(cls)

    def _nothing(self, *_: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = update = _nothing


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Ignored]:
        del module, name
        return _Ignored

    def persistent_load(self, pid: object) -> _Ignored:
        del pid
        return _Ignored()
