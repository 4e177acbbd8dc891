"""A scenario without JAX, for testing the shim itself: one call of every kind, and what it returned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.fault.ops import Fault, Shim


def calls(root: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Return (operation, call) in order; each makes exactly one operation below `root`, the comments say which."""
    a, b, sub = root / "a", root / "b", root / "sub"
    held: dict[str, int] = {}

    def opened(name: str, path: Path, flags: int) -> None:
        held[name] = os.open(path, flags, 0o600)

    directory = os.open(root, os.O_RDONLY)
    return [
        ("open", lambda: opened("a", a, os.O_RDWR | os.O_CREAT)),
        ("write", lambda: os.write(held["a"], b"0123456789")),
        ("write", lambda: os.pwrite(held["a"], b"XY", 2)),
        ("write", lambda: os.writev(held["a"], [b"ab", b"cd"])),
        ("write", lambda: os.pwritev(held["a"], [b"p", b"q"], 0)),
        ("fsync", lambda: os.fsync(held["a"])),
        ("fsync", lambda: os.fdatasync(held["a"])),
        ("truncate", lambda: os.ftruncate(held["a"], 12)),
        ("truncate", lambda: os.truncate(a, 8)),
        ("mkdir", lambda: os.mkdir(sub)),
        ("mkdir", lambda: os.mkdir("sub2", dir_fd=directory)),
        ("link", lambda: os.link(a, root / "hard")),
        ("symlink", lambda: os.symlink("a", root / "soft")),
        ("rename", lambda: os.rename(a, b)),
        ("rename", lambda: os.replace("b", "c", src_dir_fd=directory, dst_dir_fd=directory)),
        ("unlink", lambda: os.unlink(root / "hard")),
        ("unlink", lambda: os.unlink("soft", dir_fd=directory)),
        ("rmdir", lambda: os.rmdir(sub)),
        ("rmdir", lambda: os.rmdir("sub2", dir_fd=directory)),
        ("open", lambda: opened("c", root / "c", os.O_WRONLY | os.O_APPEND)),
        ("write", lambda: os.write(held["c"], b"end")),
        ("fsync", lambda: os.fsync(directory)),
        ("open", lambda: opened("t", root / "c", os.O_WRONLY | os.O_TRUNC)),
        ("copy", lambda: os.sendfile(held["t"], os.open(__file__, os.O_RDONLY), 0, 5)),
    ]


def run(shim: Shim, argument: dict[str, Any]) -> dict[str, Any]:
    """Do all calls under the fault; return the errno of each (0 when it worked) and what the writes returned."""
    root, log = Path(argument["root"]), Path(argument["log"])
    todo = calls(root)
    shim.arm(root, Fault.from_json(argument["fault"]), log, data=True)
    errors, values = [], []
    for _, call in todo:
        try:
            value = call()
            errors.append(0)
        except OSError as error:
            value = None
            errors.append(error.errno or -1)
        except KeyError:  # the open before it failed
            value = None
            errors.append(-1)
        values.append(value if isinstance(value, int) else None)
    (root.parent / f"{root.name}-outside").write_text("not counted")
    (root / "c").read_bytes() if (root / "c").exists() else None
    return {"errors": errors, "values": values, "seen": shim.disarm()}
