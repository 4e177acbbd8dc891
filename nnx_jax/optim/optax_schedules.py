"""Schedules of optax by name: the rate of every update as optax's own function of the count gives it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nnx_jax.core.errors import ConfigError, nearest

SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": optax.constant_schedule,
    "cosine": optax.cosine_decay_schedule,
    "exponential": optax.exponential_decay,
    "linear": optax.linear_schedule,
    "onecycle": optax.cosine_onecycle_schedule,
    "piecewise": optax.piecewise_constant_schedule,
    "polynomial": optax.polynomial_schedule,
    "warmup_cosine": optax.warmup_cosine_decay_schedule,
}
"""Names, and the functions of optax whose arguments are the options."""


@dataclasses.dataclass(frozen=True, eq=False)
class OptaxSchedule:
    """A rate for every count of committed updates, on the update clock.

    Attributes:
        kind: a name of `SCHEDULES`.
        options: arguments of optax's function, by its names.
        dtype: of the traced rate.

    Raises:
        ConfigError: (a ValueError) an unknown kind, or options that the function does not take or lacks.
    """

    kind: str
    options: Mapping[str, Any]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            told = f"there is no schedule {self.kind!r}{nearest(self.kind, SCHEDULES)} ({', '.join(SCHEDULES)})"
            raise ConfigError(told, path="optimizer_config.lr")
        signature = inspect.signature(SCHEDULES[self.kind])
        legal = list(signature.parameters)
        for name in self.options:
            if name not in legal:
                told = f"schedule '{self.kind}' has no option {name!r}{nearest(name, legal)} ({', '.join(legal)})"
                raise ConfigError(told, path="optimizer_config.lr")
        missing = [n for n, p in signature.parameters.items() if p.default is p.empty and n not in self.options]
        if missing:
            told = f"schedule '{self.kind}' needs {', '.join(missing)}"
            raise ConfigError(told, path="optimizer_config.lr")
        try:
            object.__setattr__(self, "_function", SCHEDULES[self.kind](**self._arguments()))
        except (TypeError, ValueError) as error:
            told = f"schedule '{self.kind}' does not take {dict(self.options)}: {error}"
            raise ConfigError(told, path="optimizer_config.lr") from error

    def _arguments(self) -> dict[str, Any]:
        given = dict(self.options)
        steps = given.get("boundaries_and_scales")
        if isinstance(steps, Mapping):  # a file has only text for keys
            given["boundaries_and_scales"] = {int(at): scale for at, scale in steps.items()}
        return given

    def __call__(self, count: jax.Array) -> jax.Array:
        function: Any = self._function  # pyright: ignore[reportAttributeAccessIssue]
        return jnp.asarray(function(count), self.dtype)

    def at(self, position: int) -> float:
        """The rate at `position`, for the host."""
        return float(self(jnp.int32(position)))

    def check(self, updates: int) -> None:
        """Every count has a rate: optax's schedules stay where they ended."""

    def state(self) -> dict[str, Any]:
        """What must be equal on resume, as JSON."""
        return {"kind": f"optax.{self.kind}", "options": {n: _plain(value) for n, value in self.options.items()}}


def _plain(value: Any) -> Any:
    return {str(n): item for n, item in value.items()} if isinstance(value, Mapping) else value
