"""Loops that make single calls and spans compile to the same arithmetic.

XLA contracts a multiply and an add of one fused kernel into one rounding, and which operations it fuses depends on what
else stands in the same computation (`optimization_barrier` does not stop the CPU compiler's fusion). A loop body is a
computation of its own. So every microbatch is the body of a loop that runs once, in every program, and its batch enters
as a value carried by that loop. The programs then differ only outside of it, in how they fetch the batch, and there is
no arithmetic there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Fetch = Callable[[Any], Any]
"""Row number (int32) -> batch."""
Body = Callable[[Any, Any], Any]
"""(carry, batch) -> carry."""


def run_rows(body: Body, fetch: Fetch, row: Any, carry: Any, count: Any, one: Any) -> tuple[Any, Any]:
    """`carry = body(carry, fetch(row))` for `count` rows from `row` on; returns (the row after, carry).

    `one` is a trip count of 1 from `once`.
    """

    def step(_: Any, state: Any) -> Any:
        row, carry = state
        return row + 1, _alone(body, carry, fetch(row), one)

    return jax.lax.fori_loop(jnp.zeros_like(count), count, step, (row, carry))


def once(zero: Any) -> Any:
    """A trip count of 1 as XLA must not know it, else it would dissolve the loop; `zero` is an array that is always 0.

    Elsewhere than on a CPU a loop of unknown length makes the host wait for the device, so there it is known.
    """
    return zero + 1 if jax.default_backend() == "cpu" else jnp.int32(1)


def _alone(body: Body, carry: Any, batch: Any, one: Any) -> Any:
    def single(_: Any, state: Any) -> Any:
        carry, batch = state
        # Behind a barrier the batch may have changed, so XLA moves nothing that depends on it alone out of the loop.
        return body(carry, batch), jax.lax.optimization_barrier(batch)

    return jax.lax.fori_loop(jnp.zeros_like(one), one, single, (carry, batch))[0]
