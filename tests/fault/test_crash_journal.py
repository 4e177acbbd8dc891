"""A commit of a run with a journal, killed, torn, refused or cut by a power loss at the journal's own operations."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from tests.fault.test_crash import (
    JOURNAL_ROLES,
    KILLS,
    Bench,
    firsts,
    kill,
    open_bench,
    power_loss,
    pytestmark,  # noqa: F401  needs what the others need
    refuse,
    role,
    torn,
)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench("journal_scenario.py") as opened:
        yield opened


def own(bench: Bench, name: str = "interrupted") -> list[int]:
    """Operations on the journal."""
    return [number for number, op in enumerate(bench.ops[name]) if role(op) in JOURNAL_ROLES]


def test_every_role_exists(bench: Bench) -> None:
    """The journal's files are those the faults are aimed at, and idps.csv is none of them."""
    found = {role(op) for ops in bench.ops.values() for op in ops}
    assert set(JOURNAL_ROLES) <= found
    assert "history" not in {role(bench.ops["interrupted"][number]) for number in own(bench)}


@pytest.mark.parametrize("mode", KILLS)
def test_killed_at_an_operation(bench: Bench, mode: str) -> None:
    """nnx:B150 C1: LAST is the epoch before or the new one, its rows are all there, and the next start goes on."""
    kill(bench, "interrupted", [(mode, number) for number in own(bench)])


def test_killed_in_the_first_commit(bench: Bench) -> None:
    kill(bench, "new", [("kill before", number) for number in own(bench, "new")])


def test_torn_write(bench: Bench) -> None:
    """C2: half of each write."""
    torn(bench, "interrupted", 0.5, own(bench))


@pytest.mark.parametrize("error, mode", [(errno.ENOSPC, "fail always"), (errno.EIO, "fail once")])
def test_disk_error(bench: Bench, error: int, mode: str) -> None:
    """D1 D3: never reported as a commit, and the same store commits without a gap once the disk is well."""
    numbers = own(bench)
    refuse(
        bench, "interrupted", mode, error, [number for number in firsts(bench.ops["interrupted"]) if number in numbers]
    )


@pytest.mark.parametrize("name", ["interrupted", "new"])
def test_power_loss(bench: Bench, name: str) -> None:
    """nnx:B155 C4: whatever of the unsynced bytes and names survives, what LAST counts is there."""
    checked, problems = power_loss(bench, name, limit=60)
    assert not problems, "\n".join(problems)
    assert checked == 60
