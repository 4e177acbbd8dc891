"""Mixed precision: how it is named, what float16's loss scale does, and what it leaves alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import HookError
from nnx_jax.core.hooks import StatefulUpdateHook, TrainingUpdateHook, TrainingUpdateOrchestrator
from nnx_jax.core.stages import TrainingStage as S
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    HookSpec,
    MixedPrecisionHook,
    SpikeSkipHook,
    TracedHook,
)
from nnx_jax.objectives.terms import LossTerm
from tests.hooks.toy import Toy

INF = float("inf")


def fp16(scale: float = 1024.0, interval: int = 2, **options) -> MixedPrecisionHook:
    return MixedPrecisionHook("fp16", init_scale=scale, growth_interval=interval, **options)


def scale_of(toy: Toy, hook: MixedPrecisionHook) -> float:
    return float(toy.slot(hook)["scale"])


# -- names ------------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "float32": [jnp.float32, np.float32, np.dtype("float32"), "float32", "fp32", "FP32", "torch.float32"],
    "bfloat16": [jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16"), "bfloat16", "bf16", "Torch.BFloat16"],
    "float16": [jnp.float16, np.float16, np.dtype("float16"), "float16", "fp16", " Float16 ", "torch.float16"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in SPELLINGS.items() for value in values])
def test_every_spelling_is_one_precision(name, value) -> None:
    """nvalchemi:71"""
    assert MixedPrecisionHook(value).precision == name
    assert MixedPrecisionHook(precision=value) == MixedPrecisionHook(name)


def test_dtype_objects_of_torch() -> None:
    """nvalchemi:71"""
    torch = pytest.importorskip("torch", reason="the torch extra")
    for name in SPELLINGS:
        assert MixedPrecisionHook(getattr(torch, name)).precision == name


@pytest.mark.parametrize("value", ["fp8", "float64", "fp64", jnp.float64, np.float64, "", None, 16, "float8_e4m3fn"])
def test_other_types_are_refused_with_the_three(value) -> None:
    """nvalchemi:71 pipekit:N10"""
    with pytest.raises(ValueError, match="float32, bfloat16, float16.*fp32, bf16, fp16") as error:
        MixedPrecisionHook(value)
    assert str(error.value).count("got ") == 1


def test_the_precision_must_be_given() -> None:
    """nvalchemi:71 pipekit:N10"""
    with pytest.raises(ValueError, match="MixedPrecisionHook.precision"):
        MixedPrecisionHook()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="unknown key 'dtype'"):
        MixedPrecisionHook(dtype="bf16")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="growth_factor"):
        MixedPrecisionHook("fp16", growth_factor=1.0)


def test_two_at_most_one() -> None:
    """nvalchemi:72 pipekit:N10 (the orchestrator that a run makes of its hooks)"""
    with pytest.raises(HookError, match="at most one MixedPrecisionHook takes part") as error:
        TrainingUpdateOrchestrator(MixedPrecisionHook("bf16"), MixedPrecisionHook("fp16"))
    assert isinstance(error.value, ValueError)


def test_it_is_a_configuration() -> None:
    hook = HookSpec.from_yaml("{kind: mixed_precision, precision: BF16, keep_fp32: ['head.*']}")
    assert hook == MixedPrecisionHook("bfloat16", keep_fp32=("head.*",))
    assert hook.state() == {"kind": "mixed_precision", "precision": "bfloat16", "keep_fp32": ["head.*"]}


# -- float32 and bfloat16 keep nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_without_a_scaler_nothing_is_kept_or_changed(precision) -> None:
    """nvalchemi:73 nvalchemi:74 (no scaler; the same bits as without the hook, the model's own type being the same)"""
    xs = np.random.default_rng(0).normal(size=6)
    hook = MixedPrecisionHook(precision)
    with_hook, without = Toy(hook, optimizer="adam"), Toy(optimizer="adam")
    with_hook.trace(xs)
    without.trace(xs)
    assert with_hook.leaves() == without.leaves()
    assert hook.loss_scale(()) is None
    assert not [name for name in with_hook.leaves() if name.startswith("slots/")]


# -- float16 ----------------------------------------------------------------------------------------------------------


def test_the_scale_over_twelve_microbatches() -> None:
    """nvalchemi:75 nvalchemi:79 (start 1024, interval 2, K=2, infinity in microbatch 5)"""
    mixed, ema = fp16(), EMAHook("main", 0.9)
    toy = Toy(GradientAccumulationHook(2), mixed, ema)
    scales, steps = [], [0]
    for index in range(12):
        toy.step(INF if index == 5 else 1.0)
        scales.append(scale_of(toy, mixed))
        steps.append(toy.counters()["step"])
    assert scales == [1024, 1024, 1024, 2048, 2048, 1024, 1024, 1024, 1024, 2048, 2048, 2048]
    assert np.diff(steps).tolist() == [0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1]
    assert toy.slot(ema)["updates"] == 5
    assert toy.w == pytest.approx(0.8**5, rel=1e-6)


def test_an_open_window_leaves_scale_and_count_alone() -> None:
    """nvalchemi:77 (even with infinity in it, until the window closes)"""
    mixed = fp16(interval=1)
    toy = Toy(GradientAccumulationHook(3), mixed)
    before = toy.slot(mixed)
    for x in (INF, 1.0):
        toy.step(x)
        assert toy.slot(mixed) == before
    toy.step(1.0)
    assert scale_of(toy, mixed) == 512


def test_an_overflow_changes_nothing_but_the_scale() -> None:
    """nvalchemi:78 N9"""
    seen = []

    class After(TrainingUpdateHook):
        def __call__(self, ctx, stage, will_skip):
            if stage is S.AFTER_OPTIMIZER_STEP:
                seen.append(bool(will_skip))
            return True, ctx.loss

    mixed = fp16()
    toy = Toy(mixed, After(), optimizer="adam", rate=lambda n: 0.1 / (n + 1), executor="eager")
    toy.step(1.0)
    before = toy.leaves()
    toy.step(INF)
    after = toy.leaves()
    assert {name for name in after if after[name] != before[name]} == {
        "counters",
        "slots/MixedPrecisionHook/good",
        "slots/MixedPrecisionHook/scale",
    }
    assert scale_of(toy, mixed) == 512
    assert toy.counters()["step"] == 1
    assert seen == [False, True]


def test_the_scale_doubles_at_the_nth_good_update() -> None:
    """nvalchemi:79 pipekit:N9 (not one later, as flax's DynamicScale does)"""
    mixed = fp16(interval=3)
    toy = Toy(mixed)
    found = []
    for _ in range(7):
        toy.step(0.5)
        found.append(scale_of(toy, mixed))
    assert found == [1024, 1024, 2048, 2048, 2048, 4096, 4096]


class Veto(TrainingUpdateHook):
    """Rejects the microbatches of the given numbers, after the loss scale."""

    priority = 40

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def __call__(self, ctx, stage, will_skip):
        if stage is S.DO_OPTIMIZER_STEP:
            return ~jnp.isin(ctx.batch_count, jnp.array(self.batches)), ctx.loss
        return True, ctx.loss


def test_a_later_veto_leaves_the_scaler_whole() -> None:
    """nvalchemi:80 case:C10 (upstream dies in the batch after it)"""
    mixed = fp16(interval=2)
    toy = Toy(mixed, Veto(3))
    for x in (0.5, 0.5, 0.5):
        toy.step(x)
    before = toy.slot(mixed)
    assert before == {"scale": 2048, "good": 1}
    toy.step(0.5)
    assert toy.slot(mixed) == before
    w = toy.w
    toy.step(0.5)
    assert toy.slot(mixed) == {"scale": 4096, "good": 0}
    assert toy.w == pytest.approx(w * (1 - 0.1 * 2 * 0.25), rel=1e-6)


def test_an_overflow_that_another_hook_rejects_too_still_lowers_the_scale() -> None:
    """nvalchemi:80 (two overflows, 65536 to 16384, and the spike statistics stay clean)"""
    mixed, spike = MixedPrecisionHook("fp16"), SpikeSkipHook(warmup=1)
    toy = Toy(mixed, spike)
    toy.step(1.0)
    statistics = toy.slot(spike)
    for _ in range(2):
        toy.step(INF)
    assert scale_of(toy, mixed) == 16384
    assert toy.slot(spike) == statistics
    toy.step(1.0)
    assert toy.w == pytest.approx(0.64, rel=1e-6)


def test_the_scale_outlives_a_call() -> None:
    """nvalchemi:81 (an overflow in the first call leaves 32768 for the second, which trains)"""
    mixed = MixedPrecisionHook("fp16")
    toy = Toy(mixed)
    toy.step(INF)
    assert (scale_of(toy, mixed), toy.counters()["step"]) == (32768, 0)
    toy.step(1.0)
    assert (scale_of(toy, mixed), toy.counters()["step"]) == (32768, 1)


def test_resume_continues_scale_and_count() -> None:
    """nvalchemi:82"""
    xs = [1.0, 0.5, INF, 0.5, 0.25, 0.5]
    whole, first, second = (Toy(fp16(interval=2)) for _ in range(3))
    whole.trace(xs)
    first.trace(xs[:4])
    second.carry = second.programs.load_named(dict(first.programs.named(first.carry)))
    second.trace(xs[4:])
    assert second.leaves() == whole.leaves()


def test_state_dict_round_trip() -> None:
    """nvalchemi:82 (through the hook itself, before and after the run begins)"""
    hook, other = fp16(), fp16()
    toy, fresh = Toy(hook), Toy(other)
    toy.bind(hook)
    toy.trace([0.5, INF])
    stored = hook.state_dict()
    other.load_state_dict(stored)
    assert other.state_dict() == stored
    fresh.bind(other)
    assert scale_of(fresh, other) == 512


def test_clipping_sees_true_gradients() -> None:
    """nvalchemi:83 case:C06 (gradient (3, 4), scale 1024, limit 1: a step of (0.6, 0.8), norm 5 reported)"""
    toy = Toy(fp16(), GradientClipHook(1.0), w=[0.0, 0.0], rate=1.0)
    toy.step([[1.0, 1.0]], t=[-1.5, -2.0])
    np.testing.assert_allclose(toy.w, [-0.6, -0.8], rtol=1e-6)
    assert toy.programs.read_records(toy.carry).grad_norm.tolist() == pytest.approx([5.0])


class Look(TracedHook):
    """Remembers a gradient of a stage."""

    def __init__(self, stage: S, name: str = "grads") -> None:
        self.stage, self.name = stage, name

    def init_state(self, params):
        return np.float32(0)

    def __call__(self, ctx, stage):
        ctx.state = getattr(ctx, self.name)["w"]


def test_gradients_stay_scaled_until_the_window_closes() -> None:
    """nvalchemi:84 (what is accumulated is scale times the sum; observers may ask for the unscaled one)"""
    looks = [Look(S.AFTER_BACKWARD), Look(S.BEFORE_OPTIMIZER_STEP), Look(S.BEFORE_OPTIMIZER_STEP, "unscaled_grads")]
    toy = Toy(GradientAccumulationHook(2), fp16(), traced=looks)
    toy.step(1.0)
    assert [float(toy.slot(look)) for look in looks] == [2048.0, 2048.0, 2.0]
    assert toy.state.accum["window"].grads[0]["w"] == 2048.0
    toy.step(1.0)
    assert toy.w == pytest.approx(0.8, rel=1e-6)


def test_growth_stops_before_infinity() -> None:
    """nvalchemi:87 case:C05 (loss p^2, times 10 after every update, 70 updates)"""
    mixed = fp16(65536.0, 1, growth_factor=10.0)
    toy = Toy(mixed, optimizer="sgd")
    toy.trace([1.0] * 70)
    assert toy.counters()["step"] == 70
    assert toy.w == pytest.approx(1.6455e-07, rel=1e-4)
    assert 1e30 < scale_of(toy, mixed) < INF


def test_the_scale_never_reaches_zero() -> None:
    """case:C05 (200 overflows, then a good update)"""
    mixed = MixedPrecisionHook("fp16")
    toy = Toy(mixed)
    for _ in range(200):
        toy.programs.step(toy.carry, toy.batch(INF))
    assert scale_of(toy, mixed) > 0
    toy.step(1.0)
    assert toy.w == pytest.approx(0.8, rel=1e-6)


def test_a_tiny_gradient_survives_by_its_scale() -> None:
    """pipekit:N9 (a gradient of 1e-8 is 0 in float16, and comes through with a scale of 2^15)"""

    def forward(params, model_state, batch, key, train):
        x = batch["x"].astype(jnp.float16) * jnp.float16(2.0**-12)
        return (params["w"].astype(jnp.float16) * x).astype(jnp.float32), model_state

    def terms(outputs, batch):
        return (LossTerm("small", (outputs * 2.0**-15).sum(), batch["mask"].sum()),)

    def moved(*hooks) -> float:
        return Toy(*hooks, forward=forward, terms=terms, w=0.0, rate=1.0).step(1.0).w

    assert moved() == 0.0
    assert moved(fp16(2.0**15)) == pytest.approx(-(2.0**-27))


def test_fp16_adam_with_a_zero_gradient() -> None:
    """case:C09 (optimizer arithmetic in float32: no 0/0)"""
    toy = Toy(fp16(), optimizer="adam", w=[1.0, -2.0, 0.5], rate=1e-3)
    toy.step([[0.0, 0.0, 0.0]])
    assert toy.w == [1.0, -2.0, 0.5]
    assert all(leaf.dtype != jnp.float16 for leaf in jax.tree.leaves(toy.programs.state(toy.carry)))


def test_only_stateful_hooks_are_checkpointable() -> None:
    assert isinstance(fp16(), StatefulUpdateHook)
    assert not isinstance(GradientClipHook(1.0), StatefulUpdateHook)


# -- a model that really computes in 16 bits --------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))[:, 0]


def fitted(precision: str, *more, steps: int = 200) -> tuple[float, Toy]:
    """The final mean squared error on sin(sum x), and the run."""

    def terms(outputs, batch):
        error = (outputs - batch["t"][:, 0]) ** 2
        return (LossTerm("mse", (error * batch["mask"]).sum(), batch["mask"].sum()),)

    pure = PureModule(Net(), compute_dtype=jnp.dtype(precision))
    toy = Toy(
        MixedPrecisionHook(precision), *more, rows=32, w=pure.params, shape=(3,), model_state=pure.model_state,
        forward=pure.forward, terms=terms, optimizer="adam", rate=0.01,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(32, 3))
        toy.programs.step(toy.carry, toy.batch(x, np.sin(x.sum(axis=1, keepdims=True))))
    rows = toy.programs.read_records(toy.carry)
    return float(np.mean(rows.num["mse"][-20:] / rows.den["mse"][-20:])), toy


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_training_in_16_bits_fits_as_well(precision) -> None:
    """nvalchemi:74 pipekit:N8 (parameters, moments and losses float32; the error at most 5% above float32's)"""
    exact, _ = fitted("float32")
    error, toy = fitted(precision)
    assert error < 1.05 * exact
    kept = toy.programs.state(toy.carry)
    floats = [
        leaf for leaf in jax.tree.leaves((kept.params, kept.opt_state)) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    assert toy.counters()["step"] >= 190


def test_a_real_overflow_of_float16_is_found_and_left_behind() -> None:
    """nvalchemi:78 (a first scale that float16 cannot hold: it falls until the gradients fit, and training goes on)"""
    mixed = MixedPrecisionHook("float16", init_scale=2.0**40)
    pure = PureModule(Net(), compute_dtype=jnp.float16)

    def terms(outputs, batch):
        return (LossTerm("mse", ((outputs - batch["t"][:, 0]) ** 2).sum(), batch["mask"].sum()),)

    toy = Toy(mixed, rows=4, w=pure.params, shape=(3,), model_state={}, forward=pure.forward, terms=terms)
    x = np.random.default_rng(0).normal(size=(4, 3))
    for _ in range(40):
        toy.programs.step(toy.carry, toy.batch(x, np.ones((4, 1))))
    assert 0 < toy.counters()["step"] < 40
    assert scale_of(toy, mixed) == 2.0 ** (40 - (40 - toy.counters()["step"]))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in toy.state.params.values())
