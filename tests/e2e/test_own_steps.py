"""Steps and validations of one's own in the place of the built-in ones, as whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, NonFiniteError, StepError
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.validation import EvalStepContext
from nnx_jax.hooks import MixedPrecisionHook
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams
from nnx_jax.runs.run import NNRun
from nnx_jax.step.own import TrainStepContext, default_train_step, finalize_step
from tests.e2e.helpers import assert_same_run, data_params, net_params, stored, train_params
from tests.e2e.own import HALVING, Two, climb, cross_entropy, rows_of, train, up
from tests.e2e.toys import Killed, Slope, column, fit, gradients, half, only_run, slope, steps, weight

ON_UPDATES = "optimizer_update"


def classes(runs: Path, step: Any = None, *, net: dict[str, Any] | None = None, **more: Any) -> NNRun:
    """The small classifier, with BatchNorm, dropout, clipping and a cosine unless told otherwise."""
    given = {name: more.pop(name) for name in ("callbacks", "checkpoint", "data", "eval_step_fn") if name in more}
    model = NNModel(net_params(**(net or {})), NNModelParams(metrics=more.pop("metrics", ("accuracy",))))
    return model.train(
        train_params(**more), train_step_fn=step, runs_dir=runs, progress=QuietProgress(),
        **{"data": data_params(), **given},
    )  # fmt: skip


def own(ctx: TrainStepContext) -> dict[str, Any]:
    """The built-in step written out, with noise of its own and a record."""

    def loss_fn(net: Any) -> tuple[jax.Array, Any]:
        loss = cross_entropy(ctx, net)
        return loss + 0.01 * jax.random.normal(ctx.rng) * jnp.sum(net.head.bias[...]), loss

    (_, loss), grads = ctx.value_and_grad(loss_fn, has_aux=True)
    ctx.update(grads)
    ctx.report_update()
    return {"loss": loss, "longest": jnp.max(jnp.abs(grads["head.bias"]))}


# -- the context ------------------------------------------------------------------------------------------------


def test_a_step_is_told_where_it_is(tmp_path: Path) -> None:
    """nnx:B037"""
    seen: list[Any] = []

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        seen.append((ctx.grad_clip_norm, ctx.accumulate_grad_batches, ctx.precision, list(ctx.extra_metrics)))
        before = {"epoch": ctx.epoch_idx, "at": ctx.batch_idx, "last": ctx.is_last_batch, "rate": ctx.lr}
        return {**climb(ctx), **before, "mask": (jnp.sum(ctx.mask), 1.0)}

    run = train(
        tmp_path, Slope(), rows_of(1, 1, 1, 1, 1), batch_size=2, accumulate=2, n_epochs=2, scheduler=HALVING,
        optim={"grad_clip_norm": 0.5}, record_every="batch", extra_metrics={"k": lambda outputs, batch: 0.0},
        given={"train_step_fn": step},
    )  # fmt: skip
    assert set(map(str, seen)) == {str((0.5, 2, "float32", ["k"]))}
    assert column(run, "batch", "train_epoch") == [0, 0, 0, 1, 1, 1]
    assert column(run, "batch", "train_at") == [0, 1, 2, 0, 1, 2]
    assert column(run, "batch", "train_last") == [0, 0, 1, 0, 0, 1]
    assert column(run, "batch", "train_mask") == [2, 2, 1, 2, 2, 1]
    assert column(run, "batch", "train_rate") == pytest.approx([0.1 * 0.5**n for n in range(6)])
    assert column(run, "batch", "lr") == pytest.approx([0.1 * 0.5**n for n in range(6)])
    # clipped from 1 to 0.5, an update of every microbatch
    assert weight(run) == pytest.approx([-0.5 * 0.1 * (2 - 0.5**5)])
    assert run.artifact is not None
    assert run.artifact["step"] == 6


@pytest.mark.slow
def test_a_step_by_hand_is_the_built_in_one_to_rounding(tmp_path: Path) -> None:
    """The same dropout masks and statistics; only where a mean is divided differs."""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        return finalize_step(lambda net: cross_entropy(ctx, net), ctx)

    more: dict[str, Any] = {"net": {"norm": None}, "scheduler": {"kind": "step", "step_size": 5}}
    one, two = classes(tmp_path, **more), classes(tmp_path, step, **more)
    assert column(two, "update", "train_loss") == pytest.approx(column(one, "update", "train_loss"), rel=1e-5)
    assert column(two, "update", "lr") == column(one, "update", "lr")
    for name in (name for name in stored(one) if name.startswith("params/")):
        assert stored(two)[name] == pytest.approx(stored(one)[name], abs=2e-6), name
    assert column(two, "epoch", "val_accuracy") == column(one, "epoch", "val_accuracy")


@pytest.mark.slow
def test_weights_stay_float32_under_bfloat16(tmp_path: Path) -> None:
    """A layer reads them rounded; what is kept of them is not, and a frozen one is the same array."""
    constant = {"scheduler": {"kind": "constant"}, "precision": "bfloat16", "n_epochs": 1}
    kept = stored(classes(tmp_path, own, **constant))
    for name in (name for name in kept if name.startswith(("params/layers", "params/head"))):
        rounded = np.asarray(jnp.asarray(kept[name]).astype(jnp.bfloat16).astype(jnp.float32))
        assert not np.array_equal(kept[name], rounded), name
    model = NNModel(net_params(), NNModelParams(freeze=("head.bias",)))
    more: dict[str, Any] = {"data": data_params(), "train_step_fn": climb_head, "runs_dir": tmp_path}
    run = model.train(train_params(**constant), progress=QuietProgress(), **more)
    assert not stored(run)["frozen/head.bias"].any()


def climb_head(ctx: TrainStepContext) -> dict[str, Any]:
    return finalize_step(lambda net: cross_entropy(ctx, net), ctx)


# -- the built-in step inside -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3])
def test_a_step_that_calls_the_built_in_one_is_the_run_without(tmp_path: Path, window: int) -> None:
    """nnx:B038 bit for bit: windows, clipping, BatchNorm, dropout, padding, schedule, rows."""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        return default_train_step(ctx)

    optim = {"accumulate_grad_batches": window}
    plain, delegating = classes(tmp_path / "a", optim=optim), classes(tmp_path / "b", step, optim=optim)
    assert_same_run(plain, delegating)
    assert plain.id != delegating.id


def test_what_is_written_after_the_built_in_step_is_kept_and_undone_where_the_run_halts(tmp_path: Path) -> None:
    """A projection after each update: weights are at most 0.15; the update with NaN leaves them as they were."""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        record = default_train_step(ctx)
        ctx.model.w.set_value(jnp.minimum(ctx.model.w[...], 0.15))
        ctx.model.w.set_value(jnp.where(ctx.batch_idx == 3, 9.0, ctx.model.w[...]))
        return record

    data, more = gradients(-1, -1, -1, -1, bad=[3]), {"given": {"train_step_fn": step}}
    run = train(tmp_path / "a", Slope(), gradients(-1, -1, -1), loss=slope, **more)
    assert weight(run) == pytest.approx([0.15])
    with pytest.raises(NonFiniteError, match="update 4"):
        train(tmp_path / "b", Slope(), data, loss=slope, **more)
    assert weight(only_run(tmp_path / "b")) == pytest.approx([0.15])


# -- updates and their reports ----------------------------------------------------------------------------------


def test_every_report_moves_the_schedule(tmp_path: Path) -> None:
    """nnx:B050"""
    halving = NNSchedulerParams(kind="step", clock=ON_UPDATES, step_size=2, factor=0.5)
    run = train(tmp_path, Slope(), rows_of(-1, -1, -1, -1), scheduler=halving, given={"train_step_fn": climb})
    assert column(run, "update", "lr") == pytest.approx([0.1, 0.1, 0.05, 0.05])
    assert weight(run) == pytest.approx([0.3])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"objective": up},
        {"train_step_fn": default_train_step},
        {"train_step_fn": lambda ctx: finalize_step(lambda net: ctx.mean(net(ctx.batch["x"])[:, 0]), ctx)},
        {"train_step_fn": climb},
    ],
    ids=["built in", "objective", "default_train_step", "finalize_step", "report_update"],
)
def test_whoever_reports_an_update_moves_the_schedule(tmp_path: Path, given: dict[str, Any]) -> None:
    """nnx:S14 nnx:S08 one rate an update, of the update engine with and without an objective, and of three steps."""
    run = train(tmp_path, Slope(), steps(3), loss=slope, scheduler=HALVING, given=given)
    assert column(run, "update", "lr") == pytest.approx([0.1, 0.05, 0.025])
    assert weight(run) == pytest.approx([0.175])


def test_several_reports_in_one_microbatch(tmp_path: Path) -> None:
    """Updates of one's own number: the schedule moves by both, events tell both, a step is counted once."""
    events: list[tuple[int, float, int]] = []

    class Hears(Callback):
        def on_optimizer_update(self, ctx: TrainContext, event: Any) -> None:
            events.append((event.update_idx, round(event.lr, 4), ctx.step))

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        climb(ctx)
        odd = ctx.batch_idx % 2 == 1
        _, grads = ctx.value_and_grad(lambda net: ctx.mean(net(ctx.batch["x"])[:, 0]))
        ctx.update(grads, when=odd)
        ctx.report_update(when=odd)
        return {"loss": jnp.float32(0)}

    given = {"train_step_fn": step, "callbacks": [Hears()]}
    run = train(tmp_path, Slope(), rows_of(-1, -1), scheduler=HALVING, optim={"max_lr": 0.4}, given=given)
    assert weight(run) == pytest.approx([0.4 + 0.2 + 0.1])
    assert [(update, step) for update, _, step in events] == [(1, 1), (2, 2), (3, 2)]
    assert column(run, "update", "step") == [1, 2]


def test_a_step_that_never_reports_warns_each_epoch(tmp_path: Path) -> None:
    """nnx:B049 the weights move, the schedule stands, nothing counts as an update; max_steps would never end."""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        loss, grads = ctx.value_and_grad(lambda net: ctx.mean(net(ctx.batch["x"])[:, 0]))
        ctx.update(grads)
        return {"loss": loss}

    given = {"train_step_fn": step}
    with pytest.warns(UserWarning, match="no update of 'main' was reported in epoch") as told:
        run = train(tmp_path, Slope(), rows_of(-1, -1), scheduler=HALVING, n_epochs=3, given=given)
    assert [str(each.message).split("epoch ")[1][0] for each in told] == ["0", "1", "2"]
    assert weight(run) == pytest.approx([0.6])
    assert column(run, "update", "step") == [0] * 6
    with pytest.raises(ConfigError, match="max_steps: .*reports no update"):
        train(tmp_path, Slope(), rows_of(-1), max_steps=3, given=given)

    def never(ctx: TrainStepContext) -> dict[str, Any]:
        ctx.report_update(when=ctx.batch_idx < 0)
        return {"loss": jnp.float32(0)}

    reports, seldom = pytest.warns(UserWarning, match="no update of 'main'"), CheckpointParams(every_n_epochs=None)
    with reports, pytest.raises(StepError, match=r"no update in the last 100 .*report_update\(\)"):
        data, given = rows_of(*[1] * 10), {"train_step_fn": never, "checkpoint": seldom}
        train(tmp_path, Slope(), data, max_steps=3, scheduler=HALVING, given=given)


def test_a_schedule_that_ends_needs_its_length_and_keeps_it(tmp_path: Path) -> None:
    """nnx:B052 nnx:B054 (8 reports, 4 steps)"""
    data, given = steps(8), {"train_step_fn": climb}
    open_end = NNSchedulerParams(kind="one_cycle", clock=ON_UPDATES)
    with pytest.raises(ConfigError, match="length of this run is not known beforehand; give total_steps"):
        train(tmp_path, Slope(), data, scheduler=open_end, given=given)
    assert not list(tmp_path.iterdir())
    assert train(tmp_path / "a", Slope(), data, loss=slope, scheduler=open_end).status == "finished"
    with pytest.raises(ValueError, match="one_cycle ends after 4 updates.*update 5"):
        train(tmp_path / "b", Slope(), data, scheduler=open_end.replace(total_steps=4), given=given)
    assert not list((tmp_path / "b").glob("*/checkpoints/LAST"))


def test_a_scaler_that_skips_moves_no_schedule(tmp_path: Path) -> None:
    """nnx:B048 nnx:S13 float16 overflows at scales 65536 and 32768; the two updates after those use r and r/2."""
    hook = MixedPrecisionHook("float16", init_scale=65536.0, growth_interval=1000)
    data = gradients(-3.0, -3.0, -1.0, -1.0)
    run = fit(tmp_path, Slope(), slope, data, hooks=[hook], scheduler=HALVING)
    assert column(run, "update", "skipped") == [1, 1, 0, 0]
    assert [rate for rate in column(run, "update", "lr") if rate is not None] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_what_is_not_finite_undoes_the_whole_microbatch(tmp_path: Path, policy: str) -> None:
    """nnx:B042 (finalize_step: FloatingPointError) Of two updates the second has a NaN gradient: both are undone."""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        record = finalize_step(lambda net: ctx.mean(net.a(ctx.batch["x"])[:, 0]), ctx)
        bad = jnp.where(ctx.batch_idx == 1, jnp.nan, 1.0)
        grads = {"a.w": jnp.zeros(1), "b.w": bad * jnp.ones(1)}
        ctx.update(grads)
        ctx.report_update()
        return {**record, "b": ctx.model.b.w[0]}

    data, more = rows_of(-1, -1, -1), {"nonfinite": policy, "given": {"train_step_fn": step}}
    if policy == "fail":
        with pytest.raises(FloatingPointError, match=r"update 2, microbatch 1: the gradient of 'b\.w'"):
            train(tmp_path, Two(), data, **more)
        kept = stored(only_run(tmp_path))
        assert (kept["params/a.w"], kept["params/b.w"]) == (pytest.approx([0.1]), pytest.approx([-0.1]))
        assert kept["opt_state/count"] == 2
    else:
        kept = stored(run := train(tmp_path, Two(), data, **more))
        assert (kept["params/a.w"], kept["params/b.w"]) == (pytest.approx([0.2]), pytest.approx([-0.2]))
        assert column(run, "update", "skipped") == [0, 1, 0]


# -- the whole run ----------------------------------------------------------------------------------------------


def test_a_resume_inside_an_epoch_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Noise, dropout, BatchNorm, records and the count of reports."""

    class Dies(Callback):
        def on_optimizer_update(self, ctx: TrainContext, event: Any) -> None:
            if event.update_idx == 9:
                raise Killed

    more: dict[str, Any] = {"scheduler": {"kind": "step", "clock": ON_UPDATES, "step_size": 4}}
    more["checkpoint"] = CheckpointParams(every_n_steps=4)
    whole = classes(tmp_path / "whole", own, **more)
    with pytest.raises(Killed):
        classes(tmp_path / "cut", own, callbacks=[Dies()], **more)
    stopped = only_run(tmp_path / "cut")
    assert stopped.last is not None
    assert stopped.last.step == 8  # 6 batches an epoch
    assert_same_run(whole, classes(tmp_path / "cut", own, **more))


def test_one_compile_and_one_read_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, a moving rate and validations; the record of every microbatch comes with the one read."""
    engines: list[FlaxEngine] = []
    reads: list[int] = []

    class Noted(FlaxEngine):
        def read_records(self, state: Any) -> Any:
            engines.append(self)
            found = super().read_records(state)
            reads.append(sum(len(records) for records in found[0]))
            return found

    monkeypatch.setattr("nnx_jax.fit.framework.Framework.engine_class", Noted)
    classes(tmp_path, own, scheduler={"kind": "step", "clock": ON_UPDATES, "step_size": 4})
    assert reads == [6, 6, 6]
    assert engines[0].programs.watch.compiles == {"span_resident": 1}
    assert engines[0].programs.watch.check() == []


# -- validations of one's own -----------------------------------------------------------------------------------


def test_a_validation_of_ones_own_is_the_epochs(tmp_path: Path) -> None:
    """nnx:B039 once an epoch, every value in memory and after reload; nothing it does to the model is kept."""
    calls: list[int] = []

    def judge(ctx: EvalStepContext) -> dict[str, Any]:
        calls.append(ctx.epoch_idx)
        outputs = [np.asarray(ctx.model(batch["x"]))[batch["mask"] > 0] for batch in ctx.val_loader]
        ctx.model.w.set_value(jnp.full(1, 99.0))
        found = ctx.evaluate()
        extra = {"rows": sum(map(len, outputs)), "worst": float("inf"), "built_in": found["loss"]}
        return {"loss": np.concatenate(outputs).mean(), "mae": None, "extra": extra}

    val = gradients(1, 2, 3)
    run = train(
        tmp_path, Slope(), gradients(-1, -1), loss=half, val=val, batch_size=2, n_epochs=3,
        model={"metrics": ("mae",)}, given={"eval_step_fn": judge},
    )  # fmt: skip
    assert calls == [0, 1, 2]
    weights = [-0.1, -0.19, -0.271]  # the gradient of half is (-w - 1) * -1
    assert column(run, "epoch", "val_loss") == pytest.approx([2 * w for w in weights])
    assert column(run, "epoch", "val_built_in") == pytest.approx(
        [np.mean([0.5 * (w * x - 1) ** 2 for x in (1, 2, 3)]) for w in weights]
    )
    assert column(run, "epoch", "val_rows") == [3.0] * 3
    assert column(run, "epoch", "val_worst") == [float("inf")] * 3
    assert column(run, "epoch", "val_mae") == [None] * 3
    assert NNRun.load(run.id, tmp_path).records == run.records
    assert weight(run) == pytest.approx([weights[-1]])


def test_without_validation_data_it_is_never_called(tmp_path: Path) -> None:
    """nnx:B040"""

    def judge(ctx: EvalStepContext) -> dict[str, Any]:
        raise AssertionError

    run = train(tmp_path, Slope(), rows_of(1), n_epochs=2, given={"eval_step_fn": judge, "train_step_fn": climb})
    assert [name for name in run.records[-1] if name.startswith("val_")] == []
    monitor = {"metric": "gap", "mode": "min"}
    with pytest.raises(ConfigError, match="no validation data"):
        train(tmp_path, Slope(), rows_of(1), monitor=monitor, given={"eval_step_fn": judge, "train_step_fn": climb})


def test_a_monitor_of_what_a_validation_returns(tmp_path: Path) -> None:
    """BEST follows it, and a value that is missing this time is no improvement; a name that is not there is told."""
    gaps = [3.0, None, 2.0, 5.0]

    def judge(ctx: EvalStepContext) -> dict[str, Any]:
        return {"gap": gaps[ctx.epoch_idx]}

    more: dict[str, Any] = {"val": rows_of(1), "n_epochs": 4, "given": {"train_step_fn": climb, "eval_step_fn": judge}}
    with pytest.warns(RuntimeWarning, match="val_gap is missing"):
        run = train(tmp_path / "a", Slope(), rows_of(1), monitor={"metric": "gap", "mode": "min"}, **more)
    assert column(run, "epoch", "monitor") == gaps
    assert column(run, "epoch", "improved") == [1, 0, 1, 0]
    with pytest.raises(StepError, match="returned no 'gab', which a monitor follows.*did you mean 'gap'"):
        train(tmp_path / "b", Slope(), rows_of(1), monitor={"metric": "gab", "mode": "min"}, **more)


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (3.0, "returned float; return a record"),
        ({"loss": np.ones(2)}, "a recorded value is one number"),
        ({"loss": 1.0, "extra": {"loss": 2.0}}, "returned 'loss' twice"),
    ],
)
def test_a_validation_returns_numbers_by_name(tmp_path: Path, returned: Any, match: str) -> None:
    given = {"train_step_fn": climb, "eval_step_fn": lambda ctx: returned}
    with pytest.raises(StepError, match=match):
        train(tmp_path, Slope(), rows_of(1), val=rows_of(1), given=given)
