"""Old bytes or new bytes, never a mix; nothing leaves its directory, nothing follows a link, every byte is counted."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnx_jax.core import fsio
from nnx_jax.core.errors import CheckpointError, UnsafePathError

BAD_NAMES = [
    "../x",
    "a/b",
    "",
    "..",
    ".",
    "a*",
    "a?",
    "[a]",
    "../../etc/x",
    "/etc/x",
    "a/../../b",
    "a\\b",
    "a\0b",
    "\0",
    "a\n",
    "a\nb",
    "x" * 300,
    "x" * 4096,
    "x" * 129,
    ".hidden",
    "-rf",
    "a.",
    "a b",
    "~",
    "$HOME",
    "a:b",
    "\u2024\u2024",  # one dot leaders that look like ".."
    "a\u2215b",  # a division slash
    "\uff0e\uff0e",
    "r\u00e9sum\u00e9",
    "\u0430bc",  # a Cyrillic letter
    "a\u202eb",
    "\ud800",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_bad_names_are_refused(name: str) -> None:
    """nnx:B109 (the names) case:J06 and H3: a ValueError before any file is touched."""
    with pytest.raises(ValueError, match="run id .* cannot be a file name here") as caught:
        fsio.safe_name(name, "run id")
    assert isinstance(caught.value, UnsafePathError)
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize("value", [None, 3, b"x", Path("x")])
def test_names_are_text(value: object) -> None:
    with pytest.raises(UnsafePathError, match="tag must be text, found"):
        fsio.safe_name(value)


@pytest.mark.parametrize("name", ["a", "0123456789abcdef", "LAST", "best-loss_v1.2", "x" * 128, "_a"])
def test_good_names_pass(name: str) -> None:
    assert fsio.safe_name(name) == name


@given(st.text(max_size=12))
@example("a/./b")
@settings(max_examples=200, deadline=None)
def test_a_safe_name_is_one_component(name: str) -> None:
    """Whatever passes names a file directly inside its directory, on any system."""
    try:
        fsio.safe_name(name)
    except UnsafePathError:
        return
    assert os.path.normpath(os.path.join("/r", name)) == f"/r/{name}"
    assert name.isascii()
    assert "/" not in name


@pytest.mark.parametrize(
    "part",
    ["..", ".", "", "a/b", "/etc", "a\0", "a*", "a?b", "[x]", "a\\b", "\u2024\u2024", "x" * 300, "a\nb"],
    ids=ascii,
)
def test_safe_join_refuses_parts_that_leave(tmp_path: Path, part: str) -> None:
    """case:J06 at the one join."""
    with pytest.raises(UnsafePathError, match="use a plain ASCII file name"):
        fsio.safe_join(tmp_path, "ok", part)


def test_safe_join_refuses_links_at_every_level(tmp_path: Path) -> None:
    """case:J06: a link inside the root that points outside; the root itself may be one."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / "a").mkdir(parents=True)
    (root / "a" / "link").symlink_to(outside)
    (root / "dangling").symlink_to("/nonexistent")
    assert fsio.safe_join(root, "a", "new", "newer") == root / "a" / "new" / "newer"
    for parts in (("a", "link"), ("a", "link", "x"), ("dangling",)):
        with pytest.raises(UnsafePathError, match="is a symbolic link"):
            fsio.safe_join(root, *parts)
    (tmp_path / "alias").symlink_to(root)
    assert fsio.safe_join(tmp_path / "alias", "a") == tmp_path / "alias" / "a"
    assert os.listdir(outside) == []


def test_safe_join_refuses_case_twins(tmp_path: Path) -> None:
    """H3: `last` and `LAST` are one file on many disks."""
    (tmp_path / "LAST").write_bytes(b"")
    assert fsio.safe_join(tmp_path, "LAST") == tmp_path / "LAST"
    with pytest.raises(UnsafePathError, match="differs only in case from 'LAST'"):
        fsio.safe_join(tmp_path, "last")


# Atomic write ----------------------------------------------------------------------------------------------------


def fail_with(number: int) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_atomic_write_makes_a_private_file(tmp_path: Path) -> None:
    """0600 whatever the umask says, the old file's mode included."""
    file = tmp_path / "f"
    for mask in (0o000, 0o077, 0o777):
        old = os.umask(mask)
        try:
            fsio.atomic_write(file, b"x" * mask)
        finally:
            os.umask(old)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_bytes() == b"x" * mask
    fsio.atomic_write(file, b"", mode=0o644)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("call", ["replace", "write", "fsync", "fchmod"])
def test_a_failed_write_keeps_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """nnx:B105 nnx:S31: the old bytes remain, no temporary remains, the original error comes out with the path."""
    file = tmp_path / "idps.csv"
    fsio.atomic_write(file, b"old")
    monkeypatch.setattr(fsio.os, call, fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device: .*idps.csv") as caught:
        fsio.atomic_write(file, b"new")
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert not isinstance(caught.value, fsio.NotDurableError)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["idps.csv"]


def test_a_failing_cleanup_does_not_hide_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B106: the unlink fails too; the rename's error is the one that comes out."""
    file = tmp_path / "f"
    fsio.atomic_write(file, b"old")
    first = OSError(errno.EIO, "the first error")

    def replace(*args: object, **kwargs: object) -> None:
        raise first

    monkeypatch.setattr(fsio.os, "replace", replace)
    monkeypatch.setattr(fsio.os, "unlink", fail_with(errno.EROFS))
    with pytest.raises(OSError, match="the first error") as caught:
        fsio.atomic_write(file, b"new")
    assert caught.value is first
    assert file.read_bytes() == b"old"


def test_interrupt_removes_the_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fsio.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        fsio.atomic_write(tmp_path / "f", b"new")
    assert os.listdir(tmp_path) == []


def test_a_kill_strands_a_temporary_that_is_never_reused(tmp_path: Path) -> None:
    """nnx:B107 nnx:S32: the stranded `.name.random` does no harm and no later write touches it."""
    file = tmp_path / "LAST"
    fsio.atomic_write(file, b"old")
    code = "import os, sys; from nnx_jax.core import fsio; os.replace = lambda *a, **k: os.kill(os.getpid(), 9); "
    code += "fsio.atomic_write(sys.argv[1], b'half-born')"
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == -9
    (stray,) = [name for name in os.listdir(tmp_path) if name != "LAST"]
    assert stray.startswith(".LAST.")
    assert file.read_bytes() == b"old"
    fsio.atomic_write(file, b"new")
    assert file.read_bytes() == b"new"
    assert (tmp_path / stray).read_bytes() == b"half-born"


def test_replaced_but_not_durable_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller must know that the new bytes are visible: it may not go on as if the old ones stood."""
    file = tmp_path / "LAST"
    fsio.atomic_write(file, b"old")
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(fsio.os, "fsync", fsync)
    with pytest.raises(fsio.NotDurableError, match="replaced, but its directory cannot be synced.*LAST"):
        fsio.atomic_write(file, b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["LAST"]


def test_the_order_is_write_sync_rename_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("open", "write", "fsync", "replace"):
        real = getattr(os, name)

        def traced(*args: object, _name: str = name, _real: Callable[..., object] = real, **kwargs: object) -> object:
            if _name == "fsync":
                events.append("fsync dir" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "fsync file")  # type: ignore[arg-type]
            else:
                events.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(fsio.os, name, traced)
    fsio.atomic_write(tmp_path / "f", b"x")
    assert events == ["open", "open", "write", "fsync file", "replace", "fsync dir"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(fsio.os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    fsio.atomic_write(tmp_path / "f", b"0123456789")
    assert fsio.append_bytes(tmp_path / "f", b"abcd") == 14
    assert (tmp_path / "f").read_bytes() == b"0123456789abcd"


def test_a_link_at_the_target_is_replaced_not_followed(tmp_path: Path) -> None:
    """H5: the file outside keeps its bytes."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    link = tmp_path / "LAST"
    link.symlink_to(outside)
    fsio.atomic_write(link, b"new")
    assert outside.read_bytes() == b"precious"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


def test_atomic_write_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        fsio.atomic_write(tmp_path / "missing" / "f", b"x")
    (tmp_path / "dir").mkdir()
    with pytest.raises(IsADirectoryError, match="dir"):
        fsio.atomic_write(tmp_path / "dir", b"x")
    assert os.listdir(tmp_path) == ["dir"]
    fsio.atomic_write(tmp_path / ("n" * 255), b"long names still get a temporary")


@pytest.mark.parametrize("limit", [0, 1, 4095, 4096, 9999])
def test_a_real_size_limit_keeps_the_old_bytes(tmp_path: Path, limit: int) -> None:
    """D2 on one file: the kernel itself refuses the write (RLIMIT_FSIZE), old bytes stay, nothing is left behind."""
    file, log = tmp_path / "f", tmp_path / "log"
    fsio.atomic_write(file, b"old")
    fsio.append_bytes(log, b"")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            fsio.atomic_write(file, b"x" * 10_000)
        with pytest.raises(OSError, match="File too large"):
            fsio.append_bytes(log, b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(file)
    assert file.read_bytes() == b"old"
    assert log.read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == ["f", "log"]


# Append, truncate ------------------------------------------------------------------------------------------------


def test_parts_make_one_file(tmp_path: Path) -> None:
    """Parts are taken one by one; one that fails leaves the old bytes and no temporary."""
    file = tmp_path / "f"
    fsio.atomic_write(file, (b"ab" * count for count in range(4)))
    assert file.read_bytes() == b"ab" * 6
    with pytest.raises(ZeroDivisionError):
        fsio.atomic_write(file, (bytes(1 // count) for count in (1, 0)))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"ab" * 6)]


def test_a_new_file_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Immutable files: the second writer of a name fails, and a failed first one leaves no half file."""
    file = tmp_path / "chunk"
    with monkeypatch.context() as patch:
        patch.setattr(fsio.os, "write", fail_with(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left.*chunk"):
            fsio.create_file(file, b"first")
    assert not file.exists()
    fsio.create_file(file, b"first")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for path in (file, tmp_path / "link"):
        if path != file:
            path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FileExistsError):
            fsio.create_file(path, b"second")
    assert file.read_bytes() == b"first"
    assert not (tmp_path / "elsewhere").exists()


def test_append_returns_the_new_size(tmp_path: Path) -> None:
    file = tmp_path / "h"
    assert fsio.append_bytes(file, b"abc") == 3
    assert fsio.append_bytes(file, b"") == 3
    assert fsio.append_bytes(file, b"de") == 5
    assert file.read_bytes() == b"abcde"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_append_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """nnx:S31 for the history: also when some bytes were already written."""
    file = tmp_path / "h"
    fsio.append_bytes(file, b"abc")
    real, calls = getattr(os, call), []

    def failing(fd: int, *data: bytes) -> int:
        calls.append(fd)
        if call == "write" and len(calls) == 1:
            return real(fd, bytes(data[0][:2]))
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fsio.os, call, failing)
    with pytest.raises(OSError, match=f"{os.strerror(number)}: .*/h") as caught:
        fsio.append_bytes(file, b"defg")
    assert caught.value.errno == number
    assert file.read_bytes() == b"abc"


def test_truncate_only_shortens(tmp_path: Path) -> None:
    file = tmp_path / "h"
    fsio.append_bytes(file, b"abcdef")
    fsio.truncate(file, 6)
    fsio.truncate(file, 4)
    assert file.read_bytes() == b"abcd"
    for size in (5, -1):
        with pytest.raises(OSError, match=f"cannot cut a file of 4 bytes to {size}: .*/h"):
            fsio.truncate(file, size)
    assert file.read_bytes() == b"abcd"


# Links and special files -----------------------------------------------------------------------------------------


READERS: dict[str, Callable[[Path], object]] = {
    "read_bytes": fsio.read_bytes,
    "digest_file": fsio.digest_file,
    "sync_file": fsio.sync_file,
    "append_bytes": lambda path: fsio.append_bytes(path, b"x"),
    "truncate": lambda path: fsio.truncate(path, 0),
}


@pytest.mark.parametrize("reader", READERS)
def test_links_and_devices_are_refused(tmp_path: Path, reader: str) -> None:
    """H5: symbolic link, hard link, FIFO (without hanging), socket, directory, /proc link; the target is untouched."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    call = READERS[reader]
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(UnsafePathError, match="link is a symbolic link; it is never followed"):
        call(link)
    with target.open("rb") as handle, pytest.raises(UnsafePathError, match="is a symbolic link"):
        call(Path(f"/proc/self/fd/{handle.fileno()}"))
    os.link(target, tmp_path / "hard")
    with pytest.raises(UnsafePathError, match="hard has 2 hard links"):
        call(tmp_path / "hard")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsafePathError, match="fifo is not a regular file"):
        call(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        with pytest.raises(UnsafePathError, match="sock is not a regular file"):
            call(tmp_path / "sock")
    (tmp_path / "dir").mkdir()
    with pytest.raises((UnsafePathError, IsADirectoryError), match="dir"):
        call(tmp_path / "dir")
    assert target.read_bytes() == b"precious"


def test_user_files_may_be_links_but_not_devices(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.link(tmp_path / "real", tmp_path / "hard")
    assert fsio.read_bytes(tmp_path / "link", follow=True) == fsio.read_bytes(tmp_path / "hard", follow=True) == b"x"
    os.mkfifo(tmp_path / "fifo")
    for special in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UnsafePathError, match="is not a regular file"):
            fsio.read_bytes(special, follow=True)


def test_the_size_limit_counts_bytes_read(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 100)
    assert len(fsio.read_bytes(file, 100)) == 100
    with pytest.raises(OSError, match="100 bytes, more than the limit of 99: .*/f") as caught:
        fsio.read_bytes(file, 99)
    assert caught.value.errno == errno.EFBIG


# Trees -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory like a generation: nested, with an empty file and two files of equal content."""
    root = tmp_path / "gen"
    for name, data in {
        "host.json": b'{"step": 3}',
        "state/_METADATA": b"meta",
        "state/d/a1": bytes(range(256)),
        "state/d/a2": bytes(range(256)),
        "state/empty": b"",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_digest_tree_by_hand(tree: Path) -> None:
    found = fsio.digest_tree(tree)
    assert list(found) == ["host.json", "state/_METADATA", "state/d/a1", "state/d/a2", "state/empty"]
    assert found["state/_METADATA"] == (hashlib.sha256(b"meta").hexdigest(), 4)
    assert found["state/empty"] == (hashlib.sha256().hexdigest(), 0)
    assert fsio.list_tree(tree) == {name: size for name, (_, size) in found.items()}
    assert fsio.digest_file(tree / "state" / "d" / "a1") == found["state/d/a1"]
    with pytest.raises(UnsafePathError, match="holds more than 4 files"):
        fsio.digest_tree(tree, max_files=4)


def test_every_bit_flip_is_seen(tree: Path) -> None:
    """D6 and the root of case:I04: each bit of each file, one at a time."""
    good = fsio.digest_tree(tree)
    flips = 0
    for name in good:
        path = tree / name
        data = path.read_bytes()
        for position in range(0, len(data) * 8, 7 if len(data) > 64 else 1):
            changed = bytearray(data)
            changed[position // 8] ^= 1 << position % 8
            path.write_bytes(changed)
            found = fsio.digest_tree(tree)
            assert [key for key in good if found[key] != good[key]] == [name]
            flips += 1
        path.write_bytes(data)
    assert flips > 500
    assert fsio.digest_tree(tree) == good


def test_truncate_extend_delete_add_swap_are_seen(tree: Path) -> None:
    """D7 on every file; two files of equal content may be swapped, every other change shows."""
    good = fsio.digest_tree(tree)
    copy = tree.with_name("copy")

    def changed(edit: Callable[[Path], object]) -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tree, copy)
        edit(copy)
        return fsio.digest_tree(copy) != good

    assert not changed(lambda root: None)
    for name in good:
        size = good[name][1]
        if size:
            assert changed(lambda root, n=name, s=size: os.truncate(root / n, s // 2))
        assert changed(lambda root, n=name, s=size: os.truncate(root / n, s + 1))
        assert changed(lambda root, n=name: (root / n).unlink())
        assert changed(lambda root, n=name: (root / n).with_name("extra").write_bytes(b""))
        assert changed(lambda root, n=name: (root / n).rename(root / "moved"))
        for other in good:
            if good[other] != good[name]:
                assert changed(lambda root, a=name, b=other: swap(root / a, root / b))


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


PLANTS: dict[str, Callable[[Path], object]] = {
    "link to a file": lambda at: at.symlink_to("/etc/hostname"),
    "link to a directory": lambda at: at.symlink_to("/etc"),
    "dangling link": lambda at: at.symlink_to("/nonexistent"),
    "link inside": lambda at: at.symlink_to("a1"),
    "hard link": lambda at: os.link(at.with_name("a1"), at),
    "fifo": os.mkfifo,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_trees_with_links_or_devices_are_refused(tree: Path, plant: str) -> None:
    """H5: also deep inside; the walk neither follows nor hangs."""
    PLANTS[plant](tree / "state" / "d" / "planted")
    for walk in (fsio.digest_tree, fsio.list_tree, fsio.sync_tree):
        with pytest.raises(UnsafePathError, match="symbolic link|hard links|not a regular file"):
            walk(tree)


def test_a_linked_root_is_refused(tree: Path) -> None:
    link = tree.with_name("link")
    link.symlink_to(tree)
    for walk in (fsio.digest_tree, fsio.sync_tree):
        with pytest.raises(UnsafePathError, match="link is a symbolic link"):
            walk(link)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_swap_between_look_and_open_is_seen(tree: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """H5: the entry was a real file when looked at and is a link when opened."""
    outside = tree.with_name("outside")
    outside.mkdir()
    (outside / "a1").write_bytes(b"secret")
    victim = tree / "state" / "d" / "a1" if what == "file" else tree / "state" / "d"
    real = os.stat

    def stat_then_swap(path: object, *args: object, **kwargs: object) -> os.stat_result:
        info = real(path, *args, **kwargs)  # type: ignore[arg-type, call-overload]
        if path == victim.name and not victim.is_symlink():
            victim.rename(tree.with_name("moved"))
            victim.symlink_to(outside / "a1" if what == "file" else outside)
        return info

    monkeypatch.setattr(fsio.os, "stat", stat_then_swap)
    with pytest.raises(UnsafePathError, match=f"{victim.name} is a symbolic link"):
        fsio.digest_tree(tree)


def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the path of everything that is fsynced from now on."""
    order: list[Path] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(fsio.os, "fsync", fsync)
    return order


def test_sync_tree_covers_everything_bottom_up(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and directory once, children before their directory, the root's parent last; and private modes."""
    old = os.umask(0)
    (tree / "state" / "late").mkdir(mode=0o755)
    (tree / "state" / "late" / "f").touch(mode=0o666)
    os.umask(old)
    order = synced(monkeypatch)
    fsio.sync_tree(tree)
    everything = [tree, *tree.rglob("*")]
    assert sorted(order) == sorted([*everything, tree.parent])
    assert order[-1] == tree.parent
    for path in everything:
        assert order.index(path) < order.index(path.parent)
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_sync_tree_can_leave_modes_alone(tree: Path) -> None:
    os.chmod(tree / "host.json", 0o640)
    fsio.sync_tree(tree, private=False)
    assert stat.S_IMODE((tree / "host.json").stat().st_mode) == 0o640


def test_sync_dir_and_sync_tree_name_the_path(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsio.sync_dir(tree)
    monkeypatch.setattr(fsio.os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output error: .*/state"):
        fsio.sync_dir(tree / "state")
    with pytest.raises(OSError, match="Input/output error: .*/gen/"):
        fsio.sync_tree(tree)


# Directories -----------------------------------------------------------------------------------------------------


def test_make_dir_is_private_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = synced(monkeypatch)
    made = fsio.make_dir(tmp_path / "a" / "b")
    assert made == tmp_path / "a" / "b"
    assert order == [tmp_path, tmp_path / "a"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent)} == {0o700}
    assert fsio.make_dir(made) == made
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(UnsafePathError, match="link is a symbolic link"):
        fsio.make_dir(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        fsio.make_dir(tmp_path / "file")


def test_replace_dir_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp" / ".partial").mkdir(parents=True)
    (tmp_path / "final").mkdir()
    order = synced(monkeypatch)
    fsio.replace_dir(tmp_path / "tmp" / ".partial", tmp_path / "final" / "1")
    assert (tmp_path / "final" / "1").is_dir()
    assert order == [tmp_path / "final", tmp_path / "tmp"]
    (tmp_path / "tmp" / ".partial").mkdir()
    with pytest.raises(FileExistsError, match="already exists.*final/1"):
        fsio.replace_dir(tmp_path / "tmp" / ".partial", tmp_path / "final" / "1")


def test_remove_tree_goes_through_one_rename(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that dies in the middle leaves trash, never half a generation under its own name."""
    monkeypatch.setattr(fsio.shutil, "rmtree", fail_with(errno.EIO))
    with pytest.raises(OSError, match=rf"Input/output error: '{tree.parent}/.trash-gen-\w+'"):
        fsio.remove_tree(tree)
    monkeypatch.undo()
    (trash,) = os.listdir(tree.parent)
    assert trash.startswith(".trash-gen-")


def test_remove_tree_follows_nothing(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (tree / "link").symlink_to(outside)
    (tmp_path / "alias").symlink_to(tree)
    with pytest.raises(UnsafePathError, match="alias is a symbolic link; it is not removed"):
        fsio.remove_tree(tmp_path / "alias")
    with pytest.raises(NotADirectoryError, match="precious"):
        fsio.remove_tree(outside / "precious")
    assert fsio.remove_tree(tree) is True
    assert fsio.remove_tree(tree) is False
    assert (outside / "precious").exists()


def test_disk_free_is_in_bytes(tmp_path: Path) -> None:
    info = os.statvfs(tmp_path)
    assert abs(fsio.disk_free(tmp_path) - info.f_bavail * info.f_frsize) < 2**30
    with pytest.raises(FileNotFoundError, match="missing"):
        fsio.disk_free(tmp_path / "missing")


@pytest.fixture(autouse=True)
def _no_handle_is_left_open() -> Iterator[None]:
    """Every call closes what it opened, on success and on failure."""
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) <= len(before)
