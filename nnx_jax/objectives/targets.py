"""Outputs and targets made comparable: shapes checked, float32, one weight an item, illegal labels marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.core.precision import sum_dtype, widened

Batch = Mapping[str, Any]


class Items(NamedTuple):
    """What a loss or a metric is summed over.

    Attributes:
        outputs: float32, or float64 where the model's are; [..., C] logits for classes, else the shape of `targets`.
        targets: int32 class numbers (illegal and ignored ones replaced by 0), or float values.
        weight: float, shape of `targets`; 0 for padding, for ignored and for illegal labels.
        illegal: bool, shape of `targets`: a weighted item whose label is not a label.
    """

    outputs: jax.Array
    targets: jax.Array
    weight: jax.Array
    illegal: jax.Array


def item_weight(batch: Batch, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The weight of every target: `mask` times `weight`, each [B] or any leading part of `shape`; in `dtype`, that of
    the values it weighs, or wider where one of the two is.

    Raises:
        DataError: when one of the two has another shape.
    """
    total = jnp.ones(shape, dtype)
    for name in ("mask", "weight"):
        column = batch.get(name)
        if column is None:
            continue
        column = widened(jnp.asarray(column))
        if column.shape != shape[: column.ndim]:
            raise DataError(f"column '{name}' has shape {column.shape}, not a leading part of the targets' {shape}")
        total = total * column.reshape(column.shape + (1,) * (len(shape) - column.ndim))
    return total


def class_items(outputs: Any, batch: Batch, ignore_index: int | None = None) -> Items:
    """Logits [..., C] and integer labels [...] (or [B, 1] beside [B, C]).

    Raises:
        DataError: for labels that are not integers.
        ModelError: for shapes that do not fit, or a single class.
    """
    outputs, labels = jnp.asarray(outputs), jnp.asarray(batch["y"])
    if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == jnp.bool_):
        raise DataError(f"class labels are {labels.dtype}; give integers 0..C-1 (column 'y')")
    if labels.ndim == outputs.ndim and labels.shape[-1] == 1 and outputs.ndim > 1:
        labels = labels[..., 0]
    if outputs.ndim < 1 or labels.shape != outputs.shape[:-1]:
        raise ModelError(
            f"outputs have shape {outputs.shape} and labels {labels.shape}; one label for each row of logits is needed"
        )
    n_classes = outputs.shape[-1]
    if n_classes < 2:
        raise ModelError(f"the model has {n_classes} output for class labels; use 2 or more, or binary_cross_entropy")
    labels = labels.astype(jnp.int32)
    outputs = widened(outputs)
    weight = item_weight(batch, labels.shape, outputs.dtype)
    legal = (labels >= 0) & (labels < n_classes)
    ignored = jnp.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    usable = legal & ~ignored
    return Items(
        outputs,
        jnp.where(usable, labels, 0),
        jnp.where(usable, weight, 0.0),
        ~legal & ~ignored & (weight > 0),
    )


def value_items(outputs: Any, batch: Batch) -> Items:
    """Values and their predictions, of one shape ([B] beside [B, 1] is allowed, any other broadcast is refused).

    A NaN target stays NaN: the loss is then not finite and the step refuses it.

    Raises:
        ModelError: for shapes that differ.
    """
    outputs, targets = jnp.asarray(outputs), jnp.asarray(batch["y"])
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs[..., 0]
    elif targets.shape == (*outputs.shape, 1):
        targets = targets[..., 0]
    if outputs.shape != targets.shape:
        raise ModelError(f"outputs have shape {outputs.shape} and targets {targets.shape}; they must be equal")
    wide = sum_dtype(outputs.dtype, targets.dtype)
    weight = item_weight(batch, targets.shape, wide)
    return Items(outputs.astype(wide), targets.astype(wide), weight, jnp.zeros(targets.shape, bool))


def bernoulli_items(outputs: Any, batch: Batch) -> Items:
    """Logits and targets in [0, 1] (bool, integer or float) of one shape; anything else is marked illegal."""
    items = value_items(outputs, batch)
    legal = (items.targets >= 0) & (items.targets <= 1)  # false for NaN too
    return Items(
        items.outputs,
        jnp.where(legal, items.targets, 0.0),
        jnp.where(legal, items.weight, 0.0),
        ~legal & (items.weight > 0),
    )


def weighted_sum(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum of `weight * values` where the weight is not 0: a value of an unused item never counts, not even NaN."""
    return jnp.sum(jnp.where(weight != 0, values * weight, 0.0))
