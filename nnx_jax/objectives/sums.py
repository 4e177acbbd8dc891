"""The sums that metrics keep of one batch, in JAX; what is made of them on the host is in `metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.precision import widened
from nnx_jax.objectives.losses import Task, pick
from nnx_jax.objectives.targets import Batch, Items, bernoulli_items, class_items, value_items, weighted_sum
from nnx_jax.objectives.traced import explained


def reader(task: Task, ignore_index: int | None) -> Callable[[Any, Batch], Items]:
    """(outputs, batch) -> items, as a loss of this task reads them."""
    if task == "classes":
        return lambda outputs, batch: class_items(outputs, batch, ignore_index)
    return bernoulli_items if task == "bernoulli" else value_items


def rows(name: str, fn: Callable[[Any, Batch], Any], outputs: Any, batch: Batch) -> jax.Array:
    """Sum and count of a function of the user's that gives one value a row.

    Raises:
        ConfigError: when traced, for a result without one value a row.
        StepError: when traced, for a function that needs the value of an array; it names the line.
    """
    with explained(f"metric '{name}'"):
        values = widened(jnp.asarray(fn(outputs, batch)))
    weight = (batch["mask"] > 0).astype(jnp.float32)
    if values.shape != weight.shape:
        raise ConfigError(f"metric '{name}' must give one value a row, shape {weight.shape}, got {values.shape}")
    return jnp.stack([weighted_sum(values, weight), jnp.sum(weight)])


def registered(made: Any, kind: str, task: Task, items: Items) -> jax.Array:
    """The sums of a registered metric, which is given the outputs as it asked for them, the targets and weights."""
    if kind == "labels":
        compared = predicted(task, items), true(task, items)
    elif kind == "continuous":
        compared = items.outputs, items.targets
    else:
        probability = jax.nn.softmax(items.outputs) if task == "classes" else jax.nn.sigmoid(items.outputs)
        compared = probability, true(task, items)
    return widened(jnp.asarray(made.update(*compared, items.weight)))


def sum_and_count(values: jax.Array, items: Items) -> jax.Array:
    """[2]: the sum over items that count, and how many they are."""
    used = items.weight > 0
    return jnp.stack([jnp.sum(jnp.where(used, values, 0.0)), jnp.sum(used, dtype=jnp.float32)])


def predicted(task: Task, items: Items) -> jax.Array:
    """The most likely class, or yes (1) from a logit of 0; int32."""
    if task == "classes":
        return jnp.argmax(items.outputs, axis=-1).astype(jnp.int32)
    return (items.outputs >= 0).astype(jnp.int32)


def true(task: Task, items: Items) -> jax.Array:
    """The class, or yes (1) from a target of 0.5; int32."""
    return items.targets if task == "classes" else (items.targets >= 0.5).astype(jnp.int32)


def hits(task: Task, items: Items) -> jax.Array:
    """Right decisions."""
    return sum_and_count((predicted(task, items) == true(task, items)).astype(items.outputs.dtype), items)


def error(kind: str, items: Items) -> jax.Array:
    """Squared ("mse") or absolute errors."""
    apart = items.outputs - items.targets
    return sum_and_count(jnp.square(apart) if kind == "mse" else jnp.abs(apart), items)


def top_k(k: int, items: Items) -> jax.Array:
    """Labels among the k highest scores."""
    own = pick(items.outputs, items.targets)[..., None]
    index = jax.lax.broadcasted_iota(jnp.int32, items.outputs.shape, items.outputs.ndim - 1)
    # Among equal scores the higher class number comes first, as in sklearn.metrics.top_k_accuracy_score. Written as
    # "not known to be lower", so that a NaN score never counts as a hit.
    ahead = ~(items.outputs <= own) | ((items.outputs == own) & (index > items.targets[..., None]))
    return sum_and_count((jnp.sum(ahead, axis=-1) < k).astype(items.outputs.dtype), items)


def nll(task: Task, items: Items, floor: float) -> jax.Array:
    """Negative log-likelihoods, each log-probability from `floor` up."""
    if task == "classes":
        log_p = pick(jax.nn.log_softmax(items.outputs), items.targets)
        return sum_and_count(-jnp.maximum(log_p, floor), items)
    yes = jnp.maximum(jax.nn.log_sigmoid(items.outputs), floor)
    no = jnp.maximum(jax.nn.log_sigmoid(-items.outputs), floor)
    return sum_and_count(-(items.targets * yes + (1.0 - items.targets) * no), items)


def brier(task: Task, items: Items) -> jax.Array:
    """Squared distances between probabilities and the truth."""
    if task == "bernoulli":
        return sum_and_count(jnp.square(jax.nn.sigmoid(items.outputs) - items.targets), items)
    probability = jax.nn.softmax(items.outputs)
    truth = jax.nn.one_hot(items.targets, items.outputs.shape[-1], dtype=probability.dtype)
    return sum_and_count(jnp.sum(jnp.square(probability - truth), axis=-1), items)


def confusion(task: Task, items: Items, n_labels: int, multilabel: bool) -> jax.Array:
    """True positives, false positives and false negatives of each label: float32 [3 * n_labels]."""
    used = items.weight > 0
    guess, truth = predicted(task, items), true(task, items)
    if multilabel:
        said, is_so = (guess == 1) & used, (truth == 1) & used
    else:
        labels = jnp.arange(n_labels, dtype=jnp.int32)
        said = (guess[..., None] == labels) & used[..., None]
        is_so = (truth[..., None] == labels) & used[..., None]
    axes = tuple(range(said.ndim - 1))
    counts = [jnp.sum(part, axis=axes, dtype=jnp.float32) for part in (said & is_so, said & ~is_so, ~said & is_so)]
    return jnp.concatenate(counts)
