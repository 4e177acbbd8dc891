"""Measure what more devices and processes cost here, fit a model of it, check it, and ask it about larger meshes.

    python tools/scaling.py --write docs/scaling.md      # everything; rewrites the page's tables
    python tools/scaling.py --config cfg.yaml            # the same for a model and data of yours
    python tools/scaling.py --config cfg.yaml --only-larger --larger 8 64 --flops 9e14 --bandwidth 4e11

All configurations are built first, by processes that then wait. In every round each runs a burst of updates in turn,
while the others do nothing; what is told are medians over rounds. Beside every update stands the same work with nothing
exchanged: each device makes an update of its own rows, at the same time. Devices here are made of one machine's cores,
so that is what their number costs by itself; the rest is the price of being one program.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scaling_model import Hardware, Program, fit, predict, told

from nnx_jax.core.codec import dump_json, parse_json
from nnx_jax.core.fsio import atomic_write
from nnx_jax.launch import environment

HERE = Path(__file__).resolve()
BEGIN, END = "<!-- measured: tools/scaling.py -->", "<!-- end of what was measured -->"
BURST_SECONDS, BURST = 0.08, (2, 40)
"""How long a burst is to take, and its least and most updates."""
PATIENCE = 900.0
ROWS, WIDTH, CLASSES = 2048, 64, 10
NETS = {
    "narrow": "{kind: feed_forward, hidden_dims: [64, 64]}",
    "wide": "{kind: feed_forward, hidden_dims: [512, 512]}",
    "decoder": "{kind: transformer_lm, d_model: 64, n_layers: 2, vocab_size: 32, context_length: 32}",
}
CONFIG = """\
model: {{net: {net}, loss: cross_entropy}}
data: {{train: {{kind: npz, path: {path}}}}}
train: {{n_epochs: 1, dispatch: step, optim: {{kind: adam, max_lr: 1e-3}}}}
"""


@dataclass
class Point:
    """One update that is measured, or only compiled.

    Attributes:
        fixed: "global" or "local" batch, "both" at the size where they meet, "one" device with all rows of another
            point, "larger" for a mesh that is not there.
        rows: of the batch, all devices together.
        apart: the same work with nothing exchanged.
        rounds: seconds of an update, by round.
    """

    net: str
    fixed: str
    rows: int
    devices: int = 1
    processes: int = 1
    apart: bool = False
    program: Program | None = None
    rounds: list[float] = field(default_factory=list)
    count: int = 0

    @property
    def name(self) -> str:
        """Of this point among all."""
        return f"{self.net}/{self.devices}/{self.processes}/{self.rows}/{'apart' if self.apart else 'one'}"

    @property
    def seconds(self) -> float:
        """Median over rounds of an update."""
        return statistics.median(self.rounds)


def points_of(net: str, args: argparse.Namespace) -> list[Point]:
    """What is measured of one net."""
    shapes = [(n, 1) for n in args.devices] + [(n, n) for n in args.processes]
    found: dict[str, Point] = {}

    def add(point: Point) -> None:
        known = found.setdefault(point.name, point)
        if {known.fixed, point.fixed} == {"global", "local"}:
            known.fixed = "both"

    for devices, processes in shapes:
        for fixed, rows in (("global", args.rows), ("local", args.local_rows * devices)):
            add(Point(net, fixed, rows, devices, processes))
            if devices > 1:
                add(Point(net, fixed, rows, devices, processes, apart=True))
    for point in list(found.values()):
        add(Point(net, "one", point.rows))
    return list(found.values())


# -- the processes ----------------------------------------------------------------------------------------------------


class Group:
    """Processes of one size of group, which build their points and then measure them when told to."""

    def __init__(self, points: Sequence[Point], configs: Mapping[str, Path], args: argparse.Namespace) -> None:
        self.points, self.world = points, points[0].processes
        devices = max(point.devices // point.processes for point in points)
        entries = [
            {
                "name": p.name, "config": str(configs[p.net]), "rows": p.rows, "devices": p.devices, "apart": p.apart,
                "processes": p.processes, "axis": args.axis, "runs": p.fixed != "larger",
            }
            for p in points
        ]  # fmt: skip
        given = dump_json({"processes": self.world, "entries": entries})
        how = argparse.Namespace(processes=self.world, devices_per_process=devices, timeout_seconds=PATIENCE)
        port = _free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(HERE.with_name("scaling_worker.py")), given],
                env=environment(how, rank, port, os.environ), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for rank in range(self.world)
        ]  # fmt: skip

    def ready(self) -> None:
        """Wait until everything is built; note what each update costs."""
        for process in self.processes:
            for point in self.points:
                cost = self._answer(process)["cost"]
                point.program = Program(point.devices, point.processes, **cost)

    def burst(self, point: Point, count: int) -> float:
        """Seconds of an update, of so many in a row; of the slowest process."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(dump_json({"name": point.name, "count": count}).replace("\n", " ") + "\n")
            process.stdin.flush()
        return max(self._answer(process)["seconds"] for process in self.processes) / count

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@ "):
                return parse_json(line[2:])
        raise SystemExit(f"scaling: a process ended with exit code {process.wait()}; see above")

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            assert process.stdout is not None
            process.stdout.close()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def groups_of(points: Sequence[Point], configs: Mapping[str, Path], args: argparse.Namespace) -> Iterator[list[Group]]:
    """Start the processes for these points; they are ended however this ends."""
    groups: list[Group] = []
    try:
        for world in sorted({point.processes for point in points}):
            groups.append(Group([point for point in points if point.processes == world], configs, args))
        for group in groups:
            group.ready()
        yield groups
    finally:
        for group in groups:
            group.close()


def measure(groups: Sequence[Group], rounds: int) -> None:
    """Run rounds of bursts of every point in turn, the order turned by one point a round."""
    turns = [(group, point) for group in groups for point in group.points]
    for group, point in turns:
        group.burst(point, 1)  # the first call is not like the others
        point.count = max(BURST[0], min(BURST[1], math.ceil(BURST_SECONDS / group.burst(point, 2))))
    for turn in range(rounds):
        first = turn * len(turns) // rounds
        for group, point in turns[first:] + turns[:first]:
            point.rounds.append(group.burst(point, point.count))


# -- what it says -----------------------------------------------------------------------------------------------------


def checked(points: Sequence[Point]) -> dict[str, bool]:
    """Which points the model is fitted on, by name; the largest of each kind are left for the check."""
    sizes = {several: {p.devices for p in points if (p.processes > 1) == several} - {1} for several in (False, True)}
    held = {several: max(found) if len(found) > 1 else 0 for several, found in sizes.items()}
    return {p.name: p.apart or p.devices != held[p.processes > 1] for p in points}


def report(points: Sequence[Point], larger: Sequence[Point], args: argparse.Namespace, load: float) -> dict[str, Any]:
    """Everything found, as JSON values."""
    fitted = checked(points)
    programs = {p.name: p.program for p in [*points, *larger] if p.program is not None}
    chosen = [p for p in points if fitted[p.name]]
    costs = fit([programs[p.name] for p in chosen], [p.seconds for p in chosen]) if points else np.zeros(8)
    by_name = {p.name: p for p in points}
    rows = []
    for p in points:
        if p.apart or p.fixed == "one":
            continue
        program, guess = programs[p.name], predict(programs[p.name], costs)
        apart = by_name.get(Point(p.net, "", p.rows, p.devices, p.processes, apart=True).name, p)
        rows.append({
            "net": p.net, "fixed": p.fixed, "devices": p.devices, "processes": p.processes, "rows": p.rows,
            "update_seconds": p.seconds, "apart_seconds": apart.seconds,
            "one_device_seconds": by_name[Point(p.net, "one", p.rows).name].seconds,
            "collectives": program.exchanges, "count": program.count, "bytes": program.bytes, "moved": program.moved,
            "flops": program.flops, "model_seconds": guess, "error": guess / p.seconds - 1, "fitted": fitted[p.name],
        })  # fmt: skip
    hardware = Hardware(args.flops, args.memory, args.bandwidth, args.latency)
    meshes = [
        {"net": p.net, "devices": p.devices, "rows": p.rows, "flops": programs[p.name].flops,
         "count": programs[p.name].count, "bytes": programs[p.name].bytes, "moved": programs[p.name].moved,
         **hardware.update(programs[p.name])}
        for p in larger
    ]  # fmt: skip
    return {
        "machine": {"cores": len(os.sched_getaffinity(0)), "load_before": load, "rounds": args.rounds},
        "rows": rows, "costs": told(costs), "larger": meshes, "hardware": vars(hardware),
    }  # fmt: skip


def text_of(found: Mapping[str, Any]) -> str:
    """The report for a person, in Markdown."""
    machine = found["machine"]
    busy = machine["load_before"] > 0.25 * machine["cores"]
    lines = []
    if found["rows"]:
        state = (
            f"**The machine was busy with other work (load {machine['load_before']:.1f} on {machine['cores']} cores "
            "before it began): times below are too long, and compare badly.** "
            if busy
            else "Nothing else ran. "
        )
        lines += [
            f"{machine['cores']} cores, CPU, JAX {_jax_version()}; medians of {machine['rounds']} rounds. {state}"
            "Times in ms. A `*` marks the points that the model was not fitted on.",
            "",
        ]
        for net in dict.fromkeys(row["net"] for row in found["rows"]):
            rows = [row for row in found["rows"] if row["net"] == net]
            lines += [*_table_of(net, rows), *_growth_text(rows, machine["cores"])]
        lines += [_costs_text(found["costs"]), "", _errors_text(found["rows"]), ""]
    if found["larger"]:
        lines += _larger_text(found["larger"], found["hardware"])
    return "\n".join(lines).rstrip() + "\n"


def _table_of(net: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = (
        "devices", "processes", "fixed batch", "rows, all", "rows, each", "update", "nothing exchanged", "exchange",
        "one device, all rows", "collectives", "KiB", "KiB sent by each", "model", "error",
    )  # fmt: skip
    lines = [f"### `{net}`", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        update, apart = row["update_seconds"], row["apart_seconds"]
        cells = [
            row["devices"], row["processes"], row["fixed"], row["rows"], row["rows"] // row["devices"], _ms(update),
            _ms(apart), _ms(update - apart) if row["devices"] > 1 else "0", _ms(row["one_device_seconds"]),
            row["count"], f"{row['bytes'] / 1024:.1f}", f"{row['moved'] / 1024:.1f}", _ms(row["model_seconds"]),
            f"{row['error']:+.0%}{'' if row['fitted'] else '*'}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def _growth_text(rows: Sequence[Mapping[str, Any]], cores: int) -> list[str]:
    """How much of the growth from one device to the most, at as many rows on each, is the machine's."""
    local = [row for row in rows if row["fixed"] in ("local", "both")]
    lines = []
    for name, most in (
        ("devices", max((r for r in local if r["processes"] == 1), key=lambda r: r["devices"], default=None)),
        ("processes", max((r for r in local if r["processes"] > 1), key=lambda r: r["devices"], default=None)),
    ):
        first = next((row for row in local if row["devices"] == 1), None)
        if first is None or most is None or most["devices"] == 1:
            continue
        grown, alone = (most[part] - first["update_seconds"] for part in ("update_seconds", "apart_seconds"))
        lines.append(
            f"With {first['rows']} rows on each of {most['devices']} {name} an update takes {_ms(grown)} ms more than "
            f"with them on one; {_ms(alone)} ms of that it takes with nothing exchanged too: that is the machine's "
            f"{cores} cores. "
        )
    return ["".join(lines).rstrip(), ""] if lines else []


def _costs_text(costs: Mapping[str, Any]) -> str:
    def per(value: float | None, unit: str) -> str:
        return "not seen" if value is None else f"{value / 1e9:.3g} G{unit}/s"

    us = {name: f"{1e6 * costs[name]:.3g} us" for name in costs if name.endswith("_seconds")}
    return (
        f"Fitted: a call {us['call_seconds']}, and {us['device_seconds']} for each device; computing "
        f"{per(costs['flops_per_second'], 'FLOP')}, and {per(costs['memory_bytes_per_second'], 'B')} of memory, of all "
        f"devices together. An exchange between devices of one process {us['device_exchange_seconds']} for each other "
        f"device, and {per(costs['device_bytes_per_second'], 'B')}; between processes "
        f"{us['process_exchange_seconds']} for each other process, and {per(costs['process_bytes_per_second'], 'B')}."
    )


def _errors_text(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for name, fitted in (("fitted", True), ("not fitted", False)):
        errors = [abs(row["error"]) for row in rows if row["fitted"] == fitted]
        if errors:
            middle, most = statistics.median(errors), max(errors)
            parts.append(f"{len(errors)} points {name}: off by {middle:.0%} (median), {most:.0%} at most")
    return f"The model's error: {'; '.join(parts)}."


def _larger_text(meshes: Sequence[Mapping[str, Any]], hardware: Mapping[str, float]) -> list[str]:
    head = (
        "net", "devices", "rows, all", "GFLOP, each", "collectives", "KiB", "KiB sent by each", "computing", "exchange",
        "update",
    )  # fmt: skip
    lines = [
        "### Larger meshes",
        "",
        f"Assumed of each device: {hardware['flops'] / 1e12:g} TFLOP/s, {hardware['memory'] / 1e12:g} TB/s of memory, "
        f"{hardware['bandwidth'] / 1e9:g} GB/s to the others, {1e6 * hardware['latency']:g} us for the smallest "
        "exchange. Nobody measured these: write yours. Times in ms.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for row in meshes:
        cells = [
            f"`{row['net']}`", row["devices"], row["rows"], f"{row['flops'] / 1e9:.3g}", row["count"],
            f"{row['bytes'] / 1024:.1f}", f"{row['moved'] / 1024:.1f}", _ms(row["compute"]), _ms(row["exchange"]),
            f"{_ms(row['least'])} to {_ms(row['most'])}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if abs(seconds) < 0.9995 else f"{1e3 * seconds:.0f}"


def _jax_version() -> str:
    from importlib.metadata import version

    return version("jax")


def written(page: str, text: str) -> str:
    """The page with its measured part replaced.

    Raises:
        SystemExit: it has no such part.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"scaling: the page has no lines '{BEGIN}' and '{END}' to write between")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


# -- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The options."""
    build = argparse.ArgumentParser(prog="python tools/scaling.py", description=(__doc__ or "").splitlines()[0])
    add = build.add_argument
    add("--write", type=Path, metavar="PAGE", help="replace the measured part of this page")
    add("--json", action="store_true", help="print JSON in place of tables")
    add("--nets", nargs="+", choices=list(NETS), default=["narrow", "wide"], help="what is trained")
    add("--config", type=Path, action="append", help="a configuration of yours in place of them; may be repeated")
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="of one process")
    add("--processes", type=int, nargs="*", default=[2, 4], help="of one device each")
    add("--rows", type=int, default=256, help="rows of a batch, all devices together, at a fixed global batch")
    add("--local-rows", type=int, default=64, help="rows of each device at a fixed local batch")
    add("--axis", choices=["data", "fsdp"], default="data", help="axis of the mesh that the devices are along")
    add("--rounds", type=int, default=5)
    add("--larger", type=int, nargs="*", default=[16, 64], help="devices that are only compiled for")
    add("--only-larger", action="store_true", help="measure nothing")
    add("--flops", type=float, default=1e14, help="FLOP/s of a device of the larger meshes")
    add("--memory", type=float, default=2e12, help="bytes/s of its memory")
    add("--bandwidth", type=float, default=5e10, help="bytes/s that it sends to the others")
    add("--latency", type=float, default=1e-5, help="seconds of the smallest exchange")
    return build


def write_configs(folder: Path, nets: Sequence[str]) -> dict[str, Path]:
    """Write data and configurations of the nets."""
    rng = np.random.default_rng(0)
    np.savez(
        folder / "rows.npz",
        x=rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        y=rng.integers(0, CLASSES, ROWS).astype(np.int32),
    )
    words = rng.integers(0, 32, (ROWS, WIDTH // 2 + 1)).astype(np.int32)
    np.savez(folder / "words.npz", x=words[:, :-1], y=words[:, 1:])
    found = {}
    for net in nets:
        found[net] = folder / f"{net}.yaml"
        path = folder / ("words.npz" if net == "decoder" else "rows.npz")
        found[net].write_text(CONFIG.format(net=NETS[net], path=path), encoding="utf-8")
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for; the report as JSON values."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="nnx-jax-scaling-") as folder:
        configs = write_configs(Path(folder), [] if args.config else args.nets)
        configs |= {path.stem: path.resolve() for path in args.config or ()}
        points = [] if args.only_larger else [point for net in configs for point in points_of(net, args)]
        if points:
            with groups_of(points, configs, args) as groups:
                measure(groups, args.rounds)
        larger = [Point(net, "larger", args.local_rows * n, n) for net in configs for n in args.larger]
        if larger:
            with groups_of(larger, configs, args):
                pass
    return report(points, larger, args, load)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = parser().parse_args(argv)
    begun = time.monotonic()
    found = run(args)
    text = dump_json(found) if args.json else text_of(found)
    print(text)
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        atomic_write(args.write, written(page, text_of(found)).encode(), mode=0o644)
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
