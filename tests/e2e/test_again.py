"""One model, several calls of `train`: what a run that was cut short leaves, and whose weights a run id stands for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.transforms import TransformAtEnd
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.loop.signals import Interrupted
from nnx_jax.model import NNModel
from nnx_jax.runs.run import NNRun
from tests.e2e import helpers
from tests.e2e.helpers import stored


class Does(Callback):
    """Calls `do(ctx)` at one hook."""

    def __init__(self, hook: str, do: Callable[[TrainContext], Any]) -> None:
        setattr(self, hook, do)


def strike(ctx: TrainContext) -> None:
    if ctx.epoch == 1:
        os.kill(os.getpid(), signal.SIGINT)


def fail(ctx: TrainContext) -> None:
    raise RuntimeError("no")


def only(runs: Path) -> NNRun:
    (run,) = NNRun.all(runs)
    return run


def same_weights(left: NNRun, right: NNRun) -> bool:
    one, two = stored(left), stored(right)
    return all(np.array_equal(one[name], two[name]) for name in one if name.startswith("params/"))


def test_an_interrupted_run_that_was_finished_is_not_gone_on_with(tmp_path: Path) -> None:
    """The next call is a run of its own from the trained weights; overwriting never puts those under the first id."""
    model, straight = helpers.model(), helpers.fit(tmp_path / "straight")
    with pytest.raises(Interrupted):
        helpers.fit(tmp_path / "runs", of=model, callbacks=[Does("on_epoch_begin", strike)])
    first = helpers.fit(tmp_path / "runs", of=model)
    assert first.id == straight.id
    assert same_weights(first, straight)
    second = helpers.fit(tmp_path / "runs", of=model, overwrite_existing=True)
    assert second.id != first.id
    assert same_weights(NNRun.load(first.id, tmp_path / "runs"), straight)


def test_an_interrupted_run_of_loaders_goes_on(tmp_path: Path) -> None:
    """The same call continues it, as it does where data comes as a dataset."""
    rows = helpers.dataset().arrays() or {}
    batches = [{name: column[at : at + 4] for name, column in rows.items()} for at in range(0, 20, 4)]
    model = NNModel(helpers.net_params(input_dim=4, output_dim=3))

    def train(*callbacks: Callback) -> NNRun:
        params = helpers.train_params(train_loader=batches, data_id="toy")
        return model.train(params, callbacks, runs_dir=tmp_path, progress=QuietProgress())

    with pytest.raises(Interrupted):
        train(Does("on_epoch_begin", strike))
    begun = only(tmp_path)
    assert train().id == begun.id
    assert only(tmp_path).status == "finished"


@pytest.mark.parametrize("committed", [False, True])
def test_a_failed_run_leaves_what_was_committed(tmp_path: Path, committed: bool) -> None:
    """A callback has looked at the weights, so the model had them. The same call goes on all the same; another one is
    of trained weights under an id that says so, or of those from before where nothing was committed.
    """

    def look(ctx: TrainContext) -> None:
        ctx.sync()
        if ctx.epoch == int(committed):
            raise RuntimeError("no")

    model = helpers.model()
    with pytest.raises(RuntimeError, match="no"):
        helpers.fit(tmp_path / "runs", of=model, callbacks=[Does("on_epoch_end", look)])
    assert len(NNRun.all(tmp_path / "runs")) == int(committed)
    if committed:
        again = helpers.fit(tmp_path / "runs", of=model)
        assert again.id == only(tmp_path / "runs").id
        assert same_weights(again, helpers.fit(tmp_path / "straight"))
        with pytest.raises(RuntimeError, match="no"):
            helpers.fit(tmp_path / "again", of=(model := helpers.model()), callbacks=[Does("on_epoch_end", look)])
    fresh, other = helpers.fit(tmp_path / "fresh", n_epochs=1), helpers.fit(tmp_path / "runs", of=model, n_epochs=1)
    assert (other.id == fresh.id) == same_weights(other, fresh) == (not committed)


def test_a_network_changed_before_a_failure_is_known_as_changed(tmp_path: Path) -> None:
    """The merge was done when another callback failed; the model says so, and LAST is as before."""
    model = helpers.model(norm=None).transform("lora", rank=2)
    with pytest.raises(RuntimeError, match="no"):
        helpers.fit(tmp_path, of=model, callbacks=[Does("on_train_end", fail), TransformAtEnd("lora_merge")])
    assert [done.name for done in model.transforms] == ["lora", "lora_merge"]
    rebuilt = NNModel.from_checkpoint(only(tmp_path).id, runs_dir=tmp_path)
    assert [done.name for done in rebuilt.transforms] == ["lora"]


def test_a_failed_training_changes_no_network_at_its_end(tmp_path: Path) -> None:
    """TransformAtEnd leaves a failed run alone, and nothing is noted that was not done."""
    model = helpers.model(norm=None).transform("lora", rank=2)
    with pytest.raises(RuntimeError, match="no"):
        helpers.fit(tmp_path, of=model, callbacks=[Does("on_epoch_end", fail), TransformAtEnd("lora_merge")])
    assert [done.name for done in model.transforms] == ["lora"]


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_end"])
def test_the_topology_is_settled_while_a_model_is_trained(tmp_path: Path, hook: str) -> None:
    change = Does(hook, lambda ctx: ctx.model.transform("lora_merge"))
    with pytest.raises(ModelError, match="while the model is trained.*have TransformAtEnd do it"):
        helpers.fit(tmp_path, of=helpers.model(norm=None).transform("lora", rank=2), callbacks=[change], n_epochs=1)


def test_a_start_that_fails_removes_what_it_made_and_no_more(tmp_path: Path) -> None:
    """Whatever was in the directory before stays; what an earlier start was killed in goes."""
    seen: list[Path] = []

    def look(ctx: TrainContext) -> None:
        seen.append(tmp_path / ctx.run_id)
        raise RuntimeError("no")

    def failed() -> Path:
        with pytest.raises(RuntimeError, match="no"):
            helpers.fit(tmp_path, callbacks=[Does("on_epoch_begin", look)])
        return seen[-1]

    run = failed()
    assert not run.exists()
    run.mkdir()
    (run / "idps.csv").write_text("torn")
    assert not failed().exists()
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    assert [path.name for path in failed().iterdir()] == ["notes.txt"]
