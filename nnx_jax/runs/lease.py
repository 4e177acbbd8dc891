"""The right to write one run: an operating-system lock, a record of who holds it, and a number that only grows.

The lock is `flock`, held on `<id>.lock` as long as the writer lives. It was chosen over `lockf` (and over libraries
that use it) because `lockf` is lost as soon as anything in the process opens and closes the file. Its own trap, that
a forked child keeps it after the writer's death, is closed twice: children forked by Python close the handle at once,
and a lock whose recorded owner is dead is replaced by a new file. A lock file that is unlinked or replaced does not
let a second writer in, because the owner record is judged too. Every acquisition raises the fencing number; the
writer compares it (and the lock file's identity) before each commit, so a writer that was stopped and taken over
cannot move LAST any more. Local file systems only: other hosts are recognised, not locked out by the kernel.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import LeaseHeldError, LeaseLostError, NnxError, UnsafePathError
from nnx_jax.runs.layout import RunPaths

_ADMISSION_SECONDS = 5.0
_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.02
_open_locks: set[int] = set()
_held: set[str] = set()  # tokens of the leases this process holds; a record of ours without one was never given back


def _close_in_child() -> None:
    """A forked child must not keep a dead writer's lock; closing its copy leaves the parent's lock alone."""
    for fd in _open_locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open_locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds, or last held, a run's lease, as written in `<id>.owner.json`.

    `started` is the process's start time in kernel ticks, so that a reused pid is told apart; `boot` and `namespace`
    say in which kernel and pid namespace the pid means anything; `since` (UTC) is for people only, never compared.
    """

    pid: int
    started: int
    host: str
    boot: str
    namespace: int
    since: str
    fencing: int
    token: str
    released: bool = False

    @property
    def where(self) -> str:
        return f"process {self.pid} on host {self.host!r} since {self.since}"


class Lease:
    """A held lease; use as a context manager or `release()` it.

    Attributes:
        fencing: larger than that of every earlier holder.
        taken_from: whom it was taken over from, "" when it was free.
    """

    def __init__(self, paths: RunPaths, fd: int, owner: Owner, taken_from: str = "") -> None:
        self._paths, self._fd, self._owner = paths, fd, owner
        self.taken_from = taken_from

    @property
    def fencing(self) -> int:
        return self._owner.fencing

    def check(self) -> None:
        """Raise LeaseLostError unless this very process still holds the lease."""
        lock = self._paths.lease_lock
        if self._fd < 0:
            raise LeaseLostError(f"the lease of run {self._paths.run_id!r} was released; open the run again")
        if os.getpid() != self._owner.pid:
            raise LeaseLostError(
                f"process {os.getpid()} was forked from the writer {self._owner.pid} of run {self._paths.run_id!r}; "
                "only the writer commits"
            )
        if not _is_file_at(self._fd, lock):
            raise LeaseLostError(f"{lock} was removed or replaced; another process may be writing, so this one stops")
        current = read_owner(self._paths)
        if current is None or current.token != self._owner.token or current.fencing != self.fencing:
            holder = current.where if current else "nobody on record"
            raise LeaseLostError(
                f"run {self._paths.run_id!r} was taken over (fencing {current.fencing if current else '?'} after "
                f"{self.fencing}) by {holder}; this process may not commit any more"
            )

    def release(self) -> None:
        """Give the lease back; does nothing in a forked child, a second time, or after somebody took it over."""
        if self._fd < 0 or os.getpid() != self._owner.pid:
            return
        fd, self._fd = self._fd, -1
        _held.discard(self._owner.token)  # whatever fails below, this process may open the run again
        try:
            with _admission(self._paths):
                current = read_owner(self._paths)
                if current is not None and current.token == self._owner.token:
                    _write_owner(self._paths, Owner(**{**asdict(current), "released": True}))
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            _close(fd)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(paths: RunPaths, *, wait_seconds: float = 0.0, force: bool = False, floor: int = 0) -> Lease:
    """Take the lease of a run.

    A dead owner's lease is taken over at once, with a RuntimeWarning.

    Args:
        wait_seconds: how long to wait for a live owner to finish; 0 refuses at once.
        force: take the lease from a live owner; its next commit then fails. For an owner known to be gone.
        floor: highest fencing number known from elsewhere (LAST); the new one is larger.

    Raises:
        LeaseHeldError: somebody else holds it; names pid, host, since, and the way out.
    """
    fsio.make_dir(paths.leases)
    start = time.monotonic()
    while True:
        with _admission(paths):
            outcome = _try(paths, force, floor)
        if isinstance(outcome, Lease):
            _announce(outcome)
            return outcome
        reason, passing = outcome
        limit = max(wait_seconds, _GRACE_SECONDS if passing else 0.0)
        if time.monotonic() - start >= limit:
            raise LeaseHeldError(reason)
        time.sleep(_POLL_SECONDS)


def read_owner(paths: RunPaths) -> Owner | None:
    """Return the owner record of a run, or None when it is missing, empty or damaged (the lock then decides alone)."""
    try:
        return _parse_owner(fsio.read_bytes(paths.lease_owner, 64 * 1024), str(paths.lease_owner))
    except (OSError, NnxError, TypeError):
        return None


@lru_cache(maxsize=16)  # a commit asks several times
def _parse_owner(data: bytes, source: str) -> Owner:
    return Owner(**codec.parse_json(data, source=source))


def live_owner(paths: RunPaths) -> Owner | None:
    """Return who is writing the run now, as far as can be told without touching the lock; for readers."""
    owner = read_owner(paths)
    return owner if owner and not owner.released and _state(owner) in ("alive", "elsewhere") else None


def is_elsewhere(owner: Owner) -> bool:
    """Whether an owner was on another machine, so that nobody on this one can tell whether it still writes."""
    return _state(owner) == "elsewhere"


@contextlib.contextmanager
def guard(path: Path, seconds: float = _ADMISSION_SECONDS) -> Iterator[None]:
    """Hold a short-lived lock file around a few file operations; raises LeaseHeldError after `seconds`."""
    fd = _open(path)
    try:
        deadline = time.monotonic() + seconds
        while not _lock(fd):
            if time.monotonic() > deadline:
                raise LeaseHeldError(f"{path} has been locked for {seconds:g} s by another process; try again")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        _close(fd)


def _admission(paths: RunPaths) -> contextlib.AbstractContextManager[None]:
    """Serialise acquire and release under one root, so that lock and owner record change together."""
    return guard(paths.leases / ".admission.lock")


def _try(paths: RunPaths, force: bool, floor: int) -> Lease | tuple[str, bool]:
    """Take the lease, or return (reason, whether it is likely to pass within moments)."""
    owner = read_owner(paths)
    state = "free" if owner is None or owner.released else _state(owner)
    fd = _open(paths.lease_lock)
    locked = _lock(fd)
    refusal = None if force else _refusal(paths, owner, state, locked)
    if refusal is not None:
        _close(fd)
        return refusal
    if not locked:  # a dead owner's orphan child holds the old file, or the lease is taken by force
        _close(fd)
        fd = _new_lock_file(paths.lease_lock)
    new = _this_process(max(owner.fencing if owner else 0, floor) + 1)
    try:
        _write_owner(paths, new)
    except BaseException:
        _close(fd)
        raise
    taken_from = f"{owner.where} ({state})" if owner is not None and state != "free" else ""
    _held.add(new.token)
    return Lease(paths, fd, new, taken_from)


def _announce(held: Lease) -> None:
    """Warn of a take-over; a warning turned into an error gives the lease back."""
    if not held.taken_from:
        return
    try:
        warnings.warn(f"taking over the lease of {held.taken_from}", RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        held.release()
        raise


def _refusal(paths: RunPaths, owner: Owner | None, state: str, locked: bool) -> tuple[str, bool] | None:
    name = f"run {paths.run_id!r}"
    if owner is None or state == "free":
        if locked:
            return None
        return f"{name} is held: {paths.lease_lock} is locked by a process without a record; end it and retry", True
    if state == "dead":
        return None
    if state == "elsewhere":
        advice = f"if that machine is gone for good, delete {paths.lease_owner}"
    elif owner.pid == os.getpid() and owner.namespace == _namespace():
        advice = "this very process has it open; close that store first"
    elif state == "restarted":
        return None if locked else (f"{name} is held by {owner.where}, in another container; wait for it to end", True)
    else:
        advice = f"wait for it, stop it (kill {owner.pid}), or use another salt or runs directory"
    return f"{name} is held by {owner.where}; {advice}", False


def _state(owner: Owner) -> str:
    """Return alive | dead | restarted (same kernel, other pid namespace: the lock decides) | elsewhere."""
    if owner.boot != _boot():
        return "dead" if owner.host == socket.gethostname() else "elsewhere"
    if owner.namespace != _namespace():
        return "restarted"
    if owner.pid == os.getpid() and owner.token not in _held:
        return "dead"  # of this process, but released while the disk refused to record it
    return "alive" if _started(owner.pid) == owner.started else "dead"


def _this_process(fencing: int) -> Owner:
    return Owner(
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
        host=socket.gethostname(),
        boot=_boot(),
        namespace=_namespace(),
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        fencing=fencing,
        token=secrets.token_hex(16),
    )


def _started(pid: int) -> int | None:
    """Return a live process's start time in clock ticks (0 where the system does not tell), None when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return 0
    return 0


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _write_owner(paths: RunPaths, owner: Owner) -> None:
    fsio.atomic_write(paths.lease_owner, codec.canonical_json(asdict(owner)) + b"\n")


def _open(path: Path) -> int:
    if path.is_symlink():
        raise UnsafePathError(f"{path} is a symbolic link; remove it")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, fsio.FILE_MODE)
    _open_locks.add(fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        _close(fd)
        raise UnsafePathError(f"{path} is not a regular file; remove it")
    return fd


def _new_lock_file(path: Path) -> int:
    """Put a fresh, locked file in the place of a lock nobody alive holds; the admission lock keeps others out."""
    path.unlink(missing_ok=True)
    fd = _open(path)
    if not _lock(fd):
        _close(fd)
        raise LeaseHeldError(f"{path} was locked by another process at the moment it was renewed; try again")
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close(fd: int) -> None:
    _open_locks.discard(fd)
    os.close(fd)


def _is_file_at(fd: int, path: Path) -> bool:
    held = os.fstat(fd)
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)
