"""Scoring: every row once, ragged tails, long sums, no trace left in training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.objectives.terms import LossTerm
from nnx_jax.step import place_columns, place_table
from nnx_jax.step.evaluate import build_eval
from nnx_jax.step.rng import DROPOUT, EVALUATION, run_key, stream_key

Kit = SimpleNamespace


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_every_row_counts_once(kit: Kit, rows: int) -> None:
    """case:L15 ragged tails padded to one shape; host and device-resident sums are equal, and numpy's agree."""
    params, forward = kit.mlp([3, 4])
    draw = np.random.default_rng(rows)
    x, y = draw.normal(size=(rows, 3)).astype(np.float32), draw.integers(0, 4, rows).astype(np.int32)
    table = np.full((2, 4), -1, np.int32)
    table.flat[:rows] = np.arange(rows)
    evaluate = build_eval(forward, kit.ce_terms, [kit.Accuracy()])
    host = evaluate.host(params, {}, (kit.block(x, y, places) for places in table))
    resident = evaluate.resident(params, {}, place_columns({"x": x, "y": y}), place_table(table))
    logits = x @ params["0.kernel"] + params["0.bias"]
    wanted = np.log(np.exp(logits).sum(1)) - logits[np.arange(rows), y]
    assert host.rows == resident.rows == rows
    assert host.loss == resident.loss == pytest.approx(wanted.mean(), rel=1e-6)
    assert host.terms["cross_entropy"] == (pytest.approx(wanted.sum(), rel=1e-6), rows, 1.0)
    assert host.metrics["accuracy"].tolist() == [(logits.argmax(1) == y).sum(), rows]
    assert host.metrics["accuracy"].dtype == np.float64
    assert evaluate.watch.compiles == {"evaluate": 1, "evaluate_resident": 1}


def test_no_rows_and_nothing_valid(kit: Kit) -> None:
    evaluate = build_eval(kit.target_forward, kit.target_terms, [])
    nothing = evaluate.host({"w": np.float32(0)}, {}, [])
    assert (nothing.rows, nothing.terms) == (0, {})
    assert np.isnan(nothing.loss)
    masked = evaluate.host({"w": np.float32(0)}, {}, kit.targets([None, None]))
    assert (masked.rows, masked.terms["half"]) == (0, (0.0, 0.0, 1.0))
    assert np.isnan(masked.loss)


def test_long_sums_lose_nothing(kit: Kit) -> None:
    """2**24 + 4 in steps of 1: a plain float32 sum stops at 2**24."""

    def terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        return LossTerm("big", jnp.sum(batch["t"]), jnp.sum(batch["mask"])), LossTerm(
            "free", jnp.sum(batch["t"]), reduction="sum"
        )

    evaluate = build_eval(kit.target_forward, terms, [])
    sums = evaluate.host({"w": np.float32(0)}, {}, kit.targets([2.0**24], [1.0], [1.0], [1.0], [1.0]))
    assert sums.terms["big"] == (2.0**24 + 4, 5.0, 1.0)
    assert sums.loss == (2.0**24 + 4) / 5 + 2.0**24 + 4


def test_forward_gets_evaluation_mode_and_a_fixed_key(kit: Kit) -> None:
    seen: list[Any] = []

    def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        seen.append(train)
        return jax.random.normal(key, batch["mask"].shape) + params["w"], {"n": model_state["n"] + 1}

    evaluate = build_eval(forward, kit.target_terms, [], invalid=lambda o, b: jnp.sum(b["t"] > 5, dtype=jnp.int32))
    data = kit.targets([0.0, 9.0], [1.0, 2.0])
    one = evaluate.host({"w": np.float32(0)}, {"n": np.float32(3)}, data)
    two = evaluate.host({"w": np.float32(0)}, {"n": np.float32(3)}, data)
    assert one.loss == two.loss
    assert one.invalid == 1
    assert set(seen) == {False}


def test_streams_differ_by_purpose_and_microbatch_only() -> None:
    """Map 5.2: fold_in(fold_in(run key, purpose), batch_count); case:E05."""
    bits = lambda *a: tuple(np.asarray(jax.random.key_data(stream_key(*a))).tolist())  # noqa: E731
    run = run_key(2**40 + 5)
    assert run.tolist() == [2**8, 5]
    wanted = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), DROPOUT), 3)
    assert bits(run_key(5), DROPOUT, 3) == tuple(np.asarray(jax.random.key_data(wanted)).tolist())
    many = {bits(run_key(seed), purpose, n) for seed in (0, 1) for purpose in (DROPOUT, EVALUATION) for n in (0, 1)}
    assert len(many) == 8


def test_an_infinite_loss_stays_infinite(kit: Kit) -> None:
    """Not NaN: a monitor tells an infinite value from a missing one."""

    def terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        return (LossTerm("t", jnp.sum(batch["t"]), jnp.sum(batch["mask"])),)

    evaluate = build_eval(kit.target_forward, terms, [])
    batch = {"t": np.array([np.inf, 1.0], np.float32), "mask": np.ones(2, np.float32)}
    assert evaluate.host({"w": np.float32(0)}, {}, [batch, batch]).loss == np.inf
