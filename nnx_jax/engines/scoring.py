"""Scores of a feed: sums over every row once, divided at the end, for training's validation and for `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_jax.core.errors import DataError
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.loop.engine import Evaluation
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.metrics import Metric, build_metric
from nnx_jax.params.model import NNModelParams
from nnx_jax.step import place_columns, place_table
from nnx_jax.step.evaluate import build_eval

RESIDENT_BYTES = 256 * 1024**2
"""Columns up to this size stay on the device between two scorings."""


class Scorer:
    """The evaluation program of one module, its loss and metrics; compiled once per batch shape."""

    def __init__(self, pure: PureModule, loss: Loss, metrics: Sequence[Metric], *, keep: bool = True) -> None:
        """With `keep`, what was placed on the device stays there for the next scoring of the same feed."""
        self.metrics, self._keep = tuple(metrics), keep
        self._evaluator = build_eval(pure.forward, loss, metrics)
        self._placed: dict[int, tuple[Any, tuple[Any, Any] | None]] = {}

    def score(self, params: Mapping[str, Any], model_state: Mapping[str, Any], feed: Any) -> Evaluation:
        """Score every row of the feed once with these weights; one read from the device.

        Raises:
            DataError: no rows, or labels that are no class of the model.
        """
        placed = self._place(feed)
        if placed is not None:
            sums = self._evaluator.resident(params, model_state, *placed)
        else:
            sums = self._evaluator.host(params, model_state, feed.batches(0))
        if sums.rows == 0:
            raise DataError("there are no rows to evaluate; give at least one")
        if sums.invalid:
            raise DataError(f"{sums.invalid} labels of the evaluated rows are no class of the model; correct them")
        values = {metric.name: float(metric.compute(sums.metrics[metric.name])) for metric in self.metrics}
        return Evaluation({"loss": sums.loss, **values}, sums.rows)

    def _place(self, feed: Any) -> tuple[Any, Any] | None:
        """The feed's columns and row table on the device, placed once; None for what is too large or not in memory."""
        if id(feed) not in self._placed:
            columns = feed.arrays()
            placed = None
            if columns is not None and sum(column.nbytes for column in columns.values()) <= RESIDENT_BYTES:
                placed = place_columns(columns), place_table(feed.order(0))
            if not self._keep:
                return placed
            self._placed[id(feed)] = (feed, placed)  # the feed is kept, so that its id stays its own
        return self._placed[id(feed)][1]


class ModelScorer:
    """Scores of one module with one loss and its metrics; compiled at the first use, weights taken at every use."""

    def __init__(self, module: nnx.Module, loss: Loss, params: NNModelParams) -> None:
        self.module, self.loss, self.params = module, loss, params
        self._scorer: Scorer | None = None

    def score(self, feed: Any) -> dict[str, float]:
        """Return loss and metrics over a feed; the module's modes are not touched."""
        pure = PureModule(self.module, compute_dtype=self.params.precision)
        named = {**pure.params, **pure.frozen}
        if self._scorer is None:
            batch = {n: jax.ShapeDtypeStruct(column.shape, column.dtype) for n, column in feed.signature().items()}
            forward = lambda p, s, b: pure.forward(p, s, b, None, False)[0]  # noqa: E731
            outputs = jax.eval_shape(forward, named, pure.model_state, batch)
            metrics = [build_metric(metric, width(outputs), loss=self.loss) for metric in self.params.metrics]
            self._scorer = Scorer(pure, self.loss, metrics, keep=False)
        return dict(self._scorer.score(named, pure.model_state, feed).values)


def width(outputs: Any) -> int:
    """Size of the outputs' last axis: classes, or values per item."""
    shape = jax.tree.leaves(outputs)[0].shape
    return int(shape[-1]) if len(shape) > 1 else 1


def loss_value(sums: Sequence[float], weights: Sequence[float], additive: Sequence[bool]) -> float:
    """Terms divided, weighted and added; `sums` holds every numerator, then every denominator. NaN: nothing valid."""
    half, total, used = len(sums) // 2, 0.0, False
    for index, (weight, plain) in enumerate(zip(weights, additive, strict=True)):
        bottom = 1.0 if plain else float(sums[half + index])
        if bottom != 0:
            total, used = total + weight * float(sums[index]) / bottom, True
    return total if used else math.nan
