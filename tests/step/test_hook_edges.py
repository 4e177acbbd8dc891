"""Where hooks meet: vetoes beside screens, scales beside clips, replaced losses and gradients, stops, resumes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import HookTypeError, NonFiniteError, StepError, TraceBoundaryError, VetoError
from nnx_jax.core.hooks import TracedHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as S
from nnx_jax.hooks import GradientAccumulationHook, GradientClipHook, MixedPrecisionHook, SkipNonFinite
from nnx_jax.objectives.terms import LossTerm
from tests.hooks.toy import Toy
from tests.step.test_hooks import Every

NAN = float("nan")


class At(TracedHook):
    """Calls a function at one stage."""

    def __init__(self, stage: S, function: Any) -> None:
        self.stage, self.function = stage, function

    def __call__(self, ctx: Any, stage: S) -> None:
        self.function(ctx)


class Ask(TrainingUpdateHook):
    """Calls a function at one stage; it may return whether to proceed."""

    def __init__(self, stage: S, function: Any, priority: int = 50) -> None:
        self.stage, self.function, self.priority = stage, function, priority

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        answer = self.function(ctx) if stage is self.stage else None
        return True if answer is None else answer, ctx.loss


def halve(name: str) -> Any:
    def change(ctx: Any) -> None:
        setattr(ctx, name, ctx.tree_map(lambda leaf: leaf * 0.5, getattr(ctx, name)))

    return change


def taps(toy: Toy) -> Any:
    return jax.device_get(toy.programs.state(toy.carry).accum["taps"])


TAPPED = {"taps": frozenset({"loss", "gradients"})}


def test_what_watchers_see_is_unscaled_once_and_not_clipped() -> None:
    """The gradient of AFTER_BACKWARD: 2 w = 2, then 1.6, whatever is scaled before it and clipped after it."""
    for hooks in ((), (MixedPrecisionHook("fp16", init_scale=64.0),), (GradientClipHook(100.0),)):
        toy = Toy(*hooks, plan=TAPPED)
        seen = [float(taps(toy.step(1.0))["gradients"]["w"]) for _ in range(2)]
        np.testing.assert_allclose(seen, [2.0, 1.6], rtol=1e-3)
    clipped = Toy(GradientClipHook(0.5), plan=TAPPED)
    assert float(taps(clipped.step(1.0))["gradients"]["w"]) == 2.0
    window = Toy(GradientAccumulationHook(2), MixedPrecisionHook("fp16", init_scale=1024.0), plan=TAPPED)
    assert [float(taps(window.step(1.0))["gradients"]["w"]) for _ in range(2)] == [2.0, 2.0]


def test_unscaled_gradients_stay_unscaled_after_the_scaler() -> None:
    seen: dict[str, Any] = {}

    def look(ctx: Any) -> None:
        seen["after"] = ctx.constant(ctx.unscaled_grads["w"])

    hooks = MixedPrecisionHook("fp16", init_scale=1024.0), Ask(S.DO_OPTIMIZER_STEP, look, priority=30)
    Toy(*hooks, executor="eager").step(1.0)
    assert float(seen["after"]) == 2.0


def test_both_clips_clip_by_their_own_norm() -> None:
    """The hook makes (3, 4) of length 1, the optimizer's own limit halves that."""
    toy = Toy(GradientClipHook(1.0), w=[0.0, 0.0], rate=1.0, slope=True, clip_norm=0.5).step([[3.0, 4.0]])
    np.testing.assert_allclose(toy.w, [-0.3, -0.4], rtol=1e-6)
    values = Toy(GradientClipHook(max_value=1.0), w=[0.0, 0.0], rate=1.0, slope=True, clip_norm=10.0)
    np.testing.assert_allclose(values.step([[300.0, 400.0]]).w, [-1.0, -1.0], rtol=1e-6)


def test_a_clip_hides_nothing_from_the_check() -> None:
    def root(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        return (LossTerm("root", jnp.sum(jnp.sqrt(outputs).sum(-1) * batch["mask"]), jnp.sum(batch["mask"])),)

    toy = Toy(GradientClipHook(max_value=1.0), w=[0.0, 1.0], terms=root, nonfinite="fail").step([[1.0, 1.0]])
    assert toy.w == [0.0, 1.0]
    with pytest.raises(NonFiniteError):
        toy.programs.read_records(toy.carry)


def two(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Terms with denominators of their own."""
    return (
        LossTerm("a", jnp.sum(outputs * batch["mask"]), jnp.sum(batch["mask"])),
        LossTerm("b", jnp.sum(outputs * batch["t"]), jnp.sum(batch["t"])),
    )


def window_of_two(*hooks: Any, traced: Any = ()) -> float:
    toy = Toy(GradientAccumulationHook(2), *hooks, traced=traced, terms=two, w=0.0, rate=1.0)
    return toy.step(1.0, 1.0).step(2.0, 3.0).w


def test_a_loss_changed_early_or_late_has_the_same_gradient() -> None:
    """(1 + 2) / 2 + (1 + 6) / 4 = 3.25, and half of it wherever the loss is halved."""
    assert window_of_two() == pytest.approx(-3.25)
    late = Ask(S.DO_BACKWARD, lambda ctx: None)
    for traced in ((At(S.AFTER_LOSS, halve("loss")),), (At(S.BEFORE_BACKWARD, halve("loss")),)):
        assert window_of_two(traced=traced) == pytest.approx(-1.625)
        assert window_of_two(late, traced=traced) == pytest.approx(-1.625)


def test_a_gradient_of_several_denominators_is_replaced_at_the_end_or_not_at_all() -> None:
    with pytest.raises(StepError, match="terms a, b have denominators of their own.*DO_OPTIMIZER_STEP"):
        window_of_two(traced=(At(S.AFTER_BACKWARD, halve("grads")),))

    def halve_grads(ctx: Any) -> None:
        ctx.grads = ctx.tree_map(lambda g: g * 0.5, ctx.grads)

    assert window_of_two(Ask(S.DO_OPTIMIZER_STEP, halve_grads)) == pytest.approx(-1.625)


def test_a_dropped_microbatch_of_a_summed_loss_makes_no_update() -> None:
    def total(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        return (LossTerm("s", jnp.sum(outputs * batch["mask"]), reduction="sum"),)

    toy = Toy(SkipNonFinite(drop="microbatch"), terms=total, optimizer="adam", w=0.0)
    toy.step(-1.0)
    before = toy.w
    assert toy.step(NAN).w == before
    assert toy.counters()["step"] == 1


def test_a_resume_in_a_window_that_hooks_decide() -> None:
    """nvalchemi:67"""
    flag = Ask(S.BEFORE_BATCH, lambda ctx: ctx.batch_count >= 0, priority=60)
    toy = Toy(GradientAccumulationHook(4), flag)
    toy.trace([1, 2])
    named = {name: np.asarray(leaf) for name, leaf in toy.programs.named(toy.carry).items()}
    fresh = Toy(GradientAccumulationHook(4), Ask(S.BEFORE_BATCH, lambda ctx: ctx.batch_count >= 0, priority=60))
    fresh.carry = fresh.programs.load_named(named)
    assert fresh.trace([1, 3]) == [1.0, pytest.approx(0.25)]


def summed(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    """A model that keeps the sum of what it saw, as BatchNorm keeps statistics."""
    return params["w"] * batch["x"], {"seen": model_state["seen"] + jnp.sum(batch["x"])}


def test_statistics_follow_the_window_and_not_a_rejected_batch() -> None:
    """Accumulated microbatches leave their statistics, whoever wrote the accumulation; a rejected one does not."""
    for hooks in ((GradientAccumulationHook(3),), (Every(3),)):
        toy = Toy(*hooks, w=0.0, slope=True, forward=summed, model_state={"seen": jnp.float32(0)})
        toy.trace([1.0, 2.0, 4.0])
        assert toy.state.model_state["seen"] == 7.0
    reject = Ask(S.DO_OPTIMIZER_STEP, lambda ctx: ctx.batch_count != 1)
    toy = Toy(reject, w=0.0, slope=True, forward=summed, model_state={"seen": jnp.float32(0)})
    toy.trace([1.0, 2.0, 4.0])
    assert toy.state.model_state["seen"] == 5.0


def test_a_scaled_sum_beyond_the_square_root_of_float32_is_fine() -> None:
    """nvalchemi:87 in a window, under the check for what is not finite."""
    mixed = MixedPrecisionHook("fp16", 65536.0, growth_factor=10.0, growth_interval=1)
    toy = Toy(GradientAccumulationHook(2), mixed, nonfinite="fail", rate=1e-3)
    toy.trace([1.0] * 60)
    assert toy.programs.read_records(toy.carry).committed.sum() == 30


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    toy = Toy(MixedPrecisionHook("fp16"), nonfinite="fail").step(NAN)
    with pytest.raises(NonFiniteError, match="loss term 'mse'"):
        toy.programs.read_records(toy.carry)


def test_stop_is_a_veto_of_the_hook_that_says_it() -> None:
    def stop(ctx: Any) -> None:
        ctx.stop = ctx.stop | (ctx.batch_count == 2)

    class Stops(Ask):
        pass

    first = Ask(S.DO_OPTIMIZER_STEP, lambda ctx: ctx.batch_count != 2, priority=10)
    for hooks in ((Stops(S.DO_OPTIMIZER_STEP, stop),), (first, Stops(S.DO_OPTIMIZER_STEP, stop))):
        toy = Toy(*hooks)
        np.testing.assert_allclose(toy.trace([1, 1, 1, 1]), [0.8, 0.64, 0.64, 0.64], rtol=1e-6)
        with pytest.raises(VetoError, match=r"Stops rejected update 3 \(microbatch 2\)"):
            toy.programs.read_records(toy.carry)
    for every in ("batch", "update"):
        window = Toy(GradientAccumulationHook(2), Stops(S.DO_OPTIMIZER_STEP, stop), record_every=every)
        assert window.trace([1, 1, 1, 1])[-1] == pytest.approx(0.8)
        with pytest.raises(VetoError, match="Stops rejected update 2"):
            window.programs.read_records(window.carry)


def test_put_sees_where_an_array_stands() -> None:
    import dataclasses

    def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        return (params["w"] + params["v"]) * batch["x"], model_state

    toy = Toy(w={"w": jnp.float32(1), "v": jnp.float32(2)}, forward=forward)
    state = toy.programs.state(toy.carry)
    swapped = dataclasses.replace(state, params={"w": state.params["v"], "v": state.params["w"]})
    toy.programs.put(toy.carry, swapped)
    assert {name: float(leaf) for name, leaf in toy.programs.state(toy.carry).params.items()} == {"w": 2.0, "v": 1.0}


def test_what_a_stage_does_not_have_is_refused_by_name() -> None:
    noop = TrainingUpdateHook()
    for hooks in ((), (noop,)):
        with pytest.raises(TraceBoundaryError, match="ctx.loss is there from AFTER_LOSS on; this is AFTER_FORWARD"):
            Toy(*hooks, traced=(At(S.AFTER_FORWARD, lambda ctx: ctx.loss),)).step(1.0)
        with pytest.raises(HookTypeError, match="At returned loss = float 0.5 at AFTER_LOSS"):
            Toy(*hooks, traced=(At(S.AFTER_LOSS, lambda ctx: setattr(ctx, "loss", 0.5)),)).step(1.0)
    with pytest.raises(TraceBoundaryError, match="by the hook that owns DO_OPTIMIZER_STEP alone"):
        Toy(Ask(S.DO_OPTIMIZER_STEP, lambda ctx: setattr(ctx, "params", {"w": jnp.float32(0)}))).step(1.0)

    class Counts(TrainingUpdateHook):
        def __init__(self) -> None:
            self.n = np.zeros(1)

        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
            self.n[0] += 1
            return True, ctx.loss

    with pytest.raises(StepError, match="Counts changed its attribute n"):
        Toy(Counts()).step(1.0)


@pytest.mark.parametrize("hooks", [(), (GradientClipHook(1.0),)], ids=["plain", "hooked"])
def test_parts_of_the_step_have_names_in_traces(hooks: tuple[Any, ...]) -> None:
    """What a profiler shows: the forward and backward pass, the optimizer, and each hook's stage."""
    toy = Toy(*hooks)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in toy.columns.items()}
    text = toy.programs.lower("apply", batch).compile().as_text()
    for name in ("FORWARD", "BACKWARD", "OPTIMIZER_STEP", *(["DO_OPTIMIZER_STEP"] if hooks else [])):
        assert f"/{name}/" in text or f"({name})/" in text, name
