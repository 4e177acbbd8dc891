"""The law: however the rows are cut, masked and padded, a window's update is one batch's on the union of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.objectives.terms import LossTerm
from nnx_jax.step import build_step, stack_batches

Kit = SimpleNamespace
BATCH, WIDTH, RATE = 4, 3, 0.5


def squares(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Half squared error, mean over valid rows."""
    error = (outputs[:, 0] - batch["y"]) ** 2
    return (LossTerm("half", jnp.sum(0.5 * jnp.where(batch["mask"] > 0, error, 0.0)), jnp.sum(batch["mask"])),)


def dyadic(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Small multiples of 1/4: every product and sum of one update is exact in float32."""
    draw = np.random.default_rng(seed)
    return (draw.integers(-4, 5, (rows, WIDTH)) / 4).astype(np.float32), (draw.integers(-4, 5, rows) / 2).astype(
        np.float32
    )


def bare_update(params: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """The bare loop: one SGD update of a two-layer ReLU net on whole arrays, plain numpy in float64, rounded once."""
    p = {name: value.astype(np.float64) for name, value in params.items()}
    pre = x @ p["0.kernel"] + p["0.bias"]
    hidden = np.maximum(pre, 0.0)
    error = (hidden @ p["1.kernel"] + p["1.bias"])[:, 0] - y
    factor = np.float64(np.float32(1) / np.float32(len(x)))  # the step multiplies by the rounded reciprocal
    back = error[:, None] * p["1.kernel"].T * (pre > 0)
    sums = {"0.kernel": x.T @ back, "0.bias": back.sum(0), "1.kernel": hidden.T @ error[:, None]}
    sums["1.bias"] = error.sum(keepdims=True)
    grads = {name: (value * factor).astype(np.float32) for name, value in sums.items()}
    return {name: params[name] - np.float32(RATE) * grads[name] for name in params}


@pytest.fixture(scope="module")
def net() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    sizes = {"0.kernel": (WIDTH, 4), "0.bias": (4,), "1.kernel": (4, 1), "1.bias": (1,)}
    return {name: (draw.integers(-2, 3, size) / 2).astype(np.float32) for name, size in sizes.items()}


@pytest.fixture(scope="module", params=[1, 2, 4])
def programs(request: pytest.FixtureRequest, kit: Kit, net: dict[str, np.ndarray]) -> Any:
    _, forward = kit.mlp([WIDTH, 4, 1])
    shapes = {"x": ((BATCH, WIDTH), np.float32), "y": ((BATCH,), np.float32), "mask": ((BATCH,), np.float32)}
    return build_step(
        forward, squares, kit.sgd(RATE), params=net, model_state={}, signature=shapes, accumulate=request.param
    )


def cut(x: np.ndarray, y: np.ndarray, counts: list[int], noise: float) -> list[dict[str, np.ndarray]]:
    """Microbatches with `counts` valid rows each, in any place; masked rows hold `noise`."""
    batches, at = [], 0
    for count in counts:
        rows = {"x": np.full((BATCH, WIDTH), noise, np.float32), "y": np.full(BATCH, noise, np.float32)}
        rows["mask"] = np.zeros(BATCH, np.float32)
        places = (np.arange(count) + at) % BATCH
        rows["x"][places], rows["y"][places] = x[at : at + count], y[at : at + count]
        rows["mask"][places] = 1.0
        batches.append(rows)
        at += count
    return batches


def windowed(programs: Any, net: dict[str, np.ndarray], batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    carry = programs.init(net, {})
    programs.span_stacked(carry, stack_batches(batches, 4), len(batches))
    return {name: np.array(leaf) for name, leaf in programs.state(carry).params.items()}


@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 1.0, 1e30]))
def test_dyadic_rows_give_equal_bits(
    programs: Any, net: dict[str, np.ndarray], data: Any, seed: int, noise: float
) -> None:
    """Full and shorter windows, ragged and empty microbatches, whatever stands in masked rows: bit for bit."""
    size = data.draw(st.integers(1, programs.accumulate))
    counts = data.draw(st.lists(st.integers(0, BATCH), min_size=size, max_size=size))
    x, y = dyadic(seed, sum(counts))
    found = windowed(programs, net, cut(x, y, counts, noise))
    wanted = bare_update(net, x, y) if sum(counts) else net
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in net)
    assert programs.watch.compiles == {"span_stacked": 1}


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_gaussian_rows_agree_to_rounding(programs: Any, net: dict[str, np.ndarray], seed: int, data: Any) -> None:
    draw = np.random.default_rng(seed)
    size = data.draw(st.integers(1, programs.accumulate))
    counts = data.draw(st.lists(st.integers(1, BATCH), min_size=size, max_size=size))
    x = draw.normal(size=(sum(counts), WIDTH)).astype(np.float32)
    y = draw.normal(size=sum(counts)).astype(np.float32)
    weights = {name: value + draw.normal(size=value.shape).astype(np.float32) for name, value in net.items()}
    found, wanted = windowed(programs, weights, cut(x, y, counts, 7.0)), bare_update(weights, x, y)
    for name in net:
        scale = max(1.0, float(np.abs(wanted[name]).max()), float(np.abs(weights[name]).max()))
        assert np.abs(found[name] - wanted[name]).max() <= 1e-6 * scale
    assert jax.tree.structure(found) == jax.tree.structure(dict(net))
