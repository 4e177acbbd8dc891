"""Losses put together: weighted, added, and told which of several outputs they look at; still sums underneath."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.precision import sum_dtype
from nnx_jax.objectives.terms import LossTerm, check_terms
from nnx_jax.objectives.weights import WeightSchedule, as_schedule, check_sum, weight_at

Terms = Callable[[Any, Any], tuple[LossTerm, ...]]


class BaseLossFunction:
    """A loss that can be weighted and added: `2.0 * a + b`, `LinearWeight(0, 1, 100) * a`, `sum([a, b])`.

    Subclasses say `__call__(outputs, batch)`: a LossTerm, several, or a scalar of the step.
    """

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """The terms of one microbatch."""
        raise AssertionError(f"{type(self).__name__} does not say what it computes; define __call__(outputs, batch)")

    def on(self, prediction_key: str, target_key: str = "y") -> KeyedLoss:
        """This loss of one entry of a mapping of outputs, against one column of the batch."""
        return KeyedLoss(self, prediction_key, target_key)

    def __mul__(self, weight: Any) -> ComposedLossFunction:
        if not isinstance(weight, bool) and not isinstance(weight, int | float | WeightSchedule):
            return NotImplemented
        return ComposedLossFunction([self], weights=[weight])

    __rmul__ = __mul__

    def __add__(self, other: Any) -> ComposedLossFunction:
        if not isinstance(other, BaseLossFunction):
            return NotImplemented
        return _added(self, other)

    def __radd__(self, other: Any) -> BaseLossFunction:
        if isinstance(other, int) and other == 0:
            return self  # `sum([...])` begins with 0
        return NotImplemented


class KeyedLoss(BaseLossFunction):
    """A loss of one entry of the outputs: called with `outputs[prediction_key]` and `batch[target_key]` as "y"."""

    def __init__(self, loss: Callable[..., Any], prediction_key: str, target_key: str = "y") -> None:
        self.loss, self.prediction_key, self.target_key = loss, prediction_key, target_key
        self.name = f"{prediction_key}_{name_of(loss)}"

    def __call__(self, outputs: Any, batch: Any) -> Any:
        found = pick_key(outputs, self.prediction_key, "the outputs", self.name)
        target = pick_key(batch, self.target_key, "the batch", self.name)
        return self.loss(found, {**batch, "y": target})

    def invalid_labels(self, outputs: Any, batch: Any) -> Any:
        """How many items have an illegal label, as the loss itself counts them."""
        count = getattr(self.loss, "invalid_labels", None)
        if count is None:
            return 0
        return count(outputs[self.prediction_key], {**batch, "y": batch[self.target_key]})


class ComposedLossFunction(BaseLossFunction):
    """Losses with weights, as one loss: every component stays a term of its own, so windows stay exact.

    Args:
        components: losses, or functions `(outputs, batch)` that return LossTerm objects or a scalar.
        weights: a number or a schedule for each; default 1.
        normalize_weights: divide the weights by their sum, at every update anew where one follows a schedule.

    Attributes:
        names: of the components; those of one name are numbered `name_0`, `name_1`.

    Raises:
        ConfigError: no component, another number of weights, weights whose sum is not above 0.
        TypeError: a weight that is a bool, or neither number nor schedule; a schedule for a composition.
    """

    task = "own"
    ignore_index: int | None = None

    def __init__(
        self,
        components: Sequence[Callable[..., Any]],
        weights: Sequence[Any] | None = None,
        normalize_weights: bool = True,
    ) -> None:
        if not components:
            raise ConfigError("a composed loss needs at least one component")
        given = [1.0] * len(components) if weights is None else list(weights)
        if len(given) != len(components):
            raise ConfigError(f"{len(components)} loss components and {len(given)} weights; give one weight for each")
        flat: list[tuple[Any, Any]] = []
        for component, weight in zip(components, given, strict=True):
            weight = as_schedule(weight)
            if isinstance(component, ComposedLossFunction):
                if not isinstance(weight, float):
                    raise TypeError("a weight schedule belongs to one loss, not to a composition; give it to each part")
                if weight != 1.0:
                    component = component.times(weight)
                flat += zip(component.components, component.weights, strict=True)
            elif callable(component):
                flat.append((component, weight))
            else:
                raise TypeError(f"a loss component is a function of (outputs, batch), got {type(component).__name__}")
        self.components, self.weights = tuple(c for c, _ in flat), tuple(w for _, w in flat)
        self.normalize_weights = normalize_weights
        self.names = _numbered([name_of(component) for component in self.components])
        self.name = " + ".join(self.names)
        if not (self.scheduled and len(flat) == 1):
            self._check()  # a single part with a schedule is on its way to a sum, and checked when it is used
        if self.scheduled:
            self.at = self._at

    def _check(self) -> None:
        if self.normalize_weights:
            check_sum(self.weights)

    @property
    def scheduled(self) -> bool:
        """A weight follows a schedule."""
        return not all(isinstance(weight, float) for weight in self.weights)

    def raw_weights(self, step: Any = 0, epoch: Any = 0, dtype: Any = np.float32) -> dict[str, Any]:
        """Weights as given, by component; in `dtype` where they are traced."""
        found = (weight_at(weight, step, epoch, dtype) for weight in self.weights)
        return dict(zip(self.names, found, strict=True))

    def effective_weights(self, step: Any = 0, epoch: Any = 0, dtype: Any = np.float32) -> dict[str, Any]:
        """Weights as used, by component: divided by their sum when they are normalised."""
        raw = self.raw_weights(step, epoch, dtype)
        if not self.normalize_weights:
            return raw
        total = sum(raw.values())
        return {name: weight / total for name, weight in raw.items()}

    def times(self, factor: float) -> ComposedLossFunction:
        """The same composition with every weight times a number."""
        if self.scheduled and factor != 1.0:
            raise TypeError("weights that follow a schedule are not multiplied; give the factor to the schedule")
        return ComposedLossFunction(self.components, [w * factor for w in self.weights], self.normalize_weights)

    def __call__(self, outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        return self._terms(outputs, batch, 0, 0)

    def _at(self, step: Any, epoch: Any) -> Terms:
        """The loss at an update and an epoch; an attribute `at` only where that makes a difference."""
        return lambda outputs, batch: self._terms(outputs, batch, step, epoch)

    def _terms(self, outputs: Any, batch: Any, step: Any, epoch: Any) -> tuple[LossTerm, ...]:
        self._check()
        parts = list(self._parts(outputs, batch, None))
        dtypes = (getattr(term.numerator, "dtype", np.float32) for _, term in parts)
        weights = self.effective_weights(step, epoch, sum_dtype(*dtypes))
        terms: list[LossTerm] = []
        for name, term in parts:
            if self.scheduled:
                term = dataclasses.replace(term, scale=_factor(weights[name], term.numerator))
            else:
                term = dataclasses.replace(term, weight=term.weight * weights[name])
            terms.append(term)
        return check_terms(terms)

    def bare(self, outputs: Any, batch: Any, rows: Any) -> tuple[LossTerm, ...]:
        """The terms without the composition's weights; a component that gives a scalar counts for `rows` items."""
        return check_terms([term for _, term in self._parts(outputs, batch, rows)])

    def component_of(self, term: str) -> str:
        """The component that a term of this name belongs to."""
        return next(name for name in self.names if term == name or term.startswith(f"{name}."))

    def _parts(self, outputs: Any, batch: Any, rows: Any) -> Iterator[tuple[str, LossTerm]]:
        for name, component in zip(self.names, self.components, strict=True):
            found = to_terms(component(outputs, batch), name, rows)
            for term in found:
                yield name, dataclasses.replace(term, name=name if len(found) == 1 else f"{name}.{term.name}")

    def invalid_labels(self, outputs: Any, batch: Any) -> Any:
        """How many items have an illegal label, as the components count them."""
        counts = [getattr(component, "invalid_labels", None) for component in self.components]
        return sum(count(outputs, batch) for count in counts if count is not None)

    def __mul__(self, weight: Any) -> ComposedLossFunction:
        if isinstance(weight, WeightSchedule):
            raise TypeError("a weight schedule belongs to one loss, not to a composition; give it to each part")
        factor = as_schedule(weight)
        return self.times(factor)

    __rmul__ = __mul__


def to_terms(result: Any, name: str, rows: Any = None) -> tuple[LossTerm, ...]:
    """What a loss function returned as terms; a scalar counts as one item of weight 1, or as the mean of `rows` items.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(result, LossTerm) or (
        isinstance(result, tuple | list) and result and all(isinstance(part, LossTerm) for part in result)
    ):
        return check_terms(result)
    if isinstance(result, jax.Array) and result.ndim == 0 and jnp.issubdtype(result.dtype, jnp.floating):
        count = jnp.float32(1.0) if rows is None else jnp.asarray(rows, jnp.float32)
        return (LossTerm(name, result if rows is None else result * count, count),)
    if of_torch(result) and _is_float_scalar(result):
        return (_torch_term(result, name, rows),)
    is_array = isinstance(result, jax.Array) or of_torch(result)
    found = f"an array of shape {list(np.shape(result))}" if is_array else type(result).__name__
    raise TypeError(
        f"loss '{name}' returned {found}; return a float scalar of the step, a LossTerm, or several of them"
    )


def of_torch(value: Any) -> bool:
    """A torch tensor, told without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "is_cpu")


def _is_float_scalar(tensor: Any) -> bool:
    """A torch tensor holds one real number."""
    return tensor.ndim == 0 and tensor.is_floating_point()


def _torch_term(value: Any, name: str, rows: Any) -> LossTerm:
    wide = value if value.itemsize == 8 else value.float()  # float64 stays, as everywhere
    count = wide.new_ones(()) * (1.0 if rows is None else rows)
    return LossTerm(name, wide * count, count)


def _factor(weight: Any, numerator: Any) -> Any:
    """A weight as the factor of a numerator: for torch, whose steps are not traced, a number of the host."""
    if of_torch(numerator):
        return float(weight)
    return jnp.asarray(weight, jnp.result_type(jnp.float32, numerator))


def pick_key(values: Any, key: str, what: str, loss: str) -> Any:
    """`values[key]` as an array.

    Raises:
        KeyError: naming the keys there are.
        TypeError: the values are no mapping, or the entry is no array.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"loss '{loss}' looks for {key!r} in {what}, which is {type(values).__name__}; give a mapping")
    if key not in values:
        raise KeyError(f"loss '{loss}' looks for {key!r} in {what}{nearest(key, map(str, values))}")
    found = values[key]
    if not hasattr(found, "dtype"):
        raise TypeError(f"loss '{loss}': {key!r} of {what} is {type(found).__name__}; it must be an array")
    return found


def name_of(loss: Any) -> str:
    """The name of a loss: its own, the function's, or the class's."""
    return getattr(loss, "name", "") or getattr(loss, "__name__", "") or type(loss).__name__


def _added(first: BaseLossFunction, second: BaseLossFunction) -> ComposedLossFunction:
    flags = {loss.normalize_weights for loss in (first, second) if isinstance(loss, ComposedLossFunction)}
    if len(flags) > 1:
        raise ConfigError("one composition normalises its weights and the other does not; make both alike, then add")
    return ComposedLossFunction([first, second], normalize_weights=flags.pop() if flags else True)


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    count = {name: 0 for name in names}
    found = []
    for name in names:
        found.append(name if names.count(name) == 1 else f"{name}_{count[name]}")
        count[name] += 1
    return tuple(found)
