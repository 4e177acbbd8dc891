"""Compile the preload shim on demand, once per version of its source, into a private cache directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")


def compiler() -> str | None:
    """Return the C compiler's path, or None when there is none (fault tests then have to be skipped)."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build() -> Path:
    """Return the shared library built from `shim.c`; raises RuntimeError with the compiler's words."""
    found = compiler()
    if found is None:
        raise RuntimeError("no C compiler (cc, gcc or clang) is installed; the fault tests need one")
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join((found, *_FLAGS)).encode()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"nnx_jax-fault-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid() or cache.is_symlink():
        raise RuntimeError(f"{cache} belongs to somebody else; a preloaded library must not come from there")
    library = cache / f"shim-{digest}.so"
    if not library.exists():
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".so", delete=False) as file:
            partial = Path(file.name)
        command = [found, *_FLAGS, "-o", str(partial), str(SOURCE), "-ldl", "-pthread"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            partial.unlink()
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
        partial.replace(library)  # two builders at once both succeed
    return library
