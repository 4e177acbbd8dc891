"""One rule of improvement: strict, never on a tie, never on a value that is not finite."""

from __future__ import annotations

import math

import pytest

from nnx_jax.loop.monitors import MonitorTracker, MonitorUnavailableError
from nnx_jax.params.train import MonitorSpec

NAN, INF = math.nan, math.inf


def improvements(values: list[float | None], spec: MonitorSpec | None = None, direction: str = "min") -> list[int]:
    tracker = MonitorTracker(spec, direction)
    name = f"{spec.split}_{spec.metric}" if spec else "val_loss"
    decisions = [tracker.decide({} if value is None else {name: value}) for value in values]
    return [epoch for epoch, decision in enumerate(decisions) if decision.improved]


def test_min_delta_is_strict() -> None:
    """nnx:B063 (the decision itself)"""
    assert improvements([0.8, 0.7, 0.695, 0.71], MonitorSpec(min_delta=0.01)) == [0, 1]


def test_ties_never_improve() -> None:
    """nnx:B064 case:H03"""
    assert improvements([0.5, 0.5, 0.5, 0.4]) == [0, 3]
    assert improvements([0.8, 0.9, 0.9, 0.9, 0.85], MonitorSpec(metric="accuracy", mode="max"), "max") == [0, 1]


@pytest.mark.parametrize(
    ("values", "direction", "best"),
    [
        ([NAN, 0.5, 0.4, 0.6], "min", 2),
        ([NAN, 0.2, 0.3], "max", 2),
        ([0.5, NAN, 0.4], "min", 2),
        ([NAN, 0.5, INF, 0.4], "min", 3),
    ],
)
@pytest.mark.filterwarnings("ignore:monitor")
def test_a_nan_is_never_best_and_never_freezes_best(values: list[float], direction: str, best: int) -> None:
    """case:H01 case:H02"""
    assert improvements(values, MonitorSpec(metric="m", mode=direction), direction)[-1] == best


def test_all_nan_has_no_best_and_says_so_once() -> None:
    tracker = MonitorTracker(MonitorSpec())
    with pytest.warns(RuntimeWarning, match="val_loss is nonfinite") as seen:
        statuses = [tracker.decide({"val_loss": NAN}).status for _ in range(3)]
    assert statuses == ["nonfinite"] * 3
    assert tracker.best is None
    assert len(seen) == 1


def test_missing_values_are_not_counted_or_are_an_error() -> None:
    tracker = MonitorTracker(MonitorSpec(metric="nll"))
    with pytest.warns(RuntimeWarning, match="val_nll is missing"):
        assert tracker.decide({}).status == "missing"
    assert tracker.decide({"val_nll": 1.0}).improved
    strict = MonitorTracker(MonitorSpec(metric="nll", on_missing="error", on_nonfinite="error"))
    with pytest.raises(MonitorUnavailableError, match="val_nll is missing"):
        strict.decide({})
    with pytest.raises(MonitorUnavailableError, match="val_nll is nonfinite"):
        strict.decide({"val_nll": INF})


def test_a_score_that_stands_in_is_not_compared_with_another() -> None:
    """A validation that is not finite never becomes the best by its training loss; the next finite one may."""
    tracker = MonitorTracker(None)
    losses = [(0.9, 0.5), (float("nan"), 0.1), (0.8, 0.3), (float("inf"), 0.01), (0.7, 0.2)]
    found = [tracker.decide({"val_loss": val, "train_loss": train}) for val, train in losses]
    assert [each.improved for each in found] == [True, False, True, False, True]
    assert [each.value for each in found] == [0.9, 0.1, 0.8, 0.01, 0.7]
    resumed = MonitorTracker(None)
    resumed.load(tracker.state())
    assert not resumed.decide({"val_loss": float("nan"), "train_loss": 0.0}).improved
    late = MonitorTracker(None)
    assert late.decide({"val_loss": float("nan"), "train_loss": 0.1}).improved
    assert late.decide({"val_loss": 0.9, "train_loss": 0.05}).improved


def test_default_score_prefers_error_then_loss_then_train() -> None:
    """nnx:B114"""
    tracker = MonitorTracker(None)
    assert tracker.decide({"val_accuracy": 0.75, "val_loss": 9.0}).value == 0.25
    assert tracker.decide({"val_accuracy": NAN, "val_loss": 0.125}).name == "val_loss"
    assert tracker.decide({"train_loss": 0.5}).name == "train_loss"
    assert tracker.decide({}).status == "missing"


def test_a_stored_best_is_carried() -> None:
    """case:H05 (the rule)"""
    tracker = MonitorTracker(MonitorSpec())
    for value in (0.5, 0.3, 0.4):
        tracker.decide({"val_loss": value})
    resumed = MonitorTracker(MonitorSpec())
    resumed.load(tracker.state())
    assert [resumed.decide({"val_loss": v}).improved for v in (0.35, 0.36, 0.37)] == [False] * 3
