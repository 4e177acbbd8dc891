"""BEST, patience and what stays on the disk, as runs whose validation values are scripted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ComponentRestoreError, ConfigError
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.monitors import MonitorUnavailableError
from nnx_jax.model import NNModel
from nnx_jax.optim.epochs import PlateauSchedule
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec
from nnx_jax.runs.run import NNRun
from tests.e2e import helpers
from tests.e2e.toys import (
    Batches,
    KillAt,
    Killed,
    Scripted,
    Slope,
    Target,
    Watch,
    column,
    fit,
    half,
    only_run,
    slope,
    targets,
    weight,
)

nan, inf = math.nan, math.inf
LOWER, HIGHER = MonitorSpec(), MonitorSpec(mode="max")
PLAIN: dict[str, Any] = {"save_phase_checkpoints": False}


def best_epoch(run: NNRun) -> int | None:
    """The epoch BEST names; its weight says the same, as the toy's weight counts epochs."""
    if run.best is None:
        return None
    assert weight(run, "BEST") == [run.best.epoch + 1.0]
    return run.best.epoch


def epochs_on_disk(run: NNRun) -> set[int]:
    """Epochs whose generation can be loaded (one update an epoch, so the step is the epoch plus one)."""
    found = set()
    for epoch in range(20):
        try:
            found.add(run.checkpoint(str(epoch + 1)).step - 1)
        except ValueError:
            continue
    return found


@pytest.mark.parametrize(
    "monitor, values, keep, expected",
    [
        (LOWER, [nan, 0.5, 0.4, 0.6, nan], 2, 2),
        (HIGHER, [nan, 0.2, 0.3], 1, 2),
        (HIGHER, [0.5, nan, 0.4], 1, 0),
        (LOWER, [0.5, nan, 0.4], 1, 2),
    ],
)
def test_nan_is_never_best_and_never_hides_the_best(
    tmp_path: Path, monitor: MonitorSpec, values: list[float], keep: int, expected: int
) -> None:
    """case:H01 case:H02 (kept [3, 5] and best 5, or kept [2] and best 2)"""
    with pytest.warns(RuntimeWarning, match="nonfinite"):
        run = Scripted(*values).fit(tmp_path, monitor=monitor, checkpoint={"keep": keep}, **PLAIN)
    assert best_epoch(run) == expected
    last = len(values) - 1
    # the refresh at the end and the commit before it are one moment, the newest of the `keep`
    assert epochs_on_disk(run) == {expected, *range(last - keep + 1, last + 1)}


def test_without_a_finite_value_there_is_no_best(tmp_path: Path) -> None:
    """case:H01"""
    with pytest.warns(RuntimeWarning, match="val_loss is nonfinite"):
        run = Scripted(nan, nan, nan).fit(tmp_path, monitor=LOWER)
    assert run.status == "finished"
    assert run.best is None


def test_of_equal_values_the_first_is_best_through_a_resume(tmp_path: Path) -> None:
    """case:H03 (ties are no improvement: patience 3 ends after epoch 4)"""
    script = Scripted(0.8, 0.9, 0.9, 0.9, 0.85, 0.7, 0.7)
    with pytest.raises(Killed):
        script.fit(
            tmp_path, monitor=HIGHER, callbacks=[EarlyStopping(patience=3), KillAt("on_epoch_begin", 4)], **PLAIN
        )
    stopped = only_run(tmp_path)
    assert best_epoch(stopped) == 1
    generation = stopped.best.generation if stopped.best else None
    run = script.fit(tmp_path, monitor=HIGHER, callbacks=[EarlyStopping(patience=3)], **PLAIN)
    assert run.id == stopped.id
    assert best_epoch(run) == 1
    assert run.best is not None
    assert run.best.generation == generation
    assert column(run, "epoch", "improved") == [1, 1, 0, 0, 0]


def test_a_resume_remembers_the_best_and_the_patience(tmp_path: Path) -> None:
    """case:H05 case:H06 nnx:B133 nnx:B134 (not .35 at epoch 3; epoch 2 stores its own wait, 1)"""
    script = Scripted(0.5, 0.3, 0.4, 0.35, 0.36, 0.37)
    stops = [EarlyStopping(patience=3), KillAt("on_epoch_begin", 4)]
    with pytest.raises(Killed):
        script.fit(tmp_path, monitor=LOWER, callbacks=stops, **PLAIN)
    stopped = only_run(tmp_path)
    host = stopped.checkpoint().host
    assert (host["components"]["early_stopping"]["state"]["wait"], stopped.last.epoch if stopped.last else None) == (
        1,
        2,
    )
    assert host["monitor"]["best"] == pytest.approx(0.3)
    with pytest.raises(ComponentRestoreError, match="early_stopping"):
        script.fit(tmp_path, monitor=LOWER, callbacks=[EarlyStopping("val_loss", patience=3)], **PLAIN)
    run = script.fit(tmp_path, monitor=LOWER, callbacks=[EarlyStopping(patience=3)], **PLAIN)
    assert run.id == stopped.id
    assert best_epoch(run) == 1
    assert run.last is not None
    assert run.last.epoch == 4


@pytest.mark.parametrize(
    "values, patience, every, last",
    [
        ([1.0, 0.9, 0.95, 0.96, 0.97], 2, 1, 3),
        ([0.9, 0.95, 0.96], 1, 1, 1),
        ([9, 0.5, 9, 0.6, 9, 0.7, 9, 0.8, 9, 0.9, 9], 3, 2, 7),
    ],
)
def test_patience_counts_measurements(
    tmp_path: Path, values: list[float], patience: int, every: int, last: int
) -> None:
    """case:H07 nnx:B078 (one epoch late; at once with patience 1; by epochs where every second one is measured)"""
    run = Scripted(*values).fit(
        tmp_path, monitor=LOWER, callbacks=[EarlyStopping(patience=patience)], eval_every_n_epochs=every, **PLAIN
    )
    assert run.last is not None
    assert run.last.epoch == last


class Rotation(Callback):
    """Looks at every epoch's begin, as another process would, what is on the disk once the commit before is through."""

    def __init__(self, runs: Path, values: list[float], keep: int) -> None:
        self.runs, self.values, self.keep = runs, values, keep
        self.seen: list[set[int]] = []

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        if not ctx.epoch:
            return
        best = min(range(ctx.epoch), key=self.values.__getitem__)
        wanted = {best, *range(max(ctx.epoch - self.keep, 0), ctx.epoch)}
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            run = only_run(self.runs)
            if run.last is not None and run.best is not None and epochs_on_disk(run) == wanted:
                break
            time.sleep(0.02)
        assert best_epoch(run) == best
        self.seen.append(epochs_on_disk(run))


@pytest.mark.parametrize(
    "values, keep, expected",
    [
        ([0.1, 0.5, 0.4, 0.3, 0.2], 2, [{0}, {0, 1}, {0, 1, 2}, {0, 2, 3}]),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 3, [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 2, 3, 4}]),
        ([0.3, 0.2, 0.4, 0.5], 1, [{0}, {1}, {1, 2}]),
    ],
)
def test_rotation_keeps_best_and_last(tmp_path: Path, values: list[float], keep: int, expected: list[set[int]]) -> None:
    """case:H09 case:H10 case:H11 (BEST deleted by the rotation; LAST evicted by better ones; nothing left)"""
    rotation = Rotation(tmp_path, values, keep)
    run = Scripted(*values).fit(tmp_path, monitor=LOWER, checkpoint={"keep": keep}, callbacks=[rotation], **PLAIN)
    assert rotation.seen == expected
    assert run.last is not None
    assert run.last.epoch == len(values) - 1
    assert best_epoch(run) == min(range(len(values)), key=values.__getitem__)


@pytest.mark.parametrize("keep", [0, -1])
def test_nothing_kept_is_refused(tmp_path: Path, keep: int) -> None:
    """case:H11"""
    with pytest.raises(ConfigError, match=rf"keep.*{keep}"):
        Scripted(0.3).fit(tmp_path / "runs", checkpoint={"keep": keep})
    assert not (tmp_path / "runs").exists()


def test_a_monitor_that_nothing_records_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    """case:H13 nnx:B068 nnx:B070 nnx:B071 (with the names that are recorded)"""
    runs = tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"train\.monitor\.metric.*los.*loss"):
        Scripted(0.3).fit(runs, monitor=MonitorSpec(metric="los"))
    with pytest.raises(ConfigError, match=r"train\.monitor\.split.*no validation data"):
        fit(runs, Target(), half, targets(1, 2), monitor=LOWER)
    with pytest.raises(ValueError, match="cross_entropy.*mse.*legal names: accuracy"):
        helpers.fit(runs, of=NNModel(helpers.net_params(), NNModelParams(metrics=("mse",))))
    assert not runs.exists()


class SomeEpochsBad(Batches):
    """One batch of T0 an epoch; in the epochs named its gradient is NaN."""

    def __init__(self, *bad: int) -> None:
        self.bad, one = bad, np.ones((1, 1), np.float32)
        super().__init__([(-one, one)])

    def __iter__(self) -> Iterator[Any]:
        ((x, y),) = self.batches
        yield x, -y if self.epochs[-1] in self.bad else y


def test_an_epoch_without_a_value_changes_nothing(tmp_path: Path) -> None:
    """case:H13 nnx:B066 (no update was made in epochs 0 and 2, so they have no training loss: not last epoch's)"""
    plateau = NNSchedulerParams(kind="reduce_on_plateau", factor=0.5, patience=0, cooldown=0)
    stopper = EarlyStopping(patience=1)
    decided = Watch("on_epoch_end", lambda ctx: (ctx.decision.status, stopper.wait))
    with pytest.warns(RuntimeWarning, match="train_loss is missing") as seen:
        run = fit(
            tmp_path, Slope(), slope, None, train_loader=SomeEpochsBad(0, 2), n_epochs=4, nonfinite="skip",
            monitor=MonitorSpec(split="train"), scheduler=plateau, callbacks=[stopper, decided], **PLAIN,
        )  # fmt: skip
    assert len([warning for warning in seen if "missing" in str(warning.message)]) == 1
    assert decided.seen == [("missing", 0), ("ok", 0), ("missing", 0), ("ok", 0)]
    assert [run.best.epoch if run.best else None, column(run, "epoch", "improved")] == [3, [0, 1, 0, 1]]
    assert run.checkpoint().host["clock"]["bad_epochs"] == 0
    assert weight(run) == pytest.approx([0.2])


def test_one_decision_for_best_plateau_and_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B002 nnx:B063 nnx:B080 (0.695 is better than 0.7, but by less than min_delta)"""
    plateau = NNSchedulerParams(kind="reduce_on_plateau", factor=0.5, patience=5)
    stopper = EarlyStopping(patience=5)
    order: list[str] = []
    tick = PlateauSchedule.step

    def step(self: PlateauSchedule, value: float | None = None) -> float:
        order.append("clock")
        return tick(self, value)

    monkeypatch.setattr(PlateauSchedule, "step", step)
    validated = Watch("on_validation", lambda ctx: order.append("validation"))
    decided = Watch("on_epoch_end", lambda ctx: (order.append("end"), ctx.decision.improved)[1])
    run = Scripted(0.8, 0.7, 0.695, 0.71).fit(
        tmp_path,
        monitor=MonitorSpec(min_delta=0.01),
        scheduler=plateau,
        callbacks=[stopper, validated, decided],
        **PLAIN,
    )
    assert column(run, "epoch", "improved") == [1, 1, 0, 0]
    assert decided.seen == [True, True, False, False]
    assert order == ["validation", "clock", "end"] * 4
    assert best_epoch(run) == 1
    host = run.checkpoint().host
    assert host["clock"]["bad_epochs"] == 2
    assert host["components"]["early_stopping"]["state"]["wait"] == stopper.wait == 2


def test_only_a_strictly_better_value_improves(tmp_path: Path) -> None:
    """nnx:B064"""
    run = Scripted(0.5, 0.5, 0.5, 0.4).fit(tmp_path, monitor=LOWER, **PLAIN)
    assert column(run, "epoch", "improved") == [1, 0, 0, 1]
    assert best_epoch(run) == 3


def test_values_that_are_not_finite_are_bad_epochs(tmp_path: Path) -> None:
    """nnx:B065 (for the plateau, whose rate is halved once, and for patience)"""
    plateau = NNSchedulerParams(kind="reduce_on_plateau", factor=0.5, patience=0, cooldown=0)
    decided = Watch("on_epoch_end", lambda ctx: ctx.decision.status)
    waits: list[int] = []
    stopper = EarlyStopping(patience=3)
    note = Watch("on_epoch_end", lambda ctx: waits.append(stopper.wait))
    script = Scripted(nan, 0.5, inf, 0.4, marks=(1.0, 1.5, 2.0, 2.25))
    with pytest.warns(RuntimeWarning, match="nonfinite"):
        run = script.fit(tmp_path, monitor=LOWER, scheduler=plateau, callbacks=[stopper, decided, note], **PLAIN)
    assert decided.seen == ["nonfinite", "ok", "nonfinite", "ok"]
    assert waits == [1, 0, 1, 0]
    assert run.best is not None
    assert run.best.epoch == 3
    assert column(run, "epoch", "lr") == [1.0, 0.5, 0.5, 0.25]


def test_a_monitor_may_insist_on_finite_values(tmp_path: Path) -> None:
    """nnx:B067 (a ValueError at that epoch; the epochs before stay)"""
    strict = MonitorSpec(on_nonfinite="error")
    with pytest.raises(MonitorUnavailableError, match="val_loss is nonfinite"):
        Scripted(0.5, nan, 0.4).fit(tmp_path, monitor=strict)
    run = only_run(tmp_path)
    assert run.last is not None
    assert run.last.epoch == 0


def test_a_run_with_a_monitor_of_its_own_is_never_the_best_run(tmp_path: Path) -> None:
    """nnx:B074 nnx:B075 (nor has a continued run a BEST that never beat the one it carries)"""
    plain = Scripted(0.5).fit(tmp_path)
    first = Scripted(0.2, 0.3).fit(tmp_path, monitor=LOWER, salt="monitored")
    assert (tmp_path / "best").resolve().name == plain.id
    more = Scripted(9, 9, 0.4, 0.3).fit(tmp_path, monitor=LOWER, n_epochs=2, resume_from_run_id=first.id)
    assert best_epoch(first) == 0
    assert more.best is None
    assert column(more, "epoch", "monitor") == pytest.approx([0.4, 0.3])
    assert column(more, "epoch", "improved") == [0, 0]


def test_phases_of_eight_epochs(tmp_path: Path) -> None:
    """nnx:B096 nnx:B097 (FIRST, Q1, Q2 and Q3 hold epochs 0, 1, 3 and 5; without them only LAST and BEST are there)"""
    values = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    run = Scripted(*values).fit(tmp_path)
    names = ("FIRST", "Q1", "Q2", "Q3", "LAST", "BEST")
    assert set(run.pointers) == set(names)
    assert [run.pointers[name].epoch for name in names] == [0, 1, 3, 5, 7, 7]
    assert [weight(run, name).item() for name in names] == [1, 2, 4, 6, 8, 8]
    run = Scripted(*values).fit(tmp_path, **PLAIN)
    assert set(run.pointers) == {"LAST", "BEST"}
