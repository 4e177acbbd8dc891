"""A pure function of parameters and rows as a Flax NNX module, so that it trains like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnx_jax.core.errors import ModelError


class FunctionModule(nnx.Module):
    """Outputs `function(params, x)`.

    Args:
        function: of parameters and a batch x [N, ...]; it changes nothing.
        params: arrays in dicts and lists, by name at the top; floating ones are trained, others are kept.

    Raises:
        TypeError: something that cannot be called.
        ModelError: (a ValueError) parameters that are no mapping, or hold something else than arrays.
    """

    def __init__(self, function: Callable[[Any, Any], Any], params: Mapping[str, Any]) -> None:
        if not callable(function):
            raise TypeError(f"function is {type(function).__name__}; give a function (params, x) -> outputs")
        if not isinstance(params, Mapping) or not params:
            raise ModelError("params are arrays by name, in dicts and lists, and one of them at least")
        self.function = function
        self.params = _held(params, "params")

    def __call__(self, x: Any) -> Any:
        return self.function(_bare(self.params), x)


def _held(part: Any, where: str) -> Any:
    """Arrays as variables, in the containers of Flax."""
    if isinstance(part, Mapping):
        return nnx.Dict({str(name): _held(item, f"{where}.{name}") for name, item in part.items()})
    if isinstance(part, list | tuple):
        return nnx.List([_held(item, f"{where}[{index}]") for index, item in enumerate(part)])
    try:
        array = jnp.asarray(part)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where} is {type(part).__name__}; parameters are arrays") from error
    return nnx.Param(array) if jnp.issubdtype(array.dtype, jnp.floating) else nnx.Variable(array)


def _bare(part: Any) -> Any:
    """The arrays again, in dicts and lists."""
    if isinstance(part, nnx.Dict):
        return {name: _bare(item) for name, item in part.items()}
    if isinstance(part, nnx.List):
        return [_bare(item) for item in part]
    return part[...]
