"""Metrics against scikit-learn and numpy on ragged tails, tokens, yes/no outputs and empty classes."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import register
from nnx_jax.objectives import METRIC_MODES, Metric, build_metric, metric_mode
from nnx_jax.params.losses import CrossEntropyParams
from nnx_jax.params.metrics import F1Params, MetricParams, PrecisionParams, RecallParams, TopKParams

N_CLASSES, BATCH = 5, 4


@cache
def compiled(spec: Any, n_outputs: int, loss: Any = "cross_entropy") -> tuple[Metric, Any]:
    metric = build_metric(spec, n_outputs, loss=loss)
    return metric, jax.jit(metric.update)


def value(spec: Any, outputs: np.ndarray, y: np.ndarray, batch: int = BATCH, loss: Any = "cross_entropy") -> float:
    """The metric over all rows in batches of `batch`, the tail padded with rubbish of weight 0."""
    metric, update = compiled(spec, outputs.shape[-1] if outputs.ndim > 1 else 1, loss)
    sums = np.zeros(metric.size)
    for start in range(0, len(y), batch):
        x, t = outputs[start : start + batch], y[start : start + batch]
        short = batch - len(t)
        x = np.concatenate([x, np.full((short, *x.shape[1:]), 7.0, x.dtype)])
        t = np.concatenate([t, np.ones((short, *t.shape[1:]), t.dtype)])
        mask = np.array([1.0] * (batch - short) + [0.0] * short, np.float32)
        out = update(x, {"y": t, "mask": mask})
        assert out.dtype == jnp.float32
        assert out.shape == (metric.size,)
        sums += np.asarray(out, np.float64)
    return metric.compute(sums)


def data(n: int, seed: int, n_classes: int = N_CLASSES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Class 4 is never a label and class 3 seldom predicted: macro means must look at labels seen, not at all labels.
    logits = rng.normal(size=(n, n_classes)) - np.array([0, 0, 0, 1.5, 2.0])[:n_classes]
    return logits.astype(np.float32), rng.integers(0, n_classes - 1, n).astype(np.int32)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


PAIRS = [(PrecisionParams, sk.precision_score), (RecallParams, sk.recall_score), (F1Params, sk.f1_score)]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 23), st.integers(0, 2**31))
def test_counting_metrics_equal_scikit_learn(n: int, seed: int) -> None:
    """accuracy, precision, recall, F1 (micro, macro; 0/0 as 0 and as 1) on ragged tails, exactly."""
    logits, y = data(n, seed)
    predicted = logits.argmax(-1)
    assert value("accuracy", logits, y) == pytest.approx(sk.accuracy_score(y, predicted), abs=1e-12)
    for params, reference in PAIRS:
        for average in ("micro", "macro"):
            for empty in (0, 1):
                wanted = reference(y, predicted, average=average, zero_division=empty)
                mine = value(params(average=average, zero_division=empty), logits, y)
                assert mine == pytest.approx(wanted, abs=1e-12), (params, average, empty)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 23), st.integers(0, 2**31), st.sampled_from([1, 2, 5]))
def test_top_k_equals_scikit_learn_also_for_ties(n: int, seed: int, k: int) -> None:
    logits, y = data(n, seed)
    logits = np.round(logits)  # many equal scores
    if k < N_CLASSES:
        wanted = sk.top_k_accuracy_score(y, logits, k=k, labels=range(N_CLASSES))
    else:
        wanted = 1.0
    assert value(TopKParams(k=k), logits, y) == pytest.approx(wanted, abs=1e-12)


def test_probabilistic_metrics_equal_numpy_and_scikit_learn() -> None:
    logits, y = data(21, 3)
    p = softmax(logits)
    nll = -np.log(p[np.arange(21), y])
    assert value("nll", logits, y) == pytest.approx(sk.log_loss(y, p, labels=range(N_CLASSES)), rel=1e-6)
    assert value("perplexity", logits, y) == pytest.approx(np.exp(nll.mean()), rel=1e-6)
    assert value("brier", logits, y) == pytest.approx(((p - np.eye(N_CLASSES)[y]) ** 2).sum(-1).mean(), rel=1e-6)
    scaled = sk.brier_score_loss(y, p, labels=range(N_CLASSES), scale_by_half=False)
    assert value("brier", logits, y) == pytest.approx(scaled, rel=1e-6)


def test_nll_is_clamped_and_perplexity_is_not() -> None:
    logits, y = np.array([[0.0, 100.0]], np.float32), np.array([0])
    assert value("nll", logits, y) == pytest.approx(-np.log(1e-12), rel=1e-6)
    assert value("perplexity", logits, y) == pytest.approx(np.exp(100.0), rel=1e-4)


def test_token_outputs_skip_ignored_labels() -> None:
    rng = np.random.default_rng(5)
    logits, y = rng.normal(size=(5, 3, 4)).astype(np.float32), rng.integers(0, 4, (5, 3))
    y[0, :2], y[4, 2] = -100, -100
    keep = y != -100
    true, predicted = y[keep], logits.argmax(-1)[keep]
    assert value("accuracy", logits, y, 2) == pytest.approx(sk.accuracy_score(true, predicted))
    assert value(F1Params(), logits, y, 2) == pytest.approx(sk.f1_score(true, predicted, average="macro"))
    nll = -np.log(softmax(logits)[keep, true])
    assert value("perplexity", logits, y, 2) == pytest.approx(np.exp(nll.mean()), rel=1e-6)
    other = value("accuracy", logits, y, 2, CrossEntropyParams(ignore_index=0))
    assert other == pytest.approx(sk.accuracy_score(true[true != 0], predicted[true != 0]))


@pytest.mark.parametrize("column", [True, False])
def test_yes_no_outputs_are_two_classes(column: bool) -> None:
    rng = np.random.default_rng(1)
    logits, y = rng.normal(size=11).astype(np.float32), rng.integers(0, 2, 11)
    outputs = logits[:, None] if column else logits
    said, p = (logits >= 0).astype(int), 1 / (1 + np.exp(-logits.astype(np.float64)))
    for spec, wanted in [
        ("accuracy", sk.accuracy_score(y, said)),
        (F1Params(), sk.f1_score(y, said, average="macro")),
        (F1Params(average="micro"), sk.f1_score(y, said, average="micro")),
        ("nll", sk.log_loss(y, p)),
        ("brier", sk.brier_score_loss(y, p)),
    ]:
        assert value(spec, outputs, y, loss="binary_cross_entropy") == pytest.approx(wanted, rel=1e-6), spec


@pytest.mark.parametrize("empty", [0, 1])
def test_several_yes_no_outputs_are_labels(empty: int) -> None:
    rng = np.random.default_rng(2)
    logits, y = rng.normal(size=(11, 3)).astype(np.float32), rng.integers(0, 2, (11, 3))
    logits[:, 2], y[:, 2] = -1.0, 0  # a label that is neither true nor said still counts in the macro mean
    said = (logits >= 0).astype(int)
    for params, reference in PAIRS:
        for average in ("micro", "macro"):
            wanted = reference(y, said, average=average, zero_division=empty)
            spec = params(average=average, zero_division=empty)
            assert value(spec, logits, y, loss="binary_cross_entropy") == pytest.approx(wanted, abs=1e-12)
    assert value("accuracy", logits, y, loss="binary_cross_entropy") == pytest.approx((said == y).mean())


@pytest.mark.parametrize("shape", [(11,), (11, 2)])
def test_regression_metrics_equal_scikit_learn(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    outputs, y = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    assert value("mse", outputs, y, loss="mse") == pytest.approx(sk.mean_squared_error(y, outputs), rel=1e-6)
    assert value("mae", outputs, y, loss="huber") == pytest.approx(sk.mean_absolute_error(y, outputs), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 4, 23, 40])
def test_values_do_not_depend_on_batching(batch: int) -> None:
    """nnx:B187 - any batch size gives the same metrics; counts exactly, real sums to float32 rounding."""
    logits, y = data(23, 9)
    for spec in ("accuracy", F1Params(), TopKParams(k=2)):
        assert value(spec, logits, y, batch) == value(spec, logits, y, 7)
    for spec in ("nll", "brier", "perplexity"):
        assert value(spec, logits, y, batch) == pytest.approx(value(spec, logits, y, 7), rel=1e-6)


def test_ragged_batches_weigh_by_rows() -> None:
    """case:G03 - accuracies 0.7, 0.8, 0.9 on 256, 256, 10 rows are 393/522; 1, 1, 0 on 4, 4, 1 are 8/9."""
    metric = build_metric("accuracy", 2)
    first = [[179.0, 256.0], [205.0, 256.0], [9.0, 10.0]]
    assert metric.compute(np.sum(first, axis=0)) == pytest.approx(393 / 522, abs=1e-12)
    logits, y = np.tile(np.array([[2.0, 1.0]], np.float32), (9, 1)), np.array([0] * 8 + [1])
    assert value("accuracy", logits, y, 4) == pytest.approx(8 / 9, abs=1e-12)


def test_no_rows_is_nan_not_an_error() -> None:
    for spec in ("accuracy", F1Params(), TopKParams(k=1), "nll", "perplexity"):
        metric = build_metric(spec, 3)
        assert np.isnan(metric.compute(np.zeros(metric.size)))


def test_sums_are_float32() -> None:
    """case:L09 - 70000 float16 ones summed as a metric give 70000, not inf."""
    metric = build_metric("mae", 1, loss="mae")
    sums = metric.update(jnp.ones(70000, jnp.float16), {"y": jnp.zeros(70000, jnp.float16)})
    assert np.asarray(sums).tolist() == [70000.0, 70000.0]


def test_nan_scores_are_never_hits() -> None:
    nan = np.full((2, 3), np.nan, np.float32)
    assert value(TopKParams(k=2), nan, np.array([0, 1])) == 0.0


def test_directions_are_known_or_demanded() -> None:
    """case:H04 - a metric without a known direction needs a mode, and a mode is exactly min or max."""
    assert [metric_mode(name) for name in ("loss", "error", "val/f1_micro", "top_3", "perplexity")] == [
        "min",
        "min",
        "max",
        "max",
        "min",
    ]
    assert metric_mode("val_pck_0.15", "max") == "max"
    for unknown in ("val_pck_0.15", "auc", "top_k_loss"):
        with pytest.raises(ConfigError, match=f"metric '{unknown}' has no known direction; give mode"):
            metric_mode(unknown)
    for wrong in ("MAX", "maximum", ""):
        with pytest.raises(ConfigError, match="write 'min' or 'max'"):
            metric_mode("auc", wrong)
    for kind in set(METRIC_MODES) - {"loss", "error", "mse", "mae"}:
        assert build_metric(kind, 5).mode == METRIC_MODES[kind]


def test_names_come_from_the_spec() -> None:
    assert build_metric(F1Params(average="micro"), 3).name == "f1_micro"
    assert build_metric(F1Params(name="quality"), 3).name == "quality"
    assert build_metric(TopKParams(k=2), 3).name == "top_2"


def test_senseless_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_k has k=5, the model has 3 classes"):
        build_metric("top_k", 3)
    with pytest.raises(ConfigError, match="loss 'mse' has no metric 'accuracy'"):
        build_metric("accuracy", 3, loss="mse")
    with pytest.raises(ConfigError, match="no metric 'acuracy'; did you mean 'accuracy'"):
        build_metric("acuracy", 3)


def test_a_metric_of_the_users() -> None:
    @register("test_bias")
    class Bias(MetricParams):
        mode = "min"
        size: int = 2

        def update(self, outputs: Any, batch: Any) -> jax.Array:
            return jnp.stack([jnp.sum((outputs - batch["y"]) * batch["mask"]), jnp.sum(batch["mask"])])

        def compute(self, sums: np.ndarray) -> float:
            return float(sums[0] / sums[1])

    metric = build_metric(Bias(), 1, loss="mse")
    batch = {"y": jnp.zeros(2), "mask": jnp.array([1.0, 0.0])}
    assert (metric.name, metric.mode) == ("test_bias", "min")
    assert metric.compute(np.asarray(metric.update(jnp.array([3.0, 9.0]), batch), np.float64)) == 3.0
