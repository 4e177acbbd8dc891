"""The loops that `tools/bench.py` compares with: the same steps written by hand under `jax.jit`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

RATE = 1e-3
CLIP, DECAY, FACTOR, MEMORY, WARMUP = 1.0, 0.999, 5.0, 0.99, 100
"""Of the case with hooks: clipping norm, averages; how large a spike is, its running mean, and from where on."""


class Bare:
    """The loop written by hand: `step(params, opt_state, x, y)`, jitted and donated, over a dict of arrays."""

    def __init__(self, net: Any, data: dict[str, Any], order: Callable[[int], Any]) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        graph, state = nnx.split(net)
        leaves, shape = jax.tree.flatten(state)
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        optimizer = optax.adam(RATE)

        def loss_of(params: dict[str, Any], x: Any, y: Any) -> Any:
            model = nnx.merge(graph, shape.unflatten([params[name] for name in names]))
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        def update(params: dict[str, Any], opt_state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
            loss, grads = jax.value_and_grad(loss_of)(params, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        @functools.partial(jax.jit, donate_argnums=0)
        def epoch(carry: Any, x: Any, y: Any, table: Any) -> Any:
            def body(i: Any, carry: Any) -> Any:
                return update(carry[0], carry[1], x[table[i]], y[table[i]])

            return jax.lax.fori_loop(0, len(table), body, (*carry, jnp.float32(0)))

        self._step, self._data, self._order = jax.jit(update, donate_argnums=(0, 1)), data, order
        self._epoch, self._placed = epoch, {name: jnp.asarray(data[name]) for name in ("x", "y")}
        self._params = {name: jnp.array(leaf) for name, leaf in zip(names, leaves, strict=True)}
        self._opt_state = optimizer.init(self._params)

    def epoch(self, number: int) -> tuple[float, float, float]:
        """Run one epoch; return its seconds, and the losses of its first and its last batch."""
        x, y = self._data["x"], self._data["y"]
        table = self._order(number)
        params, opt_state = self._params, self._opt_state
        first: Any = None
        loss: Any = None
        start = time.perf_counter()
        for rows in table:
            params, opt_state, loss = self._step(params, opt_state, x[rows], y[rows])
            first = loss if first is None else first
        last = float(loss)
        seconds = time.perf_counter() - start
        self._params, self._opt_state = params, opt_state
        return seconds, float(first), last

    def compiled_epoch(self, number: int) -> float:
        """Seconds of one epoch as a single compiled loop over data on the device: the least such steps can cost."""
        import jax
        import jax.numpy as jnp

        table = jnp.asarray(self._order(number))
        carry = jax.tree.map(jnp.copy, (self._params, self._opt_state))
        start = time.perf_counter()
        jax.block_until_ready(self._epoch(carry, self._placed["x"], self._placed["y"], table))
        return time.perf_counter() - start


class BareHooks:
    """What the hooks of the case `hooks` do, written by hand: `accumulate` for a window's first batches, `update`."""

    def __init__(self, net: Any, data: dict[str, Any], order: Callable[[int], Any], window: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        graph, state = nnx.split(net)
        leaves, shape = jax.tree.flatten(state)
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        optimizer = optax.adam(RATE)

        def loss_of(params: dict[str, Any], x: Any, y: Any) -> Any:
            low = shape.unflatten([params[name].astype(jnp.bfloat16) for name in names])
            logits = nnx.merge(graph, low)(x.astype(jnp.bfloat16)).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()

        def added(sums: dict[str, Any], params: dict[str, Any], x: Any, y: Any) -> dict[str, Any]:
            loss, grads = jax.value_and_grad(loss_of)(params, x, y)
            grads = jax.tree.map(jnp.add, sums["grads"], grads)
            return {"grads": grads, "loss": sums["loss"] + loss, "n": sums["n"] + len(y)}

        def stepped(train: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
            updates, opt_state = optimizer.update(grads, train["opt_state"], train["params"])
            params = optax.apply_updates(train["params"], updates)
            first = train["averages"] == 0
            mean = lambda e, p: jnp.where(first, p, DECAY * e + (1 - DECAY) * p)  # noqa: E731
            average = jax.tree.map(mean, train["average"], params)
            return {"params": params, "opt_state": opt_state, "average": average, "averages": train["averages"] + 1}

        def update(train: dict[str, Any], sums: dict[str, Any], spike: dict[str, Any], x: Any, y: Any) -> Any:
            sums = added(sums, train["params"], x, y)
            grads = jax.tree.map(lambda g: g / sums["n"], sums["grads"])
            norm = optax.global_norm(grads)
            fine = ((spike["n"] < WARMUP) | (norm <= FACTOR * spike["mean"])) & jnp.isfinite(norm)
            clipped = jax.tree.map(lambda g: g * jnp.where(norm > CLIP, CLIP / norm, 1.0), grads)
            if jax.default_backend() == "cpu":
                train = jax.lax.cond(fine, stepped, lambda old, _: old, train, clipped)
            else:
                train = jax.tree.map(lambda new, old: jnp.where(fine, new, old), stepped(train, clipped), train)
            mean = jnp.where(spike["n"] == 0, norm, MEMORY * spike["mean"] + (1 - MEMORY) * norm)
            spike = {"mean": jnp.where(fine, mean, spike["mean"]), "n": spike["n"] + fine}
            return train, jax.tree.map(jnp.zeros_like, sums), spike, sums["loss"] / sums["n"]

        self._accumulate = jax.jit(added, donate_argnums=0)
        self._update = jax.jit(update, donate_argnums=(0, 1, 2))
        self._data, self._order, self._window = data, order, window
        params = {name: jnp.array(leaf) for name, leaf in zip(names, leaves, strict=True)}
        zeros = jax.tree.map(jnp.zeros_like, params)
        self._train = {
            "params": params,
            "opt_state": optimizer.init(params),
            "average": jax.tree.map(jnp.copy, params),
            "averages": jnp.int32(0),
        }
        self._sums = {"grads": zeros, "loss": jnp.float32(0), "n": jnp.int32(0)}
        self._spike = {"mean": jnp.float32(0), "n": jnp.int32(0)}

    def epoch(self, number: int) -> tuple[float, float, float]:
        """Run one epoch; return its seconds, and the losses of its first and its last update."""
        x, y = self._data["x"], self._data["y"]
        table = self._order(number)
        train, sums, spike = self._train, self._sums, self._spike
        first: Any = None
        loss: Any = None
        start = time.perf_counter()
        for place, rows in enumerate(table):
            if (place + 1) % self._window:
                sums = self._accumulate(sums, train["params"], x[rows], y[rows])
                continue
            train, sums, spike, loss = self._update(train, sums, spike, x[rows], y[rows])
            first = loss if first is None else first
        last = float(loss)
        seconds = time.perf_counter() - start
        self._train, self._sums, self._spike = train, sums, spike
        return seconds, float(first), last

    def compiled_epoch(self, number: int) -> float:
        """Not measured for this case."""
        return math.nan
