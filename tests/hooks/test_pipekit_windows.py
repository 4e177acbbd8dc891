"""Accumulation, schedules and bad microbatches, with the numbers of the operator package's acceptance list.

The toy's loss is mean(w x) here: the gradient of a microbatch is the mean of its x, wherever w is.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.hooks import GradientAccumulationHook, SkipNonFinite
from tests.hooks.toy import Toy

NAN = float("nan")


def test_a_window_of_three_and_the_one_begun_after_it() -> None:
    """pipekit:N1"""
    toy = Toy(GradientAccumulationHook(3), w=0.0, rate=1.0, slope=True)
    assert toy.trace([1, 2, 6, 5]) == [0, 0, -3, -3]
    assert toy.counters()["step"] == toy.state.opt_state.count == 1
    assert toy.counters()["micro"] == 1


def test_rates_count_windows() -> None:
    """pipekit:N3: rate 1, 2, ... by update; a schedule by microbatch would use 3 and 6."""
    toy = Toy(GradientAccumulationHook(3), w=0.0, rate=lambda count: count + 1.0, slope=True)
    assert toy.trace([1] * 6)[2::3] == [-1.0, -3.0]


def test_windows_equal_the_large_batch() -> None:
    """pipekit:N4"""
    rng = np.random.default_rng(0)
    rows, targets = rng.standard_normal((6, 8)).astype(np.float32), rng.standard_normal((6, 8)).astype(np.float32)
    small, large = Toy(GradientAccumulationHook(3), rows=8, optimizer="adam"), Toy(rows=24, optimizer="adam")
    for x, t in zip(rows, targets, strict=True):
        small.step(x, t)
    for half in (slice(0, 3), slice(3, 6)):
        large.step(rows[half].reshape(-1), targets[half].reshape(-1))
    assert small.w == pytest.approx(large.w, rel=1e-6)
    counted = small.counters()
    assert (counted["step"], counted["batch"]) == (2, 6)
    closed = small.programs.read_records(small.carry).closed
    assert closed.tolist() == [False, False, True] * 2


def test_a_window_cut_short_is_applied_with_its_own_denominator() -> None:
    """pipekit:N5"""
    toy = Toy(GradientAccumulationHook(3), w=0.0, rate=1.0, rows=3, slope=True)
    toy.step([1.0, 1.0, 1.0])
    toy.programs.step(toy.carry, toy.batch([4.0]), closes=True)  # 3 rows of 1 and one of 4: 7 / 4
    assert toy.w == pytest.approx(-1.75)


def test_a_bad_microbatch_is_left_out_of_its_window() -> None:
    """pipekit:N6: gradients 1, NaN, 3 make 2; nvalchemi:89"""
    hooks = GradientAccumulationHook(3), SkipNonFinite(drop="microbatch")
    toy = Toy(*hooks, w=0.0, rate=1.0, slope=True)
    assert toy.trace([1, NAN, 3])[-1] == -2.0
    assert toy.counters()["step"] == 1
    alone = Toy(*hooks, w=0.0, rate=1.0, slope=True)
    assert alone.trace([NAN, NAN, NAN, 1, 1, 1])[2::3] == [0.0, -1.0]  # an empty window is no update
    assert alone.counters()["step"] == 1
    whole = Toy(GradientAccumulationHook(3), SkipNonFinite(), w=0.0, rate=1.0, slope=True)
    assert whole.trace([1, NAN, 3])[-1] == 0.0


def test_statistics_of_a_microbatch_left_out_are_left_out() -> None:
    def forward(params: object, model_state: object, batch: object, key: object, train: bool) -> tuple[object, object]:
        return params["w"] * batch["x"], {"seen": model_state["seen"] + jnp.sum(batch["x"])}  # type: ignore[index]

    hooks = GradientAccumulationHook(2), SkipNonFinite(drop="microbatch")
    toy = Toy(*hooks, w=0.0, slope=True, forward=forward, model_state={"seen": jnp.float32(0)})
    toy.trace([1.0, NAN])
    assert toy.state.model_state["seen"] == 1.0
