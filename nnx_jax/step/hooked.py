"""The step with hooks in it: the eighteen stages of one microbatch, traced in order, one owner for each act.

A window of several microbatches compiles to two bodies: `micro`, in which the accumulation hook's veto is known while
tracing, so that no optimizer is in it, and `last`. Where a hook of the user decides at BEFORE_BATCH what to keep, there
is one body and the accumulator lives on in the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import StepError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.objectives.terms import LossTerm, check_terms, term_value
from nnx_jax.step import gates, records, rng, state
from nnx_jax.step.body import StepBody, float32, open_window, replace
from nnx_jax.step.calls import HookCalls
from nnx_jax.step.context import StepContext
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.state import TrainState, strong
from nnx_jax.step.window import Sums, clip_scale, first_bad, only_if, select, square_sums, stack_terms, terms_at

State = Any


class HookedBody(StepBody):
    """A step body that calls hooks; see the module."""

    split = True

    def __init__(self, *args: Any, hooks: HookPlan, keeps: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hooks, self.calls = hooks, HookCalls(hooks)
        self.keeps = keeps or self.accumulate > 1
        self.dynamic = keeps
        """A hook decides at BEFORE_BATCH what is kept: one body, and windows are the hooks' own affair."""

    tapped: Any = None
    """Shapes of what the host looks at."""

    def accumulator(self, params: Any, model_state: Any) -> dict[str, Any]:
        accum: dict[str, Any] = {}
        if self.keeps:
            accum = open_window(self.plan, self.layout, params, jax.tree.map(jnp.copy, model_state))
            if self.dynamic:
                accum = {"window": accum["window"]}
        if self.tapped is not None:
            accum["taps"] = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.tapped)
        return accum

    # -- the three bodies a program may hold -------------------------------------------------------------------

    def micro(self, carry: State, batch: Any) -> State:
        """A microbatch that leaves the window open: no optimizer is traced."""
        return self._microbatch(carry, batch, closes=False)

    def last(self, carry: State, batch: Any) -> State:
        """The microbatch that closes a window."""
        return self._microbatch(carry, batch, closes=True)

    def apply(self, carry: State, batch: Any) -> State:
        """A window of one microbatch."""
        return self._microbatch(carry, batch, closes=True)

    # -- one microbatch ----------------------------------------------------------------------------------------

    def _microbatch(self, carry: State, batch: Any, *, closes: bool) -> State:
        train, rows, status = carry
        ctx = self.begin(train, batch, closes)
        starts = self.keep_or_zero(ctx)
        self.calls.at(ctx, Stage.BEFORE_FORWARD)
        seen, model_state, invalid = self.measured(train, ctx)
        seen, model_state = self.screen(train, ctx, seen, model_state)
        window = self.gather(train, seen, starts)
        window = self.after_backward(ctx, window, seen)
        run, veto = self.decide(ctx)
        return self.finish(carry, ctx, window, seen, model_state, invalid, run, veto, closes)

    def begin(self, train: TrainState, batch: Any, closes: bool) -> StepContext:
        """The context of a microbatch, before anything happened."""
        at = train.counters
        windowed = self.accumulate > 1
        starts: Any = at[state.MICRO] == 0 if windowed else True
        if windowed and self.dynamic:
            ends: Any = at[state.MICRO] + 1 == self.accumulate
        else:
            ends = closes
        ctx = StepContext(
            batch=dict(batch),
            params=train.params,
            frozen=train.frozen,
            model_state=train.model_state,
            batch_count=at[state.BATCH],
            step_count=at[state.STEP],
            global_step_count=at[state.STEP] * self.hooks.world,
            epoch_step_count=at[state.EPOCH_BATCH],
            epoch=at[state.EPOCH],
            window_starts=starts,
            window_closes=ends,
            window_count=at[state.MICRO] + 1,
            window_size=self.accumulate,
            compute_dtype=self.hooks.compute_dtype,
            model_keys=self.hooks.model_keys,
            state=(),
        )
        ctx.__dict__["slots"] = dict(train.slots)
        ctx.__dict__["make_rng"] = lambda index: jax.random.fold_in(
            rng.stream_key(train.rng, rng.HOOKS, at[state.BATCH]), index
        )
        return ctx

    def keep_or_zero(self, ctx: StepContext) -> gates.Flag:
        """BEFORE_BATCH: whether the accumulator starts from zero."""
        self.calls.at(ctx, Stage.BEFORE_BATCH)
        return self.calls.fold(ctx, Stage.BEFORE_BATCH)[0]

    def measured(self, train: TrainState, ctx: StepContext) -> tuple[Sums, Any, jax.Array]:
        """BEFORE_FORWARD to DO_BACKWARD: the sums of one microbatch, the new model_state, invalid labels."""
        key, batch = self.key(train), ctx.batch

        def scalars(params: dict[str, Any]) -> tuple[jax.Array, Any]:
            inner = ctx.fork(params=params)
            outputs, model_state = self.forward({**train.frozen, **params}, train.model_state, batch, key, True)
            inner.enter(predictions=outputs)
            self.calls.at(inner, Stage.AFTER_FORWARD)
            self.calls.at(inner, Stage.BEFORE_LOSS)
            outputs = inner.predictions
            at = train.counters
            terms = check_terms(terms_at(self.terms, at[state.STEP], at[state.EPOCH])(outputs, batch))
            num, den = stack_terms(terms, self.plan)
            values, ref = self._objective(inner, num, den, terms)
            seen = jax.lax.stop_gradient(outputs)
            sums = [jnp.asarray(metric.update(seen, batch), jnp.float32).reshape(-1) for metric in self.metrics]
            bad = jnp.int32(0) if self.invalid is None else jnp.asarray(self.invalid(seen, batch), jnp.int32)
            metrics = jnp.concatenate([jnp.zeros(0), *sums])
            out = inner.carried("predictions", "loss", "raw_loss", "losses", "weight", "slots", "metrics")
            return values / ref if ref != 1 else values, jax.lax.stop_gradient(
                (num, den, metrics, model_state, bad, out, jnp.float32(ref))
            )

        owner = self.hooks.owner(Stage.DO_BACKWARD)
        if owner is None:
            values, pull, aux = jax.vjp(scalars, train.params, has_aux=True)
            one_hot = jnp.eye(len(self.plan.groups), dtype=values.dtype)
            raw = [float32(pull(one_hot[group])[0]) for group in range(len(self.plan.groups))]
        else:
            _, aux = scalars(train.params)
            raw = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), train.params) for _ in self.plan.groups]
        num, den, metrics, model_state, invalid, out, ref = aux
        grads = tuple(raw) if self._ref is None else tuple(jax.tree.map(lambda g: g * ref, tree) for tree in raw)
        ctx.enter(**out)
        if owner is not None:
            ctx.enter(grads=grads[0])
            self.calls.call_one(ctx, owner, Stage.DO_BACKWARD)
            grads = (self._undivide(ctx.grads, den), *grads[1:])
        ctx.enter(loss=ctx.__dict__["raw_loss"])
        term = first_bad(num + den)
        micro = jnp.where(term >= 0, train.counters[state.BATCH], -1)
        return Sums(grads, num, den, metrics, jnp.stack([micro, term, jnp.int32(-1)])), model_state, invalid

    def key(self, train: TrainState) -> jax.Array:
        """The key of the forward pass."""
        return rng.stream_key(train.rng, rng.DROPOUT, train.counters[state.BATCH])

    _ref: int | None = None

    def _objective(self, ctx: StepContext, num: Any, den: Any, terms: Sequence[LossTerm]) -> tuple[jax.Array, int]:
        """The values to differentiate, and the constant they are to be divided by meanwhile.

        The hooks see and change one loss, this microbatch's mean. Nobody changed it: the plain sums are differentiated,
        bit for bit as without hooks. Else, for terms that share a denominator d, the changed loss times d: its
        gradients add up and are divided by the window's weight like any other. Where terms have denominators of their
        own, T(L, params) is split into s L + R with s = dT/dL: every term's sum is differentiated s times, and the
        rest R, through which parameters enter on other ways, goes with the first term.
        """
        loss = jnp.sum(num * self.plan.factors(den))
        self._show(ctx, loss, den, terms, [term_value(term) for term in terms])
        given = ctx.loss
        if len(self.plan.groups) == 1:
            changed = self._chain(ctx, given)
            if changed is loss:
                return self.plan.scalars(num, den), 1
            if self.plan.fused or all(self.plan.additive):
                return changed[None], 1
            return (changed * den[0] / (self.plan.weights[0] or 1.0))[None], self._reference(ctx.batch)
        changed, slope, slots, metrics = self._slope(ctx, given)
        if changed is None and given is loss:
            return self.plan.scalars(num, den), 1
        ctx.enter(slots=slots, metrics=metrics, loss=given if changed is None else changed)
        values = self.plan.scalars(num, den) * slope
        first = self.plan.groups[0][0]
        rest = ctx.loss - slope * loss
        weight = 1.0 if self.plan.additive[first] else den[first] / (self.plan.weights[first] or 1.0)
        return values.at[0].add(rest * weight), self._reference(ctx.batch)

    def _show(self, ctx: StepContext, loss: Any, den: Any, terms: Sequence[LossTerm], parts: Sequence[Any]) -> None:
        """AFTER_LOSS and BEFORE_BACKWARD: put the loss in, and let traced hooks look at it or change it."""
        ctx.enter(
            loss=loss,
            raw_loss=loss,
            weight=den,
            losses={
                "total_loss": loss,
                "per_component_unweighted": {t.name: part for t, part in zip(terms, parts, strict=True)},
                "per_component_weight": {t.name: t.weight if t.scale is None else t.weight * t.scale for t in terms},
            },
        )
        for stage in (Stage.AFTER_LOSS, Stage.BEFORE_BACKWARD):
            self.calls.at(ctx, stage)

    def _chain(self, ctx: StepContext, value: Any) -> Any:
        """DO_BACKWARD: the loss as every hook in turn left it."""
        ctx.enter(loss=value)
        self.calls.watch(ctx, Stage.DO_BACKWARD)
        for hook in self.hooks.update:
            changed = gates.check_loss(self.calls.ask(ctx, hook, Stage.DO_BACKWARD, False)[1], hook)
            ctx.enter(loss=changed)
        return ctx.loss

    def _slope(self, ctx: StepContext, given: Any) -> tuple[Any, Any, Any, Any]:
        """(changed loss, its derivative by the loss, slots, metrics); the first is None when nobody changed it."""

        def outer(value: Any) -> tuple[Any, Any]:
            before = dict(ctx.__dict__["slots"])
            result = self._chain(ctx, value)
            slots, metrics = ctx.__dict__["slots"], dict(ctx.metrics)
            ctx.__dict__["slots"] = before
            same.append(result is value)
            return result, (slots, metrics)

        same: list[bool] = []
        (changed, (slots, metrics)), slope = jax.value_and_grad(outer, has_aux=True)(given)
        if same[-1]:
            ctx.enter(slots=slots, metrics=metrics, loss=given)
        return (None if same[-1] else changed), jax.lax.stop_gradient(slope), slots, metrics

    def _reference(self, batch: Mapping[str, Any]) -> int:
        """A power of two near the number of targets: keeps the sums of a 16-bit backward pass in its range."""
        like = batch.get("y", batch["mask"])
        ref = 2 ** max(0, round(math.log2(max(1, math.prod(jnp.shape(like))))))
        self._ref = ref
        return ref

    def screen(self, train: TrainState, ctx: StepContext, seen: Sums, model_state: Any) -> tuple[Sums, Any]:
        """Leave a microbatch out of its window where a hook says so: it is then as if it had no valid target."""
        keep: gates.Flag = True
        for hook in self.hooks.update:
            if hook.screens:
                ctx.enter(micro_grads=self.plan.combine(seen.grads, seen.den))
                keep = gates.and_(keep, gates.check_flag(hook.keeps_microbatch(ctx), hook, Stage.AFTER_BACKWARD))
        ctx.__dict__.pop("micro_grads", None)
        if keep is True:
            return seen, model_state
        return gates.pick(keep, seen, _zeros(seen)), gates.pick(keep, model_state, train.model_state)

    def gather(self, train: TrainState, seen: Sums, starts: gates.Flag) -> Sums:
        """The window with this microbatch in it."""
        if not self.keeps:
            return seen
        window: Sums = train.accum["window"]
        if self.dynamic:
            window = gates.pick(starts, _zeros(window), window)
        grads = jax.tree.map(jnp.add, window.grads, seen.grads)
        fault = seen.fault
        if self.accumulate > 1 or self.dynamic:
            leaf = first_bad(jnp.sum(jnp.stack([square_sums(tree) for tree in grads]), axis=0))
            here = jnp.stack([train.counters[state.BATCH], seen.fault[1], leaf])
            bad = (seen.fault[1] >= 0) | (leaf >= 0)
            fault = jnp.where((window.fault[0] < 0) & bad, here, window.fault)
        return Sums(grads, window.num + seen.num, window.den + seen.den, window.metrics + seen.metrics, fault)

    def after_backward(self, ctx: StepContext, window: Sums, seen: Sums) -> Sums:
        """AFTER_BACKWARD and BEFORE_OPTIMIZER_STEP: traced hooks read or replace the accumulated gradient."""
        before = self.plan.combine(window.grads, window.den)
        scales = [hook.loss_scale(ctx.slot(self.hooks.key(hook))) for hook in self.hooks.update]
        ctx.enter(grads=before, divided=before, loss_scale=next((scale for scale in scales if scale is not None), None))
        ctx.__dict__["make_micro"] = lambda: self.plan.combine(seen.grads, seen.den)
        self.calls.at(ctx, Stage.AFTER_BACKWARD)
        self.calls.at(ctx, Stage.BEFORE_OPTIMIZER_STEP)
        if ctx.grads is before:
            return window
        zero = [jax.tree.map(jnp.zeros_like, tree) for tree in window.grads[1:]]
        return window._replace(grads=(self._undivide(ctx.grads, window.den), *zero))

    def _undivide(self, grads: Any, den: Any) -> Any:
        """Sums whose division by the window's weight gives `grads`; they go into the first group."""
        first = self.plan.groups[0][0]
        if self.plan.fused or self.plan.additive[first]:
            return grads
        factor = den[first] / (self.plan.weights[first] or 1.0)
        return jax.tree.map(lambda g: g * factor, grads)

    def decide(self, ctx: StepContext) -> tuple[gates.Flag, Any]:
        """DO_OPTIMIZER_STEP: whether to step, and which hook said no first."""
        return self.calls.fold(ctx, Stage.DO_OPTIMIZER_STEP)

    def finish(
        self,
        carry: State,
        ctx: StepContext,
        window: Sums,
        seen: Sums,
        model_state: Any,
        invalid: Any,
        run: gates.Flag,
        veto: Any,
        closes: bool,
    ) -> State:
        """The update or none, AFTER_OPTIMIZER_STEP, the counters and the record."""
        train, rows, status = carry
        live = status[1] == 0
        halt = jnp.where(live & (invalid > 0), records.HALT_INVALID, status[1])
        if "invalid" in train.accum:
            invalid = train.accum["invalid"] + invalid
        moved = replace(train, counters=state.tick(train.counters, batch=live, micro=live, epoch_batch=live))
        if not closes and not self.dynamic:
            if run is not False:
                raise StepError("a hook let the optimizer step inside an accumulation window; veto before it closes")
            return self._left_open(moved, rows, status, halt, live, ctx, window, seen, model_state, invalid)
        bad, empty, norm, fault = self._verdict(ctx, moved, window, run)
        keep = self.calls.known(gates.and_((halt == 0) & ~bad & ~empty, run))
        params, opt_state, rate = self._update(ctx, train, window, keep, norm)
        own = seen.flat
        entry = train.accum["entry"] if self.accumulate > 1 and not self.dynamic else train.model_state
        model_state = select(jnp.asarray(keep), model_state, entry)
        slots = self._after(ctx, train, params, model_state, keep, live)
        before = train.counters[state.CONSECUTIVE]
        open_ = halt == 0
        keep = jnp.asarray(keep)
        consecutive = jnp.where(keep, 0, before + (open_ & bad))
        ends = jnp.asarray(ctx.window_closes)
        counters = state.tick(
            moved.counters,
            micro=jnp.where(ends, -moved.counters[state.MICRO], 0),
            step=keep,
            epoch_step=keep,
            skipped=open_ & ~keep & ends,
            nonfinite=open_ & bad,
            consecutive=consecutive - before,
        )
        halt = jnp.where(open_ & bad & (consecutive > self.max_consecutive), self.halt_code, halt)
        halt = jnp.where(open_ & ctx.stop, records.HALT_HOOK, halt)
        flags = records.CLOSED + jnp.where(keep, records.COMMITTED, 0) + jnp.where(empty, records.EMPTY, 0)
        mine = live | ((status[1] == records.HALT_INVALID) & (invalid > 0)) if self.accumulate > 1 else live
        flags += jnp.where(bad, records.BAD, 0) + jnp.where(mine, 0, records.HALTED)
        if self.layout.every == "update" and self.accumulate > 1 and not self.dynamic:
            own = window.flat
        row = self.layout.row(counters, [flags, halt, invalid, *fault, veto], rate, norm, own, window.flat)
        closed = replace(
            train,
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            slots=slots,
            accum=self._accumulator(train, params, model_state, window, ctx, closed=True),
            counters=counters,
        )
        return closed, records.write(rows, status[0], row), jnp.stack([status[0] + 1, halt])

    def _left_open(
        self, train: TrainState, rows: Any, status: Any, halt: Any, live: Any, ctx: StepContext, window: Sums,
        seen: Sums, model_state: Any, invalid: Any,
    ) -> State:  # fmt: skip
        slots = self._after(ctx, train, train.params, train.model_state, False, live)
        if self.layout.every == "batch":
            bad = window.fault[0] >= 0
            flags = jnp.where(bad, records.BAD, 0) + jnp.where(live, 0, records.HALTED)
            zero = jnp.float32(0)
            ints = [flags, halt, invalid, *window.fault, jnp.int32(-1)]
            row = self.layout.row(train.counters, ints, zero, zero, seen.flat, window.flat)
            rows, status = records.write(rows, status[0], row), jnp.stack([status[0] + 1, halt])
        else:
            status = jnp.stack([status[0], halt])
        accum = self._accumulator(train, train.params, model_state, window, ctx, closed=False)
        accum.update(invalid=invalid, last=seen.flat)
        return (
            replace(train, accum=accum, model_state=select(live, model_state, train.model_state), slots=slots),
            rows,
            status,
        )

    def _accumulator(
        self, train: TrainState, params: Any, model_state: Any, window: Sums, ctx: StepContext, *, closed: bool
    ) -> dict[str, Any]:
        accum = dict(train.accum)
        if self.keeps:
            if closed and not self.dynamic:
                accum.update(open_window(self.plan, self.layout, params, model_state))
            else:
                accum["window"] = window
        if self.hooks.taps:
            accum["taps"] = self.taps(ctx)
        return accum

    def taps(self, ctx: StepContext) -> dict[str, Any]:
        """What the host may look at after the microbatch."""
        found = {"loss": ctx.__dict__["raw_loss"], "losses": ctx.losses["per_component_unweighted"]}
        if "gradients" in self.hooks.taps:
            found["gradients"] = ctx.unscaled_grads
        if "predictions" in self.hooks.taps:
            found["predictions"] = ctx.__dict__["predictions"]
        return strong(jax.lax.stop_gradient(found))

    def _verdict(self, ctx: StepContext, train: TrainState, window: Sums, run: gates.Flag) -> tuple[Any, Any, Any, Any]:
        """(not finite, empty, gradient norm before clipping, first fault); a vetoed window is not at fault."""
        norm = ctx.metrics.get("grad_norm")
        norm = ctx.global_norm() if norm is None else jnp.asarray(norm, jnp.float32)
        broken = (window.fault[0] >= 0) | ~jnp.isfinite(jnp.sum(ctx.squares()))
        bad = jnp.bool_(False) if self.nonfinite == "ignore" else jnp.asarray(gates.and_(run, broken))
        leaf = jnp.where(window.fault[2] >= 0, window.fault[2], first_bad(ctx.squares()))
        micro = jnp.where(window.fault[0] >= 0, window.fault[0], train.counters[state.BATCH] - 1)
        fault = jnp.where(bad, jnp.stack([micro, window.fault[1], leaf]), -1)
        return bad, self.plan.is_empty(window.den) & ~bad, norm, fault

    def _update(
        self, ctx: StepContext, train: TrainState, window: Sums, keep: gates.Flag, norm: Any
    ) -> tuple[Any, Any, Any]:
        """The optimizer's step where `keep`, or the owner's."""
        owner = self.hooks.owner(Stage.DO_OPTIMIZER_STEP)
        if owner is not None:
            self.calls.call_one(ctx, owner, Stage.DO_OPTIMIZER_STEP)
            return select(jnp.asarray(keep), strong(ctx.params), train.params), train.opt_state, jnp.float32(0)
        given = ctx.grads
        # What no hook replaced is divided inside, as without hooks, for the same instructions and so the same bits.
        plain = given is ctx.__dict__["divided"]

        def update() -> tuple[Any, Any, Any]:
            grads = self.plan.combine(window.grads, window.den) if plain else given
            scale = clip_scale(norm, self.clip_norm)
            clipped = grads if scale is None else jax.tree.map(lambda g: g * scale, grads)
            params, opt_state = self.optimizer.update(clipped, train.opt_state, train.params)
            params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, train.params)
            return strong((params, opt_state, jnp.asarray(getattr(opt_state, "rate", 0.0), jnp.float32)))

        old = (train.params, train.opt_state, jnp.float32(0))
        if isinstance(keep, bool):
            return update() if keep else old
        return only_if(keep, update, old)

    def _after(
        self, ctx: StepContext, train: TrainState, params: Any, model_state: Any, keep: gates.Flag, live: Any
    ) -> Any:
        """AFTER_OPTIMIZER_STEP; returns the slots, which a halted run leaves alone."""
        ctx.enter(params=params, model_state=model_state)
        for hook in self.hooks.update:
            self.calls.ask(ctx, hook, Stage.AFTER_OPTIMIZER_STEP, gates.not_(keep))
        self.calls.at(ctx, Stage.AFTER_OPTIMIZER_STEP)
        slots = ctx.__dict__["slots"]
        return gates.pick(live, slots, train.slots) if slots else train.slots


def _zeros(window: Sums) -> Sums:
    return jax.tree.map(jnp.zeros_like, window)._replace(fault=jnp.full(3, -1, jnp.int32))
