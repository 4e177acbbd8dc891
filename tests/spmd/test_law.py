"""The law: an update is one device's on the union of its rows, whatever the devices, processes, windows and masks."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import NonFiniteError
from nnx_jax.hooks import GradientAccumulationHook
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.step import build_step
from nnx_jax.step.plan import HookPlan
from tests import processes
from tests.spmd import law

MANY = [name for name in law.LAYOUTS if not name.startswith("all")]
drawn_cases = {
    "layout": st.sampled_from(MANY),
    "window": st.sampled_from([1, 2, 4]),
    "style": st.sampled_from(law.STYLES),
    "span": st.booleans(),
    "seed": st.integers(0, 10**6),
}


def exactly(layout: str, window: int, style: str, span: bool, seed: int, dtype: Any = law.F32) -> None:
    """Dyadic rows: every bit is that of one device on the union, and the parameters are those computed by hand."""
    rows, count = law.drawn(seed, style, window, dtype=dtype)
    found = law.update(layout, window, rows, count, span=span)
    wanted = law.update("one", 1, rows, 1, span=False)
    assert wanted["params/0.kernel"].dtype == wanted["opt_state/2"].dtype == wanted["num"].dtype == dtype
    for name, value in wanted.items():
        if name != "norm":  # of numbers that are divided, so its sum is rounded
            assert found[name].tobytes() == value.tobytes(), name
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-6)
    by_hand, _ = law.by_hand(rows)
    assert all(found[f"params/{name}"].tobytes() == value.tobytes() for name, value in by_hand.items())


@settings(max_examples=25)
@given(**drawn_cases)
def test_dyadic_rows_give_equal_bits(layout: str, window: int, style: str, span: bool, seed: int) -> None:
    """Parameters, momentum, counters and records; nnx:B201, nnx:B204, nnx:B205 (a window of masked rows is skipped
    everywhere), and cases A01, A02, A03, G01."""
    exactly(layout, window, style, span, seed)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("layout", MANY)
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("style", law.STYLES)
def test_every_combination_on_dyadic_rows(layout: str, window: int, style: str) -> None:
    for seed in range(3):
        for span in (False, True):
            exactly(layout, window, style, span, seed)


def closely(layout: str, window: int, style: str, span: bool, seed: int, dtype: Any = law.F32) -> None:
    """Gaussian rows and weights: no further from numpy's float64 than their type may be in any order; see `by_hand`."""
    rows, count = law.drawn(seed, style, window, dyadic=False, dtype=dtype)
    draw = np.random.default_rng(seed)
    start = {name: draw.normal(size=value.shape).astype(dtype) for name, value in law.weights().items()}
    edge = rows["x"][rows["mask"] > 0].astype(np.float64) @ start["0.kernel"] + start["0.bias"]
    if np.abs(edge).min(initial=1) < 1e-5:  # where rounding may switch a unit on or off
        return
    found, (wanted, bound) = law.update(layout, window, rows, count, span=span, start=start), law.by_hand(rows, start)
    for name, value in wanted.items():
        apart = np.abs(found[f"params/{name}"].astype(np.float64) - value)
        assert (apart <= bound[name]).all(), (name, float((apart / bound[name]).max()))


@settings(max_examples=25)
@given(**drawn_cases)
def test_gaussian_rows_agree_to_rounding(layout: str, window: int, style: str, span: bool, seed: int) -> None:
    closely(layout, window, style, span, seed)


@pytest.mark.slow
@settings(max_examples=400)
@given(**drawn_cases)
def test_many_gaussian_rows_agree_to_rounding(layout: str, window: int, style: str, span: bool, seed: int) -> None:
    closely(layout, window, style, span, seed)


def test_a_masked_window_moves_nothing() -> None:
    """On four devices: no step, one skip, parameters and momentum as they were; nnx:B205 and case A03."""
    rows, count = law.drawn(0, "nothing", 2)
    found = law.update("four", 2, rows, count, span=False)
    assert (int(found["step"]), int(found["skipped"])) == (0, 1)
    assert all(np.array_equal(found[f"params/{name}"], value) for name, value in law.weights().items())
    assert not any(found[name].any() for name in found if name.startswith("opt_state/") and found[name].ndim)


def test_a_loss_that_divides_by_nothing_ends_the_run_everywhere() -> None:
    """A mean that the loss takes itself, over no row, is not a number: FloatingPointError on any devices; nnx:B205."""

    def mean(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        half = law.squares(outputs, batch)[0]
        return (LossTerm("half", half.numerator / half.denominator, None, "sum"),)

    rows, count = law.drawn(0, "nothing", 1)
    for layout in ("one", "four"):
        with pytest.raises(NonFiniteError, match="loss term 'half'") as caught:
            law.update(layout, 1, rows, count, span=False, terms=mean)
        assert isinstance(caught.value, FloatingPointError)


@pytest.mark.parametrize("layout, window", [("four", 2), ("fsdp", 4), ("tensor", 1)])
def test_an_additive_loss_is_the_sum_on_the_union(layout: str, window: int) -> None:
    """It is divided by nothing, on any number of devices; nnx:B206."""
    rows, count = law.drawn(5, "masked", window)
    found = law.update(layout, window, rows, count, span=False, terms=law.summed)
    by_hand, _ = law.by_hand(rows, divided=False)
    assert all(found[f"params/{name}"].tobytes() == value.tobytes() for name, value in by_hand.items())


# float64 --------------------------------------------------------------------------------------------------------------


def test_float64_is_exact_on_dyadic_rows_and_agrees_to_rounding() -> None:
    """The law with float64 parameters: every bit on rows that float32 could not add, 2**-53 of the sums on others."""
    with jax.enable_x64(True):
        for layout, window, style, span in (("tensor", 2, "masked", True), ("fsdp", 4, "padded", False)):
            exactly(layout, window, style, span, 1, law.F64)
            closely(layout, window, style, span, 1, law.F64)


@pytest.mark.slow
def test_the_rows_of_float64_are_too_fine_for_float32() -> None:
    """So equal bits there show float64: in float32 the order of a sum shows, at least in one of these."""
    apart = []
    for seed in range(3):
        fine, count = law.drawn(seed, "full", 4, dtype=law.F64)
        rows = {name: value.astype(np.float32) for name, value in fine.items()}
        found, wanted = law.update("four", 4, rows, count, span=False), law.update("one", 1, rows, 1, span=False)
        apart += [name for name in ("num", "params/0.kernel") if found[name].tobytes() != wanted[name].tobytes()]
    assert apart


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("layout", MANY)
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("style", law.STYLES)
def test_every_combination_in_float64(layout: str, window: int, style: str) -> None:
    """Steps and spans in turn; with one width of numbers shown for both, the other's rows are not drawn anew."""
    with jax.enable_x64(True):
        exactly(layout, window, style, window == 2, window, law.F64)
        closely(layout, window, style, window != 2, window, law.F64)


# Processes ------------------------------------------------------------------------------------------------------------


def in_processes(world: int, devices: int, dtype: str = "float32") -> list[str]:
    """Digests of drawn cases by a group, which is started once."""
    args = {"seed": 11, "number": 14, "layouts": ["all", "all fsdp"], "dtype": dtype}
    env = {"JAX_ENABLE_X64": "1"} if dtype == "float64" else {}
    told = processes.results("tests.spmd.law:digests", world, devices=devices, args=args, env=env, timeout=280)
    assert all(each == told[0] for each in told)  # every process has the same state and records
    return told[0]


@pytest.mark.parametrize("world, devices", [
    (2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_processes_give_the_bits_of_one_device(world: int, devices: int) -> None:
    """Two and three processes, replicated and split models, every mask; nnx:B201, nnx:B202, nnx:B204."""
    cases = law.cases(11, 14, ["all", "all fsdp"])
    wanted = [law.digest(case, plain=True) for case in cases]
    assert not [case for case, a, b in zip(cases, in_processes(world, devices), wanted, strict=True) if a != b]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("world, devices", [(2, 1), (2, 2), (3, 1)])
def test_processes_give_the_bits_of_one_device_in_float64(world: int, devices: int) -> None:
    cases = law.cases(11, 14, ["all", "all fsdp"])
    with jax.enable_x64(True):
        wanted = [law.digest(case, plain=True, dtype=law.F64) for case in cases]
    found = in_processes(world, devices, "float64")
    assert not [case for case, a, b in zip(cases, found, wanted, strict=True) if a != b]


def test_with_64_bit_numbers_on() -> None:
    """Parameters stay float32, and as near to float64 as they can be: XLA rounds a quotient elsewhere then."""
    args = {"seed": 12, "number": 7, "layouts": ["all", "all fsdp"]}
    (told,) = processes.results(
        "tests.spmd.law:ratios", 1, devices=4, args=args, env={"JAX_ENABLE_X64": "1"}, timeout=280
    )
    assert max(told) <= 1


# Noise ----------------------------------------------------------------------------------------------------------------


class Codes:
    """The outputs of all rows, one value for each."""

    name, size = "codes", law.ROWS

    def update(self, outputs: Any, batch: Any) -> Any:
        return outputs[:, 0]


def masks(layout: str) -> np.ndarray:
    """For every row which of 16 units were kept, as one number."""

    def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        kept = jax.random.bernoulli(key, 0.5, (batch["x"].shape[0], 16)).astype(jnp.float32)
        return kept @ (2.0 ** jnp.arange(16))[:, None] + 0 * params["0.bias"].sum(), model_state

    programs, sharding = law.step(layout, 1)
    rows, _ = law.drawn(0, "full", 1)
    made = build_step(
        forward, law.squares, programs.body.optimizer, params=law.weights(), model_state={},
        signature={n: (c.shape, c.dtype) for n, c in rows.items()}, metrics=[Codes()], sharding=sharding,
    )  # fmt: skip
    carry = made.init(law.weights(), {})
    made.step(carry, law.place(rows, sharding and sharding.rows))
    return made.read_records(carry).metrics["codes"][0]


def test_dropout_draws_over_the_whole_batch() -> None:
    """Devices drop other units than each other, and together those of one device; nnx:B211 and case E04."""
    one, four = masks("one"), masks("four")
    assert np.array_equal(one, four)
    assert len({part.tobytes() for part in four.reshape(4, -1)}) == 4


# What devices exchange ------------------------------------------------------------------------------------------------


def reduced(text: str) -> int:
    """Values that the all-reduces of a compiled program take in."""
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    shapes = [shape for result in found for shape in re.findall(r"[a-z]+\d+\[([\d,]*)\]", result)]
    return sum(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)


def test_gradients_are_exchanged_once_an_update() -> None:
    """Where reduction is deferred, an open window exchanges the loss's few sums and no gradient, its last microbatch
    all of them once; nnx:B212. Read from the compiled programs."""
    _, sharding = law.step("four", 4)
    hook = GradientAccumulationHook(4, defer_reduce=True)
    like = {"x": ((12, 3), np.float32), "y": ((12,), np.float32), "mask": ((12,), np.float32)}
    made = build_step(
        law.forward, law.squares, law.step("four", 4)[0].body.optimizer, params=law.weights(), model_state={},
        signature=like, accumulate=4, sharding=sharding, hooks=HookPlan((hook,), mesh=sharding.mesh, sharding=sharding),
    )  # fmt: skip
    shapes = {name: jax.ShapeDtypeStruct(*each) for name, each in like.items()}
    size = sum(value.size for value in law.weights().values())
    open_, last = (reduced(made.lower(kind, shapes).compile().as_text()) for kind in ("micro", "apply"))
    assert open_ < size <= last - open_ < 2 * size
