"""One rank in a process of its own: ``python -m benchmarks.testbed.rank package.module:function FOLDER``.

The folder holds ``arguments.json``; the result is written there as ``RANK.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main(target: str, folder: Path) -> None:
    """Calls the function, with one thread and gloo as the default process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = call(target, json.loads((folder / "arguments.json").read_text()))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()  # a rank whose peer is gone fails
    sys.stdout.flush()
    # Without the interpreter's end, during which a thread of gloo may still want to drop tensors.
    os._exit(0)


def call(target: str, arguments: Mapping[str, Any]) -> Any:
    """What a function returns.

    Args:
        target: ``"package.module:function"``.
        arguments: keyword arguments.
    """
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
