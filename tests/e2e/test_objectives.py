"""Objectives as whole runs: the arithmetic of their windows, what they record, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, NonFiniteError, StepError
from nnx_jax.data import ArrayDataset
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.components import ComponentSpec
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.loop.updates import UpdateEvent
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult, supervised_objective
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.train import CheckpointParams
from nnx_jax.runs.run import NNRun
from tests.e2e.helpers import assert_same_run, data_params, dataset, net_params, stored, train_params
from tests.e2e.own import rows_of, train, up
from tests.e2e.toys import KillAt, Killed, Slope, column, only_run, rows, weight


def classes(runs: Path, objective: Any = None, *, net: dict[str, Any] | None = None, **more: Any) -> NNRun:
    """The small classifier, with BatchNorm, dropout, clipping and a cosine."""
    given = {name: more.pop(name) for name in ("callbacks", "checkpoint", "data", "hooks") if name in more}
    model = NNModel(net_params(**(net or {})), NNModelParams(metrics=("accuracy",)))
    return model.train(
        train_params(**more), objective=objective, runs_dir=runs, progress=QuietProgress(),
        **{"data": data_params(), **given},
    )  # fmt: skip


def cross_entropy(ctx: ObjectiveContext) -> ObjectiveResult:
    """The built-in loss, written out."""
    outputs = ctx.apply()
    rows = optax.softmax_cross_entropy_with_integer_labels(outputs, ctx.batch["y"])
    return ObjectiveResult(ctx.mean("cross_entropy", rows), outputs=outputs)


# -- the arithmetic ---------------------------------------------------------------------------------------------


def data_of_three(rows: int = 11) -> ArrayDataset:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return ArrayDataset(x=x, y=rng.normal(size=rows).astype(np.float32), count=np.arange(1, rows + 1, dtype=np.float32))


def three_terms(w: Any, x: Any, y: Any, count: Any, mask: Any) -> dict[str, tuple[Any, Any, float]]:
    """name -> (numerator, denominator, weight) of linear outputs: two means of unequal denominators, and a sum."""
    out = x @ w
    return {
        "fit": ((mask * (out - y) ** 2).sum(), mask.sum(), 1.0),
        "counted": ((mask * count * out).sum(), (mask * count).sum(), 0.5),
        "size": (0.01 * (mask * out**2).sum(), None, 2.0),
    }


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array([0.5, -0.25, 0.125], jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def of_three(ctx: ObjectiveContext) -> ObjectiveResult:
    batch = ctx.batch
    found = three_terms(ctx.model.w[...], batch["x"], batch["y"], batch["count"], ctx.mask)
    reduction = {name: "sum" if bottom is None else "mean" for name, (_, bottom, _) in found.items()}
    terms = [LossTerm(name, *parts[:2], reduction[name], parts[2]) for name, parts in found.items()]  # type: ignore[arg-type]
    return ObjectiveResult(terms)


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_is_the_gradient_of_its_sums(tmp_path: Path, window: int) -> None:
    """nnx:S18 nnx:S19 against float64 numpy by hand: batches of 2, 2, ..., 1 rows in windows; clipped, then descent.

    Every mean is divided once by what its denominators add up to over the window, the sum term by nothing.
    """
    data = data_of_three()
    run = train(
        tmp_path, Linear(), data, batch_size=2, accumulate=window, n_epochs=2, optim={"grad_clip_norm": 0.7},
        given={"objective": of_three},
    )  # fmt: skip
    columns = {name: np.asarray(column, np.float64) for name, column in (data.arrays() or {}).items()}
    w, losses, norms = np.array([0.5, -0.25, 0.125]), [], []
    for first in list(range(0, 11, 2 * window)) * 2:
        x, y, count = (columns[name][first : first + 2 * window] for name in ("x", "y", "count"))
        terms = three_terms(w, x, y, count, np.ones(len(x)))
        losses.append(sum(weight * top / (bottom or 1.0) for top, bottom, weight in terms.values()))
        out = x @ w
        grad = 2 * (out - y) @ x / len(x) + 0.5 * count @ x / count.sum() + 2.0 * 0.01 * 2 * out @ x
        norms.append(np.sqrt(grad @ grad))
        w = w - 0.1 * grad * min(1.0, 0.7 / norms[-1])
    assert weight(run) == pytest.approx(w, rel=2e-6)
    assert column(run, "update", "train_loss") == pytest.approx(losses, rel=2e-6)
    assert column(run, "update", "grad_norm") == pytest.approx(norms, rel=2e-6)
    assert max(norms) > 0.7  # or nothing was clipped


@pytest.mark.filterwarnings("ignore::nnx_jax.step.watch.RecompileWarning")  # batches of three sizes
@pytest.mark.parametrize("objective", [None, supervised_objective()], ids=["none", "own"])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.slow
def test_batches_of_4_1_and_5_are_one_of_10(tmp_path: Path, objective: Any, ignored: bool) -> None:
    """nnx:B083 nnx:B084 (labels -100 are ignored, and classes have weights) to 2e-8, or the last bit."""
    columns = dataset(10).arrays() or {}
    x, y, loss = columns["x"], np.array(columns["y"]), {"kind": "cross_entropy"}
    if ignored:
        y[[0, 1, 4, 8]] = -100
        loss |= {"class_weights": [0.2, 1.0, 3.0]}
    net = net_params(norm=None, dropout_prob=0.0, output_dim=3)

    def fit(runs: Path, *batches: Any) -> dict[str, np.ndarray]:
        model = NNModel(net, NNModelParams(loss=loss))
        optim = {"kind": "sgd", "max_lr": 0.1, "momentum": 0.0, "accumulate_grad_batches": len(batches)}
        params = train_params(optim=optim, n_epochs=1, scheduler={"kind": "constant"}, train_loader=batches)
        return stored(model.train(params, objective=objective, runs_dir=runs, progress=QuietProgress()))

    one, many = fit(tmp_path, (x, y)), fit(tmp_path, (x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:], y[5:]))
    for name in (name for name in one if name.startswith("params/")):
        assert many[name] == pytest.approx(one[name], rel=1e-7, abs=2e-8), name
    assert one["opt_state/count"] == many["opt_state/count"] == 1
    assert not np.allclose(one["params/head.bias"], 0)


@pytest.mark.parametrize(
    ("objective", "more"),
    [
        (supervised_objective(), {"optim": {"accumulate_grad_batches": 3}}),
        (supervised_objective("cross_entropy"), {"precision": "bfloat16"}),
        (cross_entropy, {"net": {"norm": None}}),
    ],
)
@pytest.mark.slow
def test_the_models_own_loss_as_an_objective_is_the_run_without(
    tmp_path: Path, objective: Any, more: dict[str, Any]
) -> None:
    """Bit for bit, with BatchNorm, dropout, padding, clipping and a schedule: weights, statistics, every row."""
    plain, own = classes(tmp_path / "plain", **more), classes(tmp_path / "own", objective, **more)
    if objective is cross_entropy:
        assert column(own, "update", "train_loss") == pytest.approx(column(plain, "update", "train_loss"), rel=1e-5)
        assert column(own, "epoch", "val_loss") == pytest.approx(column(plain, "epoch", "val_loss"), rel=1e-5)
        assert column(own, "epoch", "val_accuracy") == column(plain, "epoch", "val_accuracy")
    else:
        assert_same_run(plain, own)
    assert plain.id != own.id


# -- backward passes --------------------------------------------------------------------------------------------


def counted(log: list[str], name: str, gradient: float = 1.0) -> Callable[[Any], Any]:
    """The identity of arrays; its backward pass is noted, and multiplies by `gradient`."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    def backward(_: None, down: Any) -> tuple[Any]:
        jax.debug.callback(lambda: log.append(name))
        return (down * gradient,)

    same.defvjp(lambda x: (x, None), backward)
    return same


@pytest.mark.parametrize("window", [1, 2])
def test_one_backward_pass_a_batch_and_none_of_weight_0(tmp_path: Path, window: int) -> None:
    """nnx:B095 the NaN gradient of the term without weight reaches nothing, and its value is recorded all the same."""
    log: list[str] = []
    counts, broken = counted(log, "terms"), counted(log, "weight 0", float("nan"))

    def objective(ctx: ObjectiveContext) -> ObjectiveResult:
        out = ctx.apply()[:, 0]
        shared = counts(out)
        terms = [ctx.mean("up", shared), ctx.mean("more", 2 * shared, weight=0.5)]
        return ObjectiveResult([*terms[: 3 - window], ctx.mean("watched", broken(out) + 7.0, weight=0.0)])

    run = train(tmp_path, Slope(), rows_of(-1, -1, -1, -1), accumulate=window, given={"objective": objective})
    jax.effects_barrier()
    assert log == ["terms"] * 4
    assert weight(run) == pytest.approx([0.8 if window == 1 else 0.2])
    assert all(np.isfinite(column(run, "update", "train_loss")))


# -- what it is told and what it records ------------------------------------------------------------------------


def test_the_context_tells_where_training_stands(tmp_path: Path) -> None:
    """Epoch and microbatch are values of the step, noise is another for every microbatch, and modes are real."""
    modes: list[bool] = []

    def objective(ctx: ObjectiveContext) -> ObjectiveResult:
        modes.append(ctx.train)
        draw = jax.random.uniform(ctx.rng)
        record = {"epoch": ctx.epoch_idx, "at": ctx.batch_idx, "draw": draw}
        return ObjectiveResult(ctx.mean("up", ctx.apply()[:, 0]), record)

    one = rows_of(1, 1, 1)
    run = train(tmp_path, Slope(), one, val=one, n_epochs=2, record_every="batch", given={"objective": objective})
    assert column(run, "batch", "train_epoch") == [0, 0, 0, 1, 1, 1]
    assert column(run, "batch", "train_at") == [0, 1, 2, 0, 1, 2]
    assert len(set(column(run, "batch", "train_draw"))) == 6
    assert len(set(column(run, "epoch", "val_draw"))) == 1
    assert set(modes) == {True, False}


def test_records_are_averaged_as_they_say(tmp_path: Path) -> None:
    """A number by microbatches, a pair by its counts, over windows and epochs: rows 1, 2 | 3, 4 | 5 in windows of 2."""

    def objective(ctx: ObjectiveContext) -> ObjectiveResult:
        x = ctx.batch["x"][:, 0] * ctx.mask
        record = {"number": jnp.sum(x), "pair": (jnp.sum(x), jnp.sum(ctx.mask))}
        return ObjectiveResult(ctx.mean("up", ctx.apply()[:, 0]), record)

    data = rows_of(1, 2, 3, 4, 5)
    run = train(
        tmp_path, Slope(), data, val=data, batch_size=2, accumulate=2, given={"objective": objective}
    )  # fmt: skip
    assert column(run, "update", "train_number") == [5.0, 5.0]  # (3 + 7) / 2, 5
    assert column(run, "update", "train_pair") == [2.5, 5.0]
    assert column(run, "epoch", "train_number") == column(run, "epoch", "val_number") == [5.0]
    assert column(run, "epoch", "train_pair") == column(run, "epoch", "val_pair") == [3.0]


def test_validation_scores_the_objective_or_the_loss(tmp_path: Path) -> None:
    """The objective itself over every row once, in evaluation mode; with `scores = "loss"` the model's loss instead."""

    class Doubled(Objective):
        def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
            return ObjectiveResult(ctx.mean("doubled", 2.0 * ctx.apply()[:, 0]))

    class Other(Doubled):
        scores = "loss"

    def mean_plus_1(outputs: Any, targets: Any) -> Any:
        return outputs[:, 0] + 1.0

    val = ArrayDataset(x=np.array([[1], [2], [6]], np.float32), y=np.zeros((3, 1), np.float32))
    more: dict[str, Any] = {"loss": mean_plus_1, "val": val, "batch_size": 2, "optim": {"max_lr": 0.0}}
    own = train(tmp_path, Slope(1.0), val, given={"objective": Doubled()}, **more)
    other = train(tmp_path, Slope(1.0), val, given={"objective": Other()}, **more)
    assert column(own, "epoch", "val_loss") == [pytest.approx(6.0)]
    assert column(other, "epoch", "val_loss") == [pytest.approx(4.0)]


@pytest.mark.parametrize(
    ("metric", "mode", "match"),
    [("gap", None, "better direction of 'gap' is not known"), ("gab", "max", "train_gab'.*did you mean 'train_gap'")],
)
def test_a_monitor_of_something_recorded(tmp_path: Path, metric: str, mode: str | None, match: str) -> None:
    """BEST follows a name that only the objective records; a wrong one is told with those there are, before a run."""

    def objective(ctx: ObjectiveContext) -> ObjectiveResult:
        gap = jnp.abs(ctx.epoch_idx - 1) * -1.0  # -1, 0, -1
        return ObjectiveResult(ctx.mean("up", ctx.apply()[:, 0]), {"gap": gap})

    data = rows_of(1)
    more: dict[str, Any] = {"n_epochs": 3, "given": {"objective": objective}}
    with pytest.raises(ConfigError, match=match):
        train(tmp_path, Slope(), data, monitor={"metric": metric, "split": "train", "mode": mode}, **more)
    assert not list(tmp_path.iterdir())
    run = train(tmp_path, Slope(), data, monitor={"metric": "gap", "split": "train", "mode": "max"}, **more)
    assert column(run, "epoch", "improved") == [1, 1, 0]
    assert run.checkpoint("BEST").epoch == 1


# -- what is refused --------------------------------------------------------------------------------------------


def returning(result: Any) -> Callable[[ObjectiveContext], Any]:
    return lambda ctx: result(ctx) if callable(result) else result


def result_of(ctx: ObjectiveContext, **more: Any) -> ObjectiveResult:
    return ObjectiveResult(ctx.mean("up", ctx.apply()[:, 0]), **more)


@pytest.mark.parametrize(
    ("objective", "error", "match"),
    [
        (lambda ctx: jnp.sum(ctx.apply()), TypeError, "return ObjectiveResult"),
        (lambda ctx: ObjectiveResult([]), ValueError, "at least one LossTerm"),
        (lambda ctx: result_of(ctx, record={"loss": 1.0}), ValueError, r"records \['loss'\]"),
        (lambda ctx: result_of(ctx, record={"wide": ctx.batch["x"]}), ValueError, "wide.*one number"),
        (lambda ctx: ObjectiveResult(ctx.mean("up", ctx.apply()[:, 0], weight=0.0)), StepError, "weight 0"),
    ],
    ids=["no result", "no terms", "a taken name", "an array", "no weight"],
)
def test_results_that_are_none(tmp_path: Path, objective: Any, error: type[Exception], match: str) -> None:
    """nnx:B093 (the first), all before there is a run"""
    with pytest.raises(error, match=match):
        train(tmp_path, Slope(), rows_of(1), given={"objective": objective})
    assert not list(tmp_path.iterdir())


def test_declared_metrics_need_outputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.metrics.*accuracy.*outputs="):
        classes(tmp_path, lambda ctx: ObjectiveResult(cross_entropy(ctx).terms))
    assert not list(tmp_path.iterdir())


def test_an_objective_may_refuse_a_run(tmp_path: Path) -> None:
    class Short(Objective):
        def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
            return up(ctx)

        def check_run(self, run: Any) -> None:
            if run.training.n_epochs > 1:
                raise ValueError("one epoch only")

    with pytest.raises(ValueError, match="one epoch only"):
        train(tmp_path, Slope(), rows_of(1), n_epochs=2, given={"objective": Short()})
    assert not list(tmp_path.iterdir())
    assert train(tmp_path, Slope(), rows_of(1), given={"objective": Short()}).status == "finished"


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_term_that_is_not_finite(tmp_path: Path, policy: str) -> None:
    """nnx:B087 of an objective: nothing is stepped; or that window is left out."""

    def rooted(ctx: ObjectiveContext) -> ObjectiveResult:
        return ObjectiveResult(ctx.mean("root", ctx.apply()[:, 0] + jnp.sqrt(ctx.batch["x"][:, 0])))

    objective, data = Objective(rooted, nonfinite=policy), rows_of(1, -1, 1)
    if policy == "fail":
        with pytest.raises(NonFiniteError, match="update 2, microbatch 1.*'root'"):
            train(tmp_path, Slope(), data, given={"objective": objective})
        stopped = only_run(tmp_path)
        assert (weight(stopped), len(rows(stopped, "update"))) == (pytest.approx([-0.1]), 1)
    else:
        run = train(tmp_path, Slope(), data, given={"objective": objective})
        assert weight(run) == pytest.approx([-0.2])
        assert column(run, "update", "skipped") == [0, 1, 0]


# -- going on ---------------------------------------------------------------------------------------------------


def watched(ctx: ObjectiveContext) -> ObjectiveResult:
    """Cross entropy with noise of its own, and a record."""
    found = cross_entropy(ctx)
    noise = jax.random.normal(ctx.rng, found.outputs.shape)
    return ObjectiveResult(
        [found.terms, ctx.mean("noise", jnp.mean(found.outputs * noise, axis=-1), weight=0.1)],  # type: ignore[list-item]
        {"size": jnp.mean(jnp.abs(found.outputs))},
        found.outputs,
    )


class DiesAt(Callback):
    """Dies when it hears of an update, which no commit holds yet."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_optimizer_update(self, ctx: TrainContext, event: UpdateEvent) -> None:
        if event.update_idx == self.update:
            raise Killed


def test_a_resume_inside_an_epoch_and_window_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed after update 3 of windows of 2 (6 batches an epoch), with BatchNorm, dropout, noise and records."""
    more: dict[str, Any] = {"optim": {"accumulate_grad_batches": 4}, "checkpoint": CheckpointParams(every_n_steps=1)}
    whole = classes(tmp_path / "whole", watched, **more)
    with pytest.raises(Killed):
        classes(tmp_path / "cut", watched, callbacks=[DiesAt(3)], **more)
    stopped = only_run(tmp_path / "cut")
    assert stopped.last is not None
    assert (stopped.last.step, stopped.last.epoch) == (2, 0)
    assert_same_run(whole, classes(tmp_path / "cut", watched, **more))


def test_updates_go_on_counting_or_begin_again(tmp_path: Path) -> None:
    """nnx:B094"""
    counts: list[int] = []

    class Counts(Callback):
        def on_optimizer_update(self, ctx: TrainContext, event: UpdateEvent) -> None:
            counts.append(event.update_idx)
            assert ctx.update_count == event.update_idx

    data, given = rows_of(1, 1), {"objective": up}
    first = train(tmp_path, Slope(), data, given=given)
    given = {**given, "callbacks": [Counts()]}
    goes_on = train(tmp_path, Slope(), data, resume_from_run_id=first.id, given=given)
    again = train(
        tmp_path, Slope(), data, resume_from_run_id=first.id, resume_mode="weights_only", salt="w", given=given
    )  # fmt: skip
    assert counts == [3, 4, 1, 2]
    assert [column(run, "update", "step") for run in (goes_on, again)] == [[3, 4], [1, 2]]
    assert weight(goes_on) == weight(again) == pytest.approx([-0.4])


def test_an_objective_with_state_is_a_component(tmp_path: Path) -> None:
    """Before the explicit ones; its state goes on after a kill, as what it was told of updates."""
    loaded: list[str] = []

    class Counting(Objective):
        def __init__(self) -> None:
            super().__init__(up)
            self.updates = 0

        def after_update(self, events: Any) -> None:
            self.updates += len(events)

        def component_spec(self) -> ComponentSpec:
            return ComponentSpec("counting")

        def component_state(self) -> dict[str, Any]:
            return {"updates": self.updates}

        def load_component_state(self, state: Any, *, version: int) -> None:
            self.updates = state["updates"]
            loaded.append(self.component_spec().name)

    class Explicit(Counting):
        def component_spec(self) -> ComponentSpec:
            return ComponentSpec("explicit")

    def fit(objective: Objective, *callbacks: Any) -> NNRun:
        given = {"objective": objective, "callbacks": callbacks, "components": [Explicit()]}
        return train(tmp_path, Slope(), rows_of(1, 1, 1), n_epochs=2, given=given)

    with pytest.raises(Killed):
        fit(Counting(), KillAt("on_epoch_begin", 2))
    again = Counting()
    fit(again)
    assert again.updates == 6
    assert loaded == ["counting", "explicit"]


def test_only_an_objective_that_listens_costs_reads(tmp_path: Path) -> None:
    """One read an epoch, with the updates of all of it; one each where `after_update` is overridden; same rows."""

    class Listens(Objective):
        def after_update(self, events: Any) -> None:
            pass

    class Reads(Callback):
        def __init__(self) -> None:
            self.reads: list[int] = []

        def on_updates(self, ctx: TrainContext, events: Any) -> None:
            self.reads.append(len(events))

    runs, found = [], []
    for number, objective in enumerate((up, Objective(up), Listens(up))):
        reads = Reads()
        given = {"objective": objective, "callbacks": [reads]}
        runs.append(train(tmp_path / str(number), Slope(), rows_of(1, 2, 3, 4), n_epochs=2, given=given))
        found.append(reads.reads)
    assert found == [[4, 4], [4, 4], [1] * 8]
    assert runs[0].records == runs[1].records == runs[2].records


# -- frozen parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [None, supervised_objective()], ids=["none", "own"])
def test_frozen_parameters_stay(tmp_path: Path, objective: Any) -> None:
    """Frozen before training under both alike; while it trains, freezing is refused, since it would do nothing."""

    class Freezes(Callback):
        def on_epoch_end(self, ctx: TrainContext) -> None:
            ctx.model.freeze("head")

    model = NNModel(net_params(norm=None), NNModelParams(freeze=("layers.0.bias",)))
    more: dict[str, Any] = {"data": data_params(), "objective": objective, "progress": QuietProgress()}
    run = model.train(train_params(n_epochs=2), runs_dir=tmp_path, **more)
    plain = NNModel(net_params(norm=None), NNModelParams(freeze=("layers.0.bias",)))
    same = plain.train(train_params(n_epochs=2), runs_dir=tmp_path / "plain", **{**more, "objective": None})
    assert_same_run(run, same)
    assert not stored(run)["frozen/layers.0.bias"].any()
    with pytest.raises(ModelError, match="freeze comes while the model is trained"):
        model.train(train_params(n_epochs=2), [Freezes()], runs_dir=tmp_path, salt="callback", **more)
    model.freeze("head")
