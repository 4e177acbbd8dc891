"""What one update costs, read from the compiled programs; nothing is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.spmd import report


def costs_of(engine: Any) -> dict[str, Any]:
    """Return counts, FLOPs and bytes of one update on each device; on several devices, under "mesh", what lies where.

    Raises:
        ConfigError: an executor that compiles no update.
    """
    if engine.in_place:
        dispatch = engine.spec.training.dispatch
        raise ConfigError(f"'{dispatch}' compiles no update whose cost could be told", path="train.dispatch")
    batch = engine.place.signature(engine.feed.signature())
    compiled = {"apply": engine.programs.lower("apply", batch).compile()}
    if engine.accumulate > 1:
        compiled["micro"] = engine.programs.lower("micro", batch).compile()
    flops = {name: int((program.cost_analysis() or {}).get("flops", 0)) for name, program in compiled.items()}
    memory = compiled["apply"].memory_analysis()
    pure = engine.pure
    sizes = {name: int(value.size) for name, value in {**pure.params, **pure.frozen}.items()}
    peak = int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
    found: dict[str, Any] = {
        "parameters": sum(sizes.values()),
        "trainable_parameters": sum(sizes[name] for name in pure.params),
        "updates_per_epoch": -(-engine.n_batches // engine.accumulate),
        "flops_per_update": flops["apply"] + (engine.accumulate - 1) * flops.get("micro", 0),
        "state_bytes": int(memory.argument_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "peak_bytes": peak,
    }
    if engine.place.sharding is not None:
        found["mesh"] = {**_mesh(engine, compiled), "peak_bytes": peak}
    return found


def _mesh(engine: Any, compiled: Mapping[str, Any]) -> dict[str, Any]:
    """What lies where, and what devices exchange in one update, as JSON values."""
    sharding, leaves = engine.place.sharding, engine.programs.placed()
    heads = ("params/", "frozen/")
    params = {path.partition("/")[2]: leaf for path, leaf in leaves.items() if path.startswith(heads)}
    moves = report.exchanges(compiled["apply"].as_text())
    if "micro" in compiled:
        moves = report.added(moves, report.exchanges(compiled["micro"].as_text()), engine.accumulate - 1)
    return {
        **sharding.geometry(),
        "devices": int(sharding.mesh.size),
        "parameters": report.parameter_table(params),
        "state_bytes": report.state_bytes(leaves),
        "collectives": {kind: dataclasses.asdict(each) for kind, each in moves.items()},
        "warnings": report.whole_warnings(leaves),
    }
