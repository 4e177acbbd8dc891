"""HookEvents, HookContext and SessionWatch without a framework: who is called, with which counts, after which reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nnx_jax.core.errors import ComponentRestoreError, HookStateError, TraceBoundaryError
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.core.hooks import StatefulUpdateHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.loop.clocks import Cadence, span_batches
from nnx_jax.loop.engine import Records
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.idle import check_idle
from nnx_jax.loop.records import RecordKeeper
from nnx_jax.loop.together import Together
from nnx_jax.loop.watched import SessionWatch
from nnx_jax.spmd.world import ALONE


class Notes:
    """A host hook that notes what it sees, and how it is entered and left."""

    def __init__(self, *stages: Stage, look: Any = None, log: list[Any] | None = None, frequency: int = 1) -> None:
        self.stage, self.stages, self.frequency = None, stages, frequency
        self.look, self.log = look or (lambda ctx: None), log if log is not None else []

    def _runs_on_stage(self, stage: Stage) -> bool:
        return stage in self.stages

    def __call__(self, ctx: Any, stage: Stage) -> None:
        self.log.append(self.look(ctx))


class Enters(Notes):
    def __init__(self, name: str, log: list[Any], *, fails: str = "") -> None:
        super().__init__(Stage.AFTER_BATCH, log=log)
        self.name, self.fails = name, fails

    def __enter__(self) -> None:
        if self.fails == "enter":
            raise OSError(self.name)
        self.log.append(f"enter {self.name}")

    def __exit__(self, kind: Any, *_: object) -> None:
        self.log.append(f"exit {self.name} {kind.__name__ if kind else kind}")
        if self.fails == "exit":
            raise OSError(self.name)


class Stored(Notes):
    def __init__(self, state: Any = None) -> None:
        super().__init__(Stage.AFTER_BATCH)
        self.held = state

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: Any) -> None:
        if state["held"] == "bad":
            raise ValueError("not mine")
        self.held = state["held"]


def events(*hooks: Any, world: int = 1) -> HookEvents:
    return HookEvents(HookRegistry(hooks), world=world)


# Entering and leaving ------------------------------------------------------------------------------------------------


def test_entered_once_and_left_in_reverse() -> None:
    """nvalchemi:19"""
    log: list[Any] = []
    both = events(Enters("a", log), Enters("b", log))
    with both, both:
        assert log == ["enter a", "enter b"]
    assert log == ["enter a", "enter b", "exit b None", "exit a None"]
    with pytest.raises(ZeroDivisionError), both:
        raise ZeroDivisionError
    assert log[-2:] == ["exit b ZeroDivisionError", "exit a ZeroDivisionError"]


def test_one_that_cannot_be_entered() -> None:
    log: list[Any] = []
    with pytest.raises(OSError, match="b"), events(Enters("a", log), Enters("b", log, fails="enter")):
        pass
    assert log == ["enter a", "exit a OSError"]


def test_every_cleanup_is_tried_and_none_hides_the_error() -> None:
    log: list[Any] = []
    hooks = events(Enters("a", log), Enters("b", log, fails="exit"), Enters("c", log, fails="exit"))
    with pytest.warns(RuntimeWarning, match="OSError: [bc]"), pytest.raises(ZeroDivisionError), hooks:
        raise ZeroDivisionError
    assert log[3:] == [f"exit {name} ZeroDivisionError" for name in "cba"]
    with pytest.warns(RuntimeWarning, match="OSError: b"), pytest.raises(OSError, match="c"), hooks:
        pass


def test_an_object_with_close_is_closed() -> None:
    log: list[Any] = []

    class Closes(TrainingUpdateHook):
        def close(self) -> None:
            log.append("closed")

    with events(Closes()):
        pass
    assert log == ["closed"]


# Who is called -------------------------------------------------------------------------------------------------------


def test_what_makes_a_run_go_batch_by_batch() -> None:
    timed = Notes(Stage.AFTER_BATCH)
    timed.cadence_steps = 5  # type: ignore[attr-defined]
    assert not events(Notes(Stage.AFTER_EPOCH), timed, TrainingUpdateHook()).per_batch
    assert events(timed).cadences == (5,)
    assert events(timed).taps == frozenset()
    asks = Notes(Stage.AFTER_LOSS)
    asks.needs = ("gradients", "params")  # type: ignore[attr-defined]
    assert events(asks).per_batch
    assert events(asks).taps == {"loss", "gradients"}


def test_a_cadence_is_for_its_stage_alone() -> None:
    """A hook with a cadence of updates that also watches validations is called at every one of them."""
    log: list[Any] = []
    hook = Notes(Stage.AFTER_BATCH, Stage.AFTER_VALIDATION, look=lambda ctx: ctx.step_count, log=log)
    hook.cadence_steps = 5  # type: ignore[attr-defined]
    watch = Simulated(hook).watch
    watch.validated({"loss": 1.0}, 3)
    assert log == [0]


def test_setup_sees_the_models() -> None:
    log: list[Any] = []
    hook = Notes(Stage.SETUP, look=lambda ctx: (ctx.model, ctx.models, ctx.step_count, ctx.loss), log=log)
    prepared: list[Any] = []
    hook.prepare_strategy = prepared.append  # type: ignore[attr-defined]
    HookEvents(HookRegistry([hook]), workflow="run").setup({"main": "net"})
    assert log == [("net", {"main": "net"}, 0, None)]
    assert prepared == ["run"]


# State ---------------------------------------------------------------------------------------------------------------


def test_state_by_class_and_occurrence() -> None:
    """nvalchemi:118 nvalchemi:119 nvalchemi:120: numbers, text, arrays and not-a-number come back as they were."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    held = {"table": table, "nan": float("nan"), "list": [1, 2.5, "x", None, True]}
    stored = events(Stored(held), Notes(Stage.AFTER_BATCH), Stored(7)).state()
    assert [name.rpartition(".")[2] for name in stored] == ["Stored", "2"]
    one, two, three = Stored(), Stored(), Stored(9)
    events(one, two, three).load({**stored, "hook another.Class": {"version": 1, "required": False, "state": {}}})
    assert one.held["table"].tolist() == table.tolist()
    assert one.held["table"].dtype == np.float32
    assert np.isnan(one.held["nan"])
    assert one.held["list"] == held["list"]
    assert (two.held, three.held) == (7, 9)


def test_slots_are_not_stored_twice() -> None:
    assert events(StatefulUpdateHook(), TrainingUpdateHook()).state() == {}


def test_a_refused_state_is_told() -> None:
    stored = events(Stored("bad")).state()
    with pytest.raises(ComponentRestoreError, match=r"Stored: not mine"):
        events(Stored()).load(stored)
    with pytest.raises(TypeError, match="numbers, text, arrays of numbers.*found object"):
        events(Stored(object())).state()


# Counting ------------------------------------------------------------------------------------------------------------


class Simulated:
    """A session whose engine makes one update of each microbatch that is not vetoed; reads are counted."""

    def __init__(self, *hooks: Any, vetoed: Any = lambda number: False, world: int = 1) -> None:
        self.vetoed, self.batches, self.unread, self.reads = vetoed, 0, [], 0
        self.made = self.last_update = 0
        self.engine = self
        self.n_batches, self.accumulate, self.in_place, self.state = 10**6, 1, False, None
        self.epoch = self.batch = self.step = 0
        self.cadence = Cadence()
        self.plan = SimpleNamespace(end_epoch=None, max_steps=1, store=None)
        self.ctx = SimpleNamespace(deferred=[], should_stop=False)
        self.together = Together(cast(Any, self), ALONE)
        self.stop, self._poll = False, lambda done: False
        self.commits: list[int] = []
        self.watch = SessionWatch(self, events(*hooks, world=world))  # type: ignore[arg-type]

    def batch_count(self, state: Any) -> int:
        return self.batches

    def open_batches(self, state: Any) -> int:
        return 0

    def parts(self) -> dict[str, Any]:
        return {}

    def hook_name(self, number: int) -> str:
        return "Vetoer"

    def look(self, state: Any, name: str) -> Any:
        return f"{name} of {self.batches}"

    def run_span(self, state: Any, span: Any, poll: Any) -> tuple[Any, int]:
        updated = not self.vetoed(self.batches)
        self.made += updated
        self.unread.append((self.batches, self.made, updated))
        self.batches += 1
        return state, 1

    def _read(self) -> None:
        self.reads += 1
        rows, self.unread = self.unread, []
        if rows:
            batch, step, updated = (np.array(column) for column in zip(*rows, strict=True))
            none = np.zeros(len(rows))
            veto = np.where(updated, -1, 0)
            self.step = int(step[-1])
            self.last_update = int(max(batch[updated] + 1, default=self.last_update))
            closed = np.ones(len(rows), bool)
            self.watch.note(Records(batch, step, none, none, none, closed, updated.astype(bool), {}, veto))
        self.watch.read()
        check_idle(self, self.watch.vetoer)  # type: ignore[arg-type]

    def _commit(self) -> None:
        self.commits.append(self.batches)
        self.watch.served()

    def until(self, updates: int) -> None:
        while self.made < updates:
            self.watch.one(closes=True)


@pytest.mark.parametrize(("percent", "most"), [(0, 21), (1, 32), (5, 36), (30, 65)])
def test_reads_only_where_somebody_may_be_due(percent: int, most: int) -> None:
    """nvalchemi:153: 1000 updates, every hundredth; never a wrong count, and few reads.

    Two a multiple without a veto: one to know that it is reached, one to know that the next batch left it.
    """
    rng, log = np.random.default_rng(0), []
    answers = rng.random(5000) < percent / 100
    hook = Notes(Stage.AFTER_BATCH, look=lambda ctx: ctx.step_count, log=log, frequency=100)
    run = Simulated(hook, vetoed=lambda number: answers[number])
    run.until(1000)
    assert list(dict.fromkeys(step for step in log if step)) == list(range(100, 1001, 100))
    assert run.reads <= most


def test_a_frequency_of_one_reads_nothing() -> None:
    log: list[Any] = []
    run = Simulated(Notes(Stage.AFTER_BATCH, Stage.AFTER_LOSS, look=lambda ctx: ctx.loss, log=log))
    run.until(50)
    assert run.reads == 0
    assert log[:4] == ["loss of 1", "loss of 1", "loss of 2", "loss of 2"]


@pytest.mark.parametrize("lag", [1, 3])
def test_counts_asked_late_are_those_of_the_stage(lag: int) -> None:
    """Updates before the microbatch at AFTER_LOSS, after it at AFTER_BATCH, however many were made since a read."""
    seen: list[Any] = []

    def look(ctx: Any) -> Any:
        return (ctx.batch_count, ctx.step_count) if run.batches % lag == 0 else None

    run = Simulated(Notes(Stage.AFTER_LOSS, look=look, log=seen), vetoed=lambda number: number % 2 == 1)
    run.until(6)
    counted = [entry for entry in seen if entry is not None]
    assert counted == [(n, (n + 1) // 2) for n in range(lag - 1, 11, lag)]


def test_both_counts_of_one_microbatch() -> None:
    """nvalchemi:3 nvalchemi:9 nvalchemi:10: four workers; the second microbatch is vetoed."""
    log: list[Any] = []
    hook = Notes(
        Stage.AFTER_OPTIMIZER_STEP, Stage.AFTER_BATCH, look=lambda ctx: (ctx.step_count, ctx.global_step_count), log=log
    )
    Simulated(hook, vetoed=lambda number: number == 1, world=4).until(2)
    assert log == [(0, 0), (1, 4), (1, 4), (1, 4), (1, 4), (2, 8)]


def test_never_an_update() -> None:
    """nvalchemi:21: ten epochs, but at least a hundred windows and at most ten thousand."""
    for n_batches, limit in ((2, 100), (50, 500), (10**6, 10_000)):
        run = Simulated(TrainingUpdateHook(), vetoed=lambda number: True)
        run.n_batches = n_batches
        for _ in range(limit - 1):
            run.run_span(None, None, None)
        run._read()
        run.run_span(None, None, None)
        with pytest.raises(HookStateError, match=rf"last {limit} microbatches.*Vetoer vetoes"):
            run._read()
        assert issubclass(HookStateError, RuntimeError)


def test_spans_end_at_the_cadence_of_hooks() -> None:
    cadence = Cadence(log=10, hooks=(4, 7))
    assert [cadence.next_step(step) for step in (0, 4, 7, 8, 10)] == [4, 7, 8, 10, 12]
    assert span_batches(step=0, target=2, batch=0, n_batches=90, accumulate=4, open_batches=3) == 5


# Asking for something ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "after"), [(Stage.BEFORE_BATCH, 0), (Stage.AFTER_LOSS, 1), (Stage.AFTER_BATCH, 1)])
def test_a_commit_comes_right_after_its_event(stage: Stage, after: int) -> None:
    def ask(ctx: Any) -> None:
        if ctx.batch_count == (1 if stage is Stage.AFTER_BATCH else 0):
            ctx.request_commit("here", retired=("there",))

    run = Simulated(Notes(stage, look=ask))
    run.until(3)
    assert run.commits == [after]
    assert run.ctx.deferred == ["here"]


def test_a_stop_ends_the_span() -> None:
    run = Simulated(Notes(Stage.AFTER_BATCH, look=lambda ctx: ctx.batch_count == 3 and ctx.request_stop()))
    run.watch.span(10, closes=True)
    assert run.batches == 3
    assert run.ctx.should_stop


def test_nothing_is_asked_of_a_context_that_is_over() -> None:
    log: list[Any] = []
    run = Simulated(Notes(Stage.AFTER_BATCH, look=lambda ctx: ctx, log=log))
    run.until(1)
    with pytest.raises(HookStateError, match="while they are called"):
        log[0].request_commit()
    with pytest.raises(TraceBoundaryError, match=r"ctx.loss was asked for after its stage"):
        _ = log[0].loss
    with pytest.raises(AttributeError, match="no 'lost'"):
        _ = log[0].lost


# The open window of the record keeper --------------------------------------------------------------------------------


def test_open_sums_are_stored_and_continued() -> None:
    """Three microbatches of one window, the first two before a stop: the epoch's sums are those of an unbroken run."""

    def rows(*sums: float, closes: bool) -> Records:
        n = len(sums)
        closed = np.array([False] * (n - 1) + [closes])
        none, batch = np.zeros(n), np.arange(n)
        loss = np.array([[value, 1.0] for value in sums])
        return Records(batch, none.astype(int), none, none, none, closed, closed, {"loss": loss})

    def keeper() -> RecordKeeper:
        return RecordKeeper(lambda sums: {"loss": sums["loss"][0]}, lambda _: {}, n_batches=3, every="batch")

    whole, first, second = keeper(), keeper(), keeper()
    whole.table(rows(0.1, 0.2, 0.3, closes=True))
    first.table(rows(0.1, 0.2, closes=False))
    assert first.open == {"loss": [[0.1, 1.0], [0.2, 1.0]]}
    assert first.summary() == {}
    second.resume(first.open)
    second.begin_epoch()
    second.table(rows(0.3, closes=True))
    assert second.summary() == whole.summary()
    assert second.open == {}
