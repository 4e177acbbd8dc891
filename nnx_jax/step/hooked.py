"""The step with hooks in it: the eighteen stages of one microbatch, traced in order, one owner for each act.

A window of several microbatches compiles to two bodies: `micro`, in which the accumulation hook's veto is known while
tracing, so that no optimizer is in it, and `last`. Where a hook of the user decides at BEFORE_BATCH what to keep, there
is one body and the accumulator lives on in the state.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import StepError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.optim.clip import clip_scale, square_sums
from nnx_jax.step import gates, records, rng, state
from nnx_jax.step.body import open_window, replace
from nnx_jax.step.context import StepContext
from nnx_jax.step.forward import HookedForward
from nnx_jax.step.state import TrainState, strong
from nnx_jax.step.window import Sums, first_bad, only_if

State = Any


class HookedBody(HookedForward):
    """A step body that calls hooks; see the module."""

    split = True

    tapped: Any = None
    """Shapes of what the host looks at."""

    def accumulator(self, params: Any, model_state: Any) -> dict[str, Any]:
        accum: dict[str, Any] = {}
        if self.keeps:
            accum = open_window(self.plan, self.layout, params, jax.tree.map(jnp.copy, model_state))
            if self.dynamic:
                accum = {"window": accum["window"], "entry": accum["entry"], "pending": jnp.bool_(False)}
            if self.screens:
                accum["kept"] = jnp.int32(0)
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
        ctx = self.begin(carry[0], batch, closes)
        ctx.enter(zeroed=self.keep_or_zero(ctx))
        train = self.entered(carry[0], ctx)
        self.calls.at(ctx, Stage.BEFORE_FORWARD)
        seen, model_state, invalid = self.measured(train, ctx)
        seen, model_state = self.screen(train, ctx, seen, model_state)
        window = self.gather(train, ctx, seen)
        window = self.after_backward(ctx, window, seen, closes)
        run, veto = self.decide(ctx)
        return self.finish((train, *carry[1:]), ctx, window, seen, model_state, invalid, run, veto, closes)

    def entered(self, train: TrainState, ctx: StepContext) -> TrainState:
        """The state to begin with: where hooks decide what is kept, without what a dropped window left behind."""
        if not self.dynamic:
            return train
        # An array even where values are concrete: a Python True says that nothing is ever accumulated.
        ctx.enter(zeroed=jnp.asarray(ctx.zeroed))
        accum = dict(train.accum)
        dropped = gates.and_(ctx.zeroed, accum["pending"])
        model_state = gates.pick(dropped, accum["entry"], train.model_state)
        accum["entry"] = gates.pick(ctx.zeroed, model_state, accum["entry"])
        ctx.enter(model_state=model_state)
        return replace(train, model_state=model_state, accum=accum)

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
        ctx.enter(slots=dict(train.slots))
        ctx.enter(scaled=bool(self.calls.scales(ctx)))
        ctx.__dict__["make_rng"] = lambda index: jax.random.fold_in(
            rng.stream_key(train.rng, rng.HOOKS, at[state.BATCH]), index
        )
        return ctx

    def keep_or_zero(self, ctx: StepContext) -> gates.Flag:
        """BEFORE_BATCH: whether the accumulator starts from zero."""
        self.calls.at(ctx, Stage.BEFORE_BATCH)
        return self.calls.fold(ctx, Stage.BEFORE_BATCH)[0]

    def screen(self, train: TrainState, ctx: StepContext, seen: Sums, model_state: Any) -> tuple[Sums, Any]:
        """Leave a microbatch out of its window where a hook says so: it is then as if it had no valid target."""
        ctx.enter(has_rows=jnp.any(jnp.asarray(ctx.weight) > 0) | any(self.plan.additive), kept=True, kept_count=None)
        if not self.screens:
            return seen, model_state
        ctx.enter(micro_grads=self.plan.combine(seen.grads, seen.den))
        keep = self.calls.screen(ctx)
        ctx.__dict__.pop("micro_grads")
        before = gates.pick(ctx.zeroed, jnp.int32(0), train.accum["kept"]) if self.keeps else jnp.int32(0)
        ctx.enter(kept=keep, kept_count=before + keep)
        return gates.pick(keep, seen, _zeros(seen)), gates.pick(keep, model_state, train.model_state)

    def gather(self, train: TrainState, ctx: StepContext, seen: Sums) -> Sums:
        """The window with this microbatch in it."""
        if not self.keeps:
            return seen
        window: Sums = train.accum["window"]
        if self.dynamic:
            window = gates.pick(ctx.zeroed, _zeros(window), window)
        grads = jax.tree.map(jnp.add, window.grads, seen.grads)
        fault = self._fault(train, ctx, window, seen, grads)
        return Sums(grads, window.num + seen.num, window.den + seen.den, window.metrics + seen.metrics, fault)

    def _fault(self, train: TrainState, ctx: StepContext, window: Sums, seen: Sums, grads: Any) -> jax.Array:
        """The window's first fault, this microbatch's gradient in `grads`."""
        leaf = first_bad(jnp.sum(jnp.stack([self._looks(ctx, tree) for tree in grads]), axis=0))
        here = jnp.stack([train.counters[state.BATCH], seen.fault[1], leaf])
        bad = (seen.fault[1] >= 0) | (leaf >= 0)
        return jnp.where((window.fault[0] < 0) & bad, here, window.fault)

    def _looks(self, ctx: StepContext, tree: Any) -> jax.Array:
        """[leaves], not finite where a leaf is not; under a loss scale squares of what is fine may overflow."""
        if not ctx.scaled:
            return square_sums(tree)
        return jnp.stack([jnp.where(jnp.all(jnp.isfinite(leaf)), 0.0, jnp.nan) for leaf in jax.tree.leaves(tree)])

    def after_backward(self, ctx: StepContext, window: Sums, seen: Sums, closes: bool) -> Sums:
        """AFTER_BACKWARD and BEFORE_OPTIMIZER_STEP: traced hooks read or replace the accumulated gradient.

        What replaces it in a window that stays open becomes the accumulator; at a window's end it is what is applied.
        """
        before = self.plan.combine(window.grads, window.den)
        scale = next((scale for _, scale in self.calls.scales(ctx)), None)
        ctx.enter(grads=before, divided=before, unscaled=before, loss_scale=scale)
        ctx.enter(make_micro=lambda: self.plan.combine(seen.grads, seen.den))
        self.calls.at(ctx, Stage.AFTER_BACKWARD)
        self.calls.at(ctx, Stage.BEFORE_OPTIMIZER_STEP)
        ctx.enter(shown=ctx.unscaled_grads if "gradients" in self.hooks.taps else None)
        if ctx.grads is before:
            return window
        ctx.enter(unscaled=ctx.grads)
        if closes and not self.dynamic:
            return window
        if len(self.plan.groups) > 1:
            raise StepError(
                f"a hook replaced ctx.grads in an open window, but the loss terms {', '.join(self.plan.terms)} have "
                "denominators of their own, which divide it at its end; replace it at DO_OPTIMIZER_STEP"
            )
        return window._replace(grads=(self._undivide(ctx.grads, window.den),))

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
        run = gates.and_(run, gates.not_(ctx.stop))
        bad, empty, norm, fault = self._verdict(ctx, moved, window, run, veto)
        keep = self.calls.known(gates.and_((halt == 0) & ~bad & ~empty, run))
        params, opt_state, rate = self._update(ctx, train, window, keep, norm)
        model_state = self._model_state(train, model_state, keep, live)
        slots = self._after(ctx, train, params, model_state, keep, live)
        counters, consecutive = self._counted(moved, ctx, keep, bad, halt == 0)
        open_ = halt == 0
        halt = jnp.where(open_ & bad & (consecutive > self.max_consecutive), self.halt_code, halt)
        halt = self._stopped(ctx, halt)
        flags = records.CLOSED + jnp.where(keep, records.COMMITTED, 0) + jnp.where(empty, records.EMPTY, 0)
        mine = live | ((status[1] == records.HALT_INVALID) & (invalid > 0)) if self.accumulate > 1 else live
        flags += jnp.where(bad, records.BAD, 0) + jnp.where(mine, 0, records.HALTED)
        whole = self.layout.every == "update" and self.accumulate > 1 and not self.dynamic
        ints = [flags, halt, invalid, *fault, veto]
        row = self.layout.row(counters, ints, rate, norm, window.flat if whole else seen.flat, window.flat)
        accum = self._accumulator(train, params, model_state, window, ctx, closed=True)
        if self.dynamic:
            accum["pending"] = jnp.where(live, jnp.logical_not(keep), accum["pending"])
        closed = replace(
            train, params=params, opt_state=opt_state, model_state=model_state, slots=slots, accum=accum,
            counters=counters,
        )  # fmt: skip
        return closed, records.write(rows, status[0], row), jnp.stack([status[0] + 1, halt])

    def _model_state(self, train: TrainState, new: Any, keep: gates.Flag, live: Any) -> Any:
        """What the forward pass keeps: of an update, else as before the window; where hooks decide, see `entered`."""
        if self.dynamic:
            return gates.pick(live, new, train.model_state)
        entry = train.accum["entry"] if self.accumulate > 1 else train.model_state
        return gates.pick(keep, new, entry)

    def _counted(self, moved: TrainState, ctx: StepContext, keep: Any, bad: Any, open_: Any) -> tuple[Any, Any]:
        """The counters after the microbatch, and bad windows in a row."""
        keep, before = jnp.asarray(keep), moved.counters[state.CONSECUTIVE]
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
        return counters, consecutive

    def _stopped(self, ctx: StepContext, halt: Any) -> Any:
        """The halt code, which also tells the hook that stopped the run."""
        if ctx.stop is False:
            return halt
        return jnp.where((halt == 0) & ctx.stop, records.HALT_HOOK + ctx.__dict__["stopper"], halt)

    def _left_open(
        self, train: TrainState, rows: Any, status: Any, halt: Any, live: Any, ctx: StepContext, window: Sums,
        seen: Sums, model_state: Any, invalid: Any,
    ) -> State:  # fmt: skip
        slots = self._after(ctx, train, train.params, train.model_state, False, live)
        halt = self._stopped(ctx, halt)
        if self.layout.every == "batch":
            bad = window.fault[0] >= 0
            flags = jnp.where(bad, records.BAD, 0) + jnp.where(live, 0, records.HALTED)
            zero = self.plan.zero
            ints = [flags, halt, invalid, *window.fault, jnp.int32(-1)]
            row = self.layout.row(train.counters, ints, zero, zero, seen.flat, window.flat)
            rows, status = records.write(rows, status[0], row), jnp.stack([status[0] + 1, halt])
        else:
            status = jnp.stack([status[0], halt])
        accum = self._accumulator(train, train.params, model_state, window, ctx, closed=False)
        accum.update(invalid=invalid, last=seen.flat)
        model_state = gates.pick(live, model_state, train.model_state)
        return replace(train, accum=accum, model_state=model_state, slots=slots), rows, status

    def _accumulator(
        self, train: TrainState, params: Any, model_state: Any, window: Sums, ctx: StepContext, *, closed: bool
    ) -> dict[str, Any]:
        accum = dict(train.accum)
        if self.keeps:
            if closed and not self.dynamic:
                accum.update(open_window(self.plan, self.layout, params, model_state))
            else:
                accum["window"] = window
            if self.screens:
                accum["kept"] = jnp.int32(0) if closed and not self.dynamic else ctx.__dict__["kept_count"]
        if self.hooks.taps:
            accum["taps"] = self.taps(ctx)
        return accum

    def taps(self, ctx: StepContext) -> dict[str, Any]:
        """What the host may look at after the microbatch."""
        found = {"loss": ctx.__dict__["raw_loss"], "losses": ctx.losses["per_component_unweighted"]}
        if "gradients" in self.hooks.taps:
            found["gradients"] = ctx.__dict__["shown"]
        if "predictions" in self.hooks.taps:
            found["predictions"] = ctx.__dict__["predictions"]
        return strong(jax.lax.stop_gradient(found))

    def _verdict(
        self, ctx: StepContext, train: TrainState, window: Sums, run: gates.Flag, veto: Any
    ) -> tuple[Any, Any, Any, Any]:
        """(not finite, empty, gradient norm before clipping, first fault).

        Judged is the gradient as it was before hooks clipped it. A vetoed window is not at fault, unless its loss is
        not finite and only the loss scale objected, which no scale can mend.
        """
        squares = square_sums(ctx.__dict__["unscaled"])
        norm = ctx.metrics.get("grad_norm")
        norm = jnp.sqrt(jnp.sum(squares)) if norm is None else jnp.asarray(norm, self.plan.dtype)
        broken = (window.fault[0] >= 0) | ~jnp.isfinite(norm) | ~jnp.isfinite(jnp.sum(squares))
        bad = jnp.bool_(False) if self.nonfinite == "ignore" else jnp.asarray(gates.and_(run, broken))
        for index, _ in self.calls.scales(ctx) if self.nonfinite != "ignore" else ():
            bad = bad | ((veto == index) & (window.fault[1] >= 0))
        leaf = jnp.where(window.fault[2] >= 0, window.fault[2], first_bad(squares))
        micro = jnp.where(window.fault[0] >= 0, window.fault[0], train.counters[state.BATCH] - 1)
        fault = jnp.where(bad, jnp.stack([micro, window.fault[1], leaf]), -1)
        empty = self.plan.is_empty(window.den)
        if self.screens:
            empty = empty | (ctx.__dict__["kept_count"] == 0)
        return bad, empty & ~bad, norm, fault

    def _update(
        self, ctx: StepContext, train: TrainState, window: Sums, keep: gates.Flag, norm: Any
    ) -> tuple[Any, Any, Any]:
        """The optimizer's step where `keep`, or the owner's."""
        owner = self.hooks.owner(Stage.DO_OPTIMIZER_STEP)
        if owner is not None:
            self.calls.call_one(ctx, owner, Stage.DO_OPTIMIZER_STEP)
            return gates.pick(keep, strong(ctx.params), train.params), train.opt_state, self.plan.zero
        given = ctx.grads
        # What no hook replaced is divided inside, as without hooks, for the same instructions and so the same bits.
        plain = given is ctx.__dict__["divided"]
        length = norm if plain or self.clip_norm is None else ctx.global_norm()

        @jax.named_scope("OPTIMIZER_STEP")
        def update() -> tuple[Any, Any, Any]:
            grads = self.plan.combine(window.grads, window.den) if plain else given
            scale = clip_scale(length, self.clip_norm)
            clipped = grads if scale is None else jax.tree.map(lambda g: g * scale, grads)
            params, opt_state = self.optimizer.update(clipped, train.opt_state, train.params)
            params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, train.params)
            return strong((params, opt_state, jnp.asarray(getattr(opt_state, "rate", 0.0), self.plan.dtype)))

        old = (train.params, train.opt_state, self.plan.zero)
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
