"""What `reduction: canonical` costs: the same steps beside the fast ones, on one device and on four virtual ones.

Run by `python tools/bench.py --case canonical`; by itself it prints one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

DEVICES, SHARDS, STEPS = (1, 4), 8, 4
NETS: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "mlp": ({"kind": "feed_forward", "hidden_dims": [512, 512], "input_dim": 784, "output_dim": 10}, (256, 784), 10),
    "decoder": (
        {
            "kind": "transformer_lm",
            "d_model": 128,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": 256,
            "context_length": 64,
        },
        (32, 64),
        256,
    ),
}


def time_canonical(rounds: int | None) -> dict[str, Any]:
    """Measure in a process with four devices, and one size of XLA's pool of threads; return its line."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PJRT_NPROC": "4"}
    command = [sys.executable, __file__, str(rounds or 7)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def describe_canonical(line: dict[str, Any]) -> str:
    """One line a net, for a person."""
    told = []
    for name, found in line.items():
        if name == "case":
            continue
        parts = [
            f"{d} device{'s' * (int(d) > 1)} {m['fast_ms']} -> {m['canonical_ms']} ms (x{m['ratio']})"
            for d, m in found.items()
        ]
        told.append(f"canonical {name:8} {'   '.join(parts)}")
    return "\n".join(told)


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds a step by net and devices: medians over rounds that alternate."""
    line: dict[str, Any] = {"case": "canonical"}
    for name in NETS:
        line[name] = {}
        for devices in DEVICES:
            sides = {kind: _side(name, devices, kind) for kind in ("fast", "canonical")}
            seconds: dict[str, list[float]] = {kind: [] for kind in sides}
            for _ in range(rounds):
                for kind, run in sides.items():
                    start = time.perf_counter()
                    run()
                    seconds[kind].append((time.perf_counter() - start) / STEPS)
            fast, canonical = (statistics.median(seconds[kind]) * 1e3 for kind in ("fast", "canonical"))
            found = {
                "fast_ms": round(fast, 2),
                "canonical_ms": round(canonical, 2),
                "ratio": round(canonical / fast, 2),
            }
            line[name][str(devices)] = found
    return line


def _side(name: str, devices: int, kind: str) -> Any:
    """A function that runs STEPS steps and waits for them; compiled."""
    import jax
    import numpy as np
    from flax import nnx

    from nnx_jax import NNModelParams, NNParams
    from nnx_jax.engines.nnx_forward import PureModule
    from nnx_jax.nets import build_net
    from nnx_jax.objectives.losses import build_loss
    from nnx_jax.optim.build import make_optimizer
    from nnx_jax.spmd.mesh import make_sharding
    from nnx_jax.step import build_step
    from nnx_jax.step.shards import Shards

    net, shape, classes = NETS[name]
    pure = PureModule(build_net(NNParams.from_state(net), rngs=nnx.Rngs(0), info={}), mask_rows=True)
    draw = np.random.default_rng(0)
    x = draw.normal(size=shape).astype(np.float32) if name == "mlp" else draw.integers(0, 256, shape).astype(np.int32)
    y = draw.integers(0, classes, shape[:1] if name == "mlp" else shape).astype(np.int32)
    batch = {"x": x, "y": y, "mask": np.ones(shape[0], np.float32)}
    sharding = make_sharding({"data": devices})
    programs = build_step(
        pure.forward, build_loss(NNModelParams().loss),
        make_optimizer("adam", pure.params, rate=1e-3), params=pure.params, model_state=pure.model_state,
        signature={n: (c.shape, c.dtype) for n, c in batch.items()}, sharding=sharding,
        shards=Shards(SHARDS, sharding) if kind == "canonical" else None,
    )  # fmt: skip
    carry = programs.init(pure.params, pure.model_state)
    placed = batch if sharding is None else jax.device_put(batch, sharding.rows)

    def run() -> None:
        for _ in range(STEPS):
            programs.apply(carry, placed)
        programs.read_records(carry)

    run()
    return run


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
