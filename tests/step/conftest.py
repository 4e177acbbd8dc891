"""Small parts for step tests: optimizers with a visible rate, toy losses with known gradients, seeded nets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.objectives.terms import LossTerm
from nnx_jax.step import StepPrograms, build_step


class OptState(NamedTuple):
    """The optimizer state of the protocol: its own update count, the last applied rate, the rest."""

    count: Any
    rate: Any
    inner: Any


class Optimizer:
    """An optax direction, scaled by a rate that is a number or a function of the count of updates."""

    def __init__(self, tx: optax.GradientTransformation, rate: Any) -> None:
        self.tx, self.rate = tx, rate

    def init(self, params: Any) -> OptState:
        return OptState(jnp.int32(0), jnp.float32(0), self.tx.init(params))

    def update(self, grads: Any, state: OptState, params: Any) -> tuple[Any, OptState]:
        rate = jnp.float32(self.rate(state.count) if callable(self.rate) else self.rate)
        direction, inner = self.tx.update(grads, state.inner, params)
        new = jax.tree.map(lambda p, d: p - (rate * d).astype(p.dtype), params, direction)
        return new, OptState(state.count + 1, rate, inner)


def sgd(rate: Any) -> Optimizer:
    return Optimizer(optax.identity(), rate)


def adam(rate: Any, *, decay: float = 0.0) -> Optimizer:
    return Optimizer(
        optax.chain(optax.scale_by_adam(eps=0.0 if decay == 0 else 1e-8), optax.add_decayed_weights(decay)), rate
    )


def target_forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    """T1 of the case book: one weight, prediction w for every item."""
    return jnp.broadcast_to(params["w"], batch["mask"].shape), model_state


def target_terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Half squared distance to the target column, mean over valid items."""
    return (LossTerm("half", jnp.sum(0.5 * (outputs - batch["t"]) ** 2 * batch["mask"]), jnp.sum(batch["mask"])),)


def slope_forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    """A loss whose gradient is the batch: g . w for every item, so the test says what every gradient is."""
    return batch["g"] @ params["w"], model_state


def slope_terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    return (LossTerm("slope", jnp.sum(jnp.where(batch["mask"] > 0, outputs, 0.0)), jnp.sum(batch["mask"])),)


def targets(*rows: Sequence[float | None]) -> list[dict[str, np.ndarray]]:
    """Microbatches of T1; None is a masked item."""
    return [
        {
            "t": np.array([0.0 if t is None else t for t in row], np.float32),
            "mask": np.array([float(t is not None) for t in row], np.float32),
        }
        for row in rows
    ]


def slopes(*grads: Any) -> list[dict[str, np.ndarray]]:
    """Microbatches of one item with these gradients."""
    return [{"g": np.atleast_1d(np.array(g, np.float32))[None], "mask": np.ones(1, np.float32)} for g in grads]


def signature(batch: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    return {name: (part.shape, part.dtype) for name, part in batch.items()}


def toy(kind: str, optimizer: Any, batches: Sequence[Any], *, w: Any = 0.0, **options: Any) -> tuple[StepPrograms, Any]:
    """Programs and a fresh carry for the "target" or "slope" toy, started at `w`."""
    forward, terms = {"target": (target_forward, target_terms), "slope": (slope_forward, slope_terms)}[kind]
    size = np.asarray(batches[0]["g"]).shape[-1] if kind == "slope" else ()
    params = {"w": np.broadcast_to(np.asarray(w, np.float32), size).copy()}
    programs = build_step(
        forward, terms, optimizer, params=params, model_state={}, signature=signature(batches[0]), **options
    )
    return programs, programs.init(params, {})


def run(
    programs: StepPrograms, carry: Any, batches: Sequence[Any], watch: Callable[[Any], Any] | None = None
) -> list[Any]:
    """One epoch, a call a microbatch; returns `watch(state)` after each closing microbatch (the weight by default)."""
    seen = []
    for number, batch in enumerate(batches):
        programs.step(carry, batch, closes=number == len(batches) - 1)
        if carry.micro == 0:
            state = programs.state(carry)
            seen.append(np.array(state.params["w"]) if watch is None else watch(state))
    return seen


def block(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """A host batch of these rows; -1 is padding, a copy of row 0."""
    at = np.maximum(rows, 0)
    return {"x": x[at], "y": y[at], "mask": (rows >= 0).astype(np.float32)}


def ce_terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])
    return (LossTerm("cross_entropy", jnp.sum(loss * batch["mask"]), jnp.sum(batch["mask"])),)


class Accuracy:
    """Correct and all, over valid rows."""

    name, size = "accuracy", 2

    def update(self, outputs: Any, batch: Any) -> Any:
        right = (jnp.argmax(outputs, -1) == batch["y"]) * batch["mask"]
        return jnp.stack([jnp.sum(right), jnp.sum(batch["mask"])])


def mlp(sizes: Sequence[int], seed: int = 0) -> tuple[dict[str, np.ndarray], Any]:
    """Weights and forward of a ReLU net."""
    draw = np.random.default_rng(seed)
    params = {}
    for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
        params[f"{i}.kernel"] = (draw.normal(size=(a, b)) / a**0.5).astype(np.float32)
        params[f"{i}.bias"] = np.zeros(b, np.float32)
    last = len(sizes) - 2

    def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        h = batch["x"]
        for i in range(last + 1):
            h = h @ params[f"{i}.kernel"] + params[f"{i}.bias"]
            h = jax.nn.relu(h) if i < last else h
        return h, model_state

    return params, forward


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file, for tests in this folder."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})
