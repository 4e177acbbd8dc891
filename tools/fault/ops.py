"""What the shim is told and what it wrote down: faults, operations, and the log between them."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OPS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "truncate", "link", "symlink", "copy")
MODES = ("count", "kill before", "kill after", "fail once", "fail always", "torn", "short")
FLAGS = ("done", "killed before", "killed after", "failed", "torn", "shortened")
_RECORD = struct.Struct("=8I4q")  # struct record in shim.c
_RANDOM = re.compile(r"(?<=\.)[0-9a-f]{12}\b|(?<=-)[0-9a-f]{12}\b|[0-9a-f]{32}")


@dataclass(frozen=True)
class Fault:
    """What happens at operation number `at` among those that `ops` and `pattern` let through.

    Attributes:
        mode: one of MODES. "torn" writes `part` of the bytes and kills; "short" writes them and returns.
        at: 1-based; counts only matching operations.
        error: errno for the "fail" modes.
        part: share of the bytes a torn or short write writes; -1 is all but one byte.
        ops: names of OPS that count; empty means all (for "torn" and "short" only writes).
        pattern: shell pattern on the path relative to the root ("*" also matches "/"); empty means all.
    """

    mode: str = "count"
    at: int = 0
    error: int = 0
    part: float = 0.0
    ops: tuple[str, ...] = ()
    pattern: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Fault:
        return cls(**{**obj, "ops": tuple(obj["ops"])})


@dataclass(frozen=True)
class Op:
    """One logged operation; paths are relative to the root ("." is the root itself).

    Attributes:
        flag: one of FLAGS. error: errno, 0 when it worked. created, truncated: what an open did.
        offset, asked, done: of a write; `offset` is the new size for a truncate.
        data: the bytes written, or a link's text.
    """

    op: str
    path: str
    path2: str = ""
    flag: str = "done"
    error: int = 0
    created: bool = False
    truncated: bool = False
    offset: int = 0
    asked: int = 0
    done: int = 0
    data: bytes = field(default=b"", repr=False)

    @property
    def template(self) -> str:
        """The path with random parts as `*`, so that the same operation of another run matches."""
        return _RANDOM.sub("*", self.path2 or self.path)


class Shim:
    """The preloaded library of this process."""

    def __init__(self, library: str) -> None:
        self._lib = ctypes.CDLL(library)
        self._lib.fault_arm.argtypes = [
            ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_double, ctypes.c_uint, ctypes.c_char_p,
            ctypes.c_int, ctypes.c_int,
        ]  # fmt: skip
        self._lib.fault_disarm.restype = ctypes.c_long
        self._log = -1

    def arm(self, root: Path, fault: Fault, log: Path, *, data: bool = False) -> None:
        """Start counting below `root` and writing to `log` (outside of it); `data` logs written bytes too."""
        self.disarm()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        names = fault.ops or (("write",) if fault.mode in ("torn", "short") else OPS)
        mask = sum(1 << OPS.index(name) for name in names)
        self._lib.fault_arm(
            os.fsencode(root.resolve()), MODES.index(fault.mode), fault.at, fault.error, fault.part, mask,
            fault.pattern.encode(), self._log, data,
        )  # fmt: skip

    def disarm(self) -> int:
        """Stop; returns how many operations matched."""
        seen = int(self._lib.fault_disarm())
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        return seen


def read_log(log: Path, root: Path) -> list[Op]:
    """Return the operations in the order they happened; a record cut off by the kill is left out."""
    data, base, at = log.read_bytes(), str(root.resolve()), 0
    found: list[Op] = []

    def relative(path: str) -> str:
        return path.removeprefix(base).lstrip("/") or "."

    while at + _RECORD.size <= len(data):
        op, flag, error, created, truncated, n1, n2, _, offset, asked, done, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        path, path2 = (os.fsdecode(data[a:b]) for a, b in ((at, at + n1), (at + n1, at + n1 + n2)))
        at += n1 + n2
        found.append(
            Op(
                OPS[op], relative(path), relative(path2) if n2 else "", FLAGS[flag], error, bool(created),
                bool(truncated), offset, asked, done, data[at : at + size],
            )
        )  # fmt: skip
        at += size
    return found
