"""Callbacks begin in order, end in reverse, and every cleanup is tried."""

from __future__ import annotations

import contextlib
import warnings

import pytest

from nnx_jax.core import codec
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import ComponentRestoreError, ConfigError, UnsafePathError
from nnx_jax.loop.builtin import EarlyStopping, LRMonitor, ModelCheckpoint
from nnx_jax.loop.callbacks import Callback, CallbackList, TrainContext
from nnx_jax.loop.components import Components, plain, revived
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.params.train import MonitorSpec
from nnx_jax.runs.layout import HOST, HOST_LIMITS


class Spy(Callback):
    def __init__(self, name: str, log: list[str], fail_in: str = "") -> None:
        self.name, self.log, self.fail_in = name, log, fail_in

    def _note(self, hook: str) -> None:
        self.log.append(f"{self.name}.{hook}")
        if hook == self.fail_in:
            raise ValueError(f"{self.name} broke in {hook}")

    def on_train_begin(self, ctx: TrainContext) -> None:
        self._note("begin")

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        self._note("epoch_begin")

    def on_train_end(self, ctx: TrainContext) -> None:
        self._note("end")


def context() -> TrainContext:
    return TrainContext("0123456789abcdef")


def test_begin_in_order_and_end_in_reverse() -> None:
    log: list[str] = []
    callbacks = CallbackList([Spy("A", log), Spy("B", log)])
    callbacks.train_begin(context())
    callbacks.train_end(context(), None)
    assert log == ["A.begin", "B.begin", "B.end", "A.end"]


def test_only_those_that_began_are_finalized() -> None:
    log: list[str] = []
    callbacks = CallbackList([Spy("A", log), Spy("B", log, "begin"), Spy("C", log)])
    with pytest.raises(ValueError, match="B broke in begin") as caught:
        callbacks.train_begin(context())
    callbacks.train_end(context(), caught.value)
    assert log == ["A.begin", "B.begin", "A.end"]


def test_cleanup_errors_never_hide_the_training_error() -> None:
    log: list[str] = []
    callbacks = CallbackList([Spy("A", log, "end"), Spy("B", log, "end")])
    callbacks.train_begin(context())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callbacks.train_end(context(), RuntimeError("training"))
    assert [str(w.message) for w in seen] == [
        "on_train_end failed: ValueError: B broke in end",
        "on_train_end failed: ValueError: A broke in end",
    ]


def test_an_interrupt_in_a_cleanup_keeps_no_other_from_ending() -> None:
    """It is raised in the end, before errors of other cleanups; a training error still goes first."""
    log: list[str] = []

    class Struck(Callback):
        def on_train_end(self, ctx: TrainContext) -> None:
            raise KeyboardInterrupt

    for error in (None, RuntimeError("training")):
        callbacks = CallbackList([Spy("A", log), Struck(), Spy("C", log, "end")])
        callbacks.train_begin(context())
        raised = pytest.raises(KeyboardInterrupt) if error is None else contextlib.nullcontext()
        with warnings.catch_warnings(record=True) as seen, raised:
            warnings.simplefilter("always")
            callbacks.train_end(context(), error)
        assert [str(w.message) for w in seen][0] == "on_train_end failed: ValueError: C broke in end"
        assert len(seen) == (1 if error is None else 2)
    assert log == ["A.begin", "C.begin", "C.end", "A.end"] * 2


def test_lr_monitor_keeps_more_updates_than_a_list_may_have_values() -> None:
    """200 000 values are read back of a host.json; the state of the version before, in lists, is still read."""
    many, back = LRMonitor(), LRMonitor()
    many.history, many._counts = [0.5, None], [100_000, 0]
    many.update_history = [(n + 1, 1.0 / (n + 1)) for n in range(100_000)]
    stored = plain(many.component_state(), "lr_monitor")
    back.load_component_state(
        revived(codec.parse_json(durable_json(stored, source=HOST, limits=HOST_LIMITS), limits=HOST_LIMITS)), version=3
    )
    assert (back.history, back.update_history, back._counts) == (many.history, many.update_history, many._counts)
    back.load_component_state({"history": [0.5], "updates": [[1, 0.5], [2, 0.25]], "counts": [2]}, version=2)
    assert (back.history, back.update_history, back._counts) == ([0.5], [(1, 0.5), (2, 0.25)], [2])


def test_without_a_training_error_the_first_cleanup_error_is_raised() -> None:
    callbacks = CallbackList([Spy("A", [], "end"), Spy("B", [], "end")])
    callbacks.train_begin(context())
    with pytest.warns(RuntimeWarning, match="A broke in end"), pytest.raises(ValueError, match="B broke in end"):
        callbacks.train_end(context(), None)


def drive(stopper: EarlyStopping, values: list[float]) -> int:
    """Feed val_loss per epoch; return how many epochs ran."""
    ctx, tracker = context(), MonitorTracker(None)
    stopper.on_train_begin(ctx)
    for epoch, value in enumerate(values):
        ctx.epoch, ctx.values = epoch, {"val_loss": value}
        ctx.decision = tracker.decide(ctx.values)
        stopper.on_validation(ctx)
        if ctx.should_stop:
            return epoch + 1
    return len(values)


@pytest.mark.parametrize(
    ("patience", "values", "epochs"),
    [
        (2, [1.0, 0.9, 0.95, 0.96, 0.97], 4),
        (1, [0.9, 0.95], 2),
        (0, [1.0, 0.9, 0.95], 3),
        (2, [1, 0.9, 0.95, 0.94, 0.93], 4),
    ],
)
def test_patience_counts_measurements(patience: int, values: list[float], epochs: int) -> None:
    """nnx:B078 case:H07"""
    assert drive(EarlyStopping(patience=patience), values) == epochs
    assert drive(EarlyStopping("val_loss", patience=patience), values) == epochs


def test_one_instance_used_twice_starts_with_fresh_patience() -> None:
    """nnx:B079"""
    stopper = EarlyStopping(patience=2)
    assert [drive(stopper, [1.0, 1.1, 1.2, 1.3]) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"patience": 2.0}, "patience must be a whole number"),
        ({"patience": -1}, "patience must be a whole number"),
        ({"patience": True}, "patience must be a whole number"),
        ({"monitor": "accuracy"}, "must look like 'val_loss'"),
        ({"monitor": "val_edp.accuracy"}, "must look like 'val_loss'"),
        ({"mode": "max"}, "set them there"),
        ({"monitor": "val_loss", "mode": "MAX"}, "must be 'min' or 'max'"),
        ({"monitor": MonitorSpec(), "min_delta": 0.1}, "set them there"),
    ],
)
def test_wrong_early_stopping_arguments_are_refused(arguments: dict, problem: str) -> None:
    """nnx:B077"""
    with pytest.raises(ConfigError, match=problem):
        EarlyStopping(**arguments)


def test_model_checkpoint_tag_must_be_a_file_name() -> None:
    """nnx:B120"""
    with pytest.raises(UnsafePathError, match="a/b"):
        ModelCheckpoint([0], tag="a/b")


def test_names_nobody_chose_are_numbered_and_chosen_ones_are_unique() -> None:
    """nnx:B135"""
    assert list(Components([EarlyStopping(), EarlyStopping("val_loss")])) == ["early_stopping", "early_stopping.2"]
    with pytest.raises(ConfigError, match="two components are named 'mine'"):
        Components([EarlyStopping(name="mine"), EarlyStopping("val_loss", name="mine")])
    with pytest.raises(TypeError, match="component_spec.* got int"):
        Components([], [3])


class Counter(Callback):
    """State with a version that must be there."""

    component_version = 2

    def __init__(self, name: str, *, required: bool = True) -> None:
        self.component_name, self.component_required, self.count = name, required, 0

    def component_state(self) -> dict:
        return {"count": self.count}

    def load_component_state(self, state: dict) -> None:
        if state["count"] < 0:
            raise ValueError(f"count is {state['count']}")
        self.count = state["count"]


def entry(count: int, *, version: int = 2, required: bool = True) -> dict:
    return {"version": version, "required": required, "state": {"count": count}}


def test_every_problem_of_a_restore_is_told_at_once_and_nothing_is_changed() -> None:
    """nnx:B131 nnx:B132"""
    good, absent, newer, broken = (Counter(name) for name in ("good", "absent", "newer", "broken"))
    good.count = 7
    callbacks = Components([good, absent, newer, broken])
    stored = {"good": entry(1), "newer": entry(1, version=3), "broken": entry(-1), "gone": entry(1)}
    with pytest.raises(ComponentRestoreError, match="component gone") as caught:
        callbacks.load(stored)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "component gone", "component absent", "component newer", "component broken",
    ]  # fmt: skip
    assert [callback.count for callback in (good, absent, newer, broken)] == [7, 0, 0, 0]
    callbacks.load({name: entry(4) for name in ("good", "absent", "newer", "broken")})
    assert [callback.count for callback in (good, absent, newer, broken)] == [4, 4, 4, 4]
    Components([Counter("other", required=False)]).load({"loose": entry(1, required=False)})


def test_a_callback_class_or_another_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a class; pass an instance"):
        CallbackList([EarlyStopping])
    with pytest.raises(ConfigError, match="must be a Callback or a function, got int"):
        CallbackList([3])  # pyright: ignore[reportArgumentType]
