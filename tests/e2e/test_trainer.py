"""Trainer: several named optimizers under one run, by a step of one's own or by an objective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError
from nnx_jax.data import ArrayDataset
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.objectives.objective import ObjectiveContext, ObjectiveResult
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.runs.run import NNRun
from nnx_jax.step.own import TrainerStepContext, default_train_step
from tests.e2e.helpers import assert_same_run, stored
from tests.e2e.own import HALVING, Two, rows_of, sgd, trainer, up
from tests.e2e.toys import Killed, Watch, column, only_run

EPOCHS = NNSchedulerParams(kind="step", step_size=1, factor=0.5)


def pair(run: NNRun) -> tuple[float, float]:
    """The weights a and b."""
    kept = stored(run)
    return float(kept["params/a.w"][0]), float(kept["params/b.w"][0])


def both(ctx: TrainerStepContext) -> dict[str, Any]:
    """a descends by every microbatch, b by every other; each reports its own updates."""
    other = ctx.batch_idx % 2 == 1
    losses = {}
    for name, when in (("a", True), ("b", other)):
        optimizer = ctx.optimizers[name]
        losses[name], grads = optimizer.value_and_grad(lambda net: ctx.mean(net(ctx.batch["x"])[:, 0]))
        assert [path.split(".")[0] for path in grads] == [name]
        optimizer.update(grads, when=when)
        ctx.report_update(name, when=when)
    return {"loss": losses["a"] + losses["b"], "rate_b": ctx.schedulers["b"]}


# -- a step of one's own ----------------------------------------------------------------------------------------


def test_each_optimizer_has_updates_and_a_schedule_of_its_own(tmp_path: Path) -> None:
    """nnx:S12 nnx:B059 (rates of a, which halve by its reports, and of b, which has no schedule, by hand)"""
    optims = {"b": sgd("b.*", 0.3), "a": sgd("a.*", 0.4)}
    watch = Watch("on_epoch_end", lambda ctx: {name: view.updates for name, view in ctx.optimizers.items()})
    run = trainer(
        tmp_path, Two(), rows_of(-1, -2, -1), both, optims=optims, schedulers={"a": HALVING}, n_epochs=2,
        given={"callbacks": [watch]},
    )  # fmt: skip
    rates = [0.4 * 0.5**n for n in range(6)]
    assert column(run, "update", "lr_a") == pytest.approx(rates)
    assert column(run, "update", "lr_b") == [None, pytest.approx(0.3), None] * 2
    assert column(run, "update", "train_rate_b") == pytest.approx([0.3] * 6)
    assert column(run, "update", "step") == [1, 2, 3, 4, 5, 6]
    assert watch.seen == [{"a": 3, "b": 1}, {"a": 6, "b": 2}]
    assert pair(run) == pytest.approx((sum(r * x for r, x in zip(rates, [1, 2, 1] * 2, strict=True)), -0.6))


def test_reports_for_one_never_move_the_other(tmp_path: Path) -> None:
    """nnx:B059 both on the update clock, a is never reported: its rate stands, and each epoch warns of it."""

    def step(ctx: TrainerStepContext) -> dict[str, Any]:
        loss, grads = ctx.value_and_grad(lambda net: ctx.mean(net(ctx.batch["x"])[:, 0]))
        for name in ("a", "b"):
            ctx.optimizers[name].update(grads)
        ctx.report_update("b")
        return {"loss": loss}

    with pytest.warns(UserWarning, match="no update of 'a' was reported in epoch") as told:
        run = trainer(
            tmp_path, Two(), rows_of(-1, -1), step, schedulers={"a": HALVING, "b": HALVING}, n_epochs=2
        )  # fmt: skip
    assert len(told) == 2
    assert pair(run) == pytest.approx((0.4, -0.1 * (1 + 0.5 + 0.25 + 0.125)))


@pytest.mark.parametrize("given", ["step", "objective"])
def test_schedules_that_are_not_stepped(tmp_path: Path, given: str) -> None:
    """nnx:B061 neither epochs nor reports move one, of either clock."""
    more: dict[str, Any] = {"schedulers": {"a": EPOCHS, "b": HALVING}, "auto_step_schedulers": False, "n_epochs": 3}
    step, objective = (both, None) if given == "step" else (None, up)
    run = trainer(tmp_path, Two(), rows_of(-1, -1), step, given={"objective": objective}, **more)
    for name in ("lr_a", "lr_b"):
        assert {rate for rate in column(run, "update", name) if rate is not None} == {float(np.float32(0.1))}


def test_a_step_against_the_same_loop_by_hand(tmp_path: Path) -> None:
    """A small adversarial pair under Adam with clipping, against optax in a bare jitted loop, to 1e-6.

    The generator is asked with noise of the step's own key, so the loop by hand draws it from the same key.
    """
    from nnx_jax.step import rng

    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.g, self.d = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.d(x)

    def real_or_not(net: Any, real: Any, noise: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-net.d(real))) + jnp.mean(jax.nn.softplus(net.d(net.g(noise))))

    def fooled(net: Any, noise: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-net.d(net.g(noise))))

    def step(ctx: TrainerStepContext) -> dict[str, Any]:
        real = ctx.batch["x"]
        noise = jax.random.normal(ctx.rng, (len(real), 2))
        d, g = ctx.optimizers["d"], ctx.optimizers["g"]
        loss, grads = d.value_and_grad(lambda net: real_or_not(net, real, noise))
        d.update(grads)
        ctx.report_update("d")
        lost, grads = g.value_and_grad(lambda net: fooled(net, noise))
        g.update(grads)
        ctx.report_update("g")
        return {"loss": loss, "g": lost}

    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    adam: dict[str, Any] = {"kind": "adam", "momentum": None, "betas": (0.5, 0.9), "weight_decay": 0.0}
    optims = {"g": sgd("g.*", 0.02, **adam), "d": sgd("d.*", 0.01, **adam, grad_clip_norm=0.05)}
    run = trainer(tmp_path, Pair(), ArrayDataset(x=x), step, optims=optims, batch_size=8, n_epochs=4, seed=5)

    graph, state = nnx.split(Pair())
    make = {
        "d": optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.01, 0.5, 0.9)),
        "g": optax.adam(0.02, 0.5, 0.9),
    }
    opt = {name: tx.init(state[name]) for name, tx in make.items()}

    @jax.jit
    def by_hand(state: Any, opt: Any, real: Any, noise: Any) -> Any:
        losses = {}
        for name, loss in (("d", lambda net: real_or_not(net, real, noise)), ("g", lambda net: fooled(net, noise))):
            losses[name], grads = jax.value_and_grad(lambda s, f=loss: f(nnx.merge(graph, s)))(state)
            moved, new = make[name].update(grads[name], opt[name])
            state = nnx.State({**state, name: optax.apply_updates(state[name], moved)})
            opt = {**opt, name: new}
        return state, opt, losses

    seen = []
    for number in range(12):
        key = rng.stream_key(rng.run_key(5), rng.OWN_STEP, number)
        noise = jax.random.normal(key, (8, 2))
        state, opt, losses = by_hand(state, opt, x[number % 3 * 8 :][:8], noise)
        seen.append((float(losses["d"]), float(losses["g"])))
    kept = stored(run)
    for name, value in {".".join(map(str, p)): v for p, v in nnx.to_flat_state(state)}.items():
        assert kept[f"params/{name}"] == pytest.approx(np.asarray(value[...]), abs=1e-6), name
    found = list(zip(column(run, "update", "train_loss"), column(run, "update", "train_g"), strict=True))
    assert np.array(found) == pytest.approx(np.array(seen), abs=1e-6)


# -- an objective -----------------------------------------------------------------------------------------------


def test_every_commit_steps_all_each_clipping_its_own(tmp_path: Path) -> None:
    """nnx:B091 gradients 3 and 1 (mean inputs, and 1) by optax: a is clipped to 0.5, b is not; windows of 2."""
    optims = {"a": sgd("a.*", 0.1, grad_clip_norm=0.5), "b": sgd("b.*", 0.2, grad_clip_norm=5.0)}
    optims = {name: optim.replace(accumulate_grad_batches=2) for name, optim in optims.items()}
    run = trainer(tmp_path, Two(), rows_of(2, 4, 3), optims=optims, given={"objective": up})
    params, clip = {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": 0.5, "b": 5.0}
    for grads in ({"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 1.0}):  # (2 + 4) / 2, and the short window of 3
        for name, rate in (("a", 0.1), ("b", 0.2)):
            tx = optax.chain(optax.clip_by_global_norm(clip[name]), optax.sgd(rate))
            moved, _ = tx.update(jnp.full(1, grads[name]), tx.init(params[name]))
            params[name] = optax.apply_updates(params[name], moved)
    assert pair(run) == pytest.approx((float(params["a"][0]), float(params["b"][0])))
    assert pair(run) == pytest.approx((-0.1, -0.4))
    assert column(run, "update", "grad_norm") == pytest.approx([10**0.5] * 2)


def test_windows_must_agree(tmp_path: Path) -> None:
    """nnx:B090"""
    optims = {"a": sgd("a.*"), "b": sgd("b.*").replace(accumulate_grad_batches=2)}
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches differs \(a: 1, b: 2\)"):
        trainer(tmp_path, Two(), rows_of(1), optims=optims, given={"objective": up})
    assert not list(tmp_path.iterdir())


def of_two_terms(ctx: ObjectiveContext) -> ObjectiveResult:
    out = ctx.apply()[:, 0]
    noise = jax.random.normal(ctx.rng, out.shape)
    return ObjectiveResult([ctx.mean("square", (out - 1) ** 2), ctx.mean("noise", noise * out, weight=0.3)])


@pytest.mark.parametrize("given", ["step", "objective"])
def test_a_resume_inside_an_epoch_goes_on_bit_for_bit(tmp_path: Path, given: str) -> None:
    """Killed in the second epoch, after 2 of its 5 updates; a on the update clock, b on the epoch clock."""

    class Dies(Callback):
        def on_optimizer_update(self, ctx: TrainContext, event: Any) -> None:
            if ctx.step == 8:
                raise Killed

    step, objective = (both, None) if given == "step" else (None, of_two_terms)
    more: dict[str, Any] = {"schedulers": {"a": HALVING, "b": EPOCHS}, "n_epochs": 3}
    more["checkpoint"] = {"every_n_steps": 7}
    data = rows_of(1, 2, 3, 4, 5)
    whole = trainer(tmp_path / "whole", Two(), data, step, given={"objective": objective}, **more)
    with pytest.raises(Killed):
        trainer(tmp_path / "cut", Two(), data, step, given={"objective": objective, "callbacks": [Dies()]}, **more)
    stopped = only_run(tmp_path / "cut")
    assert stopped.last is not None
    assert stopped.last.step == 7
    again = trainer(tmp_path / "cut", Two(), data, step, given={"objective": objective}, **more)
    assert_same_run(whole, again)
    rates = [rate for rate in column(again, "update", "lr_b") if rate is not None]
    assert set(rates) == {float(np.float32(rate)) for rate in (0.1, 0.05, 0.025)}


# -- what is refused --------------------------------------------------------------------------------------------


def test_somebody_must_make_the_updates(tmp_path: Path) -> None:
    """nnx:B233 (the first half) nnx:B051 (the second)"""
    with pytest.raises(ValueError, match="a Trainer has no step of its own"):
        trainer(tmp_path, Two(), rows_of(1))
    with pytest.raises(ValueError, match="both trainer_step_fn and objective"):
        trainer(tmp_path, Two(), rows_of(1), both, given={"objective": up})

    def unknown(ctx: TrainerStepContext) -> Any:
        ctx.report_update("zz")

    def unnamed(ctx: TrainerStepContext) -> Any:
        ctx.report_update()

    def default(ctx: TrainerStepContext) -> Any:
        return default_train_step(ctx)

    for step, error, match in (
        (unknown, ValueError, "unknown: there is no optimizer 'zz'.*a, b"),
        (unnamed, ValueError, "unnamed: name the optimizer.*a, b"),
        (default, TypeError, "a Trainer has no default step"),
    ):
        with pytest.raises(error, match=match):
            trainer(tmp_path, Two(), rows_of(1), step)
    assert not list(tmp_path.iterdir())


def test_the_command_says_that_a_trainer_needs_python(tmp_path: Path) -> None:
    """Its options reach the trainer block, and the refusal says where the step comes from."""
    (tmp_path / "cfg.yaml").write_text(
        "model: {net: {kind: feed_forward}}\ndata: {train: digits}\n"
        "trainer: {n_epochs: 1, optims: {main: {kind: adam}}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml"]
    shown = subprocess.run([*command, "--salt", "s", "--print-config"], cwd=tmp_path, capture_output=True, text=True)
    assert "salt: s" in shown.stdout.split("trainer:")[1], shown.stderr
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "give Trainer.train a trainer_step_fn or an objective, from Python" in done.stderr
