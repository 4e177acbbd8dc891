"""Simulated pairs: sizes, seeds, what the hash knows, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.data import Feed, SimulationDataset, TrainingDataset, sample_seed

SPLITS = ("train", "val", "test")


@register("normal_prior_for_tests")
class NormalPrior(Operator):
    """Two draws around `mean`."""

    mean: float = 0.0

    def _apply(self, *, seed: int) -> np.ndarray:
        return self.mean + np.random.default_rng(seed).normal(size=2)


@register("doubling_for_tests")
class Doubling(Operator):
    """Doubles the state in one step of `dt`."""

    dt: float = 1.0
    factor: float = 2.0

    def step(self, state: np.ndarray, dt: float) -> np.ndarray:
        return state * self.factor * dt


@register("negate_for_tests")
class Negate(Operator):
    """-y, times `by`."""

    by: float = 1.0

    def _apply(self, y: np.ndarray) -> np.ndarray:
        return -y * self.by


@dataclass
class Oscillator:
    """A model that is no operator."""

    omega: float
    dt: float = 0.1

    def step(self, state: np.ndarray, dt: float) -> np.ndarray:
        return state * np.cos(self.omega * dt)


class Cycle:
    """Several steps of a model."""

    def __init__(self, model: Oscillator, steps: int) -> None:
        self.model, self.steps = model, steps

    def __call__(self, state: np.ndarray) -> np.ndarray:
        for _ in range(self.steps):
            state = self.model.step(state, self.model.dt)
        return state


def simulated(**fields: Any) -> SimulationDataset:
    return SimulationDataset(**({"forward_model": Doubling(), "prior": NormalPrior(), "n_samples": 20} | fields))


@pytest.mark.parametrize(
    ("n", "sizes"), [(20, (16, 2, 2)), (10, (8, 1, 1)), (7, (5, 1, 1)), (3, (2, 0, 1)), (1, (0, 0, 1))]
)
def test_sizes_of_the_splits(n: int, sizes: tuple[int, int, int]) -> None:
    """Tenths, rounded down (pipekit:B8)."""
    parts = [simulated(n_samples=n).with_split(split) for split in SPLITS]
    assert tuple(map(len, parts)) == sizes
    assert [part.take(np.arange(len(part)))["x"].shape for part in parts] == [(size, 2) for size in sizes]
    assert [len(list(part)) for part in parts] == list(sizes)


def test_what_is_refused() -> None:
    """(pipekit:B9)"""
    with pytest.raises(ValueError, match="n_samples must be positive, found 0"):
        simulated(n_samples=0)
    with pytest.raises(TypeError, match="expected an Operator called with seed=; got .*lambda"):
        simulated(prior=lambda seed: np.zeros(2))
    for model in (object(), Negate(), type("NoDt", (), {"step": lambda self, x, dt: x})()):
        with pytest.raises(TypeError, match=r"a ForwardModel has step\(state, dt\) and dt"):
            simulated(forward_model=model)
    with pytest.raises(TypeError, match="cycle: expected an operator or a function; got a int"):
        simulated(cycle=3)


def test_samples_by_number() -> None:
    """From either end, the same every time, and what iterating gives (pipekit:B10)."""
    data = simulated()
    iterated = list(data)
    for index, (x, y) in enumerate(iterated):
        for again in (data[index], simulated()[index]):
            np.testing.assert_array_equal(again[0], x)
            np.testing.assert_array_equal(again[1], y)
    np.testing.assert_array_equal(data[-1][0], iterated[-1][0])
    np.testing.assert_array_equal(data.take(np.array([3, -2, 3]))["x"], [iterated[i][0] for i in (3, 14, 3)])
    for index in (16, -17):
        with pytest.raises(IndexError):
            data[index]
    with pytest.raises(IndexError):
        data.take(np.array([16]))


def test_what_the_model_makes_of_a_sample() -> None:
    """(pipekit:B11)"""
    assert all((y == 2 * x).all() for x, y in simulated())
    assert all((y == -2 * x).all() for x, y in simulated(obs_op=Negate()))
    model = Oscillator(omega=2.0)
    for x, y in simulated(forward_model=model, cycle=Cycle(model, 3)):
        np.testing.assert_allclose(y, x * np.cos(0.2) ** 3, rtol=1e-15)


def test_no_two_samples_share_a_seed() -> None:
    """Neither within a dataset, between its splits (pipekit:B12), nor between base seeds (pipekit:B13)."""
    assert not np.array_equal(simulated(seed=42)[0][0], simulated(seed=42, split="val")[0][0])
    seeds = [
        seed
        for base in range(30)
        for split in SPLITS
        for seed in simulated(seed=base, n_samples=200, split=split).sample_seeds()
    ]
    assert len(set(seeds)) == 30 * 200
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
    zero, one = (np.concatenate([x for x, _ in simulated(seed=base, n_samples=500)]) for base in (0, 1))
    assert not set(zero.tolist()) & set(one.tolist())
    expected = int(np.random.SeedSequence(7, spawn_key=(3,)).generate_state(1, np.uint64)[0]) // 2
    assert sample_seed(7, 3) == expected


def test_a_priors_own_error_comes_out() -> None:
    """A TypeError in its body is not taken for a prior without a seed (pipekit:B14)."""
    calls = []

    class Broken(Operator):
        """Raises."""

        def _apply(self, **given: Any) -> np.ndarray:
            calls.append(given)
            raise TypeError("the prior's own mistake")

    with pytest.raises(TypeError, match="the prior's own mistake"):
        simulated(prior=Broken())[0]
    assert [list(given) for given in calls] == [["seed"]]


def test_the_hash_knows_every_parameter() -> None:
    """Of the model, the prior, the cycle and the observation (pipekit:B15)."""
    slow, fast = Oscillator(omega=2.0), Oscillator(omega=3.0)
    kinds = [
        simulated(),
        simulated(forward_model=Doubling(factor=3.0)),
        simulated(forward_model=slow),
        simulated(forward_model=fast),
        simulated(forward_model=Oscillator(omega=2.0, dt=0.2)),
        simulated(prior=NormalPrior(mean=1.0)),
        simulated(forward_model=slow, cycle=Cycle(slow, 3)),
        simulated(forward_model=slow, cycle=Cycle(slow, 4)),
        simulated(forward_model=slow, cycle=Cycle(fast, 3)),
        simulated(obs_op=Negate()),
        simulated(obs_op=Negate(by=2.0)),
        simulated(seed=1),
        simulated(n_samples=21),
        simulated(split="val"),
        simulated().widened(),
    ]
    assert len({data.content_hash() for data in kinds}) == len(kinds)
    assert simulated(forward_model=Oscillator(omega=2.0)).content_hash() == kinds[2].content_hash()
    assert simulated(forward_model=Oscillator(omega=2.0)) == kinds[2]
    with pytest.raises(DataError, match=r"Oscillator\.omega: .*<lambda> is no name that finds"):
        simulated(forward_model=Oscillator(omega=lambda: 2.0)).content_hash()  # type: ignore[arg-type]


def test_the_way_through_a_file() -> None:
    data = simulated(forward_model=Doubling(factor=3.0), obs_op=Negate(by=2.0), seed=4)
    back = TrainingDataset.from_yaml(data.to_yaml())
    assert back == data
    assert back.content_hash() == data.content_hash()
    np.testing.assert_array_equal(back[1][1], data[1][1])
    state = simulated(forward_model=Oscillator(omega=2.0)).state()
    with pytest.raises(ValueError, match="Oscillator was given in Python and is not stored"):
        TrainingDataset.from_state(state)


def test_it_feeds_a_run() -> None:
    data = simulated()
    assert data.info == {"input_shape": (2,), "input_dim": 2, "target_shape": (2,), "output_dim": 2}
    batches = list(Feed(data, batch_size=5, seed=1).batches(0))
    assert [batch["x"].dtype for batch in batches] == [np.float32] * 4
    assert sum(float(batch["mask"].sum()) for batch in batches) == 16
    with pytest.raises(DataError, match=r"SimulationDataset is empty \(0 rows\)"):
        Feed(simulated(n_samples=3, split="val"), batch_size=1)


def test_samples_of_different_shapes_are_named() -> None:
    class Growing(Operator):
        """Longer for every call."""

        def _apply(self, *, seed: int) -> np.ndarray:
            sizes.append(len(sizes))
            return np.zeros(1 + (len(sizes) > 3))

    sizes: list[int] = []
    data = simulated(prior=Growing(), split="train")
    with pytest.raises(DataError, match=r"SimulationDataset: row 3 has shapes"):
        data.take(np.arange(8))
    assert all(a < b for a, b in pairwise(sizes))
