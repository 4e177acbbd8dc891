"""A plain function as an operator: written by its name, so that another process finds the same function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from nnx_jax.core.errors import ConfigError, UnregisteredError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import allowed_function, register
from nnx_jax.core.spec import Keywords

_WRAPPED: dict[str, Callable[..., Any]] = {}


@register("function")
class FunctionOperator(Operator):
    """`FunctionOperator(function=my_project.steps.halve)`: calls that function.

    The function stands at the top of a module; a file holds its name, `my_project.steps.halve`. A file can name it only
    where this process has wrapped it before, or has allowed its module (`imports:`, `allow_imports`): a name in a file
    imports nothing. The name is what counts in `content_hash()`; what the function does is not seen.

    Raises:
        ConfigError: a function without such a name (a lambda, one defined inside another or in `__main__`).
        UnregisteredError: a name that was neither wrapped nor allowed.
    """

    function: str

    @classmethod
    def _normalised(cls, value: Mapping[Any, Any]) -> dict[Any, Any]:
        data = dict(value)
        function = data.get("function")
        if callable(function) and isinstance(value, Keywords):
            data["function"] = name = _name(function)
            _WRAPPED[name] = function
        elif isinstance(function, str):
            _function(function)
        return super()._normalised(data)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self.function)(*args, **kwargs)


def _name(function: Callable[..., Any]) -> str:
    """Return `module.function` of a function that is found there."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = None if module in (None, "__main__") else getattr(sys.modules.get(module), name, None)
    if found is not function or isinstance(function, type):
        raise ConfigError(
            f"another process could not find the {type(function).__name__} {name or 'without a name'} by importing "
            f"{module}; give a function that is defined at the top of a module (not of __main__), or put what it does "
            "into the `_apply` of a registered subclass of Operator"
        )
    return f"{module}.{name}"


def _function(name: str) -> Callable[..., Any]:
    found = _WRAPPED.get(name) or allowed_function(name)
    if found is None:
        module = name.rpartition(".")[0] or name
        raise UnregisteredError(
            f"the function {name!r:.120} is not known here; list its module under `imports:` "
            f"(allow_imports([{module!r:.120}])) where the file can be trusted to run it"
        )
    return found
