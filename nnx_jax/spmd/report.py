"""What a mesh costs, told before anything runs: bytes of every parameter on each device, and what devices exchange."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
LARGE_BYTES = 64 * 1024**2
"""An array of this size or more that every device holds whole is warned about."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_EXCHANGE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) (" + "|".join(KINDS) + r")(-start)?\(")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0}


@dataclass
class Exchange:
    """What devices exchange by one kind of collective in one call of a program.

    Attributes:
        count: times it is done.
        bytes: of the results on one device, all of them together.
        moved: bytes that one device sends, as far as the usual ring algorithms send them.
    """

    count: int = 0
    bytes: int = 0
    moved: int = 0

    def times(self, count: int) -> Exchange:
        """The same, so many times."""
        return Exchange(self.count * count, self.bytes * count, self.moved * count)

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.count + other.count, self.bytes + other.bytes, self.moved + other.moved)


Exchanges = dict[str, Exchange]
"""By kind, see `KINDS`."""


@dataclass
class _Computation:
    """One computation of a compiled program: its own exchanges, and what it calls, how often."""

    own: Exchanges = field(default_factory=dict)
    calls: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """(times, names): all of one name, or the branches of which one is taken."""


def exchanges(text: str) -> Exchanges:
    """What devices exchange in one call of a program, by kind.

    Args:
        text: the optimized program, `jax.stages.Compiled.as_text()`.

    A loop of known length counts as often as it runs, any other once; of branches the one that moves most counts.
    """
    known, entry = _computations(text)
    done: dict[str, Exchanges] = {}

    def total(name: str) -> Exchanges:
        if name not in done:
            done[name] = {}  # a computation never calls itself
            found = known.get(name, _Computation())
            for times, names in found.calls:
                taken = max((total(each) for each in names), key=_moved)
                done[name] = added(done[name], {kind: each.times(times) for kind, each in taken.items()})
            done[name] = added(done[name], found.own)
        return done[name]

    return total(entry)


def added(left: Exchanges, right: Exchanges, times: int = 1) -> Exchanges:
    """The exchanges of both, the right ones so many times."""
    kinds = [kind for kind in KINDS if kind in left or kind in right]
    return {kind: left.get(kind, Exchange()) + right.get(kind, Exchange()).times(times) for kind in kinds}


def _moved(found: Exchanges) -> int:
    return sum(each.moved for each in found.values())


def _computations(text: str) -> tuple[dict[str, _Computation], str]:
    """Every computation by name, and the name of the one that is entered."""
    known: dict[str, _Computation] = {}
    entry, now = "", _Computation()
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            now = known[head[2]] = _Computation()
            entry = head[2] if head[1] else entry
            continue
        exchange = _EXCHANGE.match(line)
        if exchange is not None:
            found = _exchange(exchange[1], exchange[2], exchange[3] is not None, _group(line))
            now.own = added(now.own, {exchange[2]: found})
        now.calls += _calls(line)
    return known, entry


def _calls(line: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    trips = _TRIPS.search(line)
    chosen: list[str] = []
    for kind, name in _CALLED.findall(line):
        if kind in ("true_computation", "false_computation"):
            chosen.append(name)
        else:
            yield (int(trips[1]) if trips is not None and kind in ("body", "condition") else 1), (name,)
    branches = _BRANCHES.search(line)
    if branches is not None:
        chosen = [name.strip().lstrip("%") for name in branches[1].split(",")]
    if chosen:
        yield 1, tuple(chosen)


def _exchange(types: str, kind: str, starts: bool, group: int) -> Exchange:
    sizes = [_size(name, dims) for name, dims in _SHAPE.findall(types)]
    # A started gather or permutation is written as (what goes in, what comes out, flags).
    result = max(sizes, default=0) if starts and kind != "all-reduce" else sum(sizes)
    share = (group - 1) / group
    sent = {"all-reduce": 2 * share, "reduce-scatter": group - 1, "collective-permute": 1, "collective-broadcast": 1}
    return Exchange(1, result, round(result * sent.get(kind, share)))


def _size(name: str, dims: str) -> int:
    digits = re.search(r"\d+", name)
    bits = _BITS.get(name, int(digits[0]) if digits is not None else 0)
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _group(line: str) -> int:
    """How many devices exchange with each other: from any of the three ways in which groups are written."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed is not None:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if counted is not None:
        return int(counted[2])
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named is not None:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return max(math.prod(int(part or sizes.get(axis, 1)) for axis, part in axes), 1)
    return 2


# -- arrays -----------------------------------------------------------------------------------------------------------


def parameter_table(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Path, shape, dtype, split and bytes of every parameter, as JSON values, the largest part on a device first.

    Args:
        leaves: shapes with their shardings by path.
    """
    rows = [
        {
            "path": path,
            "shape": [int(size) for size in leaf.shape],
            "dtype": np.dtype(leaf.dtype).name,
            "spec": spec_text(leaf.sharding.spec, len(leaf.shape)),
            "bytes": _bytes(leaf.shape, leaf.dtype),
            "bytes_per_device": device_bytes(leaf),
        }
        for path, leaf in leaves.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes_per_device"])


def spec_text(entries: Any, dims: int) -> str:
    """How a configuration would write this split: `[null, tensor]`; `whole` where nothing is split."""
    shown = [
        "null" if entry is None else entry if isinstance(entry, str) else f"[{', '.join(entry)}]" for entry in entries
    ]
    return f"[{', '.join([*shown, *['null'] * (dims - len(shown))])}]" if any(entries) else "whole"


def device_bytes(leaf: Any) -> int:
    """Bytes of an array on one device."""
    return _bytes(leaf.sharding.shard_shape(tuple(leaf.shape)), leaf.dtype)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(int(size) for size in shape) * np.dtype(dtype).itemsize


def state_bytes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a training state on one device, by its parts: params, opt_state, accum, slots and others."""
    found: Counter[str] = Counter()
    for path, leaf in leaves.items():
        found[path.partition("/")[0] or "records"] += device_bytes(leaf)
    return dict(found)


def whole_warnings(leaves: Mapping[str, Any], large: int = LARGE_BYTES) -> list[str]:
    """What to say of large arrays that every device holds whole, one line each, at most five."""
    found = [path for path, leaf in leaves.items() if leaf.sharding.is_fully_replicated and device_bytes(leaf) >= large]
    found.sort(key=lambda path: -device_bytes(leaves[path]))
    lines = [
        f"{path} {list(leaves[path].shape)} is whole on every device, {amount(device_bytes(leaves[path]))} on each; "
        "split it by an axis fsdp, or by a rule under sharding"
        for path in found[:5]
    ]
    if len(found) > 5:
        lines.append(f"{len(found) - 5} more arrays of {amount(large)} or more are whole on every device")
    return lines


def amount(size: float) -> str:
    """Bytes for a person: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


# -- for a person ------------------------------------------------------------------------------------------------------


def mesh_text(found: Mapping[str, Any]) -> str:
    """The part of a dry run that is about the mesh, as lines of text."""
    axes = ", ".join(f"{axis}: {size}" for axis, size in found["axes"].items())
    rows = [
        [row["path"], str(row["shape"]), row["spec"], amount(row["bytes_per_device"])] for row in found["parameters"]
    ]
    parts = ", ".join(f"{name} {amount(size)}" for name, size in found["state_bytes"].items())
    moves = [
        [kind, str(each["count"]), amount(each["bytes"]), amount(each["moved"])]
        for kind, each in found["collectives"].items()
    ]
    lines = [f"mesh {{{axes}}}: {found['devices']} devices", ""]
    lines += _columns([["parameter", "shape", "split", "bytes a device"], *rows])
    lines += ["", f"state on each device: {parts}", f"peak memory of each device: {amount(found['peak_bytes'])}", ""]
    if moves:
        lines += _columns([["collectives of one update", "count", "results", "sent by each device"], *moves])
    else:
        lines.append("devices exchange nothing")
    lines += [f"warning: {warning}" for warning in found["warnings"]]
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
