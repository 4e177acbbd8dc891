"""What one process could not read halts the step on every process, at the same update, whatever the step is made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from nnx_jax.step import records


class HaltingBody:
    """A step body that does nothing with a microbatch of which a process marked its rows as lost (`batches.LOST`).

    The mark is in the mask, which every step has, and every device learns of it in the same microbatch; so all
    processes halt together, under every policy and in steps of the user's own.

    Attributes:
        inner: the body without that, for rows that are gathered from the device and cannot be lost.
    """

    def __init__(self, body: Any, sharding: Any) -> None:
        self.inner, self._sharding = body, sharding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def micro(self, carry: Any, batch: Any) -> Any:
        """As the body's."""
        return self.inner.micro(self._halted(carry, batch), batch)

    def last(self, carry: Any, batch: Any) -> Any:
        """As the body's."""
        return self.inner.last(self._halted(carry, batch), batch)

    def apply(self, carry: Any, batch: Any) -> Any:
        """As the body's."""
        return self.inner.apply(self._halted(carry, batch), batch)

    def _halted(self, carry: Any, batch: Any) -> Any:
        """The carry, halted where rows are lost and nothing has halted it before."""
        train, rows, status = carry
        lost = lost_rows(batch["mask"], self._sharding) > 0
        halt = jnp.where((status[1] == 0) & lost, records.HALT_LOST, status[1])
        return train, rows, jnp.stack([status[0], halt])


def halting(body: Any, sharding: Any) -> Any:
    """The body for a sharding; itself where its devices are all of this process, which raises what it cannot read."""
    return HaltingBody(body, sharding) if spans_processes(sharding) else body


def spans_processes(sharding: Any) -> bool:
    """Whether devices of several processes take part."""
    return sharding is not None and not sharding.whole.is_fully_addressable


def lost_rows(mask: jax.Array, sharding: Any) -> jax.Array:
    """How many devices hold a row that is marked as lost, int32 scalar.

    Every device looks at the rows that it was handed itself. Two processes may hold the same rows, of which only one
    could read them: to the compiler their copies are one array, and a plain sum over it would not see both.
    """
    mesh, cut = sharding.mesh, mask.shape[0] % sharding.parts == 0

    def local(mask: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.any(mask < 0).astype(jnp.int32), mesh.axis_names)

    rows = sharding.data_pspec if cut else PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)(mask)
