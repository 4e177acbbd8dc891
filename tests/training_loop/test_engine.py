"""What the engine under a loop does: batches, compiles, reads, donation, keys, policies, signals, learning."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from nnx_jax.backends.stored import commits
from nnx_jax.core.errors import DataError, NonFiniteError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.data.iterable import IterableDataset
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.hooks.finetune import TrainableParameterHook
from nnx_jax.params.net import FeedForwardParams
from tests.training_loop.scenes import Diary, Line, Writer, loop, weights
from tests.training_loop.stage_scenes import Net, own, same, ten


class Rows:
    """A task that writes down the rows of every microbatch, and how often its loss is traced."""

    def __init__(self) -> None:
        self.traced = 0
        self.seen: list[np.ndarray] = []

    def loss_fn(self, model: Any, batch: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        self.traced += 1
        x, y = batch
        jax.debug.callback(lambda rows: self.seen.append(np.asarray(rows)), x[:, 0])
        loss = jnp.mean((model(x) - y) ** 2)
        return loss, {"custom_mse": loss}

    def eval_fn(self, model: Any, batch: Any, key: Any) -> dict[str, Any]:
        return {"loss": jnp.mean((model(batch[0]) - batch[1]) ** 2)}


def rows_of(**given: Any) -> list[list[int]]:
    """The row numbers of every batch of a run over ten rows, in order."""
    task = Rows()
    loop(**{"dataset": Line(rows=10), "loss": None, "task": task, **given})(None, None)
    jax.effects_barrier()
    numbers = np.linspace(-1, 1, 10, dtype=np.float32)
    return [[int(np.argmin(abs(numbers - x))) for x in batch] for batch in task.seen]


# -- learning ----------------------------------------------------------------------------------------------------


def test_a_line_is_learned() -> None:
    """100 updates of y = 2x + 1 with Adam bring the logged error far down, and it stays finite

    (pipekit:G1, pipekit:G25).
    """
    writer = Writer()
    net = NNXModelOp(net=FeedForwardParams(input_dim=1, hidden_dims=(16, 16), output_dim=1))
    loop(model_op=net, max_steps=100, metric_writer=writer, log_every_n_steps=10)(None, None)
    losses = [values["loss"] for _, values in writer.records]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.5 * losses[0]


def test_one_batch_is_learned_by_heart() -> None:
    """Twenty updates of the same rows: the error falls below half, the state counts twenty (pipekit:G2)."""
    seen: list[float] = []

    class Note:
        def on_step_end(self, loop: Any, state: Any, metrics: Mapping[str, float]) -> None:
            seen.append(metrics["loss"])

    _, state = loop(dataset=Line(rows=16), max_steps=20, callbacks=[Note()])(None, None)
    assert state.step == len(seen) == 20
    assert seen[-1] < 0.5 * seen[0]


# -- batches -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten_in_fours() -> list[list[int]]:
    """The batches of five updates of four of ten rows."""
    return rows_of(batch_size=4, max_steps=5)


def test_batches_straddle_passes(ten_in_fours: list[list[int]]) -> None:
    """Ten rows in batches of four: five batches are two passes, each in an order of its own (pipekit:G7)."""
    order = sum(ten_in_fours, [])
    assert [len(batch) for batch in ten_in_fours] == [4] * 5
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


@pytest.mark.parametrize("length", [1, 3, 7])
def test_an_epoch_of_any_length_is_a_stretch_of_the_passes(length: int) -> None:
    """However the passes are cut into epochs, the batches in a row are the same (pipekit:G7)."""
    given: dict[str, Any] = {"batch_size": 4, "tail": "straddle", "seed": 3}
    whole = np.concatenate([Feed(Line(rows=10), **given).order(epoch) for epoch in range(5)])
    cut = Feed(Line(rows=10), **given, n_batches=length)
    found = np.concatenate([cut.order(epoch) for epoch in range(3)])
    assert cut.n_batches == length
    assert np.array_equal(found, whole[: 3 * length])
    with pytest.raises(DataError, match="straddle"):
        Feed(Line(rows=10), batch_size=4, n_batches=length)


def test_the_seed_is_the_order(ten_in_fours: list[list[int]]) -> None:
    """The same seed gives the same batches, another other ones (pipekit:G4)."""
    assert rows_of(batch_size=4, max_steps=3) == ten_in_fours[:3]
    assert rows_of(batch_size=4, max_steps=3, seed=1) != ten_in_fours[:3]


def test_every_row_of_a_stream_is_used() -> None:
    """Ten rows in batches of four, five updates: each row exactly twice, none dropped at the end (pipekit:G10)."""
    task = Rows()
    loop(dataset=ten(), loss=None, task=task, batch_size=4, max_steps=5)(None, None)
    jax.effects_barrier()
    rows = [int(round(float(x) * 10)) for batch in task.seen for x in batch]
    assert rows == [*range(10), *range(10)]


def test_data_that_runs_out_is_an_error() -> None:
    """A stream shorter than a batch, one that can be read once, and too few rows end at once

    (pipekit:G6, pipekit:G9).
    """
    with pytest.raises(ValueError, match="batch_size"):
        loop(dataset=Line(rows=10), batch_size=16)(None, None)
    with pytest.raises(DataError, match="fewer than batch_size 16"):
        loop(dataset=ten(), batch_size=16)(None, None)
    once = IterableDataset(source=iter([(np.float32([0]), np.float32([1]))] * 6), data_id="once")
    with pytest.raises(DataError, match="used up after 6 rows"):
        loop(dataset=once, batch_size=4, max_steps=3)(None, None)


# -- the compiled step -------------------------------------------------------------------------------------------


def test_nothing_is_traced_after_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is run by Python before the first update only, and every program is compiled once

    (pipekit:G8, pipekit:G11).

    Ten rows in batches of four, so batches straddle passes; one update a call, then spans of them.
    """
    programs: list[Any] = []
    snapshot = FlaxEngine.snapshot
    monkeypatch.setattr(FlaxEngine, "snapshot", lambda e, *a: (programs.append(e.programs), snapshot(e, *a))[1])
    task, counts = Rows(), []

    class Count:
        def on_step_end(self, loop: Any, state: Any, metrics: Mapping[str, float]) -> None:
            counts.append(task.traced)

    given: dict[str, Any] = {"dataset": Line(rows=10), "loss": None, "batch_size": 4}
    loop(**given, task=task, max_steps=7, callbacks=[Count()])(None, None)
    assert len(set(counts)) == 1
    assert counts[0] == task.traced
    other = Rows()
    loop(**given, task=other, max_steps=7)(None, None)
    assert other.traced > 0  # another task is traced for itself
    assert all(set(each.watch.compiles.values()) == {1} for each in programs)


class Spans:
    """How many microbatches each call of the engine made, and whether the state handed in was given up for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        self.donated: list[bool] = []
        run_span = FlaxEngine.run_span

        def spy(engine: FlaxEngine, state: Any, span: Any, poll: Any) -> Any:
            before = [leaf for leaf in jax.tree.leaves(engine.programs.state(state).params)]
            with jax.transfer_guard_device_to_host("disallow"):
                found, done = run_span(engine, state, span, poll)
            self.lengths.append(done)
            self.donated.append(all(leaf.is_deleted() for leaf in before))
            return found, done

        monkeypatch.setattr(FlaxEngine, "run_span", spy)


@pytest.fixture(scope="module")
def windows() -> Any:
    """One run whose updates go in spans, and one that is told of every update, with what each did."""
    with pytest.MonkeyPatch.context() as patch:
        spans = Spans(patch)
        together = loop(max_steps=30, val_dataset=Line(), eval_every_n_steps=7, log_every_n_steps=30)._train(None)
    with pytest.MonkeyPatch.context() as patch:
        singles, diary = Spans(patch), Diary()
        given: dict[str, Any] = {"val_dataset": Line(), "eval_every_n_steps": 7, "log_every_n_steps": 30}
        apart = loop(max_steps=30, callbacks=[diary], **given)._train(None)
    return together, spans, apart, singles, diary


def test_windows_of_updates_are_single_updates(windows: Any) -> None:
    """Seven updates a call or one a call: the same bits; calls are cut where an evaluation falls (pipekit:G19)."""
    together, spans, apart, singles, diary = windows
    assert spans.lengths == [7, 7, 7, 7, 2]
    assert singles.lengths == [1] * 30
    assert same(together.operator, apart.operator)
    assert [step for _, event, step in diary.log if event == "eval"] == [7, 14, 21, 28, 30]


def test_the_state_is_given_up_to_the_next(windows: Any) -> None:
    """Old weights are deleted by the call that makes the new ones, so they never lie twice (pipekit:G20)."""
    _, spans, _, singles, _ = windows
    assert all(spans.donated)
    assert all(singles.donated)


def test_nothing_is_read_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 updates with a log line every 20: three reads of records, and no other between them (pipekit:G18)."""
    reads = [0]
    records, inside = [0], ArrayImpl._value.fget  # type: ignore[attr-defined]
    read_records = FlaxEngine.read_records

    def counted(array: Any) -> Any:
        reads[0] += 1
        return inside(array)

    def spy(engine: FlaxEngine, *args: Any) -> Any:
        records[0] += 1
        return read_records(engine, *args)

    Spans(monkeypatch)  # which forbids transfers inside of spans
    monkeypatch.setattr(FlaxEngine, "read_records", spy)
    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    loop(max_steps=60, log_every_n_steps=20, metric_writer=Writer())(None, None)
    few = (records[0], reads[0])
    loop(max_steps=120, log_every_n_steps=40, metric_writer=Writer())(None, None)
    assert few[0] <= 60 // 20 + 1
    assert (records[0] - few[0], reads[0] - few[1]) == few  # twice the updates, as many reads


def test_keys_depend_on_the_update_alone() -> None:
    """With dropout, evaluating and logging at other times changes no bit (pipekit:G16)."""
    given: dict[str, Any] = {"max_steps": 8}
    plain, _ = loop(model_op=own(dropout=0.4), **given)(None, None)
    busy = {"val_dataset": Line(), "eval_every_n_steps": 3, "log_every_n_steps": 1, "callbacks": [Diary()]}
    watched, _ = loop(model_op=own(dropout=0.4), **given, **busy)(None, None)
    assert same(plain, watched)
    assert not same(plain, loop(model_op=own(dropout=0.4), seed=1, **given)(None, None)[0])


@pytest.mark.slow
def test_debug_runs_operation_by_operation() -> None:
    """Nothing is compiled: each update runs the loss in Python anew, to the same numbers (pipekit:G29)."""
    without_jit: list[bool] = []

    def seen(predicted: Any, target: Any) -> Any:
        without_jit.append(bool(jax.config.jax_disable_jit))  # pyright: ignore[reportAttributeAccessIssue]
        return jnp.mean((predicted - target) ** 2)

    plain, _ = loop(max_steps=2, loss=seen)(None, None)
    assert not any(without_jit)
    debug, _ = loop(max_steps=2, loss=seen, debug=True)(None, None)
    assert sum(without_jit) >= 2
    for name, array in plain.arrays().items():
        np.testing.assert_allclose(debug.arrays()[name], array, rtol=1e-5, atol=1e-7)


# -- models ------------------------------------------------------------------------------------------------------


@register("scene_holder")
class Holder(Operator):
    """An operator of somebody else's, which has a module."""

    seed: int = 0
    kept: ClassVar[dict[int, Any]] = {}

    @property
    def module(self) -> Net:
        return self.kept.setdefault(self.seed, Net(self.seed))


def line(params: Any, x: Any) -> Any:
    """A pure function of parameters."""
    return x @ params["slope"][0] + params["offset"]


def test_any_operator_with_a_module_trains() -> None:
    """A module, an operator that exposes one, and a pure function with its parameters (pipekit:G12)."""
    held, _ = loop(model_op=Holder(), max_steps=3)(None, None)
    assert same(held, loop(model_op=own(), max_steps=3)(None, None)[0])
    pure = NNXModelOp.from_function(line, {"slope": [np.zeros((1, 1), np.float32)], "offset": np.zeros(1, np.float32)})
    fitted, _ = loop(model_op=pure, max_steps=200, optimizer_config={"name": "adam", "lr": 0.1})(None, None)
    found = weights(fitted)
    np.testing.assert_allclose(found["params.slope.0"], [[2.0]], atol=1e-2)
    np.testing.assert_allclose(found["params.offset"], [1.0], atol=1e-2)
    assert np.all(weights(pure)["params.offset"] == 0)
    with pytest.raises(TypeError, match=r"NNXModelOp\(module\)"):
        loop(model_op=Line())


def test_frozen_leaves_stay(tmp_path: Path) -> None:
    """Leaves that a pattern freezes keep every bit and have no moments (pipekit:G14)."""
    begun = own()
    hook = TrainableParameterHook(freeze_patterns=("main.first.*",))
    trained, state = loop(model_op=begun, max_steps=5, hooks=[hook])(None, None)
    before, after = begun.arrays(), trained.arrays()
    assert all(np.array_equal(before[name], after[name]) for name in ("first.kernel", "first.bias"))
    assert not np.array_equal(before["last.kernel"], after["last.kernel"])
    moments = [name for name in state.opt_state or {} if name.startswith("opt_state/")]
    assert any("last.kernel" in name for name in moments)
    assert not any("first" in name for name in moments)


# -- how a run ends ----------------------------------------------------------------------------------------------


def spoiled(predicted: Any, target: Any) -> Any:
    """The squared error, which is not a number where a target is above 50."""
    return jnp.mean(jnp.where(target > 50, jnp.nan, (predicted - target) ** 2))


def one_bad_row() -> ArrayDataset:
    """64 rows of a line, the last of which spoils its batch: one of four updates."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    y = 2 * x + 1
    y[63] = 100
    return ArrayDataset({"x": x, "y": y})


def test_not_a_number_ends_the_run_by_name(tmp_path: Path) -> None:
    """ "raise" names the update and keeps the commits before it, all of them finite (pipekit:G26)."""
    given: dict[str, Any] = {"dataset": one_bad_row(), "loss": spoiled, "checkpoint_every_n_steps": 1, "max_steps": 9}
    with pytest.raises(NonFiniteError, match=r"update \d") as caught:
        loop(**given, checkpoint_dir=tmp_path)(None, None)
    stands = [commit.step for commit in commits(tmp_path)]
    assert f"update {(stands[0] if stands else 0) + 1}" in str(caught.value)
    stopped = loop(**given, on_nonfinite="stop", checkpoint_dir=tmp_path / "stop", seed=3)._train(None)
    assert stopped.info["stop_reason"] == "nonfinite"
    assert 0 < stopped.info["final_step"] < 9
    assert all(np.isfinite(array).all() for array in weights(stopped.operator).values())


def test_not_a_number_can_be_left_out() -> None:
    """ "skip" makes no update of it: twelve updates are made besides, and four are told as skipped (pipekit:G26)."""
    diary = Diary()
    given: dict[str, Any] = {"dataset": one_bad_row(), "loss": spoiled, "max_steps": 12, "callbacks": [diary]}
    result = loop(**given, on_nonfinite="skip")._train(None)
    assert result.info["final_step"] == 12
    assert result.info["skipped_updates"] in (3, 4)  # one of every four microbatches; the last may fall behind
    assert [step for _, event, step in diary.log if event == "step"] == list(range(1, 13))
    assert all(np.isfinite(array).all() for array in weights(result.operator).values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM: the last update is committed, callbacks end, the next call goes on (pipekit:G27)."""
    ends: list[Any] = []

    class Stop(Diary):
        def on_step_end(self, loop: Any, state: Any, metrics: Mapping[str, float]) -> None:
            if state.step == 4:
                os.kill(os.getpid(), number)

        def on_train_end(self, loop: Any, state: Any) -> None:
            ends.append(type(state.error).__name__)

    with pytest.raises(KeyboardInterrupt, match="committed"):
        loop(max_steps=10, checkpoint_dir=tmp_path, callbacks=[Stop()])(None, None)
    assert ends == ["Interrupted"]
    stopped = commits(tmp_path)[0].step
    assert stopped in (4, 5)
    again = loop(max_steps=10, checkpoint_dir=tmp_path)._train(None)
    assert same(again.operator, loop(max_steps=10)(None, None)[0])
