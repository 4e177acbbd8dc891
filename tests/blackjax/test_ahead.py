"""Draws handed over before the loop asks for them: they are those it would have got, and never more than it wants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnx_jax.engines import blackjax
from nnx_jax.engines.blackjax import BlackjaxEngine
from tests.blackjax.toy import draw, engine_of, gaussian, positions


@pytest.fixture(scope="module")
def engine() -> BlackjaxEngine:
    return engine_of(gaussian(sampler="hmc", num_warmup=5, num_integration_steps=2), max_steps=40)


@pytest.fixture
def calls(engine: BlackjaxEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first draw, draws) of every call of the device; no span is too long for the next to be handed over."""
    made: list[tuple[int, int]] = []
    real = engine._call

    def call(kernel: Any, params: Any, key: Any, first: int, count: int, alive: Any) -> Any:
        made.append((first, count))
        return real(kernel, params, key, first, count, alive)

    monkeypatch.setattr(engine, "_call", call)
    monkeypatch.setattr(blackjax, "AHEAD_SECONDS", np.inf)
    return made


def test_a_loop_that_goes_on_as_before_finds_its_draws_made(engine: BlackjaxEngine, calls: list[Any]) -> None:
    """Each read hands over the next block; at the last update of the run nothing more is."""
    state = draw(engine, 10)
    for _ in range(3):
        engine.read_records(state)
        assert calls[-1] == (state.drawn, 10)
        state = draw(engine, 10, state)
    engine.read_records(state)
    assert calls == [(0, 10), (10, 10), (20, 10), (30, 10)]
    np.testing.assert_array_equal(positions(engine, state), positions(engine, draw(engine, 40)))


def test_a_loop_that_goes_on_otherwise_gets_what_it_asks_for(engine: BlackjaxEngine, calls: list[Any]) -> None:
    """The block is dropped, whatever was stored meanwhile is of the draws that were asked for, and so are the draws."""
    state = draw(engine, 10)
    first, _ = engine.read_records(state)
    stored = {name: np.array(array) for name, array in engine.snapshot(state, 0, 10).arrays.items()}
    state = draw(engine, 7, state)
    second, _ = engine.read_records(state)
    assert calls == [(0, 10), (10, 10), (10, 7), (17, 7)]
    assert [len(each) for each in (*first, *second)] == [10, 7]
    whole = positions(engine, draw(engine, 17))
    np.testing.assert_array_equal(positions(engine, state), whole)
    restored = draw(engine, 7, engine.restore(engine.start(), stored))
    np.testing.assert_array_equal(positions(engine, restored), whole)


def test_a_long_span_is_not_made_longer(
    engine: BlackjaxEngine, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who ends a run of slow draws does not wait for more of them."""
    monkeypatch.setattr(blackjax, "AHEAD_SECONDS", 0.0)
    state = draw(engine, 10)
    engine.read_records(state)
    assert calls == [(0, 10)]
