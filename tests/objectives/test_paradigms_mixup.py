"""Mixup: pairs of real rows, shares of a Beta distribution, and losses that are those of mixed targets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data import ArrayDataset
from nnx_jax.model import NNModel
from nnx_jax.objectives import LossTerm, build_loss, mixup_objective
from nnx_jax.objectives.losses import cross_entropy
from nnx_jax.objectives.paradigms.mixup import mixed, partners
from nnx_jax.params.model import NNModelParams
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
)

DRAW = np.random.default_rng(6)
X, Y = DRAW.normal(size=(6, 3)).astype(np.float32), np.array([0, 1, 2, 1, 0, 2], np.int32)
BATCH = {"x": X, "y": Y}


def net(outputs: int = 3) -> nnx.Linear:
    return nnx.Linear(3, outputs, rngs=nnx.Rngs(0))


def drawn(seed: int, rows: int = 6, alpha: float = 0.2) -> tuple[float, np.ndarray]:
    """(share, partner of every row) of one microbatch, from what the model is given and the record."""
    seen: list[Any] = []
    model = lambda x: seen.append(np.asarray(x, np.float64)) or jnp.zeros((rows, 2))  # noqa: E731
    one_hot = {"x": np.eye(rows, dtype=np.float32), "y": np.zeros(rows, np.int32)}
    result = mixup_objective(alpha, "cross_entropy")(context(model, one_hot, seed=seed))
    share = float(result.record["mixup_share"])
    return share, np.argmax(seen[0] - share * np.eye(rows), axis=1)


def mixtures(seed: int) -> tuple[float, np.ndarray, np.ndarray]:
    """(share, mixed rows, mixed one-hot targets) as the paper has them."""
    share, partner = drawn(seed)
    targets = np.eye(3)[Y]
    return share, share * X + (1 - share) * X[partner], share * targets + (1 - share) * targets[partner]


def soft_cross_entropy(kernel: np.ndarray, bias: np.ndarray, x: np.ndarray, targets: np.ndarray) -> float:
    logits = x @ kernel + bias
    return float(-np.mean(np.sum(targets * (logits - np.log(np.exp(logits).sum(-1, keepdims=True))), axis=-1)))


@pytest.mark.parametrize("seed", [0, 3])
def test_the_loss_and_its_gradient_are_those_of_mixed_targets(seed: int) -> None:
    _, x, targets = mixtures(seed)
    model = net()
    kernel, bias = (np.asarray(part[...], np.float64) for part in (model.kernel, model.bias))
    value, grads = value_and_grads(mixup_objective(loss="cross_entropy"), model, BATCH, seed=seed)
    assert value == pytest.approx(soft_cross_entropy(kernel, bias, x, targets), rel=1e-5)
    expected = numeric(lambda k: soft_cross_entropy(k, bias, x, targets), kernel)
    np.testing.assert_allclose(grads["kernel"], expected, atol=1e-5)


def test_squared_errors_have_the_gradient_of_mixed_targets() -> None:
    share, partner = drawn(1)
    values = DRAW.normal(size=6).astype(np.float32)
    model = net(1)
    kernel, bias = (np.asarray(part[...], np.float64) for part in (model.kernel, model.bias))
    x, targets = (share * part + (1 - share) * part[partner] for part in (X, values))
    _, grads = value_and_grads(mixup_objective(loss="mse"), model, {"x": X, "y": values}, seed=1)
    expected = numeric(lambda k: float(np.mean(((x @ k + bias)[:, 0] - targets) ** 2)), kernel)
    np.testing.assert_allclose(grads["kernel"], expected, atol=1e-5)


def test_ignored_labels_and_class_weights_divide_by_what_is_left() -> None:
    """Two rows, the second without a label: the mixture has the first one's share of both, in both halves."""
    loss = cross_entropy(class_weights=[1.0, 3.0])
    batch = {"x": X[:2], "y": np.array([1, -100], np.int32)}
    model = lambda x: jnp.stack([x[:, 0], jnp.zeros(2)], axis=1)  # noqa: E731
    seed = next(seed for seed in range(50) if drawn(seed, 2)[1].tolist() == [1, 0] and drawn(seed, 2)[0] < 0.9)
    share, _ = drawn(seed, 2)
    first = share * X[0, 0] + (1 - share) * X[1, 0]
    second = share * X[1, 0] + (1 - share) * X[0, 0]
    per_row = np.log1p(np.exp([first, second]))  # -log p(class 1) for logits (a, 0)
    (term,) = terms_of(mixup_objective(loss=loss)(context(model, batch, seed=seed)))
    assert float(term.denominator) == pytest.approx(3.0)
    assert float(term.numerator) == pytest.approx(3.0 * (share * per_row[0] + (1 - share) * per_row[1]), rel=1e-5)


def test_terms_of_a_users_own_keep_their_shapes() -> None:
    """A mean and a sum: each numerator and denominator is shared out."""
    seed = next(seed for seed in range(50) if drawn(seed, 2)[1].tolist() == [1, 0])
    share, _ = drawn(seed, 2)

    def loss(outputs: Any, batch: Any) -> list[LossTerm]:
        first = batch["y"][0]
        return [LossTerm("mean", first, first, scale=jnp.float32(2.0)), LossTerm("sum", first, reduction="sum")]

    batch = {"x": X[:2], "y": np.array([1.0, 5.0], np.float32)}
    result = mixup_objective(loss=build_loss(loss))(context(lambda x: x, batch, seed=seed))
    mean, added = terms_of(result)
    expected = share * 1 + (1 - share) * 5
    assert (float(mean.numerator), float(mean.denominator)) == pytest.approx((2 * expected, expected), rel=1e-6)
    assert (float(added.numerator), added.denominator, added.reduction) == (pytest.approx(expected), None, "sum")


def test_shares_are_of_the_beta_distribution_the_larger_first() -> None:
    objective, batch = mixup_objective(0.4, "cross_entropy"), {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, int)}

    def share(seed: Any) -> Any:
        return objective(context(lambda x: x, batch, seed=seed)).record["mixup_share"]

    found = np.array(jax.jit(jax.vmap(share))(jnp.arange(4000)))
    expected = np.random.default_rng(0).beta(0.4, 0.4, 100_000)
    expected = np.maximum(expected, 1 - expected)
    assert found.min() >= 0.5
    assert found.max() <= 1.0
    quantiles = np.linspace(0.1, 0.9, 9)
    np.testing.assert_allclose(np.quantile(found, quantiles), np.quantile(expected, quantiles), atol=0.02)


def test_partners_are_all_permutations_of_the_real_rows() -> None:
    real = jnp.array([True, False, True, True, False])
    found = np.array(jax.vmap(lambda seed: partners(jax.random.key(seed), real))(jnp.arange(600)))
    assert (found[:, [1, 4]] == [1, 4]).all()
    orders = [tuple(row) for row in found[:, [0, 2, 3]].tolist()]
    counts = [orders.count(order) for order in itertools.permutations([0, 2, 3])]
    assert sum(counts) == 600
    assert min(counts) > 60
    assert max(counts) < 140


def test_a_padded_batch_counts_like_the_batch() -> None:
    objective = mixup_objective(loss="cross_entropy")
    batch = padded(BATCH)
    batch["y"][6:] = 0
    plain, full = value_and_grads(objective, net(), BATCH), value_and_grads(objective, net(), batch)
    assert plain[0] == pytest.approx(full[0], rel=1e-6)
    assert_close(plain[1], full[1])


def test_one_row_is_mixed_with_itself() -> None:
    one = {name: part[:1] for name, part in BATCH.items()}
    expected = loss_of(mixup_objective(loss="cross_entropy"), net(), one, train=False)
    assert loss_of(mixup_objective(loss="cross_entropy"), net(), one) == pytest.approx(expected, rel=1e-5)


def test_no_row_is_no_loss() -> None:
    (term,) = terms_of(mixup_objective(loss="cross_entropy")(context(net(), masked(BATCH))))
    assert (float(term.numerator), float(term.denominator)) == (0.0, 0.0)


def test_bytes_are_rounded_and_ids_refused() -> None:
    share = jnp.float32(0.75)
    assert mixed(jnp.array([0, 200], jnp.uint8), jnp.array([255, 100], jnp.uint8), share).tolist() == [64, 175]
    assert mixed(jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16), share).dtype == jnp.bfloat16
    for dtype in (jnp.int32, jnp.bool_):
        with pytest.raises(DataError, match=f"column 'x' is {jnp.dtype(dtype)}; give floats"):
            mixed(jnp.ones(2, dtype), jnp.ones(2, dtype), share)


@pytest.mark.parametrize("alpha", [0.0, -0.1, float("nan"), float("inf")])
def test_an_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="mixup_objective: alpha is .*; give a number above 0"):
        mixup_objective(alpha)


def test_without_a_model_there_is_no_loss() -> None:
    with pytest.raises(ConfigError, match="takes the model's loss when it is trained; give one to call it"):
        mixup_objective()(context(net(), BATCH))


def test_a_run_mixes_in_training_and_validates_on_rows_as_they_are(tmp_path: Path) -> None:
    model = NNModel(module=net(), params=NNModelParams(metrics=("accuracy",)))
    run = fit(tmp_path, model, mixup_objective(), BATCH, batch=4, val=True, n_epochs=2)
    last = run.epochs[-1]
    assert 0.5 <= last["train_mixup_share"] <= 1.0
    scored = model.evaluate(ArrayDataset(BATCH))
    assert (last["val_loss"], last["val_accuracy"]) == pytest.approx((scored["loss"], scored["accuracy"]))
    assert "val_mixup_share" not in run.columns
