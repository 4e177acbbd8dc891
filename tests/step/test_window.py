"""The arithmetic of a window, case by case, with the numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.core.errors import ConfigError, DataError, NonFiniteError, StepError
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.step import build_step

Kit = SimpleNamespace
NAN = float("nan")


def count(state: Any) -> int:
    return int(state.opt_state.count)


def test_unequal_valid_counts_in_a_window(kit: Kit) -> None:
    """case:A01 the window's sum over all its valid items, not a mean of means."""
    data = kit.targets([8, None, None, None], [0, 0, 0, None])
    programs, carry = kit.toy("target", kit.sgd(0.1), data, accumulate=2)
    assert kit.run(programs, carry, data) == [pytest.approx(0.2)]
    records = programs.read_records(carry)
    assert records.window_loss[-1] == pytest.approx(8.0)
    assert records.grad_norm[-1] == pytest.approx(2.0)


def test_unequal_valid_counts_over_devices(kit: Kit) -> None:
    """case:A02 the divisor, 8, counts over window and shards: a mean of four means gives 0.2. Two virtual devices."""
    data = kit.targets([8, None, None, 0, 0, 0], [0, 0, None, 0, 0, None])  # the first three items are shard 0's
    programs, carry = kit.toy("target", kit.sgd(0.1), data, accumulate=2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spread, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axis)) for axis in (("data",), ()))
    carry.leaves = jax.device_put(carry.leaves, whole)
    sharded = [jax.device_put(batch, spread) for batch in data]
    assert kit.run(programs, carry, sharded) == [pytest.approx(0.1)]
    assert {float(part.data) for part in programs.state(carry).params["w"].addressable_shards} == {np.float32(0.1)}


def test_microbatch_without_targets_changes_nothing(kit: Kit) -> None:
    """case:A03 (a) an empty microbatch neither halves the update nor divides by zero."""
    data = kit.targets([4, 0], [None, None])
    programs, carry = kit.toy("target", kit.sgd(0.1), data, accumulate=2)
    assert kit.run(programs, carry, data) == [pytest.approx(0.2)]
    assert np.isnan(programs.read_records(carry).loss[1])  # nothing was measured there


@pytest.mark.parametrize("accumulate", [1, 2])
def test_window_without_targets_is_no_update(kit: Kit, accumulate: int) -> None:
    """case:A03 (b): weights, moments, decay, count and BatchNorm-like state stay bit for bit; the window is counted."""
    forward = lambda p, m, b, k, t: (jnp.broadcast_to(p["w"], b["mask"].shape), {"seen": m["seen"] + 1.0})  # noqa: E731
    data = kit.targets([4, 0], [2, 1]) + kit.targets([None, None], [None, None])
    params = {"w": np.float32(0)}
    programs = build_step(
        forward, kit.target_terms, kit.adam(0.1, decay=0.1), params=params, model_state={"seen": np.float32(0)},
        signature=kit.signature(data[0]), accumulate=accumulate,
    )  # fmt: skip
    carry = programs.init(params, {"seen": np.float32(0)})
    for batch in data[:2]:
        programs.step(carry, batch)
    before = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
    for batch in data[2:]:
        programs.step(carry, batch)
    after = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
    moved = [name for name in before if before[name].tobytes() != after[name].tobytes()]
    assert moved == ["counters"]
    records = programs.read_records(carry)
    dropped = 2 // accumulate
    assert list(after["counters"][[0, 2, 4, 5]]) == [4, dropped, dropped, 0]
    assert records.empty[-1]
    assert (records.closed & ~records.committed).sum() == dropped
    assert np.isfinite(records.grad_norm).all()


def test_last_shorter_window_has_its_own_denominator(kit: Kit) -> None:
    """case:A04 (and case:A06: the logged loss of update 1 is the mean over its window)."""
    data = kit.targets([1], [2], [3], [4], [5])
    programs, carry = kit.toy("target", kit.sgd(0.1), data, accumulate=2)
    assert kit.run(programs, carry, data) == pytest.approx([0.15, 0.485, 0.9365])
    records = programs.read_records(carry)
    assert records.window_loss[records.closed][0] == pytest.approx(1.25)
    assert list(records.closed) == [False, True, False, True, True]
    assert list(records.batch) == [0, 1, 2, 3, 4]
    assert list(records.step) == [0, 1, 1, 2, 3]


def test_window_longer_than_the_epoch_closes_at_its_end(kit: Kit) -> None:
    """case:A05 one update an epoch, divided by what was seen."""
    data = kit.targets([1], [2], [3])
    programs, carry = kit.toy("target", kit.sgd(0.1), data, accumulate=8)
    assert kit.run(programs, carry, data) + kit.run(programs, carry, data) == pytest.approx([0.2, 0.38])


@pytest.mark.parametrize("accumulate", [0, -1])
def test_window_has_at_least_one_microbatch(kit: Kit, accumulate: int) -> None:
    """case:A05"""
    with pytest.raises(StepError, match=f"accumulate is {accumulate}; a window has at least one"):
        kit.toy("target", kit.sgd(0.1), kit.targets([1]), accumulate=accumulate)


def test_sixteen_bit_gradients_are_added_in_float32(kit: Kit) -> None:
    """case:A07 512 gradients of 1 in bfloat16: a bfloat16 sum stops at 256 and would move the weight by -0.5."""
    batch = {"g": np.ones((1, 1), jnp.bfloat16), "mask": np.ones(1, np.float32)}
    params = {"w": np.zeros(1, jnp.bfloat16)}
    programs = build_step(
        kit.slope_forward, kit.slope_terms, kit.sgd(1.0), params=params, model_state={},
        signature=kit.signature(batch), accumulate=512,
    )  # fmt: skip
    carry = programs.init(params, {})
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(programs.state(carry).accum["window"].grads))
    block = {name: np.broadcast_to(part, (512, *part.shape)) for name, part in batch.items()}
    programs.span_stacked(carry, block, 512)
    weight = programs.state(carry).params["w"]
    assert weight.dtype == jnp.bfloat16
    assert weight == -1.0


def test_clip_acts_on_the_window(kit: Kit) -> None:
    """case:A08 the window's mean (1.5, 2) is clipped, and its norm before that is recorded."""
    data = kit.slopes((3, 0), (0, 4))
    programs, carry = kit.toy("slope", kit.sgd(1.0), data, accumulate=2, clip_norm=1.0)
    assert np.allclose(kit.run(programs, carry, data)[0], [-0.6, -0.8])
    assert programs.read_records(carry).grad_norm[-1] == 2.5


def test_decay_acts_once_a_window(kit: Kit) -> None:
    """case:A09"""
    data = kit.slopes(0, 0, 0, 0)
    programs, carry = kit.toy("slope", kit.Optimizer(optax.add_decayed_weights(0.1), 0.1), data, w=1.0, accumulate=4)
    assert kit.run(programs, carry, data) == [pytest.approx(0.99)]
    assert count(programs.state(carry)) == 1


def test_multisteps_of_optax_weighs_unequal_counts_wrongly(kit: Kit) -> None:
    """One item of gradient -8 among three of -8/3... : optax.MultiSteps takes the mean of means, we the union's mean.

    Microbatch 1 has one item (gradient -2), microbatch 2 three (gradient -6 each). Union: -(2 + 18) / 4 = -5. Mean of
    the two means: -(2 + 6) / 2 = -4.
    """
    small, large = kit.targets([2, None, None], [6, 6, 6])
    multi = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
    weight, state = jnp.float32(0), multi.init(jnp.float32(0))
    for batch in (small, large):
        mean = jax.grad(lambda w, b=batch: jnp.sum(0.5 * (w - b["t"]) ** 2 * b["mask"]) / jnp.sum(b["mask"]))(weight)
        updates, state = multi.update(mean, state, weight)
        weight = optax.apply_updates(weight, updates)
    assert weight == 4.0  # the gradient was -4

    programs, carry = kit.toy("target", kit.sgd(1.0), [small, large], accumulate=2)
    assert kit.run(programs, carry, [small, large]) == [5.0]


class TestSeveralTerms:
    """Each term is divided by its own denominator over the window."""

    @staticmethod
    def terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
        free = jnp.sum(outputs["w"] * batch["a"])
        return (
            LossTerm("first", outputs["u"] * jnp.sum(batch["x"]), jnp.sum(batch["x"] != 0), weight=2.0),
            LossTerm("second", outputs["v"] * jnp.sum(batch["y"]), jnp.sum(batch["y"] != 0)),
            LossTerm("free", free, reduction="sum", weight=0.5),
        )

    @staticmethod
    def batch(x: Any, y: Any, a: float) -> dict[str, np.ndarray]:
        rows = {"x": np.array(x, np.float32), "y": np.array(y, np.float32), "a": np.array([a], np.float32)}
        return {**rows, "mask": np.ones(2, np.float32)}

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_own_denominators(self, kit: Kit, accumulate: int) -> None:
        data = [self.batch([8, 0], [1, 2], 3), self.batch([2, 2], [0, 0], 5)]
        params = {name: np.float32(0) for name in "uvw"}
        programs = build_step(
            lambda p, m, b, k, t: (p, m), self.terms, kit.sgd(1.0), params=params, model_state={},
            signature=kit.signature(data[0]), accumulate=accumulate,
        )  # fmt: skip
        carry = programs.init(params, {})
        for batch in data:
            programs.step(carry, batch)
        found = {name: float(value) for name, value in programs.state(carry).params.items()}
        if accumulate == 2:  # u: 2 * (8 + 4) / 3; v: 3 / 2; w: (3 + 5) / 2
            assert found == {"u": -8.0, "v": -1.5, "w": -4.0}
            assert len(programs.state(carry).accum["window"].grads) == 3
        else:  # two updates: u 2 * 8 / 1 + 2 * 4 / 2; v 3 / 2, then nothing valid; w the same sums
            assert found == {"u": -20.0, "v": -1.5, "w": -4.0}
            assert programs.state(carry).accum == {}
        records = programs.read_records(carry)
        assert list(records.committed) == [accumulate == 1, True]

    def test_additive_terms_share_one_buffer(self, kit: Kit) -> None:
        def terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
            total = jnp.sum(outputs)
            return LossTerm("a", total, reduction="sum"), LossTerm("b", 2 * total, reduction="sum", weight=3.0)

        data = kit.slopes(1, 1)
        programs = build_step(
            kit.slope_forward, terms, kit.sgd(1.0), params={"w": np.zeros(1, np.float32)}, model_state={},
            signature=kit.signature(data[0]), accumulate=2,
        )  # fmt: skip
        carry = programs.init({"w": np.zeros(1, np.float32)}, {})
        assert len(programs.state(carry).accum["window"].grads) == 1
        assert kit.run(programs, carry, data) == [-14.0]  # (1 + 3 * 2) a microbatch, never divided

    def test_single_term_keeps_one_buffer(self, kit: Kit) -> None:
        programs, carry = kit.toy("target", kit.sgd(0.1), kit.targets([1]), accumulate=2)
        assert len(programs.state(carry).accum["window"].grads) == 1

    def test_term_names_are_unique(self, kit: Kit) -> None:
        twice = lambda o, b: (*kit.slope_terms(o, b), *kit.slope_terms(o, b))  # noqa: E731
        with pytest.raises(ConfigError, match="'slope' is used 2 times"):
            build_step(
                kit.slope_forward, twice, kit.sgd(1.0), params={"w": np.zeros(1, np.float32)}, model_state={},
                signature=kit.signature(kit.slopes(1)[0]),
            )  # fmt: skip


class TestNonFinite:
    def test_bad_microbatch_drops_its_window_only(self, kit: Kit) -> None:
        """case:C01 the accumulator is clean for the next window and window borders do not move."""
        data = kit.slopes(-1, NAN, -1, -1, -1, -1)
        programs, carry = kit.toy("slope", kit.sgd(0.1), data, accumulate=2, nonfinite="skip")
        assert np.ravel(kit.run(programs, carry, data)) == pytest.approx([0.0, 0.1, 0.2])
        counters = np.array(programs.state(carry).counters)
        assert list(counters[:7]) == [6, 0, 2, 2, 1, 1, 0]
        records = programs.read_records(carry)
        assert list(records.closed) == [False, True] * 3
        assert list(records.closed & ~records.committed) == [False, True, False, False, False, False]
        assert records.ints["bad_batch"][1] == 1
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(programs.state(carry).accum["window"].grads))

    def test_skipping_leaves_the_moments_alone(self, kit: Kit) -> None:
        """case:C02 Adam's moments and count never see the dropped window."""
        data = kit.slopes(1, NAN, 1)
        programs, carry = kit.toy("slope", kit.adam(0.1), data, nonfinite="skip")
        assert np.ravel(kit.run(programs, carry, data)) == pytest.approx([-0.1, -0.1, -0.2], abs=1e-5)
        state = programs.state(carry)
        moments = state.opt_state.inner[0]
        assert (count(state), int(moments.count)) == (2, 2)
        assert float(moments.mu["w"][0]) == pytest.approx(0.19)
        assert float(moments.nu["w"][0]) == pytest.approx(0.001999)

    def test_too_many_bad_windows_in_a_row_stop_the_run(self, kit: Kit) -> None:
        """case:C03 after the limit the run stops with the last finite weight; nothing non-finite is ever applied."""
        data = kit.slopes(-1, *[NAN] * 5, -1)
        programs, carry = kit.toy("slope", kit.sgd(0.1), data, nonfinite="skip", max_consecutive=2)
        assert np.ravel(kit.run(programs, carry, data)) == pytest.approx([0.1] * 7)
        with pytest.raises(NonFiniteError, match="update 2, microbatch 3: .* after 3 bad windows in a row"):
            programs.read_records(carry)

    def test_a_good_window_ends_the_row_of_bad_ones(self, kit: Kit) -> None:
        """case:C03 consecutive counts start again, the total goes on."""
        data = kit.slopes(-1, NAN, NAN, -1, NAN, NAN, -1)
        programs, carry = kit.toy("slope", kit.sgd(0.1), data, nonfinite="skip", max_consecutive=2)
        assert kit.run(programs, carry, data)[-1] == pytest.approx(0.3)
        assert list(np.array(programs.state(carry).counters)[:7]) == [7, 0, 3, 3, 4, 4, 0]
        assert len(programs.read_records(carry)) == 7

    def test_schedule_waits_for_real_updates(self, kit: Kit) -> None:
        """case:C04 the second update uses the second rate, whatever was skipped between."""
        data = kit.slopes(-1, NAN, -1)
        programs, carry = kit.toy("slope", kit.sgd(lambda n: 0.1 * (n + 1)), data, nonfinite="skip")
        assert np.ravel(kit.run(programs, carry, data)) == pytest.approx([0.1, 0.1, 0.3])
        assert programs.read_records(carry).rate == pytest.approx([0.1, 0.0, 0.2])

    def test_infinite_norm_is_not_clipped_but_skipped(self, kit: Kit) -> None:
        """case:C07"""
        data = kit.slopes((float("inf"), 1))
        programs, carry = kit.toy("slope", kit.sgd(1.0), data, clip_norm=1.0, nonfinite="skip", w=(0.5, 0.5))
        assert kit.run(programs, carry, data, lambda s: (s.params["w"].tolist(), count(s))) == [([0.5, 0.5], 0)]
        records = programs.read_records(carry)
        assert not np.isfinite(records.grad_norm[0])
        assert (records.closed & ~records.committed).sum() == 1

    def test_zero_gradient_under_a_clip(self, kit: Kit) -> None:
        """case:C08 no 0/0."""
        data = kit.slopes((0, 0))
        programs, carry = kit.toy("slope", kit.sgd(1.0), data, clip_norm=1.0, w=(0.5, 0.5))
        assert kit.run(programs, carry, data)[0].tolist() == [0.5, 0.5]

    @pytest.mark.parametrize("limit", [0.0, -1.0, NAN])
    def test_clip_limit_is_positive(self, kit: Kit, limit: float) -> None:
        """case:C08"""
        with pytest.raises(StepError, match="clip_norm is .*; give a norm above 0"):
            kit.toy("slope", kit.sgd(1.0), kit.slopes(1), clip_norm=limit)

    @pytest.mark.parametrize("limit", [None, float("inf")])
    def test_no_clip(self, kit: Kit, limit: float | None) -> None:
        """case:C08"""
        data = kit.slopes(30)
        programs, carry = kit.toy("slope", kit.sgd(1.0), data, clip_norm=limit)
        assert kit.run(programs, carry, data) == [-30.0]

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_fail_stops_before_the_bad_update(self, kit: Kit, accumulate: int) -> None:
        """The host hears which update, microbatch and leaf; the device has not moved since the update before."""
        good, bad = kit.slopes(-1, -1), kit.slopes(NAN, -1)
        programs, carry = kit.toy("slope", kit.adam(0.1), good, accumulate=accumulate)
        kit.run(programs, carry, good)
        kept = {
            name: np.array(leaf) for name, leaf in programs.named(carry).items() if name[:3] in ("par", "opt", "mod")
        }
        kit.run(programs, carry, bad + good)
        for name, leaf in kept.items():
            assert np.array(programs.named(carry)[name]).tobytes() == leaf.tobytes(), name
        update = 2 // accumulate + 1
        with pytest.raises(
            NonFiniteError, match=rf"update {update}, microbatch 2: loss term 'slope' and the gradient of 'w'"
        ):
            programs.read_records(carry)

    def test_finite_loss_with_a_bad_gradient_names_the_leaf(self, kit: Kit) -> None:
        """sqrt at 0: the loss is 0, its gradient infinite; the leaf named is the one with the bad gradient."""
        forward = lambda p, m, b, k, t: (b["g"][:, 0] * (p["a"] + jnp.sqrt(p["b"])), m)  # noqa: E731
        params = {"a": np.float32(1), "b": np.float32(0)}
        data = kit.slopes(1, 1)
        programs = build_step(
            forward, kit.slope_terms, kit.sgd(0.1), params=params, model_state={}, signature=kit.signature(data[0]),
            accumulate=2,
        )  # fmt: skip
        carry = programs.init(params, {})
        kit.run(programs, carry, data, lambda state: None)
        with pytest.raises(NonFiniteError, match="update 1, microbatch 0: the gradient of 'b' is not finite"):
            programs.read_records(carry)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_bad_gradient_under_a_mask_is_reported(self, kit: Kit, accumulate: int) -> None:
        """A term without a valid target whose gradient is still infinite is a wrong loss; hiding it would be worse."""
        forward = lambda p, m, b, k, t: (jnp.sqrt(p["w"]) + 0 * b["mask"], m)  # noqa: E731
        data = kit.targets([None], [None])
        programs = build_step(
            forward, kit.target_terms, kit.sgd(0.1), params={"w": np.float32(0)}, model_state={},
            signature=kit.signature(data[0]), accumulate=accumulate,
        )  # fmt: skip
        carry = programs.init({"w": np.float32(0)}, {})
        kit.run(programs, carry, data)
        with pytest.raises(NonFiniteError, match="update 1, microbatch 0: the gradient of 'w'"):
            programs.read_records(carry)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_impossible_labels_stop_the_run(kit: Kit, accumulate: int) -> None:
    """Nothing of the window is applied and the microbatch is named."""
    data = kit.slopes(-1, -1, -1, -1)
    data[2]["g"][:] = -7  # the "label" of this test
    programs, carry = kit.toy(
        "slope", kit.sgd(0.1), data, accumulate=accumulate, nonfinite="skip",
        invalid=lambda o, b: jnp.sum(b["g"] < -5, dtype=jnp.int32),
    )  # fmt: skip
    seen = np.ravel(kit.run(programs, carry, data))
    assert seen == pytest.approx([0.1, 0.2, 0.2, 0.2] if accumulate == 1 else [0.1, 0.1])
    with pytest.raises(DataError, match="microbatch 2 has 1 labels that no class has"):
        programs.read_records(carry)
