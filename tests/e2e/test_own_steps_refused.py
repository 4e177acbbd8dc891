"""Steps of one's own that cannot be, and what they cannot stand beside: refused with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from nnx_jax.core.errors import ConfigError, StepError
from nnx_jax.hooks import MixedPrecisionHook
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.objectives.objective import Objective, supervised_objective
from nnx_jax.step.own import TrainStepContext, default_train_step, finalize_step
from tests.e2e.own import Two, climb, rows_of, train, up
from tests.e2e.toys import Slope, column, gradients, half, slope


def test_one_owner_of_the_updates(tmp_path: Path) -> None:
    """nnx:B041 before callbacks, loaders and parameters are touched, and before there is a run."""

    class Untouched(Callback):
        def on_train_begin(self, ctx: TrainContext) -> None:
            raise AssertionError

    class Loader:
        def __iter__(self) -> Any:
            raise AssertionError

    module = Slope()
    for given, error, match in (
        ({"train_step_fn": climb, "objective": up}, ValueError, "both train_step_fn and objective"),
        ({"train_step_fn": supervised_objective()}, ValueError, "pass it as objective="),
        ({"objective": 3}, TypeError, "an Objective or a function"),
        ({"objective": Objective}, TypeError, r"pass an instance: Objective\(\)"),
        ({"train_step_fn": "step"}, TypeError, "train_step_fn must be a function"),
    ):
        with pytest.raises(error, match=match):
            train(tmp_path, module, None, train_loader=Loader(), given={"callbacks": [Untouched()], **given})
    assert not list(tmp_path.iterdir())
    assert not module.w[...].any()


def test_hooks_and_executors_take_no_part(tmp_path: Path) -> None:
    hooks = {"train_step_fn": climb, "hooks": [MixedPrecisionHook("bf16")]}
    with pytest.raises(ConfigError, match=r"hooks: hooks take no part in a step of your own \(climb\)"):
        train(tmp_path, Slope(), rows_of(1), given=hooks)
    with pytest.raises(ConfigError, match=r"train\.dispatch: got 'eager', but climb.*always compiled"):
        train(tmp_path, Slope(), rows_of(1), dispatch="eager", given={"train_step_fn": climb})
    assert not list(tmp_path.iterdir())


def test_finalize_step_makes_an_update_of_every_microbatch(tmp_path: Path) -> None:
    """nnx:B042"""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        return finalize_step(lambda net: jnp.sum(net(ctx.batch["x"])), ctx, paradigm="mine")

    with pytest.raises(ConfigError, match="mine: finalize_step makes an update of every microbatch"):
        train(tmp_path, Slope(), rows_of(1, 1), accumulate=2, given={"train_step_fn": step})
    assert not list(tmp_path.iterdir())

    def number(ctx: TrainStepContext) -> dict[str, Any]:
        return finalize_step(jnp.float32(1), ctx)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="the loss as a function"):
        train(tmp_path, Slope(), rows_of(1), given={"train_step_fn": number})

    def broken(ctx: TrainStepContext) -> dict[str, Any]:
        return finalize_step(lambda net: jnp.sum(jnp.log(net(ctx.batch["x"]) - 1.0)), ctx)

    module = Slope()
    with pytest.raises(FloatingPointError, match="update 1, microbatch 0: loss term 'loss'"):
        train(tmp_path, module, rows_of(1), given={"train_step_fn": broken})
    assert not module.w[...].any()


def test_no_names_where_there_is_one_optimizer(tmp_path: Path) -> None:
    """nnx:B051 (the first half)"""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        ctx.report_update("default")  # type: ignore[misc]
        return {"loss": jnp.float32(0)}

    with pytest.raises(TypeError, match="report_update"):
        train(tmp_path, Slope(), rows_of(1), given={"train_step_fn": step})


def _value(ctx: TrainStepContext) -> Any:
    if ctx.batch["x"].sum() > 0:
        return climb(ctx)
    return {"loss": jnp.float32(0)}


def _twice(ctx: TrainStepContext) -> Any:
    default_train_step(ctx)
    return default_train_step(ctx)


def _update_after(ctx: TrainStepContext) -> Any:
    record = default_train_step(ctx)
    ctx.report_update()
    return record


def _more(ctx: TrainStepContext) -> Any:
    return {**default_train_step(ctx), "more": 1.0}


def _number(ctx: TrainStepContext) -> Any:
    ctx.report_update(when=1)
    return {"loss": jnp.float32(0)}


def _vector(ctx: TrainStepContext) -> Any:
    return ctx.value_and_grad(lambda net: net(ctx.batch["x"]))


def _missing(ctx: TrainStepContext) -> Any:
    ctx.update({})


def _wide(ctx: TrainStepContext) -> Any:
    return {"loss": jnp.float32(0), "wide": ctx.batch["x"]}


@pytest.mark.parametrize(
    ("step", "error", "match"),
    [
        (_value, StepError, r"_value, .*test_own_steps_refused\.py:\d+: `if ctx.*sum.* > 0:` needs the value"),
        (lambda ctx: None, StepError, "returned NoneType; return the loss, or a record"),
        (lambda ctx: {"los": 1.0}, StepError, r"keys \['los'\]"),
        (lambda ctx: {"loss": jnp.float32(0), "lr": 1.0}, ConfigError, "records 'lr'"),
        (_twice, StepError, "calls default_train_step twice"),
        (_update_after, StepError, "report_update after default_train_step"),
        (_more, StepError, "another record than default_train_step.*extra_metrics"),
        (_number, TypeError, r"write when=\(x > 0\)"),
        (_vector, StepError, r"the loss has shape \[1, 1\]"),
        (_missing, StepError, "no gradient is given for w"),
        (_wide, StepError, r"'wide' of shape \[1, 1\]"),
    ],
)
def test_steps_that_cannot_be(tmp_path: Path, step: Any, error: type[Exception], match: str) -> None:
    """Each says what to write instead, before anything is compiled or on the disk."""
    with pytest.raises(error, match=match):
        train(tmp_path, Slope(), gradients(1), loss=slope, given={"train_step_fn": step})
    assert not list(tmp_path.iterdir())


def test_a_frozen_parameter_is_not_written(tmp_path: Path) -> None:
    def step(ctx: TrainStepContext) -> dict[str, Any]:
        ctx.model.b.w.set_value(ctx.model.a.w[...])
        return climb(ctx)

    with pytest.raises(StepError, match="changes parameter 'b.w', which is frozen"):
        train(tmp_path, Two(), rows_of(1), model={"freeze": ("b.*",)}, given={"train_step_fn": step})


def test_only_metrics_that_a_step_records_can_be_followed(tmp_path: Path) -> None:
    """nnx:B072; a name the step records is followed, and the validation's metrics are the built-in ones."""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        return {**climb(ctx), "longest": jnp.max(ctx.batch["x"])}

    data = gradients(1, 2)
    more: dict[str, Any] = {"loss": half, "val": data, "model": {"metrics": ("mae",)}, "given": {"train_step_fn": step}}
    with pytest.raises(ConfigError, match="follows 'train_mae', which this run does not record"):
        train(tmp_path, Slope(), data, monitor={"metric": "mae", "split": "train"}, **more)
    assert not list(tmp_path.iterdir())
    run = train(tmp_path, Slope(), data, monitor={"metric": "longest", "split": "train", "mode": "min"}, **more)
    assert column(run, "epoch", "monitor") == column(run, "epoch", "train_longest") == [1.5]
    assert column(run, "epoch", "val_mae") == [pytest.approx((1.3 + 1.6) / 2)]
