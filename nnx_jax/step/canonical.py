"""Canonical bodies: a microbatch is measured shard by shard, and a window added up in one order on any devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import StepError
from nnx_jax.core.hooks import runs_on
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.step import state
from nnx_jax.step.body import StepBody
from nnx_jax.step.context import StepContext
from nnx_jax.step.hooked import HookedBody
from nnx_jax.step.loops import once
from nnx_jax.step.shard_noise import ShardNoise
from nnx_jax.step.shards import Shards, add_to, as_levels, empty_levels, sum_of
from nnx_jax.step.state import TrainState, strong
from nnx_jax.step.tidy import tidied
from nnx_jax.step.window import Sums, first_bad, forward_at, terms_at

_INSIDE = (
    Stage.AFTER_FORWARD, Stage.BEFORE_LOSS, Stage.AFTER_LOSS, Stage.BEFORE_BACKWARD, Stage.DO_BACKWARD,
)  # fmt: skip
"""Stages between a shard's forward pass and its gradient, where no hook sees the whole batch."""


class TakesPartInside(StepError):
    """A hook takes part where no shard knows the whole batch; its message says which, for `Shards.whole`."""


class _InShards(StepBody):
    """What both bodies share: a microbatch is measured shard by shard, a window is added up in levels."""

    shards: Shards

    def measure(self, train: TrainState, batch: Any) -> tuple[Sums, Any, jax.Array]:
        """The sums over all shards, and model_state as it was; or those of the whole batch at once."""
        zero = train.counters[state.RESERVED]
        if self.shards.whole:
            return self.shards.total(lambda train, rows, _: self.sums(train, rows, self.key(train)), train, batch, zero)
        noise = self._noise(train, *self.shards.shapes(batch))

        def one(train: TrainState, rows: Any, shard: Any) -> Any:
            key = noise.key(self.key(train), shard)
            seen, _, invalid = self.sums(train, rows, key)
            return seen.grads, seen.num, seen.den, seen.metrics, invalid

        *parts, invalid = self.shards.total(one, train, batch, zero)
        grads, num, den, metrics = parts
        term = first_bad(num + den)
        micro = jnp.where(term >= 0, train.counters[state.BATCH], -1)
        return Sums(grads, num, den, metrics, jnp.stack([micro, term, jnp.int32(-1)])), train.model_state, invalid

    def _noise(self, train: TrainState, part: Any, whole: Any) -> ShardNoise:
        """Keys of the shards' forward passes."""
        return ShardNoise(lambda key, rows: self._forward(train, rows, key), part, whole, self.shards.count)

    def _forward(self, train: TrainState, rows: Any, key: Any) -> Any:
        at = train.counters
        forward = forward_at(self.forward, at)
        outputs, model_state = forward({**train.frozen, **train.params}, train.model_state, rows, key, True)
        terms = terms_at(self.terms, at[state.STEP], at[state.EPOCH])(outputs, rows)
        return [(term.numerator, term.denominator) for term in terms], model_state

    def add(self, train: TrainState, seen: Sums) -> tuple[Sums, dict[str, Any]]:
        """The open window with this microbatch in it, and its levels."""
        before = train.counters[state.MICRO]
        levels = add_to(train.accum["levels"], _floats(seen), before)
        grads, num, den, metrics = sum_of(levels, before + 1)
        return Sums(grads, num, den, metrics, train.accum["window"].fault), {"levels": levels}

    def with_levels(self, accum: dict[str, Any]) -> dict[str, Any]:
        """An empty accumulator with empty levels, where windows are accumulated."""
        return {**accum, "levels": empty_levels(_floats(accum["window"]), self.accumulate)} if accum else accum


class Alone:
    """An optimizer whose update is a computation of its own: what computed the gradient changes nothing in it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def update(self, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """As the optimizer itself."""
        update = tidied(self._optimizer.update)
        # Never negative, as XLA must not know.
        single = once(jnp.minimum(opt_state.count, 0).astype(jnp.int32))

        def body(_: Any, carry: Any) -> Any:
            grads, opt_state, params = carry
            new, opt_state = update(grads, opt_state, params)
            return grads, strong(opt_state), jax.tree.map(lambda n, o: n.astype(o.dtype), new, params)

        _, opt_state, params = jax.lax.fori_loop(
            jnp.zeros_like(single), single, body, (grads, strong(opt_state), params)
        )
        return params, opt_state


def _floats(sums: Sums) -> tuple[Any, Any, Any, Any]:
    return sums.grads, sums.num, sums.den, sums.metrics


class CanonicalBody(_InShards):
    """`StepBody` in shards."""

    def __init__(self, *args: Any, shards: Shards, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shards = shards

    def accumulator(self, params: Any, model_state: Any) -> dict[str, Any]:
        """The first `TrainState.accum`; in `levels` are the window's sums by their place in the fixed order."""
        return self.with_levels(super().accumulator(params, model_state))

    def opened(self, accum: dict[str, Any], train: TrainState) -> dict[str, Any]:
        """The accumulator of the next window."""
        return self.with_levels(super().opened(accum, train))


class CanonicalHooks(_InShards, HookedBody):
    """`HookedBody` in shards: for hooks that act before the forward pass and after the backward pass.

    Where hooks decide batch by batch what is kept, microbatches are added up in the order in which they come.

    Raises:
        TakesPartInside: a hook takes part between them, where no shard knows the whole batch.
    """

    def __init__(self, *args: Any, shards: Shards, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shards = shards
        for hook in () if shards.inside else self.hooks.traced:
            stage = next((stage for stage in _INSIDE if runs_on(hook, stage)), None)
            if stage is not None:
                raise TakesPartInside(f"{type(hook).__name__} is called at {stage.name}")
        if "predictions" in self.hooks.taps and not shards.inside:
            raise TakesPartInside("a hook needs predictions")

    def accumulator(self, params: Any, model_state: Any) -> dict[str, Any]:
        """The first `TrainState.accum`, with `levels`."""
        accum = super().accumulator(params, model_state)
        return self.with_levels(accum) if self._levelled else accum

    def measured(self, train: TrainState, ctx: StepContext) -> tuple[Sums, Any, jax.Array]:
        """The sums of one microbatch, whose loss hooks see once it is whole; they change nothing of it but `inside`."""
        if self.shards.inside:
            return super().measured(train, ctx)
        seen, model_state, invalid = self.measure(train, ctx.batch)
        loss = jnp.sum(seen.num * self.plan.factors(seen.den))
        top, bottom = seen.num, jnp.where(seen.den > 0, seen.den, 1.0)
        parts = jnp.where(jnp.asarray(self.plan.additive), top, jnp.where(seen.den > 0, top / bottom, 0.0))
        ctx.enter(
            raw_loss=loss,
            weight=seen.den,
            losses={
                "total_loss": loss,
                "per_component_unweighted": {name: parts[i] for i, name in enumerate(self.plan.terms)},
                "per_component_weight": dict(zip(self.plan.terms, self.plan.weights, strict=True)),
            },
        )
        if self._chain(ctx, loss) is not loss:
            raise TakesPartInside("a hook changes the loss before the backward pass")
        ctx.enter(loss=loss)
        return seen, model_state, invalid

    def gather(self, train: TrainState, ctx: StepContext, seen: Sums) -> Sums:
        """The window with this microbatch in it."""
        if not self._levelled:
            return super().gather(train, ctx, seen)
        window, kept = self.add(train, seen)
        ctx.enter(**kept)
        return window._replace(fault=self._fault(train, ctx, train.accum["window"], seen, window.grads))

    def after_backward(self, ctx: StepContext, window: Sums, seen: Sums, closes: bool) -> Sums:
        """As the base class; what a hook replaced in an open window takes the place of all its levels."""
        found = super().after_backward(ctx, window, seen, closes)
        if found is not window and self._levelled:
            ctx.enter(levels=as_levels(ctx.__dict__["levels"], _floats(found), ctx.window_count))
        return found

    def _accumulator(self, *args: Any, closed: bool, **options: Any) -> dict[str, Any]:
        accum = super()._accumulator(*args, closed=closed, **options)
        if not self._levelled:
            return accum
        return self.with_levels(accum) if closed else {**accum, "levels": args[4].__dict__["levels"]}

    @property
    def _levelled(self) -> bool:
        return self.keeps and not self.dynamic
