"""What a trace tells of rows: apart, compared, or nobody knows; each function by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_jax.step.apart import apart

SPEC = {"x": jax.ShapeDtypeStruct((8, 6), jnp.float32), "mask": jax.ShapeDtypeStruct((8,), jnp.float32)}
GIVEN = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32), "b": jax.ShapeDtypeStruct((4,), jnp.float32)}


def hidden(given: Any, batch: Any) -> jax.Array:
    return nnx.gelu(batch["x"] @ given["w"] + given["b"])


APART: dict[str, Callable[[jax.Array], Any]] = {
    "as it is": lambda h: h,
    "a softmax": lambda h: jax.nn.log_softmax(h),
    "its own mean": lambda h: h - h.mean(axis=-1, keepdims=True),
    "reshaped": lambda h: h.reshape(-1, 2, 2).transpose(1, 0, 2).transpose(1, 2, 0).reshape(-1, 4),
    "with itself": lambda h: jnp.einsum("bi,bj->bij", h, h),
    "chosen": lambda h: jnp.where(h > 1, jnp.zeros_like(h) + 1, jnp.ones((1, 4))),
    "looked up": lambda h: jnp.take(jnp.arange(12.0).reshape(3, 4), jnp.argmax(h, axis=-1) % 3, axis=0),
    "sums along itself": lambda h: jnp.concatenate([jnp.cumsum(h, axis=1), jnp.sort(h, axis=1)[:, :2]], axis=1),
    "pooled": lambda h: nnx.max_pool(h.reshape(-1, 4, 1), (2,), (2,)),
    "remembered": lambda h: jax.checkpoint(jnp.sin)(h),
}
COMPARED: dict[str, Callable[[jax.Array], Any]] = {
    "the batch's mean": lambda h: h - h.mean(axis=0),
    "the largest of the batch": lambda h: h / jnp.max(h),
    "every row with every other": lambda h: h @ h.T,
    "a sum over rows before": lambda h: jnp.cumsum(h, axis=0),
    "in order": lambda h: jnp.sort(h, axis=0),
    "in a function": lambda h: jax.jit(lambda h: h - jnp.sum(h, axis=0))(h),
}
UNKNOWN: dict[str, Callable[[jax.Array], Any]] = {
    "backwards": lambda h: h + h[::-1],
    "the neighbour": lambda h: h + jnp.roll(h, 1, axis=0),
    "the first": lambda h: h + h[:1],
    "its place": lambda h: h + jnp.arange(1.0 * len(h))[:, None],
    "how many there are": lambda h: h / h.shape[0],
    "a loop": lambda h: jax.lax.scan(lambda c, x: (c, x + c), jnp.zeros(4), h)[1],
    "so many rows": lambda h: h.reshape(8, 4),
    "the same for all": lambda h: jnp.ones(len(h)),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, group in ((True, APART), (False, COMPARED), (None, UNKNOWN)) for name in group],
)
def test_rows(kind: bool | None, name: str) -> None:
    """Each function is told for what it is."""
    function = {True: APART, False: COMPARED, None: UNKNOWN}[kind][name]
    found = apart(lambda given, batch: function(hidden(given, batch)), GIVEN, SPEC, 4)
    assert found is kind


def test_nets_have_their_rows_apart() -> None:
    """Convolutions, norms of a row and attention look at one row; what a layer adds is the same for all."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm, self.out = nnx.LayerNorm(64, rngs=rngs), nnx.Linear(64, 3, rngs=rngs)
            self.heads = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2)).reshape(x.shape[0], -1, 4)
            return self.out(self.norm(self.heads(x).reshape(x.shape[0], -1)))

    graph, params = nnx.split(Net(nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((8, 8, 8, 1), jnp.float32)
    assert apart(lambda params, x: nnx.merge(graph, params)(x), params, images, 4) is True
