"""Warnings, given before training, of memory that a GPU needs for a model and no plan counts."""

from __future__ import annotations

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_osdp.operations.splitting import compiler_of


def warn_of_gpu(module: nn.Module, device: torch.device) -> None:
    """Warns of CUDA graphs, and of cuDNN's search for algorithms of convolutions."""
    if device.type != "cuda":
        return
    graphed = [name for name, child in module.named_modules() if _records_graphs(child)]
    if graphed:
        rank_zero_warn(
            f"OSDP: {graphed[0] or 'the model'!r} is compiled with CUDA graphs, which hold addresses of parameters. A"
            " unit has others whenever it is gathered, so that graphs are recorded anew, and in the end not used."
            ' Compile without them: mode="default" or "max-autotune-no-cudagraphs".'
        )
    if torch.backends.cudnn.benchmark and any(isinstance(child, _ConvNd) for child in module.modules()):
        rank_zero_warn(
            "OSDP: cuDNN tries algorithms for each new shape of a convolution's input (benchmark=True), with workspaces"
            " that no plan counts. If memory runs out in the first steps, leave benchmark out, or pass a lower"
            " memory_limit."
        )


def _records_graphs(module: nn.Module) -> bool:
    """Tells whether a module is compiled with CUDA graphs: by a wrapper, in place, or by Lightning."""
    config = getattr(compiler_of(module), "compiler_config", None)
    return bool((config or {}).get("triton.cudagraphs"))
