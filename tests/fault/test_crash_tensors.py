"""A commit whose arrays are one safetensors file, killed, torn, refused or cut by a power loss at its operations."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from tests.fault.test_crash import (
    ERRORS,
    FULL,
    KILLS,
    ROLES,
    TENSOR_ROLES,
    Bench,
    alternating,
    kill,
    open_bench,
    power_loss,
    powerloss,
    pytestmark,  # noqa: F401  needs what the others need
    refuse,
    role,
    torn,
)

NEAR = (*TENSOR_ROLES, "index", "LAST")
"""What a commit of tensors does besides what all commits do, and what makes it the commit."""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench("tensors_scenario.py", "state.safetensors") as opened:
        yield opened


def own(bench: Bench, name: str = "interrupted", roles: tuple[str, ...] = NEAR) -> list[int]:
    """Operations on the file of arrays and what stands beside it."""
    return [number for number, op in enumerate(bench.ops[name]) if role(op) in roles]


def test_every_role_exists(bench: Bench) -> None:
    """The file of arrays is what the faults are aimed at, and Orbax has no part in it."""
    found = {role(op) for ops in bench.ops.values() for op in ops}
    assert found == (set(ROLES) | set(TENSOR_ROLES)) - {"arrays", "array metadata"}


def test_nothing_bypasses_the_shim(bench: Bench) -> None:
    """The log alone rebuilds the directory byte for byte, the tensors too."""
    root, ops = bench.record("clean")
    base, _ = bench.bases["clean"]
    assert base is not None
    assert powerloss.replay(base, ops) == powerloss.read_tree(root)


def test_killed_at_an_operation(bench: Bench) -> None:
    """C1, B1: LAST is the epoch before or the new one, complete; the next start goes on to the same bytes.

    Before and after every operation on the arrays, before or after those on what stands beside them.
    """
    arrays = own(bench, roles=tuple(TENSOR_ROLES))
    beside = [number for number in own(bench) if number not in arrays]
    kill(bench, "interrupted", [*((mode, number) for mode in KILLS for number in arrays), *alternating(beside)])


def test_killed_in_the_first_commit(bench: Bench) -> None:
    """C1 where no run directory is there yet."""
    kill(bench, "new", alternating(own(bench, "new", tuple(TENSOR_ROLES))))


def test_torn_write(bench: Bench) -> None:
    """C2: killed after half of the arrays, and of what stands beside them."""
    torn(bench, "interrupted", 0.5, own(bench))


@pytest.mark.parametrize("error, mode", [(errno.ENOSPC, "fail always"), (errno.EIO, "fail once")])
def test_disk_error(bench: Bench, error: int, mode: str) -> None:
    """D1 D3: no error at any operation on the arrays is silent, and the same store commits once the disk is well."""
    refuse(bench, "interrupted", mode, error, own(bench, roles=tuple(TENSOR_ROLES)))


@pytest.mark.parametrize("name", ["interrupted", "new"])
def test_power_loss(bench: Bench, name: str) -> None:
    """C4: whatever of the unsynced bytes and names survives, LAST is whole and nothing reported is lost."""
    checked, problems = power_loss(bench, name, limit=50)
    assert not problems, "\n".join(problems)
    assert checked == 50


@pytest.mark.parametrize("mutant", ["no file is synced", "no directory is synced"])
def test_power_loss_finds_missing_syncs(bench: Bench, mutant: str) -> None:
    """The test of the test: where fsync lies, a reported commit is lost, and the model says so."""
    _, problems = power_loss(bench, "clean", limit=2000, mutants=[mutant])
    assert problems
    assert "ResumePointError" in problems[0] or "I7" in problems[0] or "I2" in problems[0], problems


@pytest.mark.slow
@pytest.mark.parametrize("name", [FULL, "new"])
@pytest.mark.parametrize("mode", KILLS)
def test_killed_at_every_operation(bench: Bench, mode: str, name: str) -> None:
    """C1 in full."""
    kill(bench, name, [(mode, number) for number in range(len(bench.ops[name]))])


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5, -1])
def test_every_torn_write(bench: Bench, part: float) -> None:
    """C2 in full."""
    torn(bench, FULL, part, range(len(bench.ops[FULL])))


@pytest.mark.slow
@pytest.mark.parametrize("error, mode", [("no space", "fail always"), ("broken disk", "fail once")])
def test_disk_error_everywhere(bench: Bench, error: str, mode: str) -> None:
    """D1 D3 in full."""
    refuse(bench, FULL, mode, ERRORS[error], range(len(bench.ops[FULL])))


@pytest.mark.slow
@pytest.mark.parametrize("name", [FULL, "new"])
def test_power_loss_exhaustively(bench: Bench, name: str) -> None:
    """C4 in full."""
    _, problems = power_loss(bench, name, limit=2000)
    assert not problems, "\n".join(problems)
