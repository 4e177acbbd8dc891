"""Steps whose parameters are float64: sums, records, slots and evaluation are, too; float32 is as it was."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.precision import sum_dtype, widened
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, SpikeSkipHook
from nnx_jax.objectives.losses import build_loss, wrap_user_loss
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.optim.schedules import Schedule
from nnx_jax.step import build_step
from nnx_jax.step.evaluate import build_eval
from nnx_jax.step.plan import HookPlan

ROWS, WIDTH, WINDOW = 6, 3, 64
LIKE = {"x": ((ROWS, WIDTH), np.float64), "y": ((ROWS,), np.float64), "mask": ((ROWS,), np.float32)}
START = {"w": np.array([0.1, -0.2, 0.3]), "b": np.array([0.7])}


def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    return batch["x"] @ params["w"] + params["b"], model_state


def terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    half = 0.5 * (outputs - batch["y"]) ** 2 * batch["mask"]
    return (LossTerm("half", jnp.sum(half), jnp.sum(batch["mask"])),)


class Total:
    """The sum of the outputs."""

    name, size = "total", 1

    def update(self, outputs: Any, batch: Any) -> Any:
        return jnp.sum(outputs * batch["mask"])[None]


def batches(number: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [
        {
            "x": draw.normal(size=(ROWS, WIDTH)) * 1e3,
            "y": draw.normal(size=ROWS),
            "mask": (draw.random(ROWS) < 0.8).astype(np.float32),
        }
        for _ in range(number)
    ]


def by_hand(given: list[dict[str, np.ndarray]]) -> tuple[dict[str, np.ndarray], float]:
    """(gradient of the window's mean, its loss), added in extended precision where the machine has it."""
    long = np.longdouble
    x, y = (np.concatenate([batch[name] for batch in given]).astype(long) for name in ("x", "y"))
    mask = np.concatenate([batch["mask"] for batch in given]).astype(long)
    error = (x @ START["w"].astype(long) + long(START["b"][0]) - y) * mask
    grads = {"w": x.T @ error / mask.sum(), "b": error.sum(keepdims=True) / mask.sum()}
    return grads, float(0.5 * (error**2).sum() / mask.sum())


def made(*, rate: float = 0.1, **options: Any) -> Any:
    schedule = Schedule("constant", rate, dtype="float64")
    optimizer = make_optimizer("sgd", START, rate=rate, schedule=schedule)
    return build_step(
        forward, terms, optimizer, params=START, model_state={}, signature=LIKE, metrics=[Total()], **options
    )


def test_a_window_of_64_adds_up_to_1e_12() -> None:
    """Relative to each sum; the record's loss, norm and rate are those of float64, and the ring keeps all 64 bits."""
    with jax.enable_x64(True):
        step, given = made(accumulate=WINDOW, record_every="update"), batches(WINDOW)
        carry = step.init(START, {})
        for number, batch in enumerate(given):
            step.step(carry, batch, closes=number == WINDOW - 1)
        found, state = step.read_records(carry), step.state(carry)
        grads, loss = by_hand(given)
        for name, value in START.items():
            moved = (value - np.asarray(state.params[name])) / 0.1
            np.testing.assert_allclose(moved, grads[name].astype(np.float64), rtol=1e-12)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.accum["window"].grads)} == {np.dtype(np.float64)}
        assert found.rate.tolist() == [0.1]
        assert found.window_loss[0] == pytest.approx(loss, rel=1e-12)
        norm = np.sqrt(sum(np.sum(np.square(value)) for value in grads.values()))
        assert found.grad_norm[0] == pytest.approx(float(norm), rel=1e-12)
        assert found.window_metrics["total"].dtype == np.float64


def test_hooks_keep_what_they_keep_in_float64() -> None:
    hooks = (GradientClipHook(max_norm=1.0), EMAHook(decay=0.9), SpikeSkipHook(metric="loss"))
    with jax.enable_x64(True):
        plan = HookPlan((*hooks, GradientAccumulationHook(2)))
        step, given = made(accumulate=2, hooks=plan), batches(2)
        carry = step.init(START, {})
        for number, batch in enumerate(given):
            step.step(carry, batch, closes=number == 1)
        state, (grads, _) = step.state(carry), by_hand(given)
        reals = [leaf.dtype for leaf in jax.tree.leaves(state.slots) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert len(reals) > 3
        assert set(reals) == {np.dtype(np.float64)}
        norm = np.sqrt(sum(np.sum(np.square(value)) for value in grads.values()))
        for name, value in START.items():
            wanted = value - 0.1 * (grads[name] / norm).astype(np.float64)
            np.testing.assert_allclose(state.params[name], wanted, rtol=1e-12)
            np.testing.assert_array_equal(state.slots["EMAHook"]["average"][name], state.params[name])


def test_evaluation_adds_up_in_float64() -> None:
    with jax.enable_x64(True):
        given = batches(3)
        sums = build_eval(forward, terms, [Total()]).host(START, {}, given)
        assert sums.loss == pytest.approx(by_hand(given)[1], rel=1e-14)


def test_float32_steps_are_the_same_where_64_bit_numbers_are_on() -> None:
    """Parameters, every leaf of the state and the ring, bit for bit: nothing takes JAX's default type.

    With SGD: optax corrects Adam's moments by powers that it computes in that type.
    """
    start = {name: value.astype(np.float32) for name, value in START.items()}
    like = {name: (shape, np.float32) for name, (shape, _) in LIKE.items()}
    given = [{name: value.astype(np.float32) for name, value in batch.items()} for batch in batches(4)]

    def leaves() -> list[np.ndarray]:
        step = build_step(
            forward, terms, make_optimizer("sgd", start, rate=0.1, momentum=0.9), params=start, model_state={},
            signature=like, metrics=[Total()], accumulate=2, clip_norm=1.0,
        )  # fmt: skip
        carry = step.init(start, {})
        for batch in given:
            step.step(carry, batch)
        return [np.asarray(leaf) for leaf in carry.leaves]

    plain = leaves()
    with jax.enable_x64(True):
        wide = leaves()
    for one, two in zip(plain, wide, strict=True):
        assert one.dtype == two.dtype
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("given, wanted", [
    ((), "float32"), (("float32", "float16"), "float32"), (("int32",), "float32"), (("float64",), "float64"),
    (("float32", "float64"), "float64"), ((jnp.bfloat16,), "float32"),
])  # fmt: skip
def test_the_type_of_sums(given: tuple[Any, ...], wanted: str) -> None:
    assert sum_dtype(*given) == np.dtype(wanted)
    assert all(widened(np.zeros(1, each)).dtype == sum_dtype(each) for each in given)


def test_weights_of_rows_are_added_up_in_float64() -> None:
    """Also where the column that holds them is float32, whose own sum would be off by 1e-8."""
    draw = np.random.default_rng(0)
    weight = draw.random(1000).astype(np.float32)
    batch = {"y": draw.normal(size=1000), "mask": np.ones(1000, np.float32), "weight": weight}
    labels = {**batch, "y": draw.integers(0, 3, 1000)}
    with jax.enable_x64(True):
        found = [
            build_loss("mse")(draw.normal(size=1000), batch)[0].denominator,
            build_loss("cross_entropy")(draw.normal(size=(1000, 3)), labels)[0].denominator,
            wrap_user_loss(lambda outputs, targets: jnp.abs(outputs - targets))(batch["y"] + 1, batch)[0].denominator,
        ]
    np.testing.assert_allclose(np.array(found), weight.astype(np.float64).sum(), rtol=1e-14)
