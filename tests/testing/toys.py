"""Models of one's own, as users of `assert_exact` write them; at the top of a module, so that processes import them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax import FeedForwardParams, NNModel, NNModelParams
from nnx_jax.params.metrics import MetricParams


def plain() -> NNModel:
    """A built-in net with an accuracy."""
    return NNModel(
        FeedForwardParams(hidden_dims=[8]), NNModelParams(metrics=[MetricParams.from_state({"kind": "accuracy"})])
    )


class Noisy(nnx.Module):
    """Dropout, and BatchNorm where asked for."""

    def __init__(self, norm: bool) -> None:
        rngs = nnx.Rngs(0)
        self.body, self.drop = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.body(x)
        return self.head(self.drop(jnp.tanh(hidden if self.norm is None else self.norm(hidden))))


class Mixing(nnx.Module):
    """Rows know of each other: every one is moved by the mean of the batch."""

    def __init__(self) -> None:
        self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x - 5 * jnp.mean(x, axis=0, keepdims=True) ** 2)


def data(rows: int = 40) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": draw.integers(0, 3, rows)}
