"""Scores of a feed: sums over every row once, divided at the end, for training's validation and for `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from nnx_jax.core.errors import DataError, HaltedElsewhere
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.engines.placement import Placement, full_rows
from nnx_jax.engines.reading import Reader, Ready
from nnx_jax.loop.engine import Evaluation
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.metrics import Metric, build_metric
from nnx_jax.params.model import NNModelParams
from nnx_jax.step.evaluate import Evaluator, build_eval

RESIDENT_BYTES = 256 * 1024**2
"""Columns up to this size stay on the device between two scorings."""


class Scorer:
    """The evaluation program of one module, its loss and metrics; compiled once per batch shape."""

    def __init__(
        self,
        forward: Any,
        terms: Any,
        metrics: Sequence[Metric],
        *,
        keep: bool = True,
        placement: Placement | None = None,
        shards: Any = None,
    ) -> None:
        """With `keep`, what was placed on the device stays there for the next scoring of the same feed.

        `shards`: of a canonical reduction; None for the fast one.
        """
        self.metrics, self._keep = tuple(metrics), keep
        self._place_at = placement or Placement()
        self._build = partial(build_eval, forward, terms, metrics, sharding=self._place_at.sharding)
        self._evaluator, self._shards = self._build(shards=shards), shards
        self._cut: dict[int | None, Evaluator] = {}
        self._placed: dict[int, tuple[Any, tuple[Any, Any] | None]] = {}

    def score(self, params: Mapping[str, Any], model_state: Mapping[str, Any], feed: Any) -> Evaluation:
        """Score every row of the feed once with these weights; one read from the device.

        Raises:
            DataError: no rows, or labels that are no class of the model.
            HaltedElsewhere: another process could not read its rows; where that happens it raises its own error.
        """
        placed, reader, evaluator = self._place(feed), Reader(self._place_at.of(feed), feed), self._evaluator_of(feed)
        if placed is not None:
            sums = evaluator.resident(params, model_state, *placed)
        elif reader.place.shared:
            sums = evaluator.host(params, model_state, _in_step(reader))
        else:
            sums = evaluator.host(params, model_state, map(self._place_at.batch, feed.batches(0)))
        if sums.lost:
            told = "one of the processes could not read its rows of the validation; nothing of it counts on any of them"
            raise reader.failure or HaltedElsewhere(told)
        if sums.rows == 0:
            raise DataError("there are no rows to evaluate; give at least one")
        if sums.invalid:
            raise DataError(f"{sums.invalid} labels of the evaluated rows are no class of the model; correct them")
        values = {metric.name: float(metric.compute(sums.metrics[metric.name])) for metric in self.metrics}
        return Evaluation({"loss": sums.loss, **values}, sums.rows)

    def _evaluator_of(self, feed: Any) -> Evaluator:
        """The program for this feed's batches: one for all, but where shards are cut from batches of other sizes."""
        if self._shards is None:
            return self._evaluator
        rows = full_rows(feed, self._place_at.sharding)
        if rows not in self._cut:
            self._cut[rows] = self._build(shards=self._shards.of_rows(rows, pads=getattr(feed, "pad", True)))
        return self._cut[rows]

    def _place(self, feed: Any) -> tuple[Any, Any] | None:
        """The feed's columns and row table on the device, placed once; None for what is too large or not in memory."""
        if id(feed) not in self._placed:
            columns = feed.arrays()
            placed = None
            if columns is not None and sum(column.nbytes for column in columns.values()) <= RESIDENT_BYTES:
                placed = self._place_at.columns(columns), self._place_at.table(feed.order(0))
            if not self._keep:
                return placed
            self._placed[id(feed)] = (feed, placed)  # the feed is kept, so that its id stays its own
        return self._placed[id(feed)][1]


def _in_step(reader: Reader) -> Iterator[Mapping[str, Any]]:
    """One pass of a feed, as many batches in every process: where rows are fewer, the last hold rows of weight 0."""
    feed, place = reader.feed, reader.place
    own, all_ = feed.n_batches, getattr(feed, "partition", None) or {}
    for index in range(all_.get("batches", own)):
        ready = reader.read(0, index) if index < own else Ready(*place.lost(feed, index, mask=0.0))
        yield place.batch(ready.batch, ready.rows)


class ModelScorer:
    """Scores of one module with one loss and its metrics; compiled once a topology, weights taken at every use."""

    def __init__(self, module: nnx.Module, loss: Loss, params: NNModelParams) -> None:
        self.module, self.loss, self.params = module, loss, params
        self._scorer: Scorer | None = None
        self._kind: Any = None

    def score(self, feed: Any) -> dict[str, float]:
        """Return loss and metrics over a feed; the module's modes are not touched."""
        pure = PureModule(self.module, compute_dtype=self.params.precision)
        named = {**pure.params, **pure.frozen}
        kind = nnx.graphdef(self.module)
        if self._scorer is None or kind != self._kind:  # changed in place, as by a transform
            self._kind = kind
            batch = {n: jax.ShapeDtypeStruct(column.shape, column.dtype) for n, column in feed.signature().items()}
            forward = lambda p, s, b: pure.forward(p, s, b, None, False)[0]  # noqa: E731
            outputs = jax.eval_shape(forward, named, pure.model_state, batch)
            metrics = [build_metric(metric, width(outputs), loss=self.loss) for metric in self.params.metrics]
            self._scorer = Scorer(pure.forward, self.loss, metrics, keep=False)
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


def loss_terms(
    sums: Sequence[float], names: Sequence[str], weights: Sequence[float], additive: Sequence[bool]
) -> tuple[float, dict[str, float]]:
    """`loss_value`, and every term divided and not weighted by name; NaN for one without a valid target."""
    half = len(sums) // 2
    parts = zip(names, additive, sums[:half], sums[half:], strict=True)
    terms = {n: top if plain else top / bottom if bottom else math.nan for n, plain, top, bottom in parts}
    return loss_value(sums, weights, additive), terms
