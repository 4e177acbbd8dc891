"""Hooks inside the compiled step: the contract of the four stages, windows, owners, devices.

The toy is the reference's: one weight w0 = 1, prediction w x, loss (w x - t)^2, SGD at 0.1. With x = 1 and t = 0 a step
multiplies w by 0.8.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import HookTypeError, StepError, TraceBoundaryError, TraceStateError
from nnx_jax.core.hooks import StatefulUpdateHook, TracedHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as S
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.step import build_step
from nnx_jax.step.plan import HookPlan

SIGNATURE = {name: ((1,), jnp.float32) for name in ("x", "t", "mask")}
STEP = 0.8, 0.64, 0.512, 0.4096


def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    return params["w"] * batch["x"], model_state


def square(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    return (
        LossTerm("square", jnp.sum(jnp.square(outputs - batch["t"]) * batch["mask"]), jnp.sum(batch["mask"])),
    )  # fmt: skip


def row(x: float, t: float = 0.0, mask: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.array([value], np.float32) for name, value in (("x", x), ("t", t), ("mask", mask))}


class Toy:
    """A step with hooks, one microbatch a call."""

    def __init__(self, *hooks: Any, k: int = 1, kind: str = "sgd", terms: Any = square, **options: Any) -> None:
        params = {"w": jnp.float32(1.0)}
        update = [hook for hook in hooks if isinstance(hook, TrainingUpdateHook)]
        self.plan = HookPlan(
            update=tuple(sorted(update, key=lambda hook: hook.priority)),
            traced=tuple(hook for hook in hooks if isinstance(hook, TracedHook)),
            taps=options.pop("taps", frozenset()),
        )
        signature = options.pop("signature", SIGNATURE)
        self.programs = build_step(
            forward, terms, make_optimizer(kind, params, rate=0.1), params=params, model_state={}, signature=signature,
            accumulate=k, hooks=self.plan, **{"nonfinite": "ignore", **options},
        )  # fmt: skip
        self.carry = self.programs.init(params, {})

    def run(self, *xs: float | dict[str, Any]) -> list[float]:
        """Step through microbatches; the weight after each."""
        seen = []
        for x in xs:
            self.programs.step(self.carry, x if isinstance(x, dict) else row(x))
            seen.append(self.w)
        return seen

    @property
    def w(self) -> float:
        return float(self.programs.state(self.carry).params["w"])

    def slot(self, hook: Any) -> Any:
        return jax.tree.map(np.asarray, self.programs.state(self.carry).slots[self.plan.key(hook)])

    @property
    def counters(self) -> dict[str, int]:
        from nnx_jax.step.state import COUNTERS

        return dict(zip(COUNTERS, np.asarray(self.programs.state(self.carry).counters).tolist(), strict=True))


class Window(TrainingUpdateHook):
    """Accumulation as the built-in hook does it: by what is known of the window while tracing."""

    priority = 10

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        if stage is S.BEFORE_BATCH:
            return ctx.window_starts, ctx.loss
        return (ctx.window_closes if stage is S.DO_OPTIMIZER_STEP else True), ctx.loss


class Every(TrainingUpdateHook):
    """Accumulation as a user writes it: by the count of batches, a value of the step."""

    priority = 10

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        if stage is S.BEFORE_BATCH:
            return ctx.batch_count % self.k == 0, ctx.loss
        if stage is S.DO_OPTIMIZER_STEP:
            return (ctx.batch_count + 1) % self.k == 0, ctx.loss
        return True, ctx.loss


class Answer(TrainingUpdateHook):
    """Gives one fixed answer at one stage and writes down what `will_skip` it saw, where values are concrete."""

    def __init__(self, priority: int = 50, stage: S | None = None, proceed: Any = True, loss: Any = None) -> None:
        self.priority, self.stage, self.proceed, self.loss = priority, stage, proceed, loss
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        if not isinstance(ctx.batch_count, jax.core.Tracer):
            self.seen.append((stage.name, will_skip))
        here = stage is self.stage
        return self.proceed if here else True, self.loss(ctx.loss) if here and self.loss else ctx.loss

    def at(self, stage: S) -> list[bool]:
        return [skip for name, skip in self.seen if name == stage.name]


class Scale(TrainingUpdateHook):
    """Multiplies the loss, and divides the gradient where the update is made."""

    priority = 20

    def __init__(self, by: float, *, undo: bool = False) -> None:
        self.by, self.undo = by, undo

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        if stage is S.DO_OPTIMIZER_STEP and self.undo:
            ctx.grads = ctx.tree_map(lambda g: g / self.by, ctx.grads)
        return True, ctx.loss * self.by if stage is S.DO_BACKWARD else ctx.loss


class Decay(TrainingUpdateHook):
    """Adds half the squared weight to the loss."""

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        return True, ctx.loss + 0.5 * ctx.models["main"]["w"] ** 2 if stage is S.DO_BACKWARD else ctx.loss


class Veto(StatefulUpdateHook):
    """Vetoes the update of some batches and counts them."""

    priority = 40

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def init_state(self, params: Any) -> Any:
        return {"vetoes": jnp.int32(0), "asked": jnp.int32(0)}

    def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
        if stage is not S.DO_OPTIMIZER_STEP:
            return True, ctx.loss
        bad = ctx.xp.isin(ctx.batch_count, ctx.xp.asarray(self.batches or (-1,)))
        ctx.state = {"vetoes": ctx.state["vetoes"] + bad, "asked": ctx.state["asked"] + 1}
        return ctx.xp.logical_not(bad), ctx.loss


class See(TracedHook):
    """Keeps one value of one stage in its slot."""

    def __init__(self, stage: S, look: Any) -> None:
        self.stage, self.look = stage, look

    def init_state(self, params: Any) -> Any:
        return {"value": jnp.float32(-1)}

    def __call__(self, ctx: Any, stage: S) -> None:
        ctx.state = {"value": self.look(ctx)}


def test_a_hook_that_does_nothing_changes_no_bit() -> None:
    """nvalchemi:57, nvalchemi:64"""
    plain, noop, windowed = Toy(), Toy(TrainingUpdateHook()), Toy(Window(), k=1)
    xs = (1.0, 0.3, 1.7, 0.9)
    assert plain.run(*xs) == noop.run(*xs) == windowed.run(*xs)
    np.testing.assert_allclose(Toy(TrainingUpdateHook()).run(1, 1, 1, 1), STEP, rtol=3e-7)
    assert noop.programs.watch.compiles == {"apply": 1}


def test_every_hook_is_asked_and_sees_the_vetoes_before_it() -> None:
    """nvalchemi:41, nvalchemi:42, nvalchemi:43, nvalchemi:44"""
    for stage in (S.BEFORE_BATCH, S.DO_OPTIMIZER_STEP):
        hooks = [Answer(10), Answer(20, stage, proceed=False), Answer(30), Answer(40)]
        toy = Toy(*hooks, executor="eager")
        w = toy.run(1.0)
        assert [hook.at(stage) for hook in hooks] == [[False], [False], [True], [True]]
        stepped = stage is S.BEFORE_BATCH
        assert w == [pytest.approx(0.8) if stepped else 1.0]
        assert [hook.at(S.AFTER_OPTIMIZER_STEP) for hook in hooks] == [[not stepped]] * 4
        if stepped:  # a veto belongs to its stage
            assert [hook.at(S.DO_OPTIMIZER_STEP) for hook in hooks] == [[False]] * 4


def test_a_veto_before_the_batch_keeps_what_is_accumulated() -> None:
    """nvalchemi:58"""

    class Keep(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
            return stage is not S.BEFORE_BATCH, ctx.loss

    # Gradients 2 w: 2, then (2 + 1.6) / 2 = 1.8: never zeroed, and divided by the weight seen, 2.
    np.testing.assert_allclose(Toy(Keep()).run(1.0, 1.0), [0.8, 0.62], rtol=3e-7)


def test_loss_transforms_chain_and_the_loss_is_itself_again_after() -> None:
    """nvalchemi:45, nvalchemi:46"""
    after = See(S.AFTER_BACKWARD, lambda ctx: ctx.loss)
    last = Answer(60)
    halves = [Answer(p, S.DO_BACKWARD, loss=lambda loss, by=by: loss * by) for p, by in ((10, 0.5), (20, 4.0))]
    toy = Toy(*halves, last, after)
    np.testing.assert_allclose(toy.run(1.0), [1 - 0.1 * 2 * 2], rtol=1e-6)
    assert toy.slot(after)["value"] == 1.0
    losses: list[float] = []

    class Read(TrainingUpdateHook):
        priority = 60

        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
            if stage is S.DO_BACKWARD:
                losses.append(float(ctx.constant(ctx.loss)))
            return True, ctx.loss

    Toy(*halves, Read(), executor="eager").run(1.0)
    assert losses[-1] == 2.0
    np.testing.assert_allclose(Toy(Decay()).run(1.0), [0.7], rtol=1e-6)  # 2 w + w = 3


@pytest.mark.parametrize("answer", [None, 0, 1, "yes", [], np.True_], ids=repr)
@pytest.mark.parametrize("stage", [S.BEFORE_BATCH, S.DO_OPTIMIZER_STEP])
def test_proceed_is_a_bool(answer: Any, stage: S) -> None:
    """nvalchemi:47"""
    with pytest.raises(HookTypeError, match=rf"Answer returned proceed = .* at {stage.name}"):
        Toy(Answer(50, stage, proceed=answer)).run(1.0)


def test_what_is_ignored_may_be_anything_and_the_loss_is_a_float_scalar() -> None:
    """nvalchemi:48, nvalchemi:49"""
    for stage in (S.DO_BACKWARD, S.AFTER_OPTIMIZER_STEP):
        assert Toy(Answer(50, stage, proceed=None)).run(1.0) == [pytest.approx(0.8)]
    for loss in (None, 0.5, jnp.zeros(3), jnp.int32(1)):
        with pytest.raises(HookTypeError, match="Answer returned loss = .* at DO_BACKWARD"):
            Toy(Answer(50, S.DO_BACKWARD, loss=lambda _, loss=loss: loss)).run(1.0)

    class Silent(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> Any:
            return None

    with pytest.raises(HookTypeError, match=r"Silent returned .*None.* return \(proceed, loss\)"):
        Toy(Silent()).run(1.0)


def test_a_traced_bool_may_decide_and_an_integer_may_not() -> None:
    """nvalchemi:50"""
    veto = Veto(1)
    toy = Toy(veto)
    np.testing.assert_allclose(toy.run(1.0, 1.0, 1.0), [0.8, 0.8, 0.64], rtol=3e-7)
    assert toy.slot(veto) == {"vetoes": 1, "asked": 3}
    assert (toy.counters["batch"], toy.counters["step"], toy.counters["epoch_batch"]) == (3, 2, 3)
    rows = toy.programs.read_records(toy.carry)
    assert rows.ints["veto"].tolist() == [-1, 0, -1]
    with pytest.raises(HookTypeError, match="at DO_OPTIMIZER_STEP"):

        class Count(TrainingUpdateHook):
            def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
                return ctx.batch_count if stage is S.DO_OPTIMIZER_STEP else True, ctx.loss

        Toy(Count()).run(1.0)


def test_windows_by_the_hook_and_by_hand() -> None:
    """nvalchemi:59: sums of gradients 2, 8, 2, 18 of equal weight: 1 - 0.1 * 30 / 4."""
    for toy in (Toy(Window(), k=4), Toy(Every(4)), Toy(k=4)):
        np.testing.assert_allclose(toy.run(1, 2, 1, 3), [1, 1, 1, 0.25], rtol=1e-6)
    static = Toy(Window(), k=4)
    static.run(*[1.0] * 100)
    assert static.programs.watch.compiles == {"micro": 1, "apply": 1}
    assert static.counters["step"] == 25


def test_unequal_weights_equal_the_one_big_batch() -> None:
    """nvalchemi:60"""
    rows = [row(1.0), row(2.0, mask=0.0), row(1.5), row(3.0)]
    grads = np.array([2 * r["x"][0] ** 2 for r in rows]) * [1, 0, 1, 1]
    want = 1 - 0.1 * grads.sum() / 3
    for toy in (Toy(Window(), k=4), Toy(Every(4))):
        assert toy.run(*rows)[-1] == pytest.approx(want, rel=1e-6)


def test_the_open_window_program_holds_no_optimizer() -> None:
    """nvalchemi:70: Adam's square root is in the closing program alone."""
    toy = Toy(Window(), k=4, kind="adam")
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in SIGNATURE.items()}
    texts = {kind: toy.programs.lower(kind, batch).as_text() for kind in ("micro", "apply")}
    for operation in ("stablehlo.sqrt", "stablehlo.power"):
        assert operation in texts["apply"]
        assert operation not in texts["micro"]


def test_two_denominators_and_a_changed_loss() -> None:
    """A scaled loss that is unscaled again changes nothing, and a penalty is averaged over the window, term by term."""

    def two(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        error = jnp.square(outputs - batch["t"])
        return (
            LossTerm("a", jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])),
            LossTerm("b", jnp.sum(outputs), jnp.float32(1.0), weight=0.5),
        )

    rows = [row(1.0), row(2.0, mask=0.0), row(3.0)]
    plain = Toy(Window(), k=3, terms=two).run(*rows)[-1]
    assert plain == pytest.approx(1 - 0.1 * ((2 + 18) / 2 + 0.5 * (1 + 2 + 3) / 3), rel=1e-6)
    assert Toy(Window(), Scale(1024.0, undo=True), k=3, terms=two).run(*rows)[-1] == pytest.approx(plain, rel=1e-6)
    # The penalty's gradient is w = 1, weighted by the first term's denominators, 2 of 2.
    assert Toy(Window(), Decay(), k=3, terms=two).run(*rows)[-1] == pytest.approx(plain - 0.1, rel=1e-6)


def test_owners_replace_the_stage_and_watchers_never_do() -> None:
    """nvalchemi:33, nvalchemi:34"""

    class Owner(TracedHook):
        claims_replacement = True
        stage = S.DO_OPTIMIZER_STEP

    class Backward(TracedHook):
        claims_replacement = True
        stage = S.DO_BACKWARD

        def __call__(self, ctx: Any, stage: S) -> None:
            ctx.grads = {"w": jnp.float32(5.0)}

    owned = Toy(Owner())
    assert owned.run(1.0) == [1.0]
    assert owned.counters["step"] == 1
    assert Toy(Backward()).run(1.0) == [pytest.approx(0.5)]

    class Watch(TracedHook):
        def _runs_on_stage(self, stage: S) -> bool:
            return True

    assert Toy(Watch()).run(1.0) == [pytest.approx(0.8)]


def test_traced_hooks_see_and_change_what_their_stage_has() -> None:
    class Half(TracedHook):
        def __init__(self, stage: S, name: str) -> None:
            self.stage, self.name = stage, name

        def __call__(self, ctx: Any, stage: S) -> None:
            setattr(ctx, self.name, ctx.tree_map(lambda leaf: leaf * 0.5, getattr(ctx, self.name)))

    assert Toy(Half(S.BEFORE_FORWARD, "batch")).run(1.0) == [pytest.approx(1 - 0.1 * 2 * 0.5 * 0.5)]
    assert Toy(Half(S.AFTER_FORWARD, "predictions")).run(1.0) == [pytest.approx(1 - 0.1 * 2 * 0.5 * 0.5)]
    assert Toy(Half(S.AFTER_LOSS, "loss")).run(1.0) == [pytest.approx(0.9)]
    assert Toy(Half(S.AFTER_BACKWARD, "grads")).run(1.0) == [pytest.approx(0.9)]
    assert Toy(Half(S.BEFORE_OPTIMIZER_STEP, "grads"), Window(), k=2).run(1.0, 1.0)[-1] == pytest.approx(
        1 - 0.1 * 1.5 / 2
    )
    with pytest.raises(TraceBoundaryError, match=r"ctx.grads is there from AFTER_BACKWARD on; this is AFTER_LOSS"):
        Toy(Half(S.AFTER_LOSS, "grads")).run(1.0)
    with pytest.raises(TraceBoundaryError, match=r"ctx.loss may be replaced at .*; this is AFTER_BACKWARD"):
        Toy(Half(S.AFTER_BACKWARD, "loss")).run(1.0)
    with pytest.raises(TraceBoundaryError, match="ctx.params may be replaced at DO_OPTIMIZER_STEP"):
        Toy(Half(S.AFTER_BACKWARD, "params")).run(1.0)


def test_python_state_is_refused_while_tracing_and_kept_where_values_are_concrete() -> None:
    """nvalchemi:154, nvalchemi:155"""

    class Count(TrainingUpdateHook):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
            self.calls += stage is S.DO_OPTIMIZER_STEP
            return True, ctx.loss

    class Ask(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
            if stage is S.AFTER_OPTIMIZER_STEP and will_skip:
                return False, ctx.loss
            return True, ctx.loss

    with pytest.raises(TraceStateError, match=r"Count changed its attribute calls at DO_OPTIMIZER_STEP.*init_state"):
        Toy(Count()).run(1.0)
    with pytest.raises(TraceBoundaryError, match=r"Ask at AFTER_OPTIMIZER_STEP.*ctx\.where.*'staged' or 'eager'"):
        Toy(Veto(1), Ask()).run(1.0)
    for executor in ("staged", "eager"):
        count = Count()
        np.testing.assert_allclose(Toy(count, Ask(), executor=executor).run(1, 1, 1, 1), STEP, rtol=1e-6)
        assert count.calls == 4


def test_slots_keep_their_shape_and_a_stopped_run_leaves_them_alone() -> None:
    class Grow(StatefulUpdateHook):
        def init_state(self, params: Any) -> Any:
            return {"n": jnp.int32(0)}

        def __call__(self, ctx: Any, stage: S, will_skip: Any) -> tuple[Any, Any]:
            ctx.state = {"n": jnp.zeros(2)}
            return True, ctx.loss

    with pytest.raises(StepError, match=r"Grow changed \['n'\] of its state from int32\[\] to float32\[2\]"):
        Toy(Grow()).run(1.0)
    veto = Veto()
    toy = Toy(veto, nonfinite="fail")
    toy.run(1.0, float("nan"), 1.0, 1.0)
    assert toy.slot(veto)["asked"] == 2  # the batch that stopped the run, and none after it
    with pytest.raises(StepError, match="is not finite"):
        toy.programs.read_records(toy.carry)


def test_taps_hold_the_last_microbatch_and_are_not_stored() -> None:
    toy = Toy(taps=frozenset({"loss", "gradients", "predictions"}))
    toy.run(1.0, 2.0)
    taps = toy.programs.state(toy.carry).accum["taps"]
    assert float(taps["loss"]) == pytest.approx((0.8 * 2) ** 2)
    assert float(taps["gradients"]["w"]) == pytest.approx(2 * 0.8 * 4)
    assert taps["predictions"].tolist() == [pytest.approx(1.6)]
    assert not [name for name in toy.programs.named(toy.carry) if "taps" in name]
    again = toy.programs.load_named(toy.programs.named(toy.carry))
    assert float(toy.programs.state(again).params["w"]) == toy.w


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import tests.step.test_hooks as t

signature = {name: ((8,), jnp.float32) for name in ("x", "t", "mask")}
rng = np.random.default_rng(0)
rows = [{"x": rng.integers(0, 4, 8) / 2, "t": np.ones(8), "mask": rng.integers(0, 2, 8)} for _ in range(6)]
rows = [{name: value.astype(np.float32) for name, value in batch.items()} for batch in rows]
rows[3]["x"][5] = 1e6  # a spike on one device
class Spike(t.TrainingUpdateHook):
    def __call__(self, ctx, stage, will_skip):
        return (ctx.global_norm() < 1e3 if stage is t.S.DO_OPTIMIZER_STEP else True), ctx.loss
found = []
for sharded in (False, True):
    toy = t.Toy(t.Window(), Spike(), k=2, signature=signature)
    if sharded:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spread, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        toy.carry.leaves = jax.device_put(toy.carry.leaves, whole)
        batches = [jax.device_put(batch, spread) for batch in rows]
    else:
        batches = rows
    toy.run(*batches)
    found.append((toy.w, toy.counters, toy.programs.watch.compiles))
print(found)
assert found[0] == found[1], found
assert found[0][1]["step"] == 2, found
"""


def test_eight_devices_decide_together_and_equal_one() -> None:
    """nvalchemi:65, nvalchemi:95, nvalchemi:158: dyadic data, so the sums are exact; virtual CPU devices."""
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
