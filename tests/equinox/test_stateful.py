"""Modules with state: BatchNorm over the rows that count, counters, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.engines.equinox import EquinoxNet, PureEquinox
from tests.equinox.nets import Normed, fit, model, normed, rows, weights

MODES: list[Any] = ["batch", "ema"]


class Norm(eqx.Module):
    """A BatchNorm alone, over channels first."""

    norm: eqx.nn.BatchNorm

    def __init__(self, channels: int = 1, mode: Any = "batch", axis: Any = "batch") -> None:
        self.norm = eqx.nn.BatchNorm(channels, axis, momentum=0.9, mode=mode)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(x, state)


class Counter(eqx.Module):
    """Counts its calls, and may remember the mean of what it saw."""

    w: jax.Array
    calls: eqx.nn.StateIndex
    seen: eqx.nn.StateIndex
    looks: bool

    def __init__(self, looks: bool) -> None:
        self.w, self.looks = jnp.ones((2, 4)), looks
        self.calls, self.seen = eqx.nn.StateIndex(jnp.int32(0)), eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x: Any, state: Any) -> Any:
        state = state.set(self.calls, state.get(self.calls) + 1)
        if self.looks:
            state = state.set(self.seen, jax.lax.pmean(x.mean(), "batch"))
        return self.w @ x, state


def norm(*given: Any, **options: Any) -> Any:
    return eqx.nn.make_with_state(Norm)(*given, **options)


def plain(state: Any) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in state.items()}


def run(pure: PureEquinox, x: Any, mask: Any = None, *, state: Any = None, train: bool = True) -> Any:
    batch = {"x": jnp.asarray(x)} | ({} if mask is None else {"mask": jnp.asarray(mask, jnp.float32)})
    held = pure.model_state if state is None else state
    return pure.forward({**pure.params, **pure.frozen}, held, batch, jax.random.key(0), train)


def pure_of(given: Any, **options: Any) -> PureEquinox:
    return PureEquinox(EquinoxNet.of(given), mask_rows=True, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2, 2)])
def test_with_every_row_the_numbers_are_those_of_equinox(mode: Any, shape: Any) -> None:
    """State and outputs over three batches, through `vmap(axis_name=)` as Equinox's own examples have it. (pipekit:N13)

    The rule of the running statistics is written twice, here and in Equinox; they must not grow apart.
    """
    module, state = norm(3, mode=mode)
    pure = pure_of((module, state))
    held, mapped = pure.model_state, jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    for number in range(3):
        x = np.random.default_rng(number).normal(2.0, 3.0, size=shape).astype(np.float32)
        outputs, held = run(pure, x, np.ones(5), state=held)
        expected, state = mapped(jnp.asarray(x), state)
        np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-6)
    for got, wanted in zip(held.values(), jax.tree.leaves(state), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_padded_rows_enter_neither_statistics_nor_outputs(mode: Any) -> None:
    """Real rows 7 and 5, two rows of padding: mean 6, variance 1; by hand, and equal to the two rows alone."""
    pure = pure_of(norm(1, mode=mode))
    padded, state = run(pure, [[7.0], [5.0], [0.0], [1e6]], [1, 1, 0, 0])
    alone, after = run(pure, [[7.0], [5.0]], [1, 1])
    np.testing.assert_allclose(padded[:2], [[1.0], [-1.0]], rtol=1e-5)
    np.testing.assert_array_equal(padded[:2], alone)
    assert plain(state) == plain(after)
    mean, var = (state[name] for name in state if name.endswith((".0", ".1")))
    share = 1.0 if mode == "ema" else 0.1
    np.testing.assert_allclose([mean[0], var[0]], [6.0 * share, 1.0 * share + (mode == "batch") * 0.9], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_a_row_leaves_the_state_as_it_is(mode: Any) -> None:
    pure = pure_of(norm(1, mode=mode))
    outputs, state = run(pure, [[7.0], [5.0]], [0, 0])
    assert np.isfinite(outputs).all()
    for name, value in pure.model_state.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_evaluation_uses_the_running_statistics_and_changes_none() -> None:
    pure = pure_of(norm(1))
    _, state = run(pure, [[7.0], [5.0]])
    outputs, after = run(pure, [[8.0], [1e3]], state=state, train=False)
    assert plain(after) == plain(state)
    scale = 1 - 0.9
    mean, var = float(state["norm.batch_state_index.0"][0]) / scale, float(state["norm.batch_state_index.1"][0]) / scale
    assert float(outputs[0, 0]) == pytest.approx((8.0 - mean) / np.sqrt(var + 1e-5), rel=1e-5)


def test_the_mapped_axis_has_the_name_of_the_norms() -> None:
    """Another name, or a tuple of one, works; several names have no rows to go with them."""
    for axis in ("rows", ("rows",)):
        outputs, _ = run(pure_of(norm(1, axis=axis)), [[7.0], [5.0]], [1, 1])
        np.testing.assert_allclose(outputs, [[1.0], [-1.0]], rtol=1e-5)
    with pytest.raises(ModelError, match="rows have one axis: give them all the same axis_name"):
        pure_of(norm(1, axis=("rows", "views")))


def test_statistics_stay_float32_where_layers_compute_in_16_bits() -> None:
    x = np.random.default_rng(0).normal(300.0, 1.0, size=(64, 4)).astype(np.float32)
    pure = pure_of(normed(drop=0.0), compute_dtype=jnp.bfloat16)
    outputs, state = run(pure, x, np.ones(64))
    assert outputs.dtype == jnp.float32
    assert {value.dtype.name for value in state.values()} == {"int32", "float32"}
    low = lambda v: jnp.asarray(v, jnp.bfloat16)  # noqa: E731
    first = normed()[0].first
    hidden = jax.vmap(lambda row: low(first.weight) @ row[::-1] + low(first.bias))(low(x)).astype(jnp.float32)
    np.testing.assert_allclose(state["norm.batch_state_index.0"], 0.1 * hidden.mean(0), rtol=1e-5)


def test_a_module_that_maps_itself_has_its_rows_masked_as_well() -> None:
    """`takes_batch`: its own vmap, over all rows; over a part of them it is told that padding cannot be left out."""

    class Whole(eqx.Module):
        norm: eqx.nn.BatchNorm
        half: bool
        takes_batch = True

        def __init__(self, half: bool) -> None:
            self.norm, self.half = eqx.nn.BatchNorm(1, "mine", mode="batch"), half

        def __call__(self, batch: Any, state: Any) -> Any:
            x = batch["x"][: len(batch["x"]) // (2 if self.half else 1)]
            return jax.vmap(self.norm, axis_name="mine", in_axes=(0, None), out_axes=(0, None))(x, state)

    make = eqx.nn.make_with_state(Whole)
    outputs, _ = run(pure_of(make(False)), [[7.0], [5.0], [1.0], [9.0]], [1, 1, 0, 0])
    np.testing.assert_allclose(outputs[:2], [[1.0], [-1.0]], rtol=1e-5)
    with pytest.raises(ModelError, match="BatchNorm sees 2 rows along 'mine' but the batch has 4"):
        run(pure_of(make(True)), [[7.0], [5.0], [1.0], [9.0]], [1, 1, 0, 0])


@pytest.mark.slow
def test_a_padded_tail_trains_as_its_rows_alone(tmp_path: Path) -> None:
    """Seven rows, padded to eight or alone: the same weights and statistics, and one update."""
    padded, alone = model(normed(drop=0.0)), model(normed(drop=0.0))
    fit(tmp_path / "a", padded, count=7, n_epochs=1, optim={"kind": "sgd"})
    fit(tmp_path / "b", alone, count=7, batch=7, n_epochs=1, optim={"kind": "sgd"})
    one, two = weights(padded), weights(alone)
    assert int(one["norm.batch_counter"]) == 1
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=2e-5, atol=1e-6, err_msg=name)


def test_state_is_given_beside_its_module() -> None:
    """Without it, or with another module's: said by name, not by a TypeError from inside. (pipekit:N13)"""
    module, state = normed()
    for bare in (module, Normed()):
        with pytest.raises(ModelError, match=r"Normed keeps state \('norm.batch_counter'\), which was not given.*pair"):
            model(bare)
    with pytest.raises(ModelError, match="the state given is not that of this Norm"):
        model((norm(1)[0], state))


def test_a_state_made_of_rows_is_refused_where_rows_are_padded(tmp_path: Path) -> None:
    """A counter is no such state; the mean of what was seen is, and a dropped tail leaves nothing to pad."""
    make = eqx.nn.make_with_state(Counter)
    told = "Counter keeps 'seen' of the rows it sees, and padded rows would enter it; use data.tail: drop"
    with pytest.raises(DataError, match=told):
        fit(tmp_path / "a", model(make(True)), count=22, n_epochs=1)
    assert not (tmp_path / "a").exists()
    counts = model(make(False))
    fit(tmp_path / "b", counts, count=22, n_epochs=1)
    assert int(counts.state.get(counts.module.calls)) == 3
    sees = model(make(True))
    fit(tmp_path / "c", sees, count=22, tail="drop", n_epochs=1)
    assert float(sees.state.get(sees.module.seen)) != 0


def test_a_single_row_is_no_batch_for_a_norm(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"BatchNorm \(norm\) needs two rows or more"):
        fit(tmp_path, model(normed()), count=17)


def test_a_module_with_state_returns_it() -> None:
    class Silent(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self) -> None:
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(x, state)[0]

    with pytest.raises(ModelError, match=r"Silent has state, so it returns \(output, state\)"):
        run(pure_of(eqx.nn.make_with_state(Silent)()), rows(4).arrays()["x"])
