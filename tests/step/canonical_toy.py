"""A small attention net with dropout under Adam, and the digest of what training it in shards gives, on any devices."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from nnx_jax.engines.placement import filled_up
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.spmd.mesh import ShardingSpec, make_sharding
from nnx_jax.step import StepPrograms, build_step, stack_batches
from nnx_jax.step.places import on_host
from nnx_jax.step.shards import Shards

ROWS, LENGTH, WIDTH, CLASSES = 32, 6, 8, 3


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = {"e": (11, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "h": (WIDTH, CLASSES)}
    return {name: (draw.normal(size=shape) / 3).astype(np.float32) for name, shape in shapes.items()}


def attend(rate: float) -> Any:
    """Forward pass of one attention layer with this dropout rate."""

    def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        x = params["e"][batch["x"]]
        x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        scores = jnp.einsum("btd,bsd->bts", x @ params["q"], x @ params["k"]) / WIDTH**0.5
        mixed = jax.nn.gelu(x + jax.nn.softmax(scores) @ (x @ params["v"]))
        if rate:
            mixed = jnp.where(jax.random.bernoulli(key, 1 - rate, mixed.shape), mixed / (1 - rate), 0.0)
        return mixed.mean(1) @ params["h"], model_state

    return forward


def terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])
    return (LossTerm("cross_entropy", jnp.sum(loss * batch["mask"]), jnp.sum(batch["mask"])),)


def rows() -> dict[str, np.ndarray]:
    """The rows of an update, four in five of them valid."""
    draw = np.random.default_rng(1)
    return {
        "x": draw.integers(0, 11, (ROWS, LENGTH)).astype(np.int32),
        "y": draw.integers(0, CLASSES, ROWS).astype(np.int32),
        "mask": (draw.random(ROWS) < 0.8).astype(np.float32),
    }


def sharding(devices: Any) -> ShardingSpec | None:
    """Of the first devices there are, of all processes; None for one. Or of a mesh, (sizes, rules)."""
    if isinstance(devices, tuple):
        return make_sharding(devices[0], rules=devices[1])
    if jax.process_count() == 1 and devices == 1:
        return None
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    return ShardingSpec(mesh)


def programs(devices: Any, shards: int | None, *, window: int = 1, rate: float = 0.0, **options: Any) -> StepPrograms:
    """The step whose update has `shards` shards in all; None for the fast reduction."""
    where = sharding(devices)
    size, whole = ROWS // window, options.pop("whole", "")
    full = size if where is None else where.padded(size)
    like = {n: ((full, *column.shape[1:]), column.dtype) for n, column in rows().items()}
    options.setdefault("optimizer", make_optimizer("adam", weights(), rate=0.05, weight_decay=0.01))
    return build_step(
        options.pop("forward", attend(rate)), options.pop("terms", terms), options.pop("optimizer"), params=weights(),
        model_state={}, signature=like, accumulate=window, sharding=where,
        shards=None if shards is None else Shards(shards // window, where, rows=size, whole=whole), **options,
    )  # fmt: skip


def batches(window: int) -> list[dict[str, np.ndarray]]:
    size = ROWS // window
    return [{n: column[at : at + size] for n, column in rows().items()} for at in range(0, ROWS, size)]


def placed(batch: dict[str, np.ndarray], where: ShardingSpec | None, *, stacked: bool = False) -> dict[str, Any]:
    if where is None:
        return batch
    batch = filled_up(batch, where.padded(len(batch["y"])) - len(batch["y"])) if not stacked else batch
    place = where.stacked if stacked else where.rows
    return {n: jax.make_array_from_callback(c.shape, place, lambda at, c=c: c[at]) for n, c in batch.items()}


def train(
    devices: Any, shards: int | None, *, window: int = 1, span: bool = False, updates: int = 3, **more: Any
) -> Any:
    """(programs, carry) after some updates of the same rows."""
    step, where = programs(devices, shards, window=window, **more), sharding(devices)
    carry = step.init(weights(), {})
    if span:
        full = ROWS // window if where is None else where.padded(ROWS // window)
        each = [filled_up(batch, full - ROWS // window) for batch in batches(window)]
        block = placed(stack_batches(each * updates, window * updates), where, stacked=True)
        step.span_stacked(carry, block, window * updates)
        return step, carry
    for _ in range(updates):
        for batch in batches(window):
            step.step(carry, placed(batch, where))
    return step, carry


def digest(devices: Any, shards: int | None = 8, **more: Any) -> str:
    """SHA-256 of parameters, optimizer state and every update's loss, norm and sums."""
    step, carry = train(devices, shards, **more)
    found, records = step.state(carry), step.read_records(carry)
    closed = records.closed
    values = [*jax.tree.leaves((found.params, found.opt_state)), records.window_loss[closed], records.grad_norm[closed]]
    return hashlib.sha256(b"".join(on_host(value).tobytes() for value in values)).hexdigest()


def digests(settings: list[dict[str, Any]]) -> list[str]:
    """In a process of a group: the digest of each setting on all devices there are, as `axis` if one is named."""
    count = len(jax.devices())
    given = [({axis: count}, None) if (axis := setting.pop("axis", "")) else count for setting in settings]
    return [digest(where, **setting) for where, setting in zip(given, settings, strict=True)]
