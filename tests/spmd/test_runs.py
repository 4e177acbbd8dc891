"""Runs over several devices: numbers, records and checkpoints of one device, whatever is padded, masked, stopped."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data import ArrayDataset
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.job import prepare
from nnx_jax.hooks import DDPHook, EMAHook, GradientAccumulationHook
from nnx_jax.loop.engine import Span
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives import LossTerm
from nnx_jax.objectives.objective import ObjectiveResult
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.step.watch import RecompileWarning
from tests.e2e.toys import KillAt, Killed
from tests.spmd.toy import BATCH, Linear, arrays, by_hand, columns, fit, halves, history, same

FEEDS: dict[str, dict[str, Any]] = {
    "resident": {"dispatch": "span"},
    "step": {"dispatch": "step"},
    "stacked": {"loader": True},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """The runs on one device."""
    runs = tmp_path_factory.mktemp("one")
    return {
        (window, feed): fit(runs / f"{window}{feed}", window=window, **more)
        for window in (1, 4)
        for feed, more in FEEDS.items()
    }


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_equal_bits_on_any_devices(tmp_path: Path, one: Any, devices: int, window: int, feed: str) -> None:
    """Windows of 1 and 4, rows that are masked, shards without a row, a filled-up last batch, every way of dispatch.

    The weights are those worked out by hand; the whole state, every record and the validation are the one device's,
    and so is the run id.
    """
    run, plain = fit(tmp_path, window=window, mesh={"data": devices}, **FEEDS[feed]), one[window, feed]
    assert np.array_equal(arrays(run)["params/w"], by_hand(window).astype(np.float32))
    assert same(arrays(run), arrays(plain))
    assert history(run) == history(plain)
    assert run.id == plain.id


class Noisy(nnx.Module):
    """Statistics of the whole batch, and noise."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.body, self.norm = nnx.Linear(3, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.drop, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.drop(jax.nn.relu(self.norm(self.body(x)))))[:, 0]


def test_noise_and_statistics_are_of_the_whole_batch() -> None:
    """Dropout drops the same units and BatchNorm sees all rows, also of batches of 6 that become 8 on four devices.

    Another mask or a device's own statistics would change the first digit; what is left is rounding.
    """
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 3)).astype(np.float32)
    data = {"train": ArrayDataset(x=x, y=x.sum(1)), "val": None, "batch_size": 6}
    plain = trained_state(engine_of({}, data, module=Noisy(), loss="mse", rate=0.02))
    with pytest.warns(UserWarning, match="batches of 6 rows are computed as 8"):
        engine = engine_of({"data": 4}, data, module=Noisy(), loss="mse", rate=0.02)
    many = trained_state(engine)
    assert many["counters"].tobytes() == plain["counters"].tobytes()
    for name, value in plain.items():
        np.testing.assert_allclose(many[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def trained_state(engine: Any) -> dict[str, np.ndarray]:
    """Every array after two epochs."""
    state = engine.start()
    for epoch in range(2):
        state, _ = engine.run_span(state, Span(epoch, 0, engine.n_batches), lambda _: False)
    return {name: np.array(value) for name, value in engine.snapshot(state, 2, 0).arrays.items()}


def test_rows_that_fill_up_are_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="batches of 8 rows are computed as 9 on 3 devices, 1 of them of weight 0"):
        run = fit(tmp_path, mesh={"data": 3})
    assert np.array_equal(arrays(run)["params/w"], by_hand(1).astype(np.float32))


# One run on changing devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [pytest.param(None, marks=pytest.mark.slow), {"data": 2}])
def test_a_run_goes_on_where_there_are_fewer_devices(tmp_path: Path, after: dict[str, int] | None) -> None:
    """Killed on four devices in its third epoch, it continues on two or on one with the same command, bit for bit."""
    more: dict[str, Any] = {"window": 4, "n_epochs": 3, "hooks": [EMAHook(decay=0.5)]}
    whole = fit(tmp_path / "whole", **more)
    with pytest.raises(Killed):
        fit(tmp_path / "cut", mesh={"data": 4}, callbacks=[KillAt("on_epoch_begin", 3)], **more)
    run = fit(tmp_path / "cut", mesh=after, elastic=True, **more)
    assert run.id == whole.id
    assert same(arrays(run), arrays(whole))
    for name in ("train_loss", "val_loss"):
        found, wanted = ([v for v in r.column(name) if v is not None] for r in (run, whole))
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "after",
    [pytest.param(None, marks=pytest.mark.slow), {"data": 2}, pytest.param({"data": 4}, marks=pytest.mark.slow)],
)
def test_an_open_window_goes_on_where_there_are_fewer_devices(tmp_path: Path, after: dict[str, int] | None) -> None:
    """Two of three microbatches are summed on four devices each by themselves when the run is killed."""
    hook = GradientAccumulationHook(3, defer_reduce=True, on_partial="carry")
    more: dict[str, Any] = {"n_epochs": 2, "hooks": [hook]}
    whole = fit(tmp_path / "whole", **more)
    with pytest.raises(Killed):
        fit(tmp_path / "cut", mesh={"data": 4}, callbacks=[KillAt("on_epoch_begin", 2)], **more)
    run = fit(tmp_path / "cut", mesh=after, elastic=True, **more)
    assert run.id == whole.id
    found, wanted = arrays(run)["params/w"], arrays(whole)["params/w"]
    assert np.array_equal(found, wanted)


def test_the_module_is_left_on_the_default_device(tmp_path: Path) -> None:
    """What was trained on four devices is used, and trained again, as if it had been one."""
    module = Linear()
    run = fit(tmp_path, module=module, mesh={"data": 4})
    assert module.w[...].devices() == {jax.devices()[0]}
    assert np.array_equal(module.w[...], arrays(run)["params/w"])


# The engine -----------------------------------------------------------------------------------------------------------


def engine_of(
    mesh: dict[str, int],
    given: Any = None,
    *hooks: Any,
    module: Any = None,
    loss: Any = halves,
    rate: float = 0.5,
    **train: Any,
) -> Any:
    """The engine of a run of the toy, before it begins."""
    table = ArrayDataset(columns())
    data = NNDataParams(**{"train": table, "val": table, "batch_size": BATCH, "shuffle": False, **(given or {})})
    optim = NNOptimParams(kind="sgd", max_lr=rate, momentum=0.0)
    spec = RunSpec(data=data, train=NNTrainParams(n_epochs=1, optim=optim, **train), hooks=hooks, mesh=mesh)
    return prepare(NNModel(module=module or Linear(), loss=loss), spec).engine


@pytest.mark.parametrize("dispatch", ["step", "span"])
def test_one_compile(dispatch: Any) -> None:
    """Two epochs, a validation, another rate, a restore and a third epoch: every program is compiled once."""
    engine = engine_of({"data": 4}, None, GradientAccumulationHook(2), EMAHook(decay=0.5), dispatch=dispatch)
    state = engine.start()
    for epoch in range(3):
        state, done = engine.run_span(state, Span(epoch, 0, 5), lambda _: False)
        engine.read_records(state)
        engine.evaluate(state, "val")
        state = engine.set_rate(state, 0.25)
        state = engine.restore(state, {n: np.array(v) for n, v in engine.snapshot(state, epoch, done).arrays.items()})
    programs = {"micro": 1, "apply": 1} if dispatch == "step" else {"span_resident": 1}
    assert engine.programs.watch.compiles == programs
    assert engine.programs.watch.check() == []
    assert engine.scorer._evaluator.watch.compiles == {"evaluate_resident": 1}


def largest_moved(text: str) -> int:
    """Elements of the largest array that a compiled program adds up or collects over devices."""
    moved = re.findall(r" = (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", text)
    shapes = [shape for head in moved for shape in re.findall(r"\w+\[([\d,]*)\]", head)]
    return max((math.prod(int(size) for size in shape.split(",") if size) for shape in shapes), default=0)


class Wide(nnx.Module):
    """A weight larger than anything else."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.arange(21.0).reshape(3, 7))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ self.w[...]), axis=-1)


def test_deferred_gradients_are_reduced_at_the_windows_end_only() -> None:
    """By the text of the compiled programs: the one that leaves the window open moves no gradient between devices."""
    moved = {}
    for defer in (False, True):
        engine = engine_of(
            {"data": 4}, None, GradientAccumulationHook(2, defer_reduce=defer), module=Wide(), dispatch="step"
        )
        batch = engine.place.signature(engine.feed.signature())
        for kind in ("micro", "apply"):
            text = engine.programs.lower(kind, batch).compile().as_text()
            moved[defer, kind] = largest_moved(text) >= 21
    assert moved == {(False, "micro"): True, (False, "apply"): True, (True, "micro"): False, (True, "apply"): True}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("dispatch", ["step", "span"])
def test_deferred_windows_are_the_union(tmp_path: Path, devices: int, dispatch: Any) -> None:
    hook = GradientAccumulationHook(4, defer_reduce=True)
    run = fit(tmp_path, hooks=[hook], mesh={"data": devices}, dispatch=dispatch)
    assert np.array_equal(arrays(run)["params/w"], by_hand(4).astype(np.float32))
    assert arrays(run)["accum/window/grads/0/w"].shape == (devices, 3)


def test_nothing_is_deferred_on_one_device(tmp_path: Path) -> None:
    plain = fit(tmp_path / "a", hooks=[GradientAccumulationHook(4)])
    deferred = fit(tmp_path / "b", hooks=[GradientAccumulationHook(4, defer_reduce=True)])
    assert same(arrays(deferred), arrays(plain))


class Dropped(nnx.Module):
    def __init__(self) -> None:
        self.w, self.drop = nnx.Param(jnp.ones(3)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x) @ self.w[...]


@pytest.mark.parametrize(("module", "why"), [(Noisy, "BatchNorm"), (Dropped, "dropout")])
def test_models_that_need_the_whole_batch_are_not_deferred(module: Any, why: str) -> None:
    """Their numbers would depend on the devices; the usual program is used, and the warning says why."""
    with pytest.warns(UserWarning, match=f"defer_reduce does nothing here: the model .*{why}"):
        engine = engine_of({"data": 4}, None, GradientAccumulationHook(2, defer_reduce=True), module=module())
    assert engine.hooks.mesh is None
    assert engine.place.sharding.parts == 4


def test_objectives_are_not_deferred() -> None:
    """One that compares rows of a batch would see a part of them only."""

    def spread(ctx: Any) -> Any:
        outputs = ctx.model(ctx.batch["x"])
        return ObjectiveResult((LossTerm("spread", jnp.sum((outputs - jnp.mean(outputs)) ** 2), jnp.float32(8)),))

    data = NNDataParams(train=ArrayDataset(columns()), batch_size=BATCH, shuffle=False)
    hooks = (GradientAccumulationHook(2, defer_reduce=True),)
    spec = RunSpec(data=data, train=NNTrainParams(n_epochs=1), hooks=hooks, mesh={"data": 4})
    call = TrainCall(QuietProgress(), objective=spread)
    with pytest.warns(UserWarning, match="defer_reduce does nothing here: the model is trained by an objective"):
        engine = prepare(NNModel(module=Linear(), loss=halves), spec, call=call).engine
    assert engine.hooks is not None
    assert engine.hooks.mesh is None


# What is refused ------------------------------------------------------------------------------------------------------


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    """Before anything is compiled or written; a configuration file's mesh is checked the same way."""
    with pytest.raises(ConfigError, match=r"mesh: got \{data: 8\}, but there are 4 devices"):
        fit(tmp_path, mesh={"data": 8})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tail", ["drop", "keep"])
def test_batches_that_do_not_split(tmp_path: Path, tail: str) -> None:
    """pipekit:J8: without `tail: pad` no row is added to a batch; the message shows the arithmetic."""
    given = {"train": ArrayDataset(columns()), "batch_size": 6, "tail": tail, "val": None}
    told = r"6 rows does not split over 4 devices \(6 = 4 x 1 \+ 2\); give batches of 4 or 8 rows"
    with pytest.raises(DataError, match=told):
        fit(tmp_path, data=given, mesh={"data": 4})


def warned(runs: Path, data: Any, devices: int) -> dict[str, np.ndarray]:
    """The arrays of a run that compiles a second shape and says so."""
    with pytest.warns(RecompileWarning, match="mask: float32.8. -> float32.3."):
        return arrays(fit(runs, data=data, mesh={"data": devices}))


def test_a_short_last_batch_is_whole_on_every_device(tmp_path: Path) -> None:
    """`tail: keep`: three rows on two devices are not cut; the update is that of three rows."""
    table = {name: column[:11] for name, column in columns().items()}
    given = {"train": ArrayDataset(table), "batch_size": 8, "tail": "keep", "val": None}
    plain, found = (warned(tmp_path / str(devices), given, devices) for devices in (1, 2))
    np.testing.assert_allclose(found["params/w"], plain["params/w"], rtol=1e-6)


@pytest.mark.parametrize("dispatch", ["staged", "eager"])
def test_debugging_is_for_one_device(tmp_path: Path, dispatch: Any) -> None:
    with pytest.raises(ConfigError, match=f"train.dispatch: got '{dispatch}', which runs on one device"):
        fit(tmp_path, mesh={"data": 2}, dispatch=dispatch)


def test_two_numbers_of_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: got \{data: 2\}, but DDPHook has devices=4; write it in one place"):
        fit(tmp_path, mesh={"data": 2}, hooks=[DDPHook(devices=4)])
