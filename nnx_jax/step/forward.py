"""The differentiated part of a step with hooks: from BEFORE_FORWARD to DO_BACKWARD, and the sums that come out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.objectives.terms import LossTerm, check_terms, term_value
from nnx_jax.step import gates, state
from nnx_jax.step.body import StepBody
from nnx_jax.step.calls import HookCalls
from nnx_jax.step.context import StepContext
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.state import TrainState
from nnx_jax.step.window import Sums, first_bad, forward_at, stack_terms, terms_at


class HookedForward(StepBody):
    """The half of a hooked body that ends with the gradient; `HookedBody` is the other half."""

    def __init__(self, *args: Any, hooks: HookPlan, keeps: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hooks, self.calls = hooks, HookCalls(hooks)
        self.keeps = keeps or self.accumulate > 1
        self.screens = any(hook.screens for hook in hooks.update)
        self.dynamic = keeps
        """A hook decides at BEFORE_BATCH what is kept: one body, and windows are the hooks' own affair."""

    def measured(self, train: TrainState, ctx: StepContext) -> tuple[Sums, Any, jax.Array]:
        """BEFORE_FORWARD to DO_BACKWARD: the sums of one microbatch, the new model_state, invalid labels."""
        key, batch = self.key(train), ctx.batch

        def scalars(params: dict[str, Any]) -> tuple[jax.Array, Any]:
            inner = ctx.fork(params=params)
            with jax.named_scope("FORWARD"):
                forward = forward_at(self.forward, train.counters)
                outputs, model_state = forward({**train.frozen, **params}, train.model_state, batch, key, True)
            inner.enter(predictions=outputs)
            self.calls.at(inner, Stage.AFTER_FORWARD)
            self.calls.at(inner, Stage.BEFORE_LOSS)
            outputs = inner.predictions
            at = train.counters
            terms = check_terms(terms_at(self.terms, at[state.STEP], at[state.EPOCH])(outputs, batch))
            num, den = stack_terms(terms, self.plan)
            values, ref = self._objective(inner, num, den, terms)
            seen = jax.lax.stop_gradient(outputs)
            metrics = self.plan.metrics([metric.update(seen, batch) for metric in self.metrics])
            bad = jnp.int32(0) if self.invalid is None else jnp.asarray(self.invalid(seen, batch), jnp.int32)
            out = inner.carried("predictions", "loss", "raw_loss", "losses", "weight", "slots", "metrics")
            return values / ref if ref != 1 else values, jax.lax.stop_gradient(
                (num, den, metrics, model_state, bad, out, jnp.asarray(ref, self.plan.dtype))
            )

        owner = self.hooks.owner(Stage.DO_BACKWARD)
        if owner is None:
            values, pull, aux = jax.vjp(scalars, train.params, has_aux=True)
            one_hot = jnp.eye(len(self.plan.groups), dtype=values.dtype)
            with jax.named_scope("BACKWARD"):
                raw = [self.plan.wide(pull(one_hot[group])[0]) for group in range(len(self.plan.groups))]
        else:
            _, aux = scalars(train.params)
            raw = [jax.tree.map(lambda p: jnp.zeros(p.shape, self.plan.dtype), train.params) for _ in self.plan.groups]
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
        show = partial(self._show_in, ctx=ctx, den=den, terms=terms, parts=[term_value(term) for term in terms])
        if len(self.plan.groups) == 1:
            changed = self._chain(ctx, show(loss))
            if changed is loss:
                return self.plan.scalars(num, den), 1
            if self.plan.fused or all(self.plan.additive):
                return changed[None], 1
            return (changed * den[0] / (self.plan.weights[0] or 1.0))[None], self._reference(ctx.batch)
        changed, slope = self._slope(ctx, loss, show)
        if changed is None:
            return self.plan.scalars(num, den), 1
        first = self.plan.groups[0][0]
        weight = 1.0 if self.plan.additive[first] else den[first] / (self.plan.weights[first] or 1.0)
        values = self.plan.scalars(num, den) * slope
        return values.at[0].add((changed - slope * loss) * weight), self._reference(ctx.batch)

    def _show_in(
        self, loss: Any, *, ctx: StepContext, den: Any, terms: Sequence[LossTerm], parts: Sequence[Any]
    ) -> Any:
        """AFTER_LOSS and BEFORE_BACKWARD: the loss as traced hooks left it."""
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
        return ctx.loss

    def _chain(self, ctx: StepContext, value: Any) -> Any:
        """DO_BACKWARD: the loss as every hook in turn left it."""
        ctx.enter(loss=value)
        self.calls.watch(ctx, Stage.DO_BACKWARD)
        for hook in self.hooks.update:
            changed = gates.check_loss(self.calls.ask(ctx, hook, Stage.DO_BACKWARD, False)[1], hook)
            ctx.enter(loss=changed)
        return ctx.loss

    def _slope(self, ctx: StepContext, loss: Any, show: Any) -> tuple[Any, Any]:
        """(the loss as hooks left it, None when nobody changed it; its derivative by the loss itself)."""
        same: list[bool] = []

        def outer(value: Any) -> tuple[Any, Any]:
            inner = ctx.fork()
            result = self._chain(inner, show(value, ctx=inner))
            same.append(result is value)
            return result, inner.carried("slots", "metrics", "losses", "weight")

        (changed, out), slope = jax.value_and_grad(outer, has_aux=True)(loss)
        ctx.enter(**out, raw_loss=loss, loss=changed)
        return (None if same[-1] else changed), jax.lax.stop_gradient(slope)

    def _reference(self, batch: Mapping[str, Any]) -> int:
        """A power of two near the number of targets: keeps the sums of a 16-bit backward pass in its range."""
        like = batch.get("y", batch["mask"])
        ref = 2 ** max(0, round(math.log2(max(1, math.prod(jnp.shape(like))))))
        self._ref = ref
        return ref

    def _undivide(self, grads: Any, den: Any) -> Any:
        """Sums whose division by the window's weight gives `grads`; they go into the first group."""
        first = self.plan.groups[0][0]
        if self.plan.fused or self.plan.additive[first]:
            return grads
        factor = den[first] / (self.plan.weights[first] or 1.0)
        return jax.tree.map(lambda g: g * factor, grads)
