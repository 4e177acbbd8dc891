"""SimCLR: NT-Xent against the paper's sums, and rows that do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.hooks import GradientAccumulationHook
from nnx_jax.model import NNModel
from nnx_jax.objectives import merge_terms, simclr_objective, total_value
from nnx_jax.objectives.paradigms.simclr import nt_xent
from tests.objectives.paradigm_toys import (
    assert_close,
    context,
    fit,
    loss_of,
    masked,
    numeric,
    padded,
    terms_of,
    value_and_grads,
    weights,
)

DRAW = np.random.default_rng(5)
X = DRAW.normal(size=(5, 3)).astype(np.float32)


def noisy(key: jax.Array, row: jax.Array) -> jax.Array:
    return row + 0.3 * jax.random.normal(key, row.shape)


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, *, norm: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        return self.last(jnp.tanh(x if self.norm is None else self.norm(x)))


def by_hand(first: np.ndarray, second: np.ndarray, temperature: float) -> np.ndarray:
    """The loss of every view, as equation 1 of the paper is written."""
    views = np.concatenate([first, second]).astype(np.float64)
    n, out = len(first), []
    like = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)  # noqa: E731
    for i in range(2 * n):
        j = (i + n) % (2 * n)
        below = sum(np.exp(like(views[i], views[k]) / temperature) for k in range(2 * n) if k != i)
        out.append(-np.log(np.exp(like(views[i], views[j]) / temperature) / below))
    return np.array(out)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_the_loss_of_every_view_is_the_papers(temperature: float) -> None:
    first, second = DRAW.normal(size=(2, 5, 3)).astype(np.float32)
    losses, _ = nt_xent(jnp.asarray(first), jnp.asarray(second), jnp.ones(5, bool), temperature)
    np.testing.assert_allclose(losses, by_hand(first, second, temperature), rtol=2e-5)


def test_equal_views_of_two_unlike_rows() -> None:
    """Scalar products 1 with the partner, 0 with the two others: log(e^(1/T) + 2) - 1/T."""
    losses, found = nt_xent(jnp.eye(2), 3.0 * jnp.eye(2), jnp.ones(2, bool), 0.5)
    np.testing.assert_allclose(losses, np.log(np.exp(2.0) + 2.0) - 2.0, rtol=1e-6)
    np.testing.assert_array_equal(found, 1.0)


def test_the_nearest_view_is_found_or_not() -> None:
    """Row 0's second view lies at row 1's first one, and the other way round."""
    first, second = jnp.eye(2), jnp.eye(2)[::-1]
    assert nt_xent(first, second, jnp.ones(2, bool), 0.5)[1].tolist() == [0, 0, 0, 0]


def test_the_gradient_is_that_of_the_papers_sum() -> None:
    first, second = DRAW.normal(size=(2, 4, 3)).astype(np.float32)
    found = jax.grad(lambda a: jnp.mean(nt_xent(a, jnp.asarray(second), jnp.ones(4, bool), 0.5)[0]))(first)
    expected = numeric(lambda a: float(np.mean(by_hand(a, second, 0.5))), first)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_rows_that_do_not_count_are_no_negatives_whatever_they_hold() -> None:
    first, second = DRAW.normal(size=(2, 5, 3)).astype(np.float32)
    real = np.array([True, False, True, True, False])
    first[1], second[4] = np.nan, np.inf
    weigh = jnp.asarray(np.r_[real, real])

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weigh, nt_xent(a, b, jnp.asarray(real), 0.5)[0], 0.0))

    expected = by_hand(first[real], second[real], 0.5)
    np.testing.assert_allclose(loss(jnp.asarray(first), jnp.asarray(second)), expected.sum(), rtol=1e-5)
    for grads in jax.grad(loss, (0, 1))(jnp.asarray(first), jnp.asarray(second)):
        assert np.isfinite(grads).all()
        assert not np.asarray(grads)[~real].any()


def test_a_padded_batch_counts_like_the_batch() -> None:
    objective = simclr_objective(noisy)
    plain, full = value_and_grads(objective, Net(), {"x": X}), value_and_grads(objective, Net(), padded({"x": X}))
    assert plain[0] == pytest.approx(full[0], rel=1e-6)
    assert_close(plain[1], full[1])


def test_rows_of_weight_0_are_left_out() -> None:
    objective = simclr_objective(noisy)
    batch = padded({"x": X})
    weighted = {"x": batch["x"], "weight": batch["mask"]}
    assert loss_of(objective, Net(), weighted) == pytest.approx(loss_of(objective, Net(), {"x": X}), rel=1e-6)


def test_one_row_has_no_negatives() -> None:
    value, grads = value_and_grads(simclr_objective(noisy), Net(), {"x": X[:1]})
    assert value == pytest.approx(0.0, abs=1e-6)
    assert all(not np.abs(grad).max() > 1e-6 for grad in grads.values())


def test_no_row_is_no_loss() -> None:
    result = simclr_objective(noisy)(context(Net(), masked({"x": X})))
    (term,) = terms_of(result)
    assert (float(term.numerator), float(term.denominator)) == (0.0, 0.0)
    assert all(not grad.any() for grad in value_and_grads(simclr_objective(noisy), Net(), masked({"x": X}))[1].values())


def test_negatives_are_those_of_ones_own_microbatch() -> None:
    """A window adds the sums of its microbatches: not the loss of the whole, whose rows have more negatives."""
    objective, same = simclr_objective(lambda key, row: row), Net()
    halves = [terms_of(objective(context(same, {"x": part}))) for part in (X[:2], X[2:])]
    window = float(total_value(merge_terms(*halves)))
    embedded = np.asarray(same(jnp.asarray(X)))
    parts = [by_hand(part, part, 0.5) for part in (embedded[:2], embedded[2:])]
    assert window == pytest.approx(np.concatenate(parts).mean(), rel=1e-5)
    assert window < loss_of(objective, same, {"x": X}) - 0.1


def test_both_views_differ_and_so_do_rows_and_microbatches() -> None:
    seen: list[Any] = []
    net = lambda x: seen.append(np.asarray(x)) or x  # noqa: E731
    rows = np.ones((3, 2), np.float32)
    for seed in (0, 1):
        simclr_objective(noisy)(context(net, {"x": rows}, seed=seed))
    assert len({view.tobytes() for view in np.concatenate(seen)}) == 12


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="simclr_objective: temperature is .*; give a number above 0"):
        simclr_objective(noisy, temperature)


def test_what_is_no_function_or_no_embedding_is_refused() -> None:
    not_callable: Any = 3
    with pytest.raises(TypeError, match=r"augment is a function \(key, row\) -> row, got int"):
        simclr_objective(not_callable)
    with pytest.raises(ModelError, match=r"outputs \[B, D\] for x \[5, 3\], the model gave \(5,\)"):
        simclr_objective(noisy)(context(lambda x: x[:, 0], {"x": X}))
    with pytest.raises(DataError, match="simclr_objective needs column 'x'"):
        simclr_objective(noisy)(context(Net(), {"images": X}))


def test_a_run_with_batch_norm_records_the_share_of_pairs(tmp_path: Path) -> None:
    """Padded last batch; the views go through the norms one by one, and validation draws the same ones every time."""
    rows = np.concatenate([X, X + 1, X - 1])  # 15 rows in batches of 4
    model = NNModel(module=Net(norm=True))
    run = fit(tmp_path, model, simclr_objective(noisy), {"x": rows}, batch=4, rate=0.0, val=True, n_epochs=2)
    for name in ("train_loss", "val_loss", "train_pair_accuracy", "val_pair_accuracy"):
        assert np.isfinite([epoch[name] for epoch in run.epochs]).all()
    assert run.epochs[0]["train_loss"] != run.epochs[1]["train_loss"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:defer_reduce does nothing here")
def test_devices_share_the_negatives(tmp_path: Path) -> None:
    """Two devices with half of each microbatch's rows, in windows of two."""
    rows, objective = {"x": np.concatenate([X, X + 1, X - 1])[:12]}, simclr_objective(noisy)
    one, two = NNModel(module=Net()), NNModel(module=Net())
    fit(tmp_path / "one", one, objective, rows, batch=4, window=2)
    deferred = [GradientAccumulationHook(2, defer_reduce=True)]
    fit(tmp_path / "two", two, objective, rows, batch=4, hooks=deferred, mesh={"data": 2})
    assert_close(weights(one), weights(two), 1e-5)
