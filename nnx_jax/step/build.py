"""Build the compiled step: accumulate, apply, and many windows per call, over one flat list of donated leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import StepError
from nnx_jax.step import records, rng, state
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import StepPrograms
from nnx_jax.step.records import RecordLayout
from nnx_jax.step.state import TrainState, describe_leaf, leaf_paths, strong
from nnx_jax.step.window import (
    Forward,
    Plan,
    Sums,
    Terms,
    clip_scale,
    first_bad,
    only_if,
    plan_terms,
    select,
    square_sums,
    stack_terms,
    terms_at,
)

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

    def measure(self, train: TrainState, batch: Any) -> tuple[Sums, Any, jax.Array]:
        """Forward and backward of one microbatch: its sums, the new model_state, the number of invalid labels."""
        key = rng.stream_key(train.rng, rng.DROPOUT, train.counters[state.BATCH])

        def scalars(params: dict[str, Any]) -> tuple[jax.Array, Any]:
            outputs, model_state = self.forward({**train.frozen, **params}, train.model_state, batch, key, True)
            at = train.counters
            terms = terms_at(self.terms, at[state.STEP], at[state.EPOCH])(outputs, batch)
            num, den = stack_terms(terms, self.plan)
            seen = jax.lax.stop_gradient(outputs)
            sums = [jnp.asarray(metric.update(seen, batch), jnp.float32).reshape(-1) for metric in self.metrics]
            bad = jnp.int32(0) if self.invalid is None else jnp.asarray(self.invalid(seen, batch), jnp.int32)
            aux = (num, den, jnp.concatenate([jnp.zeros(0), *sums]), model_state, bad)
            return self.plan.scalars(num, den), jax.lax.stop_gradient(aux)

        values, pull, (num, den, metrics, model_state, invalid) = jax.vjp(scalars, train.params, has_aux=True)
        one_hot = jnp.eye(len(self.plan.groups), dtype=values.dtype)
        grads = tuple(float32(pull(one_hot[group])[0]) for group in range(len(self.plan.groups)))
        term = first_bad(num + den)
        micro = jnp.where(term >= 0, train.counters[state.BATCH], -1)
        return Sums(grads, num, den, metrics, jnp.stack([micro, term, jnp.int32(-1)])), model_state, invalid

    def micro(self, carry: State, batch: Any) -> State:
        """Accumulate one microbatch of a window of several; holds no optimizer."""
        train, rows, status = carry
        seen, model_state, invalid = self.measure(train, batch)
        window: Sums = train.accum["window"]
        grads = jax.tree.map(jnp.add, window.grads, seen.grads)
        leaf = first_bad(jnp.sum(jnp.stack([square_sums(tree) for tree in grads]), axis=0))
        here = jnp.stack([train.counters[state.BATCH], seen.fault[1], leaf])
        bad = (seen.fault[1] >= 0) | (leaf >= 0)
        fault = jnp.where((window.fault[0] < 0) & bad, here, window.fault)
        added = Sums(grads, window.num + seen.num, window.den + seen.den, window.metrics + seen.metrics, fault)
        live = status[1] == 0
        counters = state.tick(train.counters, batch=live, micro=live, epoch_batch=live)
        halt = jnp.where(live & (invalid > 0), records.HALT_INVALID, status[1])
        if self.layout.every == "batch":
            flags = jnp.where(bad, records.BAD, 0) + jnp.where(live, 0, records.HALTED)
            zero = jnp.float32(0)
            ints = [flags, halt, invalid, *fault, jnp.int32(-1)]
            row = self.layout.row(counters, ints, zero, zero, seen.flat, added.flat)
            rows = records.write(rows, status[0], row)
            status = jnp.stack([status[0] + 1, halt])
        else:
            status = jnp.stack([status[0], halt])
        accum = {**train.accum, "window": added, "last": seen.flat, "invalid": train.accum["invalid"] + invalid}
        model_state = select(live, model_state, train.model_state)
        return replace(train, accum=accum, model_state=model_state, counters=counters), rows, status

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
        clean = open_window(self.plan, self.layout, train.params, train.model_state)
        return replace(train, accum=clean), rows, status

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
    ) -> State:
        """unscale -> divide -> finite check -> clip -> step, kept only if nothing speaks against it; then the row."""
        squares, norm = self.plan.measure(window.grads, window.den)
        leaf = jnp.where(window.fault[2] >= 0, window.fault[2], first_bad(squares))
        bad = (window.fault[0] >= 0) | ~jnp.isfinite(norm) if self.nonfinite != "ignore" else jnp.bool_(False)
        micro = jnp.where(window.fault[0] >= 0, window.fault[0], train.counters[state.BATCH] - 1)
        fault = jnp.where(bad, jnp.stack([micro, window.fault[1], leaf]), -1)
        empty = self.plan.is_empty(window.den) & ~bad
        keep = (halt == 0) & ~bad & ~empty

        def update() -> tuple[Any, Any, Any]:
            grads, scale = self.plan.combine(window.grads, window.den), clip_scale(norm, self.clip_norm)
            clipped = grads if scale is None else jax.tree.map(lambda g: g * scale, grads)
            params, opt_state = self.optimizer.update(clipped, train.opt_state, train.params)
            params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, train.params)
            return strong((params, opt_state, jnp.asarray(getattr(opt_state, "rate", 0.0), jnp.float32)))

        params, opt_state, rate = only_if(keep, update, (train.params, train.opt_state, jnp.float32(0)))

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
            model_state=select(keep, model_state, entry),
            counters=counters,
        )
        return closed, records.write(rows, cursor, row), jnp.stack([cursor + 1, halt])


def open_window(plan: Plan, layout: RecordLayout, params: Any, model_state: Any) -> dict[str, Any]:
    """An empty accumulator: zero sums, and the model_state to go back to if the window is dropped."""
    zeros = tuple(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) for _ in plan.groups)
    n, m = len(plan.terms), layout.n_sums - 2 * len(plan.terms)
    window = Sums(zeros, jnp.zeros(n), jnp.zeros(n), jnp.zeros(m), jnp.full(3, -1, jnp.int32))
    return {"window": window, "entry": model_state, "last": jnp.zeros(layout.n_sums), "invalid": jnp.int32(0)}


def build_step(
    forward: Forward,
    terms: Terms,
    optimizer: Any,
    *,
    params: Mapping[str, Any],
    model_state: Any,
    signature: Mapping[str, tuple[tuple[int, ...], Any]],
    frozen: Mapping[str, Any] | None = None,
    slots: Mapping[str, Any] | None = None,
    metrics: Sequence[Any] = (),
    invalid: Callable[[Any, Any], Any] | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    nonfinite: str = "fail",
    max_consecutive: int = 10,
    record_every: str = "batch",
    capacity: int = 4096,
    hooks: HookPlan | None = None,
    executor: str = "compiled",
) -> StepPrograms:
    """Check that the parts fit and return the programs; nothing is compiled before its first call.

    Args:
        forward: `(params, model_state, batch, key, train) -> (outputs, new model_state)`; gets trainable and frozen
            parameters in one dict.
        terms: `(outputs, batch) -> tuple[LossTerm, ...]`, see `objectives.terms`.
        optimizer: `init(params) -> OptState`, `update(grads, opt_state, params) -> (new params, new OptState)`; gets
            float32 gradients, already divided and clipped.
        params, model_state, frozen, slots: the arrays, or anything with their shapes and dtypes.
        signature: shape and dtype of every batch column by name, with "mask" (float32 [B]) among them.
        metrics: objects with `name`, `size` and `update(outputs, batch) -> float32 [size]`.
        invalid: `(outputs, batch) -> int32`, count of impossible labels; any stops the run. Default: the loss's own
            `invalid_labels`, if it has one.
        accumulate: microbatches in a full window.
        clip_norm: largest global gradient norm; None or inf for no clipping.
        nonfinite: "fail" stops at the first non-finite window, "skip" drops such windows, "ignore" applies them.
        max_consecutive: under "skip", how many in a row are dropped before the run stops.
        record_every: "batch" writes a record row for every microbatch, "update" one for every window.
        capacity: rows the device keeps between two `read_records`.
        hooks: what takes part in the step; their slots are made here.
        executor: "compiled", or "staged" and "eager", which run Python with concrete values; see `step/concrete.py`.

    Raises:
        StepError: an option is out of range, or forward, loss or optimizer change the shape, dtype or structure of
            what they update.
    """
    _check_options(accumulate, clip_norm, nonfinite, max_consecutive, record_every, capacity)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in signature.items()}
    given = jax.tree.map(_spec, (dict(params), dict(frozen or {}), model_state, dict(slots or {})))
    key = jax.eval_shape(partial(rng.stream_key, rng.run_key(0), rng.DROPOUT))
    outputs, new_model_state = jax.eval_shape(
        lambda p, f, m, b, k: forward({**f, **p}, m, b, k, True), given[0], given[1], given[2], batch, key
    )
    _check_same("model_state", given[2], new_model_state, "the forward pass")
    plan = _plan(terms, outputs, batch, accumulate, hooks is not None and hooks.adds_means)
    layout = RecordLayout(
        plan.terms, plan.weights, plan.additive, tuple((m.name, m.size) for m in metrics), capacity, record_every
    )
    options: dict[str, Any] = {
        "metrics": metrics,
        "invalid": getattr(terms, "invalid_labels", None) if invalid is None else invalid,
        "accumulate": accumulate,
        "clip_norm": clip_norm,
        "nonfinite": nonfinite,
        "max_consecutive": max_consecutive,
    }
    if executor != "compiled":
        hooks = dataclasses.replace(hooks or HookPlan(), concrete=True)
    body: StepBody = StepBody(forward, terms, optimizer, plan, layout, **options)
    if hooks is not None and not hooks.empty:
        from nnx_jax.step.probe import hooked_body

        body = hooked_body(hooks, given, batch, forward, terms, optimizer, plan, layout, options)
    grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), given[0])
    opt_state = jax.eval_shape(optimizer.init, given[0])
    new_params, new_opt_state = jax.eval_shape(optimizer.update, grads, opt_state, given[0])
    _check_same("opt_state", opt_state, new_opt_state, "the optimizer")
    _check_same("params", given[0], new_params, "the optimizer", dtypes=False)

    def init(parts: Any, key_data: Any) -> State:
        params, frozen, model_state, slots = parts
        slots = {**(hooks.init(params, model_state) if hooks is not None else {}), **slots}
        counters = jnp.zeros(len(state.COUNTERS), jnp.int32)
        accum = body.accumulator(params, model_state)
        train = TrainState(params, frozen, model_state, optimizer.init(params), accum, slots, key_data, counters)
        return strong((train, jnp.zeros((capacity, layout.width), jnp.int32), jnp.zeros(2, jnp.int32)))

    if executor != "compiled":
        from nnx_jax.step.concrete import ConcretePrograms

        return ConcretePrograms(body, init, given, compiled=executor == "staged")  # type: ignore[arg-type]
    return StepPrograms(body, init, given)


def _plan(terms: Terms, outputs: Any, batch: Any, accumulate: int, means: bool) -> Plan:
    found: list[Plan] = []

    def look(outputs: Any, batch: Any) -> None:
        found.append(plan_terms(terms(outputs, batch), accumulate, means=means))

    jax.eval_shape(look, outputs, batch)
    return found[0]


def _check_options(
    accumulate: int, clip_norm: float | None, nonfinite: str, max_consecutive: int, record_every: str, capacity: int
) -> None:
    if accumulate < 1:
        raise StepError(f"accumulate is {accumulate}; a window has at least one microbatch")
    if clip_norm is not None and not clip_norm > 0:
        raise StepError(f"clip_norm is {clip_norm}; give a norm above 0, or None for no clipping")
    if nonfinite not in ("fail", "skip", "ignore"):
        raise StepError(f"nonfinite is {nonfinite!r}; write 'fail', 'skip' or 'ignore'")
    if max_consecutive < 0:
        raise StepError(f"max_consecutive is {max_consecutive}; it counts windows, from 0")
    if record_every not in ("batch", "update"):
        raise StepError(f"record_every is {record_every!r}; write 'batch' or 'update'")
    if capacity < 1:
        raise StepError(f"capacity is {capacity}; the ring holds at least one row")


def _check_same(what: str, before: Any, after: Any, who: str, *, dtypes: bool = True) -> None:
    old = dict(zip(leaf_paths(before), jax.tree.leaves(before), strict=True))
    new = dict(zip(leaf_paths(after), jax.tree.leaves(after), strict=True))
    for path in [*old, *(path for path in new if path not in old)]:
        a, b = old.get(path), new.get(path)
        if a is None or b is None or a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            told = [("nothing" if leaf is None else describe_leaf(leaf)) for leaf in (a, b)]
            raise StepError(f"{who} turns {what}/{path} from {told[0]} into {told[1]}; an update keeps shape and dtype")
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise StepError(f"{who} changes the structure of {what}; an update keeps it")


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def replace(train: TrainState, **changes: Any) -> TrainState:
    fields = {name: getattr(train, name) for name in TrainState.__dataclass_fields__}
    return TrainState(**{**fields, **changes})
