"""Losses as operators: called with (predicted, target) they give a number, and underneath exact sums over rows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BeforeValidator, Field, PlainValidator

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.core.positional import PositionalOperator
from nnx_jax.core.precision import widened
from nnx_jax.core.registry import ANY_FAMILY, OneOf, kinds, register
from nnx_jax.core.spec import Spec
from nnx_jax.objectives import losses, weights
from nnx_jax.objectives.compose import ComposedLossFunction, of_torch
from nnx_jax.objectives.targets import Batch, item_weight, weighted_sum
from nnx_jax.objectives.terms import LossTerm, check_terms
from nnx_jax.objectives.traced import explained
from nnx_jax.params.fields import Count, Seed
from nnx_jax.params.losses import LossParams

Reduction = Literal["mean", "sum", "none"]
Terms = Callable[[Any, Batch], tuple[LossTerm, ...]]


@runtime_checkable
class Loss(Protocol):
    """What a training may minimise: any function `(predicted, target) -> scalar`, or `-> (scalar, values by name)`."""

    def __call__(self, predicted: Any, target: Any) -> Any:
        """The loss of one batch."""
        ...


@runtime_checkable
class TrainTask(Protocol):
    """What a training does with a model and a batch, in place of a Loss.

    A task may also have `eval_fn(model, batch, key) -> values by name`, which evaluations then call; `isinstance` only
    looks for `loss_fn`.
    """

    def loss_fn(self, model: Any, batch: Any, key: Any) -> Any:
        """The loss of one batch: a scalar, or (scalar, values by name)."""
        ...


class LossOperator(LossParams, PositionalOperator):
    """Base of losses that are operators: `loss(predicted, target) -> (value, values by name)`.

    What a training adds up is `as_loss()`.

    Attributes:
        name: of the loss, and of its term.
    """

    name: ClassVar[str] = "loss"

    def as_loss(self) -> losses.Loss:
        """The loss as a training takes it: (outputs, batch) -> terms."""
        raise TypeError(f"{type(self).__name__} does not say how it is trained with; define as_loss()")


class ElementLoss(LossOperator):
    """Base of losses that are sums over items: `loss(predicted, target) -> (value, {name: value})`.

    Subclasses give `elements`. Masks, weights, windows and devices are exact: a training adds up the elements and their
    weights, and divides once.

    Attributes:
        task: how outputs are read, as in `losses.Loss`.
    """

    task: ClassVar[losses.Task] = "own"
    reduction: Reduction = "mean"
    """Over all elements; none: one number an element when it is called, their mean when it is trained with."""

    def elements(self, predicted: Any, target: Any) -> Any:
        """The loss of every item [B, ...], a row of the batch being first."""
        raise TypeError(f"{type(self).__name__} does not say the loss of an item; define elements(predicted, target)")

    def __call__(self, predicted: Any, target: Any) -> tuple[Any, dict[str, Any]]:
        """The reduced loss, and the same by name."""
        value = reduced(self.elements(predicted, target), self.reduction)
        return value, {self.name: value}

    def as_loss(self) -> losses.Loss:
        """The loss as a training takes it: (outputs, batch) -> terms."""
        return losses.Loss(self.name, self.task, lambda outputs, batch: self._terms(outputs, batch), _none_invalid)

    def _terms(self, outputs: Any, batch: Batch, **more: Any) -> tuple[LossTerm, ...]:
        values = self.elements(outputs, batch["y"], **more)
        losses.check_each(self.name, values.ndim)
        weight = item_weight(batch, values.shape, values.dtype)
        total = weighted_sum(values, weight)
        if self.reduction == "sum":
            return (LossTerm(self.name, total, reduction="sum"),)
        return (LossTerm(self.name, total, jnp.sum(weight)),)


@register("squared_error")
class MSE(ElementLoss):
    """Squared error; predictions and targets of one shape.

    `(N, 1)` beside `(N,)` is refused: broadcast, it would compare every prediction with every target.
    """

    name: ClassVar[str] = "mse"
    task: ClassVar[losses.Task] = "values"

    if TYPE_CHECKING:

        def __init__(self, reduction: Reduction = "mean", **data: Any) -> None: ...

    def elements(self, predicted: Any, target: Any) -> Any:
        """The squared error of every output, in float32 or wider.

        Raises:
            ModelError: (a ValueError) for two shapes.
        """
        predicted, target = comparable(predicted), comparable(target)
        if tuple(predicted.shape) != tuple(target.shape):
            shapes = f"predictions of shape {tuple(predicted.shape)} and targets of shape {tuple(target.shape)}"
            raise ModelError(f"MSE: shape mismatch, {shapes}; reshape one of them so that they are equal")
        error = predicted - target
        return error * error


@register("nll")
class NLL(ElementLoss):
    """Negative log-likelihood: the model returns a distribution with `log_prob`."""

    name: ClassVar[str] = "nll"

    if TYPE_CHECKING:

        def __init__(self, reduction: Reduction = "mean", **data: Any) -> None: ...

    def elements(self, predicted: Any, target: Any) -> Any:
        """Minus the log-probability of every target.

        Raises:
            TypeError: the prediction has no `log_prob`.
        """
        if not callable(getattr(predicted, "log_prob", None)):
            told = f"NLL needs a prediction with log_prob(target), a distribution; got {type(predicted).__name__}"
            raise TypeError(f"{told}: let the model return one, or use MSE for plain arrays")
        return -comparable(predicted.log_prob(target))


@register("kl")
class KL(ElementLoss):
    """Kullback-Leibler divergence of the predicted distribution from the target's, KL(predicted || target).

    Exact where the prediction has `kl_divergence(target)`. Otherwise an estimate, the mean of
    log predicted(z) - log target(z) over `samples` draws z of the prediction: with the `key` of the call, or in a
    training with one of `seed` and the count of updates.
    """

    name: ClassVar[str] = "kl"
    samples: Count = 1000
    """Draws of an estimate."""
    seed: Seed = 0
    """Of the draws in a training."""

    if TYPE_CHECKING:

        def __init__(self, reduction: Reduction = "mean", **data: Any) -> None: ...

    def elements(self, predicted: Any, target: Any, key: Any = None) -> Any:
        """The divergence of every pair.

        Raises:
            TypeError: no `kl_divergence`, and no key, `sample` or `log_prob` to estimate it with.
        """
        if callable(getattr(predicted, "kl_divergence", None)):
            return comparable(predicted.kl_divergence(target))
        needed = ((predicted, "sample"), (predicted, "log_prob"), (target, "log_prob"))
        lacks = [f"{type(it).__name__}.{name}" for it, name in needed if not callable(getattr(it, name, None))]
        if key is None or lacks:
            told = f"KL: {type(predicted).__name__} has no kl_divergence(target), and an estimate by sampling needs "
            raise TypeError(f"{told}{', '.join(lacks) if lacks else 'a key: KL()(predicted, target, key=key)'}")
        draws = _draw(predicted, key, self.samples)
        return jnp.mean(comparable(predicted.log_prob(draws) - target.log_prob(draws)), axis=0)

    def __call__(self, predicted: Any, target: Any, key: Any = None) -> tuple[Any, dict[str, Any]]:
        value = reduced(self.elements(predicted, target, key), self.reduction)
        return value, {self.name: value}

    def as_loss(self) -> losses.Loss:
        return MovingLoss(self.name, "own", self._at(0, 0), _none_invalid, moment=self._at)

    def _at(self, step: Any, epoch: Any) -> Terms:
        """The loss at an update, with draws of its own."""
        return lambda outputs, batch: self._terms(
            outputs, batch, key=jax.random.fold_in(jax.random.key(self.seed), step)
        )


# -- sums of losses -----------------------------------------------------------------------------------------------


def _weight(value: Any) -> Any:
    """A number, or a schedule as the values that describe it; a schedule of the user's stays as it is."""
    if isinstance(value, Mapping):
        return {**value, "kind": type(revived(value)).__name__}
    value = weights.as_schedule(value)
    return value.to_spec() if type(value).__name__ in SCHEDULES else value


def revived(spec: Mapping[str, Any]) -> Any:
    """The weight schedule that `to_spec()` describes.

    Raises:
        ConfigError: an unknown kind, or values it does not take.
    """
    fields = dict(spec)
    kind = SCHEDULES.get(fields.pop("kind", None))
    if kind is None:
        raise ConfigError(f"there is no weight schedule {spec.get('kind')!r}; legal names: {', '.join(SCHEDULES)}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from None


def _loss(value: Any) -> Any:
    """A loss of the family, another operator, or a function, which can be used from Python only."""
    if callable(value) and getattr(value, "family", None) != "loss":
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else value
    other = isinstance(kind, str) and kind in kinds(ANY_FAMILY)
    return OneOf(ANY_FAMILY if other else "loss").admit(value)


SCHEDULES: dict[Any, Callable[..., Any]] = {
    kind.__name__: kind for kind in (weights.LinearWeight, weights.CosineWeight, weights.PiecewiseWeight)
}


class WeightedLoss(Spec):
    """One part of a Composite."""

    weight: Annotated[Any, PlainValidator(_weight)]
    """A finite number, or a schedule such as `LinearWeight(0.0, 1.0, 100)`."""
    loss: Annotated[Any, PlainValidator(_loss)]
    """A loss operator, the parameters of a built-in loss, or a function `(predicted, target)`."""

    @property
    def schedule(self) -> Any:
        """The weight as a float, or as a WeightSchedule."""
        return revived(self.weight) if isinstance(self.weight, Mapping) else self.weight

    @property
    def label(self) -> str:
        """The class of the loss, or the name of the function."""
        return getattr(self.loss, "__name__", type(self.loss).__name__)


def _pairs(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    pairs = [isinstance(each, list | tuple) and len(each) == 2 for each in value]
    return tuple(
        {"weight": each[0], "loss": each[1]} if pair else each for pair, each in zip(pairs, value, strict=True)
    )


@register("composite")
class Composite(LossOperator):
    """A weighted sum of losses: `Composite(((1.0, MSE()), (0.5, NLL("sum"))))`.

    Every part is reported unweighted under its class and place (`MSE_0`, `NLL_1`), what it reports besides under that
    name and its own (`MSE_0.rmse`), so no part hides another's. Called, it also gives `total`.
    """

    name: ClassVar[str] = "total"
    components: Annotated[tuple[WeightedLoss, ...], BeforeValidator(_pairs), Field(min_length=1)]
    """Pairs of weight and loss."""

    if TYPE_CHECKING:

        def __init__(self, components: Any, **data: Any) -> None: ...

    def __call__(self, predicted: Any, target: Any, step: int = 0, epoch: int = 0) -> tuple[Any, dict[str, Any]]:
        """The sum, with weights as of an update and epoch; a part without a reduction counts by its mean."""
        total, found = 0.0, {}
        for number, part in enumerate(self.components):
            value, aux = valued(as_called(part.loss)(predicted, target))
            value = reduced(value, "mean")
            label = f"{part.label}_{number}"
            found[label] = value
            own = getattr(part.loss, "name", None)
            found.update({f"{label}.{name}": each for name, each in aux.items() if name != own})
            total = total + weights.weight_at(part.schedule, step, epoch, np.float32) * value
        return total, {**found, self.name: total}

    def as_loss(self) -> losses.Loss:
        parts = [(f"{part.label}_{n}", part.schedule, as_loss(part.loss)) for n, part in enumerate(self.components)]
        at = lambda step, epoch: lambda outputs, batch: _summed(parts, outputs, batch, step, epoch)  # noqa: E731
        if all(isinstance(weight, float) and not hasattr(loss, "at") for _, weight, loss in parts):
            return losses.Loss(self.name, "own", at(0, 0), _counting(parts))
        return MovingLoss(self.name, "own", at(0, 0), _counting(parts), moment=at)


def _summed(parts: Any, outputs: Any, batch: Batch, step: Any, epoch: Any) -> tuple[LossTerm, ...]:
    found: list[LossTerm] = []
    for label, weight, loss in parts:
        for term in (loss.at(step, epoch) if hasattr(loss, "at") else loss)(outputs, batch):
            name = label if term.name == loss.name else f"{label}.{term.name}"
            found += _weighted(dataclasses.replace(term, name=name), weight, step, epoch)
    return check_terms(found)


def _weighted(term: LossTerm, weight: Any, step: Any, epoch: Any) -> list[LossTerm]:
    """A term with a weight; where that moves, the term without it is kept to be reported, and counts nothing."""
    if isinstance(weight, float):
        return [dataclasses.replace(term, weight=term.weight * weight)]
    if term.weight == 0.0:
        return [term]
    factor = weights.weight_at(weight, step, epoch, term.numerator.dtype)
    factor = jnp.asarray(factor if term.scale is None else factor * term.scale, term.numerator.dtype)
    bare = dataclasses.replace(term, weight=0.0, scale=None)
    return [bare, dataclasses.replace(term, name=f"{term.name}.weighted", scale=factor)]


@dataclass(frozen=True)
class MovingLoss(losses.Loss):
    """A loss that is another one at every update: `at(step, epoch)` gives its terms there."""

    moment: Callable[[Any, Any], Terms] = lambda step, epoch: lambda outputs, batch: ()

    def at(self, step: Any, epoch: Any) -> Terms:
        """The loss at an update and an epoch, numbers or int32 scalars of the step."""
        return self.moment(step, epoch)


# -- any loss as one that a training takes ------------------------------------------------------------------------


def as_loss(given: Any) -> losses.Loss:
    """Return the loss of a training: of a loss operator, a built-in one, its parameters or name, or a function.

    A function `(predicted, target)`, or `(outputs, batch)` when its second parameter is called `batch`, may return

    * the loss of every row [B, ...], or LossTerm objects: see `losses.wrap_user_loss`;
    * a scalar, or (scalar, values by name): it stands for the batch and counts for its rows. In a batch with rows that
      do not count fully (padding of a last batch, sample weights) the function is called for every row by itself, a
      batch of one, and the rows are weighted. That is exact for means over rows, which most losses are; one that
      compares rows with each other is only meaningful in whole batches, and one that cannot be called for one row is
      NaN in others. The values are reported beside "loss".

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(given, losses.Loss):
        return given
    if isinstance(given, LossOperator):
        return given.as_loss()
    if isinstance(given, ComposedLossFunction) and given.scheduled:
        return MovingLoss(given.name, "own", given, given.invalid_labels, moment=given.at)
    known = isinstance(given, str) or getattr(given, "family", None) == "loss"
    return losses.build_loss(given) if known or not callable(given) else _of_function(given)


def as_called(given: Any) -> Callable[[Any, Any], Any]:
    """Return a loss as a function of (predicted, target)."""
    if callable(given) and (isinstance(given, LossOperator) or getattr(given, "family", None) != "loss"):
        return given
    built = losses.build_loss(given)
    return lambda predicted, target: _value(built(predicted, {"y": target})[0])


def _value(term: LossTerm) -> Any:
    return term.numerator if term.denominator is None else term.numerator / term.denominator


def _of_function(function: Callable[..., Any]) -> losses.Loss:
    name, call = losses.user_function(function, "loss")
    label = getattr(function, "__name__", type(function).__name__)

    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        with explained(f"loss '{label}'"):
            result = call(outputs, batch)
        value, aux = valued(result)
        if aux or not (isinstance(value, tuple) or losses.are_terms(value) or jnp.ndim(value)):
            return _of_batch(name, call, (value, aux), outputs, batch)
        return losses.wrap_user_loss(lambda outputs, batch: result, name)(outputs, batch)

    return losses.Loss(name, "own", terms, losses.counter(function))


def _of_batch(name: str, call: Any, result: Any, outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
    """The scalars of a batch as terms that count for its rows; what is only reported has weight 0."""
    names = [name, *(key for key in result[1] if key != name)]
    whole = _stacked(names, *result)
    rows = jnp.shape(jax.tree.leaves(batch["y"])[0])[0]
    weight = item_weight(batch, (rows,), whole.dtype)

    def by_row() -> Any:
        def one(outputs: Any, batch: Any) -> Any:
            outputs, batch = jax.tree.map(lambda leaf: leaf[None], (outputs, batch))
            return _stacked(names, *valued(call(outputs, batch)))

        each = jax.vmap(one)(outputs, dict(batch))
        return jnp.sum(jnp.where(weight[:, None] != 0, each * weight[:, None], 0.0), axis=0)

    if batch.get("mask") is None and batch.get("weight") is None:
        sums = whole * rows
    else:
        sums = jax.lax.cond(jnp.all(weight == 1), lambda: whole * rows, _or_nan(by_row, whole))
    total = jnp.sum(weight)
    return tuple(LossTerm(key, sums[n], total, weight=float(n == 0)) for n, key in enumerate(names))


def _or_nan(by_row: Callable[[], Any], whole: Any) -> Callable[[], Any]:
    """`by_row` where the function can be called for one row: the batch as a whole was fine, so this is no error yet."""
    try:
        jax.eval_shape(by_row)
    except Exception:  # whatever the user's function says to a batch of one
        return lambda: jnp.full_like(whole, jnp.nan)
    return by_row


def _stacked(names: list[str], value: Any, aux: Mapping[str, Any]) -> Any:
    """[names]: the loss and what is reported with it, each as one number that only the loss is differentiated by."""
    scalars = [jax.lax.stop_gradient(jnp.mean(widened(jnp.asarray(aux[name])))) for name in names[1:]]
    return jnp.stack([widened(jnp.asarray(value)).reshape(()), *scalars])


def valued(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """(what a loss returned, values by name): of a pair whose second part is a mapping, else with none."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result
    return result, {}


def reduced(values: Any, reduction: str) -> Any:
    """Elements as one number, or as they are."""
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def comparable(value: Any) -> Any:
    """An array of float32 or wider; torch tensors stay in torch."""
    if of_torch(value):
        return value.float() if value.itemsize < 4 or not value.is_floating_point() else value
    return widened(jnp.asarray(value))


def _draw(distribution: Any, key: Any, count: int) -> Any:
    """[count, ...] draws; libraries call the key `key` (NumPyro) or `seed` (Distrax, TFP)."""
    sample = distribution.sample
    if "seed" in inspect.signature(sample).parameters:
        return sample(seed=key, sample_shape=(count,))
    return sample(key, sample_shape=(count,))


def _counting(parts: Any) -> Callable[[Any, Batch], Any]:
    return lambda outputs, batch: sum(loss.invalid_labels(outputs, batch) for _, _, loss in parts)


def _none_invalid(outputs: Any, batch: Batch) -> Any:
    return jnp.int32(0)
