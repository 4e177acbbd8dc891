"""Update hooks under torch: what each does to one weight, worked out by hand or by torch, and beside the JAX step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import HookError, HookTypeError, StepError, TraceBoundaryError, VetoError
from nnx_jax.core.hooks import StatefulUpdateHook, TracedHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SkipNonFinite,
    SpikeSkipHook,
)
from tests.hooks.toy import Toy
from tests.torch.engines import advance, engine_of
from tests.torch.hook_toy import One, TorchToy

INF, NAN = float("inf"), float("nan")


class Each(TrainingUpdateHook):
    """Notes what it is asked, and answers by stage."""

    def __init__(self, priority: Any = 50, **answers: Any) -> None:
        self.priority, self.answers, self.seen = priority, answers, []

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        self.seen.append((stage.name, will_skip))
        answer = self.answers.get(stage.name, (True, ctx.loss))
        found: Any = answer(ctx) if callable(answer) else answer
        return found


# -- the numbers of the founding document's toy ----------------------------------------------------------------------


def test_a_hook_that_does_nothing_changes_no_bit() -> None:
    """nvalchemi:57 with Adam, clipping and unequal rows"""
    xs = np.random.default_rng(0).normal(size=(6, 3))
    hooks = TrainingUpdateHook(), SkipNonFinite()
    runs = [TorchToy(hook, xs=xs, optimizer="adam", optim={"grad_clip_norm": 0.5}) for hook in hooks]
    spec = runs[0].engine.spec
    plain = engine_of(spec, One())
    state = plain.start()
    advance(plain, state, 6)
    for run in runs:
        run.step(6)
        assert run.w == plain.module.w.item()  # type: ignore[union-attr]
        left, right = run.state.arrays(), state.arrays()
        same = [name for name in right if not name.startswith("rng/") and np.array_equal(left[name], right[name])]
        assert len(same) == len([name for name in right if not name.startswith("rng/")])


def test_windows_of_four_by_hand() -> None:
    """nvalchemi:59 nvalchemi:45 (x = 1, 2, 1, 3: the weight stays until the fourth)"""
    toy = TorchToy(GradientAccumulationHook(4), xs=[1, 2, 1, 3])
    assert toy.trace(lambda toy: toy.w) == pytest.approx([1, 1, 1, 0.25])


def test_the_order_and_what_later_hooks_are_told() -> None:
    """nvalchemi:38 nvalchemi:41 nvalchemi:42 nvalchemi:44"""
    hooks = [Each(30), Each(10), Each(20, BEFORE_BATCH=(False, None), DO_OPTIMIZER_STEP=(False, None)), Each(40)]
    toy = TorchToy(*hooks, xs=[1.0]).step()
    assert toy.w == 1.0
    assert toy.counters()["step"] == 0
    by_priority = sorted(hooks, key=lambda hook: hook.priority)
    for stage in ("BEFORE_BATCH", "DO_OPTIMIZER_STEP"):
        told = [dict(hook.seen)[stage] for hook in by_priority]
        assert told == [False, False, True, True]
    assert all(dict(hook.seen)["AFTER_OPTIMIZER_STEP"] is True for hook in hooks)
    assert toy.records[0].veto.tolist() == [1]  # type: ignore[union-attr]
    assert toy.engine.hook_name(1) == "Each"


def test_losses_chain_and_there_is_one_backward() -> None:
    """nvalchemi:45: x 0.5 and x 4 double the gradient; afterwards the loss is the untransformed one."""
    seen = {}
    half, four = (
        Each(10, DO_BACKWARD=lambda ctx: (True, ctx.loss * 0.5)),
        Each(20, DO_BACKWARD=lambda c: (1, c.loss * 4)),
    )
    look = Each(30, DO_OPTIMIZER_STEP=lambda ctx: (True, seen.setdefault("loss", ctx.loss)))
    toy = TorchToy(half, four, look, xs=[1.0]).step()
    assert toy.w == pytest.approx(1 - 0.1 * 4)
    assert seen["loss"] == 1.0
    assert not seen["loss"].requires_grad


def test_a_loss_made_of_the_parameters() -> None:
    """nvalchemi:46: 0.5 |w|^2 adds w to the gradient 2 w."""
    hook = Each(DO_BACKWARD=lambda ctx: (True, ctx.loss + 0.5 * (ctx.params["w"] ** 2).sum()))
    assert TorchToy(hook, xs=[1.0]).step().w == pytest.approx(0.7)


@pytest.mark.parametrize("proceed", [None, 0, 1, "yes", [], np.bool_(True), torch.tensor(1)])
@pytest.mark.parametrize("stage", ["BEFORE_BATCH", "DO_OPTIMIZER_STEP"])
def test_a_decision_is_a_bool(proceed: Any, stage: str) -> None:
    """nvalchemi:47 nvalchemi:50 (a 0-d bool tensor is one too)"""
    with pytest.raises(HookTypeError, match=rf"Each returned proceed.*{stage}"):
        TorchToy(Each(50, **{stage: (proceed, None)}), xs=[1.0]).step()
    assert TorchToy(Each(50, **{stage: (torch.tensor(True), None)}), xs=[1.0]).step().w == pytest.approx(0.8)


@pytest.mark.parametrize("loss", [None, 1.0, torch.zeros(3), torch.tensor(1)])
def test_a_loss_is_a_float_scalar(loss: Any) -> None:
    """nvalchemi:49"""
    toy = TorchToy(Each(DO_BACKWARD=(True, loss)), xs=[1.0])
    with pytest.raises(HookTypeError, match="DO_BACKWARD"):
        toy.step()
    assert toy.w == 1.0


def test_what_the_run_does_itself_no_hook_does() -> None:
    """A hook that differentiates or steps is told so, by name."""

    def backward(ctx: Any) -> Any:
        ctx.loss.backward(retain_graph=True)
        return True, ctx.loss

    with pytest.raises(HookError, match=r"Each called backward\(\) at DO_BACKWARD"):
        TorchToy(Each(DO_BACKWARD=backward), xs=[1.0]).step()
    steps = Each(AFTER_OPTIMIZER_STEP=lambda ctx: (True, toy.engine.parts()["optimizers"][0].step()))
    toy = TorchToy(steps, xs=[1.0])
    with pytest.raises(HookError, match=r"Each called the optimizer's step\(\)"):
        toy.step()


def test_a_context_says_what_it_has_and_takes() -> None:
    with pytest.raises(TraceBoundaryError, match=r"ctx.grads is there from AFTER_BACKWARD on; this is DO_BACKWARD"):
        TorchToy(Each(DO_BACKWARD=lambda ctx: (True, ctx.grads)), xs=[1.0]).step()

    def writes(ctx: Any) -> Any:
        ctx.batch_count = 3

    with pytest.raises(TraceBoundaryError, match="ctx.batch_count is read-only"):
        TorchToy(Each(DO_BACKWARD=writes), xs=[1.0]).step()


class SkipBig(StatefulUpdateHook):
    """The document's example of a hook with state."""

    priority = 40

    def init_state(self, params: Any) -> Any:
        return {"mean": torch.zeros(()), "n": 0, "skips": torch.zeros((), dtype=torch.int32)}

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is not Stage.DO_OPTIMIZER_STEP:
            return True, ctx.loss
        slot, norm = ctx.state, ctx.global_norm()
        fine = bool((slot["n"] < 1 or norm <= 5 * slot["mean"]) and torch.isfinite(norm))
        ctx.state = {"mean": norm if fine else slot["mean"], "n": slot["n"] + fine, "skips": slot["skips"] + (not fine)}
        return fine, ctx.loss


def test_a_stateful_hook_of_the_user() -> None:
    hook = SkipBig()
    toy = TorchToy(hook, xs=[1.0, 100.0, 1.0]).step(3)
    assert toy.w == pytest.approx(0.64)
    assert (toy.slot(hook)["n"], toy.slot(hook)["skips"]) == (2, 1)
    assert hook.state_dict()["state"]["skips"] == 1
    with pytest.raises(StepError, match="structure of its state"):
        TorchToy(type("Bad", (SkipBig,), {"__call__": _drops})(), xs=[1.0]).step()


def _drops(self: Any, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
    ctx.state = {"mean": 0.0}
    return True, ctx.loss


class Traced(TracedHook):
    """Replaces one value at one stage."""

    def __init__(self, stage: Stage, name: str, change: Any) -> None:
        self.stage, self.name, self.change = stage, name, change

    def __call__(self, ctx: Any, stage: Stage) -> None:
        setattr(ctx, self.name, self.change(getattr(ctx, self.name)))


@pytest.mark.parametrize(
    "stage, name, change, w",
    [
        (Stage.BEFORE_FORWARD, "batch", lambda batch: {**batch, "x": 2 * batch["x"]}, 1 - 0.1 * 8),
        (Stage.AFTER_FORWARD, "predictions", lambda outputs: 3 * outputs, 1 - 0.1 * 18),
        (Stage.AFTER_LOSS, "loss", lambda loss: 2 * loss, 1 - 0.1 * 4),
        (Stage.AFTER_BACKWARD, "grads", lambda grads: {"w": grads["w"] * 0}, 1.0),
        (Stage.BEFORE_OPTIMIZER_STEP, "grads", lambda grads: {"w": grads["w"] / 2}, 0.9),
    ],
)
def test_traced_hooks_replace_what_their_stage_has(stage: Stage, name: str, change: Any, w: float) -> None:
    assert TorchToy(Traced(stage, name, change), xs=[1.0]).step().w == pytest.approx(w)


def test_a_replaced_gradient_of_an_open_window_stays_in_it() -> None:
    """Half of each: (2 / 2 + 2) / 2 = 1.5, and half of that is applied."""
    halves = Traced(Stage.AFTER_BACKWARD, "grads", lambda grads: {"w": grads["w"] / 2})
    assert TorchToy(GradientAccumulationHook(2), halves, xs=[1.0, 1.0]).step(2).w == pytest.approx(1 - 0.1 * 0.75)


class Owner(TracedHook):
    claims_replacement = True

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def __call__(self, ctx: Any, stage: Stage) -> None:
        if stage is Stage.DO_BACKWARD:
            ctx.grads = {"w": torch.full_like(ctx.grads["w"], 5.0)}
        else:
            ctx.params = {"w": torch.full_like(ctx.params["w"], 7.0)}


def test_owners_of_the_replacement_stages() -> None:
    """nvalchemi:34"""
    assert TorchToy(Owner(Stage.DO_BACKWARD), xs=[1.0]).step().w == pytest.approx(0.5)
    toy = TorchToy(Owner(Stage.DO_OPTIMIZER_STEP), xs=[1.0]).step()
    assert (toy.w, toy.counters()["step"]) == (7.0, 1)


def test_what_hooks_keep_microbatch_by_microbatch() -> None:
    """A hook that never zeroes, and steps every third time: gradients 2, 2, 2 become one mean."""
    third = Each(
        BEFORE_BATCH=lambda ctx: (ctx.batch_count % 3 == 0, None),
        DO_OPTIMIZER_STEP=lambda ctx: (ctx.batch_count % 3 == 2, None),
    )
    toy = TorchToy(third, xs=[1.0, 2.0, 3.0, 1.0])
    assert toy.engine.dynamic
    w = 1 - 0.1 * (2 + 8 + 18) / 3
    assert toy.trace(lambda toy: toy.w) == pytest.approx([1, 1, w, w], abs=1e-6)
    never = Each(BEFORE_BATCH=(False, None))
    assert TorchToy(never, xs=[1.0]).step().w == pytest.approx(0.8)  # nvalchemi:58


def test_too_many_rejections_stop_the_run() -> None:
    toy = TorchToy(SkipNonFinite(max_consecutive=1), xs=[1.0, NAN, NAN], nonfinite="fail").step(2)
    with pytest.raises(VetoError, match=r"SkipNonFinite rejected update 2 \(microbatch 2\)"):
        toy.step()
    assert toy.w == pytest.approx(0.8)
    assert toy.counters()["batch"] == 2


# -- the same list beside the JAX step ---------------------------------------------------------------------------------

LISTS: dict[str, Any] = {
    "accumulation": lambda: [GradientAccumulationHook(3)],
    "means": lambda: [GradientAccumulationHook(2, normalize="mean"), GradientClipHook(0.7)],
    "clip": lambda: [GradientClipHook(max_norm=0.5, max_value=0.4)],
    "spikes": lambda: [SpikeSkipHook(factor=1.5, decay=0.5, warmup=1, max_consecutive=None), EMAHook(decay=0.9)],
    "losses": lambda: [
        GradientAccumulationHook(2), SpikeSkipHook(2.0, 0.5, 1, metric="loss", max_consecutive=None),
    ],
    "not finite": lambda: [
        GradientAccumulationHook(2), SkipNonFinite(drop="microbatch", max_consecutive=None), EMAHook(decay=0.5),
    ],
    "scaled": lambda: [
        EMAHook(decay=0.9, update_every=2, start_step=2), GradientAccumulationHook(2),
        MixedPrecisionHook("float16", init_scale=1024.0, growth_interval=2),
        SpikeSkipHook(factor=3.0, decay=0.5, warmup=1, max_consecutive=None), GradientClipHook(1.0),
        SkipNonFinite(max_consecutive=None),
    ],
}  # fmt: skip


_MADE: dict[str, tuple[Toy, list[Any]]] = {}


FAST = ("scaled", "not finite")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LISTS])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_same_list_of_hooks_as_under_jax(name: str, data: Any) -> None:
    """nvalchemi:156 nvalchemi:60 nvalchemi:80 nvalchemi:88 nvalchemi:93 nvalchemi:97 nvalchemi:98: weights, vetoes,
    scales and averages after every microbatch, over powers of two (exact in float16) with spikes, NaN and infinity."""
    value = st.sampled_from([0.25, 0.5, 0.5, 1.0, 1.0, -1.0, 8.0, INF, NAN])
    xs = data.draw(st.lists(value, min_size=6, max_size=8))
    if name not in _MADE:
        made = LISTS[name]()
        _MADE[name] = Toy(*made, optimizer="sgd"), made
    theirs, jax_hooks = _MADE[name]
    theirs.fresh()
    hooks = LISTS[name]()
    ours = TorchToy(*hooks, xs=xs)
    for place, x in enumerate(xs):
        theirs.step(x)
        ours.step()
        assert ours.w == pytest.approx(theirs.w, rel=2e-5, abs=1e-6, nan_ok=True), place
        mine, other = ours.counters(), theirs.counters()
        assert {n: mine[n] for n in ("batch", "micro", "step", "skipped")} == {
            n: other[n] for n in ("batch", "micro", "step", "skipped")
        }
        for hook, jax_hook in zip(hooks, jax_hooks, strict=True):
            key = theirs.plan.key(jax_hook)
            if key in theirs.state.slots:
                same(ours.slot(hook), theirs.state.slots[key])


def same(mine: Any, other: Any) -> None:
    """Slots of both worlds: whole numbers equal, floats to float32's rounding."""
    assert set(mine) == set(other)
    for name, value in mine.items():
        if isinstance(value, dict):
            same(value, other[name])
        elif np.asarray(value).dtype.kind in "iub":
            assert value == other[name], name
        else:
            np.testing.assert_allclose(value, other[name], rtol=2e-5, atol=1e-6, err_msg=name)


# -- float16's scale, beside torch's own -------------------------------------------------------------------------------


def by_torch(xs: Any, k: int, **options: Any) -> tuple[list[float], list[float]]:
    """Scale and weight after each microbatch, with a real GradScaler."""
    w = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **options)
    scales, weights = [], []
    for index, x in enumerate(xs):
        scaler.scale((w * x).square() / k).backward()
        if index % k == k - 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        scales.append(scaler.get_scale() if scaler._scale is not None else options["init_scale"])
        weights.append(w.item())
    return scales, weights


@settings(max_examples=10, deadline=None)
@example(bad=[0, 0, 0, 0], k=1, interval=1, factors=(2.0, 0.5), start=2.0**126)  # 1 / 2**127 is subnormal
@given(
    bad=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=4, max_size=12),
    k=st.integers(1, 3),
    interval=st.integers(1, 4),
    factors=st.sampled_from([(2.0, 0.5), (3.0, 0.25), (1.5, 0.75)]),
    start=st.sampled_from([1.0, 1024.0, 65536.0, 2.0**126]),
)
def test_any_sequence_of_overflows(bad: Any, k: int, interval: int, factors: Any, start: float) -> None:
    """nvalchemi:76 nvalchemi:77 nvalchemi:79 nvalchemi:87 on torch's own tensors"""
    xs = [[0.5, INF, NAN][kind] for kind in bad]
    options = {"init_scale": start, "growth_interval": interval}
    options |= {"growth_factor": factors[0], "backoff_factor": factors[1]}
    scales, weights = by_torch(xs, k, **options)
    mixed = MixedPrecisionHook("float16", **options)
    toy = TorchToy(GradientAccumulationHook(k), mixed, xs=xs)
    found = toy.trace(lambda toy: (float(toy.slot(mixed)["scale"]), toy.w))
    assert [scale for scale, _ in found] == scales
    np.testing.assert_allclose([w for _, w in found], weights, rtol=1e-3)
