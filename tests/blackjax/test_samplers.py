"""The engine under the loop's calls: draws that do not depend on their cuts, their records, and what is stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError, ModelError, NonFiniteError, ResumePointError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.blackjax import BlackjaxEngine
from nnx_jax.engines.blackjax_batches import Minibatches
from nnx_jax.engines.blackjax_draws import ChainState
from nnx_jax.engines.blackjax_task import BlackjaxTask
from tests.blackjax.toy import dataset, draw, engine_of, gaussian, normal_mean, positions, rows, wide

ANY: dict[str, dict[str, Any]] = {
    "hmc": {"num_warmup": 30, "num_chains": 2},
    "sgld": {"num_warmup": 10, "num_chains": 2, "step_size": 1e-3},
    "svgd": {"num_particles": 10},
}
SLOW = {
    "nuts": {"num_warmup": 30, "num_chains": 2},
    "mclmc": {"num_warmup": 100, "num_chains": 2},
    "sghmc": {"num_warmup": 10, "num_chains": 2, "num_integration_steps": 3},
    "pathfinder": {"num_chains": 2},
    "tempered_smc": {"num_particles": 20, "init_fn": lambda key: 10 * jax.random.normal(key)},
}
EVERY = [*ANY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def make(name: str) -> BlackjaxEngine:
    settings = {**ANY, **SLOW}[name]
    if name in ("sgld", "sghmc", "tempered_smc"):
        return engine_of(normal_mean(sampler=name, **settings), dataset())
    return engine_of(gaussian(sampler=name, **settings))


@pytest.fixture(scope="module", params=EVERY)
def engine(request: pytest.FixtureRequest) -> BlackjaxEngine:
    return make(request.param)


def test_draws_do_not_depend_on_how_the_loop_cuts_them(engine: BlackjaxEngine) -> None:
    """Draws made in one call are those made one by one, bit for bit. (pipekit:K19)"""
    whole, stepwise = draw(engine, 24), draw(engine, 24, cuts=(1,) * 20)
    np.testing.assert_array_equal(positions(engine, whole), positions(engine, stepwise))
    first, second = (engine.read_records(state)[0] for state in (whole, stepwise))
    joined = [np.concatenate([each.loss for each in found]) for found in (first, second)]
    np.testing.assert_array_equal(*joined)


def test_a_snapshot_continues_bit_for_bit(engine: BlackjaxEngine) -> None:
    """Stored after 10 draws and restored into a fresh engine, 14 more are those of 24 in a row. (pipekit:K10)"""
    half = draw(engine, 10)
    stored = {name: np.array(array) for name, array in engine.snapshot(half, 0, 10).arrays.items()}
    again = make(engine.task.sampler)
    shapes = {name: (array.shape, str(array.dtype)) for name, array in stored.items()}
    assert again.abstract(again.start(), stored) == shapes
    resumed = draw(again, 14, again.restore(again.start(), stored))
    whole = draw(engine, 24)
    np.testing.assert_array_equal(positions(again, resumed), positions(engine, whole))
    last, other = (e.snapshot(s, 0, 24).arrays for e, s in ((engine, whole), (again, resumed)))
    for name, array in last.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_records_measure_every_draw() -> None:
    """One record a draw: an acceptance rate in [0, 1], divergences, and the negative log density. (pipekit:K17)"""
    engine = make("hmc")
    state = draw(engine, 30, cuts=(10,))
    records, failure = engine.read_records(state)
    assert failure is None
    assert np.concatenate([each.step for each in records]).tolist() == list(range(1, 31))
    drawn, divergent = positions(engine, state), engine.posterior.stats["is_divergent"]
    for each in records:
        for place in range(len(each)):
            loss, measured = engine.losses(each.sums["loss"][place].tolist())
            assert set(measured) == {"acceptance_rate", "is_divergent"}
            assert 0 <= measured["acceptance_rate"] <= 1
            assert measured["is_divergent"] == divergent[each.batch[place]].mean()
            by_hand = -np.mean([float(wide({"m": chain})) for chain in drawn[:, each.batch[place]]])
            assert loss == pytest.approx(by_hand, rel=1e-5) == each.loss[place]
            gradient = (drawn[:, each.batch[place]] - [3.0, -1.0]) / [1.0, 4.0]
            assert each.grad_norm[place] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
    assert engine.read_records(state) == ([], None)
    total = {name: sum(each.sums[name].sum(axis=0) for each in records) for name in records[0].sums}
    assert set(engine.summarize(total)) == {"loss", "acceptance_rate", "is_divergent"}


def test_a_record_is_told_once_though_a_snapshot_joins_the_blocks() -> None:
    engine = make("hmc")
    state = draw(engine, 4)
    assert sum(len(each) for each in engine.read_records(state)[0]) == 4
    state = draw(engine, 3, state)
    engine.snapshot(state, 0, 7)
    assert [each.batch.tolist() for each in engine.read_records(state)[0]] == [[4, 5, 6]]


def test_the_warmup_is_no_draw_and_runs_once() -> None:
    """A restored state brings what the warmup found; none is run. (pipekit:K10)"""
    engine = make("hmc")
    state = draw(engine, 2)
    found = np.array(state.params["step_size"])
    assert found.shape == (2,)
    assert engine.read_records(state)[0][0].rate[0] == pytest.approx(found.mean())
    again = make("hmc")
    resumed = again.restore(again.start(), engine.snapshot(state, 0, 2).arrays)
    again._started = None  # type: ignore[assignment]  # a warmup would call it
    np.testing.assert_array_equal(resumed.params["step_size"], found)


def test_refuses_arrays_of_another_run() -> None:
    engine = make("hmc")
    stored = dict(engine.snapshot(draw(engine, 2), 0, 2).arrays)
    other = engine_of(gaussian(sampler="hmc", num_warmup=30, num_chains=3))
    with pytest.raises(ResumePointError, match="kernel/position.m"):
        other.restore(other.start(), stored)
    stored.pop("adapted/step_size")
    with pytest.raises(ResumePointError, match="adapted/step_size"):
        engine.restore(engine.start(), stored)
    assert other.topology["sampler"] != engine.topology["sampler"]


def test_a_chain_that_leaves_the_numbers_ends_the_run_before_that_draw() -> None:
    engine = engine_of(normal_mean(sampler="sgld", num_warmup=0, step_size=10.0), dataset())
    state = draw(engine, 200)
    records, failure = engine.read_records(state)
    assert isinstance(failure, NonFiniteError)
    kept = sum(len(each) for each in records)
    assert 0 < kept == engine.batch_count(state) < 200
    assert f"draw {kept} of sgld" in str(failure)
    assert np.isfinite(positions(engine, state)).all()
    assert positions(engine, state).shape == (1, kept)
    _, failure = engine.read_records(draw(engine, 1, state))
    assert f"draw {kept} of sgld" in str(failure)  # the same draw again, from the same state


def test_a_warmup_that_leaves_the_numbers_is_told() -> None:
    engine = engine_of(normal_mean(sampler="sgld", num_warmup=300, step_size=10.0), dataset())
    with pytest.raises(NonFiniteError, match="warmup step"):
        draw(engine, 1)


def test_refuses_a_start_without_density() -> None:
    task = BlackjaxTask(lambda p: jnp.where(p > 1, -p, -jnp.inf), 0.5, sampler="hmc", num_warmup=0)
    with pytest.raises(ModelError, match=r"not finite where chains \[0\] of 1 start.*-inf"):
        draw(engine_of(task), 1)


def test_mclmc_needs_two_numbers() -> None:
    with pytest.raises(ConfigError, match="2 numbers or more, got 1"):
        draw(engine_of(normal_mean(sampler="mclmc"), dataset()), 1)


def test_positions_of_any_shape() -> None:
    """An array, or a nest of arrays; whole numbers are moved as floats. (pipekit:K12)"""
    array = engine_of(
        BlackjaxTask(lambda p: -0.5 * jnp.sum(p**2), np.zeros((2, 3), np.int32), sampler="hmc", num_warmup=0)
    )
    assert array.trained(draw(array, 3)).values["position"].shape == (1, 3, 2, 3)
    nested = {"a": {"b": jnp.zeros(2)}, "c": [jnp.zeros(())]}
    task = BlackjaxTask(
        lambda p: -0.5 * (jnp.sum(p["a"]["b"] ** 2) + p["c"][0] ** 2), nested, sampler="hmc", num_warmup=0
    )
    engine = engine_of(task)
    posterior = engine.trained(draw(engine, 3))
    assert {name: array.shape for name, array in posterior.values.items()} == {"a.b": (1, 3, 2), "c.0": (1, 3)}
    assert posterior.flat(posterior.positions)["a"]["b"].shape == (3, 2)


def test_no_draw_no_posterior() -> None:
    engine = make("hmc")
    assert engine.trained(engine.start()).values == {}


# -- minibatches ---------------------------------------------------------------------------------------------------


def test_a_draw_sees_the_batch_of_its_number() -> None:
    """Columns on the device, or batches from a loader: the feed's own batches, pass after pass."""
    feed = Feed(ArrayDataset(x=rows()[:10]), batch_size=4, tail="pad", seed=3)
    batches = Minibatches(feed, weighs_rows=True)
    block = batches.block(2, 3, 5)
    assert block.shape == (5, 4)
    expected = [*list(feed.batches(0, 2)), *list(feed.batches(1))]
    for place in range(3):
        picked = batches.pick(batches.held, block, place)
        for name, column in picked.items():
            np.testing.assert_array_equal(column, expected[place][name])
    listed = Minibatches(LoaderFeed([{"x": rows()[:4]}, {"x": rows()[4:8]}]), weighs_rows=False)
    assert listed.held == {}
    found = listed.block(1, 2, 2)
    np.testing.assert_array_equal(found["x"], np.stack([rows()[4:8], rows()[:4]]))
    np.testing.assert_array_equal(listed.block(0, 1, 1)["x"][0], rows()[:4])
    assert {name: tuple(shape.shape) for name, shape in listed.shapes.items()} == {"x": (4, 1), "mask": (4,)}


def test_refuses_padding_that_an_estimate_cannot_weigh() -> None:
    ragged = [{"x": rows()[:4]}, {"x": rows()[4:7]}]
    with pytest.raises(DataError, match="weight 0"):
        Minibatches(LoaderFeed(ragged), weighs_rows=False).block(0, 2, 2)
    with pytest.raises(DataError, match="no length"):
        Minibatches(LoaderFeed(iter(ragged)), weighs_rows=True)


def test_an_estimate_leaves_padding_out_and_scales_to_all_rows() -> None:
    """Of batches of 4 of 10 rows the last has 2: its log density is scaled by 10 / 2. (pipekit:K15)"""
    data = ArrayDataset(x=rows()[:10])
    engine = engine_of(normal_mean(sampler="sgld"), data, batch=4)
    assert engine.batches is not None
    found = []
    for batch in engine.batches.feed.batches(0):
        kept = batch["x"][batch["mask"] > 0].astype(np.float64)
        by_hand = -0.5 * (2.0 / 10.0) ** 2 - 10 / len(kept) * 0.5 * np.square(kept - 2.0).sum()
        value, gradient = jax.value_and_grad(engine.target.estimate)(jnp.asarray(2.0), batch)
        assert value == pytest.approx(by_hand, rel=1e-5)
        assert gradient == pytest.approx(-2.0 / 100 + 10 / len(kept) * (kept - 2.0).sum(), rel=1e-4)
        found.append(len(kept))
    assert sorted(found) == [2, 4, 4]


def test_a_gradient_of_ones_own_needs_full_batches() -> None:
    """`grad_estimator` takes (position, batch); rows that fill no batch are left out of a pass. (pipekit:K15)"""
    data = ArrayDataset(x=rows()[:10])
    task = BlackjaxTask(
        grad_estimator=lambda mean, x: 10 * jnp.mean(x - mean), init_position=0.0, sampler="sgld", num_warmup=0
    )
    engine = engine_of(task, data, batch=4)
    assert engine.batches is not None
    assert engine.batches.per_pass == 2
    records, failure = engine.read_records(draw(engine, 5))
    assert failure is None
    assert np.isnan(records[0].loss).all()


def test_a_call_takes_about_half_a_second_whatever_a_draw_costs() -> None:
    engine = engine_of(gaussian(sampler="hmc", num_warmup=5, num_integration_steps=2), max_steps=40)
    most = [engine._most(ChainState(pace=pace)) for pace in (None, 0.125, 2.0, 1e-9)]
    assert most == [64, 4, 1, engine.block]
