"""A loop that was cut short and called again ends as the uninterrupted one, bit for bit; and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.backends.stored import LoopMark, commits
from nnx_jax.core.errors import ConfigError, LeaseHeldError, ModelError, ResumePointError
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.step_builtin import Checkpoint, EarlyStopping
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.lease import read_owner
from nnx_jax.runs.resume import find_point
from nnx_jax.training_loop import TrainingLoop
from tests.training_loop.scenes import Diary, Line, loop, model
from tests.training_loop.stage_scenes import Net, own, same, ten

ROOT = Path(__file__).resolve().parents[2]
DROPOUT = 0.3


def dropped(start: int = 0, **changes: Any) -> TrainingLoop:
    """A loop over a module with dropout, whose first weights are those of the seed `start`."""
    return loop(**{"model_op": own(start, dropout=DROPOUT), **changes})


def steps(folder: Path) -> list[int]:
    """The updates whose commits lie in a directory, each once."""
    return sorted({commit.step for commit in commits(folder)})


def trained(given: TrainingLoop) -> Any:
    return given(None, None)[0]


@pytest.fixture(scope="module")
def quiet() -> Any:
    """The operator of ten updates in one go."""
    return trained(dropped(max_steps=10))


@pytest.fixture(scope="module")
def ten_of_ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with commits of updates 5 and 10, the second by a second loop with weights of its own."""
    folder = tmp_path_factory.mktemp("ten")
    dropped(max_steps=5, checkpoint_dir=folder)(None, None)
    dropped(start=9, max_steps=10, checkpoint_dir=folder)(None, None)
    return folder


@pytest.fixture
def held(ten_of_ten: Path, tmp_path: Path) -> Path:
    """A copy of that directory to do things to."""
    return Path(shutil.copytree(ten_of_ten, tmp_path / "held", symlinks=True))


# -- bit for bit -------------------------------------------------------------------------------------------------


def test_a_fresh_loop_with_other_weights_goes_on_where_the_first_ended(quiet: Any, ten_of_ten: Path) -> None:
    """5 updates, then a loop with other initial weights to 10: the bits of 10 in one go

    (pipekit:H1, pipekit:H2, pipekit:H4).

    Dropout is on, so the keys went on as well; the caller's weights play no part (pipekit:D8.2).
    """
    assert steps(ten_of_ten) == [5, 10]
    assert same(quiet, trained(dropped(start=4, max_steps=10, checkpoint_dir=ten_of_ten)))


def test_position_and_keys_are_inside_the_commit(quiet: Any, ten_of_ten: Path) -> None:
    """One generation holds the data's position, the run key and the counters: no file beside it

    (pipekit:H3, pipekit:H15).
    """
    [first, second] = sorted((find_point(ten_of_ten, run) for run in run_ids(ten_of_ten)), key=lambda p: p.step)
    assert first.host["position"]["data"] == {"epoch": 0, "next": 5}
    assert second.host["position"]["data"] == {"epoch": 0, "next": 10}
    assert first.leaves["rng"].shape == (2,) == second.leaves["rng"].shape
    assert np.array_equal(first.load_all()["rng"], second.load_all()["rng"])
    names = {path.name for path in ten_of_ten.rglob("*")}
    assert not any("data_iter" in name for name in names)


def test_nothing_is_left_to_train(ten_of_ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At max_steps no update is made and no batch is asked for; callbacks begin and end (pipekit:G17)."""
    monkeypatch.setattr(Feed, "batches", lambda *_: pytest.fail("a batch was asked for"))
    before, diary = steps(ten_of_ten), Diary()
    result = loop(model_op=own(dropout=DROPOUT), max_steps=10, checkpoint_dir=ten_of_ten, callbacks=[diary])._train(
        None
    )
    assert [event for _, event, _ in diary.log] == ["begin", "end"]
    assert result.info["final_step"] == result.state.step == 10
    assert steps(ten_of_ten) == before


def test_a_finished_run_needs_no_data_that_fits(ten_of_ten: Path) -> None:
    """Where nothing is left to train, a batch larger than the dataset is no error (pipekit:H9)."""
    result = dropped(max_steps=10, checkpoint_dir=ten_of_ten, batch_size=128, resume="full")._train(None)
    assert result.info["final_step"] == 10


def test_a_stream_goes_on_at_its_row(tmp_path: Path) -> None:
    """The rows consumed are counted, and after a resume the next one comes next, not the first (pipekit:H18)."""
    given: dict[str, Any] = {"batch_size": 4, "dataset": ten(buffer=4)}
    whole = trained(loop(max_steps=8, **given))
    loop(max_steps=3, checkpoint_dir=tmp_path, **given)(None, None)
    log: list[int] = []
    again = loop(max_steps=8, checkpoint_dir=tmp_path, batch_size=4, dataset=ten(log, buffer=4))
    assert same(whole, trained(again))
    assert find_point(tmp_path, run_ids(tmp_path)[0]).host["position"]["data"]["next"] in (3, 8)


# -- what is kept ------------------------------------------------------------------------------------------------


def test_commits_are_at_multiples_and_at_the_end(tmp_path: Path) -> None:
    """Every 10 of 25 leaves exactly 10, 20 and 25; never the first, always the last (pipekit:H6)."""
    loop(max_steps=25, checkpoint_every_n_steps=10, checkpoint_dir=tmp_path)(None, None)
    assert steps(tmp_path) == [10, 20, 25]


def test_the_callback_says_how_many_stay_and_which_is_best(tmp_path: Path) -> None:
    """keep_last=2 keeps the two newest; the best by monitor and mode stays beside them

    (pipekit:H5, pipekit:H7, pipekit:H8, pipekit:H17).

    The loss falls, so the "best" by its maximum is the first that was evaluated, long dropped otherwise.
    """
    given = Checkpoint(every_n_steps=5, keep_last=2, save_dir=str(tmp_path), monitor="val_loss", mode="max")
    loop(max_steps=25, callbacks=[given], val_dataset=Line(), eval_every_n_steps=5)(None, None)
    [run] = run_ids(tmp_path)
    assert steps(tmp_path) == [5, 20, 25]
    assert find_point(tmp_path, f"{run}@BEST").step == 5


def test_without_a_word_commits_come_with_evaluations(tmp_path: Path) -> None:
    """The cadence is eval_every_n_steps, and three stay (pipekit:H5)."""
    loop(max_steps=20, eval_every_n_steps=4, checkpoint_dir=tmp_path)(None, None)
    assert steps(tmp_path) == [12, 16, 20]


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, changes",
    [
        ("dataset", {"dataset": Line(slope=3.0)}),
        ("optimizer_config", {"optimizer_config": {"name": "adam", "lr": 2e-2}}),
        ("batch_size", {"batch_size": 8}),
        ("seed", {"seed": 1}),
        ("accumulate", {"accumulate": 2}),
        ("loss", {"loss": "mae"}),
    ],
)
def test_another_training_is_not_gone_on_from(ten_of_ten: Path, field: str, changes: dict[str, Any]) -> None:
    """What makes the updates has changed: an error that names it, and what to do (pipekit:H10)."""
    before = steps(ten_of_ten)
    with pytest.raises(ConfigError, match=rf"(?s){field}.*weights_only"):
        dropped(max_steps=15, checkpoint_dir=ten_of_ten, **changes)(None, None)
    assert steps(ten_of_ten) == before


def squares(predicted: Any, target: Any) -> Any:
    return jnp.mean((predicted - target) ** 2)


def distances(predicted: Any, target: Any) -> Any:
    return jnp.mean(jnp.abs(predicted - target))


class Narrow(Net):
    """Another network with the same leaves."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * 0.5


@dataclasses.dataclass
class Weighed:
    """A task with a number of its own."""

    factor: float = 1.0

    def loss_fn(self, net: Any, batch: Any, key: Any) -> Any:
        return self.factor * squares(net(batch[0]), batch[1])


def test_other_functions_and_networks_are_not_gone_on_from(tmp_path: Path) -> None:
    """What only Python has is known by its text and settings, not by its class: functions, optax, tasks, layers."""
    plain: dict[str, Any] = {"model_op": own(), "loss": squares, "optimizer_config": optax.sgd(0.01), "max_steps": 2}
    loop(**plain, checkpoint_dir=tmp_path)(None, None)
    for field, changes in {
        "loss": {"loss": distances},
        "optimizer_config": {"optimizer_config": optax.sgd(0.5)},
        "task": {"task": Weighed(), "loss": None},
        "metrics": {"metrics": ("mae",)},
        "model": {"model_op": NNXModelOp(Narrow())},
    }.items():
        with pytest.raises(ValueError, match=f"another loop: {'loss' if field == 'task' else field}"):
            loop(**{**plain, **changes}, checkpoint_dir=tmp_path)(None, None)
    same_again = loop(**{**plain, "model_op": own(3), "optimizer_config": optax.sgd(0.01)}, checkpoint_dir=tmp_path)
    assert same_again._train(None).info["final_step"] == 2


def test_a_task_counts_with_its_settings() -> None:
    """Two tasks of one class are told apart by their numbers, and equal ones are not."""
    marks = [
        LoopMark(loop(task=task, loss=None), None, None, lambda: ({}, None)).fields["task"]
        for task in (Weighed(), Weighed(), Weighed(2.0))
    ]
    assert marks[0] == marks[1] != marks[2]


def test_a_later_stage_does_not_take_the_commits_of_an_earlier_one(tmp_path: Path) -> None:
    """Two stages of equal settings and other weights share no directory; each has its own, and both go on there."""
    first, second = tmp_path / "first", tmp_path / "second"
    state = dropped(max_steps=3, checkpoint_dir=first)(None, None)[1]
    with pytest.raises(ConfigError, match=r"another stage.*another checkpoint_dir"):
        dropped(start=1, max_steps=3, checkpoint_dir=first)(None, state)
    after = dropped(start=1, max_steps=3, checkpoint_dir=second)
    found, left = after(None, state)
    again, _ = after(None, dropped(start=7, max_steps=3, checkpoint_dir=first)(None, None)[1])
    assert left.step == 6
    assert same(found, again)
    assert same(found, after(None, left)[0])


def test_a_finished_loop_gives_its_values_again(tmp_path: Path) -> None:
    """What it came to is in the commit, so a sweep that is called again can compare it."""
    given: dict[str, Any] = {"max_steps": 4, "checkpoint_dir": tmp_path, "val_dataset": Line()}
    first, again = (loop(**given)._train(None).info for _ in range(2))
    assert set(first["final_metrics"]) >= {"loss", "val_loss"}
    assert again["final_metrics"] == first["final_metrics"]


def test_a_stop_that_was_asked_for_stands(tmp_path: Path) -> None:
    """Stopped early, a loop called again trains nothing and says why; a longer one, or one without it, goes on."""
    given: dict[str, Any] = {"checkpoint_dir": tmp_path, "val_dataset": Line(), "eval_every_n_steps": 2}
    ends = [EarlyStopping("val_loss", patience=1, min_delta=100.0)]
    found = [loop(max_steps=12, callbacks=ends, **given)._train(None) for _ in range(3)]
    assert [each.info["final_step"] for each in found] == [4, 4, 4]
    assert all("early stopping" in each.info["stop_reason"] for each in found)
    assert same(found[0].operator, found[2].operator)
    resumed = loop(max_steps=12, callbacks=ends, val_dataset=Line(), eval_every_n_steps=2)._train(found[0].state)
    assert resumed.info["final_step"] == 4
    longer = loop(max_steps=14, callbacks=ends, **given)._train(None)
    assert longer.info["final_step"] == 6
    free = loop(max_steps=12, **given)._train(None)
    assert (free.info["final_step"], free.info["stop_reason"]) == (12, None)


def test_weights_only_begins_a_training_of_its_own_from_them(held: Path) -> None:
    """resume="weights_only" counts its own updates from the stored weights; called again it goes on (pipekit:H10)."""
    changed: dict[str, Any] = {"optimizer_config": {"name": "sgd", "lr": 0.0}, "resume": "weights_only"}
    stored = trained(dropped(max_steps=10, checkpoint_dir=held))
    first = dropped(start=5, max_steps=3, checkpoint_dir=held, **changed)._train(None)
    assert first.info["final_step"] == 3
    assert same(first.operator, stored)  # a rate of 0 leaves the weights as they were
    second = dropped(start=6, max_steps=4, checkpoint_dir=held, **changed)._train(None)
    assert (second.info["final_step"], len(run_ids(held))) == (4, 4)


@pytest.mark.parametrize("length", [10, 15])
def test_a_network_of_another_shape_is_refused_by_its_leaf(ten_of_ten: Path, length: int) -> None:
    """The leaf and both shapes are named, whether something is left to train or not (pipekit:H11)."""
    other = own(dropout=DROPOUT, width=8)
    with pytest.raises(ResumePointError, match=r"first\.bias.*16.*\b8\b"):
        loop(model_op=other, max_steps=length, checkpoint_dir=ten_of_ten)(None, None)
    with pytest.raises(ModelError, match=r"first\.bias is float32\[8\] there, float32\[16\] here"):
        own().with_weights(other.serialize_weights())


# -- damage, death and company -----------------------------------------------------------------------------------


def test_a_damaged_commit_is_passed_over(tmp_path: Path) -> None:
    """The newest files are cut short: the commit before it is taken, with a warning (pipekit:H12)."""
    whole = trained(loop(max_steps=20))
    loop(max_steps=15, checkpoint_every_n_steps=5, checkpoint_dir=tmp_path)(None, None)
    for commit in commits(tmp_path):
        if commit.step == 15:
            for path in commit.paths.generation(commit.generation).rglob("*"):
                if path.is_file() and path.stat().st_size:
                    os.truncate(path, path.stat().st_size // 2)
    with pytest.warns(RuntimeWarning, match="left out, because it is damaged"):
        result = loop(max_steps=20, checkpoint_dir=tmp_path)._train(None)
    assert same(whole, result.operator)


def test_only_damaged_commits_are_an_error(held: Path) -> None:
    """With nothing whole left the damage is told; nothing begins anew in silence (pipekit:H12)."""
    for commit in commits(held):
        (commit.paths.generation(commit.generation) / "host.json").write_bytes(b"{")
    with pytest.warns(RuntimeWarning, match="damaged"), pytest.raises(ResumePointError, match=r"host\.json"):
        dropped(max_steps=12, checkpoint_dir=held)(None, None)


def test_a_second_loop_in_one_directory_is_refused(tmp_path: Path) -> None:
    """While one trains there, another is turned away by name (pipekit:H19)."""

    class Rival:
        def on_train_begin(self, *_: Any) -> None:
            with pytest.raises(LeaseHeldError, match="checkpoint_dir"):
                loop(max_steps=3, seed=2, checkpoint_dir=tmp_path)(None, None)

    loop(max_steps=2, checkpoint_dir=tmp_path, callbacks=[Rival()])(None, None)


def _left_on_another_machine(paths: RunPaths) -> None:
    """Make the record of a lease that of a writer which never gave it back, on a machine out of sight."""
    owner = read_owner(paths)
    assert owner is not None
    gone = dataclasses.replace(owner, host="gone", boot="another", released=False)
    paths.lease_owner.write_text(json.dumps(dataclasses.asdict(gone)))


def test_a_writer_that_died_on_another_machine_does_not_block(quiet: Any, held: Path) -> None:
    """Its leases are passed by with a warning, and its unfinished run is left alone (pipekit:H19)."""
    for run in run_ids(held):
        if find_point(held, run).step == 10:
            unfinished = RunPaths(held, run)
    shutil.rmtree(unfinished.checkpoints)  # it died before its first commit
    for paths in (RunPaths(held, "loop"), unfinished):
        _left_on_another_machine(paths)
    with pytest.warns(RuntimeWarning, match="'gone'"):
        result = dropped(max_steps=10, checkpoint_dir=held)._train(None)
    assert same(quiet, result.operator)
    assert result.info["run_id"] != unfinished.run_id


def test_a_commit_that_fails_ends_the_run_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the background is raised at the end at the latest (pipekit:H14)."""
    from nnx_jax.runs import commit as commit_module

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit_module.pointers, "write_pointer", refused)
    with pytest.raises(OSError, match="No space left"):
        loop(max_steps=4, checkpoint_dir=tmp_path)(None, None)


CHILD = """
import os, signal, sys, time
from pathlib import Path
from nnx_jax.backends.stored import commits
from tests.training_loop.scenes import loop

class Killer:
    def on_step_end(self, loop, state, metrics):
        while state.step == 15 and not commits(folder):
            time.sleep(0.01)
        if state.step == 15:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
loop(max_steps=20, checkpoint_every_n_steps=10, checkpoint_dir=folder, callbacks=[Killer()])(None, None)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a process that was killed after update 15, with a commit of update 10."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder


@pytest.mark.slow
def test_kill_9_between_two_commits(killed: Path) -> None:
    """Killed between 10 and 20, it goes on at 10; what lies about half-written is no commit (pipekit:H13)."""
    [run] = run_ids(killed)
    generations = RunPaths(killed, run).generations
    (generations / ".partial-7-123").mkdir()
    (generations / "8").mkdir()
    assert steps(killed) == [10]
    diary = Diary()
    with pytest.warns(RuntimeWarning, match="taking over"):
        result = loop(max_steps=20, checkpoint_dir=killed, callbacks=[diary])._train(None)
    assert [step for _, event, step in diary.log if event == "step"] == list(range(11, 21))
    assert same(trained(loop(max_steps=20)), result.operator)


def test_the_model_of_a_scene_is_what_the_words_say() -> None:
    """The two scenes differ in their weights, so that equal bits afterwards mean something."""
    assert not same(own(0), own(9))
    assert model(0).content_hash() != model(1).content_hash()
