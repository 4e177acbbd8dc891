"""Every durable byte: atomic replace, fsync, digests, and the one place where names become paths.

Links and special files are never followed below a run's root: they raise UnsafePathError. Every other failure is the
OSError of the system call, with the path filled in.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from nnx_jax.core.errors import UnsafePathError

PathLike = str | os.PathLike[str]

FILE_MODE, DIR_MODE = 0o600, 0o700
TRASH_PREFIX = ".trash-"
READ_LIMIT = 16 * 2**20
MAX_FILES = 100_000
_CHUNK = 2**20
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?", re.ASCII)
_BAD_IN_COMPONENT = re.compile(r"[^\x20-\x7e]|[/\\*?\[\]]")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}")
_OPEN_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a FIFO must not hang the open
_OPEN_DIR = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY


class NotDurableError(OSError):
    """The new bytes are in place, but their directory could not be synced: a power loss may bring back the old ones."""


@contextlib.contextmanager
def _naming(path: PathLike) -> Iterator[None]:
    """Fill the path into an OSError that has none (write, fsync) or only a part (calls relative to a directory)."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not os.path.isabs(str(error.filename)):
            error.filename = os.fspath(path)
            del error.filename2  # of a rename: the target's bare name; None would be printed
        raise


# Names -----------------------------------------------------------------------------------------------------------


def safe_name(text: object, what: str = "tag") -> str:
    """Return `text` when it can be a run id or tag: ASCII letters, digits, `_`, `-`, inner dots; 1 to 128 characters.

    Everything else (separators, `..`, glob characters, NUL, leading dot or dash, non-ASCII look-alikes) raises
    UnsafePathError, which is a ValueError, before any file is touched.
    """
    if not isinstance(text, str):
        raise UnsafePathError(f"{what} must be text, found {type(text).__name__} {text!r:.80}")
    if not _NAME.fullmatch(text):
        raise UnsafePathError(
            f"{what} {text!r:.200} cannot be a file name here; use 1 to 128 of A-Z a-z 0-9 _ - and inner dots"
        )
    return text


def safe_join(root: PathLike, *parts: str) -> Path:
    """Join single path components below `root`; nothing leaves it and no existing component is a link.

    `root` itself may be a link (the user's choice); everything below it may not. A new name that differs from an
    existing one only in case is refused: it would be the same file on other disks.
    """
    path = Path(root)
    for part in parts:
        if not isinstance(part, str) or part in ("", ".", "..") or len(part) > 255 or _BAD_IN_COMPONENT.search(part):
            raise UnsafePathError(f"path part {part!r:.200} could leave {os.fspath(root)}; use a plain ASCII file name")
        parent, path = path, path / part
        try:
            info = path.lstat()
        except FileNotFoundError:
            _refuse_case_twin(parent, part)
            continue
        if stat.S_ISLNK(info.st_mode):
            raise UnsafePathError(f"{path} is a symbolic link; replace it by the file or directory it stands for")
    return path


def _refuse_case_twin(parent: Path, name: str) -> None:
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return
    folded = name.casefold()
    for other in names:
        if other.casefold() == folded and other != name:
            raise UnsafePathError(f"{parent / name} differs only in case from {other!r}; use another name")


# Reading ---------------------------------------------------------------------------------------------------------


def _check_regular(path: PathLike, info: os.stat_result, *, links: bool = False) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise UnsafePathError(f"{os.fspath(path)} is not a regular file")
    if info.st_nlink > 1 and not links:
        raise UnsafePathError(f"{os.fspath(path)} has {info.st_nlink} hard links; another name could change it")


def _open_no_follow(path: PathLike, flags: int, mode: int = FILE_MODE, dir_fd: int | None = None) -> int:
    """Open without following a link at the last component; `path` is for the message when `dir_fd` is given."""
    name = os.path.basename(os.fspath(path)) if dir_fd is not None else path
    try:
        with _naming(path):
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(name, dir_fd)):
            raise UnsafePathError(f"{os.fspath(path)} is a symbolic link; it is never followed") from error
        if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader
            raise UnsafePathError(f"{os.fspath(path)} is not a regular file") from error
        raise


def _is_link(name: PathLike, dir_fd: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def read_bytes(path: PathLike, limit: int = READ_LIMIT, *, follow: bool = False) -> bytes:
    """Read a whole regular file of at most `limit` bytes.

    `follow=True` is for files the user names (a configuration): links are then allowed. Raises UnsafePathError for
    links, hard links, FIFOs and devices; OSError (EFBIG) above the limit; OSError for everything else.
    """
    fd = os.open(path, _OPEN_READ) if follow else _open_no_follow(path, _OPEN_READ)
    try:
        info = os.fstat(fd)
        _check_regular(path, info, links=follow)
        with _naming(path):
            chunks, total = [], 0
            while total <= limit and (chunk := os.read(fd, min(_CHUNK, limit + 1 - total))):
                chunks.append(chunk)
                total += len(chunk)
        if total > limit:
            raise OSError(
                errno.EFBIG, f"{max(info.st_size, total)} bytes, more than the limit of {limit}", os.fspath(path)
            )
        return b"".join(chunks)
    finally:
        os.close(fd)


def _digest_fd(fd: int) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while chunk := os.read(fd, _CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def digest_file(path: PathLike, *, follow: bool = False) -> tuple[str, int]:
    """Return (SHA-256 as 64 hex digits, size in bytes) of a regular file; links are refused unless `follow` (see
    `read_bytes`)."""
    fd = os.open(path, _OPEN_READ) if follow else _open_no_follow(path, _OPEN_READ)
    try:
        _check_regular(path, os.fstat(fd), links=follow)
        with _naming(path):
            return _digest_fd(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _directory(path: PathLike, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a handle of a real directory (no link)."""
    fd = _open_no_follow(path, _OPEN_DIR, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _walk(root: PathLike, dir_fd: int | None = None) -> Iterator[tuple[Path, int, bool]]:
    """Yield (path, handle, is directory), children before their directory, sorted by name; links and devices refused.

    Every step is relative to an open directory handle, so that a directory swapped for a link in the middle is seen.
    """
    with _directory(root, dir_fd) as fd:
        with _naming(root):
            names = sorted(os.listdir(fd))
        for name in names:
            path = Path(root, name)
            with _naming(path):
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                yield from _walk(path, fd)
                continue
            if stat.S_ISLNK(info.st_mode):
                raise UnsafePathError(f"{path} is a symbolic link; it is never followed")
            _check_regular(path, info)
            child = _open_no_follow(path, _OPEN_READ, dir_fd=fd)
            try:
                _check_regular(path, os.fstat(child))
                yield path, child, False
            finally:
                os.close(child)
        yield Path(root), fd, True


def list_tree(root: PathLike, *, max_files: int = MAX_FILES) -> dict[str, int]:
    """Return {relative POSIX path: size in bytes} of every file below `root`; links and special files are refused."""
    return {name: os.fstat(fd).st_size for name, fd in _files(root, max_files)}


def digest_tree(root: PathLike, *, max_files: int = MAX_FILES) -> dict[str, tuple[str, int]]:
    """Return {relative POSIX path: (SHA-256 hex, size)} of every file below `root`; links and devices are refused."""
    found = {}
    for name, fd in _files(root, max_files):
        with _naming(Path(root, name)):
            found[name] = _digest_fd(fd)
    return found


def _files(root: PathLike, max_files: int) -> Iterator[tuple[str, int]]:
    base, count = Path(root), 0
    for path, fd, is_dir in _walk(root):
        if not is_dir:
            count += 1
            if count > max_files:
                raise UnsafePathError(f"{base} holds more than {max_files} files")
            yield path.relative_to(base).as_posix(), fd


# Writing ---------------------------------------------------------------------------------------------------------


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def atomic_write(path: PathLike, data: bytes | Iterable[bytes], *, mode: int = FILE_MODE) -> None:
    """Replace the file by `data`: after a crash at any instant it holds the old bytes or the new ones, never a mix.

    Data given in parts is written part by part, so that a file larger than the memory can be made.

    A failure keeps the old bytes and removes the temporary (a kill may strand it as `.<name>.<random>`, never reused).
    NotDurableError: the replace was done, only its directory entry could not be synced.
    """
    path = Path(path)
    temporary = f".{path.name[:200]}.{secrets.token_hex(6)}"
    with _naming(path), _parent(path) as parent:
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent
        )
        try:
            try:
                os.fchmod(fd, mode)  # the umask may have taken bits away
                for part in (data,) if isinstance(data, bytes) else data:
                    _write_all(fd, part)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.unlink(temporary, dir_fd=parent)
            raise
        try:
            os.fsync(parent)
        except OSError as error:
            raise NotDurableError(
                error.errno, f"replaced, but its directory cannot be synced: {error.strerror}", str(path)
            ) from error


def is_temporary(path: PathLike) -> bool:
    """Return whether the name is one that `atomic_write` gives a temporary; a kill may have stranded it."""
    return _TEMPORARY.fullmatch(os.path.basename(os.fspath(path))) is not None


@contextlib.contextmanager
def _parent(path: Path) -> Iterator[int]:
    fd = os.open(path.parent, _OPEN_DIR)
    try:
        yield fd
    finally:
        os.close(fd)


def create_file(path: PathLike, data: bytes) -> None:
    """Write a new file (0600) without syncing it; `sync_file` and `sync_dir` follow when somebody counts on it.

    FileExistsError when there is one already: it is never written over. A failed write leaves no file.
    """
    fd = _open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with _naming(path):
            os.fchmod(fd, FILE_MODE)  # the umask may have taken bits away
            _write_all(fd, data)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def sync_file(path: PathLike) -> None:
    """Make the bytes of an existing regular file survive a power loss."""
    fd = _open_no_follow(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(fd))
        with _naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def append_bytes(path: PathLike, data: bytes) -> int:
    """Append, sync, and return the file's new size; a failed append is cut off again. Creates the file (0600)."""
    path = Path(path)
    new = not os.path.lexists(path)
    fd = _open_no_follow(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        _check_regular(path, info)
        with _naming(path):
            try:
                _write_all(fd, data)
                os.fsync(fd)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    os.ftruncate(fd, info.st_size)
                raise
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if new:
        sync_dir(path.parent)
    return size


def truncate(path: PathLike, size: int) -> None:
    """Cut the file to `size` bytes and sync it; asking for more bytes than there are is an OSError (EINVAL)."""
    fd = _open_no_follow(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        _check_regular(path, info)
        if not 0 <= size <= info.st_size:
            raise OSError(errno.EINVAL, f"cannot cut a file of {info.st_size} bytes to {size}", os.fspath(path))
        with _naming(path):
            os.ftruncate(fd, size)
            os.fsync(fd)
    finally:
        os.close(fd)


def sync_dir(path: PathLike) -> None:
    """Make the names in a directory (created, renamed, removed) survive a power loss."""
    with _naming(path):
        fd = os.open(path, _OPEN_DIR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_tree(root: PathLike, *, private: bool = True) -> None:
    """Sync every file and directory below `root` bottom-up, then the parent of `root`; links are refused.

    `private` also sets 0600 and 0700 on the way, for files written by a library that uses the umask.
    """
    for path, fd, is_dir in _walk(root):
        with _naming(path):
            if private:
                os.fchmod(fd, DIR_MODE if is_dir else FILE_MODE)
            os.fsync(fd)
    sync_dir(Path(os.path.abspath(root)).parent)


def make_dir(path: PathLike) -> Path:
    """Make a private directory (0700) and its missing parents, each synced; an existing real directory is kept."""
    path = Path(path)
    if path.is_symlink():
        raise UnsafePathError(f"{path} is a symbolic link; give the directory it stands for")
    if path.is_dir():
        return path
    if not path.parent.is_dir():
        make_dir(path.parent)
    try:
        os.mkdir(path, DIR_MODE)
    except FileExistsError:
        if not path.is_dir() or path.is_symlink():
            raise
    sync_dir(path.parent)
    return path


def replace_dir(temporary: PathLike, final: PathLike) -> None:
    """Rename a finished directory into place and sync the parents; an existing `final` is a FileExistsError."""
    if os.path.lexists(final):  # rename would silently take the place of an empty directory
        raise FileExistsError(errno.EEXIST, "already exists; a finished directory is never replaced", os.fspath(final))
    os.rename(temporary, final)
    source, target = Path(os.path.abspath(temporary)).parent, Path(os.path.abspath(final)).parent
    sync_dir(target)
    if source != target:
        sync_dir(source)


def remove_tree(path: PathLike) -> bool:
    """Remove a directory: first out of the way by one rename, so that a crash leaves all of it or only trash.

    Returns False when there is nothing to remove. A link or a file is refused.
    """
    path = Path(path)
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(info.st_mode):
        raise UnsafePathError(f"{path} is a symbolic link; it is not removed")
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    trash = path.with_name(f"{TRASH_PREFIX}{path.name[:200]}-{secrets.token_hex(6)}")
    os.rename(path, trash)
    sync_dir(path.parent)
    with _naming(trash):
        shutil.rmtree(trash)
    return True


def disk_free(path: PathLike) -> int:
    """Return the bytes an ordinary user may still write on the file system of `path`."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize
