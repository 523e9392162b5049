"""Registration of the strategy's names for ``Trainer(strategy=...)``, at the import of Lightning.

Lightning finds strategies of other packages in its `StrategyRegistry`. The import of Lightning takes seconds, and
programs without a Trainer should not wait for it. So names are registered at once if Lightning is imported already, and
otherwise when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_REGISTRY = "lightning.pytorch.strategies"
NAMES = {"osdp": "popen", "osdp_spawn": "spawn", "osdp_fork": "fork", "osdp_notebook": "fork"}
"""Names, by the pattern of Lightning's names for DDP -> how ranks start."""


def register() -> None:
    """Registers the names now, or when Lightning is imported."""
    if _REGISTRY in sys.modules:
        _register_in(sys.modules[_REGISTRY])
        _import_strategy()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Finder of no module, which registers the strategy after certain modules of Lightning have been executed."""

    def __init__(self) -> None:
        self._then: dict[str, Callable[[ModuleType], object]] = {
            _REGISTRY: _register_in,
            # LightningCLI finds classes of strategies by name only if they are imported
            "lightning.pytorch.cli": lambda _: _import_strategy(),
        }

    def find_spec(self, fullname: str, *_: object, **__: object) -> ModuleSpec | None:
        then = self._then.pop(fullname, None)
        spec = None if then is None else find_spec(fullname)
        if then is None or spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_then(module: ModuleType) -> None:
            run(module)
            then(module)

        spec.loader.exec_module = run_and_then  # type: ignore[method-assign]
        return spec


def _register_in(module: ModuleType) -> None:
    for name, start_method in NAMES.items():
        if name not in module.StrategyRegistry:
            module.StrategyRegistry.register(
                name,
                _strategy,
                description="Optimal Sharded Data Parallel: sharded as far as memory demands; ranks by"
                f" {start_method!r}",
                start_method=start_method,
            )


def _strategy(**options: Any) -> Any:
    return _import_strategy()(**options)


def _import_strategy() -> type[Any]:
    from lightning_osdp.strategy import OSDPStrategy  # torch and Lightning

    return OSDPStrategy
