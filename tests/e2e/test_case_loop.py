"""The loop counted and timed: events by updates, one compile, no read between events, memory that stays flat."""

from __future__ import annotations

import csv
import gc
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.array import ArrayImpl

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.runs.run import NNRun
from nnx_jax.step.watch import RecompileWarning
from tests.e2e import helpers
from tests.e2e.toys import (
    SAME,
    Batches,
    KillAt,
    Killed,
    Scripted,
    Slope,
    Target,
    Watch,
    arrays,
    column,
    fit,
    gradients,
    half,
    only_run,
    rows,
    slope,
    steps,
    targets,
    weight,
)

RISING = NNSchedulerParams(kind="linear_warmup_decay", clock="optimizer_update", warmup_steps=10, total_steps=10)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FlaxEngine]:
    """Every engine a test's runs make."""
    made: list[FlaxEngine] = []

    class Noted(FlaxEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("nnx_jax.fit.framework.Framework.engine_class", Noted)
    return made


class Shown(QuietProgress):
    """Notes the values a display is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def values(self, epoch: int, step: int, values: Mapping[str, float], *, epoch_end: bool) -> None:
        self.seen.append((step, values["train_loss"]))


# -- events -----------------------------------------------------------------------------------------------------


def test_cadences_count_updates(tmp_path: Path) -> None:
    """case:A12 (24 microbatches in windows of 4: not 12 evaluations, and 2 and 3 need not divide each other)"""
    shown = Shown()
    run = fit(
        tmp_path, Slope(), slope, steps(24), val=steps(1), accumulate=4, eval_every_n_steps=2, log_every_n_steps=1,
        checkpoint={"every_n_steps": 3, "every_n_epochs": None, "keep": 99}, progress=shown, scheduler=SAME,
        save_phase_checkpoints=False,
    )  # fmt: skip
    scored = [row["step"] for row in run.records if row["val_loss"] is not None]
    assert scored == [2, 4, 6]
    assert column(run, "update", "step") == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in shown.seen] == [1, 2, 3, 4, 5, 6]
    assert {run.checkpoint("3").step, run.checkpoint("6").step} == {3, 6}


def test_steps_mean_updates_in_every_row_also_after_a_resume(tmp_path: Path) -> None:
    """case:L01 (train rows 1, 2, 3, 4 and validation rows 2, 4, on one axis that never goes back)"""
    more: dict[str, Any] = {
        "val": steps(1),
        "accumulate": 2,
        "eval_every_n_steps": 2,
        "checkpoint": {"every_n_steps": 2},
    }
    with pytest.raises(Killed):
        fit(tmp_path, Slope(), slope, steps(8), callbacks=[KillAt("on_validation", 2)], **more)
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert stopped.last.step == 2
    run = fit(tmp_path, Slope(), slope, steps(8), **more)
    assert run.id == stopped.id
    assert column(run, "update", "step") == [1, 2, 3, 4]
    assert [row["step"] for row in run.records if row["val_loss"] is not None] == [2, 4]
    found = [row["step"] for row in run.records]
    assert found == sorted(found)


def test_a_log_line_every_n_updates_shows_the_epoch_so_far(tmp_path: Path) -> None:
    """case:L02 (at 5 and 10, not 1, 6 and 11; updates 1 to 5 have the mean loss -0.2)"""
    shown = Shown()
    fit(tmp_path, Slope(), slope, steps(10), log_every_n_steps=5, progress=shown)
    assert [step for step, _ in shown.seen] == [5, 10]
    assert [loss for _, loss in shown.seen] == pytest.approx([-0.2, -0.45])


def test_the_history_stays_one_table_through_a_resume(tmp_path: Path) -> None:
    """case:L03 (rows of epoch 1 were written and not committed; NaN stays a value, nothing an empty cell)"""
    script = Scripted(0.3, math.nan, 0.2)
    more: dict[str, Any] = {"eval_every_n_epochs": 2}
    with pytest.raises(Killed):
        script.fit(tmp_path / "a", callbacks=[KillAt("on_epoch_end", 2)], **more)
    straight = script.fit(tmp_path / "b", **more)
    lines = (straight.path / "idps.csv").read_text().splitlines(keepends=True)
    with (only_run(tmp_path / "a").path / "idps.csv").open("a") as file:
        file.writelines(lines[3:5])  # what a process that died between the history and LAST has left
    run = script.fit(tmp_path / "a", **more)
    text = (run.path / "idps.csv").read_text()
    assert text == (straight.path / "idps.csv").read_text()
    table = list(csv.DictReader(io.StringIO(text), strict=True))
    assert len([line for line in text.splitlines() if "train_loss" in line]) == 1
    assert [row["epoch"] for row in table if row["kind"] == "epoch"] == ["0", "1", "2"]
    assert [row["val_loss"] for row in table if row["kind"] == "epoch"] == ["", "nan", repr(float(np.float32(0.2)))]
    values = column(run, "epoch", "val_loss")
    assert values[0] is None
    assert math.isnan(values[1])
    assert values[2] == pytest.approx(0.2)


class Noting(Callback):
    """Writes down its hooks; may raise in one, or change the model at the end."""

    def __init__(self, name: str, log: list[str], *, fail: str = "", fill: float | None = None) -> None:
        self.name, self.log, self.fail, self.fill = name, log, fail, fill

    def _note(self, hook: str) -> None:
        self.log.append(f"{self.name} {hook}")
        if hook == self.fail:
            raise ValueError(f"{self.name} broke")

    def on_train_begin(self, ctx: TrainContext) -> None:
        self._note("begin")

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        self._note("epoch")

    def on_train_end(self, ctx: TrainContext) -> None:
        self._note("end")
        if self.fill is not None:
            ctx.model.net.w[...] = jnp.full_like(ctx.model.net.w[...], self.fill)


def test_hooks_run_in_order_and_last_is_refreshed_at_the_end(tmp_path: Path) -> None:
    """nnx:B001 nnx:B004 nnx:B005 (3 epochs and the refresh make generation 4; only LAST holds the 7.0)"""
    log: list[str] = []
    run = fit(tmp_path, Slope(), slope, steps(1), n_epochs=3, callbacks=[Noting("A", log, fill=7.0), Noting("B", log)])
    assert log == ["A begin", "B begin", *["A epoch", "B epoch"] * 3, "B end", "A end"]
    assert run.last is not None
    assert run.last.generation == 4
    assert weight(run) == [7.0]
    assert weight(run, "BEST") == pytest.approx([0.3])


def test_a_hook_that_raises_ends_the_run_and_every_callback_that_began(tmp_path: Path) -> None:
    """nnx:B010 nnx:B011"""
    log: list[str] = []
    with pytest.raises(ValueError, match="B broke"):
        fit(
            tmp_path / "runs", Slope(), slope, steps(1),
            callbacks=[Noting("A", log), Noting("B", log, fail="epoch"), Noting("C", log)],
        )  # fmt: skip
    assert log == ["A begin", "B begin", "C begin", "A epoch", "B epoch", "C end", "B end", "A end"]
    log.clear()
    with pytest.raises(ValueError, match="B broke"):
        fit(
            tmp_path / "runs", Slope(), slope, steps(1),
            callbacks=[Noting("A", log), Noting("B", log, fail="begin"), Noting("C", log)],
        )  # fmt: skip
    assert log == ["A begin", "B begin", "A end"]


def test_every_cleanup_is_tried_and_none_hides_the_first_error(tmp_path: Path) -> None:
    """nnx:B012 nnx:B013 (after a failed cleanup LAST is the epoch's commit, not a refreshed one)"""
    log: list[str] = []
    broken = [Noting("A", log, fail="end"), Noting("B", log, fail="end")]
    with pytest.warns(RuntimeWarning, match="on_train_end failed") as seen, pytest.raises(Killed):
        fit(tmp_path, Slope(), slope, steps(1), callbacks=[*broken, KillAt("on_epoch_begin")])
    assert [str(warning.message)[-7:] for warning in seen] == ["B broke", "A broke"]
    with pytest.warns(RuntimeWarning, match="A broke"), pytest.raises(ValueError, match="B broke"):
        fit(tmp_path, Slope(), slope, steps(1), callbacks=broken)
    run = only_run(tmp_path)
    assert run.last is not None
    assert (run.last.generation, run.status) == (1, "interrupted")
    assert log.count("A end") == log.count("B end") == 2


def test_a_callback_may_end_the_run_after_an_epoch(tmp_path: Path) -> None:
    """nnx:B009 (epoch 0 of 5 is committed, there is no epoch 1)"""
    run = fit(
        tmp_path, Slope(), slope, steps(2), n_epochs=5,
        callbacks=[Watch("on_epoch_end", lambda ctx: setattr(ctx, "should_stop", True))],
    )  # fmt: skip
    assert run.last is not None
    assert (run.last.epoch, run.last.step, run.status) == (0, 2, "finished")
    assert column(run, "epoch", "epoch") == [0]


def test_a_loader_that_runs_dry_is_an_error_in_its_second_epoch(tmp_path: Path) -> None:
    """case:L07 nnx:B015 nnx:B018 (a generator has no second epoch; the first one stays committed)"""
    batch = (np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
    one_shot = iter([batch, batch])
    with pytest.raises(DataError, match="epoch 1.*one-shot"):
        fit(tmp_path, Target(), half, None, train_loader=one_shot, steps_per_epoch=2, n_epochs=2)
    run = only_run(tmp_path)
    assert run.last is not None
    assert (run.last.epoch, run.last.step) == (0, 2)
    loader = Batches([batch, batch])
    with pytest.raises(Killed):
        fit(
            tmp_path / "b",
            Target(),
            half,
            None,
            train_loader=loader,
            n_epochs=3,
            callbacks=[KillAt("on_epoch_begin", 3)],
        )
    again = Batches([batch, batch])
    fit(tmp_path / "b", Target(), half, None, train_loader=again, n_epochs=3)
    assert loader.epochs == [0, 1]
    assert again.epochs[-1] == 2


# -- masks and modes --------------------------------------------------------------------------------------------


class Parts(nnx.Module):
    """Everything that decay may or may not touch, all ones."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(2, 2, rngs=rngs)
        self.ln_1 = nnx.LayerNorm(2, rngs=rngs)
        self.embed = nnx.Embed(3, 2, rngs=rngs)
        for _, variable in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            variable.set_value(jnp.ones_like(variable.get_value()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.ln_1(self.dense(x))


def nothing(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss without a gradient."""
    return 0.0 * jnp.sum(outputs, axis=-1)


def test_decay_leaves_biases_and_norms_alone(tmp_path: Path) -> None:
    """case:K01 (a norm called ln_1 is found by what it is, not by its name: 0.99 is wrong)"""
    data = gradients((1, 2))
    optim = {"kind": "adamw", "momentum": None, "weight_decay": 0.1}
    kept = arrays(fit(tmp_path, Parts(), nothing, data, optim=optim))
    expected = {
        "dense.kernel": 0.99, "dense.bias": 1.0, "ln_1.scale": 1.0, "ln_1.bias": 1.0, "embed.embedding": 0.99,
    }  # fmt: skip
    for name, value in expected.items():
        assert kept[f"params/{name}"] == pytest.approx(np.full_like(kept[f"params/{name}"], value), abs=1e-7), name
    with pytest.raises(ConfigError, match=r"kernels\.\*"):
        fit(tmp_path / "none", Parts(), nothing, data, optim={**optim, "decay_mask": ["kernels.*"]})
    assert not (tmp_path / "none").exists()


class Two(nnx.Module):
    """Two weights, each with its own gradient."""

    def __init__(self) -> None:
        self.a, self.b = nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:, :1] * self.a[...], x[:, 1:] * self.b[...]], axis=1)


def test_a_frozen_weight_is_nowhere_in_the_update(tmp_path: Path) -> None:
    """case:K02 nnx:B016 (not in the norm, which would be 5; no moments, no decay; also after a resume)"""
    more: dict[str, Any] = {
        "optim": {"kind": "adamw", "momentum": None, "weight_decay": 0.1, "decay_mask": "all", "grad_clip_norm": 1.0},
        "model": {"freeze": ("a",)},
        "n_epochs": 2,
    }
    with pytest.raises(Killed):
        fit(tmp_path, Two(), slope, gradients((3, 4)), callbacks=[KillAt("on_epoch_begin", 2)], **more)
    run = fit(tmp_path, Two(), slope, gradients((3, 4)), **more)
    assert run.id == only_run(tmp_path).id
    assert column(run, "update", "grad_norm") == [4.0, 4.0]
    kept = arrays(run)
    assert kept["frozen/a"].tobytes() == np.ones(1, np.float32).tobytes()
    assert kept["params/b"] != [1.0]
    assert not [name for name in kept if name.startswith("opt_state") and name.endswith("/a")]
    assert [name for name in kept if name.startswith("opt_state") and name.endswith("/b")]
    with pytest.raises(ModelError, match="no parameter is left to train"):
        fit(tmp_path / "all", Two(), slope, gradients((3, 4)), model={"freeze": ("*",)})
    assert not (tmp_path / "all").exists()


class Norm(nnx.Module):
    """One batch norm over one feature."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


def test_batch_norm_never_sees_a_batch_of_one_or_padding(tmp_path: Path) -> None:
    """case:E02 case:E03 (two zero rows of padding would give mean 0.3 and variance 1.85)"""
    with pytest.raises(DataError, match=r"9 rows in batches of 4 leave a batch of one.*tail: drop"):
        fit(tmp_path / "one", Norm(), nothing, gradients(*range(9)), data={"batch_size": 4})
    assert not (tmp_path / "one").exists()
    run = fit(tmp_path, Norm(), nothing, gradients(7, 5), data={"batch_size": 4}, optim={"max_lr": 0.0})
    kept = arrays(run)
    assert kept["model_state/norm.mean"] == pytest.approx([0.6], abs=1e-6)
    assert kept["model_state/norm.var"] == pytest.approx([1.0], abs=1e-6)


def modes(net: nnx.Module) -> list[Any]:
    """The train/eval flags of a module's layers."""
    return [
        (getattr(part, "deterministic", None), getattr(part, "use_running_average", None))
        for _, part in nnx.iter_modules(net)
    ]


EIGHT: dict[str, Any] = {"max_steps": 8, "scheduler": {"kind": "constant"}}
"""8 updates of a net with dropout and batch norm."""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> NNRun:
    """Scored after every third update; the modes of the module are the same afterwards."""
    model = helpers.model()
    model.build(helpers.dataset().info, 0)
    before = modes(model.net)
    run = helpers.fit(tmp_path_factory.mktemp("scored"), of=model, eval_every_n_steps=3, **EIGHT)
    assert modes(model.net) == before
    return run


def test_validation_leaves_training_alone(tmp_path: Path, scored: NNRun) -> None:
    """case:E07 (a net left in its evaluation mode trains on without dropout)"""
    blind = helpers.fit(tmp_path, data=helpers.data_params(val=None), **EIGHT)
    one, two = helpers.stored(scored), helpers.stored(blind)
    names = [name for name in one if name.startswith(("params/", "model_state/", "opt_state/", "rng"))]
    assert len(names) > 10
    for name in names:
        assert one[name].tobytes() == two[name].tobytes(), name


def test_a_run_stopped_inside_a_validation_goes_on_training(tmp_path: Path, scored: NNRun) -> None:
    """case:E08 (dropout is on in the first update after the resume: every loss is the straight run's)"""
    with pytest.raises(Killed):
        helpers.fit(tmp_path, eval_every_n_steps=3, callbacks=[KillAt("on_validation", 3)], **EIGHT)
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert 0 < stopped.last.step < 8
    helpers.assert_same_run(scored, helpers.fit(tmp_path, eval_every_n_steps=3, **EIGHT))


class Counting(nnx.Module):
    """Counts its calls in an integer variable and notes what its input looks like."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))
        self.calls = nnx.Variable(jnp.int32(0))
        self.seen: tuple[str, ...] = ()

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return x.astype(jnp.float32) * self.w[...]


def test_integers_stay_integers(tmp_path: Path) -> None:
    """case:L09 (an int variable is state, not a weight: no gradient, no decay, no moment)"""
    data = ArrayDataset(x=np.array([[250], [250], [10]], np.uint8), y=np.ones((3, 1), np.float32))
    optim = {"kind": "adamw", "momentum": None, "weight_decay": 0.5, "decay_mask": "all"}
    run = fit(tmp_path, Counting(), slope, data, data={"batch_size": 2}, optim=optim)
    kept = arrays(run)
    assert kept["model_state/calls"] == 2
    assert kept["model_state/calls"].dtype == np.int32
    assert not [name for name in kept if name.startswith("opt_state") and "calls" in name]
    # 250 + 250 in uint8 is 244; the batch's mean gradient is 250, the padded one's 10
    assert column(run, "update", "grad_norm") == [250.0, 10.0]


# -- counts -----------------------------------------------------------------------------------------------------

PLATEAU = NNSchedulerParams(kind="reduce_on_plateau", patience=0, cooldown=0, factor=0.5)


@pytest.mark.parametrize(
    "dispatch, scheduler, programs",
    [("auto", PLATEAU, {"span_resident": 1}), ("step", RISING, {"micro": 1, "apply": 1})],
)
def test_the_step_is_compiled_once_a_process(
    tmp_path: Path, engines: list[FlaxEngine], dispatch: str, scheduler: NNSchedulerParams, programs: dict[str, int]
) -> None:
    """case:L13 case:L14 (padded rows, short windows, a rate that moves, skipped updates, and a resume)"""
    more: dict[str, Any] = {
        "val": gradients(1, 1, 1), "accumulate": 2, "data": {"batch_size": 2}, "n_epochs": 3, "dispatch": dispatch,
        "scheduler": scheduler, "eval_every_n_steps": 1, "nonfinite": "skip", "optim": {"max_lr": 1.0},
        "checkpoint": {"every_n_steps": 1},
    }  # fmt: skip
    data = steps(11)
    with pytest.raises(Killed):
        fit(tmp_path, Slope(), slope, data, callbacks=[KillAt("on_validation", 5)], **more)
    run = fit(tmp_path, Slope(), slope, data, **more)
    assert [engine.programs.watch.compiles for engine in engines] == [programs] * 2
    assert [engine.programs.watch.check() for engine in engines] == [[], []]
    assert [engine.scorer._evaluator.watch.compiles for engine in engines] == [{"evaluate_resident": 1}] * 2
    rates = column(run, "update", "lr")
    assert len(set(rates)) > 1
    assert weight(run) == pytest.approx([sum(rates)], rel=1e-6)  # the rates in the log are the ones that were used


def test_a_ragged_tail_costs_one_more_compile_only_where_it_is_kept_short(
    tmp_path: Path, engines: list[FlaxEngine]
) -> None:
    """case:L15 (10 full batches and one of 1, two epochs; the numbers are the same)"""
    data = targets(*np.linspace(-1, 1, 41).tolist())
    more: dict[str, Any] = {"val": data, "n_epochs": 2}
    padded = fit(tmp_path, Target(), half, data, data={"batch_size": 4}, **more)
    with pytest.warns(RecompileWarning, match=r"apply is compiled again \(2\).*float32\[4\] -> float32\[1\]"):
        kept = fit(tmp_path, Target(), half, data, data={"batch_size": 4, "tail": "keep"}, **more)
    assert [sum(engine.programs.watch.compiles.values()) for engine in engines] == [1, 2]
    assert column(kept, "update", "train_loss") == pytest.approx(column(padded, "update", "train_loss"), rel=1e-5)
    assert column(kept, "epoch", "val_loss") == pytest.approx(column(padded, "epoch", "val_loss"), rel=1e-5)


class Reads:
    """Counts reads of device arrays by the host.

    A conversion goes through `_value`; numpy reads an array of the CPU through its buffer, so numpy is asked as well.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(ArrayImpl, "_value", property(self._counted(ArrayImpl._value.fget)))  # pyright: ignore
        for name in ("array", "asarray", "ascontiguousarray", "copy"):
            monkeypatch.setattr(np, name, self._counted(getattr(np, name)))

    def _counted(self, read: Any) -> Any:
        def counted(value: Any, *args: Any, **options: Any) -> Any:
            self.count += isinstance(value, jax.Array)
            return read(value, *args, **options)

        return counted


@pytest.mark.parametrize("dispatch", ["auto", "step"])
def test_nothing_is_read_from_the_device_between_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dispatch: str
) -> None:
    """case:L16 (100 updates, a log line every 10, the guard against NaN on: 10 reads of records, none in a span)"""
    reads, inside, spans, at = Reads(monkeypatch), [], [], []
    run_span, read_records = FlaxEngine.run_span, FlaxEngine.read_records

    def spy_span(self: FlaxEngine, *args: Any) -> Any:
        before = reads.count
        with jax.transfer_guard_device_to_host("disallow"):
            result = run_span(self, *args)
        inside.append(reads.count - before)
        spans.append(args[1].n_batches)
        return result

    def spy_read(self: FlaxEngine, *args: Any) -> Any:
        before = reads.count
        result = read_records(self, *args)
        at.append(reads.count - before)
        return result

    monkeypatch.setattr(FlaxEngine, "run_span", spy_span)
    monkeypatch.setattr(FlaxEngine, "read_records", spy_read)
    during: list[int] = []
    watch = [
        Watch("on_epoch_begin", lambda ctx: during.append(reads.count)),
        Watch("on_epoch_end", lambda ctx: during.append(reads.count)),
    ]
    fit(
        tmp_path, Slope(), slope, steps(100, bad=[41]), nonfinite="skip", log_every_n_steps=10, dispatch=dispatch,
        progress=Shown(), callbacks=watch,
    )  # fmt: skip
    assert sum(spans) == 100
    assert inside == [0] * len(spans)
    assert at == [1] * len(spans)
    # the update that was skipped moves the last log line by one microbatch: 11 spans
    assert len(spans) == 11
    assert during[1] - during[0] == 11
    assert reads.count > 11  # the counter counts: the checkpoint was read too


def test_memory_stays_flat(tmp_path: Path) -> None:
    """case:L12 (one array for each update and metric kept in a list: 100 more after 100)"""
    live: list[int] = []

    def count(ctx: TrainContext) -> None:
        gc.collect()
        live.append(len(jax.live_arrays()))

    run = fit(
        tmp_path, Slope(), slope, steps(25), n_epochs=4, record_every="batch", log_every_n_steps=5,
        callbacks=[Watch("on_epoch_end", count)], checkpoint={"every_n_epochs": None}, save_phase_checkpoints=False,
    )  # fmt: skip
    assert len(rows(run, "batch")) == 100
    assert len(set(live[1:])) == 1
    assert all(isinstance(value, float | int | str | None) for row in run.records for value in row.values())
