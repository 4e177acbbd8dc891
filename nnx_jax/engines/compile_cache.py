"""JAX's persistent compile cache, on by default: the second start of a program skips its compile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


def enable_compile_cache() -> None:
    """Keep compiled programs under the user's cache directory, unless the user chose a place or said no.

    `JAX_COMPILATION_CACHE_DIR` names another place; `JAX_ENABLE_COMPILATION_CACHE=false` turns it off.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(base / "nnx_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
