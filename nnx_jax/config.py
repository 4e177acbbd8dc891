"""From a file and `--set` words to one validated RunSpec: command line over file over default."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Any

import nnx_jax.data  # noqa: F401  # registers the built-in datasets
from nnx_jax.core.codec import load_yaml_with_lines
from nnx_jax.core.errors import ConfigError, UnsafePathError
from nnx_jax.core.precision import enable_float64
from nnx_jax.core.registry import allow_imports
from nnx_jax.hooks import register_builtin
from nnx_jax.params.overrides import apply_overrides
from nnx_jax.params.run import RunSpec


def load_config(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    allow_code: bool = True,
    enable: bool = False,
) -> RunSpec:
    """Return the run that a YAML file and overrides describe.

    Args:
        path: the file (a link is followed); None: the defaults, which overrides must complete.
        overrides: words such as `train.optim.max_lr=1e-3`, see `params/overrides.py`.
        allow_code: whether modules listed under `imports:` may be imported. Pass False for a file of unknown origin,
            such as the `run.yaml` of a stored run.
        enable: whether a run in float64 switches JAX's 64-bit numbers on in this process, before those modules are
            imported. The commands do; a program of your own decides itself.

    Raises:
        ConfigError: with file, line and path of every problem, before anything else is touched.
    """
    register_builtin()
    source = None if path is None else os.fspath(path)
    data, lines = ({}, {}) if path is None else _read(path)
    if not isinstance(data, dict):
        raise ConfigError(f"holds a {type(data).__name__}; expected a mapping with model, data, train", file=source)
    if enable and _asks_float64(data, overrides):
        enable_float64()
    first = [word for word in overrides if word.partition("=")[0].strip() == "imports"]
    modules = apply_overrides(RunSpec, data, first)[0].get("imports") or []
    if modules and not allow_code:
        raise ConfigError(f"wants to import {modules}, which is not allowed here", path="imports", file=source)
    if isinstance(modules, list):
        allow_imports(modules)
    if allow_code:
        _load_plugins()
    merged, origins = apply_overrides(RunSpec, data, overrides)
    spec = RunSpec.from_state(merged, source=source or "<defaults>", lines=lines, given=origins)
    if enable and spec.precision == "float64":
        enable_float64()
    return spec


def _asks_float64(data: dict[Any, Any], overrides: Sequence[str]) -> bool:
    """Whether a file, or an override of the very field, says `precision: float64`."""
    blocks = ("model", "train", "trainer")
    named = [word for word in overrides if word.partition("=")[0].strip() in {f"{block}.precision" for block in blocks}]
    merged = apply_overrides(RunSpec, data, named)[0]
    found = [merged.get(block) for block in blocks]
    return any(isinstance(block, dict) and block.get("precision") == "float64" for block in found)


def training_block(path: str | os.PathLike[str]) -> str:
    """Return the key under which a file says how to train: "trainer" with several optimizers, else "train".

    Raises:
        ConfigError: the file cannot be read.
    """
    data = _read(path)[0]
    return "trainer" if isinstance(data, dict) and "trainer" in data else "train"


def backend_of(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> str:
    """Return the engine that a file and overrides ask for, before anything of the user's is imported.

    Raises:
        ConfigError: the file cannot be read.
    """
    words = [word.partition("=")[2].strip() for word in overrides if word.partition("=")[0].strip() == "backend"]
    data = _read(path)[0]
    written = data.get("backend", "flax") if isinstance(data, dict) else "flax"
    return words[-1] if words else str(written)


def _load_plugins() -> None:
    """Import what installed packages offer under the entry point group `nnx_jax`; their import registers classes.

    Raises:
        ConfigError: naming the package whose entry point cannot be imported.
    """
    for entry in importlib.metadata.entry_points(group="nnx_jax"):
        try:
            entry.load()
        except Exception as error:  # whatever a stranger's import raises, the user must hear whose it is
            package = entry.dist.name if entry.dist is not None else "a package"
            message = f"entry point '{entry.name}' of {package} cannot be loaded ({error}); repair or uninstall it"
            raise ConfigError(message, path="imports") from error


def _read(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    try:
        data, lines = load_yaml_with_lines(path, follow=True)
    except (OSError, UnsafePathError) as error:
        reason = getattr(error, "strerror", None) or error.args[0]
        raise ConfigError(f"cannot be read ({reason}); give the path of a YAML file", file=os.fspath(path)) from error
    return {} if data is None else data, lines
