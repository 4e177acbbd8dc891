"""Objects with state of the user's own, held by checkpoints and restored after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ComponentRestoreError
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.components import ComponentSpec
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from tests.e2e.toys import ON_UPDATES, KillAt, Killed, Slope, only_run, slope, steps


class Kept(Callback):
    """Counts epochs, in an array; as a callback, or beside the callbacks."""

    def __init__(self, name: str, required: bool = True) -> None:
        self.spec, self.epochs = ComponentSpec(name, required=required), np.zeros(1, np.int64)

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.epochs += 1

    def component_spec(self) -> ComponentSpec:
        return self.spec

    def component_state(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        if state["epochs"] < 0:
            raise ValueError("a negative count")
        self.epochs = state["epochs"]


def train(runs: Path, callbacks: list[Any], components: list[Any], **more: Any) -> NNRun:
    return NNModel(module=Slope(), loss=slope).train(
        NNTrainParams(optim=NNOptimParams(kind="sgd", max_lr=0.1), scheduler=ON_UPDATES, **{"n_epochs": 3, **more}),
        callbacks,
        components=components,
        data=NNDataParams(train=steps(2), batch_size=1, shuffle=False),
        runs_dir=runs,
        quiet=True,
    )


def test_components_continue_after_a_kill(tmp_path: Path) -> None:
    """Of callbacks and of explicit ones; an object that is both counts once."""
    both = Kept("both")
    with pytest.raises(Killed):
        train(tmp_path, [both, KillAt("on_epoch_begin", 3)], [both, Kept("alone")])
    stored = find_point(tmp_path, only_run(tmp_path).id).host["components"]
    assert set(stored) == {"both", "alone"}
    both, alone = Kept("both"), Kept("alone")
    train(tmp_path, [both], [both, alone])
    assert (both.epochs.tolist(), alone.epochs.tolist()) == ([3], [0])


def test_a_resume_tells_which_were_restored_and_which_are_fresh(tmp_path: Path) -> None:
    first = train(tmp_path, [Kept("one")], [Kept("two")], n_epochs=1)
    second = train(tmp_path, [], [Kept("one"), Kept("two"), Kept("new", required=False)], resume_from_run_id=first.id)
    assert second.resume_status.restored_components == ("one", "two")
    assert second.resume_status.fresh_components == ("new",)


def test_every_problem_of_a_resume_is_one_error_and_nothing_is_restored(tmp_path: Path) -> None:
    """nnx:B131 nnx:B132 (a missing one, an unknown one, and one that does not load; no run is left behind)"""
    source = Kept("bad")
    source.epochs = np.array([-5])
    first = train(tmp_path, [Kept("one")], [Kept("two"), source], n_epochs=1)
    one, bad = Kept("one"), Kept("bad")
    with pytest.raises(ComponentRestoreError) as caught:
        train(tmp_path, [one], [bad, Kept("three")], resume_from_run_id=first.id)
    assert caught.value.problems == (
        "component two: the checkpoint needs it and this run has no such component",
        "component three: the checkpoint has no state for it",
        "component bad: a negative count",
    )
    assert (one.epochs.tolist(), bad.epochs.tolist()) == ([0], [0])
    assert only_run(tmp_path).id == first.id


def test_what_is_no_component_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    """nnx:B135"""
    with pytest.raises(TypeError, match="components takes objects with component_spec"):
        train(tmp_path / "runs", [], [3])
    assert not (tmp_path / "runs").exists()
