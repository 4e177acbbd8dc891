"""The context of an objective: the model is called as without one, and means count rows as the losses do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import DataError
from nnx_jax.engines.nnx_forward import PureModule
from tests.objectives.paradigm_toys import context

X, MASK = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, 1, 0], np.float32)
BATCH = {"x": jnp.asarray(X), "mask": jnp.asarray(MASK), "shift": jnp.full(3, 10.0)}


class Plain(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array([1.0, 2.0]))

    def __call__(self, x: jax.Array) -> Any:
        return {"score": (x @ self.w[...]).astype(jnp.bfloat16)}


class Masked(Plain):
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> Any:
        return x @ self.w[...] + (100.0 if mask is None else mask)


class Whole(Plain):
    takes_batch: ClassVar[bool] = True

    def __call__(self, batch: Mapping[str, jax.Array]) -> Any:
        return batch["x"] @ self.w[...] + batch["shift"]


@pytest.mark.parametrize("kind", [Plain, Masked, Whole])
def test_the_model_is_called_as_without_an_objective(kind: type[Plain]) -> None:
    pure = PureModule(kind())
    expected = pure.forward({**pure.params}, pure.model_state, BATCH, None, True)[0]
    found = context(kind(), BATCH).apply()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    doubled = context(kind(), BATCH).apply(2 * BATCH["x"])
    expected = pure.forward({**pure.params}, pure.model_state, {**BATCH, "x": 2 * BATCH["x"]}, None, True)[0]
    jax.tree.map(np.testing.assert_array_equal, doubled, expected)


def test_a_mean_is_over_real_rows_by_their_weight() -> None:
    values = jnp.array([[1.0, 3.0], [5.0, 7.0], [jnp.nan, jnp.inf]])
    plain = context(Plain(), BATCH).mean("m", values, weight=2.0)
    assert (float(plain.numerator), float(plain.denominator), plain.weight) == (16.0, 4.0, 2.0)
    weighted = context(Plain(), {**BATCH, "weight": jnp.array([0.5, 0.0, 9.0])}).mean("m", values)
    assert (float(weighted.numerator), float(weighted.denominator)) == (2.0, 1.0)
    by_row = context(Plain(), BATCH).mean("m", values[:, 0])
    assert (float(by_row.numerator), float(by_row.denominator)) == (6.0, 2.0)
    with pytest.raises(DataError, match="column 'weight' has shape"):
        context(Plain(), {**BATCH, "weight": jnp.ones((3, 2))}).mean("m", values[:, 0])
