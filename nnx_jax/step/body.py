"""StepBody: the traced parts of a step without hooks, from which every program is put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.optim.clip import clip_scale, square_sums
from nnx_jax.step import records, rng, state
from nnx_jax.step.gates import pick
from nnx_jax.step.records import RecordLayout
from nnx_jax.step.state import TrainState, strong
from nnx_jax.step.window import Forward, Plan, Sums, Terms, first_bad, forward_at, only_if, stack_terms, terms_at

State = tuple[TrainState, Any, Any]
"""(training state, record ring int32 [capacity, width], status int32 [2] = (rows written, halt code))."""


class StepBody:
    """The traced parts of a step. Every program is put together from `micro` and `commit`, so all give equal bits."""

    split = False
    """A window's last microbatch has a body of its own, `last`, which closes it; else `commit` does."""
    dynamic = False

    def __init__(
        self,
        forward: Forward,
        terms: Terms,
        optimizer: Any,
        plan: Plan,
        layout: RecordLayout,
        *,
        metrics: Sequence[Any],
        invalid: Callable[[Any, Any], Any] | None,
        accumulate: int,
        clip_norm: float | None,
        nonfinite: str,
        max_consecutive: int,
    ) -> None:
        self.forward, self.terms, self.optimizer = forward, terms, optimizer
        self.plan, self.layout, self.metrics, self.invalid = plan, layout, tuple(metrics), invalid
        self.accumulate, self.clip_norm = accumulate, clip_norm
        self.nonfinite = nonfinite
        self.max_consecutive = 0 if nonfinite == "fail" else max_consecutive
        self.halt_code = records.HALT_NONFINITE if nonfinite == "fail" else records.HALT_CONSECUTIVE

    def accumulator(self, params: Any, model_state: Any) -> dict[str, Any]:
        """The first `TrainState.accum`."""
        if self.accumulate == 1:
            return {}
        return open_window(self.plan, self.layout, params, jax.tree.map(jnp.copy, model_state))

    def key(self, train: TrainState) -> jax.Array:
        """The key of the forward pass."""
        return rng.stream_key(train.rng, rng.DROPOUT, train.counters[state.BATCH])

    def measure(self, train: TrainState, batch: Any) -> tuple[Sums, Any, jax.Array]:
        """Forward and backward of one microbatch: its sums, the new model_state, the number of invalid labels."""
        return self.sums(train, batch, self.key(train))

    def sums(self, train: TrainState, batch: Any, key: Any) -> tuple[Sums, Any, jax.Array]:
        """What `measure` gives, of these rows and with this noise."""

        def scalars(params: dict[str, Any]) -> tuple[jax.Array, Any]:
            with jax.named_scope("FORWARD"):
                forward = forward_at(self.forward, train.counters)
                outputs, model_state = forward({**train.frozen, **params}, train.model_state, batch, key, True)
            at = train.counters
            terms = terms_at(self.terms, at[state.STEP], at[state.EPOCH])(outputs, batch)
            num, den = stack_terms(terms, self.plan)
            seen = jax.lax.stop_gradient(outputs)
            metrics = self.plan.metrics([metric.update(seen, batch) for metric in self.metrics])
            bad = jnp.int32(0) if self.invalid is None else jnp.asarray(self.invalid(seen, batch), jnp.int32)
            aux = (num, den, metrics, model_state, bad)
            return self.plan.scalars(num, den), jax.lax.stop_gradient(aux)

        values, pull, (num, den, metrics, model_state, invalid) = jax.vjp(scalars, train.params, has_aux=True)
        one_hot = jnp.eye(len(self.plan.groups), dtype=values.dtype)
        with jax.named_scope("BACKWARD"):
            grads = tuple(self.plan.wide(pull(one_hot[group])[0]) for group in range(len(self.plan.groups)))
        term = first_bad(num + den)
        micro = jnp.where(term >= 0, train.counters[state.BATCH], -1)
        return Sums(grads, num, den, metrics, jnp.stack([micro, term, jnp.int32(-1)])), model_state, invalid

    def micro(self, carry: State, batch: Any) -> State:
        """Accumulate one microbatch of a window of several; holds no optimizer."""
        train, rows, status = carry
        seen, model_state, invalid = self.measure(train, batch)
        window, kept = self.add(train, seen)
        leaf = first_bad(jnp.sum(jnp.stack([square_sums(tree) for tree in window.grads]), axis=0))
        here = jnp.stack([train.counters[state.BATCH], seen.fault[1], leaf])
        bad = (seen.fault[1] >= 0) | (leaf >= 0)
        fault = jnp.where((window.fault[0] < 0) & bad, here, window.fault)
        added = window._replace(fault=fault)
        live = status[1] == 0
        counters = state.tick(train.counters, batch=live, micro=live, epoch_batch=live)
        halt = jnp.where(live & (invalid > 0), records.HALT_INVALID, status[1])
        if self.layout.every == "batch":
            flags = jnp.where(bad, records.BAD, 0) + jnp.where(live, 0, records.HALTED)
            zero = self.plan.zero
            ints = [flags, halt, invalid, *fault, jnp.int32(-1)]
            row = self.layout.row(counters, ints, zero, zero, seen.flat, added.flat)
            rows = records.write(rows, status[0], row)
            status = jnp.stack([status[0] + 1, halt])
        else:
            status = jnp.stack([status[0], halt])
        accum = {**train.accum, **kept, "window": added, "last": seen.flat}
        accum["invalid"] = train.accum["invalid"] + invalid
        model_state = pick(live, model_state, train.model_state)
        return replace(train, accum=accum, model_state=model_state, counters=counters), rows, status

    def add(self, train: TrainState, seen: Sums) -> tuple[Sums, dict[str, Any]]:
        """The open window with this microbatch in it, its fault as before; and what else the accumulator keeps."""
        window: Sums = train.accum["window"]
        added = jax.tree.map(jnp.add, window._replace(fault=()), seen._replace(fault=()))
        return added._replace(fault=window.fault), {}

    def last(self, carry: State, batch: Any) -> State:
        """Accumulate the last microbatch of a window and close it."""
        return self.commit(self.micro(carry, batch))

    def apply(self, carry: State, batch: Any) -> State:
        """A window of one microbatch: measured, divided and committed at once."""
        train, rows, status = carry
        seen, model_state, invalid = self.measure(train, batch)
        live = status[1] == 0
        halt = jnp.where(live & (invalid > 0), records.HALT_INVALID, status[1])
        moved = replace(train, counters=state.tick(train.counters, batch=live, epoch_batch=live))
        return self._close(moved, rows, status[0], halt, live, seen, seen.flat, model_state, train.model_state, invalid)

    def commit(self, carry: State) -> State:
        """Turn the accumulated window into an update, or drop it, and leave a clean accumulator."""
        train, rows, status = carry
        accum = train.accum
        # With a row for each microbatch, `micro` wrote this one as if the window were open; it is written again.
        cursor = status[0] - (1 if self.layout.every == "batch" else 0)
        live = (status[1] == 0) | ((status[1] == records.HALT_INVALID) & (accum["invalid"] > 0))
        own = accum["last"] if self.layout.every == "batch" else accum["window"].flat
        train, rows, status = self._close(
            train, rows, cursor, status[1], live, accum["window"], own, train.model_state, accum["entry"],
            accum["invalid"],
        )  # fmt: skip
        return replace(train, accum=self.opened(accum, train)), rows, status

    def opened(self, accum: dict[str, Any], train: TrainState) -> dict[str, Any]:
        """The accumulator of the next window, after the one that `accum` held."""
        return open_window(self.plan, self.layout, train.params, train.model_state)

    def _close(
        self,
        train: TrainState,
        rows: Any,
        cursor: Any,
        halt: Any,
        live: Any,
        window: Sums,
        own: Any,
        model_state: Any,
        entry: Any,
        invalid: Any,
        /,
    ) -> State:
        """unscale -> divide -> finite check -> clip -> step, kept only if nothing speaks against it; then the row."""
        squares, norm = self.plan.measure(window.grads, window.den)
        leaf = jnp.where(window.fault[2] >= 0, window.fault[2], first_bad(squares))
        bad = (window.fault[0] >= 0) | ~jnp.isfinite(norm) if self.nonfinite != "ignore" else jnp.bool_(False)
        micro = jnp.where(window.fault[0] >= 0, window.fault[0], train.counters[state.BATCH] - 1)
        fault = jnp.where(bad, jnp.stack([micro, window.fault[1], leaf]), -1)
        empty = self.plan.is_empty(window.den) & ~bad
        keep = (halt == 0) & ~bad & ~empty

        @jax.named_scope("OPTIMIZER_STEP")
        def update() -> tuple[Any, Any, Any]:
            grads, scale = self.plan.combine(window.grads, window.den), clip_scale(norm, self.clip_norm)
            clipped = grads if scale is None else jax.tree.map(lambda g: g * scale, grads)
            params, opt_state = self.optimizer.update(clipped, train.opt_state, train.params)
            params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, train.params)
            return strong((params, opt_state, jnp.asarray(getattr(opt_state, "rate", 0.0), self.plan.dtype)))

        params, opt_state, rate = only_if(keep, update, (train.params, train.opt_state, self.plan.zero))

        open_ = halt == 0
        before = train.counters[state.CONSECUTIVE]
        consecutive = jnp.where(keep, 0, before + (open_ & bad))
        counters = state.tick(
            train.counters,
            micro=-train.counters[state.MICRO],
            step=keep,
            epoch_step=keep,
            skipped=open_ & ~keep,
            nonfinite=open_ & bad,
            consecutive=consecutive - before,
        )
        halt = jnp.where(open_ & bad & (consecutive > self.max_consecutive), self.halt_code, halt)

        flags = records.CLOSED + jnp.where(keep, records.COMMITTED, 0) + jnp.where(empty, records.EMPTY, 0)
        flags += jnp.where(bad, records.BAD, 0) + jnp.where(live, 0, records.HALTED)
        row = self.layout.row(counters, [flags, halt, invalid, *fault, jnp.int32(-1)], rate, norm, own, window.flat)
        closed = replace(
            train,
            params=params,
            opt_state=opt_state,
            model_state=pick(keep, model_state, entry),
            counters=counters,
        )
        return closed, records.write(rows, cursor, row), jnp.stack([cursor + 1, halt])


def open_window(plan: Plan, layout: RecordLayout, params: Any, model_state: Any) -> dict[str, Any]:
    """An empty accumulator: zero sums, and the model_state to go back to if the window is dropped."""
    zeros = partial(jnp.zeros, dtype=plan.dtype)
    grads = tuple(jax.tree.map(lambda p: zeros(p.shape), params) for _ in plan.groups)
    n, m = len(plan.terms), layout.n_sums - 2 * len(plan.terms)
    window = Sums(grads, zeros(n), zeros(n), zeros(m), jnp.full(3, -1, jnp.int32))
    return {"window": window, "entry": model_state, "last": zeros(layout.n_sums), "invalid": jnp.int32(0)}


def replace(train: TrainState, **changes: Any) -> TrainState:
    fields = {name: getattr(train, name) for name in TrainState.__dataclass_fields__}
    return TrainState(**{**fields, **changes})
