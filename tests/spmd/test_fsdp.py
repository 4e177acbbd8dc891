"""Models split over devices: the numbers of one device, a part of the memory, and the exchanges that this takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from nnx_jax import Trainer, default_train_step, supervised_objective
from nnx_jax.core.errors import ResumePointError
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.inference import weights_of
from nnx_jax.fit.job import prepare
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook
from nnx_jax.loop.engine import Span
from nnx_jax.model import NNModel
from nnx_jax.objectives import LossTerm
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import FeedForwardParams, TransformerLMParams
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.spmd import report
from tests.e2e.toys import KillAt, Killed
from tests.spmd.toy import arrays, columns, fit, history, same

MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"fsdp": 4},
    "data and fsdp": {"data": 2, "fsdp": 2},
    "tensor": {"tensor": 2},
    "data and tensor": {"data": 2, "tensor": 2},
}
RULES = {"tensor": {"up": [None, "tensor"], "down": ["tensor"]}}
FEEDS: dict[str, dict[str, Any]] = {
    "resident": {"dispatch": "span"},
    "step": {"dispatch": "step"},
    "stacked": {"loader": True},
}


class Pair(nnx.Module):
    """Two layers without anything between them: products and sums of small whole numbers, exact whoever adds them."""

    def __init__(self) -> None:
        self.up = nnx.Param(jnp.asarray(np.arange(24).reshape(3, 8) % 3 - 1.0, jnp.float32))
        self.down = nnx.Param(jnp.asarray(np.arange(8) % 2 * 1.0, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x @ self.up[...]) @ self.down[...]


def halves(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Half squared error over rows that count, in eighths, so that a few updates stay exact."""
    valid = batch["mask"] * batch["weight"]
    error = (outputs - batch["y"]) ** 2 / 16
    return (LossTerm("half", jnp.sum(jnp.where(valid > 0, error, 0.0)), jnp.sum(valid)),)


def model(**given: Any) -> NNModelParams:
    """A model's parameters, short words for loss and metrics."""
    return NNModelParams(**given)


def pair(runs: Path, mesh: dict[str, int] | None = None, **more: Any) -> Any:
    """Two updates of the exact toy, or one of a window; momentum and averages are among its state."""
    rules = RULES["tensor"] if mesh is not None and "tensor" in mesh else None
    steps = 1 if more.get("window", 1) > 1 else 2
    given: dict[str, Any] = {"max_steps": steps, "optim": {"momentum": 0.5, "max_lr": 0.25}}
    given["hooks"] = [EMAHook(decay=0.5)]
    given["module"] = Pair()
    return fit(runs, loss=halves, mesh=mesh, sharding=rules, **{**given, **more})


CASES = [(mesh, *way) for mesh in MESHES for way in ((1, "resident"), (4, "step"))] + [("data and fsdp", 4, "stacked")]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """The runs on one device."""
    runs = tmp_path_factory.mktemp("one")
    ways = {(window, feed) for _, window, feed in CASES}
    return {(window, feed): pair(runs / feed, window=window, **FEEDS[feed]) for window, feed in ways}


@pytest.mark.parametrize(("mesh", "window", "feed"), CASES)
def test_equal_bits_however_the_model_is_split(tmp_path: Path, one: Any, mesh: str, window: int, feed: str) -> None:
    """Weights, momentum, averages, the open window, records and validation; masked rows; every way of dispatch.

    Sums of these numbers are exact, but not those of the squares of norm and validation, which are rounded.
    """
    run, plain = pair(tmp_path, MESHES[mesh], window=window, **FEEDS[feed]), one[window, feed]
    found, wanted = arrays(run), arrays(plain)
    assert np.abs(wanted["params/up"] - Pair().up[...]).max() > 0
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == []
    assert len(history(run)) == len(history(plain))
    for row, other in zip(history(run), history(plain), strict=True):
        for name, value in other.items():
            rounded = isinstance(value, float) and name in ("grad_norm", "val_loss", "monitor")
            assert row[name] == (pytest.approx(value, rel=1e-6) if rounded else value), name
    assert run.id == plain.id


# A net with everything in it ------------------------------------------------------------------------------------------


def rich(mesh: dict[str, int] | None = None, *, batch: int = 8, **train: Any) -> Any:
    """The engine of a built-in net with BatchNorm and dropout, accumulation, clipping and averages."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 6)).astype(np.float32)
    data = ArrayDataset(x=x, y=(x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0).astype(np.int32))
    net = FeedForwardParams(hidden_dims=(16, 8), norm="batch", dropout_prob=0.25)
    spec = RunSpec(
        model=model(net=net, loss="cross_entropy"),
        data=NNDataParams(train=data, val=data, batch_size=batch, shuffle=False),
        train=NNTrainParams(n_epochs=2, optim=NNOptimParams(kind="sgd", max_lr=0.1, momentum=0.5), **train),
        hooks=(GradientAccumulationHook(2), GradientClipHook(0.5), EMAHook(decay=0.5)),
        mesh=mesh or {},
    )
    return prepare(NNModel(params=spec.model), spec).engine


def two_epochs(engine: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Every array after two epochs, and the validation."""
    state = engine.start()
    for epoch in range(2):
        state, _ = engine.run_span(state, Span(epoch, 0, engine.n_batches), lambda _: False)
    found = {name: np.array(value) for name, value in engine.snapshot(state, 2, 0).arrays.items()}
    return found, dict(engine.evaluate(state, "val").values)


@pytest.fixture(scope="module")
def plain() -> Any:
    return two_epochs(rich())


SLOW = [pytest.param(mesh, marks=pytest.mark.slow if mesh.startswith("data") else ()) for mesh in MESHES]


@pytest.mark.parametrize("mesh", SLOW)
def test_noise_and_statistics_are_those_of_one_device(plain: Any, mesh: str) -> None:
    """pipekit:J12: masks and statistics of the whole batch; batches of 8, 8 and 4 rows.

    Gaussian data: four updates, each a sum of at most 64 products in another order, 2e-5 at most. Another mask or a
    device's own statistics would change the first digit.
    """
    found, values = two_epochs(rich(MESHES[mesh]))
    assert found["counters"].tobytes() == plain[0]["counters"].tobytes()
    for name, value in plain[0].items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    assert values == pytest.approx(plain[1], rel=1e-5)


def test_fifty_steps_on_two_devices() -> None:
    """pipekit:J7: a line fitted to Gaussian rows by Adam; weights and losses of one device to 1e-6, moved by 0.1."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 4), scale=0.25).astype(np.float32)
    data = NNDataParams(train=ArrayDataset(x=x, y=x.sum(1, keepdims=True)), batch_size=8)
    found = []
    for mesh in ({}, {"data": 2}, {"fsdp": 2}):
        spec = RunSpec(
            model=model(net=FeedForwardParams(hidden_dims=(), output_dim=1), loss="mse"),
            data=data,
            train=NNTrainParams(n_epochs=5, optim=NNOptimParams(kind="adam", max_lr=1e-2)),
            mesh=mesh,
        )
        engine = prepare(NNModel(params=spec.model), spec).engine
        state, losses = engine.start(), []
        first = np.array(engine.programs.state(state).params["head.kernel"])
        for epoch in range(5):
            state, _ = engine.run_span(state, Span(epoch, 0, 10), lambda _: False)
            losses += [np.asarray(each.sums["loss"]) for each in engine.read_records(state)[0]]
        last = np.array(engine.programs.state(state).params["head.kernel"])
        assert np.abs(last - first).min() > 0.1
        found.append((last, np.concatenate(losses) / 8))
    for last, losses in found[1:]:
        np.testing.assert_allclose(last, found[0][0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(losses, found[0][1], rtol=0, atol=1e-6)


def own(ctx: Any) -> Any:
    """A step of the user's own: its loss, its gradient, its update."""
    return default_train_step(ctx)


@pytest.mark.parametrize("kind", ["own step", "several optimizers", "frozen and low rank"])
def test_whatever_trains_may_be_split(tmp_path: Path, kind: str) -> None:
    """Four Gaussian updates of 8 rows, against one device."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(16, 6)).astype(np.float32)
    data = NNDataParams(train=ArrayDataset(x=x, y=(x[:, 0] > 0).astype(np.int32)), batch_size=8)
    weights = []
    for number, mesh in enumerate(({}, {"fsdp": 2, "tensor": 2})):
        made = NNModel(FeedForwardParams(hidden_dims=(8,), input_dim=6, output_dim=2), model(loss="cross_entropy"))
        call: dict[str, Any] = {"data": data, "mesh": mesh, "runs_dir": tmp_path / str(number), "quiet": True}
        sgd = NNOptimParams(kind="sgd", max_lr=0.1, momentum=0.5)
        if kind == "several optimizers":
            owned = {name: (NNParamGroupSpec(patterns=(f"{name}.*",)),) for name in ("layers", "head")}
            optims = {name: sgd.replace(param_groups=groups) for name, groups in owned.items()}
            params = NNTrainerParams(n_epochs=2, optims=optims)
            Trainer(made).train(params, objective=supervised_objective(), **call)
        elif kind == "own step":
            made.train(NNTrainParams(n_epochs=2, optim=sgd), train_step_fn=own, **call)
        else:
            made.transform("lora", rank=2)
            made.train(NNTrainParams(n_epochs=2, optim=sgd), **call)
        weights.append(weights_of(made.net))
    assert max(np.abs(weights[0][name]).max() for name in weights[0]) > 0
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mesh", [{}, {"data": 1}, {"fsdp": 1, "tensor": 1}])
def test_one_device_is_the_plain_path(mesh: dict[str, int]) -> None:
    """pipekit:J4: no place is named anywhere in the program, and the state is where JAX puts it."""
    engine = rich(mesh)
    assert engine.place.sharding is None
    batch = engine.place.signature(engine.feed.signature())
    text = engine.programs.lower("apply", batch).as_text()
    assert "sharding" not in text
    assert all(type(leaf.sharding) is SingleDeviceSharding for leaf in engine.start().leaves)


# Memory and exchanges -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split() -> Any:
    """The rich net over four devices, its parameters split, ready to train."""
    return rich({"fsdp": 4})


def on_first_device(leaf: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device == jax.devices()[0])


def test_each_of_four_devices_holds_a_quarter(split: Any) -> None:
    """Parameters, moments, averages and window sums, by the arrays' own parts; biases of 3 and counts are whole."""
    found = split.programs.named(split.start())
    for head in ("params/", "opt_state/", "slots/EMAHook/average/", "accum/window/grads/"):
        leaves = [leaf for name, leaf in found.items() if name.startswith(head)]
        held, all_ = sum(map(on_first_device, leaves)), sum(leaf.nbytes for leaf in leaves)
        small = sum(leaf.nbytes for leaf in leaves if all(size % 4 for size in leaf.shape))
        assert held == (all_ - small) / 4 + small, head
        assert held < 0.3 * all_


def exchanged(engine: Any) -> report.Exchanges:
    """What devices exchange in an update of one microbatch, by the compiled text."""
    batch = engine.place.signature(engine.feed.signature())
    return report.exchanges(engine.programs.lower("apply", batch).compile().as_text())


def test_parameters_are_gathered_and_gradients_reduced(split: Any) -> None:
    """Every weight once, 4 bytes a number; on a CPU a gradient is reduced whole, elsewhere in parts."""
    weights = 4 * (6 * 16 + 16 + 16 * 8 + 8 + 8 * 3)
    found = exchanged(split)
    assert found["all-gather"].bytes >= weights
    assert (found.get("reduce-scatter", report.Exchange()).bytes * 4 + found["all-reduce"].bytes) >= weights


class Vocabulary(nnx.Module):
    """A table of many rows over its outputs."""

    def __init__(self, size: int) -> None:
        self.table = nnx.Param(jnp.zeros((size, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table[...].T


@pytest.mark.parametrize("size", [64, 4096])
def test_records_gather_no_outputs(size: int) -> None:
    """Loss and metrics are sums made where the rows are: beside the gradient only numbers are exchanged."""
    x = np.zeros((8, 4), np.float32)
    spec = RunSpec(
        model=model(loss="cross_entropy", metrics=("accuracy",)),
        data=NNDataParams(train=ArrayDataset(x=x, y=np.zeros(8, np.int32)), batch_size=8),
        train=NNTrainParams(n_epochs=1),
        mesh={"data": 4},
    )
    found = exchanged(prepare(NNModel(module=Vocabulary(size), params=spec.model), spec).engine)
    gradient = 4 * size * 4
    assert set(found) == {"all-reduce"}
    assert found["all-reduce"].bytes <= gradient + 256


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["fsdp", pytest.param("data and tensor", marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, mesh: str) -> None:
    """pipekit:J5: killed after an epoch and started again on the same mesh: every array is the unbroken run's."""
    whole = pair(tmp_path / "whole", MESHES[mesh], window=2, max_steps=5)
    with pytest.raises(Killed):
        pair(tmp_path / "cut", MESHES[mesh], window=2, max_steps=5, callbacks=[KillAt("on_epoch_begin", 2)])
    run = pair(tmp_path / "cut", MESHES[mesh], window=2, max_steps=5)
    assert same(arrays(run), arrays(whole))


def test_a_restored_state_lies_as_before(split: Any) -> None:
    """pipekit:J5: places and values."""
    state = split.start()
    before = split.programs.named(state)
    stored = {name: np.array(value) for name, value in before.items()}
    after = split.programs.named(split.restore(state, stored))
    assert {n: v.sharding for n, v in after.items()} == {n: v.sharding for n, v in before.items()}
    assert all(np.array_equal(after[name], stored[name], equal_nan=True) for name in stored)


def test_another_mesh_needs_elastic(tmp_path: Path) -> None:
    """Refused with both meshes; with `elastic` it goes on, here from one device to four parts."""
    more: dict[str, Any] = {"max_steps": None, "n_epochs": 2, "window": 4}
    with pytest.raises(Killed):
        pair(tmp_path, callbacks=[KillAt("on_epoch_begin", 2)], **more)
    with pytest.raises(ResumePointError, match=re.escape("{fsdp: 4}")):
        pair(tmp_path, {"fsdp": 4}, **more)
    run = pair(tmp_path, {"fsdp": 4}, elastic=True, **more)
    assert run.last is not None
    assert run.last.batch == 10


def test_weights_come_home(tmp_path: Path) -> None:
    """What was split in training predicts on the default device, and trains again there."""
    module = Pair()
    run = fit(tmp_path, module=module, loss=halves, mesh={"fsdp": 4})
    assert module.up[...].devices() == {jax.devices()[0]}
    assert np.array_equal(module.up[...], arrays(run)["params/up"])
    x = columns()["x"][:4]
    want = (x @ module.up[...]) @ module.down[...]
    np.testing.assert_allclose(NNModel(module=module).predict(x).logits, want, rtol=1e-6)


def test_a_language_model_of_every_mesh() -> None:
    """Tied embedding by tokens, heads and perceptron over `tensor`, all over `fsdp`: one loss within rounding."""
    tokens = np.random.default_rng(0).integers(0, 16, (8, 6)).astype(np.int32)
    losses = []
    for mesh in ({}, {"fsdp": 2, "tensor": 2}):
        spec = RunSpec(
            model=model(
                net=TransformerLMParams(vocab_size=16, context_length=6, d_model=8, n_layers=1, n_heads=2),
                loss="cross_entropy",
            ),
            data=NNDataParams(train=ArrayDataset(x=tokens, y=(tokens + 1) % 16), batch_size=4),
            train=NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="sgd", max_lr=0.5)),
            mesh=mesh,
        )
        engine = prepare(NNModel(params=spec.model), spec).engine
        state = engine.start()
        state, _ = engine.run_span(state, Span(0, 0, 2), lambda _: False)
        records, _ = engine.read_records(state)
        losses.append(sum(np.asarray(each.sums["loss"]) for each in records))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
