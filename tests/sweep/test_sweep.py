"""Sweeps: what is tried in which order, how results are sorted, what goes on after a failure or a stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from nnx_jax.backends import register_backend
from nnx_jax.core.errors import ConfigError
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.sweep import HyperSweep, ParameterGrid, SweepCarryState, SweepResult
from nnx_jax.training_loop import TrainingLoop
from tests.sweep import told

register_backend("told", "tests.sweep.told", replace=True)

X = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
DATA = ArrayDataset(X, 2 * X + 1)
MODEL = NNXModelOp(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    told.RUNS.clear()


def loop_of(point: Any) -> TrainingLoop:
    return TrainingLoop(model_op=MODEL, dataset=DATA, task=point["lr"], max_steps=1, backend="told")


def sweep(*losses: float, **more: Any) -> HyperSweep:
    return HyperSweep(loop_template=loop_of, search_space=[{"lr": loss} for loss in losses], **more)


def indices(results: list[SweepResult]) -> list[int]:
    return [result.trial_index for result in results]


# -- the grid --------------------------------------------------------------------------------------------------------


def test_a_grid() -> None:
    """Every combination, the last name fastest, as often as it is asked (pipekit:L1)."""
    grid = ParameterGrid({"lr": [1e-3, 1e-2], "width": [8, 16]})
    wanted = [(1e-3, 8), (1e-3, 16), (1e-2, 8), (1e-2, 16)]
    for _ in range(2):
        assert [(point["lr"], point["width"]) for point in grid] == wanted
    assert (len(grid), len(ParameterGrid({})), list(ParameterGrid({}))) == (4, 0, [])
    with pytest.raises(ValueError, match=r"grid\['lr'\] has no values"):
        ParameterGrid({"lr": []})
    with pytest.raises(TypeError, match="give a list of values"):
        ParameterGrid({"lr": "fast"})
    with pytest.raises(TypeError, match="a grid is a mapping"):
        ParameterGrid([1, 2])
    with pytest.raises(TypeError, match="it is iterated"):
        grid()
    assert list(ParameterGrid.from_yaml(grid.to_yaml())) == list(grid)


# -- order and selection ---------------------------------------------------------------------------------------------


def test_results_are_sorted() -> None:
    """Best first, in either direction; places and the sweep's id stay with them (pipekit:L2)."""
    lowest = sweep(3.0, 1.0, 2.0).run()
    assert (indices(lowest), [result.metric for result in lowest]) == ([1, 2, 0], [1.0, 2.0, 3.0])
    assert indices(sweep(3.0, 1.0, 2.0, select_mode="max").run()) == [0, 2, 1]
    assert {result.sweep_id for result in sweep(1.0, 2.0, sweep_id="mine").run()} == {"mine"}
    assert sweep(1.0).sweep_id != sweep(1.0).sweep_id
    assert len({result.sweep_id for result in lowest}) == 1


def test_how_many_and_what_is_refused() -> None:
    """Exactly n_trials are run; what is no space, point, template or loop is refused (pipekit:L3)."""
    assert len(sweep(5.0, 4.0, 3.0, 2.0, 1.0, n_trials=2).run()) == 2
    assert told.RUNS == [5.0, 4.0]
    with pytest.raises(ValueError, match="n_trials is 0"):
        sweep(1.0, n_trials=0)
    with pytest.raises(ValueError, match="no point"):
        HyperSweep(loop_template=loop_of, search_space=ParameterGrid({})).run()
    with pytest.raises(TypeError, match="point 0 is int"):
        HyperSweep(loop_template=loop_of, search_space=[1]).run()
    with pytest.raises(TypeError, match="loop_template is int"):
        HyperSweep(loop_template=3, search_space=[{}])
    with pytest.raises(TypeError, match="loop_template returned int"):
        HyperSweep(loop_template=lambda point: 3, search_space=[{}]).run()
    with pytest.raises(TypeError, match="search_space is int"):
        HyperSweep(loop_template=loop_of, search_space=3)
    with pytest.raises(ValueError, match="select_metric is 'accuracy'; a trial gives loss"):
        sweep(1.0, select_metric="accuracy").run()


def test_what_is_told_after_every_trial() -> None:
    """Trials done, and the best so far (pipekit:L4)."""
    seen: list[tuple[int, float | None, int | None]] = []

    def note(state: SweepCarryState, result: SweepResult) -> None:
        seen.append((state.completed, state.best_metric, state.best_trial_index))

    sweep(3.0, 1.0, 2.0, on_trial=note).run()
    assert seen == [(1, 3.0, 0), (2, 1.0, 1), (3, 1.0, 1)]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_ranks_last_and_a_failure_is_recorded(mode: str) -> None:
    """NaN comes after every number, a loop that raised after that; the others are run (pipekit:L7)."""
    results = sweep(2.0, 100.0, -1.0, 1.0, select_mode=mode).run()
    assert indices(results) == ([3, 0, 1, 2] if mode == "min" else [0, 3, 1, 2])
    assert math.isnan(results[2].metric or 0.0)
    assert (results[3].status, results[3].metric) == ("failed", None)
    assert results[3].error == "FloatingPointError: loss is -1.0"
    with pytest.raises(FloatingPointError):
        sweep(-1.0, 1.0, on_error="raise").run()


def test_a_point_that_makes_no_loop_is_a_failed_trial(tmp_path: Path) -> None:
    """A template that raises is recorded like a loop that does, and stored; a wrong return is the caller's mistake."""

    def template(point: dict[str, Any]) -> TrainingLoop:
        return loop_of({"lr": 1.0}).replace(batch_size=point["size"])

    given: dict[str, Any] = {"loop_template": template, "search_space": [{"size": 0}, {"size": 4}]}
    results = HyperSweep(**given, storage=tmp_path).run()
    assert [(result.trial_index, result.status) for result in results] == [(1, "completed"), (0, "failed")]
    assert results[1].error.startswith("ConfigError: ")
    assert "batch_size" in results[1].error
    assert HyperSweep(**given, storage=tmp_path).run()[1].error == results[1].error
    with pytest.raises(ConfigError, match="batch_size"):
        HyperSweep(**given, on_error="raise").run()


def test_a_point_that_cannot_be_stored_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    """A value that no file can hold is named, and nothing was trained in vain."""
    with pytest.raises(ConfigError, match=r"(?s)point 0 cannot be stored.*plain values"):
        HyperSweep(loop_template=loop_of, search_space=[{"lr": 1.0, "of": object()}], storage=tmp_path).run()
    assert told.RUNS == []


def test_only_what_is_asked_is_kept_in_memory() -> None:
    """By default the best model alone."""
    kept: Callable[..., list[int]] = lambda keep: sorted(  # noqa: E731
        result.trial_index for result in sweep(3.0, 1.0, 2.0, keep=keep).run() if result.operator is not None
    )
    assert (kept("best"), kept("all"), kept("none")) == ([1], [0, 1, 2], [])


# -- going on, asking and telling ------------------------------------------------------------------------------------


def test_a_sweep_goes_on(tmp_path: Path) -> None:
    """What is stored is not run again; NaN and failures come back as they were; other points are refused (pipekit:L8).

    That trials of one program equal sequential ones is shown in tests/search.
    """
    first = sweep(2.0, 100.0, -1.0, n_trials=3, storage=tmp_path).run()
    assert told.RUNS == [2.0, 100.0, -1.0]
    again = sweep(2.0, 100.0, -1.0, 1.0, storage=tmp_path).run()
    assert told.RUNS == [2.0, 100.0, -1.0, 1.0]
    assert indices(again) == [3, *indices(first)]
    assert [result.error for result in again][-1] == "FloatingPointError: loss is -1.0"
    with pytest.raises(ConfigError, match="holds point .* use another storage"):
        sweep(7.0, storage=tmp_path).run()
    with pytest.raises(ConfigError, match="holds select_metric 'loss'"):
        sweep(2.0, select_metric="other", storage=tmp_path).run()


class Halving:
    """Asks for half of the last point, three times."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float | None]] = []

    def ask(self) -> dict[str, float] | None:
        return None if len(self.told) == 3 else {"lr": 8.0 / 2 ** len(self.told)}

    def tell(self, point: dict[str, float], value: float | None) -> None:
        self.told.append((point["lr"], value))


def test_a_sweep_asks_and_tells() -> None:
    """A space that learns from values is told each before it is asked again (pipekit:L8)."""
    space = Halving()
    results = HyperSweep(loop_template=loop_of, search_space=space).run()
    assert space.told == [(8.0, 8.0), (4.0, 4.0), (2.0, 2.0)]
    assert indices(results) == [2, 1, 0]


# -- real trainings --------------------------------------------------------------------------------------------------


def test_the_best_rate_of_real_trainings() -> None:
    """One of three rates learns in 40 updates: too small moves nothing, too large flies apart (pipekit:L5, pipekit:L6).

    With a validation set its loss is what is compared, under the default name, although the last batch is measured too.
    """

    def template(point: dict[str, Any]) -> TrainingLoop:
        optim = {"name": "sgd", "lr": point["lr"]}
        return TrainingLoop(
            model_op=MODEL, dataset=DATA, val_dataset=DATA, loss="mse", max_steps=40, batch_size=16, quiet=True,
            optimizer_config=optim, on_nonfinite="stop", checkpoint_every_n_steps=1,
        )  # fmt: skip

    results = HyperSweep(loop_template=template, search_space=ParameterGrid({"lr": [1e-4, 0.3, 10.0]})).run()
    assert results[0].point == {"lr": 0.3}
    best = results[0]
    assert best.metric == best.metrics["val_loss"]
    # Worked by hand: a linear fit of noiseless rows, whose error falls with the rate times the smallest curvature.
    assert best.metric is not None
    assert best.metric < 1e-3
    predicted = np.asarray(best.operator(X))
    assert best.metric == pytest.approx(float(np.mean((predicted - (2 * X + 1)) ** 2)), rel=1e-4)
