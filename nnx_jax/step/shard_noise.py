"""Noise of a shard: a random key that draws, for some of a batch's rows, what the plain key draws for these rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry2x32_p

from nnx_jax.core.errors import StepError

Shape = tuple[int, ...]
Draw = tuple[str, Shape]
"""Name of a primitive that draws, and the shape drawn."""

_IMPL = "threefry2x32"
_BITS, _SPLIT = "random_bits", "random_split"


class ShardNoise:
    """Keys for the shards of one batch.

    The bits of a draw are a function of the key and of the place in the array drawn. So a shard need not draw the noise
    of the whole batch: it asks for the bits of its own places.

    Args:
        function: `function(key, batch)`, whatever draws.
        part, whole: shapes of a batch's columns, of a shard's rows and of all rows.
        shards: how many parts make the whole.

    Raises:
        StepError: it cannot be told which draws are of rows, or rows are not their first axis.
    """

    def __init__(self, function: Callable[[Any, Any], Any], part: Any, whole: Any, shards: int) -> None:
        self._rows = _led_by_rows(_drawn(function, part), _drawn(function, whole), shards)
        self._impl = _implementation(self._rows) if self._rows else None

    @property
    def draws(self) -> bool:
        """Something drawn has an axis of rows."""
        return bool(self._rows)

    def key(self, key: jax.Array, shard: Any) -> jax.Array:
        """The key of one shard.

        Args:
            key: typed threefry key of the whole batch.
            shard: int32 scalar, number of the shard.
        """
        if self._impl is None:
            return key
        data = jnp.concatenate([jax.random.key_data(key), jnp.asarray(shard, jnp.uint32)[None]])
        return jax.random.wrap_key_data(data, impl=self._impl)


def _implementation(rows: frozenset[Draw]) -> Hashable:
    """A key of three words: those of a threefry key, and the shard's number. `rows`: the draws that rows lead."""

    def plain(key: Any) -> jax.Array:
        return jax.random.wrap_key_data(key[:2], impl=_IMPL)

    def carrying(base: Any, key: Any) -> Any:
        shard = jnp.broadcast_to(key[2], (*base.shape[:-1], 1))
        return jnp.concatenate([base, shard], axis=-1)

    def seed(value: Any) -> Any:
        return jnp.concatenate([jax.random.key_data(jax.random.key(value, impl=_IMPL)), jnp.zeros(1, jnp.uint32)])

    def fold_in(key: Any, data: Any) -> Any:
        return carrying(jax.random.key_data(jax.random.fold_in(plain(key), data)), key)

    def hashed(key: Any, shape: Shape) -> tuple[Any, Any]:
        size = math.prod(shape)
        places = jnp.arange(size, dtype=jnp.uint32).reshape(shape) + key[2] * jnp.uint32(size)
        return threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(places), places)

    def split(key: Any, shape: Shape) -> Any:
        if (_SPLIT, shape) not in rows:
            return carrying(jax.random.key_data(jax.random.split(plain(key), shape)), key)
        return carrying(jnp.stack(hashed(key, shape), axis=-1), key)

    def random_bits(key: Any, bit_width: int, shape: Shape) -> Any:
        if (_BITS, shape) not in rows:
            return jax.random.bits(plain(key), shape, f"uint{bit_width}")
        high, low = hashed(key, shape)
        if bit_width == 64:
            return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
        return (high ^ low).astype(f"uint{bit_width}")

    return define_prng_impl(
        key_shape=(3,), seed=seed, split=split, random_bits=random_bits, fold_in=fold_in,
        name="shard of threefry2x32", tag=f"shard{sorted(rows)}",
    )  # fmt: skip


def _led_by_rows(part: list[Draw], whole: list[Draw], shards: int) -> frozenset[Draw]:
    """The draws of a shard that rows lead: they are `shards` times as long for the whole batch."""
    advice = "write reduction: fast, or another number of reduction_shards"
    found: dict[Draw, bool] = {}
    for small, large in zip_longest(part, whole):
        if None in (small, large) or small[0] != large[0] or len(small[1]) != len(large[1]):
            raise StepError(
                f"the model draws noise {len(part)} times for a shard's rows and {len(whole)} times for all rows, or "
                f"in another order; {advice}"
            )
        rows = small[1] != large[1]
        if rows and (small[1][0] * shards, *small[1][1:]) != large[1]:
            raise StepError(
                f"noise of shape {large[1]} has no leading axis of rows (a shard's is {small[1]}); {advice}"
            )
        if found.setdefault(small, rows) != rows:
            raise StepError(f"noise of shape {small[1]} is drawn both for rows and for something else; {advice}")
        if rows and math.prod(large[1]) >= 2**32:
            raise StepError(f"noise of shape {large[1]} has 2**32 values or more; {advice}")
    return frozenset(draw for draw, rows in found.items() if rows)


def draws_bits(function: Callable[[Any, Any], Any], batch: Any) -> bool:
    """Whether `function(key, batch)` draws anything, found by tracing."""
    return any(name == _BITS for name, _ in _drawn(function, batch))


def _drawn(function: Callable[[Any, Any], Any], batch: Any) -> list[Draw]:
    """All draws, in order."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=_IMPL))
    return list(_draws(jax.make_jaxpr(function)(key, batch).jaxpr))


def _draws(jaxpr: Any) -> Iterator[Draw]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in (_BITS, _SPLIT):
            yield equation.primitive.name, tuple(equation.params["shape"])
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _draws(inner)
