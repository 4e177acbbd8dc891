"""Evaluation: sums over rows added up on the device, each row once, read in one transfer at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.objectives.terms import check_terms
from nnx_jax.step import batches, rng
from nnx_jax.step.loops import Fetch, once, run_rows
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
    """

    terms: Mapping[str, tuple[float, float | None, float]]
    metrics: Mapping[str, np.ndarray]
    rows: int
    invalid: int

    @property
    def loss(self) -> float:
        """Weighted sum of the terms' quotients; NaN when no term had a valid target."""
        used = [(num, den, weight) for num, den, weight in self.terms.values() if den is None or den > 0]
        return sum(weight * (num if den is None else num / den) for num, den, weight in used) if used else float("nan")


class Evaluator:
    """Compiled scoring of batches. It reads weights and changes nothing: no mode, no random stream, no statistics.

    Sums are kept as a float32 pair (sum, what its rounding lost) and put together in float64 on the host, so that the
    millionth row counts as much as the first.

    Attributes:
        watch: compile counts of "evaluate" and "evaluate_resident".
    """

    def __init__(
        self, forward: Forward, terms: Terms, metrics: Sequence[Any], invalid: Callable[[Any, Any], Any] | None
    ) -> None:
        self._forward, self._terms, self._metrics, self._invalid = forward, terms, tuple(metrics), invalid
        self._names: tuple[tuple[str, bool, float], ...] = ()
        self.watch = CompileWatch(warn=False)  # every split may have a shape of its own
        self._key = rng.stream_key(rng.run_key(0), rng.EVALUATION)
        self._one = self.watch.jit("evaluate", self._add, ["params", "model_state", "sums", "batch"], donate_argnums=2)
        self._many = self.watch.jit(
            "evaluate_resident", self._loop, ["params", "model_state", "columns", "table", "count"]
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
        """float32 [2 * terms + metrics + 2]: numerators, denominators, metric sums, rows, invalid labels."""
        outputs, _ = self._forward(params, model_state, batch, self._key, False)
        terms = check_terms(self._terms(outputs, batch))
        self._names = tuple((term.name, term.denominator is None, float(term.weight)) for term in terms)
        num = [jnp.asarray(term.scaled, jnp.float32)[None] for term in terms]
        den = [jnp.asarray(0 if t.denominator is None else t.denominator, jnp.float32)[None] for t in terms]
        sums = [jnp.asarray(metric.update(outputs, batch), jnp.float32).reshape(-1) for metric in self._metrics]
        rows = jnp.sum(batch["mask"] > 0, dtype=jnp.float32)[None]
        bad = jnp.float32(0) if self._invalid is None else jnp.asarray(self._invalid(outputs, batch), jnp.float32)
        return jnp.concatenate([*num, *den, *sums, rows, bad[None]])

    def _add(self, params: Any, model_state: Any, sums: Any, batch: Any) -> Any:
        return self._rows(params, model_state, sums, lambda row: batch, jnp.int32(1))

    def _loop(self, params: Any, model_state: Any, columns: Any, table: Any, count: Any) -> Any:
        fetch = lambda row: batches.gather(columns, jax.lax.dynamic_index_in_dim(table, row, keepdims=False))  # noqa: E731
        shape = jax.eval_shape(self._vector, params, model_state, fetch(jnp.int32(0))).shape
        return self._rows(params, model_state, jnp.zeros((2, *shape), jnp.float32), fetch, count)

    def _rows(self, params: Any, model_state: Any, sums: Any, fetch: Fetch, count: Any) -> Any:
        def add(sums: Any, batch: Any) -> Any:
            return _add_pair(sums, self._vector(params, model_state, batch))

        # A mask is never negative, but XLA cannot know.
        negative = jnp.any(fetch(jnp.int32(0))["mask"] < 0).astype(jnp.int32)
        return run_rows(add, fetch, jnp.int32(0), sums, count, once(negative))[1]

    def _zeros(self, params: Mapping[str, Any], model_state: Any, batch: Any) -> jax.Array:
        if not self._size:
            self._size = jax.eval_shape(self._vector, dict(params), model_state, dict(batch)).shape[0]
        return jnp.zeros((2, self._size), jnp.float32)

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
        return EvalSums(terms, metrics, round(sums[-2]), round(sums[-1]))


def build_eval(
    forward: Forward, terms: Terms, metrics: Sequence[Any] = (), *, invalid: Callable[[Any, Any], Any] | None = None
) -> Evaluator:
    """An evaluator for the same parts as `build_step`; compiled at its first use, once for each batch shape."""
    return Evaluator(forward, terms, metrics, getattr(terms, "invalid_labels", None) if invalid is None else invalid)


def _add_pair(pair: jax.Array, values: jax.Array) -> jax.Array:
    """Add to (sum, lost part) by Neumaier's rule: the rounding error of each addition is kept beside the sum."""
    total, lost = pair[0], pair[1]
    new = total + values
    bigger = jnp.abs(total) >= jnp.abs(values)
    error = jnp.where(bigger, (total - new) + values, (values - new) + total)
    return jnp.stack([new, lost + jnp.where(jnp.isfinite(new), error, 0.0)])  # an infinite sum stays infinite
