"""A loss is a set of terms: sums with denominators, added over a window and divided once, at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.precision import widened

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class LossTerm:
    """One named part of a loss, for one microbatch.

    A "mean" term contributes `weight * sum(numerators) / sum(denominators)` to an update, a "sum" term contributes
    `weight * sum(numerators)`; the sums run over every microbatch and device of the window. Because nothing is divided
    before, unequal valid counts give the gradient of the union of the data.

    Attributes:
        name: unique among the terms of one loss.
        numerator: scalar, float32 or float64, the sum over the valid items.
        denominator: scalar, what the numerator is divided by; None exactly for a "sum" term.
        reduction: "mean" or "sum".
        weight: finite factor of this term in the total.
        scale: factor of the numerator that may differ from update to update (a scalar of the step, as a weight
            schedule gives it); None for none. It is applied before the sum, so one window may see several.

    Raises:
        ConfigError: for a missing, negative or non-scalar part. Values inside a compiled step, and torch's on an
            accelerator, are not known when the term is built, so there the sign is not checked.
    """

    name: str
    numerator: Any
    denominator: Any = None
    reduction: Reduction = "mean"
    weight: float = 1.0
    scale: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a loss term needs a name, got {self.name!r}")
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f"loss term '{self.name}': reduction is {self.reduction!r}; write 'mean' or 'sum'")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not np.isfinite(self.weight):
            raise ConfigError(f"loss term '{self.name}': weight must be a finite number, got {self.weight!r}")
        _check_scalar(self.name, "numerator", self.numerator)
        if self.scale is not None:
            _check_scalar(self.name, "scale", self.scale)
        if self.reduction == "sum":
            if self.denominator is not None:
                raise ConfigError(f"loss term '{self.name}' is a sum and takes no denominator; drop it or use 'mean'")
            return
        if self.denominator is None:
            raise ConfigError(f"loss term '{self.name}' is a mean and needs its denominator (the count of valid items)")
        _check_scalar(self.name, "denominator", self.denominator)
        if _known(self.denominator) and float(self.denominator) < 0:
            raise ConfigError(f"loss term '{self.name}': denominator is negative ({float(self.denominator)})")

    @property
    def layout(self) -> tuple[str, str, float]:
        """What must stay equal within a window: name, reduction and weight."""
        return self.name, self.reduction, self.weight

    @property
    def scaled(self) -> Any:
        """The numerator times its scale: what a window adds up."""
        return self.numerator if self.scale is None else self.numerator * self.scale


def _check_scalar(name: str, part: str, value: Any) -> None:
    if np.shape(value) != ():
        raise ConfigError(f"loss term '{name}': {part} must be one number, got shape {np.shape(value)}; sum it first")


def _known(value: Any) -> bool:
    """Its value is there without a wait: no tracer, and no torch tensor of an accelerator."""
    return not isinstance(value, Tracer) and getattr(value, "is_cpu", True)


def _flatten(term: LossTerm) -> tuple[tuple[Any, Any, Any], tuple[str, Reduction, float]]:
    return (term.numerator, term.denominator, term.scale), (term.name, term.reduction, term.weight)


def _unflatten(meta: tuple[str, Reduction, float], parts: Iterable[Any]) -> LossTerm:
    # JAX rebuilds trees with placeholders that are not numbers, so the checks of the constructor are left out.
    term = object.__new__(LossTerm)
    values = (meta[0], *parts, meta[1], meta[2])
    fields = ("name", "numerator", "denominator", "scale", "reduction", "weight")
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(term, field, value)
    return term


jax.tree_util.register_pytree_node(LossTerm, _flatten, _unflatten)


def check_terms(terms: object) -> tuple[LossTerm, ...]:
    """Return `terms` as a tuple.

    Raises:
        ConfigError: for no terms, something that is not a LossTerm, or a repeated name.
    """
    if isinstance(terms, LossTerm):
        terms = (terms,)
    if not isinstance(terms, Sequence) or not terms:
        raise ConfigError(f"a loss returns at least one LossTerm, got {terms!r}")
    for term in terms:
        if not isinstance(term, LossTerm):
            raise ConfigError(f"a loss returns LossTerm objects, got {type(term).__name__}")
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"loss term name '{name}' is used {names.count(name)} times; give each term its own")
    return tuple(terms)


def merge_terms(first: Sequence[LossTerm], second: Sequence[LossTerm]) -> tuple[LossTerm, ...]:
    """Add the sums of two microbatches of one window.

    Raises:
        ConfigError: when the names, reductions or weights of the two differ.
    """
    one, two = [term.layout for term in first], [term.layout for term in second]
    if one != two:
        raise ConfigError(f"loss terms changed within a window: {one} and then {two}; keep name, reduction and weight")
    pairs = zip(first, second, strict=True)
    return tuple(
        LossTerm(
            a.name,
            a.scaled + b.scaled,
            None if a.denominator is None else a.denominator + b.denominator,
            a.reduction,
            a.weight,
        )
        for a, b in pairs
    )


def term_value(term: LossTerm) -> jax.Array:
    """The unweighted value of a term, without scale: a scalar; 0 when nothing was valid, never 0/0."""
    numerator = widened(jnp.asarray(term.numerator))
    if term.denominator is None:
        return numerator
    denominator = widened(jnp.asarray(term.denominator))
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1.0), 0.0)


def total_value(terms: Sequence[LossTerm]) -> jax.Array:
    """The value of a loss: the weighted sum of its terms, a scalar."""
    parts = (term.weight * term_value(term) * (1.0 if term.scale is None else term.scale) for term in terms)
    return sum(parts, start=jnp.float32(0.0))
