"""Canonical reduction: the same bits on any devices, processes and windows; its parts, its errors and its limits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import NonFiniteError, StepError
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.shard_noise import ShardNoise
from nnx_jax.step.shards import Shards, add_to, as_levels, empty_levels, sum_of
from nnx_jax.step.tidy import tidied
from tests import processes
from tests.step import canonical_toy as toy

# The order of the sums ------------------------------------------------------------------------------------------------


def pairwise(terms: list[np.float32]) -> np.float32:
    """The fixed order written out: neighbours, then neighbours of these; an odd one out waits for the next round."""
    while len(terms) > 1:
        even = len(terms) // 2 * 2
        terms = [terms[i] + terms[i + 1] for i in range(0, even, 2)] + terms[even:]
    return terms[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 13])
def test_terms_are_added_pairwise(count: int) -> None:
    """However many there are; the numbers are such that another order has other bits."""
    values = np.random.default_rng(count).normal(size=count).astype(np.float32) * np.float32(1e3) ** np.arange(count)
    values = values.astype(np.float32)
    levels = empty_levels(jnp.float32(0), count)
    for index, value in enumerate(values):
        levels = add_to(levels, jnp.float32(value), jnp.int32(index))
    assert np.asarray(sum_of(levels, jnp.int32(count))).tobytes() == pairwise(list(values)).tobytes()


def test_a_sum_takes_the_place_of_all_levels() -> None:
    levels = empty_levels(jnp.zeros(2), 7)
    for index in range(6):
        levels = add_to(levels, jnp.full(2, 1.0), jnp.int32(index))
    levels = as_levels(levels, jnp.full(2, 40.0), jnp.int32(6))
    assert np.asarray(sum_of(levels, jnp.int32(6))).tolist() == [40, 40]
    levels = add_to(levels, jnp.full(2, 2.0), jnp.int32(6))
    assert np.asarray(sum_of(levels, jnp.int32(7))).tolist() == [42, 42]


# The noise ------------------------------------------------------------------------------------------------------------


def draw(key: Any, batch: Any) -> list[Any]:
    """All kinds of noise: for every value, for every row, by keys of rows, and for no row at all."""
    first, second, third = jax.random.split(key, 3)
    rows = batch["x"].shape[0]
    own = jax.vmap(lambda key: jax.random.normal(key, (3,)))(jax.random.split(third, rows))
    return [
        jax.random.bernoulli(first, 0.3, batch["x"].shape),
        jax.random.normal(jax.random.fold_in(second, 7), (rows,)),
        own,
        jax.random.bits(first, (rows * 2, 2), "uint8"),
        jnp.broadcast_to(jax.random.uniform(second, (5,)), (rows, 5)),
    ]


def columns(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"x": jax.ShapeDtypeStruct((rows, 7), np.dtype(np.float32))}


def test_shards_draw_what_the_batch_draws() -> None:
    """Bit for bit, whoever draws it: no module has to know of shards."""
    noise, key = ShardNoise(draw, columns(6), columns(24), 4), jax.random.fold_in(jax.random.key(3), 5)
    whole = draw(key, {"x": jnp.zeros((24, 7))})
    one = jax.jit(lambda shard: draw(noise.key(key, shard), {"x": jnp.zeros((6, 7))}))
    parts = [one(jnp.int32(shard)) for shard in range(4)]
    for place, wanted in enumerate(whole):
        found = np.concatenate([np.asarray(part[place]) for part in parts])
        assert found.tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda k, b: jax.random.normal(k, (7, b["x"].shape[0])), "has no leading axis of rows"),
        (
            lambda k, b: jax.random.normal(k, b["x"].shape) + jax.random.normal(k, (6, 7))[0],
            "both for rows and for something else",
        ),
        (lambda k, b: [jax.random.normal(k) for _ in range(b["x"].shape[0])], "draws noise 6 times .* and 24 times"),
    ],
)
def test_noise_that_cannot_be_cut_is_refused(function: Any, said: str) -> None:
    with pytest.raises(StepError, match=said):
        ShardNoise(function, columns(6), columns(24), 4)


# The arithmetic -------------------------------------------------------------------------------------------------------


def softmax_gradient(x: Any, slope: Any) -> Any:
    found, pull = jax.vjp(lambda x: jax.nn.softmax(x @ x), x)
    return pull(slope * found)[0]


def divisions(function: Any, devices: int) -> int:
    """How many the compiled program has left; XLA makes products of the others."""
    place = jax.sharding.NamedSharding(jax.make_mesh((devices,), ("data",)), jax.sharding.PartitionSpec())
    like = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return (
        jax.jit(function, in_shardings=place, out_shardings=place)
        .lower(like, like)
        .compile()
        .as_text()
        .count(" divide(")
    )


def test_one_device_and_several_divide_alike() -> None:
    """The one known cause of other bits on one device: a rule of XLA that counts uses, before or after equal ones are
    merged. Should the first line fail, XLA has changed, and `tidied` may go."""
    assert divisions(softmax_gradient, 1) != divisions(softmax_gradient, 2)
    assert divisions(tidied(softmax_gradient), 1) == divisions(tidied(softmax_gradient), 2)


def test_tidied_computes_the_same() -> None:
    """Through loops, branches, checkpoints, derivatives of one's own and random draws."""

    def function(x: Any, key: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            carry = jax.lax.cond(row.sum() > 0, lambda c: c + jax.nn.relu(row), lambda c: c * 0.5, carry)
            return carry, jax.nn.softmax(carry) + jax.nn.softmax(carry)

        loss = lambda x: jnp.sum(jax.checkpoint(lambda x: jax.lax.scan(body, x[0], x)[1])(x) ** 2)  # noqa: E731
        grown = jax.lax.while_loop(lambda s: jnp.sum(s) < 10, lambda s: s + 1, jnp.abs(x[0]))
        return jax.grad(loss)(x), grown, jax.random.normal(key, x.shape) + jax.random.normal(key, x.shape)

    x, key = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32), jax.random.key(1)
    for found, wanted in zip(jax.jit(tidied(function))(x, key), jax.jit(function)(x, key), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


# Training -------------------------------------------------------------------------------------------------------------


def test_devices_change_no_bit() -> None:
    """Attention, softmax, dropout and Adam: parameters, moments, loss and norm are equal on 1, 2 and 4 devices."""
    assert len({toy.digest(devices, rate=0.2) for devices in (1, 2, 4)}) == 1


@pytest.fixture(scope="module")
def plain() -> str:
    """One device, one batch an update, eight shards."""
    return toy.digest(1)


@pytest.mark.parametrize("devices, window, span", [(1, 4, False), (2, 4, True), (4, 2, False)])
def test_windows_and_dispatch_change_no_bit(plain: str, devices: int, window: int, span: bool) -> None:
    """A window of K microbatches of M shards is one microbatch of K M shards."""
    assert toy.digest(devices, window=window, span=span) == plain


def test_hooks_beside_it_change_no_bit(plain: str) -> None:
    """An average, and a clip that clips nothing, in windows and without."""
    for window in (1, 4):
        update = (GradientAccumulationHook(window), GradientClipHook(1e6), EMAHook(decay=0.9))
        assert toy.digest(2, window=window, hooks=HookPlan(update=update)) == plain


def test_it_is_the_fast_reduction_up_to_rounding() -> None:
    """Also the noise is the same: another mask would change the first digit."""
    states = [step.state(carry).params for step, carry in (toy.train(1, shards, rate=0.2) for shards in (8, None))]
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-3, atol=1e-4)


def test_an_open_window_goes_on_from_its_leaves() -> None:
    """What the window has added up so far, level by level, is part of the state."""
    whole, split = toy.programs(1, 8, window=4), toy.programs(1, 8, window=4)
    carries = [step.init(toy.weights(), {}) for step in (whole, split)]
    for number, batch in enumerate(toy.batches(4)):
        whole.step(carries[0], batch)
        split.step(carries[1], batch)
        if number == 2:
            named = {name: np.array(leaf) for name, leaf in split.named(carries[1]).items()}
            carries[1] = split.load_named(named)
    left, right = (step.state(carry) for step, carry in zip((whole, split), carries, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


def test_a_number_that_is_not_finite_is_found() -> None:
    """In one shard of one microbatch of a window, which is named; nothing of the window is applied."""

    def burst(outputs: Any, batch: Any) -> Any:
        (term,) = toy.terms(outputs, batch)
        return (type(term)(term.name, term.numerator / jnp.where(batch["y"][0] == 9, 0.0, 1.0), term.denominator),)

    step = toy.programs(2, 8, window=4, terms=burst)
    carry = step.init(toy.weights(), {})
    for number, batch in enumerate(toy.batches(4)):
        if number == 2:
            batch = {**batch, "y": batch["y"].copy()}
            batch["y"][4] = 9
        step.step(carry, toy.placed(batch, toy.sharding(2)))
    with pytest.raises(NonFiniteError, match="microbatch 2: loss term 'cross_entropy'"):
        step.read_records(carry)
    assert np.array_equal(step.state(carry).params["h"], toy.weights()["h"])


@pytest.fixture(scope="module")
def in_processes() -> dict[str, list[str]]:
    """Digests with dropout, of windows, of split models and of whole batches: 1 and 8 devices of one process, and 1
    and 2 of each of two."""
    split = {"axis": "fsdp", "clip_norm": 0.1}
    settings = [{"rate": 0.2}, {"window": 2, "shards": 16}, split, {"whole": "asked"}, {"whole": "asked", **split}]
    found = {}
    for world, devices in ((1, 1), (1, 8), (2, 1), (2, 2)):
        told = processes.results(
            "tests.step.canonical_toy:digests", world, devices=devices, args={"settings": settings},
            env={"PJRT_NPROC": "8"}, timeout=300,
        )  # fmt: skip
        found |= {f"{world} x {devices}, rank {rank}": each for rank, each in enumerate(told)}
    return found


@pytest.mark.slow
@pytest.mark.long
def test_processes_change_no_bit(in_processes: dict[str, list[str]]) -> None:
    """Hash for hash, in every process; XLA's pool of threads has one size everywhere, else long sums differ."""
    assert len({tuple(each) for each in in_processes.values()}) == 1, in_processes


# What it cannot do ----------------------------------------------------------------------------------------------------


def test_shards_that_devices_cannot_share() -> None:
    with pytest.raises(StepError, match="reduction_shards is 6; write a power of two, such as 8"):
        Shards(6)
    told = "reduction_shards is 2, which leaves 1 of 3 devices without a shard; write 4 or more, or use 2 devices"
    with pytest.raises(StepError, match=told):
        Shards(2, toy.sharding(3))
    with pytest.raises(StepError, match="a batch of 6 rows cannot be cut into 4 equal shards"):
        Shards(4, pads=False).filled({"mask": np.ones(6)})
