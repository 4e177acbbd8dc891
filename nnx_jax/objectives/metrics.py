"""Metrics as sums over rows: added on the device, divided once on the host, equal for every way of batching."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import numpy as np

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.registry import lookup
from nnx_jax.objectives import sums as of_jax
from nnx_jax.objectives.losses import Loss, Task, build_loss, check_order
from nnx_jax.objectives.targets import Batch
from nnx_jax.params.metrics import RESERVED, MetricDefinition, MetricSpec

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
    update: Callable[[Any, Batch], Any]
    compute: Callable[[np.ndarray], float]
    rows: Callable[[np.ndarray], np.ndarray] | None = None
    """`compute` of many, float64 [n, size] -> [n], to the same bits; None: one by one."""

    def values(self, sums: np.ndarray) -> np.ndarray:
        """`compute` of every record's sums, float64 [n, size] -> [n]."""
        if self.compute is _ratio:
            return _ratios(sums)
        if self.rows is not None:
            return self.rows(sums)
        return np.array([float(self.compute(row)) for row in sums], np.float64)


class Sums(Protocol):
    """What a framework adds up of one batch; `objectives.sums` says what each function gives."""

    def reader(self, task: Task, ignore_index: int | None) -> Callable[[Any, Batch], Any]: ...
    def rows(self, name: str, fn: Callable[[Any, Batch], Any], outputs: Any, batch: Batch) -> Any: ...
    def registered(self, made: Any, kind: str, task: Task, items: Any) -> Any: ...
    def hits(self, task: Task, items: Any) -> Any: ...
    def error(self, kind: str, items: Any) -> Any: ...
    def top_k(self, k: int, items: Any) -> Any: ...
    def nll(self, task: Task, items: Any, floor: float) -> Any: ...
    def brier(self, task: Task, items: Any) -> Any: ...
    def confusion(self, task: Task, items: Any, n_labels: int, multilabel: bool) -> Any: ...


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
    return built_metric(spec, n_outputs, build_loss(loss), of_jax)


def built_metric(spec: Any, n_outputs: int, built: Loss, sums: Sums) -> Metric:
    """`build_metric` for a loss that is built, with the sums of a framework."""
    if isinstance(spec, MetricSpec):
        found = spec.resolve()
        if isinstance(found, MetricDefinition):
            return _registered(spec, found, built, sums)
        spec = found
    kind = spec if isinstance(spec, str) else getattr(spec, "kind", type(spec).__name__)
    if callable(getattr(spec, "update", None)):
        return _users(spec, kind)
    task = built.task if built.task != "own" else _guess_task(kind, n_outputs)
    if kind not in _KINDS[task]:
        known = kind in METRIC_MODES
        reason = f"loss '{built.name}' has no metric {kind!r}" if known else f"there is no metric {kind!r}"
        raise ConfigError(reason + nearest(kind, _KINDS[task]))
    metric = _built_in(kind, spec, task, n_outputs, sums, sums.reader(task, built.ignore_index))
    return replace(metric, name=getattr(spec, "key", metric.name))


def user_metric(name: str, fn: Callable[[Any, Batch], Any], sums: Sums = of_jax) -> Metric:
    """Wrap a function of the user's: `(outputs, batch) -> [B]` values, one a row; the metric is their mean.

    Raises:
        ConfigError: for a function that is not called so; when traced, for a result without one value a row.
        StepError: when traced, for a function that needs the value of an array; it names the line.
    """
    _check_called(name, fn)
    return Metric(name, 2, None, lambda outputs, batch: sums.rows(name, fn, outputs, batch), _ratio)


def _check_called(name: str, fn: Callable[..., Any]) -> None:
    """A metric of the user's is called with (outputs, batch), and not with (truth, prediction) as elsewhere."""
    told = f"metric '{name}' is called as fn(outputs, batch), the targets being batch['y'], and gives one value a row"
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in, which does not tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{told}; this function does not take that: {error}") from None
    check_order(fn, told)


def _registered(spec: MetricSpec, definition: MetricDefinition, loss: Loss, sums: Sums) -> Metric:
    """The metric of a registration, as the loss reads the outputs."""
    where = f"metric '{definition.id}' version {definition.version}"
    task: Task = loss.task if loss.task != "own" else "values" if definition.input == "continuous" else "classes"
    if (task == "values") != (definition.input == "continuous"):
        has = "continuous" if task == "values" else "labels, probabilities"
        raise ConfigError(f"{where} compares '{definition.input}', loss '{loss.name}' gives {has}")
    try:
        if definition.check_config is not None:
            definition.check_config(spec.config)
        made = definition.factory(spec.config)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where} does not take config {dict(spec.config)}: {error}") from error
    if missing := [name for name in ("size", "update", "compute") if not hasattr(made, name)]:
        raise ConfigError(f"the factory of {where} made a {type(made).__name__} without {missing[0]}")
    read = sums.reader(task, loss.ignore_index)

    def update(outputs: Any, batch: Batch) -> Any:
        return sums.registered(made, definition.input, task, read(outputs, batch))

    return Metric(spec.key, int(made.size), definition.mode, update, made.compute)


def _users(spec: Any, kind: str) -> Metric:
    return Metric(getattr(spec, "key", kind), int(spec.size), getattr(spec, "mode", None), spec.update, spec.compute)


def _built_in(
    kind: str, spec: Any, task: Task, n_outputs: int, sums: Sums, read: Callable[[Any, Batch], Any]
) -> Metric:
    mode = METRIC_MODES[kind]
    if kind == "accuracy":
        return Metric(kind, 2, mode, lambda o, b: sums.hits(task, read(o, b)), _ratio)
    if kind == "top_k":
        k = int(getattr(spec, "k", 5))
        if not 1 <= k <= n_outputs:
            raise ConfigError(f"top_k has k={k}, the model has {n_outputs} classes; write a k from 1 to {n_outputs}")
        return Metric(f"top_{k}", 2, mode, lambda o, b: sums.top_k(k, read(o, b)), _ratio)
    if kind in ("precision", "recall", "f1"):
        average, empty = getattr(spec, "average", "macro"), float(getattr(spec, "zero_division", 0.0))
        return _confusion(kind, average, empty, task, n_outputs, sums, read)
    if kind in ("mse", "mae"):
        return Metric(kind, 2, mode, lambda o, b: sums.error(kind, read(o, b)), _ratio)
    if kind == "brier":
        return Metric(kind, 2, mode, lambda o, b: sums.brier(task, read(o, b)), _ratio)
    if kind == "nll":
        return Metric(kind, 2, mode, lambda o, b: sums.nll(task, read(o, b), math.log(NLL_FLOOR)), _ratio)
    return Metric(kind, 2, mode, lambda o, b: sums.nll(task, read(o, b), -math.inf), _exp_ratio)


def _guess_task(kind: str, n_outputs: int) -> Task:
    if kind in ("mse", "mae"):
        return "values"
    return "bernoulli" if n_outputs == 1 else "classes"


def _ratio(sums: np.ndarray) -> float:
    return float(sums[0] / sums[1]) if sums[1] > 0 else float("nan")


def _ratios(sums: np.ndarray) -> np.ndarray:
    return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


def _exp_ratio(sums: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(_ratio(sums))))


def _confusion(
    kind: str,
    average: str,
    zero_division: float,
    task: Task,
    n_outputs: int,
    sums: Sums,
    read: Callable[[Any, Batch], Any],
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

    def update(outputs: Any, batch: Batch) -> Any:
        return sums.confusion(task, read(outputs, batch), n_labels, multilabel)

    def rows(counts: np.ndarray) -> np.ndarray:
        hit, wrong, missed = np.moveaxis(np.asarray(counts, np.float64).reshape(-1, 3, n_labels), 1, 0)
        seen = (hit + wrong + missed > 0) | multilabel
        if average == "micro":
            hit, wrong, missed = (each.sum(axis=1, keepdims=True) for each in (hit, wrong, missed))  # counts: exact
            seen = seen.any(axis=1, keepdims=True)
        top = 2 * hit if kind == "f1" else hit
        bottom = {"precision": hit + wrong, "recall": hit + missed, "f1": 2 * hit + wrong + missed}[kind]
        each = np.divide(top, bottom, out=np.full_like(top, zero_division), where=bottom > 0)
        total = np.add.accumulate(np.where(seen, each, 0.0), axis=1)[:, -1]  # one label after the other, however many
        return _ratios(np.stack([total, seen.sum(axis=1)], axis=1))

    name, compute = kind if average == "macro" else f"{kind}_micro", lambda counts: float(rows(counts)[0])
    return Metric(name, 3 * n_labels, METRIC_MODES[kind], update, compute, rows)
