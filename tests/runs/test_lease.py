"""The lease: one writer, a dead owner does not block, a stopped one cannot come back, forks do not count."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.errors import LeaseHeldError, LeaseLostError, UnsafePathError
from nnx_jax.runs import lease
from nnx_jax.runs.layout import RunPaths

HOLD = """
import sys, time
from nnx_jax.runs import lease
from nnx_jax.runs.layout import RunPaths
held = lease.acquire(RunPaths(sys.argv[1], "r"))
{body}
print("held", held.fencing, flush=True)
sys.stdin.readline()
{after}
"""


@contextlib.contextmanager
def holder(root: Path, body: str = "", after: str = "") -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the lease of run r until it is killed or its input ends."""
    code = HOLD.format(body=body, after=after)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("held")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path, "r")


def edit_owner(paths: RunPaths, **changes: Any) -> None:
    record = json.loads(paths.lease_owner.read_text())
    paths.lease_owner.write_text(json.dumps({**record, **changes}))


def test_fencing_grows_with_every_owner(paths: RunPaths) -> None:
    numbers = []
    for _ in range(3):
        with lease.acquire(paths) as held:
            held.check()
            numbers.append(held.fencing)
    assert numbers == [1, 2, 3]


def test_fencing_is_above_what_last_carries(paths: RunPaths) -> None:
    """A lost owner record does not let the number fall back."""
    with lease.acquire(paths, floor=41) as held:
        assert held.fencing == 42
    paths.lease_owner.unlink()
    with lease.acquire(paths, floor=42) as held:
        assert held.fencing == 43


def test_the_second_writer_is_told_who_and_what_to_do(tmp_path: Path, paths: RunPaths) -> None:
    """case:I14 a live owner in another process is refused by pid, host and time, with the way out."""
    with holder(tmp_path) as process:
        start = time.monotonic()
        with pytest.raises(LeaseHeldError, match=rf"'r' is held by process {process.pid} on host '.+' since 20.*kill"):
            lease.acquire(paths)
        assert time.monotonic() - start < 1.0


def test_waiting_for_the_owner_is_bounded_and_works(tmp_path: Path, paths: RunPaths) -> None:
    """nnx:B111 the other process waits for the lease, for as long as it was told and no longer."""
    with holder(tmp_path, after="held.release()") as process:
        with pytest.raises(LeaseHeldError, match="held by process"):
            lease.acquire(paths, wait_seconds=0.2)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        with lease.acquire(paths, wait_seconds=10) as held:
            assert held.fencing == 2


@pytest.mark.parametrize("again", range(3))
def test_a_killed_owner_is_taken_over_at_once(tmp_path: Path, paths: RunPaths, again: int) -> None:
    """case:I15 kill -9, start again: a warning, under two seconds, and a larger fencing number."""
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        start = time.monotonic()
        with pytest.warns(RuntimeWarning, match=rf"taking over the lease of process {process.pid} "):
            held = lease.acquire(paths)
        assert time.monotonic() - start < 2.0
        assert held.fencing == 2
        held.release()


CHILDREN = {
    "fork": "import os\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)",
    "libc_fork": "import ctypes, os\nif ctypes.CDLL(None).fork() == 0:\n    time.sleep(60)\n    os._exit(0)",
    "subprocess": "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "close_fds_false": (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], close_fds=False)"
    ),
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_dead_owners_workers_do_not_keep_the_lease(tmp_path: Path, paths: RunPaths, kind: str) -> None:
    """L2: a child of the killed writer lives on (forked with or without Python's knowledge, or started); it is free."""
    body = f"import os; os.setsid()\n{CHILDREN[kind]}"
    with holder(tmp_path, body) as process:
        group = process.pid
        try:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            start = time.monotonic()
            with pytest.warns(RuntimeWarning, match="taking over"):
                held = lease.acquire(paths)
            held.check()
            assert held.fencing == 2
            held.release()
            assert time.monotonic() - start < 2.0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def child_checks(held: lease.Lease, queue: Any) -> None:
    try:
        held.check()
        queue.put("allowed")
    except LeaseLostError as error:
        queue.put(str(error))
    held.release()


def test_a_forked_child_is_no_writer(paths: RunPaths) -> None:
    """A forked worker may neither commit under its parent's lease nor give it back."""
    context = multiprocessing.get_context("fork")
    with lease.acquire(paths) as held:
        queue = context.Queue()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax warns about os.fork when it is loaded
            child = context.Process(target=child_checks, args=(held, queue))
            child.start()
        assert "was forked from the writer" in queue.get(timeout=20)
        child.join()
        held.check()
        with pytest.raises(LeaseHeldError, match="this very process has it open"):
            lease.acquire(paths)


def test_opening_and_closing_the_lock_file_does_not_free_it(tmp_path: Path, paths: RunPaths) -> None:
    """L3: POSIX record locks are lost by this; the lease is not."""
    code = "import sys; from nnx_jax.runs import lease; from nnx_jax.runs.layout import RunPaths; "
    code += "lease.acquire(RunPaths(sys.argv[1], 'r'))"
    with lease.acquire(paths) as held:
        with paths.lease_lock.open("rb+"):
            pass
        held.check()
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "LeaseHeldError" in done.stderr


@pytest.mark.parametrize("how", ["unlinked", "replaced"])
def test_a_lost_lock_file_lets_nobody_in_and_stops_the_owner(tmp_path: Path, paths: RunPaths, how: str) -> None:
    """L3: without its lock file the owner's record still keeps others out, and the owner itself stops writing."""
    with holder(tmp_path):
        paths.lease_lock.unlink()
        if how == "replaced":
            paths.lease_lock.touch()
        with pytest.raises(LeaseHeldError, match="held by process"):
            lease.acquire(paths)
    paths.lease_owner.unlink()
    held = lease.acquire(paths)
    paths.lease_lock.unlink()
    if how == "replaced":
        paths.lease_lock.touch()
    with pytest.raises(LeaseLostError, match="was removed or replaced"):
        held.check()
    held.release()


def test_a_taken_over_owner_cannot_check_in_again(paths: RunPaths) -> None:
    """L4 in one process: after a forced take-over the old lease fails its check, and releasing it changes nothing."""
    old = lease.acquire(paths)
    with pytest.warns(RuntimeWarning, match="alive"):
        new = lease.acquire(paths, force=True)
    with pytest.raises(LeaseLostError, match="removed or replaced|taken over"):
        old.check()
    old.release()
    new.check()
    assert new.fencing == old.fencing + 1
    new.release()


def test_a_released_lease_fails_its_check(paths: RunPaths) -> None:
    held = lease.acquire(paths)
    held.release()
    held.release()
    with pytest.raises(LeaseLostError, match="was released"):
        held.check()


def test_a_reused_pid_is_a_dead_owner(paths: RunPaths) -> None:
    """case:I15 the record names a live process, but one that started at another time: it is not the owner."""
    lease.acquire(paths).release()
    edit_owner(paths, released=False, pid=os.getpid(), started=1)
    with pytest.warns(RuntimeWarning, match="dead"):
        lease.acquire(paths).release()


def test_a_live_owner_of_the_same_start_time_is_respected(paths: RunPaths) -> None:
    """case:I15 a lock naming a live process is refused with a message, even though the lock itself is free."""
    lease.acquire(paths).release()
    started = lease._started(os.getppid())
    edit_owner(paths, released=False, pid=os.getppid(), started=started)
    with pytest.raises(LeaseHeldError, match=f"process {os.getppid()} "):
        lease.acquire(paths)


def test_an_owner_on_another_host_is_refused_with_the_way_out(paths: RunPaths) -> None:
    """case:I15 whether another machine's process lives cannot be known: said so, at once, with what to delete."""
    lease.acquire(paths).release()
    edit_owner(paths, released=False, host="elsewhere", boot="another-boot")
    with pytest.raises(LeaseHeldError, match=r"'elsewhere'.*delete .*r\.owner\.json"):
        lease.acquire(paths)
    paths.lease_owner.unlink()
    lease.acquire(paths).release()


def test_a_reboot_ends_every_owner(paths: RunPaths) -> None:
    """The same host with another boot id: whoever it was is gone."""
    lease.acquire(paths).release()
    edit_owner(paths, released=False, boot="the boot before")
    with pytest.warns(RuntimeWarning, match="dead"):
        lease.acquire(paths).release()


def test_a_restarted_container_takes_its_run_back(paths: RunPaths) -> None:
    """Same kernel, other pid namespace: the free lock decides, whatever the pid says."""
    lease.acquire(paths).release()
    edit_owner(paths, released=False, namespace=1, host="pod-1")
    with pytest.warns(RuntimeWarning, match="restarted"):
        lease.acquire(paths).release()


@pytest.mark.parametrize("content", ["", "{", '{"pid": 3}', "[]", "\0\0"])
def test_a_damaged_owner_record_does_not_block(paths: RunPaths, content: str) -> None:
    """case:I15 an empty or torn lock record: the operating-system lock alone decides."""
    lease.acquire(paths).release()
    paths.lease_owner.write_text(content)
    with lease.acquire(paths, floor=7) as held:
        assert held.fencing == 8


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path: Path, paths: RunPaths) -> None:
    """H5: the lock file is never followed."""
    paths.leases.mkdir()
    outside = tmp_path / "outside"
    paths.lease_lock.symlink_to(outside)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        lease.acquire(paths)
    assert not outside.exists()


RACE = """
import sys, time
from nnx_jax.core.errors import LeaseHeldError
from nnx_jax.runs import lease
from nnx_jax.runs.layout import RunPaths
root, starts = sys.argv[1], int(sys.argv[2])
for start in range(starts):
    moment = float(sys.stdin.readline())
    time.sleep(max(0.0, moment - time.time()))
    try:
        held = lease.acquire(RunPaths(root, "r"))
    except LeaseHeldError as error:
        print("lost", error, flush=True)
        sys.stdin.readline()
    else:
        print("won", held.fencing, flush=True)
        sys.stdin.readline()
        held.check()
        held.release()
    print("done", flush=True)
"""


@pytest.mark.parametrize("starts", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_of_two_that_start_together_one_wins(tmp_path: Path, starts: int) -> None:
    """case:I14 L5: two processes, one moment: one writer each time, the other is told pid, host and since."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), str(starts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        last = 0
        for start in range(starts):
            moment = time.time() + (1.0 if start == 0 else 0.1)
            for process in processes:
                process.stdin.write(f"{moment}\n")
                process.stdin.flush()
            lines = sorted(process.stdout.readline() for process in processes)
            assert [line.split()[0] for line in lines] == ["lost", "won"]
            assert any(f"process {process.pid} on host" in lines[0] for process in processes)
            assert "since 20" in lines[0]
            fencing = int(lines[1].split()[1])
            assert fencing > last
            last = fencing
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
            assert [process.stdout.readline() for process in processes] == ["done\n", "done\n"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_warning_turned_into_an_error_gives_the_lease_back(paths: RunPaths) -> None:
    """With warnings as errors a take-over raises, and the next start is not blocked by it."""
    lease.acquire(paths).release()
    edit_owner(paths, released=False, pid=os.getpid(), started=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="taking over the lease"):
            lease.acquire(paths)
        lease.acquire(paths).release()


def test_a_release_the_disk_refuses_does_not_lock_this_process_out(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record still names this process, but it gave the lease back: a notebook may open the run again."""
    held = lease.acquire(paths)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            held.release()
    with pytest.warns(RuntimeWarning, match="dead"):
        again = lease.acquire(paths)
    assert again.fencing == held.fencing + 1
    with pytest.raises(LeaseHeldError, match="this very process has it open"):
        lease.acquire(paths)
    again.release()
