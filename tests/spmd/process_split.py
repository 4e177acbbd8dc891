"""What the processes of `test_split_processes.py` do: they train models that are split over their devices."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax import distributed
from nnx_jax.hooks import EMAHook
from nnx_jax.spmd.mesh import make_sharding
from nnx_jax.step import places
from tests.spmd.test_fsdp import MESHES, Pair, pair
from tests.spmd.toy import arrays, history

RUNS = {name: MESHES[name] for name in ("fsdp", "data and fsdp", "data and tensor")} | {"data": {"data": 4}}


def digests(named: Any) -> dict[str, str]:
    """Of every array by name."""
    return {name: sha256(np.asarray(value).tobytes()).hexdigest()[:12] for name, value in named.items()}


def trained(folder: Path, mesh: dict[str, int] | None, ddp: Any = None, **more: Any) -> dict[str, Any]:
    """One run, as JSON: what it stored, what it recorded, and what the model and its averages are afterwards."""
    module, hook = Pair(), EMAHook(decay=0.5)
    run = pair(folder, mesh, module=module, distributed=ddp, hooks=[hook], **more)
    averaged: Any = hook.get_averaged_model().module
    home = {"up": module.up[...], "down": module.down[...], "average": averaged.up[...]}
    return {
        "stored": digests(arrays(run)),
        "home": digests(home),
        "devices": [sorted(device.id for device in value.devices()) for value in home.values()],
        "records": [{name: row.get(name) for name in ("step", "train_loss", "val_loss")} for row in history(run)],
    }


def everything(folder: str) -> dict[str, Any]:
    """Every case, in each process."""
    found: dict[str, Any] = {"local": [device.id for device in jax.local_devices()[:1]]}
    for name, mesh in RUNS.items():
        found[name] = trained(Path(folder) / name.replace(" ", "-"), mesh, distributed.DDP())
    found["places"] = moved()
    return found


def moved() -> dict[str, Any]:
    """Host values, this process's arrays and shared ones, to places over all devices and back."""
    spec = make_sharding({"fsdp": -1})
    assert spec is not None
    place = spec.params({"w": (8, 3)})["w"]
    host = np.arange(24, dtype=np.float32).reshape(8, 3)
    shared = [places.put(value, place) for value in (host, jnp.asarray(host))]
    again = places.put(places.put(shared[0], spec.whole), place)
    return {
        "parts": [shard.data.shape[0] for shard in shared[0].addressable_shards],
        "rows": [int(shard.data[0, 0]) for shard in shared[1].addressable_shards],
        "kept": places.put(shared[0], place) is shared[0],
        "back": [bool(np.array_equal(places.on_host(value), host)) for value in (*shared, again)],
        "scalar": int(places.on_host(places.put(7, spec.whole))),
    }
