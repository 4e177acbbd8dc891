"""The engine with hooks: windows over an epoch's end, states in the middle of one, and what is compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, ResumePointError
from nnx_jax.core.hooks import StatefulUpdateHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.fit import prepare, register_hooks
from nnx_jax.hooks import GradientAccumulationHook, MixedPrecisionHook
from nnx_jax.loop.engine import Span
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from tests.e2e.toys import Slope, inputs, square

DISPATCH = ["step", "span"]


def engine(
    *rows: float, hooks: Any = (), batch: int = 1, optim: Any = None, kind: Any = "constant", **train: Any
) -> FlaxEngine:
    """An engine for the weight 1 on these rows, target 0, SGD of rate 0.1."""
    return prepare(*made(*rows, hooks=hooks, batch=batch, optim=optim, kind=kind, **train)).engine


def made(*rows: float, hooks: Any = (), batch: int = 1, optim: Any = None, kind: Any = "constant", **train: Any) -> Any:
    if "max_steps" not in train:
        train.setdefault("n_epochs", 2)
    settings = {"kind": "sgd", "max_lr": 0.1, "momentum": 0.0, **(optim or {})}
    spec = RunSpec(
        model=NNModelParams(),
        data=NNDataParams(train=inputs(*rows), batch_size=batch, shuffle=False),
        train=NNTrainParams(
            optim=NNOptimParams(**settings), scheduler=NNSchedulerParams(kind=kind, clock="optimizer_update"), **train
        ),
    )
    model = NNModel(params=spec.model, module=Slope(1.0), loss=square)
    return model, spec, register_hooks(model, spec, hooks)


def epoch(engine: FlaxEngine, state: Any, number: int, *, first: int = 0, count: int | None = None) -> Any:
    """Run an epoch, or a part of it, as the loop does."""
    count = engine.n_batches - first if count is None else count
    closes = not engine.carries and first + count == engine.n_batches
    return engine.run_span(state, Span(number, first, count, closes), lambda done: False)[0]


def weight(engine: FlaxEngine, state: Any) -> float:
    return float(engine.programs.state(state).params["w"][0])


class Adds(StatefulUpdateHook):
    """A slot of one number."""

    def init_state(self, params: Any) -> Any:
        return {"n": np.float32(0)}

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is Stage.BEFORE_BATCH:
            return ctx.window_starts, ctx.loss
        if stage is Stage.AFTER_OPTIMIZER_STEP:
            ctx.state = {"n": ctx.state["n"] + 1}
        return True, ctx.loss


# Windows and epochs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", DISPATCH)
@pytest.mark.parametrize("every", ["update", "batch"])
def test_a_window_goes_on_in_the_next_epoch(dispatch: str, every: str) -> None:
    """nvalchemi:62: K = 4, epochs of 6, so 12 microbatches are 3 updates; each takes the mean of four equal ones."""
    hook = GradientAccumulationHook(4, on_partial="carry")
    runs = engine(*[1.0] * 6, hooks=[hook], dispatch=dispatch, record_every=every)
    state = epoch(runs, runs.start(), 0)
    assert runs.open_batches(state) == 2
    assert weight(runs, state) == pytest.approx(0.8)
    state = epoch(runs, state, 1)
    assert runs.open_batches(state) == 0
    assert weight(runs, state) == pytest.approx(0.8**3)
    records, failure = runs.read_records(state)
    assert failure is None
    assert records[-1].step[-1] == 3
    assert [number for part in records for number in part.batch[part.committed].tolist()] == [3, 7, 11]
    assert sum(runs.programs.watch.compiles.values()) <= 2


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_a_short_window_is_divided_by_its_own_weight(dispatch: str) -> None:
    """nvalchemi:63: six microbatches of K = 4 are two updates; divided by 4, the second would multiply by 0.9."""
    runs = engine(*[1.0] * 6, hooks=[GradientAccumulationHook(4)], dispatch=dispatch)
    state = epoch(runs, runs.start(), 0)
    assert runs.open_batches(state) == 0
    assert weight(runs, state) == pytest.approx(0.64)


def test_a_window_of_one_is_no_window() -> None:
    """nvalchemi:64"""
    rows = (1.5, 0.3, 2.2, 0.7)
    plain, windowed = engine(*rows), engine(*rows, hooks=[GradientAccumulationHook(1)])
    one, two = epoch(plain, plain.start(), 0), epoch(windowed, windowed.start(), 0)
    assert weight(plain, one) == weight(windowed, two)


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_a_hundred_microbatches_compile_two_programs(dispatch: str) -> None:
    """nvalchemi:70"""
    hook = GradientAccumulationHook(4, on_partial="carry")
    runs = engine(*[0.1] * 25, hooks=[hook, TrainingUpdateHook()], dispatch=dispatch)
    state = runs.start()
    for number in range(4):
        state = epoch(runs, state, number)
    assert runs.batch_count(state) == 100
    assert sum(runs.programs.watch.compiles.values()) <= 2


# A state in the middle of a window -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hook", [True, False])
def test_a_state_in_the_middle_of_a_window(by_hook: bool) -> None:
    """nvalchemi:67: x = (1, 2, 1, 3) sums to 30, 30 / 4 * 0.1 = 0.75; without the accumulator it would give 0.5."""
    hooks = [GradientAccumulationHook(4)] if by_hook else []
    optim = {"accumulate_grad_batches": 1 if by_hook else 4}
    kinds = {"hooks": hooks, "optim": optim, "dispatch": "step"}
    whole, first, second = (engine(1, 2, 1, 3, **kinds) for _ in range(3))
    expected = epoch(whole, whole.start(), 0)
    state = first.run_span(first.start(), Span(0, 0, 2, closes=False), lambda done: False)[0]
    held = {name: np.array(leaf) for name, leaf in first.snapshot(state, 0, 2).arrays.items()}
    resumed = second.restore(second.start(), held)
    assert second.open_batches(resumed) == 2
    resumed = epoch(second, resumed, 0, first=2)
    assert weight(second, resumed) == pytest.approx(0.25, abs=1e-6)
    assert weight(second, resumed) == weight(whole, expected)


def test_a_stored_state_is_read_without_what_hosts_looked_at() -> None:
    """Values handed out for watching are of no use to a later run."""

    class Watch:
        stage, frequency, needs = Stage.AFTER_BATCH, 1, ("gradients",)

        def __call__(self, ctx: Any, stage: Stage) -> None: ...

    watched, plain = engine(1, 2, hooks=[Watch()]), engine(1, 2, hooks=[])
    state = epoch(watched, watched.start(), 0)
    named = watched.snapshot(state, 1, 0).arrays
    assert set(named) == set(plain.abstract(None))  # type: ignore[arg-type]
    assert set(watched.topology) == set(plain.topology)
    carried = plain.restore(plain.start(), {name: np.array(leaf) for name, leaf in named.items()})
    assert weight(plain, carried) == weight(watched, state)


# What hooks decide ---------------------------------------------------------------------------------------------------


def test_one_place_for_the_window() -> None:
    hooks = [GradientAccumulationHook(4)]
    assert engine(1, 1, 1, 1, hooks=hooks, optim={"accumulate_grad_batches": 4}).accumulate == 4
    assert engine(1, 1, 1, 1, hooks=hooks).accumulate == 4
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches: got 2, but GradientAccumulationHook has k=4"):
        engine(1, 1, 1, 1, hooks=hooks, optim={"accumulate_grad_batches": 2})


def test_the_short_name_is_the_hook_beside_other_hooks() -> None:
    runs = engine(1, 2, 1, 3, hooks=[TrainingUpdateHook()], optim={"accumulate_grad_batches": 4})
    assert runs.hooks is not None
    assert [type(hook).__name__ for hook in runs.hooks.update] == ["GradientAccumulationHook", "TrainingUpdateHook"]
    state = epoch(runs, runs.start(), 0)
    assert weight(runs, state) == pytest.approx(0.25, abs=1e-6)
    assert "hooks" in runs.topology


def test_one_place_for_the_precision() -> None:
    runs = engine(1, hooks=[MixedPrecisionHook("bf16")])
    assert runs.pure.compute_dtype == jnp.bfloat16
    assert engine(1, hooks=[MixedPrecisionHook("bf16")], precision="bfloat16").pure.compute_dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match=r"train.precision: got 'bfloat16', but MixedPrecisionHook has 'float16'"):
        engine(1, hooks=[MixedPrecisionHook("fp16")], precision="bfloat16")


@pytest.mark.parametrize(("partial", "planned"), [("flush", 4), ("carry", 3)])
def test_schedules_know_how_many_updates_there_will_be(partial: Any, planned: int) -> None:
    """Two epochs of six microbatches, K = 4: the cosine ends with the last update."""
    hook = GradientAccumulationHook(4, on_partial=partial)
    job = prepare(*made(*[1.0] * 6, hooks=[hook], kind="cosine"))
    assert job.schedules.updates["main"] is not None
    rates = [float(job.schedules.updates["main"](jnp.int32(count))) for count in (planned - 1, planned, planned + 5)]
    assert rates[0] > rates[1]
    assert rates[1] == pytest.approx(rates[2])


def test_a_slot_is_bound_and_written() -> None:
    """A state loaded before the run goes in; reading it copies, so that training may go on."""
    hook = Adds()
    hook.load_state_dict({"state": {"n": np.float32(5)}})
    runs = engine(1, 1, 1, hooks=[hook])
    state = runs.start()
    runs.bind(state)
    before = hook.state_dict()["state"]["n"]
    state = epoch(runs, state, 0)
    assert (float(before), float(hook.state_dict()["state"]["n"])) == (5.0, 8.0)
    hook.load_state_dict({"state": {"n": np.float32(1)}})
    assert float(runs.programs.state(state).slots["Adds"]["n"]) == 1.0


def test_a_state_of_other_hooks_does_not_fit() -> None:
    source, other = engine(1, hooks=[Adds()]), engine(1, hooks=[])
    held = {name: np.array(leaf) for name, leaf in source.snapshot(source.start(), 0, 0).arrays.items()}
    with pytest.raises(ResumePointError, match="slots/Adds/n"):
        other.restore(other.start(), held)


@pytest.mark.parametrize("dispatch", [*DISPATCH, "staged", "eager"])
def test_every_executor_gives_the_same(dispatch: str, tmp_path: Path) -> None:
    """nvalchemi:156"""
    rows, hooks = (1.0, 0.5, 2.0, 0.3, 1.2, 0.7), [GradientAccumulationHook(4, on_partial="carry"), Adds()]
    runs = engine(*rows, hooks=hooks[:1], dispatch=dispatch)
    state = runs.start()
    for number in range(2):
        state = epoch(runs, state, number)
    x = np.square([*rows, *rows]).reshape(3, 4).mean(axis=1)
    assert weight(runs, state) == pytest.approx(float(np.prod(1 - 0.2 * x)), abs=1e-6)
    records, _ = runs.read_records(state)
    assert records[-1].step[-1] == 3


def test_a_debugging_executor_tells_no_costs() -> None:
    with pytest.raises(ConfigError, match="train.dispatch: 'staged' compiles no update"):
        engine(1, dispatch="staged").costs()
