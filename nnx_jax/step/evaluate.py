"""Evaluation: sums over rows added up on the device, each row once, read in one transfer at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.precision import sum_dtype
from nnx_jax.objectives.terms import check_terms
from nnx_jax.step import batches, rng
from nnx_jax.step.loops import Fetch, once, run_rows
from nnx_jax.step.lost import lost_rows, spans_processes
from nnx_jax.step.places import gathering, put
from nnx_jax.step.shards import Shards
from nnx_jax.step.watch import CompileWatch
from nnx_jax.step.window import Forward, Terms

_MAX_IN_FLIGHT = 8
"""Batches handed to the device before the host waits for it: bounds the memory that waiting batches hold."""


@dataclass(frozen=True)
class EvalSums:
    """What one pass over a split added up to, as numpy values.

    Attributes:
        terms: (numerator, denominator or None for an additive term, weight) by loss term.
        metrics: float64 [size] sums by metric.
        rows: real rows scored.
        invalid: impossible labels met.
        lost: among several processes, devices with rows that a process could not read, counted once a batch or more.
    """

    terms: Mapping[str, tuple[float, float | None, float]]
    metrics: Mapping[str, np.ndarray]
    rows: int
    invalid: int
    lost: int = 0

    @property
    def loss(self) -> float:
        """Weighted sum of the terms' quotients; NaN when no term had a valid target."""
        used = [(num, den, weight) for num, den, weight in self.terms.values() if den is None or den > 0]
        return sum(weight * (num if den is None else num / den) for num, den, weight in used) if used else float("nan")


class Evaluator:
    """Compiled scoring of batches. It reads weights and changes nothing: no mode, no random stream, no statistics.

    Sums are kept as a pair (sum, what its rounding lost), float32 or as wide as the weights, and put together in
    float64 on the host, so that the millionth row counts as much as the first.

    Attributes:
        watch: compile counts of "evaluate" and "evaluate_resident".
    """

    def __init__(
        self,
        forward: Forward,
        terms: Terms,
        metrics: Sequence[Any],
        invalid: Callable[[Any, Any], Any] | None,
        sharding: Any = None,
        shards: Shards | None = None,
    ) -> None:
        self._forward, self._terms, self._metrics, self._invalid = forward, terms, tuple(metrics), invalid
        self._shards = shards
        self._names: tuple[tuple[str, bool, float], ...] = ()
        self.watch = CompileWatch(warn=False)  # every split may have a shape of its own
        self._key = rng.stream_key(rng.run_key(0), rng.EVALUATION)
        self._whole = None if sharding is None else sharding.whole
        self._spans = sharding if spans_processes(sharding) else None
        out = {} if sharding is None else {"out_shardings": self._whole}
        self._one = self.watch.jit(
            "evaluate", self._add, ["params", "model_state", "sums", "batch"], donate_argnums=2, **out
        )
        self._many = self.watch.jit(
            "evaluate_resident", self._loop, ["params", "model_state", "columns", "table", "count"], **out
        )
        self._size = 0

    def host(self, params: Mapping[str, Any], model_state: Any, source: Any) -> EvalSums:
        """Score an iterable of host batches of one shape (dicts of arrays with "mask" float32 [B], 0 on padding)."""
        sums = None
        for number, batch in enumerate(source):
            if sums is None:
                sums = self._zeros(params, model_state, batch)
            sums = self._one(dict(params), model_state, sums, dict(batch))
            if number % _MAX_IN_FLIGHT == 0:
                sums.block_until_ready()
        return self._result(None if sums is None else np.asarray(sums))

    def resident(self, params: Mapping[str, Any], model_state: Any, columns: Any, table: Any) -> EvalSums:
        """Score the rows of a device table (int32 [batches, B], -1 for padding) in one call."""
        sums = self._many(dict(params), model_state, dict(columns), table, np.int32(table.shape[0]))
        return self._result(np.asarray(sums))

    def _vector(self, params: Any, model_state: Any, batch: Any) -> jax.Array:
        """[2 * terms + metrics + 2]: numerators, denominators, metric sums, rows, invalid labels.

        Over the devices of several processes one more: devices with rows that a process could not read.
        """
        if self._shards is None:
            sums = self._sums((params, model_state), batch)
        else:
            zero = jnp.any(batch["mask"] < 0).astype(jnp.int32)  # a mask is never negative, but XLA cannot know
            sums = self._shards.everywhere(self._sums, (params, model_state), batch, zero)
        if self._spans is None:
            return sums
        return jnp.concatenate([sums, lost_rows(batch["mask"], self._spans).astype(sums.dtype)[None]])

    def _sums(self, given: Any, batch: Any, shard: Any = 0) -> jax.Array:
        params, model_state = given
        outputs, _ = self._forward(params, model_state, batch, self._key, False)
        terms, dtype = check_terms(self._terms(outputs, batch)), _dtype(params)
        self._names = tuple((term.name, term.denominator is None, float(term.weight)) for term in terms)
        num = [jnp.asarray(term.scaled, dtype)[None] for term in terms]
        den = [jnp.asarray(0 if t.denominator is None else t.denominator, dtype)[None] for t in terms]
        sums = [jnp.asarray(metric.update(outputs, batch), dtype).reshape(-1) for metric in self._metrics]
        rows = jnp.sum(batch["mask"] > 0, dtype=dtype)[None]
        bad = jnp.asarray(0 if self._invalid is None else self._invalid(outputs, batch), dtype)
        return jnp.concatenate([*num, *den, *sums, rows, bad[None]])

    def _add(self, params: Any, model_state: Any, sums: Any, batch: Any) -> Any:
        return self._rows(params, model_state, sums, lambda row: batch, jnp.int32(1))

    def _loop(self, params: Any, model_state: Any, columns: Any, table: Any, count: Any) -> Any:
        fetch = lambda row: batches.gather(columns, jax.lax.dynamic_index_in_dim(table, row, keepdims=False))  # noqa: E731
        shape = jax.eval_shape(self._vector, params, model_state, fetch(jnp.int32(0))).shape
        return self._rows(params, model_state, jnp.zeros((2, *shape), _dtype(params)), fetch, count)

    def _rows(self, params: Any, model_state: Any, sums: Any, fetch: Fetch, count: Any) -> Any:
        def add(sums: Any, batch: Any) -> Any:
            return _add_pair(sums, self._vector(params, model_state, batch))

        # A mask is never negative, but XLA cannot know.
        negative = jnp.any(fetch(jnp.int32(0))["mask"] < 0).astype(jnp.int32)
        return run_rows(add, fetch, jnp.int32(0), sums, count, once(negative))[1]

    def _zeros(self, params: Mapping[str, Any], model_state: Any, batch: Any) -> jax.Array:
        if not self._size:
            self._size = jax.eval_shape(self._vector, dict(params), model_state, dict(batch)).shape[0]
        zeros = jnp.zeros((2, self._size), _dtype(params))
        return zeros if self._whole is None else put(zeros, self._whole)

    def _result(self, pair: np.ndarray | None) -> EvalSums:
        if pair is None:
            return EvalSums({}, {metric.name: np.zeros(metric.size) for metric in self._metrics}, 0, 0)
        sums = pair.astype(np.float64).sum(axis=0)
        n = len(self._names)
        terms = {
            name: (float(sums[i]), None if additive else float(sums[n + i]), weight)
            for i, (name, additive, weight) in enumerate(self._names)
        }
        metrics, at = {}, 2 * n
        for metric in self._metrics:
            metrics[metric.name] = sums[at : at + metric.size]
            at += metric.size
        return EvalSums(terms, metrics, round(sums[at]), round(sums[at + 1]), round(sums[at + 2 :].sum()))


def build_eval(
    forward: Forward,
    terms: Terms,
    metrics: Sequence[Any] = (),
    *,
    invalid: Callable[[Any, Any], Any] | None = None,
    sharding: Any = None,
    shards: Shards | None = None,
) -> Evaluator:
    """An evaluator for the same parts as `build_step`; compiled at its first use, once for each batch shape."""
    invalid = getattr(terms, "invalid_labels", None) if invalid is None else invalid
    forward = forward if shards is not None else gathering(forward, sharding)
    return Evaluator(forward, terms, metrics, invalid, sharding, shards)


def _dtype(params: Mapping[str, Any]) -> np.dtype[Any]:
    return sum_dtype(*(value.dtype for value in params.values()))


def _add_pair(pair: jax.Array, values: jax.Array) -> jax.Array:
    """Add to (sum, lost part) by Neumaier's rule: the rounding error of each addition is kept beside the sum."""
    total, lost = pair[0], pair[1]
    new = total + values
    bigger = jnp.abs(total) >= jnp.abs(values)
    error = jnp.where(bigger, (total - new) + values, (values - new) + total)
    return jnp.stack([new, lost + jnp.where(jnp.isfinite(new), error, 0.0)])  # an infinite sum stays infinite
