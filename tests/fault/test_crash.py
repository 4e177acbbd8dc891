"""A commit that is killed, torn, refused by the disk or cut by a power loss at any file operation loses nothing.

The fast forms sample the operations; the exhaustive forms are marked slow. Operations are named by what they touch
(their role), and a role that no fault ever hit fails the test, so that a renamed file cannot slip out of it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FULL = "interrupted"
"""The run the exhaustive forms use: twice interrupted, so its commit also cuts history, sweeps and prunes."""

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.fault import powerloss  # noqa: E402
from tools.fault.build import compiler  # noqa: E402
from tools.fault.driver import Driver, Outcome, occurrences  # noqa: E402
from tools.fault.ops import Fault, Op, read_log  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the preload shim needs Linux and a C compiler"
)

EPOCH = 3
ROLES = {
    "lease": r"\.leases/.*",
    "LAST": r"[^/]+/checkpoints/\.?LAST(\.\*)?",
    "pointer": r"[^/]+/checkpoints/\.?(BEST|FIRST|Q1|tag-3)(\.\*)?",
    "checkpoints directory": r"[^/]+/checkpoints",
    "manifest": r"[^/]+/checkpoints/manifests(/.*)?",
    "trash": r".*/\.trash-.*",
    "arrays": r".*/state[^/]*/.*(ocdbt|/d(/|$)).*",
    "array metadata": r".*/generations/.*/state.*",
    "host": r".*/generations/[^/]+/\.?host\.json(\.\*)?",
    "index": r".*/generations/[^/]+/\.?arrays\.json(\.\*)?",
    "generation": r".*/generations(/[^/]+)?",
    "history": r"[^/]+/\.?idps\.csv(\.\*)?",
    "texts": r"[^/]+/\.?(run\.yaml|metadata\.yaml|artifact\.json)(\.\*)?",
    "best run": r"\.?best(\.\*)?",
    "run directory": r"[^/]+|\.",
}
JOURNAL_ROLES = {
    "chunk": r"[^/]+/history/chunk-.*",
    "lists": r"[^/]+/history/(index|epochs)\.jsonl",
    "journal's manifest": r"[^/]+/history/\.?journal\.json(\.\*)?",
    "journal's directory": r"[^/]+/history",
}
"""Of a run with a journal, in place of "history"; tried in `test_crash_journal.py`."""
TENSOR_ROLES = {"tensors": r".*/generations/[^/]+/\.?state\.safetensors(\.\*)?"}
"""Of a run whose generations are safetensors, in place of Orbax's; tried in `test_crash_tensors.py`."""
OWN = ("LAST", "history", "manifest", "checkpoints directory")
"""The roles whose every operation is tried, also in the fast form: our own writes that decide what a run is."""


def role(op: Op) -> str:
    """Name what an operation touches."""
    for name, pattern in (JOURNAL_ROLES | TENSOR_ROLES | ROLES).items():
        if re.fullmatch(pattern, op.template):
            return name
    raise AssertionError(f"no role for {op}")


def load_scenario(name: str = "scenario.py") -> Any:
    """Import a scenario file under a name of its own (the tests are not a package)."""
    spec = importlib.util.spec_from_file_location(f"fault_{name.removesuffix('.py')}", Path(__file__).with_name(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Bench:
    """Prepared runs, a fault server, and the operations of an undisturbed commit from each prepared run.

    `clean` has three epochs committed; `interrupted` is the same after two kills (before the arrays, `state`, have
    their name or are synced, and before LAST moved), so that its next start also has to cut history, sweep, and
    prune; `new` is no run at all.
    """

    def __init__(self, folder: Path, driver: Driver, scenario: Any, state: str) -> None:
        self.folder, self.driver, self.scenario = folder, driver, scenario
        self.count = itertools.count()
        self.bases: dict[str, tuple[Path | None, int]] = {"new": (None, 0)}
        (done,) = driver.run([{"what": "prepare", "with": {"root": str(folder / "clean"), "epochs": EPOCH}}])
        assert done.status == 0, done.output
        assert not done.raised, done.trace
        self.bases["clean"] = folder / "clean", EPOCH
        first = self.killed(folder / "clean", f"*/{state}")
        self.bases["interrupted"] = self.killed(first, "*/LAST"), EPOCH
        self.ops = {name: self.record(name)[1] for name in self.bases}

    def killed(self, base: Path, pattern: str) -> Path:
        fault = Fault("kill before", 1, ops=("rename", "fsync"), pattern=pattern)
        request = self.request(base, EPOCH, fault)
        (outcome,) = self.driver.run([request])
        assert outcome.killed, outcome
        return Path(request["with"]["root"])

    def request(self, base: Path | None, epoch: int, fault: Fault, **options: Any) -> dict[str, Any]:
        name = f"run-{next(self.count)}"
        argument = {"root": str(self.folder / name), "log": str(self.folder / f"{name}.log"), "epoch": epoch}
        argument |= {"base": None if base is None else str(base), "fault": fault.to_json(), "finish": True, **options}
        return {"what": "commit", "with": argument}

    def record(self, name: str, **options: Any) -> tuple[Path, list[Op]]:
        """Run undisturbed; return the run and the log with the written bytes."""
        base, epoch = self.bases[name]
        request = self.request(base, epoch, Fault(), data=True, **options)
        (outcome,) = self.driver.run([request])
        assert outcome.status == 0, outcome
        assert not outcome.value["raised"], outcome.value
        root = Path(request["with"]["root"])
        return root, read_log(Path(request["with"]["log"]), root)

    def run(
        self, name: str, faults: Sequence[Fault], **options: Any
    ) -> Iterator[tuple[Fault, Outcome, list[Op], str | None]]:
        """Run one child for each fault; yield with the operations that were hit and the broken invariant, if any."""
        base, epoch = self.bases[name]
        requests = [self.request(base, epoch, fault, **options) for fault in faults]
        for fault, request, outcome in zip(faults, requests, self.driver.run(requests), strict=True):
            root, log = Path(request["with"]["root"]), Path(request["with"]["log"])
            hit = [op for op in read_log(log, root) if op.flag != "done"]
            committed = outcome.value["committed"] if outcome.value else None
            yield fault, outcome, hit, self.scenario.check(root, max(epoch, committed or 0), committed=committed)
            shutil.rmtree(root)
            log.unlink()


@contextlib.contextmanager
def open_bench(scenario: str, state: str = "state") -> Iterator[Bench]:
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="crash-", dir=memory if memory.is_dir() else None) as folder,
        Driver(f"{Path(__file__).with_name(scenario)}:serve") as driver,
    ):
        yield Bench(Path(folder), driver, load_scenario(scenario), state)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench("scenario.py") as opened:
        yield opened


def firsts(ops: Sequence[Op]) -> list[int]:
    """Choose the first operation of each (operation, role)."""
    return sorted({(op.op, role(op)): number for number, op in reversed(list(enumerate(ops)))}.values())


KILLS = ("kill before", "kill after")


def alternating(numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Kill before and after in turn."""
    return [(KILLS[turn % 2], number) for turn, number in enumerate(numbers)]


def report(title: str, wanted: Sequence[Op], hit: Sequence[Op]) -> None:
    """Print the coverage by (operation, role), and fail when one was never hit."""
    hits, all_of = Counter((op.op, role(op)) for op in hit), Counter((op.op, role(op)) for op in wanted)
    print(f"\n{title}: {len(hit)} faults hit; (operation, role): hits of operations")
    for key in sorted(all_of):
        print(f"  {key[0]:9}{key[1]:24}{hits[key]:4} of {all_of[key]}")
    assert not set(all_of) - set(hits), f"never hit: {sorted(set(all_of) - set(hits))}"


def kill(bench: Bench, name: str, points: Sequence[tuple[str, int]], **options: Any) -> None:
    found = occurrences(bench.ops[name])
    faults = [replace(found[number], mode=mode) for mode, number in points]
    hits, broken = [], []
    for fault, outcome, hit, problem in bench.run(name, faults, **options):
        if outcome.killed:
            hits += hit
        elif outcome.status or outcome.value["raised"]:
            broken.append(f"{fault}: ended by itself: {outcome}")
        if problem is not None:
            broken.append(f"{fault} {hit}: {problem}")
    assert not broken, "\n".join(broken)
    report(f"killed, {name} run", [bench.ops[name][number] for _, number in points], hits)


def test_nothing_bypasses_the_shim(bench: Bench) -> None:
    """The log alone rebuilds the directory byte for byte, so every mutating call was seen."""
    for name, (base, _) in bench.bases.items():
        root, ops = bench.record(name)
        empty = bench.folder / f"empty-{name}"
        empty.mkdir()
        assert powerloss.replay(base or empty, ops) == powerloss.read_tree(root)


@pytest.mark.parametrize("part", ["our own, before", "our own, after", "the others"])
def test_killed_at_an_operation(bench: Bench, part: str) -> None:
    """C1, case:I01: LAST is the epoch before or the new one, complete; the next start goes on without help.

    All operations of our own on LAST, history and manifest, before and after; a sample of the others.
    """
    ops = bench.ops["interrupted"]
    own = [number for number, op in enumerate(ops) if role(op) in OWN]
    if part == "the others":
        points = alternating(sorted({*firsts(ops), *range(0, len(ops), 16)} - set(own)))
    else:
        points = [(f"kill {part.split()[-1]}", number) for number in own]
    kill(bench, "interrupted", points)


def test_every_role_exists(bench: Bench) -> None:
    """A role whose file was renamed would never be hit; a file without a role raises in `role`."""
    assert {role(op) for ops in bench.ops.values() for op in ops} == set(ROLES)


def test_killed_in_the_first_commit(bench: Bench) -> None:
    """C1 where no run directory is there yet: the next start makes it, or goes on in it."""
    kill(bench, "new", alternating(firsts(bench.ops["new"])))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mode", KILLS)
def test_killed_at_every_operation(bench: Bench, mode: str) -> None:
    """C1 in full, with arrays on a device; the interrupted run has every role of the others."""
    kill(bench, FULL, [(mode, number) for number in range(len(bench.ops[FULL]))], on_device=True)


@pytest.mark.parametrize("part", [0.0, 0.5, -1])
def test_torn_write(bench: Bench, part: float) -> None:
    """C2: killed after nothing, half, or all but one byte of each write of our own and a sample of Orbax's."""
    torn(bench, "interrupted", part, firsts(bench.ops["interrupted"]))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, -1])
def test_every_torn_write(bench: Bench, part: float) -> None:
    """C2 in full."""
    torn(bench, FULL, part, range(len(bench.ops[FULL])))


def torn(bench: Bench, name: str, part: float, numbers: Sequence[int]) -> None:
    found, hits, broken = occurrences(bench.ops[name]), [], []
    writes = [number for number in numbers if bench.ops[name][number].op == "write"]
    for fault, outcome, hit, problem in bench.run(name, [replace(found[n], mode="torn", part=part) for n in writes]):
        hits += hit if outcome.killed else []
        if problem is not None or (not outcome.killed and outcome.value["raised"]):
            broken.append(f"{fault} {hit}: {problem} {outcome}")
    assert not broken, "\n".join(broken)
    report(f"torn at {part}, {name} run", [bench.ops[name][number] for number in writes], hits)


SILENT = {("unlink", "array metadata")}
"""Errors without effect: Orbax unlinks a file before it writes it, and there is none."""

ERRORS = {"no space": errno.ENOSPC, "broken disk": errno.EIO}


@pytest.mark.parametrize("error, mode", [("no space", "fail always"), ("broken disk", "fail once")])
def test_disk_error(bench: Bench, error: str, mode: str) -> None:
    """D1 D3, case:I02: an error at an operation, once or from then on, is never reported as a commit."""
    refuse(bench, "interrupted", mode, ERRORS[error], firsts(bench.ops["interrupted"]))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("error, mode", [("no space", "fail always"), ("broken disk", "fail once")])
def test_disk_error_everywhere(bench: Bench, error: str, mode: str) -> None:
    """D1 D3 in full."""
    refuse(bench, FULL, mode, ERRORS[error], range(len(bench.ops[FULL])))


def refuse(bench: Bench, name: str, mode: str, error: int, numbers: Sequence[int]) -> None:
    ops, found = bench.ops[name], occurrences(bench.ops[name])
    faults = [replace(found[number], mode=mode, error=error) for number in numbers]
    hits, broken, silent = [], [], Counter()
    for number, (fault, outcome, hit, problem) in zip(numbers, bench.run(name, faults, retry=True), strict=True):
        hits += hit[:1]
        value = outcome.value
        if outcome.status or problem is not None:
            broken.append(f"{fault}: {problem} {outcome}")
        elif hit and not value["raised"]:
            silent[ops[number].op, role(ops[number])] += 1
        elif hit and not {"NnxError", "OSError"} & set(value["raised"]):
            broken.append(f"{fault}: not a typed error: {value}")
        elif value.get("retried", "committed") != "committed":
            broken.append(f"{fault}: not committed when tried again: {value['retried']}; first: {value['message']}")
    assert set(silent) <= SILENT, silent
    assert not broken, "\n".join(broken)
    report(f"errno {error} {mode}, {name} run", [ops[number] for number in numbers], hits)


@pytest.mark.parametrize("size", [0, 30, 200, 300, 1000])
def test_file_size_limit(bench: Bench, size: int) -> None:
    """D2: the kernel refuses every byte past a limit (quota, RLIMIT_FSIZE); no SIGXFSZ death, the same promises.

    200 bytes cut Orbax's files, 300 cut LAST, 1000 cut the manifest; without the limit the same store goes on.
    """
    ((_, outcome, _, problem),) = bench.run("clean", [Fault()], file_bytes=size, retry=True)
    assert outcome.status == 0, outcome
    assert problem is None
    assert "OSError" in outcome.value["raised"], outcome
    assert "File too large" in outcome.value["message"]
    assert outcome.value.get("retried", "committed") == "committed"


POWER_STATES = 80


def power_loss(bench: Bench, name: str, *, limit: int, seed: int = 0, **options: Any) -> tuple[int, list[str]]:
    """Record one commit and check what a power loss after any of its operations may leave."""
    base, epoch = bench.bases[name]
    if base is None:
        base = bench.folder / f"nothing-{next(bench.count)}"
        base.mkdir()
    _, ops = bench.record(name, **options)
    renamed = next(number for number, op in enumerate(ops) if op.op == "rename" and op.path2.endswith("/LAST"))

    def check(root: Path, loss: powerloss.Loss) -> str | None:
        # The commit is reported when the fsync after the rename of LAST has returned.
        return bench.scenario.check(
            root, epoch, committed=epoch if loss.after > renamed + 1 else None, go_on=loss.number % 10 == 0
        )

    stop_at = 1 if "mutants" in options else None
    return powerloss.explore(base, ops, check, bench.folder, limit=limit, seed=seed, stop_at=stop_at)


@pytest.mark.parametrize("name", ["interrupted", "new"])
def test_power_loss(bench: Bench, name: str) -> None:
    """C4: whatever of the unsynced bytes and names survives, LAST is whole and nothing reported is lost."""
    checked, problems = power_loss(bench, name, limit=POWER_STATES)
    assert not problems, "\n".join(problems)
    assert checked == POWER_STATES


@pytest.mark.slow
@pytest.mark.parametrize("name", [FULL, "new"])
def test_power_loss_exhaustively(bench: Bench, name: str) -> None:
    """C4 in full."""
    checked, problems = power_loss(bench, name, limit=2000)
    assert not problems, "\n".join(problems)
    print(f"\npower loss, {name} run: {checked} states")


@pytest.mark.parametrize("mutant", ["no fsync walk", "no file is synced", "no directory is synced"])
def test_power_loss_finds_missing_syncs(bench: Bench, mutant: str) -> None:
    """The test of the test: without the fsync walk (or any fsync) a reported commit is lost, and the model says so."""
    _, problems = power_loss(bench, "clean", limit=2000, mutants=[mutant])
    assert problems
    assert "ResumePointError" in problems[0] or "I7" in problems[0] or "I2" in problems[0], problems
