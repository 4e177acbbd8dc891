"""One update of a small net on any layout of devices, cut into any window, its rows masked in any way.

On dyadic rows every product and sum of an update is exact in float32, in whatever order, so that nothing may differ by
a bit. Why: x are quarters of at most 1, weights halves of at most 1, y halves of at most 2. So the hidden layer (width
4, 3 inputs) is eighths of at most 4, outputs are 16ths of at most 17, errors 16ths of at most 19, what goes back 32nds
of at most 19. Of an update's 48 rows, gradients add up 128ths of at most 76 (3648 in all), the loss 512ths of at most
181 (8664 in all). In units of their last digits all sums stay below 4.5 million, and 2**24 = 16.8 million is where
float32 begins to round. What is divided is divided once, by the same two numbers everywhere.

In float64 the same holds of finer numbers, which float32 could not add exactly: x and y are 512ths, weights 32nds of at
most 1. What goes back is multiples of 2**-24, gradients of 2**-33, the loss of 2**-39: in these units gradients stay
below 2**45, the loss below 2**52.1, and 2**53 is where float64 begins to round.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.spmd.mesh import make_sharding
from nnx_jax.step import build_step, stack_batches
from nnx_jax.step.places import on_host

ROWS, WIDTH, RATE = 48, 3, 0.5
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
SPLIT = {"0.kernel": (None, "tensor"), "0.bias": ("tensor",), "1.kernel": ("tensor",)}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "two": ({"data": 2}, {}),
    "four": ({"data": 4}, {}),
    "fsdp": ({"fsdp": 4}, {}),
    "both": ({"data": 2, "fsdp": 2}, {}),
    "tensor": ({"data": 2, "tensor": 2}, SPLIT),
    "all": ({"data": -1}, {}),
    "all fsdp": ({"fsdp": -1}, {}),
}
STYLES = ("full", "padded", "dropped", "masked", "shard", "microbatch", "nothing")
"""Every row valid; the last ones fill up; the last microbatches are not there; any row masked; all rows of one of four
devices; a whole microbatch; all of them."""


def squares(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Half squared error, mean over valid rows."""
    half = jnp.where(batch["mask"] > 0, 0.5 * (outputs[:, 0] - batch["y"]) ** 2, 0.0)
    return (LossTerm("half", jnp.sum(half), jnp.sum(batch["mask"])),)


def summed(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """The same sum, not divided."""
    return (LossTerm("half", squares(outputs, batch)[0].numerator, None, "sum"),)


def forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    hidden = jax.nn.relu(batch["x"] @ params["0.kernel"] + params["0.bias"])
    return hidden @ params["1.kernel"] + params["1.bias"], model_state


def weights(dtype: Any = F32) -> dict[str, np.ndarray]:
    draw, fine = np.random.default_rng(1), 2 if dtype == F32 else 32
    sizes = {"0.kernel": (WIDTH, 4), "0.bias": (4,), "1.kernel": (4, 1), "1.bias": (1,)}
    return {name: (draw.integers(-fine, fine + 1, size) / fine).astype(dtype) for name, size in sizes.items()}


def drawn(
    seed: int, style: str, window: int, *, dyadic: bool = True, dtype: Any = F32
) -> tuple[dict[str, np.ndarray], int]:
    """The rows of an update and how many microbatches of it there are; masked rows hold what would be seen."""
    draw, size = np.random.default_rng(seed), ROWS // window
    if dyadic and dtype == F64:
        x, y = draw.integers(-512, 513, (ROWS, WIDTH)) / 512, draw.integers(-1024, 1025, ROWS) / 512
    elif dyadic:
        x, y = draw.integers(-4, 5, (ROWS, WIDTH)) / 4, draw.integers(-4, 5, ROWS) / 2
    else:
        x, y = draw.normal(size=(ROWS, WIDTH)), draw.normal(size=ROWS)
    mask, count = np.ones(ROWS), window
    if style == "padded":
        mask[ROWS - draw.integers(1, size) :] = 0
    elif style == "dropped":
        count = int(draw.integers(1, window + 1))
        mask[count * size :] = 0
    elif style == "masked":
        mask = (draw.random(ROWS) < 0.6).astype(float)
    elif style == "shard":
        at = draw.integers(window) * size + draw.integers(4) * (size // 4)
        mask[at : at + size // 4] = 0
    elif style == "microbatch":
        at = draw.integers(window) * size
        mask[at : at + size] = 0
    elif style == "nothing":
        mask[:] = 0
    x[mask == 0] = (1e30, 7.0)[seed % 2]
    return {"x": x.astype(dtype), "y": y.astype(dtype), "mask": mask.astype(np.float32)}, count


@lru_cache(maxsize=128)
def step(layout: str, window: int, terms: Any = squares, dtype: Any = F32) -> tuple[Any, Any]:
    """(programs, sharding) of a layout; compiled once in a process."""
    sizes, rules = LAYOUTS[layout]
    sharding = make_sharding(sizes, rules=rules) if sizes else None
    size = ROWS // window
    like = {"x": ((size, WIDTH), dtype), "y": ((size,), dtype), "mask": ((size,), np.float32)}
    optimizer = make_optimizer("sgd", weights(dtype), rate=RATE, momentum=0.5)
    made = build_step(
        forward, terms, optimizer, params=weights(dtype), model_state={}, signature=like, accumulate=window,
        sharding=sharding,
    )  # fmt: skip
    return made, sharding


def update(
    layout: str, window: int, rows: dict[str, np.ndarray], count: int, *, span: bool, terms: Any = squares,
    start: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """What one update leaves: parameters, momentum, counters that do not count microbatches, and its record."""
    dtype = rows["x"].dtype
    made, sharding = step(layout, window, terms, dtype)
    carry, size = made.init(start or weights(dtype), {}), ROWS // window
    batches = [{n: c[at : at + size] for n, c in rows.items()} for at in range(0, count * size, size)]
    if span:
        block = stack_batches(batches, window)
        made.span_stacked(carry, place(block, sharding and sharding.stacked), count)
    else:
        for number, batch in enumerate(batches):
            made.step(carry, place(batch, sharding and sharding.rows), closes=number == count - 1)
    records, state = made.read_records(carry), made.state(carry)
    found = {f"params/{name}": on_host(value) for name, value in state.params.items()}
    for number, leaf in enumerate(jax.tree.leaves(state.opt_state)):
        found[f"opt_state/{number}"] = on_host(leaf)
    counters = on_host(state.counters)
    found |= {"step": counters[2], "skipped": counters[4], "nonfinite": counters[5]}
    found |= {"num": records.window_num["half"][-1], "den": records.window_den["half"][-1]}
    found |= {"loss": records.window_loss[-1], "norm": records.grad_norm[-1]}
    return {name: np.asarray(value) for name, value in found.items()}


def place(batch: dict[str, np.ndarray], where: Any) -> dict[str, Any]:
    if where is None:
        return batch
    return {n: jax.make_array_from_callback(c.shape, where, lambda at, c=c: c[at]) for n, c in batch.items()}


def by_hand(
    rows: dict[str, np.ndarray], start: dict[str, np.ndarray] | None = None, *, divided: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The update in float64 on the union of the valid rows: (new parameters, rounded once; a bound of what is left).

    The bound is what the rows' type may add to it in any order: every rounding on the way to a sum is at most 2**-24
    (float64: 2**-53) of a value that is no larger than if all signs were positive, and no way is longer than its rows
    and forty more. In float64 what is computed here is as far from the exact value itself, so the bound is twice that.
    """
    dtype = rows["x"].dtype
    first = start or weights(dtype)
    valid, p = rows["mask"] > 0, {name: value.astype(np.float64) for name, value in first.items()}
    x, y = rows["x"][valid].astype(np.float64), rows["y"][valid].astype(np.float64)
    if not len(x):
        return first, {name: np.zeros_like(value) for name, value in first.items()}
    pre = x @ p["0.kernel"] + p["0.bias"]
    error = (np.maximum(pre, 0) @ p["1.kernel"] + p["1.bias"])[:, 0] - y
    sums = _sums(x, pre > 0, np.maximum(pre, 0), error, p["1.kernel"])
    a = {name: np.abs(value) for name, value in p.items()}
    high = np.abs(x) @ a["0.kernel"] + a["0.bias"]
    most = _sums(np.abs(x), pre > 0, high, (high @ a["1.kernel"] + a["1.bias"])[:, 0] + np.abs(y), a["1.kernel"])
    factor = np.float64(dtype.type(1) / dtype.type(len(x))) if divided else 1.0
    grads = {name: (value * factor).astype(dtype) for name, value in sums.items()}
    new = {name: first[name] - dtype.type(RATE) * grads[name] for name in first}
    eps, way = 2.0**-24 if dtype == F32 else 2 * 2.0**-53, len(x) + 40
    bound = {name: eps * (RATE * factor * way * most[name] + 2 * a[name] + 1e-30) for name in first}
    return new, bound


def _sums(x: Any, on: Any, hidden: Any, error: Any, kernel: Any) -> dict[str, Any]:
    back = error[:, None] * kernel.T * on
    return {
        "0.kernel": x.T @ back, "0.bias": back.sum(0), "1.kernel": hidden.T @ error[:, None],
        "1.bias": error.sum(keepdims=True),
    }  # fmt: skip


def cases(seed: int, number: int, layouts: list[str]) -> list[dict[str, Any]]:
    """Drawn cases, the same in every process."""
    draw = np.random.default_rng(seed)
    return [
        {
            "layout": layouts[int(draw.integers(len(layouts)))], "window": int(draw.choice([1, 4])),
            "style": STYLES[index % len(STYLES)], "span": bool(draw.integers(2)), "seed": int(draw.integers(10**6)),
        }
        for index in range(number)
    ]  # fmt: skip


def digest(case: dict[str, Any], *, plain: bool = False, dtype: Any = F32) -> str:
    """SHA-256 of what a case leaves; `plain`: of one device, one batch on the union."""
    rows, count = drawn(case["seed"], case["style"], case["window"], dtype=np.dtype(dtype))
    if plain:
        found = update("one", 1, rows, 1, span=False)
    else:
        found = update(case["layout"], case["window"], rows, count, span=case["span"])
    found.pop("norm")  # of numbers that are divided, so its sum is rounded
    return hashlib.sha256(b"".join(value.tobytes() for _, value in sorted(found.items()))).hexdigest()


def digests(seed: int, number: int, layouts: list[str], dtype: str = "float32") -> list[str]:
    """In a process of a group: the digests of drawn cases on its devices."""
    return [digest(case, dtype=dtype) for case in cases(seed, number, layouts)]


def ratios(seed: int, number: int, layouts: list[str]) -> list[float]:
    """How far drawn cases are from float64, in bounds of `by_hand`, with gaussian rows."""
    found = []
    for case in cases(seed, number, layouts):
        rows, count = drawn(case["seed"], case["style"], case["window"], dyadic=False)
        told, (wanted, bound) = update(case["layout"], case["window"], rows, count, span=case["span"]), by_hand(rows)
        apart = [np.abs(told[f"params/{name}"].astype(np.float64) - wanted[name]) / bound[name] for name in wanted]
        found.append(max(float(each.max()) for each in apart) if case["style"] != "nothing" else 0.0)
    return found
