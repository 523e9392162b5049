"""The user's own code by its import path, with clear errors where that code fails."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_osdp.core.text.nearest import nearest
from lightning_osdp.errors import ConfigurationError, OSDPError

SETTINGS_ADVICE = "Give what it takes as settings."


def imported(path: str) -> Callable[..., Any]:
    """Class or function at ``package.module:Name``.

    Raises:
        ConfigurationError: there is none.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"Expected {path!r} to be package.module:Name, but {error}. Modules of the current folder are found by"
            " `python -m lightning_osdp`."
        ) from error
    except Exception as error:  # it may do anything
        raise ConfigurationError(f"Expected {module_name!r} to be imported, but it failed: {error!r}.") from error
    member = getattr(module, name, None)
    if not callable(member):
        hint = nearest(name, dir(module), "Name one that it has.")
        raise ConfigurationError(f"Expected a class or a function {name!r} in {module_name!r}, got {member!r}. {hint}")
    return member  # type: ignore[no-any-return]


def built(what: str, advice: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a function of the user's.

    Raises:
        ConfigurationError: the function fails; the error names ``what`` was to be built, and gives the advice.
    """
    try:
        return make(*args, **kwargs)
    except OSDPError:
        raise
    except Exception as error:  # it may do anything
        raise ConfigurationError(f"Expected {what} to be built, but it failed: {error!r}. {advice}") from error
