"""Models whose probabilities are known by hand: the outputs are the inputs times one weight of 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.decisions import Choice, Option
from nnx_jax.model import NNModel
from nnx_jax.params.model import NNModelParams

ANIMALS = Choice("Which?", [("x", "Fox"), ("y", "Cat"), ("z", "Dog")])
ROW = np.log(np.array([[0.2, 0.3, 0.5]], np.float32))
"""Logits whose softmax is .2, .3, .5."""
LABELS = ("x", "y", "z")


class Echo(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...]


class Fails(Echo):
    """Switches its own modes, then raises."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.eval()
        raise RuntimeError("the graphics card left")


def model(module: nnx.Module | None = None, loss: str = "cross_entropy") -> NNModel:
    return NNModel(module=module or Echo(), params=NNModelParams(loss=loss))


class Stranger:
    """Somebody else's classifier: `predict_proba` returns what it was told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def predict_proba(self, rows: Any) -> Any:
        return self.answer


def options(*ids: str) -> list[Option]:
    return [Option(known, f"it is {known}") for known in ids]
