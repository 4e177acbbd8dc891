"""Deferred reduction: each device adds up its own rows' gradients; they are reduced once, at the window's end.

For a replicated model over a mesh with one data axis. Numerators and denominators of a microbatch are small and are
summed at once, so hooks see the loss of the whole batch; only the gradient sums stay where they were made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnx_jax.core.errors import StepError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.objectives.terms import LossTerm, term_value
from nnx_jax.step import rng, state
from nnx_jax.step.context import StepContext
from nnx_jax.step.hooked import HookedBody
from nnx_jax.step.state import TrainState
from nnx_jax.step.window import Sums

OUT = ("predictions", "loss", "raw_loss", "losses", "weight", "slots", "metrics")


class LocalBody(HookedBody):
    """A hooked body whose window accumulator has a leading axis of devices.

    Raises:
        StepError: a window of one microbatch, a model that keeps statistics of the whole batch, or a hook that does the
            backward pass itself.
    """

    spread = ("accum/window/grads/",)
    """Prefixes of the names of leaves that have a part on each device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        mesh = self.hooks.mesh
        if len(mesh.shape) != 1:
            raise StepError(f"deferred reduction needs a mesh with one axis, got {dict(mesh.shape)}; leave it off")
        if self.accumulate == 1:
            raise StepError("deferred reduction needs a window of several microbatches; set k, or leave it off")
        if self.dynamic:
            raise StepError(
                "deferred reduction needs windows of a fixed length; leave it off beside a hook that decides "
                "at BEFORE_BATCH what is kept"
            )
        if self.hooks.owner(Stage.DO_BACKWARD) is not None:
            raise StepError("deferred reduction does the backward pass itself; leave it off beside a hook that does")
        self.mesh, (self.axis,) = mesh, mesh.axis_names

    def accumulator(self, params: Any, model_state: Any) -> dict[str, Any]:
        """The first `TrainState.accum`; gradient sums [devices, ...]."""
        if jax.tree.leaves(model_state):
            raise StepError(
                "deferred reduction cannot train a model that keeps statistics of its batches (BatchNorm): they would "
                "be each device's own; leave it off"
            )
        return self._spread(super().accumulator(params, model_state))

    def _spread(self, accum: dict[str, Any]) -> dict[str, Any]:
        window: Sums = accum["window"]
        size = self.mesh.size
        made = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), window.grads)
        return {**accum, "window": window._replace(grads=self._placed(made))}

    def _placed(self, tree: Any) -> Any:
        where = NamedSharding(self.mesh, PartitionSpec(self.axis))
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, where), tree)

    def measured(self, train: TrainState, ctx: StepContext) -> tuple[Sums, Any, jax.Array]:
        """The sums of one microbatch: gradients [devices, ...], everything else of the whole batch."""
        spread, whole = PartitionSpec(self.axis), PartitionSpec()
        out: dict[str, Any] = {}

        def local(train: TrainState, batch: Any) -> Any:
            inner = ctx.fork(batch=batch, params=train.params)
            seen, model_state, invalid = super(LocalBody, self).measured(train, inner)
            grads = jax.tree.map(lambda leaf: leaf[None], seen.grads)
            kept = {name: inner.__dict__[name] for name in OUT}
            predictions = kept.pop("predictions")
            total = lambda value: jax.lax.psum(value, self.axis)  # noqa: E731
            fault = jax.lax.pmax(seen.fault, self.axis)
            sums = (total(seen.num), total(seen.den), total(seen.metrics), fault)
            return grads, predictions, (sums, model_state, total(invalid), kept)

        grads, predictions, (sums, model_state, invalid, out) = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(whole, spread),
            out_specs=(spread, spread, whole),
            check_vma=False,
        )(train, ctx.batch)
        ctx.enter(predictions=predictions, **out)
        return Sums(grads, *sums), model_state, invalid

    def key(self, train: TrainState) -> jax.Array:
        """Noise of this device's rows."""
        key = rng.stream_key(train.rng, rng.DROPOUT, train.counters[state.BATCH])
        return jax.random.fold_in(key, jax.lax.axis_index(self.axis))

    def _objective(self, ctx: StepContext, num: Any, den: Any, terms: Sequence[LossTerm]) -> tuple[jax.Array, int]:
        """The local sums to differentiate, under the loss of the whole batch; T(L, params) split as s L + R."""
        total = jax.lax.stop_gradient(jax.lax.psum((num, den), self.axis))
        loss = jnp.sum(total[0] * self.plan.factors(total[1]))
        tops = jax.lax.stop_gradient(jax.lax.psum([term.numerator for term in terms], self.axis))
        parts = [
            term_value(replace(term, numerator=top, denominator=None if term.denominator is None else bottom))
            for term, top, bottom in zip(terms, tops, total[1], strict=True)
        ]
        show = partial(self._show_in, ctx=ctx, den=total[1], terms=terms, parts=parts)
        changed, slope = self._slope(ctx, loss, show)
        values = self.plan.scalars(num, total[1])
        if changed is None:
            return values, 1
        first = self.plan.groups[0][0]
        rest = (changed - slope * loss) / self.mesh.size  # every device differentiates it, and they are added
        divided = self.plan.fused or self.plan.additive[first]
        weight = 1.0 if divided else total[1][first] / (self.plan.weights[first] or 1.0)
        return (values * slope).at[0].add(rest * weight), self._reference(ctx.batch)

    def _reference(self, batch: Mapping[str, Any]) -> int:
        """As the base class, of the whole batch: a loss scale overflows where it does on one device."""
        self._ref = super()._reference(batch) * (1 << round(math.log2(self.mesh.size)))
        return self._ref

    def _looks(self, ctx: StepContext, tree: Any) -> jax.Array:
        """As the base class; each device looks at its own sums, so that no gradient travels inside a window."""
        look = super()._looks
        return jnp.sum(jax.vmap(lambda own: look(ctx, own))(tree), axis=0)

    def after_backward(self, ctx: StepContext, window: Sums, seen: Sums, closes: bool) -> Sums:
        """As the base class, on the reduced sums; what a hook replaced goes to the first device's."""
        reduced = window._replace(grads=_sum(window.grads))
        ctx.enter(reduced=reduced.grads)
        found = super().after_backward(ctx, reduced, seen._replace(grads=_sum(seen.grads)), closes)
        if found is reduced:
            return window
        grads = jax.tree.map(lambda whole, part: jnp.zeros_like(part).at[0].set(whole), found.grads, window.grads)
        return window._replace(grads=self._placed(grads))

    def finish(
        self, carry: Any, ctx: StepContext, window: Sums, seen: Sums, model_state: Any, invalid: Any, run: Any,
        veto: Any, closes: bool,
    ) -> Any:  # fmt: skip
        """As the base class; the update of a window is made of the reduced sums."""
        window = window._replace(grads=ctx.__dict__["reduced"]) if closes else window
        return super().finish(carry, ctx, window, seen, model_state, invalid, run, veto, closes)

    def _accumulator(self, *args: Any, closed: bool, **options: Any) -> dict[str, Any]:
        accum = super()._accumulator(*args, closed=closed, **options)
        return self._spread(accum) if closed else accum


def _sum(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree)
