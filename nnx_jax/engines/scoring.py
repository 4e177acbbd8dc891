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

    def __init__(self, pure: PureModule, loss: Loss, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self._evaluator = build_eval(pure.forward, loss, metrics)
        self._placed: dict[int, tuple[Any, Any]] = {}

    def score(self, params: Mapping[str, Any], model_state: Mapping[str, Any], feed: Any) -> Evaluation:
        """Score every row of the feed once with these weights; one read from the device.

        Raises:
            DataError: no rows, or labels that are no class of the model.
        """
        columns = feed.arrays()
        if columns is not None and sum(column.nbytes for column in columns.values()) <= RESIDENT_BYTES:
            if id(feed) not in self._placed:
                self._placed[id(feed)] = place_columns(columns), place_table(feed.order(0))
            sums = self._evaluator.resident(params, model_state, *self._placed[id(feed)])
        else:
            sums = self._evaluator.host(params, model_state, feed.batches(0))
        if sums.rows == 0:
            raise DataError("there are no rows to evaluate; give at least one")
        if sums.invalid:
            raise DataError(f"{sums.invalid} labels of the evaluated rows are no class of the model; correct them")
        values = {metric.name: float(metric.compute(sums.metrics[metric.name])) for metric in self.metrics}
        return Evaluation({"loss": sums.loss, **values}, sums.rows)


def score(module: nnx.Module, loss: Loss, params: NNModelParams, feed: Any) -> dict[str, float]:
    """Return loss and metrics of a module over a feed; its modes are not touched."""
    pure = PureModule(module, compute_dtype=params.precision)
    batch = {n: jax.ShapeDtypeStruct(column.shape, column.dtype) for n, column in feed.signature().items()}
    named = {**pure.params, **pure.frozen}
    outputs = jax.eval_shape(lambda p, s, b: pure.forward(p, s, b, None, False)[0], named, pure.model_state, batch)
    metrics = [build_metric(metric, width(outputs), loss=loss) for metric in params.metrics]
    return dict(Scorer(pure, loss, metrics).score(named, pure.model_state, feed).values)


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
