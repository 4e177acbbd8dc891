"""The programs: what they contain, what they keep, how often they compile and when they read."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.core.errors import StepError
from nnx_jax.step import build_step, place_columns, place_table, stack_batches
from nnx_jax.step.watch import CompileWatch, RecompileWarning

Kit = SimpleNamespace
ROWS = 20


@pytest.fixture(scope="module")
def parts(kit: Kit) -> SimpleNamespace:
    """A step with windows of 2, Adam and a schedule on the update clock."""
    params, forward = kit.mlp([3, 4, 2])
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 3)).astype(np.float32), draw.integers(0, 2, ROWS).astype(np.int32)
    rows = np.arange(ROWS).reshape(-1, 2)
    batches = [kit.block(x, y, places) for places in rows]
    optimizer = kit.Optimizer(optax.scale_by_adam(), lambda n: 0.1 * (n + 1))
    programs = build_step(
        forward, kit.ce_terms, optimizer, params=params, model_state={},
        signature=kit.signature(batches[0]), metrics=[kit.Accuracy()], accumulate=2, capacity=16,
    )  # fmt: skip
    return SimpleNamespace(programs=programs, params=params, batches=batches, x=x, y=y, table=rows.astype(np.int32))


def test_accumulate_only_program_holds_no_optimizer(parts: SimpleNamespace) -> None:
    """Adam's square root is in the compiled apply and not in the compiled micro; nnx map 5.2."""
    shapes = {n: jax.ShapeDtypeStruct(part.shape, part.dtype) for n, part in parts.batches[0].items()}
    texts = {kind: parts.programs.lower(kind, shapes).compile().as_text() for kind in ("micro", "apply")}
    assert " sqrt(" in texts["apply"]
    assert " sqrt(" not in texts["micro"]
    assert "input_output_alias" in texts["micro"]
    # Every leaf of the state is given away and comes back in place.
    aliased = len(re.findall(r"\{\d+\}: \(\d+,", texts["apply"].split("entry_computation_layout")[0]))
    assert aliased >= len(parts.programs.paths)


def test_the_callers_arrays_stay_alive(kit: Kit) -> None:
    """Frozen weights, aliased optimizer state and jax arrays of the user survive donation; no buffer is shared."""
    params = {"a": jnp.ones((2, 2)), "w": jnp.ones(1)}
    frozen = {"f": jnp.full(3, 2.0)}

    class Averaging(kit.Optimizer):
        def init(self, params: Any) -> Any:
            return super().init(params)._replace(inner=(params, params))

        def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            new = jax.tree.map(lambda p, g: p - g, params, grads)
            return new, state._replace(count=state.count + 1, inner=(new, new))

    data = kit.slopes(1)
    forward = lambda p, m, b, k, t: (b["g"][:, 0] * p["w"] * jnp.sum(p["f"]) + 0 * jnp.sum(p["a"]), m)  # noqa: E731
    programs = build_step(
        forward, kit.slope_terms, Averaging(optax.identity(), 1.0), params=params, model_state={"s": frozen["f"]},
        frozen=frozen, signature=kit.signature(data[0]),
    )  # fmt: skip
    carry = programs.init(params, {"s": frozen["f"]}, frozen=frozen)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in carry.leaves]
    assert len(set(pointers)) == len(pointers)
    for _ in range(3):
        programs.step(carry, data[0])
    assert np.array_equal(frozen["f"], [2.0] * 3)
    assert np.array_equal(params["w"], [1.0])
    state = programs.state(carry)
    assert np.array_equal(state.frozen["f"], [2.0] * 3)
    assert state.params["w"] == 1.0 - 3 * 6.0


def test_nothing_accumulates_on_the_device(parts: SimpleNamespace) -> None:
    """case:L12 live arrays after 50 and after 100 updates: the same number."""
    programs = parts.programs
    carry = programs.init(parts.params, {})
    counts = []
    for number in range(100):
        programs.apply(carry, parts.batches[number % 10])
        if number % 10 == 9:
            programs.read_records(carry)
        if number in (49, 99):
            gc.collect()
            counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]


def test_the_host_reads_only_records(parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:L16 no transfer from the device between two reads of the records, and one then."""
    programs = parts.programs
    carry = programs.init(parts.params, {})
    reads: list[Any] = []
    kind = type(carry.leaves[0])
    plain = kind._value.fget
    monkeypatch.setattr(kind, "_value", property(lambda self: reads.append(self.shape) or plain(self)))
    with jax.transfer_guard_device_to_host("disallow"):
        for batch in parts.batches:
            programs.step(carry, batch)
    assert reads == []
    assert len(programs.read_records(carry)) == 10


def test_one_compile_whatever_the_values(kit: Kit, parts: SimpleNamespace) -> None:
    """case:L13, case:L14: numpy or device batches, a resumed state, a changed rate, a new epoch: one compile a program.

    The rates are really used: the record's rate is the schedule's at the update's own count.
    """
    programs = parts.programs
    carry = programs.init(parts.params, {})
    programs.span_resident(carry, place_columns({"x": parts.x, "y": parts.y}), place_table(parts.table), 0, 10)
    rates = programs.read_records(carry).rate
    assert rates[1::2] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    carry = programs.load_named({name: np.array(leaf) for name, leaf in programs.named(carry).items()})
    programs.start_epoch(carry)
    state = programs.state(carry)
    other = state.opt_state._replace(rate=jnp.asarray(0.25))
    programs.put(carry, type(state)(**{**vars(state), "opt_state": other}))
    for number in range(4):
        batch = parts.batches[number]
        programs.step(carry, batch if number < 2 else {name: jnp.asarray(part) for name, part in batch.items()})
    programs.span_resident(carry, place_columns({"x": parts.x, "y": parts.y}), place_table(parts.table), 2, 5)
    assert programs.read_records(carry).rate[-1] == pytest.approx(1.0)
    assert set(programs.watch.compiles.values()) == {1}
    assert programs.watch.check() == []


def test_second_compile_is_reported_with_its_argument() -> None:
    """Issue point 12: path, old and new shape, dtype and weak type."""
    watch = CompileWatch()
    double = watch.jit("double", lambda leaves, batch: leaves[0] * batch["x"], [["params/w"], "batch"])
    double([jnp.ones(2)], {"x": np.ones((4, 2), np.float32)})
    double([jnp.ones(2)], {"x": np.ones((4, 2), np.float32)})
    assert (watch.compiles, watch.check()) == ({"double": 1}, [])
    with pytest.warns(
        RecompileWarning, match=r"double is compiled again \(2\): batch/x: float32\[4, 2\] -> float32\[3, 2\]"
    ):
        double([jnp.ones(2)], {"x": np.ones((3, 2), np.float32)})
    with pytest.warns(RecompileWarning, match=r"params/w: float32\[2\] -> float32\[\], weak type"):
        double([jnp.asarray(1.0)], {"x": np.ones((4, 2), np.float32)})
    assert watch.compiles == {"double": 3}
    assert len(watch.check()) == 2


def test_compile_without_a_trace_is_reported() -> None:
    """Another device compiles again without Python seeing it."""
    watch = CompileWatch()
    double = watch.jit("double", lambda x: x * 2, ["x"])
    for device in jax.devices()[:2]:
        double(jax.device_put(jnp.ones(2), device))
    assert watch.compiles == {"double": 2}
    assert watch.check()[0].startswith("double was compiled 2 times for 1 signatures: an argument moved")


class TestRing:
    def test_rows_come_back_in_order_when_the_ring_wraps(self, parts: SimpleNamespace) -> None:
        programs = parts.programs
        carry = programs.init(parts.params, {})
        seen: list[int] = []
        for number in range(50):
            programs.step(carry, parts.batches[number % 10])
            if number % 7 == 6 or number == 49:
                seen += programs.read_records(carry).batch.tolist()
        assert seen == list(range(50))
        assert len(programs.read_records(carry)) == 0

    def test_unread_rows_are_never_overwritten(self, parts: SimpleNamespace) -> None:
        programs = parts.programs
        carry = programs.init(parts.params, {})
        for number in range(16):
            programs.step(carry, parts.batches[number % 10])
        assert programs.room(carry) == 0
        with pytest.raises(StepError, match="16 unread record rows and 1 more do not fit the ring of 16"):
            programs.step(carry, parts.batches[0])
        assert len(programs.read_records(carry)) == 16
        programs.step(carry, parts.batches[0])

    def test_sums_and_metrics(self, kit: Kit, parts: SimpleNamespace) -> None:
        """Columns equal numpy's on the same weights; the window's sums add up."""
        programs = parts.programs
        carry = programs.init(parts.params, {})
        for batch in parts.batches[:2]:
            programs.step(carry, batch)
        records = programs.read_records(carry)
        w = parts.params
        for row, batch in enumerate(parts.batches[:2]):
            logits = np.maximum(batch["x"] @ w["0.kernel"] + w["0.bias"], 0) @ w["1.kernel"] + w["1.bias"]
            loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(2), batch["y"]]
            assert records.num["cross_entropy"][row] == pytest.approx(loss.sum(), rel=1e-5)
            assert records.loss[row] == pytest.approx(loss.mean(), rel=1e-5)
            assert records.metrics["accuracy"][row].tolist() == [(logits.argmax(1) == batch["y"]).sum(), 2.0]
        assert records.window_num["cross_entropy"][1] == pytest.approx(records.num["cross_entropy"].sum())
        assert records.window_metrics["accuracy"][1].tolist() == records.metrics["accuracy"].sum(0).tolist()


class TestNamed:
    def test_there_and_back(self, parts: SimpleNamespace) -> None:
        programs = parts.programs
        carry = programs.init(parts.params, {}, seed=-1)
        programs.apply(carry, parts.batches[0])
        saved = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
        assert {"params/0.kernel", "opt_state/count", "opt_state/inner/mu/0.bias", "rng", "counters"} <= saved.keys()
        assert "accum/window/grads/0/0.kernel" in saved
        again = programs.named(programs.load_named(saved))
        assert list(again) == list(saved)
        assert all(np.array(again[name]).tobytes() == saved[name].tobytes() for name in saved)
        shapes = {name: (leaf.shape, leaf.dtype.name) for name, leaf in saved.items()}
        assert programs.abstract() == shapes

    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda s: s.pop("params/1.bias"), r"no 'params/1.bias' \(float32\[2\]\)"),
            (
                lambda s: s.update({"params/1.bias": np.zeros(3, np.float32)}),
                r"'params/1.bias': expected float32\[2\], found float32\[3\]",
            ),
            (
                lambda s: s.update({"counters": np.zeros(8, np.int64)}),
                r"'counters': expected int32\[10\], found int64\[8\]",
            ),
            (
                lambda s: s.update({"params/z": np.zeros(1)}),
                r"has 'params/z' \(float64\[1\]\), which this configuration lacks",
            ),
        ],
    )
    def test_anything_else_is_refused(self, parts: SimpleNamespace, change: Any, message: str) -> None:
        programs = parts.programs
        saved = dict(programs.named(programs.init(parts.params, {})))
        change(saved)
        with pytest.raises(StepError, match=message):
            programs.load_named(saved)

    def test_init_and_put_check_shapes(self, parts: SimpleNamespace) -> None:
        programs = parts.programs
        with pytest.raises(StepError, match=r"'params/0.bias': expected float32\[4\], found float32\[5\]"):
            programs.init({**parts.params, "0.bias": np.zeros(5, np.float32)}, {})
        carry = programs.init(parts.params, {})
        state = programs.state(carry)
        with pytest.raises(StepError, match=r"'rng': expected uint32\[2\], found int32\[2\]"):
            programs.put(carry, type(state)(**{**vars(state), "rng": jnp.zeros(2, jnp.int32)}))


def test_micro_never_fills_a_window(parts: SimpleNamespace) -> None:
    carry = parts.programs.init(parts.params, {})
    parts.programs.micro(carry, parts.batches[0])
    with pytest.raises(StepError, match="microbatch 2 of 2 closes the window; call apply"):
        parts.programs.micro(carry, parts.batches[1])
    with pytest.raises(StepError, match="a span has at least one microbatch, got 0"):
        parts.programs.span_stacked(carry, parts.batches[0], 0)


def test_parts_that_do_not_fit_are_refused_before_a_compile(kit: Kit) -> None:
    data, params = kit.slopes(1), {"w": np.zeros(1, np.float32)}
    shapes = kit.signature(data[0])
    grows = lambda p, m, b, k, t: (b["g"][:, 0] * p["w"], {"n": jnp.zeros(2)})  # noqa: E731
    with pytest.raises(StepError, match=r"the forward pass turns model_state/n from float32\[1\] into float32\[2\]"):
        build_step(
            grows,
            kit.slope_terms,
            kit.sgd(1.0),
            params=params,
            model_state={"n": np.zeros(1, np.float32)},
            signature=shapes,
        )

    class Counting(kit.Optimizer):
        def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return params, state._replace(count=state.count + 1.0)

    with pytest.raises(StepError, match=r"the optimizer turns opt_state/count from int32\[\] into float32\[\]"):
        build_step(
            kit.slope_forward, kit.slope_terms, Counting(optax.identity(), 1.0), params=params, model_state={},
            signature=shapes,
        )  # fmt: skip
    for bad, message in [
        (dict(nonfinite="drop"), "nonfinite is 'drop'; write 'fail', 'skip' or 'ignore'"),
        (dict(record_every="epoch"), "record_every is 'epoch'"),
        (dict(max_consecutive=-1), "max_consecutive is -1"),
        (dict(capacity=0), "capacity is 0"),
    ]:
        with pytest.raises(StepError, match=message):
            kit.toy("slope", kit.sgd(1.0), data, **bad)


def test_stacking_refuses_what_would_mix_shapes() -> None:
    one = {"x": np.zeros((2, 3), np.float32)}
    with pytest.raises(StepError, match="a block holds 1 to 2 batches, got 3"):
        stack_batches([one] * 3, 2)
    with pytest.raises(StepError, match=r"batch 1 has 'x' float32\[1, 3\], the first float32\[2, 3\]"):
        stack_batches([one, {"x": np.zeros((1, 3), np.float32)}], 2)
