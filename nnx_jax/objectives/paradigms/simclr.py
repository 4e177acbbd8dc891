"""SimCLR: two random views of a row are to be nearer to each other than to the views of all other rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ModelError
from nnx_jax.core.precision import sum_dtype, widened
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.objectives.paradigms.rows import column, positive, row_keys
from nnx_jax.objectives.targets import item_weight, weighted_sum
from nnx_jax.objectives.terms import LossTerm

Augment = Callable[[jax.Array, jax.Array], jax.Array]

_NEVER = -1e30  # finite, so that a row without any other has a gradient


def simclr_objective(augment: Augment, temperature: float = 0.5, *, nonfinite: str = "fail") -> Objective:
    """SimCLR's contrastive loss, NT-Xent (Chen et al. 2020, arXiv:2002.05709).

    Of every row two views are made and given to the model, view by view; its outputs [B, D] are brought to length 1. A
    view i whose partner is j adds `-log(exp(s_ij / T) / sum over k != i of exp(s_ik / T))`, s their scalar products;
    the loss is the mean over all views of real rows. It records `pair_accuracy`, the share of views whose nearest
    other view is the partner. Labels are not used. Validation scores the same loss, with the same views every time.

    The loss of a row depends on its whole microbatch: all views of the other real rows are its negatives. Padded rows
    and rows of weight 0 are neither views nor negatives. So a padded batch counts like the batch without padding, and
    several devices like one, but a window of two microbatches is not one of twice the rows: each row is told apart
    from those of its own microbatch. A microbatch of one real row has no negatives, a loss of 0 and no gradient.

    Args:
        augment: (key, row) -> a random view of one row, traced; the row is `batch["x"]` without its batch axis.
        temperature: T, above 0.

    Raises:
        ConfigError: (a ValueError) a temperature out of range.
        TypeError: `augment` cannot be called.
    """
    return _SimCLR(augment, temperature, nonfinite)


class _SimCLR(Objective):
    def __init__(self, augment: Augment, temperature: float, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        if not callable(augment):
            raise TypeError(f"simclr_objective: augment is a function (key, row) -> row, got {type(augment).__name__}")
        self.augment, self.temperature = augment, positive(temperature, "temperature", "simclr_objective")

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        x = column(ctx.batch, "x", "simclr_objective")
        weight = item_weight(ctx.batch, x.shape[:1], sum_dtype(x.dtype))
        first, second = (self._embedded(ctx, self._view(key, x)) for key in jax.random.split(ctx.rng))
        losses, found = nt_xent(first, second, weight > 0, self.temperature)
        views = jnp.concatenate([weight, weight])
        count = jnp.sum(views)
        term = LossTerm("nt_xent", weighted_sum(losses, views), count)
        return ObjectiveResult(term, record={"pair_accuracy": (weighted_sum(found, views), count)})

    def _view(self, key: jax.Array, x: jax.Array) -> jax.Array:
        view = jax.vmap(self.augment)(row_keys(key, x.shape[0]), x)
        real = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(view.dtype, jnp.floating)
        return view.astype(x.dtype) if real else view  # what a 16-bit model is given stays 16 bits wide

    def _embedded(self, ctx: ObjectiveContext, view: jax.Array) -> jax.Array:
        outputs = ctx.apply(view)
        if jnp.shape(outputs)[:1] != view.shape[:1] or jnp.ndim(outputs) != 2:
            shape = jnp.shape(outputs) if hasattr(outputs, "shape") else type(outputs).__name__
            raise ModelError(f"simclr_objective needs outputs [B, D] for x {list(view.shape)}, the model gave {shape}")
        return outputs


def nt_xent(first: jax.Array, second: jax.Array, real: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Return (loss, 1 where the partner is the nearest) of every view, float32 [2 B]; first views before second.

    Args:
        first, second: outputs [B, D] for the two views of every row.
        real: bool [B]; of other rows neither view is compared with, and their own values mean nothing.
    """
    n_views = 2 * first.shape[0]
    kept = jnp.concatenate([real, real])
    # Outputs of rows that do not count may be anything: 0 times infinity in the backward pass would spoil the others.
    views = jnp.where(kept[:, None], widened(jnp.concatenate([first, second])), 0.0)
    square = jnp.sum(jnp.square(views), axis=-1, keepdims=True)
    unit = views * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
    likeness = jnp.matmul(unit, unit.T, precision=jax.lax.Precision.HIGHEST) / temperature
    same = jnp.eye(n_views, dtype=bool)
    partner = jnp.roll(same, first.shape[0], axis=1)
    logits = jnp.where(kept[None, :] & ~same, likeness, _NEVER)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(partner, likeness, 0.0), axis=-1)
    found = jnp.argmax(logits, axis=-1) == jnp.argmax(partner, axis=-1)
    return losses, found.astype(losses.dtype)
