"""On how many processes and devices a checkpoint was made, and whether training may go on from it on these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_jax.core.errors import ResumePointError

Geometry = Mapping[str, Any]
"""`processes`: how many; `mesh`: size by axis, None for one device; `sharding`: the rules that split parameters over
these axes, as (pattern, axes) since the first match counts, missing where nobody noted them, as in older checkpoints;
`partition`: which rows each process reads, None where that needs no description."""

_FREE = ("processes", "mesh", "sharding")
"""What an elastic run may change: its rows are dealt by their number, and each update is of the same rows."""


def check_geometry(stored: Geometry | None, now: Geometry | None, *, elastic: bool = False, what: str = "it") -> None:
    """Check that a whole state may be restored here; a pure comparison, before anything is restored.

    On other devices the same sums are made in another order, so another number of processes, another mesh or other
    rules give other last bits than the run that goes on, and are for those who ask for them.

    Args:
        stored: of the checkpoint; None, as older ones have it, is one process.
        now: of this run; None is one process with one device.
        elastic: processes, mesh and rules may differ, as `elastic: true` in a configuration asks.
        what: the checkpoint, for the error.

    Raises:
        ResumePointError: (a ValueError) with both geometries, and what to do.
    """
    then, here = _full(stored), _full(now)
    differ = [name for name in (*_FREE, "partition") if then[name] != here[name] and _noted(name, stored, now)]
    if elastic:
        differ = [name for name in differ if name not in _FREE]
    if not differ:
        return
    ways = [_same(then, here, differ)]
    if set(differ) <= set(_FREE):
        ways.append("set elastic: true, which goes on with the same batches")
    ways.append("take its weights alone with resume_mode: weights_only")
    rules = "sharding" in differ
    raise ResumePointError(
        f"{what} was made on {_show(then, rules)}; this run is on {_show(here, rules)}. Nothing was restored: "
        + "; or ".join(ways)
    )


def _full(geometry: Geometry | None) -> dict[str, Any]:
    found = {"processes": 1, "mesh": None, "sharding": None, "partition": None} | dict(geometry or {})
    sizes = {str(axis): int(size) for axis, size in (found["mesh"] or {}).items() if size != 1}
    return found | {"mesh": sizes, "sharding": [[pattern, list(axes)] for pattern, axes in found["sharding"] or ()]}


def _noted(name: str, stored: Geometry | None, now: Geometry | None) -> bool:
    """Whether both sides say it, where not everyone does."""
    return name in ("processes", "mesh") or all(each is not None and name in each for each in (stored, now))


def _same(then: Mapping[str, Any], here: Mapping[str, Any], differ: list[str]) -> str:
    if "processes" in differ:
        return f"start {_count(then['processes'], 'process')}"
    if "mesh" in differ:
        return f"use mesh {_mesh(then)}"
    if "sharding" in differ:
        return f"use sharding {_rules(then)}"
    return f"deal the rows as before ({_partition(then, here)})"


def _partition(then: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    sides = [side["partition"] if isinstance(side["partition"], Mapping) else {} for side in (then, here)]
    names = [name for name in {**sides[0], **sides[1]} if sides[0].get(name) != sides[1].get(name)]
    told = [f"{name}: {sides[0].get(name)!r}, not {sides[1].get(name)!r}" for name in names]
    return ", ".join(told) or f"{then['partition']!r}, not {here['partition']!r}"


def _rules(geometry: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{pattern!r}: {_axes(axes)}" for pattern, axes in geometry["sharding"]) + "}"


def _axes(axes: list[Any]) -> str:
    return "[" + ", ".join("null" if each is None else str(each).replace("'", "") for each in axes) + "]"


def _show(geometry: Mapping[str, Any], rules: bool) -> str:
    text = f"{_count(geometry['processes'], 'process')}, mesh {_mesh(geometry)}"
    text += f", sharding {_rules(geometry)}" if rules else ""
    return text if geometry["partition"] is None else f"{text}, rows {geometry['partition']!r}"


def _mesh(geometry: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in geometry["mesh"].items()) + "}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}es"
