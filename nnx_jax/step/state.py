"""TrainState: everything one update reads and writes, as named leaves that can be saved and put back exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import StepError

COUNTERS = (
    "batch", "micro", "step", "epoch_step", "skipped", "nonfinite", "consecutive", "reserved", "epoch", "epoch_batch",
)  # fmt: skip
"""Places of `TrainState.counters`: microbatches seen, microbatches in the open window, committed updates, those of
this epoch, skipped windows, those skipped as non-finite, those of them in a row, always 0, the epoch, and microbatches
of this epoch."""
BATCH, MICRO, STEP, EPOCH_STEP, SKIPPED, NONFINITE, CONSECUTIVE, RESERVED, EPOCH, EPOCH_BATCH = range(10)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """One training state.

    Attributes:
        params: trainable arrays by path, e.g. `{"layers.0.kernel": float32 [in, out]}`.
        frozen: arrays the forward pass reads and no update touches, by path.
        model_state: what the forward pass itself updates (BatchNorm statistics); any tree.
        opt_state: the optimizer's state; holds its own update count.
        accum: the open window; empty when a window is one microbatch.
        slots: state of update hooks, by name.
        rng: uint32 [2], the run key; constant.
        counters: int32 [10], see `COUNTERS`.
    """

    params: dict[str, Any]
    frozen: dict[str, Any]
    model_state: Any
    opt_state: Any
    accum: dict[str, Any]
    slots: dict[str, Any]
    rng: Any
    counters: Any


def strong(tree: Any) -> Any:
    """The same tree with every weak type made strong, so that a value never changes the signature of a program."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), tree)


def tick(counters: jax.Array, **by: Any) -> jax.Array:
    """Counters moved by the named amounts (numbers or bools).

    Selects by place fuse into one instruction; stacking the amounts costs XLA's runtime on a CPU one for each.
    """
    places = jnp.arange(len(COUNTERS), dtype=jnp.int32)
    for name, amount in by.items():
        counters = counters + jnp.where(places == COUNTERS.index(name), jnp.asarray(amount, jnp.int32), 0)
    return counters


def leaf_paths(tree: Any) -> list[str]:
    """Names of the leaves in flattening order, e.g. `params/layers.0.kernel`, `opt_state/inner/0/mu/b`."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise StepError(f"two leaves are called {twice!r}; rename one of them, since leaves are stored by name")
    return paths


def describe_leaf(leaf: Any) -> str:
    """`float32[3, 4]`, the way errors print a leaf."""
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def match_named(named: Mapping[str, Any], paths: Sequence[str], like: Sequence[Any]) -> list[Any]:
    """Leaves of `named` in the order of `paths`, all or none.

    Raises:
        StepError: a name is missing or unknown, or a shape or dtype differs; names the first such path, what was
            expected and what was found.
    """
    for path, want in zip(paths, like, strict=True):
        if path not in named:
            raise StepError(f"stored state has no {path!r} ({describe_leaf(want)}), which this configuration needs")
        found = named[path]
        if tuple(found.shape) != tuple(want.shape) or np.dtype(found.dtype) != np.dtype(want.dtype):
            raise StepError(f"{path!r}: expected {describe_leaf(want)}, found {describe_leaf(found)}")
    unknown = sorted(set(named) - set(paths))
    if unknown:
        raise StepError(
            f"stored state has {unknown[0]!r} ({describe_leaf(named[unknown[0]])}), which this configuration lacks"
        )
    return [named[path] for path in paths]


@jax.jit
def own(leaves: list[Any]) -> list[jax.Array]:
    """Fresh copies of arrays, strongly typed: buffers nobody else holds, so that giving them away hurts no owner."""
    return strong([jnp.copy(leaf) for leaf in leaves])
