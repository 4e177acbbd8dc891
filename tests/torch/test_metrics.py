"""Metrics of torch outputs against JAX's: counts exactly, real sums to rounding, for every way of batching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import register
from nnx_jax.objectives import metrics as of_jax
from nnx_jax.params.losses import CrossEntropyParams
from nnx_jax.params.metrics import (
    F1Params,
    MetricParams,
    MetricSpec,
    PrecisionParams,
    RecallParams,
    TopKParams,
    register_metric,
    unregister_metric,
)
from nnx_jax.torch.metrics import METRIC_MODES, Metric, build_metric, metric_mode, user_metric

COUNTS: dict[str, list[Any]] = {
    "cross_entropy": ["accuracy", TopKParams(k=2), F1Params(), PrecisionParams(average="micro"), RecallParams()],
    "binary_cross_entropy": ["accuracy", F1Params(zero_division=1), RecallParams(average="micro")],
    "mse": [],
}
REAL = {
    "cross_entropy": ["nll", "brier", "perplexity"],
    "binary_cross_entropy": ["nll", "brier"],
    "mse": ["mse", "mae"],
}


def rows_of(loss: str, seed: int, shape: tuple[int, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Outputs with ties, infinities left out, and a batch with masked, unweighted, ignored and illegal items."""
    rng = np.random.default_rng(seed)
    size = (*shape, 4) if loss == "cross_entropy" else shape
    outputs = np.round(2 * rng.normal(size=size), 1).astype(np.float32)
    y = {
        "cross_entropy": rng.choice([0, 1, 2, 3, 7, -100], size=shape).astype(np.int32),
        "binary_cross_entropy": rng.choice([0.0, 1.0, 0.5, 3.0], size=shape).astype(np.float32),
        "mse": rng.normal(size=shape).astype(np.float32),
    }[loss]
    batch = {"y": y, "mask": (rng.random(shape[0]) < 0.8).astype(np.float32)}
    return outputs, {**batch, "weight": rng.choice([0.0, 1.0, 2.5], size=shape[0]).astype(np.float32)}


@cache
def both(spec: Any, n_outputs: int, loss: str) -> tuple[Metric, Metric, Any]:
    theirs = of_jax.build_metric(spec, n_outputs, loss=loss)
    return build_metric(spec, n_outputs, loss=loss), theirs, jax.jit(theirs.update)


def tensors(columns: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in columns.items()}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(COUNTS)), st.integers(0, 2**31))
def test_sums_are_jaxs(loss: str, seed: int) -> None:
    """Of every metric of every kind of output: float32 [size], counts exactly."""
    outputs, batch = rows_of(loss, seed, (5, 3))
    for spec in (*COUNTS[loss], *REAL[loss]):
        mine, theirs, update = both(spec, outputs.shape[-1], loss)
        assert (mine.name, mine.size, mine.mode) == (theirs.name, theirs.size, theirs.mode)
        found, wanted = mine.update(torch.from_numpy(outputs), tensors(batch)), np.asarray(update(outputs, batch))
        assert found.dtype == torch.float32
        if spec in COUNTS[loss]:
            assert found.tolist() == wanted.tolist(), spec
        else:  # at most 15 items of at most about 100 each, with a handful of roundings
            np.testing.assert_allclose(found.numpy(), wanted, rtol=16 * 2.0**-23, atol=15 * 100 * 2.0**-23)
        np.testing.assert_allclose(mine.compute(found.double().numpy()), theirs.compute(wanted), rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 4, 40])
def test_values_are_those_of_scikit_learn_for_any_batching(batch: int) -> None:
    """nnx:B187 - in batches of one, of four with a short tail, and at once."""
    rng = np.random.default_rng(5)
    logits, y = rng.normal(size=(23, 5)).astype(np.float32), rng.integers(0, 4, 23)
    precision: Any = sk.precision_score
    said, logs = logits.argmax(-1), logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for spec, wanted in [
        ("accuracy", sk.accuracy_score(y, said)),
        (F1Params(), sk.f1_score(y, said, average="macro")),
        (PrecisionParams(zero_division=1), precision(y, said, average="macro", zero_division=1)),
        (TopKParams(k=2), sk.top_k_accuracy_score(y, logits, k=2, labels=range(5))),
        ("nll", -logs[np.arange(23), y].mean()),
        ("brier", ((np.exp(logs) - np.eye(5)[y]) ** 2).sum(-1).mean()),
    ]:
        metric = build_metric(spec, 5)
        parts = [
            metric.update(torch.from_numpy(logits[at : at + batch]), {"y": torch.from_numpy(y[at : at + batch])})
            for at in range(0, 23, batch)
        ]
        value = metric.compute(torch.stack(parts).double().sum(0).numpy())
        assert value == pytest.approx(wanted, rel=1e-6), spec


def test_token_outputs_skip_ignored_labels() -> None:
    logits, y = torch.randn(2, 3, 4), torch.tensor([[0, -100, 2], [-100, 3, 1]])
    keep = y != -100
    right = (logits.argmax(-1) == y)[keep].sum().item()
    assert build_metric("accuracy", 4).update(logits, {"y": y}).tolist() == [right, 4.0]
    ignoring = build_metric("accuracy", 4, loss=CrossEntropyParams(ignore_index=2))
    assert ignoring.update(logits, {"y": y}).tolist()[1] == 3.0


def test_half_precision_outputs_are_summed_in_float32() -> None:
    """case:L09 - 70000 float16 ones summed as a metric give 70000, not inf."""
    ones, zeros = torch.ones(70000, dtype=torch.float16), torch.zeros(70000, dtype=torch.float16)
    assert build_metric("mae", 1, loss="mae").update(ones, {"y": zeros}).tolist() == [70000.0, 70000.0]


def test_nan_scores_are_never_hits_and_a_sure_mistake_is_bounded() -> None:
    nan = torch.full((2, 3), float("nan"))
    assert build_metric(TopKParams(k=2), 3).update(nan, {"y": torch.tensor([0, 1])}).tolist() == [0.0, 2.0]
    wrong, y = torch.tensor([[0.0, 100.0]]), {"y": torch.tensor([0])}
    assert build_metric("nll", 2).update(wrong, y)[0].item() == pytest.approx(-np.log(1e-12), rel=1e-6)
    assert build_metric("perplexity", 2).update(wrong, y)[0].item() == pytest.approx(100.0)


@pytest.mark.parametrize("rows", [0, 2])
def test_no_rows_is_nan_not_an_error(rows: int) -> None:
    """No row at all, and rows that are all masked."""
    batch = {"y": torch.zeros(rows, dtype=torch.int64), "mask": torch.zeros(rows)}
    for spec in ("accuracy", F1Params(), TopKParams(k=1), "nll", "perplexity", "brier"):
        metric = build_metric(spec, 3)
        found = metric.update(torch.zeros(rows, 3), batch)
        assert found.tolist() == [0.0] * metric.size
        assert np.isnan(metric.compute(found.double().numpy()))


def test_metrics_keep_no_graph() -> None:
    outputs = torch.randn(3, 2, requires_grad=True)
    for metric in (build_metric("nll", 2), user_metric("mine", lambda outputs, batch: outputs[:, 0])):
        assert not metric.update(outputs, {"y": torch.tensor([0, 1, 1]), "mask": torch.ones(3)}).requires_grad


def test_senseless_metrics_are_refused_as_for_jax() -> None:
    for build in (build_metric, of_jax.build_metric):
        with pytest.raises(ConfigError, match="top_k has k=5, the model has 3 classes"):
            build("top_k", 3)
        with pytest.raises(ConfigError, match="loss 'mse' has no metric 'accuracy'"):
            build("accuracy", 3, loss="mse")
        with pytest.raises(ConfigError, match="no metric 'acuracy'; did you mean 'accuracy'"):
            build("acuracy", 3)
    assert METRIC_MODES is of_jax.METRIC_MODES
    assert metric_mode("val/f1_micro") == "max"


# -- the user's own ------------------------------------------------------------------------------------------------


def test_a_function_of_the_users_is_a_mean_over_real_rows() -> None:
    metric = user_metric("bias", lambda outputs, batch: (outputs - batch["y"]).double())
    batch = {"y": torch.tensor([1.0, 1.0, 1.0]), "mask": torch.tensor([1.0, 1.0, 0.0])}
    found = metric.update(torch.tensor([2.0, 4.0, float("nan")]), batch)
    assert found.tolist() == [4.0, 2.0]
    assert (metric.compute(found.double().numpy()), metric.mode) == (2.0, None)
    with pytest.raises(ConfigError, match=r"metric 'm' must give one value a row, shape \(3,\), got \(\)"):
        user_metric("m", lambda outputs, batch: outputs.mean()).update(torch.ones(3), batch)
    one: Any = lambda outputs: outputs  # noqa: E731
    for wrong, told in ((one, "does not take that"), (lambda y_true, y_pred: 0, "turn it round")):
        with pytest.raises(ConfigError, match=told):
            user_metric("m", wrong)


def test_a_specification_of_the_users_computes_with_torch() -> None:
    @register("test_torch_bias")
    class Bias(MetricParams):
        mode = "min"
        size: int = 2

        def update(self, outputs: Any, batch: Any) -> torch.Tensor:
            return torch.stack([((outputs - batch["y"]) * batch["mask"]).sum(), batch["mask"].sum()])

        def compute(self, sums: np.ndarray) -> float:
            return float(sums[0] / sums[1])

    metric = build_metric(Bias(), 1, loss="mse")
    batch = {"y": torch.zeros(2), "mask": torch.tensor([1.0, 0.0])}
    assert (metric.name, metric.mode) == ("test_torch_bias", "min")
    assert metric.compute(metric.update(torch.tensor([3.0, 9.0]), batch).double().numpy()) == 3.0
    with pytest.raises(ConfigError, match=r"metric 'test_torch_bias' keeps 3 sums, its update gave \(2,\)"):
        build_metric(Bias(size=3), 1, loss="mse").update(torch.zeros(2), batch)


class Share:
    """Of the weight of items, the share whose first compared value is above a half."""

    size = 2

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.column = config.get("column")

    def update(self, predicted: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        values = predicted if self.column is None else predicted[..., self.column]
        return torch.stack([(weight * (values > 0.5)).sum(), (weight * (targets >= 0)).sum()])

    def compute(self, sums: np.ndarray) -> float:
        return float(sums[0] / sums[1])


@pytest.fixture
def share() -> Iterator[None]:
    for input in ("labels", "probabilities", "continuous"):
        register_metric(f"torch.{input}", 1, Share, input=input, mode="max")
    yield
    for input in ("labels", "probabilities", "continuous"):
        unregister_metric(f"torch.{input}", 1)


@pytest.mark.usefixtures("share")
def test_registered_metrics_are_given_what_they_asked_for() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.9], [0.7, 0.3], [0.4, 0.6]]))
    batch = {"y": torch.tensor([1, 0, 9]), "mask": torch.ones(3), "weight": torch.tensor([2.0, 0.5, 1.0])}
    for spec, loss, outputs, wanted in (
        (MetricSpec(id="torch.labels"), "cross_entropy", logits, [2.0, 2.5]),
        (MetricSpec(id="torch.probabilities", config={"column": 0}), "cross_entropy", logits, [0.5, 2.5]),
        (MetricSpec(id="torch.probabilities"), "binary_cross_entropy", torch.tensor([3.0, -1.0, 5.0]), [2.0, 2.5]),
        (MetricSpec(id="torch.continuous"), "mse", torch.tensor([0.4, 0.6, 0.7]), [1.5, 3.5]),
    ):
        metric = build_metric(spec, 2, loss=loss)
        found = metric.update(outputs, batch)
        assert (found.dtype, found.tolist()) == (torch.float32, wanted), spec.id
    assert build_metric(MetricSpec(id="accuracy", name="own"), 2).name == "own"
    with pytest.raises(ConfigError, match="compares 'continuous', loss 'cross_entropy' gives labels, probabilities"):
        build_metric(MetricSpec(id="torch.continuous"), 2)
