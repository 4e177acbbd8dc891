"""Run by test_processes.py, once in each of several processes: trains on this process's rows, prints what came out.

Arguments: process number, number of processes, port of the coordinator.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_jax.data.partition import deal, epoch_order
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, SpikeSkipHook
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.step import build_step
from nnx_jax.step.plan import HookPlan

ROWS, BATCH, EPOCHS = 24, 4, 2


def forward(params, model_state, batch, key, train):
    return batch["x"] @ params["w"], model_state


def terms(outputs, batch):
    error = jnp.square(outputs - batch["t"]) * batch["mask"]
    return (LossTerm("mse", jnp.sum(error), jnp.sum(batch["mask"])),)


def main(process: int, world: int, port: str) -> None:
    """Train two epochs; a global batch is BATCH rows, of which this process brings its own."""
    if world > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", world, process)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 3)).astype(np.float32)
    t = (x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.standard_normal(ROWS)).astype(np.float32)
    mask = (rng.random(ROWS) < 0.8).astype(np.float32)
    hooks = (GradientAccumulationHook(2), GradientClipHook(1.0), SpikeSkipHook(), EMAHook(decay=0.9))
    params = {"w": jnp.zeros(3)}
    signature = {"x": ((BATCH, 3), jnp.float32), "t": ((BATCH,), jnp.float32), "mask": ((BATCH,), jnp.float32)}
    step = build_step(
        forward, terms, make_optimizer("adam", params, rate=0.05), params=params, model_state={}, signature=signature,
        accumulate=2, hooks=HookPlan(update=hooks),
    )  # fmt: skip
    carry = step.init(params, {})
    mesh = jax.make_mesh((world,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    carry.leaves = [jax.device_put(np.asarray(leaf), whole) for leaf in carry.leaves]
    seen = []
    for epoch in range(EPOCHS):
        mine = deal(epoch_order(ROWS, 0, epoch), process, world, "pad")
        seen.append(mine.tolist())
        for start in range(0, len(mine), BATCH // world):
            rows = mine[start : start + BATCH // world]
            local = {"x": x[rows], "t": t[rows], "mask": mask[rows]}
            batch = {name: jax.make_array_from_process_local_data(spread, value) for name, value in local.items()}
            step.step(carry, batch)
    found = {path: np.asarray(leaf).tolist() for path, leaf in step.named(carry).items() if "accum" not in path}
    print(json.dumps({"state": found, "rows": seen, "compiles": step.watch.compiles}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
