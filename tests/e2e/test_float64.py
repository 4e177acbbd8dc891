"""precision: float64 from arrays to predictions, against an update written out in numpy; and who is refused, and how.

The tests of this process switch 64-bit numbers on for themselves alone (`jax.enable_x64`); a command does it itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.data import ArrayDataset
from nnx_jax.fit import prepare
from nnx_jax.hooks import EMAHook, GradientClipHook, MixedPrecisionHook
from nnx_jax.loop.callbacks import Callback
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.run import NNRun

from .helpers import stored

ROWS, BATCH, WINDOW, EPOCHS, RATE, MOMENTUM = 20, 8, 2, 4, 0.1, 0.9
"""Microbatches of 8, 8 and 4 rows with 4 of padding, two of which make an update; a rate that float32 cannot hold."""
SGD = {"kind": "sgd", "max_lr": RATE, "momentum": MOMENTUM}


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(ROWS, 3)), draw.normal(size=(ROWS, 2))


def data(seed: int = 0) -> NNDataParams:
    x, y = rows(seed)
    return NNDataParams(train=ArrayDataset(x, y), val=ArrayDataset(x, y), batch_size=BATCH, shuffle=False)


def model(precision: str = "float64", **changes: Any) -> NNModel:
    net = NNParams(kind="feed_forward", hidden_dims=(5,), activation="tanh", **changes)
    return NNModel(net, NNModelParams(loss="mse", metrics=("mae",), precision=precision))


def train_params(epochs: int = EPOCHS, **changes: Any) -> NNTrainParams:
    optim: dict[str, Any] = {"accumulate_grad_batches": WINDOW, **changes.pop("optim", SGD)}
    return NNTrainParams(n_epochs=epochs, optim=NNOptimParams(**optim), **changes)


def fit(runs: Path, *, of: NNModel | None = None, params: NNTrainParams | None = None, **given: Any) -> NNRun:
    return (of or model()).train(params or train_params(), runs_dir=runs, quiet=True, **{"data": data(), **given})


def by_hand(p: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[float]]:
    """The same training in numpy: parameters after it, and the loss of every update."""
    (x, y), losses = rows(), []
    p = {name: value.astype(np.float64) for name, value in p.items()}
    trace = {name: np.zeros_like(value) for name, value in p.items()}
    for at in [slice(0, 16), slice(16, 20)] * EPOCHS:
        hidden = np.tanh(x[at] @ p["w0"] + p["b0"])
        error = hidden @ p["w1"] + p["b1"] - y[at]
        losses.append(float(np.mean(error**2)))
        out = 2 * error / error.size
        back = out @ p["w1"].T * (1 - hidden**2)
        moved = {"w0": x[at].T @ back, "b0": back.sum(0), "w1": hidden.T @ out, "b1": out.sum(0)}
        trace = {name: moved[name] + MOMENTUM * value for name, value in trace.items()}
        p = {name: value - RATE * trace[name] for name, value in p.items()}
    return p, losses


def named(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Kernels and biases of a feed-forward net of two layers, as `by_hand` calls them."""
    weights = {name: value for name, value in arrays.items() if name.startswith("params/")}
    kernels = sorted((n for n in weights if n.endswith("kernel")), key=lambda n: weights[n].shape != (3, 5))
    biases = [name.replace("kernel", "bias") for name in kernels]
    return {f"{kind}{i}": weights[n] for kind, names in (("w", kernels), ("b", biases)) for i, n in enumerate(names)}


def first_weights() -> dict[str, np.ndarray]:
    """What the seed makes: drawn in float32, whatever the precision."""
    net = model("float32").build({"input_dim": 3, "output_dim": 2}, 0)
    return named({f"params/{n}": np.asarray(v) for n, v in _leaves(net).items()})


def _leaves(net: nnx.Module) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(net, nnx.Param))}


def test_a_run_in_float64_is_numpys_to_1e_12(tmp_path: Path) -> None:
    """Weights, losses and evaluation after 8 updates of windows and padding; one float32 on the way costs 1e-8.

    Every array of the checkpoint that is real is float64, and so are predictions, also of the model loaded again.
    """
    with jax.enable_x64(True):
        mine = model()
        run = fit(tmp_path, of=mine)
        wanted, losses = by_hand(first_weights())
        arrays = stored(run)
        for name, value in named(arrays).items():
            np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-12)
        reals = {name: value.dtype for name, value in arrays.items() if np.issubdtype(value.dtype, np.floating)}
        assert set(reals.values()) == {np.dtype(np.float64)}, reals
        updates = [line["train_loss"] for line in run.records if line["kind"] == "update"]
        np.testing.assert_allclose(updates, losses, rtol=0, atol=1e-12)
        x, y = rows()
        outputs = np.tanh(x @ wanted["w0"] + wanted["b0"]) @ wanted["w1"] + wanted["b1"]
        assert run.summaries[-1]["val_loss"] == pytest.approx(np.mean((outputs - y) ** 2), abs=1e-12)
        assert run.summaries[-1]["val_mae"] == pytest.approx(np.mean(np.abs(outputs - y)), abs=1e-12)
        np.testing.assert_allclose(mine.predict(x).logits, outputs, rtol=0, atol=1e-12)
        assert mine.evaluate(ArrayDataset(x, y))["loss"] == pytest.approx(np.mean((outputs - y) ** 2), abs=1e-12)
        again = NNModel.from_checkpoint(run.id, runs_dir=tmp_path).predict(x).logits
        assert again.dtype == np.float64
        assert np.array_equal(again, mine.predict(x).logits)
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64=1"):
        NNModel.from_checkpoint(run.id, runs_dir=tmp_path)


def test_without_64_bit_numbers_it_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"precision: got 'float64'.*JAX_ENABLE_X64=1.*jax_enable_x64") as caught:
        fit(tmp_path)
    assert isinstance(caught.value, ValueError)
    assert not list(tmp_path.iterdir())
    untrained = model(input_dim=3, output_dim=2)
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64=1"):
        untrained.predict(rows()[0])


@pytest.mark.slow
def test_every_dispatch_gives_the_same_numbers(tmp_path: Path) -> None:
    """Compiled ones bit for bit; staged and eager run one operation at a time, so that they round elsewhere."""
    optim = {"kind": "adam", "max_lr": 1e-2, "grad_clip_norm": 0.5}
    with jax.enable_x64(True):
        step, span, *others = (
            stored(fit(tmp_path / kind, params=train_params(2, optim=optim, dispatch=kind), hooks=[EMAHook(decay=0.9)]))
            for kind in ("step", "span", "staged", "eager")
        )
    for name, value in step.items():
        assert np.array_equal(span[name], value), name
        for other in others:
            assert other[name].dtype == value.dtype
            np.testing.assert_allclose(other[name], value, rtol=1e-11, atol=1e-14, err_msg=name)


@pytest.mark.slow
def test_canonical_bits_are_those_of_any_devices(tmp_path: Path) -> None:
    params = train_params(2, optim={"kind": "adam", "max_lr": 1e-2}, reduction="canonical", reduction_shards=4)
    with jax.enable_x64(True):
        one, two, four = (
            stored(fit(tmp_path / str(n), params=params, mesh={"data": n} if n > 1 else None)) for n in (1, 2, 4)
        )
    for name in (name for name in one if name.startswith(("params/", "opt_state/"))):
        assert one[name].tobytes() == two[name].tobytes() == four[name].tobytes(), name


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The open window's sums, the moments and the rate of a schedule come back as they were."""

    class Stop(Callback):
        def on_epoch_end(self, ctx: Any) -> None:
            if ctx.epoch == 1:
                raise KeyboardInterrupt

    options = {"optim": {"kind": "adam", "max_lr": 1e-2}, "scheduler": NNSchedulerParams(kind="cosine")}
    with jax.enable_x64(True):
        whole = fit(tmp_path / "whole", params=train_params(3, **options))
        mine = model()
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "cut", of=mine, params=train_params(3, **options), callbacks=[Stop()])
        rest = fit(tmp_path / "cut", of=mine, params=train_params(3, **options))
    assert whole.id == rest.id
    one, two = stored(whole), stored(rest)
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_rows_that_float32_cannot_tell_apart_are_other_data() -> None:
    """In float64 they have another id; in float32 the same, and the id such runs always had."""
    x, y = rows()
    near = np.nextafter(x, 10)
    specs = {
        (precision, name): RunSpec(
            model=NNModelParams(net=NNParams(kind="feed_forward", hidden_dims=(5,)), loss="mse", precision=precision),
            data=NNDataParams(train=ArrayDataset(values, y)),
            train=NNTrainParams(n_epochs=1),
        )
        for precision in ("float32", "float64")
        for name, values in (("x", x), ("near", near), ("narrow", x.astype(np.float32)))
    }
    ids = {key: spec.run_id() for key, spec in specs.items()}
    assert ids["float32", "x"] == ids["float32", "near"] == ids["float32", "narrow"]
    assert len({ids["float64", name] for name in ("x", "near", "narrow")} | {ids["float32", "x"]}) == 4
    wide = specs["float64", "x"]
    assert wide.data is not None
    assert np.array_equal(wide.data.train.arrays()["x"], x)
    back = wide.replace(model=wide.model.replace(precision="float32"))
    assert back.run_id() == ids["float32", "x"]
    assert back.data is not None
    assert back.data.train.arrays()["x"].dtype == np.float32


def test_arrays_changed_in_place_are_not_taken() -> None:
    x, y = rows()
    given = ArrayDataset(x, y)
    x[3] += 1
    assert given.arrays()["x"][3, 0] != np.float32(x[3, 0])
    with pytest.raises(ValueError, match="changed in place"):
        given.widened()


class Own(nnx.Module):
    """A module of the user's whose parameters are float64, and one layer that says float32."""

    def __init__(self, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, dtype=jnp.float32, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


def test_a_module_of_ones_own_computes_in_float64_throughout(tmp_path: Path) -> None:
    """Also where a layer says float32; and with precision float32 its float64 parameters are refused, not narrowed."""
    params = NNModelParams(loss="mse")
    with jax.enable_x64(True):
        own = NNModel(module=Own(jnp.float64), params=params)
        with pytest.raises(
            ModelError, match=r"'first.bias' is float64, but precision is 'float32'.*precision: float64"
        ):
            fit(tmp_path, of=own)
        own = NNModel(module=Own(jnp.float32), params=params.replace(precision="float64"))
        run = fit(tmp_path, of=own, hooks=[GradientClipHook(max_norm=0.5)])
        w = {n.split("/")[1]: v for n, v in stored(run).items() if n.startswith(("params/", "model_state/"))}
        assert {value.dtype for value in w.values()} == {np.dtype(np.float64)}
        x = rows()[0]
        hidden = x @ w["first.kernel"] + w["first.bias"]
        hidden = (hidden - w["norm.mean"]) / np.sqrt(w["norm.var"] + 1e-5) * w["norm.scale"] + w["norm.bias"]
        wanted = np.tanh(hidden) @ w["last.kernel"] + w["last.bias"]
        np.testing.assert_allclose(own.predict(x).logits, wanted, rtol=0, atol=1e-13)


def test_mixed_precision_beside_it_is_refused(tmp_path: Path) -> None:
    with jax.enable_x64(True), pytest.raises(ConfigError, match="got 'float64', but MixedPrecisionHook has 'bfloat16'"):
        fit(tmp_path, hooks=[MixedPrecisionHook("bfloat16")])


DRAW = np.random.default_rng(0)
CLASSES = {"x": DRAW.normal(size=(8, 3)), "y": DRAW.integers(0, 3, 8), "weight": DRAW.random(8)}
VALUES = {"x": DRAW.normal(size=(8, 3)), "y": DRAW.normal(size=(8, 2)), "weight": DRAW.random(8)}
IMAGES = {"x": DRAW.integers(0, 255, (8, 6, 6, 1)).astype(np.uint8), "y": DRAW.integers(0, 3, 8)}
TOKENS = {"x": DRAW.integers(0, 9, (8, 5)), "y": DRAW.integers(0, 9, (8, 5))}
LM = {"kind": "transformer_lm", "vocab_size": 9, "context_length": 5, "d_model": 8, "n_heads": 2, "n_layers": 1}
CHOSEN = {"kind": "cross_entropy", "label_smoothing": 0.1, "class_weights": [1, 2, 3]}
WARM = {"kind": "warmup_cosine", "clock": "optimizer_update", "warmup_steps": 1}


@pytest.mark.parametrize("net, data, loss, metrics, train", [
    ({"kind": "feed_forward", "hidden_dims": [4], "norm": "batch", "dropout_prob": 0.2}, CLASSES, CHOSEN,
     ["accuracy", "nll", "brier", "f1"], {"optim": {"kind": "adamw", "grad_clip_norm": 1.0}, "scheduler": WARM}),
    ({"kind": "feed_forward", "hidden_dims": [4], "norm": "layer"}, VALUES, "huber", ["mse", "mae"],
     {"optim": {"kind": "lion", "accumulate_grad_batches": 2}}),
    ({"kind": "conv"}, IMAGES, "cross_entropy", [{"kind": "top_k", "k": 2}], {}),
    (LM, TOKENS, "cross_entropy", ["perplexity"], {}),
    ({**LM, "tie_embeddings": False}, TOKENS, "cross_entropy", [], {}),
], ids=["batch norm", "layer norm", "conv", "tied", "untied"])  # fmt: skip
def test_nothing_is_narrowed_on_the_way(net: Any, data: Any, loss: Any, metrics: Any, train: Any) -> None:
    """In the text of an update, before XLA: in no layer, loss, metric or optimizer does a float64 become float32."""
    model = {"net": net, "loss": loss, "metrics": metrics, "precision": "float64"}
    spec = RunSpec.from_state({"model": model, "train": {"n_epochs": 2, **train}})
    spec = spec.replace(data=NNDataParams(train=ArrayDataset(data), batch_size=4))
    with jax.enable_x64(True):
        engine = prepare(NNModel(params=spec.model), spec).engine
        columns = engine.place.signature(engine.feed.signature())
        shapes = {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in columns.items()}
        text = engine.programs.lower("apply", shapes).as_text()
    assert "f64" in text
    assert not re.findall(r"convert.*f64>\) -> tensor<.*(?:f32|f16)>", text)


CONFIG = """\
model: {net: {kind: feed_forward, hidden_dims: [5], activation: tanh}, loss: mse, precision: float64}
data: {train: {kind: npz, path: rows.npz}, batch_size: 8, shuffle: false}
train: {n_epochs: 4, optim: {kind: sgd, max_lr: 0.1, momentum: 0.9, accumulate_grad_batches: 2}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_switches_it_on_itself(tmp_path: Path, processes: int) -> None:
    """Alone, and as two processes of the launcher; where the environment says no, exit code 2 and how to change it."""
    x, y = rows()
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    (tmp_path / "cfg.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", "--quiet", "--json"]
    if processes > 1:
        command = [sys.executable, "-m", "nnx_jax.launch", "--processes", "2", "--", *command[3:]]
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES")}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = NNRun.all(tmp_path / "runs")
    wanted, _ = by_hand(first_weights())
    for name, value in named(stored(run)).items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-12)
    if processes == 1:
        refused = [*command, "--set", "train.salt=b"]
        done = subprocess.run(refused, cwd=tmp_path, env=env | {"JAX_ENABLE_X64": "0"}, capture_output=True, text=True)
        assert done.returncode == 2
        assert "JAX_ENABLE_X64=1" in json.loads(done.stdout.splitlines()[-1])["error"]
