"""The built-in losses and the user's own, each as sums: (outputs, batch) -> loss terms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.precision import widened
from nnx_jax.objectives.compose import BaseLossFunction
from nnx_jax.objectives.targets import (
    Batch,
    Items,
    bernoulli_items,
    class_items,
    item_weight,
    value_items,
    weighted_sum,
)
from nnx_jax.objectives.terms import LossTerm, check_terms
from nnx_jax.objectives.traced import explained

Task = Literal["classes", "bernoulli", "values", "own"]
L = TypeVar("L")


@dataclass(frozen=True)
class Loss(BaseLossFunction):
    """A loss ready to be traced: call it with (outputs, batch) to get its terms.

    `batch` holds "y", and may hold "mask" [B] (1 for a real row, 0 for padding) and "weight". Outputs of any float
    type but float64 are cast to float32 first. A label that is not a label adds nothing to either sum and is counted
    by `invalid_labels`, so that the step can refuse the update instead of learning a wrong class.

    Attributes:
        name: the kind, also the name of its single term.
        task: how outputs are read: class logits, bernoulli logits, values, or the user's own.
        ignore_index: the label that means "no target", or None.
    """

    name: str
    task: Task
    terms: Callable[[Any, Batch], tuple[LossTerm, ...]]
    count_invalid: Callable[[Any, Batch], Any]
    ignore_index: int | None = None

    @property
    def by_rows(self) -> bool:
        """Its sums are over rows that know nothing of each other; a function of the user's may compare them."""
        return self.task != "own"

    def __call__(self, outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        return self.terms(outputs, batch)

    def invalid_labels(self, outputs: Any, batch: Batch) -> Any:
        """How many weighted items have an illegal label: int32 scalar."""
        return self.count_invalid(outputs, batch)


def cross_entropy(
    *,
    ignore_index: int | None = -100,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
) -> Loss:
    """Softmax cross entropy for integer labels; outputs [..., C], labels [...].

    With class weights the denominator is the summed weight of the valid labels, and label smoothing spreads its share
    over the weighted classes: `(1 - e) * w_y * nll_y + e / C * sum_c w_c * nll_c`, as torch.nn.CrossEntropyLoss does.
    """
    weights = checked_weights(class_weights, label_smoothing)

    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        items = class_items(outputs, batch, ignore_index)
        n_classes = items.outputs.shape[-1]
        check_classes(weights, n_classes)
        shifted = items.outputs - jax.lax.stop_gradient(jnp.max(items.outputs, axis=-1, keepdims=True))
        log_norm = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
        loss = log_norm - pick(shifted, items.targets)
        weight = items.weight
        if weights is not None:
            per_class = jnp.asarray(weights, items.outputs.dtype)
            weight = weight * per_class[items.targets]
        numerator = weighted_sum(loss, weight) * (1.0 - label_smoothing)
        if label_smoothing:
            spread = log_norm[..., None] - shifted
            spread = jnp.sum(spread if weights is None else spread * jnp.asarray(weights, items.outputs.dtype), axis=-1)
            numerator = numerator + weighted_sum(spread, items.weight) * (label_smoothing / n_classes)
        return (LossTerm("cross_entropy", numerator, jnp.sum(weight)),)

    def count(outputs: Any, batch: Batch) -> jax.Array:
        return _count(class_items(outputs, batch, ignore_index))

    return Loss("cross_entropy", "classes", terms, count, ignore_index)


def checked_weights(class_weights: Sequence[float] | None, label_smoothing: float) -> tuple[float, ...] | None:
    """The class weights of cross entropy.

    Raises:
        ConfigError: for a negative weight, weights that are all 0, or a smoothing outside [0, 1].
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    weights = None if class_weights is None else tuple(float(w) for w in class_weights)
    if weights is not None and (min(weights, default=0.0) < 0 or not sum(weights) > 0):
        raise ConfigError(f"class_weights must be 0 or more and not all 0, got {weights}")
    return weights


def check_classes(weights: tuple[float, ...] | None, n_classes: int) -> None:
    """One weight a class.

    Raises:
        ConfigError: for another number.
    """
    if weights is not None and len(weights) != n_classes:
        raise ConfigError(f"class_weights has {len(weights)} numbers, the model has {n_classes} classes")


def pick(values: jax.Array, labels: jax.Array) -> jax.Array:
    """`values[..., labels]`; the labels must be legal (see `class_items`), they are not checked again.

    A select and a sum, not a gather: the gradient of a gather is a scatter, which XLA's CPU code does row by row.
    """
    chosen = labels[..., None] == jnp.arange(values.shape[-1], dtype=labels.dtype)
    return jnp.sum(jnp.where(chosen, values, 0.0), axis=-1)


def binary_cross_entropy() -> Loss:
    """Sigmoid cross entropy from logits, a mean over all outputs; targets in [0, 1] of the outputs' shape."""

    def per_item(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.maximum(logits, 0.0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))

    return _elementwise("binary_cross_entropy", "bernoulli", bernoulli_items, per_item)


def mse() -> Loss:
    """Squared error, a mean over all outputs."""
    return _elementwise("mse", "values", value_items, lambda outputs, targets: jnp.square(outputs - targets))


def mae() -> Loss:
    """Absolute error, a mean over all outputs."""
    return _elementwise("mae", "values", value_items, lambda outputs, targets: jnp.abs(outputs - targets))


def huber(*, delta: float = 1.0) -> Loss:
    """Huber loss, a mean over all outputs: 0.5 e^2 up to |e| = delta, then delta * (|e| - delta / 2), as torch does."""
    check_delta(delta)

    def per_item(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        error = jnp.abs(outputs - targets)
        inside = jnp.minimum(error, delta)
        return 0.5 * inside * inside + delta * (error - inside)

    return _elementwise("huber", "values", value_items, per_item)


def check_delta(delta: float) -> None:
    """A huber loss has a width.

    Raises:
        ConfigError: for 0 and less.
    """
    if not delta > 0:
        raise ConfigError(f"huber delta must be above 0, got {delta}")


def _elementwise(
    name: str,
    task: Task,
    read: Callable[[Any, Batch], Items],
    per_item: Callable[[jax.Array, jax.Array], jax.Array],
) -> Loss:
    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        items = read(outputs, batch)
        numerator = weighted_sum(per_item(items.outputs, items.targets), items.weight)
        return (LossTerm(name, numerator, jnp.sum(items.weight)),)

    return Loss(name, task, terms, lambda outputs, batch: _count(read(outputs, batch)))


def _count(items: Items) -> jax.Array:
    return jnp.sum(items.illegal, dtype=jnp.int32)


def wrap_user_loss(fn: Callable[..., Any], name: str | None = None) -> Loss:
    """Make a loss of the user's function.

    The function takes (outputs, batch) when its second parameter is called `batch`, else (outputs, targets). It returns
    LossTerm objects, or one loss for each example ([B], [B, T], ...), or (loss for each example, mask). The row mask of
    the batch is applied to the last two.

    Raises:
        ConfigError: for something not callable, one that takes the targets first, or a function that returns an already
            averaged number.
        StepError: when traced, for a function that needs the value of an array; it names the line.
    """
    label, call = user_function(fn, name)

    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        with explained(f"loss '{label}'"):
            result = call(outputs, batch)
        if are_terms(result):
            return check_terms(result)
        values, own_mask = masked_values(result)
        values = widened(jnp.asarray(values))
        check_each(label, values.ndim)
        weight = item_weight(batch, values.shape, values.dtype)
        if own_mask is not None:
            weight = weight * item_weight({"mask": own_mask}, values.shape)
        return (LossTerm(label, weighted_sum(values, weight), jnp.sum(weight)),)

    return Loss(label, "own", terms, counter(fn))


def user_function(fn: Callable[..., Any], name: str | None) -> tuple[str, Callable[[Any, Batch], Any]]:
    """(what a loss of the user's is called, how it is called with outputs and a batch): see `wrap_user_loss`."""
    if not callable(fn):
        raise ConfigError(f"a loss is a function of (outputs, batch) or (outputs, targets), got {type(fn).__name__}")
    label = name or getattr(fn, "__name__", "loss")
    check_order(fn, f"loss '{label}' is called as fn(outputs, targets), or fn(outputs, batch)")
    takes_batch = (_parameters(fn) + ["", ""])[1] == "batch"
    return label, lambda outputs, batch: fn(outputs, batch if takes_batch else batch["y"])


def counter(fn: Any) -> Callable[[Any, Batch], Any]:
    """How a loss of the user's counts illegal labels: as a composition of built-in ones does, or it sees none."""
    return getattr(fn, "invalid_labels", None) or (lambda outputs, batch: 0)


def are_terms(result: Any) -> bool:
    """A loss returned terms, one or several."""
    several = isinstance(result, tuple | list) and bool(result) and all(isinstance(part, LossTerm) for part in result)
    return several or isinstance(result, LossTerm)


def masked_values(result: Any) -> tuple[Any, Any]:
    """(loss for each example, the mask that came with it or None)."""
    return result if isinstance(result, tuple) and len(result) == 2 else (result, None)


def check_each(label: str, ndim: int) -> None:
    """A loss of the user's gives the loss of each example.

    Raises:
        ConfigError: for one number, which somebody has averaged.
    """
    if ndim == 0:
        raise ConfigError(
            f"loss '{label}' returned one number; return the loss of each example, or a LossTerm(name, sum, "
            "count), so that windows and devices can be added before dividing"
        )


def check_order(fn: Callable[..., Any], told: str) -> None:
    """Refuse a function whose first parameter says that it is the targets, which other libraries give first.

    Raises:
        ConfigError: beginning with `told`.
    """
    first = (_parameters(fn) + [""])[0]
    if first.lower() in _TARGETS:
        raise ConfigError(f"{told}; this function takes {first!r} first, turn it round")


_TARGETS = ("truth", "true", "y_true", "target", "targets", "label", "labels")


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # a built-in, which does not tell
        return []


LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "mse": mse,
    "mae": mae,
    "huber": huber,
}


def build_loss(spec: Any) -> Loss:
    """Build the loss of a LossParams spec (a user's own defines `__call__`), a loss operator, a kind's name, a
    function, or a Loss.

    Raises:
        ConfigError: for an unknown kind.
    """
    if hasattr(spec, "as_loss"):
        return spec.as_loss()
    return spec if isinstance(spec, Loss) else made_loss(spec, LOSSES, wrap_user_loss)


def made_loss(spec: Any, losses: Mapping[str, Callable[..., L]], wrap: Callable[..., L]) -> L:
    """`build_loss` with the losses of a framework: its built-in kinds, and what it makes of a function."""
    if getattr(spec, "scheduled", False):
        raise ConfigError("weights of this loss follow a schedule, which a TrainingStrategy takes; here, give numbers")
    kind = spec if isinstance(spec, str) else getattr(spec, "kind", None)
    if not isinstance(spec, str) and callable(spec) and kind not in losses:
        return wrap(spec, kind)
    if kind is None or kind not in losses:
        raise ConfigError(f"there is no loss {kind or spec!r}{nearest(kind or spec, losses)}")
    make = losses[kind]
    return make() if isinstance(spec, str) else make(**_options(spec, make))


def _options(spec: Any, make: Callable[..., Any]) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in inspect.signature(make).parameters if hasattr(spec, name)}
