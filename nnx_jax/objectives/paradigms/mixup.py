"""Mixup: the model learns on mixtures of two rows, and owes each the share of the loss that it has in the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.precision import widened
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.objectives.paradigms.rows import column, positive, row_keys
from nnx_jax.objectives.terms import LossTerm


def mixup_objective(alpha: float = 0.2, loss: Any = None, *, nonfinite: str = "fail") -> Objective:
    """Mixup (Zhang et al. 2018, arXiv:1710.09412) with the model's loss, or another.

    A share `s ~ Beta(alpha, alpha)` is drawn for every microbatch and each row gets a partner by a random permutation
    of the real rows: `x~ = s x + (1 - s) x_partner`, and the loss is `s loss(f(x~), y) + (1 - s) loss(f(x~),
    y_partner)`. For cross entropy that is the loss with mixed targets; for squared errors it differs from it by a
    constant. Of s and 1 - s the larger is the row's own, which mixes the same pairs in the same shares and lets
    declared metrics compare the outputs with the label that has the larger share. It records `mixup_share`. Validation
    scores the model's loss and metrics on rows as they are.

    The pairs depend on the whole microbatch; the loss of a pair does not. Padded rows are partners of nobody: a padded
    batch draws and counts like the batch without padding, and several devices like one.

    Args:
        alpha: of the Beta distribution, above 0; the larger, the more even the mixtures.
        loss: a loss in place of the model's, see `objectives.build_loss`.

    Raises:
        ConfigError: (a ValueError) alpha out of range.
    """
    return _Mixup(alpha, loss, nonfinite)


class _Mixup(Objective):
    scores, labels = "loss", True

    def __init__(self, alpha: float, loss: Any, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        self.alpha = positive(alpha, "alpha", "mixup_objective")
        self.loss: Loss | None = None if loss is None else build_loss(loss)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        if self.loss is None:
            raise ConfigError("mixup_objective() takes the model's loss when it is trained; give one to call it")
        if not ctx.train:
            outputs = ctx.apply()
            return ObjectiveResult(self.loss(outputs, ctx.batch), outputs=outputs)
        for_share, for_partner = jax.random.split(ctx.rng)
        share = jax.random.beta(for_share, self.alpha, self.alpha, dtype=jnp.float32)
        share = jnp.maximum(share, 1.0 - share)
        partner = partners(for_partner, ctx.mask > 0)
        other = {name: values[partner] for name, values in ctx.batch.items()}
        outputs = ctx.apply(mixed(column(ctx.batch, "x", "mixup_objective"), other["x"], share))
        terms = mixed_terms(self.loss(outputs, ctx.batch), self.loss(outputs, other), share)
        return ObjectiveResult(terms, record={"mixup_share": share}, outputs=outputs)

    def bind(self, loss: Loss) -> Objective:
        return self if self.loss is not None else _Mixup(self.alpha, loss, self.nonfinite)


def partners(key: jax.Array, real: jax.Array) -> jax.Array:
    """Return a random permutation of the real rows, int32 [B]; every other row is its own partner."""
    draws = jax.vmap(lambda own: jax.random.uniform(own))(row_keys(key, real.shape[0]))
    shuffled = jnp.argsort(jnp.where(real, draws, jnp.inf))  # the real rows, in random order, before all others
    place = jnp.cumsum(real) - 1
    rows = jnp.arange(real.shape[0], dtype=jnp.int32)
    return jnp.where(real, shuffled[place].astype(jnp.int32), rows)


def mixed(x: jax.Array, other: jax.Array, share: jax.Array) -> jax.Array:
    """`share * x + (1 - share) * other`, in the type of x; bytes (images) are rounded.

    Raises:
        DataError: whole numbers that are no bytes, or bools: between two of them there is nothing.
    """
    both = share * widened(x) + (1.0 - share) * widened(other)
    if x.dtype == jnp.uint8:
        return jnp.round(both).astype(x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise DataError(f"mixup_objective mixes real numbers or bytes, but column 'x' is {x.dtype}; give floats")
    return both.astype(x.dtype)


def mixed_terms(own: Sequence[LossTerm], other: Sequence[LossTerm], share: jax.Array) -> list[LossTerm]:
    """Sums and counts of two losses of the same outputs, each times its share."""
    return [
        LossTerm(
            a.name,
            share * a.scaled + (1.0 - share) * b.scaled,
            None if a.denominator is None else share * a.denominator + (1.0 - share) * b.denominator,
            a.reduction,
            a.weight,
        )
        for a, b in zip(own, other, strict=True)
    ]
