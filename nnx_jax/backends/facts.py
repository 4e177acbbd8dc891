"""Facts of a run for its artifact: versions, devices, seconds, compile time, memory; all of them JSON values."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

_COMPILE = "/jax/core/compile/backend_compile_duration"
_seconds = [0.0]
_listening = [False]


class Stopwatch:
    """Seconds since it was made, and those of them that XLA compiled."""

    def __init__(self) -> None:
        if not _listening[0]:
            jax.monitoring.register_event_duration_secs_listener(_note)
            _listening[0] = True
        self._began, self._compiled = time.perf_counter(), _seconds[0]

    def facts(self, rows: int) -> dict[str, float | None]:
        """`total_seconds`, `compile_seconds`, and `samples_per_second` of the rest; None where nothing was trained."""
        total = time.perf_counter() - self._began
        compiled = min(_seconds[0] - self._compiled, total)
        rate = rows / (total - compiled) if rows and total > compiled else None
        return {"total_seconds": total, "compile_seconds": compiled, "samples_per_second": rate}


def about(backend: str, packages: Sequence[str]) -> dict[str, Any]:
    """The backend's name, versions as `<package>_version`, and the devices there are."""
    found: dict[str, Any] = {"backend": backend, "python_version": platform.python_version()}
    for package in ("nnx_jax", "jax", *packages):
        try:
            found[f"{package.replace('-', '_')}_version"] = version(package)
        except PackageNotFoundError:
            found[f"{package.replace('-', '_')}_version"] = None
    return found | {"devices": [str(device) for device in jax.devices()]}


def peak_memory() -> dict[str, int | None]:
    """Bytes of this process at its largest, and of the first device where it keeps count."""
    kept = jax.local_devices()[0].memory_stats() or {}
    return {
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_bytes": kept.get("peak_bytes_in_use"),
    }


def describe_sharding(sharding: Any) -> dict[str, Any] | None:
    """A ShardingSpec, or a mesh's sizes by axis, as JSON; None for the plain path."""
    if sharding is None:
        return None
    processes = {"num_processes": jax.process_count()}
    if isinstance(sharding, Mapping):
        return {"mesh_shape": dict(sharding), **processes}
    return {
        "mesh_shape": {str(name): int(size) for name, size in sharding.mesh.shape.items()},
        "model_pspec": str(sharding.model_pspec),
        "data_pspec": str(sharding.data_pspec),
        **processes,
    }


def _note(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == _COMPILE:
        _seconds[0] += duration_secs
