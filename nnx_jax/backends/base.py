"""The registry of backends: a name, the module behind it, and what the module's `run` returns."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.core.errors import ConfigError, nearest

GROUP = "nnx_jax.backends"
"""Entry points of this group register backends: `name = "package.module"`."""

_MODULES: dict[str, str] = {
    name: f"nnx_jax.backends.{name.replace('-', '_')}"
    for name in ("nnx", "equinox", "numpyro-svi", "numpyro-mcmc", "blackjax", "lightning", "keras")
}


@dataclass(frozen=True)
class Trained:
    """What one training by a backend leaves.

    Attributes:
        operator: the trained model, callable like any operator.
        state: where it stands: a later stage, or the same loop, goes on from it.
        info: JSON-safe facts of the run (`backend`, `final_step`, `final_metrics`, versions, ...).
    """

    operator: Any
    state: TrainerCarryState
    info: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """A backend is a module (or an object) with these functions."""

    def run(self, loop: Any, state: TrainerCarryState | None) -> Trained:
        """Train as `loop` (a TrainingLoop) says, from `state` where it goes on from one.

        Raises:
            ImportError: the library is missing; it names the extra.
        """
        ...


def register_backend(name: str, module: str, *, replace: bool = False) -> None:
    """Let `backend=name` mean the module of that dotted name, which has `run(loop, state) -> Trained`.

    Raises:
        ConfigError: (a ValueError) the name is taken, or one of the two is no name.
    """
    if not (isinstance(name, str) and name and isinstance(module, str) and module):
        raise ConfigError(
            f"a backend is a name and a module's dotted name, got {name!r} and {module!r}", path="backend"
        )
    taken = None if replace else _module_of(name)
    if taken not in (None, module):
        raise ConfigError(
            f"the name '{name}' is taken by {taken}; choose another, or give replace=True", path="backend"
        )
    _MODULES[name] = module


def backend_names() -> list[str]:
    """Every name `backend=` takes, sorted; nothing is imported for it."""
    return sorted({*_declared(), *_MODULES})


def check_backend(name: Any) -> None:
    """Check that a backend of this name is registered; its library may still be missing.

    Raises:
        ConfigError: (a ValueError) with the names there are.
    """
    if _module_of(name) is None:
        names = backend_names()
        close = nearest(name, names)
        hint = close if "did you mean" in close else ""
        raise ConfigError(f"there is no backend {name!r}{hint} (there are: {', '.join(names)})", path="backend")


def load_backend(name: str) -> Backend:
    """Import the backend of this name.

    Raises:
        ConfigError: (a ValueError) there is none, or its module has no `run`.
        ImportError: its module cannot be imported.
    """
    check_backend(name)
    where = str(_module_of(name))
    try:
        module: Any = importlib.import_module(where)
    except ImportError as error:
        told = f"the backend '{name}' is the module {where}, which cannot be imported: {error}"
        raise ImportError(f"{told}; install the package that brings it", name=where) from error
    if not callable(getattr(module, "run", None)):
        told = f"'{name}' is the module {module.__name__}, which has no run(loop, state) -> Trained"
        raise ConfigError(told, path="backend")
    return module


def _declared() -> dict[str, list[str]]:
    """Names, and the modules that installed packages declare for each."""
    found: dict[str, list[str]] = {}
    for point in entry_points(group=GROUP):
        if point.value not in found.setdefault(point.name, []):
            found[point.name].append(point.value)
    return found


def _module_of(name: Any) -> str | None:
    """The module of a name, None for an unknown one; what this process registered goes before what packages declare.

    Raises:
        ConfigError: (a ValueError) two packages declare it for different modules.
    """
    if name in _MODULES:
        return _MODULES[name]
    modules = _declared().get(name, [])
    if len(modules) > 1:
        told = f"two packages declare the backend '{name}': {' and '.join(sorted(modules))}"
        raise ConfigError(f"{told}; uninstall one, or choose with register_backend(..., replace=True)", path="backend")
    return modules[0] if modules else None
