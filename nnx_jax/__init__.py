"""nnx_jax: a JAX-native trainer. Public names are loaded on first use; importing the package imports no framework."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name: the module that defines it. The only list of public names; `__all__` and `dir()` are made from it.
_WHERE = {}

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'nnx_jax' has no attribute {name!r}")
    value = getattr(import_module(f"nnx_jax.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*__all__, *globals()})
