"""CustomBody: a step of the user's own in the place of the built-in one, with the same state, records and programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import StepError
from nnx_jax.objectives.traced import explained
from nnx_jax.step import records, state
from nnx_jax.step.body import State, StepBody, replace
from nnx_jax.step.gates import pick
from nnx_jax.step.own import OwnStep, TrainerStepContext, TrainStepContext
from nnx_jax.step.state import TrainState, strong
from nnx_jax.step.window import Sums

UPDATES, RATES = "~updates", "~rates"
"""Columns of the records that no user sees: updates each optimizer reported, and the rates they used."""


@dataclass(frozen=True)
class Seen:
    """What one look at a step of the user's own told.

    Attributes:
        delegates: it calls `default_train_step`, which then does the update and writes the record.
        names: what it records besides the loss, in order.
        reports: it reports updates at all.
    """

    delegates: bool
    names: tuple[str, ...]
    reports: bool


def look_at(own: OwnStep, given: Any, batch: Any) -> Seen:
    """Trace a step once, without compiling it, to see what it does.

    Args:
        given: shapes of (params, frozen, model_state).
        batch: shapes of a batch's columns.

    Raises:
        StepError: it cannot be traced, or returns no record; names the line.
    """
    found: list[Seen] = []

    def look(params: Any, frozen: Any, model_state: Any, key: Any, batch: Any) -> None:
        counters = jnp.zeros(len(state.COUNTERS), jnp.int32)
        train = TrainState(params, frozen, model_state, own.optimizer.init(params), {}, {}, key, counters)
        default = lambda train: ((train,), {"loss": jnp.float32(0)})  # noqa: E731
        ctx, record = call(own, train, batch, None if own.names else default)
        delegates, given = ctx._delegated is not None, as_record(record, own)
        if delegates and (given.keys() - {"loss"} or given["loss"] is not ctx._loss):
            raise StepError(
                f"{own.called} returns another record than default_train_step, which writes it; return that one, and "
                "give what else is to be recorded as extra_metrics"
            )
        names = () if delegates else tuple(name for name in given if name not in ("loss", "count"))
        for name in names:
            as_pair(given[name], name, own)
        found.append(Seen(delegates, names, bool(ctx._reports) or delegates))

    jax.eval_shape(look, *given, jax.ShapeDtypeStruct((2,), jnp.uint32), batch)
    return found[0]


def call(own: OwnStep, train: TrainState, batch: Any, default: Any) -> tuple[Any, Any]:
    """Call the user's function with a context; return both the context and what it returned."""
    ctx = (TrainerStepContext if own.names else TrainStepContext)(own, train, batch, default)
    with own.masked(ctx.model, batch.get("mask")), explained(own.called):
        record = own.function(ctx)
    return ctx, record


def as_record(returned: Any, own: OwnStep) -> dict[str, Any]:
    """The record a step returned: a mapping with "loss", or the loss alone.

    Raises:
        StepError: something else.
    """
    if isinstance(returned, Mapping) and "loss" in returned:
        return dict(returned)
    if not isinstance(returned, Mapping) and hasattr(returned, "dtype") and jnp.shape(returned) == ():
        return {"loss": returned}
    told = f"keys {list(returned)}" if isinstance(returned, Mapping) else type(returned).__name__
    raise StepError(f"{own.called} returned {told}; return the loss, or a record such as {{'loss': loss}}")


def as_pair(value: Any, name: str, own: OwnStep) -> tuple[Any, Any]:
    """(sum, count) of a recorded value; a number alone has no count.

    Raises:
        StepError: arrays.
    """
    pair: tuple[Any, Any] = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if any(part is not None and jnp.shape(part) != () for part in pair):
        shape = list(jnp.shape(pair[0]))
        raise StepError(f"{own.called} records {name!r} of shape {shape}; give one number, or (sum, count)")
    return pair


class CustomBody(StepBody):
    """The traced parts of a step that calls the user's function for every microbatch.

    A function that calls `default_train_step` keeps the windows of the configuration; any other makes its own updates,
    and every microbatch is a window.
    """

    def __init__(self, *args: Any, own: OwnStep, seen: Seen, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own, self.seen = own, seen
        self.split = seen.delegates and self.accumulate > 1
        self._measured: Any = None

    def micro(self, carry: State, batch: Any) -> State:
        return self._with_default(super().micro, carry, batch)

    def last(self, carry: State, batch: Any) -> State:
        accumulate = super().micro
        return self._with_default(lambda carry, batch: self.commit(accumulate(carry, batch)), carry, batch)

    def apply(self, carry: State, batch: Any) -> State:
        if self.seen.delegates:
            return self._with_default(super().apply, carry, batch)
        return self._own_update(carry, batch)

    def _with_default(self, body: Callable[[State, Any], State], carry: State, batch: Any) -> State:
        """The built-in step, at the moment the function asks for it."""
        train, rows, status = carry

        def default(train: TrainState) -> tuple[State, dict[str, Any]]:
            after = body((train, rows, status), batch)
            return after, {"loss": self._measured}

        ctx, _ = call(self.own, train, batch, default)
        if ctx._delegated is None:
            raise StepError(f"{self.own.called} does not always call default_train_step; call it for every microbatch")
        after, rows, status = ctx._delegated
        # What the function itself wrote is kept, but where the run halts at this microbatch, which is then undone.
        kept, live, written = ctx._kept(), status[1] == 0, ctx.written()
        params = _picked(live, written, kept.params, train.params) | _without(written, after.params)
        model_state = _picked(live, written, kept.model_state, train.model_state) | _without(written, after.model_state)
        return replace(after, params=params, model_state=model_state), rows, status

    def measure(self, train: TrainState, batch: Any) -> tuple[Sums, Any, jax.Array]:
        found = super().measure(train, batch)
        self._measured = jnp.sum(found[0].num * self.plan.factors(found[0].den))
        return found

    def _own_update(self, carry: State, batch: Any) -> State:
        """A microbatch whose updates the function makes; what is not finite undoes all of them."""
        train, rows, status = carry
        ctx, returned = call(self.own, train, batch, None)
        record = as_record(returned, self.own)
        kept, live, written = ctx._kept(), status[1] == 0, ctx.written()
        loss = jnp.asarray(jax.lax.stop_gradient(record.pop("loss")), self.plan.dtype)
        real = jnp.sum(batch["mask"]) if "mask" in batch else 1
        weight = jnp.asarray(record.pop("count", real), self.plan.dtype)
        broken = ctx._bad | ~jnp.isfinite(loss)
        bad = broken if self.nonfinite != "ignore" else jnp.bool_(False)
        good = live & ~bad
        reported = jnp.any(jnp.stack([jnp.int32(0), *ctx._reports.values()]) > 0)

        before = train.counters[state.CONSECUTIVE]
        consecutive = jnp.where(good, 0, before + (live & bad))
        counters = state.tick(
            train.counters,
            batch=live,
            epoch_batch=live,
            step=good & reported,
            epoch_step=good & reported,
            skipped=live & bad,
            nonfinite=live & bad,
            consecutive=consecutive - before,
        )
        halt = jnp.where(live & bad & (consecutive > self.max_consecutive), self.halt_code, status[1])
        flags = records.CLOSED + jnp.where(good, records.COMMITTED, 0) + jnp.where(bad, records.BAD, 0)
        flags += jnp.where(live, 0, records.HALTED)
        term = jnp.where(jnp.isfinite(loss), -1, 0).astype(jnp.int32)
        fault = jnp.where(bad, jnp.stack([train.counters[state.BATCH], term, ctx._leaf]), -1)
        sums = self._sums(ctx, loss, weight, record)
        rate = ctx._rates.get(self.own.keys[0], self.own.rate(train.opt_state, self.own.keys[0]))
        row = self.layout.row(counters, [flags, halt, jnp.int32(0), *fault, jnp.int32(-1)], rate, ctx._norm, sums, sums)
        moved = replace(
            train,
            params={**train.params, **_picked(good, written, kept.params, train.params)},
            model_state={**train.model_state, **_picked(good, written, kept.model_state, train.model_state)},
            opt_state=pick(good, strong(kept.opt_state), train.opt_state),
            counters=counters,
        )
        return moved, records.write(rows, status[0], row), jnp.stack([status[0] + 1, halt])

    def _sums(self, ctx: Any, loss: Any, weight: Any, record: Mapping[str, Any]) -> jax.Array:
        """The row's sums: the loss's, then (sum, count) of everything recorded, then updates and rates by optimizer."""
        if tuple(record) != self.seen.names:
            raise StepError(
                f"{self.own.called} records {list(record)} now and {list(self.seen.names)} before; record the same "
                "names for every microbatch"
            )
        values = [loss * weight, weight]
        for name, value in record.items():
            top, count = as_pair(value, name, self.own)
            values += [jnp.asarray(top, self.plan.dtype) * weight, weight] if count is None else [top, count]
        values += [ctx._reports.get(name, 0) for name in self.own.keys]
        if self.own.names:
            first = ctx._train.opt_state
            values += [ctx._rates.get(name, self.own.rate(first, name)) for name in self.own.names]
        return jnp.stack([jax.lax.stop_gradient(jnp.asarray(value, self.plan.dtype)) for value in values])


def _picked(flag: Any, written: set[str], new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `new` that were written where `flag`, else of `old`."""
    return {name: pick(flag, strong(new[name]), value) for name, value in old.items() if name in written}


def _without(written: set[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in written}
