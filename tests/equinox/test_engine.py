"""Equinox modules under the loop: the numbers of a loop by hand, what is trained and what is left alone, resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_jax.backends.equinox import EquinoxModel
from nnx_jax.core.errors import ConfigError, ModelError, ResumePointError
from nnx_jax.engines.equinox import EquinoxEngine, EquinoxModelOp, EquinoxNet, PureEquinox
from nnx_jax.fit import prepare
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, MixedPrecisionHook, SpikeSkipHook
from nnx_jax.loop.callbacks import Callback
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import ObjectiveContext, ObjectiveResult
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams
from nnx_jax.runs.run import NNRun
from tests.e2e.helpers import assert_same_run, stored
from tests.equinox.nets import (
    Scaled,
    close,
    data,
    fit,
    mlp,
    model,
    normed,
    rows,
    same,
    settings,
    square,
    weights,
)

EVERY = CheckpointParams(every_n_steps=1, keep=50)


def engine_of(of: EquinoxModel, *, batch: int = 8, count: int = 24, mesh: Any = None, **changes: Any) -> EquinoxEngine:
    spec = RunSpec(
        backend="equinox", model=of.params, data=data(count, batch), train=settings(**changes), mesh=mesh or {}
    )
    return prepare(of, spec).engine


class Stop(Callback):
    """Ends the process of training at an update, as an error would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation(self, ctx: Any) -> None:
        if ctx.step >= self.step:
            raise RuntimeError("stopped here")


# -- the law ----------------------------------------------------------------------------------------------------


def test_fifty_updates_equal_a_loop_written_by_hand(tmp_path: Path) -> None:
    """Adam over the feed's own batches: every weight has the bits of `eqx.filter_grad` and optax in a plain loop."""
    of = model()
    feed = engine_of(model(), n_epochs=20).feed
    fit(tmp_path, of, max_steps=50)
    module, optimizer = mlp(), optax.adam(1e-2)
    state = optimizer.init(eqx.filter(module, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(module: Any, state: Any, x: Any, y: Any) -> Any:
        total = lambda module: jnp.sum(square(jax.vmap(module)(x), y))  # noqa: E731
        grads = jax.tree.map(lambda leaf: leaf / x.shape[0], eqx.filter_grad(total)(module))
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(module, updates), state

    taken = 0
    for epoch in range(20):
        for batch in feed.batches(epoch):
            if taken < 50:
                module, state = update(module, state, batch["x"], batch["y"])
                taken += 1
    expected = EquinoxNet(module).arrays()
    for name, value in weights(of).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_window_of_four_microbatches_equals_one_batch(tmp_path: Path) -> None:
    """Batch 8 and a window of 4 batches of 2, on the same rows; float32 sums of 8 terms in another order."""
    whole, parts = model(), model()
    fit(tmp_path / "a", whole, more={"hooks": []}, optim={"kind": "sgd"})
    fit(tmp_path / "b", parts, batch=2, optim={"kind": "sgd", "accumulate_grad_batches": 4})
    close(whole, parts, rtol=1e-5, atol=1e-6)


def test_a_longer_run_traces_the_loss_no_more_often(tmp_path: Path) -> None:
    """One trace serves the run; another module is traced anew (pipekit:G8)."""
    traced = []

    def counted(outputs: Any, targets: Any) -> Any:
        traced.append(1)
        return square(outputs, targets)

    counts = []
    for number, epochs in enumerate((1, 6)):
        traced.clear()
        fit(tmp_path / str(number), EquinoxModel(mlp(), loss=counted), n_epochs=epochs, dispatch="step")
        counts.append(len(traced))
    assert counts[0] == counts[1] > 0


# -- leaves -----------------------------------------------------------------------------------------------------


def test_leaves_are_named_by_their_path_and_only_floats_are_trained() -> None:
    pure = PureEquinox(EquinoxNet(*normed()))
    assert list(pure.params) == ["first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"]
    assert list(pure.frozen) == ["places", "flags", "key"]
    assert pure.frozen["key"].dtype == jnp.uint32
    assert list(pure.model_state) == [
        "norm.batch_counter", "norm.batch_state_index.0", "norm.batch_state_index.1",
    ]  # fmt: skip
    assert list(PureEquinox(EquinoxNet(mlp())).params) == [
        "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
    ]  # fmt: skip


def test_what_is_not_trained_stays_and_the_module_given_is_never_changed(tmp_path: Path) -> None:
    """Integers, bools, keys and frozen leaves have their bits, and the optimizer holds nothing of them.

    The module and state that were given have the weights they had; the trained ones are new objects.
    (pipekit:G13) (pipekit:G14) (pipekit:G15)
    """
    module, state = normed()
    of = model((module, state), freeze=("first", "last.bias"))
    run = fit(tmp_path, of, n_epochs=1)
    trained = of.module
    for name in ("flags", "places", "key"):
        assert getattr(trained, name) is getattr(module, name)
    for then, now in ((module.first.weight, trained.first.weight), (module.last.bias, trained.last.bias)):
        np.testing.assert_array_equal(then, now)
    assert not np.array_equal(module.last.weight, trained.last.weight)
    held = {name for name in stored(run) if name.startswith("opt_state/")}
    assert any("last.weight" in name for name in held)
    assert not any(part in name for name in held for part in ("first", "last.bias", "places", "flags", "key"))
    fresh, first = normed()
    np.testing.assert_array_equal(module.last.weight, fresh.last.weight)
    assert [leaf.tolist() for leaf in jax.tree.leaves(state)] == [leaf.tolist() for leaf in jax.tree.leaves(first)]
    assert of.state is not state


def test_random_keys_of_a_module_are_restored_as_keys(tmp_path: Path) -> None:
    """A checkpoint holds a typed key's data; a module with another key has this one after loading. (pipekit:H15)"""
    of = model(normed(0))
    run = fit(tmp_path, of, n_epochs=1)
    other = EquinoxModel.from_checkpoint(run.id, runs_dir=tmp_path, module=normed(3))
    assert jnp.issubdtype(other.module.key.dtype, jax.dtypes.prng_key)
    assert jax.random.key_data(other.module.key).tolist() == jax.random.key_data(of.module.key).tolist()


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (mlp(), {"freeze": ["layers.*"]}, "no parameter is left to train"),
        (mlp(), {"freeze": ["layer"]}, "'layer' matches no parameter; legal names: layers.0.bias"),
        (eqx.nn.Linear(2, 2, dtype=jnp.complex64, key=jax.random.key(0)), {}, "leaf 'weight' is complex"),
    ],
)
def test_what_cannot_be_trained_is_refused(module: Any, options: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("*", ".")):
        PureEquinox(EquinoxNet(module), **options)


def test_two_leaves_of_one_name_are_refused() -> None:
    class Named(eqx.Module):
        parts: Any

        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(ModelError, match=r"two leaves of Named have the name 'parts\.a\.b'"):
        EquinoxNet(Named({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}))


# -- how a module is called -------------------------------------------------------------------------------------


def forward(module: Any, x: Any, key: int = 1, **options: Any) -> Any:
    pure = PureEquinox(EquinoxNet.of(module), **options)
    found = {"x": jnp.asarray(x)}
    return pure.forward({**pure.params, **pure.frozen}, pure.model_state, found, jax.random.key(key), True)[0]


def test_every_row_draws_noise_of_its_own_whatever_rows_come_after_it() -> None:
    x = np.ones((6, 4), np.float32)
    whole, part = forward(Scaled(), x), forward(Scaled(), x[:4])
    np.testing.assert_array_equal(whole[:4], part)
    assert len({row.tobytes() for row in np.asarray(whole)}) > 1
    assert not np.array_equal(whole, forward(Scaled(), x, key=2))


def test_evaluation_is_inference_mode_and_needs_no_key(tmp_path: Path) -> None:
    """A module whose `__call__` must have a key, trained with dropout, gives outputs without noise."""
    of = model(normed())
    fit(tmp_path, of, n_epochs=1)
    calm = eqx.nn.inference_mode(of.module)
    x = rows().arrays()["x"]
    expected = jax.vmap(lambda row: calm(row, of.state, key=None)[0])(x)
    np.testing.assert_allclose(of.predict(x, batch_size=7).logits, expected, rtol=1e-6, atol=1e-6)
    op = EquinoxModelOp(of.net, input_shape=(4,))
    np.testing.assert_allclose(op(x), of.predict(x).logits, rtol=1e-6, atol=1e-6)
    score = of.evaluate(rows(), batch_size=5)["loss"]
    assert score == pytest.approx(float(np.mean(square(np.asarray(expected), rows().arrays()["y"]))), rel=1e-5)


def test_a_module_may_take_whole_batches() -> None:
    """`takes_batch`: called once with every column, by the step and by an objective's `apply`."""

    class Whole(eqx.Module):
        net: eqx.nn.MLP
        takes_batch = True

        def __call__(self, batch: Any) -> Any:
            return jax.vmap(self.net)(batch["x"]) + batch["shift"]

    x, shift = rows(6).arrays()["x"], np.ones(2, np.float32)
    pure = PureEquinox(EquinoxNet(Whole(mlp())))
    outputs, _ = pure.forward(pure.params, {}, {"x": x, "shift": shift}, jax.random.key(0), True)
    np.testing.assert_allclose(outputs, jax.vmap(mlp())(x) + 1, rtol=1e-6)
    ctx = ObjectiveContext(pure.opened(pure.params, {}, None, train=True), {"x": x, "shift": shift, "mask": np.ones(6)},
                           jax.random.key(0), 0, 0, True, "float32")  # fmt: skip
    np.testing.assert_array_equal(ctx.apply(), outputs)


def test_lower_precision_is_cast_at_the_border() -> None:
    """bfloat16 inputs and weights inside, float32 outside; the numbers of casting by hand."""
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    low = lambda tree: jax.tree.map(lambda v: v.astype(jnp.bfloat16) if eqx.is_inexact_array(v) else v, tree)  # noqa: E731
    found = forward(mlp(), x, compute_dtype=jnp.bfloat16)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.vmap(low(mlp()))(low(jnp.asarray(x))).astype(jnp.float32))
    kept = forward(mlp(), x, compute_dtype=jnp.bfloat16, keep_float32=["layers.1"])
    assert not np.array_equal(kept, found)


def test_data_that_does_not_fit_names_module_and_rows(tmp_path: Path) -> None:
    wrong = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    with pytest.raises(ModelError, match=r"MLP does not take rows x of float32\[4\].*takes_batch"):
        fit(tmp_path, model(wrong))
    with pytest.raises(ModelError, match=r"MLP does not take rows of float32\[5\]"):
        model().predict(np.zeros((2, 5), np.float32))


# -- objectives, validations ------------------------------------------------------------------------------------


def test_an_objective_calls_the_module_and_its_records_are_kept(tmp_path: Path) -> None:
    """A value under a name of its own is in the history and among the last values. (pipekit:G5)"""

    def objective(ctx: Any) -> Any:
        outputs = ctx.apply()
        again = ctx.model(ctx.batch["x"])  # other noise
        term = ctx.mean("square", square(outputs, ctx.batch["y"]))
        spread = jnp.sum(jnp.abs(outputs - again))
        error = jnp.sum(ctx.mask * square(outputs, ctx.batch["y"]))
        return ObjectiveResult(term, record={"custom_mse": (error, jnp.sum(ctx.mask)), "spread": spread})

    run = fit(tmp_path, model(normed()), val=rows(9, 1), more={"objective": objective}, n_epochs=1)
    found = run.artifact["train"]
    assert found["custom_mse"] == pytest.approx(found["loss"], rel=1e-6)
    assert found["spread"] > 0
    assert run.artifact["val"]["spread"] == 0


@pytest.mark.slow
def test_an_objective_of_the_built_in_loss_changes_no_bit(tmp_path: Path) -> None:
    def objective(ctx: Any) -> Any:
        return ObjectiveResult(ctx.mean("loss", square(ctx.apply(), ctx.batch["y"])))

    plain, own = model(normed()), model(normed())
    fit(tmp_path / "a", plain, count=22)
    fit(tmp_path / "b", own, count=22, more={"objective": objective})
    same(plain, own)


def test_a_validation_of_the_users_own_sees_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    seen = []

    def validation(ctx: Any) -> Any:
        outputs = [np.asarray(ctx.model(batch["x"])) for batch in ctx.val_loader]
        again = [np.asarray(ctx.model(batch["x"])) for batch in ctx.val_loader]
        seen.append(all(np.array_equal(a, b) for a, b in zip(outputs, again, strict=True)))
        return {"loss": ctx.evaluate()["loss"], "largest": float(max(np.abs(o).max() for o in outputs))}

    run = fit(tmp_path, model(normed()), val=rows(8, 1), more={"eval_step_fn": validation})
    assert seen == [True, True]
    assert run.artifact["val"]["largest"] > 0


# -- hooks ------------------------------------------------------------------------------------------------------


class Twin(nnx.Module):
    """The Flax module with the weights of `mlp()`."""

    def __init__(self) -> None:
        like = mlp()
        for name, layer in zip(("first", "last"), like.layers, strict=True):
            made = nnx.Linear(layer.in_features, layer.out_features, rngs=nnx.Rngs(0))
            made.kernel[...], made.bias[...] = layer.weight.T, layer.bias
            setattr(self, name, made)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.first(x)))


def as_equinox(named: Any) -> dict[str, np.ndarray]:
    """Weights of `Twin` under the names and in the layouts of `mlp()`."""
    found = {}
    for number, layer in enumerate(("first", "last")):
        found[f"layers.{number}.weight"] = np.asarray(named[f"{layer}.kernel"]).T
        found[f"layers.{number}.bias"] = np.asarray(named[f"{layer}.bias"])
    return found


HOOKS = {
    "accumulation": (lambda: [GradientAccumulationHook(k=3)], 1e-5),
    "clip": (lambda: [GradientClipHook(max_norm=0.5)], 1e-5),
    "spike": (lambda: [SpikeSkipHook(factor=1.05, warmup=1, decay=0.5)], 1e-5),
    "ema": (lambda: [EMAHook(decay=0.9)], 1e-5),
    "all of them": (
        lambda: [GradientAccumulationHook(k=2), GradientClipHook(max_norm=5.0), SpikeSkipHook(warmup=2), EMAHook()],
        1e-5,
    ),
    "bfloat16": (lambda: [MixedPrecisionHook(precision="bfloat16")], 3e-2),
    "float16 with a scale": (lambda: [MixedPrecisionHook(precision="float16")], 3e-3),
}


ALWAYS = ("all of them",)


@pytest.mark.parametrize("case", [c if c in ALWAYS else pytest.param(c, marks=pytest.mark.slow) for c in HOOKS])
def test_hooks_give_the_numbers_of_the_flax_engine(case: str, tmp_path: Path) -> None:
    """Equal weights, data and hooks, once as Flax and once as Equinox; matmuls are written the other way around.

    In 16 bits every product is rounded to 8 (bfloat16) or 11 (float16) bits, in another order.
    """
    make, tolerance = HOOKS[case]
    ours, theirs = model(), NNModel(module=Twin(), loss=square)
    mine, his = make(), make()
    optim = {"kind": "sgd", "max_lr": 0.05}
    run = fit(tmp_path / "a", ours, count=22, n_epochs=3, optim=optim, more={"hooks": mine})
    other = theirs.train(
        settings(n_epochs=3, optim=optim), data=data(22), hooks=his, runs_dir=tmp_path / "b", quiet=True,
        checkpoint=CheckpointParams(every_n_epochs=1),
    )  # fmt: skip
    assert run.artifact["step"] == other.artifact["step"]
    expected = as_equinox(theirs.framework.weights(theirs.net))
    start = EquinoxNet(mlp()).arrays()
    for name, value in weights(ours).items():
        moved = np.abs(expected[name] - start[name]).max()
        np.testing.assert_allclose(value, expected[name], atol=tolerance * max(moved, 0.1), err_msg=name)
        assert moved > 1e-3
    for hook, twin in zip(mine, his, strict=True):
        if isinstance(hook, EMAHook):
            average, again = hook.get_averaged_model(), twin.get_averaged_model()
            assert average.n_averaged == again.n_averaged > 0
            assert isinstance(average.module, EquinoxNet)
            wanted = as_equinox(theirs.framework.weights(again.module))
            for name, value in average.module.arrays().items():
                np.testing.assert_allclose(value, wanted[name], atol=1e-5, err_msg=name)
            assert average.module.module is not ours.module


# -- storing and going on ---------------------------------------------------------------------------------------


WINDOWS = pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow, id="windows of two")


@pytest.mark.parametrize("optim", [{}, WINDOWS])
def test_an_interrupted_run_continues_bit_for_bit(tmp_path: Path, optim: Any) -> None:
    """Mid-epoch, with dropout, BatchNorm and a padded tail: weights, iterator and history (pipekit:D8.2) (pipekit:D8.1)

    The data goes on where it was: no row is seen twice and none is left out, or the history would tell.
    """
    given: dict[str, Any] = {"count": 30, "val": rows(9, 1), "eval_every_n_steps": 1, "optim": optim}
    straight = fit(tmp_path / "a", model(normed()), more={"checkpoint": EVERY}, **given)
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "b", model(normed()), more={"checkpoint": EVERY, "callbacks": [Stop(2)]}, **given)
    assert NNRun.load(straight.id, tmp_path / "b").status == "interrupted"
    assert_same_run(fit(tmp_path / "b", model(normed()), more={"checkpoint": EVERY}, **given), straight)


def test_a_stored_run_opens_in_a_module_with_other_weights(tmp_path: Path) -> None:
    """The weights of the checkpoint, whatever the template's were; its state too. (pipekit:H4)"""
    of = model(normed(0))
    run = fit(tmp_path, of)
    template = normed(5)
    opened = EquinoxModel.from_checkpoint(run.id, runs_dir=tmp_path, module=template)
    same(of, opened)
    x = rows().arrays()["x"]
    np.testing.assert_array_equal(opened.predict(x).logits, of.predict(x).logits)
    assert not np.array_equal(template[0].last.weight, opened.module.last.weight)


def test_another_shape_is_refused_by_the_name_of_its_leaf(tmp_path: Path) -> None:
    """A template that the checkpoint does not fit: leaf and both shapes are said. (pipekit:H11)"""
    run = fit(tmp_path, model(), n_epochs=1)
    wider = eqx.nn.MLP(4, 2, 9, 1, key=jax.random.key(0))
    with pytest.raises(ResumePointError, match=r"layers\.0\.bias is \(8,\) in the checkpoint, \(9,\) in the module"):
        EquinoxModel.from_checkpoint(run.id, runs_dir=tmp_path, module=wider)
    fewer = eqx.nn.MLP(4, 2, 8, 1, use_final_bias=False, key=jax.random.key(0))
    with pytest.raises(ResumePointError, match=r"layers\.1\.bias is \(2,\) in the checkpoint, not there in the module"):
        EquinoxModel.from_checkpoint(run.id, runs_dir=tmp_path, module=fewer)
    engine = engine_of(model(wider))
    state = engine.start()
    with pytest.raises(ResumePointError, match=r"layers\.0\.(weight|bias).*\(?8") as caught:
        engine.restore(state, {**engine.programs.named(state), **stored(run)})
    assert "9" in str(caught.value)


def test_a_run_that_fails_before_its_first_commit_leaves_the_weights(tmp_path: Path) -> None:
    of = model(normed())
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path, of, val=rows(8, 1), eval_every_n_steps=1, more={"callbacks": [Stop(1)],
            "checkpoint": CheckpointParams(every_n_epochs=1)})  # fmt: skip
    same(of, model(normed()))


@pytest.mark.slow
def test_training_goes_on_from_the_trained_module(tmp_path: Path) -> None:
    """A second call is a run of its own from the weights of now; so is a new model of the trained module."""
    of = model(normed())
    fit(tmp_path, of, n_epochs=1)
    other = model((of.module, of.state))
    first, second = fit(tmp_path, of, n_epochs=2), fit(tmp_path / "b", other, n_epochs=2)
    same(of, other)
    assert first.id == second.id


class Steep(eqx.Module):
    """A setting that is no array: the slope of the activation."""

    net: eqx.nn.Linear
    slope: float = 1.0

    def __call__(self, x: Any) -> Any:
        return self.slope * self.net(x)


def test_the_run_id_knows_settings_functions_and_weights() -> None:
    identity = lambda module: model(module).identity(0)  # noqa: E731
    make = lambda function: eqx.nn.MLP(4, 2, 8, 1, activation=function, key=jax.random.key(0))  # noqa: E731
    assert identity(make(jax.nn.relu)) == identity(make(jax.nn.relu))
    assert identity(make(jax.nn.relu)) != identity(make(jax.nn.gelu))
    assert identity(mlp(0)) != identity(mlp(1))
    linear = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    assert identity(Steep(linear)) != identity(Steep(linear, 2.0))
    assert identity(normed(drop=0.25)) != identity(normed(drop=0.5))


# -- what is refused --------------------------------------------------------------------------------------------


def test_what_equinox_modules_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected an eqx.Module that can be called, got str"):
        EquinoxModel("net")
    with pytest.raises(TypeError, match="the state beside a module is an eqx.nn.State, got int"):
        EquinoxModel((mlp(), 1))
    with pytest.raises(ConfigError, match="a step of your own changes a Flax module in place"):
        fit(tmp_path, model(), more={"train_step_fn": lambda ctx: None})
    built_in = NNModelParams(net=NNParams(kind="feed_forward", hidden_dims=(4,), input_dim=4, output_dim=2))
    with pytest.raises(ConfigError, match="the built-in networks are Flax modules; give an Equinox module"):
        _ = EquinoxModel(params=built_in).net
    assert list(tmp_path.iterdir()) == []


def test_the_modules_import_without_equinox_and_name_the_extra() -> None:
    """(pipekit:M2)"""
    code = """
import sys
sys.modules["equinox"] = None
import nnx_jax.backends.equinox as backend, nnx_jax.engines.equinox as engine
for first in (backend.EquinoxModel, engine.EquinoxModelOp):
    try:
        first(object())
    except ImportError as error:
        assert "pip install 'nnx_jax[equinox]'" in str(error), error
    else:
        raise AssertionError(first)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
