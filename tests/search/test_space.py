"""What a study may try: ranges, choices, and how samplers walk through them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.search import CategoricalParam, FloatParam, GridSampler, IntParam, RandomSampler, SearchSpace, TrialOutcome

LOG = FloatParam(low=1e-4, high=1e-1, log=True)


def tried(*values: dict[str, Any]) -> tuple[TrialOutcome, ...]:
    return tuple(TrialOutcome(number, each, state="failed") for number, each in enumerate(values))


def drawn(param: Any, count: int = 300) -> list[Any]:
    rng = np.random.default_rng(0)
    return [param.draw(rng) for _ in range(count)]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: FloatParam(low=2.0, high=1.0), "high: got 1.0, less than low=2.0"),
        (lambda: FloatParam(low=0.0, high=1.0, log=True), "low: got 0.0; a logarithmic range begins above 0"),
        (lambda: FloatParam(low=1.0, high=2.0, log=True, step=0.5), "step: a logarithmic range has no steps"),
        (lambda: FloatParam(low=math.nan, high=1.0), "low: got nan"),
        (lambda: IntParam(low=1, high=4, step=0), "step: got 0"),
        (lambda: IntParam(low=1.5, high=4), "low: got 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: CategoricalParam(choices=()), "expected at least 1 items"),
        (lambda: CategoricalParam(choices=("a", "a")), "'a' is given twice"),
        (lambda: CategoricalParam(choices=(1, len)), "name it, and let apply look it up"),
        (lambda: SearchSpace(), "the space is empty"),
        (lambda: SearchSpace(lr=0.1), "space.lr: expected a FloatParam"),  # pyright: ignore[reportArgumentType]
        (lambda: GridSampler(0), "points must be a whole number of 1 or more, got 0"),
        (lambda: RandomSampler(True), "seed must be a whole number of 0 or more"),
    ],
)
def test_what_is_wrong_is_said(build: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


def test_draws_stay_in_range_and_reach_it() -> None:
    values = drawn(LOG)
    assert all(1e-4 <= value <= 1e-1 and type(value) is float for value in values)
    # A third of the way of three decades is one decade: as many draws in each.
    counts = [sum(1e-4 * 10**k <= value < 1e-3 * 10**k for value in values) for k in range(3)]
    assert sum(counts) == 300
    assert min(counts) > 70
    assert set(drawn(IntParam(low=2, high=8, step=3))) == {2, 5, 8}
    assert set(drawn(IntParam(low=1, high=4, log=True))) == {1, 2, 3, 4}
    assert set(drawn(FloatParam(low=0.0, high=1.0, step=0.5))) == {0.0, 0.5, 1.0}
    assert set(drawn(FloatParam(low=0.0, high=0.3, step=0.1))) == {0.0, 0.1, 0.2, 0.3}
    assert set(drawn(CategoricalParam(choices=("a", None, (1, 2))))) == {"a", None, (1, 2)}


def test_grids() -> None:
    assert LOG.grid(4) == [1e-4, pytest.approx(1e-3), pytest.approx(1e-2), 1e-1]
    assert FloatParam(low=0.0, high=1.0).grid(3) == [0.0, 0.5, 1.0]
    assert FloatParam(low=0.0, high=1.0).grid(1) == [0.0]
    assert FloatParam(low=1.0, high=1.0).grid(3) == [1.0]
    assert FloatParam(low=0.0, high=1.0, step=0.4).grid(9) == [0.0, 0.4, 0.8]
    assert IntParam(low=1, high=8, step=3).grid(2) == [1, 4, 7]
    assert IntParam(low=1, high=16, log=True).grid(5) == [1, 2, 4, 8, 16]
    assert CategoricalParam(choices=(True, False)).grid(9) == [True, False]


def test_a_space_is_plain_text_and_back() -> None:
    space = SearchSpace({"train.optim.max_lr": LOG, "net": CategoricalParam(choices=("a", "b"))})
    again = SearchSpace.from_state(space.state())
    assert again.state() == space.state()
    assert list(again) == ["train.optim.max_lr", "net"]
    with pytest.raises(ConfigError, match=r"space.yaml: lr: FloatParam|space.yaml: lr"):
        SearchSpace.from_state({"lr": {"kind": "float", "low": 1.0}}, source="space.yaml")
    with pytest.raises(ConfigError, match="expected a mapping of names"):
        SearchSpace.from_state([1])


def test_random_values_depend_on_seed_and_number_alone() -> None:
    space, turned = SearchSpace(a=LOG, b=IntParam(low=0, high=99)), SearchSpace(b=IntParam(low=0, high=99), a=LOG)
    first, again = RandomSampler(3), RandomSampler(3)
    values = [dict(first.ask(space, number, (), "min")) for number in range(4)]
    assert [dict(again.ask(turned, number, tried({}), "max")) for number in reversed(range(4))] == values[::-1]
    assert len({value["b"] for value in values}) > 1
    assert dict(RandomSampler(4).ask(space, 0, (), "min")) != values[0]


def test_a_grid_passes_over_what_was_tried() -> None:
    space = SearchSpace(a=FloatParam(low=0.0, high=1.0), b=CategoricalParam(choices=("x", "y")))
    grid = GridSampler(2)
    found: list[dict[str, Any]] = []
    while (values := grid.ask(space, len(found), tried(*found), "min")) is not None:
        found.append(dict(values))
    whole = [(a, b) for a in (0.0, 1.0) for b in ("x", "y")]
    assert [(each["a"], each["b"]) for each in found] == whole
    assert GridSampler({"a": 3}).ask(space, 0, tried(*found[:2]), "min") == {"a": 0.5, "b": "x"}
    with pytest.raises(ConfigError, match="names 'c'"):
        GridSampler({"c": 3}).ask(space, 0, (), "min")
