"""Hooks in whole runs: when each is called, what it sees, what it may ask for, and what it costs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnx_jax.core.errors import HookStateError, TraceBoundaryError, TraceStateError
from nnx_jax.core.hooks import StatefulUpdateHook, TracedHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, MixedPrecisionHook
from nnx_jax.runs.run import NNRun
from tests.e2e.toys import Batches, Slope, arrays, column, fit, inputs, only_run, square, weight

RUN, BATCH = (1, 2, 3), (4, 5, 6, 7, 8, 9, 11, 12, 14, 15)


def toy(runs: Path, rows: Any, hooks: Any = (), **more: Any) -> NNRun:
    """The weight 1 on rows of these inputs, target 0: a row of 1 multiplies it by 0.8."""
    data = inputs(*rows) if isinstance(rows, tuple) else rows
    return fit(runs, Slope(1.0), square, data, hooks=hooks, **more)


class Recorder:
    """Notes every stage it is called at, but for the replacement stages, and what it sees there."""

    frequency, stage = 1, None

    def __init__(self, *stages: Stage, look: Any = None, frequency: int = 1) -> None:
        self.stages, self.look, self.frequency = stages, look or counts, frequency
        self.seen: list[Any] = []

    def _runs_on_stage(self, stage: Stage) -> bool:
        return stage in self.stages if self.stages else not stage.name.startswith("DO_")

    def __call__(self, ctx: Any, stage: Stage) -> None:
        self.seen.append(self.look(ctx) if self.stages else (stage.value, *self.look(ctx)))


def counts(ctx: Any) -> tuple[int, int, int, int]:
    return ctx.step_count, ctx.batch_count, ctx.epoch_step_count, ctx.epoch


def stages(recorder: Recorder) -> list[int]:
    return [entry[0] for entry in recorder.seen]


class Rejects(TrainingUpdateHook):
    """Vetoes the microbatches of these numbers."""

    priority = 40

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is Stage.DO_OPTIMIZER_STEP:
            return ctx.xp.all(ctx.xp.stack([ctx.batch_count != number for number in self.numbers])), ctx.loss
        return True, ctx.loss


class RejectsAll(TrainingUpdateHook):
    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        return (stage is not Stage.DO_OPTIMIZER_STEP or ctx.loss < 0), ctx.loss


class Counts(StatefulUpdateHook):
    """Counts updates in its slot."""

    def init_state(self, params: Any) -> Any:
        return {"n": np.int32(0)}

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is Stage.AFTER_OPTIMIZER_STEP:
            ctx.state = {"n": ctx.state["n"] + ctx.xp.where(will_skip, 0, 1)}
        return True, ctx.loss


# Order and counters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["auto", "staged", "eager"])
def test_the_order_of_a_run(tmp_path: Path, dispatch: str) -> None:
    """nvalchemi:2 nvalchemi:156"""
    recorder = Recorder()
    run = toy(tmp_path, (1,), [recorder], dispatch=dispatch)
    assert stages(recorder) == [*RUN, *BATCH, 16, 17]
    assert weight(run) == pytest.approx([0.8], abs=1e-7)


def test_a_validation_is_an_event(tmp_path: Path) -> None:
    """The epoch's validation comes after AFTER_EPOCH; its values are those of the run's history."""
    recorder = Recorder(Stage.AFTER_VALIDATION, look=lambda ctx: (ctx.epoch, ctx.validation["total_loss"]))
    order = Recorder()
    run = toy(tmp_path, (1, 1), [order, recorder], n_epochs=2, val=inputs(1, 2))
    assert [value for value in stages(order) if value > 15] == [16, 18, 16, 18, 17]
    assert [epoch for epoch, _ in recorder.seen] == [1, 2]
    assert [loss for _, loss in recorder.seen] == column(run, "epoch", "val_loss")


def test_counters_move_at_after_batch(tmp_path: Path) -> None:
    """nvalchemi:3 nvalchemi:4"""
    recorder = Recorder(Stage.BEFORE_BATCH, Stage.AFTER_OPTIMIZER_STEP, Stage.AFTER_BATCH, Stage.AFTER_EPOCH)
    toy(tmp_path, (1, 1), [recorder])
    first, second = [(0, 0, 0, 0)] * 2 + [(1, 1, 1, 0)], [(1, 1, 1, 0)] * 2 + [(2, 2, 2, 0)]
    assert recorder.seen == [*first, *second, (2, 2, 0, 1)]


@pytest.mark.parametrize(
    ("steps", "epochs", "ended", "last"), [(3, 2, 1, (3, 3, 1, 1)), (2, 1, 1, (2, 2, 0, 1)), (1, 1, 0, (1, 1, 1, 0))]
)
def test_only_a_whole_epoch_ends(tmp_path: Path, steps: int, epochs: int, ended: int, last: Any) -> None:
    """nvalchemi:5 nvalchemi:6 nvalchemi:7"""
    recorder, final = Recorder(), Recorder(Stage.AFTER_TRAINING)
    toy(tmp_path, (1, 1), [recorder, final], max_steps=steps)
    assert [stages(recorder).count(value) for value in (2, 3, 16, 17)] == [1, epochs, ended, 1]
    assert final.seen == [last]


def test_a_vetoed_batch_counts_as_a_batch(tmp_path: Path) -> None:
    """nvalchemi:8 nvalchemi:10"""
    recorder = Recorder(Stage.AFTER_BATCH)
    run = toy(tmp_path, (1, 1, 1), [Rejects(1), recorder], max_steps=2)
    assert recorder.seen == [(1, 1, 1, 0), (1, 2, 2, 0), (2, 3, 3, 0)]
    assert weight(run) == pytest.approx([0.64], abs=1e-7)
    assert column(run, "update", "skipped") == [0, 1, 0]


def test_a_run_that_is_done_fires_nothing(tmp_path: Path) -> None:
    """nvalchemi:11"""
    source = toy(tmp_path, (1, 1), [], max_steps=2)
    recorder = Recorder()
    more = {"resume_from_run_id": source.id, "resume_epochs": "planned"}
    with pytest.raises(ValueError, match="done"):
        toy(tmp_path, (1, 1), [recorder], max_steps=2, **more)
    assert set(stages(recorder)) <= {1}


def test_frequency_counts_updates(tmp_path: Path) -> None:
    """nvalchemi:32"""
    before = Recorder(Stage.BEFORE_BATCH, frequency=2)
    after = Recorder(Stage.AFTER_BATCH, frequency=2)
    toy(tmp_path, (1, 1, 1, 1), [before, after])
    assert [step for step, *_ in before.seen] == [0, 2]
    assert [step for step, *_ in after.seen] == [2, 4]


def test_a_parked_count_is_seen_again(tmp_path: Path) -> None:
    """Section 1.1: windows of two, every second update: at AFTER_BATCH of the very batches (0,1), (2,4), (2,5)."""
    recorder = Recorder(Stage.AFTER_BATCH, frequency=2, look=lambda ctx: (ctx.step_count, ctx.batch_count))
    toy(tmp_path, (1,) * 6, [recorder], accumulate=2)
    assert recorder.seen == [(0, 1), (2, 4), (2, 5)]


# Errors --------------------------------------------------------------------------------------------------------------


def test_a_hook_that_raises_leaves_the_last_commit(tmp_path: Path) -> None:
    """nvalchemi:18: the error comes out, every hook is left with it, and the same call goes on to the same bits."""

    class Fails(Recorder):
        def __init__(self) -> None:
            super().__init__(Stage.AFTER_LOSS)
            self.left: list[Any] = []
            self.broken = True

        def __call__(self, ctx: Any, stage: Stage) -> None:
            super().__call__(ctx, stage)
            if self.broken and ctx.batch_count == 2:
                raise ZeroDivisionError("here")

        def __enter__(self) -> None: ...

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            self.left.append(kind)

    hook, commits = Fails(), {"every_n_steps": 1}
    with pytest.raises(ZeroDivisionError, match="here"):
        toy(tmp_path / "a", (1, 2, 1, 2), [hook], checkpoint=commits)
    assert hook.left == [ZeroDivisionError]
    assert only_run(tmp_path / "a").artifact is None
    hook.broken = False
    again = toy(tmp_path / "a", (1, 2, 1, 2), [hook], checkpoint=commits)
    whole = toy(tmp_path / "b", (1, 2, 1, 2), [hook], checkpoint=commits)
    assert hook.seen[:3] == [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 2, 0)]
    assert weight(again).tobytes() == weight(whole).tobytes()
    assert hook.left == [ZeroDivisionError, None, None]


def test_a_cleanup_never_hides_the_error(tmp_path: Path) -> None:
    class Both(Recorder):
        def __call__(self, ctx: Any, stage: Stage) -> None:
            raise ZeroDivisionError("training")

        def close(self) -> None:
            raise OSError("cleanup")

    with pytest.warns(RuntimeWarning, match="OSError: cleanup"), pytest.raises(ZeroDivisionError, match="training"):
        toy(tmp_path, (1,), [Both(Stage.AFTER_BATCH)])


def test_a_run_that_never_updates_ends(tmp_path: Path) -> None:
    """nvalchemi:21"""
    with pytest.raises(RuntimeError, match="no update in the last 100 microbatches.*RejectsAll vetoes every step"):
        toy(tmp_path, (1, 1), [RejectsAll()], max_steps=1)


def test_python_state_is_not_the_steps_state(tmp_path: Path) -> None:
    """nvalchemi:154"""

    class CountsInPython(TrainingUpdateHook):
        def __init__(self) -> None:
            self.n = 0

        def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
            self.n += 1
            return True, ctx.loss

    with pytest.raises(TraceStateError, match="CountsInPython changed its attribute n"):
        toy(tmp_path, (1, 1), [CountsInPython()])


# What a host hook sees -----------------------------------------------------------------------------------------------


class Keeps(Recorder):
    needs = ("gradients", "params", "predictions")


@pytest.mark.parametrize("dispatch", ["auto", "staged", "eager"])
def test_values_of_a_microbatch(tmp_path: Path, dispatch: str) -> None:
    """w = 1, x = 2: prediction 2, loss 4, gradient 2 w x^2 = 8, new weight 0.2."""
    kept: dict[str, Any] = {}

    def look(ctx: Any) -> None:
        kept.update(loss=ctx.loss, gradients=ctx.gradients, predictions=ctx.predictions, params=ctx.params)
        kept.update(x=ctx.batch["x"], losses=ctx.losses)

    toy(tmp_path, (2, 1), [Keeps(Stage.AFTER_OPTIMIZER_STEP, look=lambda ctx: kept or look(ctx))], dispatch=dispatch)
    assert float(kept["loss"]) == 4.0
    assert float(kept["gradients"]["w"][0]) == pytest.approx(8.0)
    assert np.asarray(kept["predictions"]).tolist() == [[2.0]]
    assert float(kept["params"]["w"][0]) == pytest.approx(0.2, abs=1e-6)
    assert list(kept["losses"].values()) == [4.0]
    with pytest.raises(ValueError, match="read-only"):
        kept["x"][0] = 3.0


def test_looking_at_the_next_batch_takes_none_away(tmp_path: Path) -> None:
    """A loader hands out each batch once, also when a hook looks at it before it is used."""
    one = np.ones((1, 1), np.float32)
    loader = Batches([(one, 0 * one), (2 * one, 0 * one), (3 * one, 0 * one)])
    hook = Recorder(
        Stage.BEFORE_BATCH, Stage.AFTER_BATCH, look=lambda ctx: float(ctx.batch["x"][0, 0]) if ctx.epoch != 1 else None
    )
    run = fit(tmp_path, Slope(1.0), square, None, hooks=[hook], train_loader=loader, n_epochs=3, optim={"max_lr": 0.01})
    assert hook.seen == [1, 1, 2, 2, 3, 3, *[None] * 6, 1, 1, 2, 2, 3, 3]
    assert loader.served == [0, 1, 2] * 3
    assert weight(run) == pytest.approx([(0.98 * 0.92 * 0.82) ** 3], rel=1e-5)


def test_a_kept_array_lives_on(tmp_path: Path) -> None:
    """nvalchemi:157"""
    hook = Keeps(Stage.AFTER_BATCH, look=lambda ctx: (ctx, ctx.params["w"]))
    toy(tmp_path, (1, 1, 1), [hook])
    assert [float(w[0]) for _, w in hook.seen] == pytest.approx([0.8, 0.64, 0.512], abs=1e-6)
    ctx = hook.seen[0][0]
    assert float(ctx.params["w"][0]) == pytest.approx(0.8, abs=1e-6)
    with pytest.raises(TraceBoundaryError, match="after its stage"):
        _ = ctx.gradients


@pytest.mark.parametrize("name", ["gradients", "params", "predictions"])
def test_what_is_not_declared_is_not_handed_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceBoundaryError, match=rf'needs = \("{name}",\)'):
        toy(tmp_path, (1,), [Recorder(Stage.AFTER_BATCH, look=lambda ctx: getattr(ctx, name))])


def test_a_watcher_assigns_nothing(tmp_path: Path) -> None:
    def assign(ctx: Any) -> None:
        ctx.loss = 0.0

    with pytest.raises(TraceBoundaryError, match=r"ctx.loss cannot be assigned by a hook that watches"):
        toy(tmp_path, (1,), [Recorder(Stage.AFTER_LOSS, look=assign)])


def test_the_loss_is_there_after_the_loss(tmp_path: Path) -> None:
    recorder = Recorder(
        Stage.BEFORE_BATCH, Stage.BEFORE_LOSS, Stage.AFTER_LOSS, Stage.AFTER_EPOCH, look=lambda c: c.loss
    )
    toy(tmp_path, (1,), [recorder])
    assert [seen if seen is None else float(seen) for seen in recorder.seen] == [None, None, 1.0, None]


# Who may change what -------------------------------------------------------------------------------------------------


def test_watching_every_stage_changes_no_bit(tmp_path: Path) -> None:
    """nvalchemi:33 nvalchemi:160"""

    class Everywhere(Recorder):
        def _runs_on_stage(self, stage: Stage) -> bool:
            return True

    plain, watched = toy(tmp_path / "a", (1, 2, 3)), toy(tmp_path / "b", (1, 2, 3), [hook := Everywhere()])
    assert stages(hook)[3:15] == list(range(4, 16))
    assert watched.id == plain.id
    assert weight(watched).tobytes() == weight(plain).tobytes()


def test_an_owner_that_does_nothing(tmp_path: Path) -> None:
    """nvalchemi:34"""

    class Idle(TracedHook):
        stage, claims_replacement = Stage.DO_OPTIMIZER_STEP, True

    run = toy(tmp_path, (1,), [Idle()])
    assert weight(run) == [1.0]
    assert run.last is not None
    assert run.last.step == 1


@pytest.mark.parametrize("dispatch", ["step", "span"])
def test_a_hook_that_does_nothing_changes_no_bit(tmp_path: Path, dispatch: str) -> None:
    """nvalchemi:57"""
    rows, more = (1.5, 0.3, 2.2, 0.7, 1.1), {"dispatch": dispatch, "optim": {"momentum": 0.9}, "n_epochs": 2}
    plain = arrays(toy(tmp_path / "a", rows, **more))
    hooked = arrays(toy(tmp_path / "b", rows, [TrainingUpdateHook()], **more))
    assert set(plain) == set(hooked)
    assert all(plain[name].tobytes() == hooked[name].tobytes() for name in plain)


# What a hook may ask for ---------------------------------------------------------------------------------------------


class Asks(Recorder):
    """Asks for a commit, or for the end, after the given microbatch."""

    def __init__(self, batch: int, what: str = "commit", stage: Stage = Stage.AFTER_BATCH) -> None:
        super().__init__(stage)
        self.batch, self.what = batch, what

    def __call__(self, ctx: Any, stage: Stage) -> None:
        if ctx.batch_count == self.batch:
            ctx.request_commit("mine") if self.what == "commit" else ctx.request_stop()


@pytest.mark.parametrize("stage", [Stage.AFTER_BATCH, Stage.AFTER_LOSS, Stage.AFTER_EPOCH])
def test_a_commit_on_request(tmp_path: Path, stage: Stage) -> None:
    before = stage is Stage.AFTER_LOSS
    run = toy(tmp_path, (1, 1), [Asks(1 if before else 2, stage=stage)], n_epochs=2)
    assert weight(run, "mine") == pytest.approx([0.64], abs=1e-6)
    assert weight(run) == pytest.approx([0.8**4], abs=1e-6)


def test_a_stop_on_request(tmp_path: Path) -> None:
    run = toy(tmp_path, (1,) * 6, [Asks(4, "stop")], n_epochs=9)
    assert weight(run) == pytest.approx([0.8**4], abs=1e-6)
    assert run.artifact is not None
    assert run.artifact["status"] == "finished"


def test_nothing_can_be_asked_at_setup(tmp_path: Path) -> None:
    with pytest.raises(HookStateError, match="from BEFORE_TRAINING on"):
        toy(tmp_path, (1,), [Recorder(Stage.SETUP, look=lambda ctx: ctx.request_commit())])


# Exact cadences ------------------------------------------------------------------------------------------------------


class Sometimes(TrainingUpdateHook):
    """Vetoes one microbatch in twenty, by a rule the host does not know."""

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is Stage.DO_OPTIMIZER_STEP:
            return (ctx.batch_count * 7919 + 13) % 20 != 0, ctx.loss
        return True, ctx.loss


class Cadence(Recorder):
    cadence_steps = 100

    def __init__(self) -> None:
        super().__init__(Stage.AFTER_BATCH, look=lambda ctx: ctx.step_count)


@pytest.mark.parametrize("kind", ["cadence", "frequency"])
@pytest.mark.parametrize("vetoes", [True, False])
def test_every_hundredth_update_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, vetoes: bool
) -> None:
    """nvalchemi:153: 1000 updates, one microbatch in twenty vetoed; every read is counted.

    A count may stay at a multiple, where `frequency` would call again, so it costs one read a multiple more.
    """
    reads: list[int] = []
    real = FlaxEngine.read_records

    def read(self: FlaxEngine, state: Any) -> Any:
        reads.append(state.batch)
        return real(self, state)

    monkeypatch.setattr(FlaxEngine, "read_records", read)
    hook = Cadence() if kind == "cadence" else Recorder(Stage.AFTER_BATCH, frequency=100, look=lambda c: c.step_count)
    hooks = [Sometimes(), hook] if vetoes else [TrainingUpdateHook(), hook]
    run = toy(tmp_path, inputs(*[0.1] * 3000), hooks, max_steps=1000)
    assert list(dict.fromkeys(hook.seen)) == list(range(100, 1001, 100))
    assert len(hook.seen) == 10 or kind == "frequency"
    assert len(reads) <= (25 if vetoes else 11) + (11 if kind == "frequency" else 0)
    assert run.last is not None
    assert run.last.step == 1000


def test_watching_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:152: fifty updates with bfloat16, a clip, averages, and a logger that keeps arrays and reads none."""
    reads: list[str] = []
    array = type(jax.numpy.zeros(1))
    real, value = array.__array__, array._value  # type: ignore[attr-defined]
    monkeypatch.setattr(array, "__array__", lambda self, *a, **k: (reads.append("array"), real(self, *a, **k))[1])
    monkeypatch.setattr(array, "_value", property(lambda self: (reads.append("value"), value.fget(self))[1]))
    during: list[int] = []
    logger = Recorder(Stage.AFTER_BATCH, look=lambda ctx: during.append(len(reads)) or (ctx.batch_count, ctx.loss))
    traced = [MixedPrecisionHook("bf16"), GradientClipHook(1.0), EMAHook(decay=0.9)]
    toy(tmp_path, inputs(*[0.1] * 50), [Counts(), *traced, logger])
    assert len(during) == 50
    assert during[-1] == during[0]
    assert np.isfinite([float(loss) for _, loss in logger.seen]).all()
    assert reads


# State ---------------------------------------------------------------------------------------------------------------


class Held(Recorder):
    """The seed's StatefulHook as a watcher: a number, and an array, on the host."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(Stage.AFTER_BATCH)
        self.n, self.table = start, np.zeros(2, np.float64)

    def __call__(self, ctx: Any, stage: Stage) -> None:
        self.n += 1
        self.table[self.n % 2] += 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "table": self.table, "nan": float("nan")}

    def load_state_dict(self, state: Any) -> None:
        self.n, self.table = int(state["n"]), state["table"]
        assert np.isnan(state["nan"])


def test_host_state_goes_on(tmp_path: Path) -> None:
    """nvalchemi:118 nvalchemi:120: by class and occurrence"""
    one, two = Held(), Held(10)
    source = toy(tmp_path, (1, 1, 1), [one, two])
    three, four = Held(), Held()
    toy(tmp_path, (1, 1, 1), [three, four], n_epochs=1, resume_from_run_id=source.id)
    assert (three.n, four.n) == (6, 16)
    assert three.table.tolist() == pytest.approx([0.3, 0.3])


def test_state_without_a_hook_and_a_hook_without_state(tmp_path: Path) -> None:
    """nvalchemi:119"""
    source = toy(tmp_path, (1, 1), [Held()])
    run = toy(tmp_path, (1, 1), [Recorder(Stage.AFTER_BATCH)], resume_from_run_id=source.id)
    again = toy(tmp_path, (1, 1), [late := Held(5)], resume_from_run_id=run.id, salt="more")
    assert late.n == 7
    assert again.last is not None


def test_a_slot_goes_on_and_is_read_from_the_host(tmp_path: Path) -> None:
    """nvalchemi:96 for a counter of one's own"""
    first, second = Counts(), Counts()
    source = toy(tmp_path, (1, 1, 1), [first, Rejects(1)])
    assert first.state_dict()["state"]["n"] == 2
    toy(tmp_path, (1, 1, 1), [second, Rejects(1)], resume_from_run_id=source.id)
    assert second.state_dict()["state"]["n"] == 5


def test_a_resume_with_other_hooks_is_refused(tmp_path: Path) -> None:
    source = toy(tmp_path, (1, 1), [Counts()])
    with pytest.raises(ValueError, match=r"topology.hooks"):
        toy(tmp_path, (1, 1), [], resume_from_run_id=source.id)


def test_hooks_that_take_part_change_the_id(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = [toy(tmp_path, (1, 1), hooks).id for hooks in ([], [Counts()], [Rejects(1)], [Rejects(0)])]
    ids.append(toy(tmp_path, (1, 1), [GradientAccumulationHook(2)]).id)
    assert len(set(ids)) == 5
