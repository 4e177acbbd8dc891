"""One process of tools/scaling.py: compiles updates of the trainer, says what they cost, and times them when told to.

It reads a JSON line for each burst of updates from standard input and answers with a line that begins with '@ '. The
updates are the trainer's own compiled programs, on batches that lie on the devices; nothing is read, logged or saved.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

IN_FLIGHT = 4
"""Calls that wait on the device at most, as in training."""


def main(given: str) -> None:
    """Build what `given`, JSON, asks for; then measure until standard input ends."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from nnx_jax import distributed
    from nnx_jax.core.codec import dump_json, parse_json

    asked = parse_json(given)
    if asked["processes"] > 1:
        distributed.init_process_group(timeout_seconds=600)
    built: dict[str, Callable[[int], float]] = {}
    for entry in asked["entries"]:
        cost, built[entry["name"]] = _build(entry)
        _say(dump_json({"name": entry["name"], "cost": cost}))
    for line in sys.stdin:
        order = parse_json(line)
        _say(dump_json({"seconds": built[order["name"]](order["count"])}))
    distributed.shutdown()


def _say(text: str) -> None:
    print("@ " + text.replace("\n", " "), flush=True)


def _build(entry: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], float]]:
    """The cost of one update, and how to run many."""
    import jax

    from nnx_jax import load_config
    from nnx_jax.distributed import current_world
    from nnx_jax.fit.job import prepare
    from nnx_jax.model import NNModel
    from nnx_jax.spmd import report
    from nnx_jax.spmd.world import ALONE

    apart, devices = entry["apart"], entry["devices"]
    mesh = {} if apart or devices == 1 else {entry["axis"]: devices}
    rows = entry["rows"] // devices if apart else entry["rows"]
    spec = load_config(entry["config"], [f"data.batch_size={rows}", f"mesh={mesh}".replace("'", '"')])
    engine = prepare(
        NNModel(params=spec.model), spec, world=current_world() if entry["processes"] > 1 and mesh else ALONE
    ).engine
    lowered = engine.programs.lower("apply", engine.place.signature(engine.feed.signature()))
    if not entry["runs"]:
        return _cost(lowered.compile(), report), lambda count: 0.0
    carry = engine.start()
    batch = next(iter(engine.place.open(engine.feed, 0, 0)))
    if apart and devices > 1 and jax.process_count() == 1:
        program, leaves, batch = _side_by_side(engine.programs, carry, batch, devices)
    else:
        program, leaves = lowered.compile(), carry.leaves
        batch = engine.place.batch(batch, engine.place.rows(engine.feed, 0))
    return _cost(program, report), _runner(program, leaves, batch)


def _cost(program: Any, report: Any) -> dict[str, Any]:
    analysis = program.cost_analysis() or {}
    found = {kind: dataclasses.asdict(each) for kind, each in report.exchanges(program.as_text()).items()}
    return {"flops": analysis.get("flops", 0.0), "memory": analysis.get("bytes accessed", 0.0), "exchanges": found}


def _side_by_side(programs: Any, carry: Any, batch: Any, devices: int) -> tuple[Any, list[Any], Any]:
    """The update of one device on each of several, in one program, each with a state and rows of its own."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from nnx_jax.spmd.mesh import make_sharding
    from nnx_jax.step.programs import Carry

    sharding = make_sharding({"data": devices})
    assert sharding is not None
    each = PartitionSpec("data")

    def update(leaves: list[Any], batch: Any) -> tuple[list[Any], Any]:
        own = Carry([leaf[0] for leaf in leaves], 0, 0)
        programs.apply(own, {name: column[0] for name, column in batch.items()})
        return [leaf[None] for leaf in own.leaves], own.in_flight[-1][None]

    spread = jax.shard_map(update, mesh=sharding.mesh, in_specs=each, out_specs=each, check_vma=False)
    copies = lambda tree: jax.device_put(  # noqa: E731
        jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * devices), tree), sharding.rows
    )
    leaves, batch = copies(carry.leaves), copies(dict(batch))
    with warnings.catch_warnings():  # the step is traced once more, on purpose
        warnings.simplefilter("ignore")
        return jax.jit(spread, donate_argnums=0).lower(leaves, batch).compile(), leaves, batch


def _runner(program: Any, leaves: list[Any], batch: Any) -> Callable[[int], float]:
    """Seconds of so many updates, until the last one is done."""
    state = {"leaves": leaves}

    def run(count: int) -> float:
        import jax

        tokens: deque[Any] = deque()
        begun = time.perf_counter()
        for _ in range(count):
            if len(tokens) == IN_FLIGHT:
                tokens.popleft().block_until_ready()
            state["leaves"], token = program(state["leaves"], batch)
            tokens.append(token)
        jax.block_until_ready(state["leaves"])
        return time.perf_counter() - begun

    return run


if __name__ == "__main__":
    main(sys.argv[1])
