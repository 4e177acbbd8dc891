"""Metrics as sums over rows: added on the device, divided once on the host, equal for every way of batching."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.registry import lookup
from nnx_jax.objectives.losses import Task, build_loss, pick
from nnx_jax.objectives.targets import Batch, Items, bernoulli_items, class_items, value_items, weighted_sum
from nnx_jax.params.metrics import RESERVED

Mode = Literal["min", "max"]

_VARIANT = re.compile(r"^(?:(?P<kind>precision|recall|f1)_(?:micro|macro)|top_\d+)$")

_CLASSIFYING = ("accuracy", "precision", "recall", "f1", "nll", "brier")
_KINDS: dict[str, tuple[str, ...]] = {
    "classes": (*_CLASSIFYING, "top_k", "perplexity"),
    "bernoulli": _CLASSIFYING,
    "values": ("mse", "mae"),
}

METRIC_MODES: dict[str, Mode] = {
    **dict.fromkeys(RESERVED, cast(Mode, "min")),
    **{kind: cast(Any, lookup("metric", kind)).mode for kinds in _KINDS.values() for kind in kinds},
}
"""Which direction of a metric is the better one, from its specification; others have none until the user gives it."""

NLL_FLOOR = 1e-12
"""Probabilities below this count as this in `nll`, so that one sure mistake does not make the mean infinite."""


@dataclass(frozen=True)
class Metric:
    """A metric ready to be traced.

    Attributes:
        name: the key in records, such as "accuracy", "top_5" or "f1_micro".
        size: how many sums it keeps.
        mode: the better direction; None for a metric of the user's without one.
        update: (outputs, batch) -> float32 [size], the sums of one batch. A row counts once when its mask (and its
            `weight`) is above 0, else not at all; ignored and illegal labels never count. Counts are exact up to 2**24
            items a batch; add batches in float64 on the host, or keep what rounding loses as `step.evaluate` does.
        compute: float64 [size] -> float, on the host; NaN when no row counted.
    """

    name: str
    size: int
    mode: Mode | None
    update: Callable[[Any, Batch], jax.Array]
    compute: Callable[[np.ndarray], float]


def metric_mode(name: str, mode: str | None = None) -> Mode:
    """The better direction of a metric; `mode` wins, the table decides without it.

    Raises:
        ConfigError: for a mode that is not exactly "min" or "max", and for an unknown metric without a mode.
    """
    if mode is not None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode of metric '{name}' is {mode!r}; write 'min' or 'max'")
        return "min" if mode == "min" else "max"
    base = _VARIANT.sub(lambda found: found["kind"] or "top_k", name.rsplit("/", 1)[-1])
    if base in METRIC_MODES:
        return METRIC_MODES[base]
    raise ConfigError(f"metric '{name}' has no known direction; give mode: min or mode: max")


def build_metric(spec: Any, n_outputs: int, *, loss: Any = "cross_entropy") -> Metric:
    """Build the metric of a MetricParams spec or of a kind's name.

    A metric of the user's is a MetricParams subclass with `size`, `update(outputs, batch)` and `compute(sums)`.

    Args:
        spec: has `kind`, and `k` (top_k), `average` (precision, recall, f1), `zero_division` where they apply.
        n_outputs: size of the last axis of the outputs.
        loss: the loss (spec, name, or Loss) the model is trained with: it says how outputs are read and which label
            is ignored. Cross entropy reads class logits, binary cross entropy one yes/no logit each, others values.

    Raises:
        ConfigError: for an unknown kind, or one that makes no sense for the loss.
    """
    built = build_loss(loss)
    kind = spec if isinstance(spec, str) else getattr(spec, "kind", type(spec).__name__)
    if callable(getattr(spec, "update", None)):
        return _users(spec, kind)
    task = built.task if built.task != "own" else _guess_task(kind, n_outputs)
    if kind not in _KINDS[task]:
        known = kind in METRIC_MODES
        reason = f"loss '{built.name}' has no metric {kind!r}" if known else f"there is no metric {kind!r}"
        raise ConfigError(reason + nearest(kind, _KINDS[task]))
    metric = _built_in(kind, spec, task, n_outputs, _reader(task, built.ignore_index))
    return replace(metric, name=getattr(spec, "key", metric.name))


def user_metric(name: str, fn: Callable[[Any, Batch], Any]) -> Metric:
    """Wrap a function of the user's: `(outputs, batch) -> [B]` values, one a row; the metric is their mean.

    Raises:
        ConfigError: when traced, for a result without one value a row.
    """

    def update(outputs: Any, batch: Batch) -> jax.Array:
        values = jnp.asarray(fn(outputs, batch), jnp.float32)
        weight = (batch["mask"] > 0).astype(jnp.float32)
        if values.shape != weight.shape:
            raise ConfigError(f"metric '{name}' must give one value a row, shape {weight.shape}, got {values.shape}")
        return jnp.stack([weighted_sum(values, weight), jnp.sum(weight)])

    def compute(sums: np.ndarray) -> float:
        return float(sums[0] / sums[1]) if sums[1] else float("nan")

    return Metric(name, 2, None, update, compute)


def _users(spec: Any, kind: str) -> Metric:
    return Metric(getattr(spec, "key", kind), int(spec.size), getattr(spec, "mode", None), spec.update, spec.compute)


def _built_in(kind: str, spec: Any, task: Task, n_outputs: int, read: Callable[[Any, Batch], Items]) -> Metric:
    mode = METRIC_MODES[kind]
    if kind == "accuracy":
        return Metric(kind, 2, mode, lambda o, b: _hits(task, read(o, b)), _ratio)
    if kind == "top_k":
        return _top_k(int(getattr(spec, "k", 5)), n_outputs, read)
    if kind in ("precision", "recall", "f1"):
        average, empty = getattr(spec, "average", "macro"), float(getattr(spec, "zero_division", 0.0))
        return _confusion(kind, average, empty, task, n_outputs, read)
    if kind in ("mse", "mae"):
        return Metric(kind, 2, mode, lambda o, b: _error(kind, read(o, b)), _ratio)
    if kind == "brier":
        return Metric(kind, 2, mode, lambda o, b: _brier(task, read(o, b)), _ratio)
    if kind == "nll":
        return Metric(kind, 2, mode, lambda o, b: _nll(task, read(o, b), math.log(NLL_FLOOR)), _ratio)
    return Metric(kind, 2, mode, lambda o, b: _nll(task, read(o, b), -math.inf), _exp_ratio)


def _guess_task(kind: str, n_outputs: int) -> Task:
    if kind in ("mse", "mae"):
        return "values"
    return "bernoulli" if n_outputs == 1 else "classes"


def _reader(task: Task, ignore_index: int | None) -> Callable[[Any, Batch], Items]:
    if task == "classes":
        return lambda outputs, batch: class_items(outputs, batch, ignore_index)
    return bernoulli_items if task == "bernoulli" else value_items


def _ratio(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] > 0 else float("nan")


def _exp_ratio(sums: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(_ratio(sums))))


def _sum_and_count(values: jax.Array, items: Items) -> jax.Array:
    used = items.weight > 0
    return jnp.stack([jnp.sum(jnp.where(used, values, 0.0)), jnp.sum(used, dtype=jnp.float32)])


def _predicted(task: Task, items: Items) -> jax.Array:
    if task == "classes":
        return jnp.argmax(items.outputs, axis=-1).astype(jnp.int32)
    return (items.outputs >= 0).astype(jnp.int32)


def _true(task: Task, items: Items) -> jax.Array:
    return items.targets if task == "classes" else (items.targets >= 0.5).astype(jnp.int32)


def _hits(task: Task, items: Items) -> jax.Array:
    return _sum_and_count((_predicted(task, items) == _true(task, items)).astype(jnp.float32), items)


def _error(kind: str, items: Items) -> jax.Array:
    error = items.outputs - items.targets
    return _sum_and_count(jnp.square(error) if kind == "mse" else jnp.abs(error), items)


def _top_k(k: int, n_outputs: int, read: Callable[[Any, Batch], Items]) -> Metric:
    if not 1 <= k <= n_outputs:
        raise ConfigError(f"top_k has k={k}, the model has {n_outputs} classes; write a k from 1 to {n_outputs}")

    def update(outputs: Any, batch: Batch) -> jax.Array:
        items = read(outputs, batch)
        own = pick(items.outputs, items.targets)[..., None]
        index = jax.lax.broadcasted_iota(jnp.int32, items.outputs.shape, items.outputs.ndim - 1)
        # Among equal scores the higher class number comes first, as in sklearn.metrics.top_k_accuracy_score. Written as
        # "not known to be lower", so that a NaN score never counts as a hit.
        ahead = ~(items.outputs <= own) | ((items.outputs == own) & (index > items.targets[..., None]))
        return _sum_and_count((jnp.sum(ahead, axis=-1) < k).astype(jnp.float32), items)

    return Metric(f"top_{k}", 2, METRIC_MODES["top_k"], update, _ratio)


def _nll(task: Task, items: Items, floor: float) -> jax.Array:
    if task == "classes":
        log_p = pick(jax.nn.log_softmax(items.outputs), items.targets)
        return _sum_and_count(-jnp.maximum(log_p, floor), items)
    yes = jnp.maximum(jax.nn.log_sigmoid(items.outputs), floor)
    no = jnp.maximum(jax.nn.log_sigmoid(-items.outputs), floor)
    return _sum_and_count(-(items.targets * yes + (1.0 - items.targets) * no), items)


def _brier(task: Task, items: Items) -> jax.Array:
    if task == "bernoulli":
        return _sum_and_count(jnp.square(jax.nn.sigmoid(items.outputs) - items.targets), items)
    probability = jax.nn.softmax(items.outputs)
    truth = jax.nn.one_hot(items.targets, items.outputs.shape[-1], dtype=jnp.float32)
    return _sum_and_count(jnp.sum(jnp.square(probability - truth), axis=-1), items)


def _confusion(
    kind: str, average: str, zero_division: float, task: Task, n_outputs: int, read: Callable[[Any, Batch], Items]
) -> Metric:
    """Precision, recall, F1 from true positives, false positives and false negatives of each label (float32 [3 * L]).

    Labels are the classes; for one yes/no output "no" and "yes"; for several yes/no outputs the outputs. Values equal
    scikit-learn's: a macro mean runs over the labels seen in targets or predictions (over all outputs when several are
    yes/no), and 0/0 is `zero_division`.
    """
    if average not in ("micro", "macro"):
        raise ConfigError(f"{kind} has average {average!r}" + nearest(average, ("micro", "macro")))
    multilabel = task == "bernoulli" and n_outputs > 1
    n_labels = 2 if task == "bernoulli" and not multilabel else n_outputs

    def update(outputs: Any, batch: Batch) -> jax.Array:
        items = read(outputs, batch)
        used = items.weight > 0
        predicted, true = _predicted(task, items), _true(task, items)
        if multilabel:
            said, is_so = (predicted == 1) & used, (true == 1) & used
        else:
            labels = jnp.arange(n_labels, dtype=jnp.int32)
            said = (predicted[..., None] == labels) & used[..., None]
            is_so = (true[..., None] == labels) & used[..., None]
        axes = tuple(range(said.ndim - 1))
        counts = [jnp.sum(part, axis=axes, dtype=jnp.float32) for part in (said & is_so, said & ~is_so, ~said & is_so)]
        return jnp.concatenate(counts)

    def compute(sums: np.ndarray) -> float:
        hit, wrong, missed = np.asarray(sums, np.float64).reshape(3, n_labels)
        if not (hit.sum() + wrong.sum() + missed.sum()) and not multilabel:
            return float("nan")
        if average == "micro":
            hit, wrong, missed = hit.sum(keepdims=True), wrong.sum(keepdims=True), missed.sum(keepdims=True)
        elif not multilabel:
            seen = hit + wrong + missed > 0
            hit, wrong, missed = hit[seen], wrong[seen], missed[seen]
        top = 2 * hit if kind == "f1" else hit
        bottom = {"precision": hit + wrong, "recall": hit + missed, "f1": 2 * hit + wrong + missed}[kind]
        return float(np.mean(np.divide(top, bottom, out=np.full_like(top, zero_division), where=bottom > 0)))

    return Metric(kind if average == "macro" else f"{kind}_micro", 3 * n_labels, METRIC_MODES[kind], update, compute)
