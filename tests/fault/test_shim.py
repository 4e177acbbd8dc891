"""The fault tools themselves: every call is counted once, faults hit where told to, the model does its sums."""

from __future__ import annotations

import errno
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.fault import powerloss  # noqa: E402
from tools.fault.build import build, compiler  # noqa: E402
from tools.fault.driver import Driver, Outcome, escape, occurrences  # noqa: E402
from tools.fault.ops import Fault, Op, read_log  # noqa: E402
from tools.fault.powerloss import Disk, Node, remains  # noqa: E402

needs_shim = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the preload shim needs Linux and a C compiler"
)
PLAIN = Path(__file__).with_name("plain.py")


def expected_ops() -> list[str]:
    spec = importlib.util.spec_from_file_location("fault_plain", PLAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [name for name, _ in module.calls(ROOT)]


OPS = expected_ops()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver(f"{PLAIN}:run", seconds=10.0) as found:
        yield found


def play(driver: Driver, tmp_path: Path, *faults: Fault) -> list[tuple[Outcome, list[Op], Path]]:
    arguments: list[dict[str, Any]] = []
    for number, fault in enumerate(faults):
        root = tmp_path / f"r{number}"
        root.mkdir()
        arguments.append({"root": str(root), "log": str(tmp_path / f"log{number}"), "fault": fault.to_json()})
    outcomes = driver.run(arguments)
    return [
        (outcome, read_log(Path(argument["log"]), Path(argument["root"])), Path(argument["root"]))
        for outcome, argument in zip(outcomes, arguments, strict=True)
    ]


@needs_shim
def test_every_call_is_one_operation(driver: Driver, tmp_path: Path) -> None:
    ((outcome, ops, root),) = play(driver, tmp_path, Fault())
    assert outcome.value["errors"] == [0] * len(OPS)
    assert outcome.value["seen"] == len(OPS)
    assert [op.op for op in ops] == OPS
    assert [(op.offset, op.data) for op in ops if op.op == "write"] == [
        (0, b"0123456789"),
        (2, b"XY"),
        (10, b"abcd"),
        (0, b"pq"),
        (8, b"end"),
    ]
    assert [(op.path, op.path2) for op in ops if op.op == "rename"] == [("a", "b"), ("b", "c")]
    assert next(op.data for op in ops if op.op == "symlink") == b"a"
    assert [(op.created, op.truncated) for op in ops if op.op == "open"] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    before_the_copy = powerloss.replay(tmp_path_of_nothing(tmp_path), ops[:-2])
    assert before_the_copy == {".": None, "c": b"pqXY4567end"}
    assert (root / "c").read_bytes() == PLAIN.read_bytes()[:5]
    with pytest.raises(ValueError, match="copied inside the kernel"):
        powerloss.replay(tmp_path_of_nothing(tmp_path), ops)


def tmp_path_of_nothing(tmp_path: Path) -> Path:
    (tmp_path / "nothing").mkdir(exist_ok=True)
    return tmp_path / "nothing"


@needs_shim
@pytest.mark.parametrize("mode", ["kill before", "kill after"])
def test_kills_at_each_operation(driver: Driver, tmp_path: Path, mode: str) -> None:
    """The log ends at the point, and the disk is as the log says."""
    found = play(driver, tmp_path, *(Fault(mode, number + 1) for number in range(len(OPS) - 1)))
    for number, (outcome, ops, root) in enumerate(found):
        assert outcome.killed
        assert [op.op for op in ops] == OPS[: number + 1]
        assert ops[-1].flag == f"killed {mode.split()[1]}"
        assert powerloss.replay(tmp_path_of_nothing(tmp_path), ops) == powerloss.read_tree(root)
    assert not play(driver, tmp_path / "nothing", Fault(mode, len(OPS) + 1))[0][0].killed


@needs_shim
def test_errors_once_and_for_ever(driver: Driver, tmp_path: Path) -> None:
    once, always, writes = play(
        driver,
        tmp_path,
        Fault("fail once", 10, error=errno.ENOSPC),
        Fault("fail always", 20, error=errno.EIO),
        Fault("fail once", 2, error=errno.EIO, ops=("write",), pattern="c"),
    )
    assert (
        once[0].value["errors"] == [0] * 9 + [errno.ENOSPC] + [0] * 7 + [errno.ENOENT] + [0] * 6
    )  # no rmdir without it
    assert always[0].value["errors"][:19] == [0] * 19
    assert set(always[0].value["errors"][19:]) <= {errno.EIO, -1}
    assert writes[0].value["errors"] == [0] * len(OPS)  # only one write goes to "c"
    assert [op.flag for op in once[1]].count("failed") == 1


@needs_shim
def test_patterns_count_on_their_own(driver: Driver, tmp_path: Path) -> None:
    """A filter finds an operation again by what it is, not by its overall number."""
    ((_, ops, _),) = play(driver, tmp_path, Fault())
    again = [Fault("kill before", f.at, ops=f.ops, pattern=f.pattern) for f in occurrences(ops)]
    (tmp_path / "again").mkdir()
    for number, (outcome, found, _) in enumerate(play(driver, tmp_path / "again", *again)):
        assert outcome.killed
        assert len(found) == number + 1


@needs_shim
@pytest.mark.parametrize(("part", "left"), [(0.0, b""), (0.5, b"01234"), (-1, b"012345678")])
def test_torn_and_short_writes(driver: Driver, tmp_path: Path, part: float, left: bytes) -> None:
    torn, short = play(driver, tmp_path, Fault("torn", 1, part=part), Fault("short", 1, part=part))
    assert torn[0].killed
    assert (torn[2] / "a").read_bytes() == left
    assert torn[1][-1].flag == "torn"
    assert short[0].value["values"][1] == max(1, len(left))  # a write of nothing would loop for ever


@needs_shim
def test_a_hung_child_is_stopped(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef run(shim, argument):\n    time.sleep(argument)\n    return argument\n")
    with Driver(f"{slow}:run", seconds=0.5) as driver:
        fine, hung = driver.run([0.01, 30])
    assert fine.value == 0.01
    assert hung.status == -15


def test_build_reports_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert compiler() is None
    with pytest.raises(RuntimeError, match="no C compiler"):
        build()


def test_templates_leave_out_what_is_random() -> None:
    op = Op("rename", "run/.LAST.0123456789ab", "run/[x]/a" + "0" * 31)
    assert op.template == "run/[x]/*"
    assert escape(op.template) == "run/\\[x\\]/*"
    assert Op("open", "r/.LAST.0123456789ab").template == "r/.LAST.*"
    assert Op("rename", "r/3", "r/.trash-3-0123456789ab").template == "r/.trash-3-*"


# The model, by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durable", "now", "emptied", "left"),
    [
        (b"", b"abcd", False, {"old": b"", "torn": b"", "half": b"ab", "full": b"abcd"}),  # a new file
        (
            b"ab",
            b"abcdef",
            False,
            {"old": b"ab", "torn": b"ab\0\0\0\0", "half": b"abcd", "full": b"abcdef"},
        ),  # an append
        (b"abcd", b"xy", True, {"old": b"abcd", "torn": b"", "half": b"x", "full": b"xy"}),  # written anew
        (b"abcd", b"ab", False, {"old": b"abcd", "torn": b"abcd", "half": b"abc", "full": b"ab"}),  # shortened
    ],
)
def test_what_is_left_of_a_file(durable: bytes, now: bytes, emptied: bool, left: dict[str, bytes]) -> None:
    node = Node("file", durable=durable, now=now, emptied=emptied)
    assert {choice: remains(node, choice) for choice in left} == left


def replace_ops(*, sync_file: bool = True, sync_dir: bool = True) -> list[Op]:
    """The log of an atomic replace of `f` by "new"."""
    ops = [Op("open", ".t", created=True), Op("write", ".t", data=b"new", done=3)]
    ops += [Op("fsync", ".t")] if sync_file else []
    ops += [Op("rename", ".t", "f")]
    return ops + ([Op("fsync", ".")] if sync_dir else [])


def outcomes(base: Path, ops: list[Op], after: int) -> set[bytes | None | str]:
    found = powerloss.losses(base, ops, random_per_point=50, seed=1)
    return {loss.tree.get("f") for loss in found if loss.after == after}


def test_the_model_tells_a_right_replace_from_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    right = replace_ops()
    for after in range(len(right)):
        assert outcomes(tmp_path, right, after) <= {b"old", b"new"}
    end = Disk(tmp_path)
    for op in right:
        end.follow(op)
    assert end.unsynced() == []
    assert end.changes == []
    assert outcomes(tmp_path, replace_ops(sync_file=False), 3) >= {
        b"",
        b"n",
        b"new",
    }  # F5: the name came, the bytes not
    assert b"old" in outcomes(tmp_path, replace_ops(sync_dir=False), 4) | {b"old"}
    lazy = Disk(tmp_path)
    for op in replace_ops(sync_dir=False):
        lazy.follow(op)
    assert lazy.after_loss({}, [False, False])["f"] == b"old"


def test_names_come_and_go_on_their_own(tmp_path: Path) -> None:
    """A rename may be done while the creation before it is not; what lies in an unnamed directory is gone."""
    disk = Disk(tmp_path)
    for op in (Op("mkdir", "d"), Op("open", "d/x", created=True), Op("fsync", "d"), Op("rename", "d", "e")):
        disk.follow(op)
    assert [change.new for change in disk.changes] == [(disk.root, "d"), (disk.root, "e")]
    assert disk.after_loss({}, [False, False]) == {".": None}
    assert disk.after_loss({}, [True, False]) == {".": None, "d": None, "d/x": b""}
    assert disk.after_loss({}, [False, True]) == {".": None, "e": None, "e/x": b""}


def test_a_state_can_be_built_and_read_back(tmp_path: Path) -> None:
    tree: powerloss.Tree = {".": None, "d": None, "d/f": b"x", "link": "d/f"}
    powerloss.build(tree, tmp_path / "r")
    assert powerloss.read_tree(tmp_path / "r") == tree


def test_a_log_with_holes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="something bypassed the shim"):
        Disk(tmp_path).follow(Op("open", "never/made", created=True))
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(ValueError, match="made without data"):
        Disk(tmp_path).follow(Op("write", "f", done=3))
