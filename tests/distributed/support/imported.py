"""Import of what most cases need, before ranks are forked from this process: once, and left out of their collections.

Nothing runs an operation here: no thread is lost with the fork.
"""

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401

import tests.distributed.support.user_runs  # noqa: F401 (with Lightning and the strategy)

gc.collect()
gc.freeze()
