"""`metadata.yaml`: the environment a run was made in and what it was resumed from; never part of the run id."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nnx_jax.core.errors import ConfigError

_PACKAGES = ("nnx_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_GIT_SECONDS = 3.0
MODES = ("fresh", "stateful", "weights_only")


@dataclass(frozen=True, kw_only=True)
class ResumeStatus:
    """Where a run's first state came from.

    Attributes:
        mode: fresh | stateful | weights_only.
        source_run_id, source_checkpoint: the run and the name (LAST, BEST, a step ...) resumed from; None when fresh.
        source_epoch, source_generation, source_checkpoint_id: the commit's epoch, number and manifest SHA-256.
        restored_components, fresh_components: names of the stateful parts that were restored, or began anew.
    """

    mode: str = "fresh"
    source_run_id: str | None = None
    source_checkpoint: str | None = None
    restored_components: tuple[str, ...] = ()
    fresh_components: tuple[str, ...] = ()
    source_epoch: int | None = None
    source_generation: int | None = None
    source_checkpoint_id: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"is {self.mode!r}; legal: {', '.join(MODES)}", path="resume mode")

    def state(self) -> dict[str, Any]:
        """Return plain values; tuples become lists."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ResumeStatus:
        fields: dict[str, Any] = {**state}
        for key in ("restored_components", "fresh_components"):
            fields[key] = tuple(fields.get(key, ()))
        return cls(**fields)


def collect(resume: ResumeStatus | None = None, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the environment: versions, Python, platform, git state of the working directory, resume status.

    Environment variables are never read into it. `extra` adds plain values (precision, devices ...).
    """
    return {
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": {"system": platform.platform(), "machine": platform.machine(), "python": sys.implementation.name},
        "git": _git(),
        "resume": (resume or ResumeStatus()).state(),
        **(extra or {}),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return {commit, dirty} of the checkout the command runs in, or None outside one or without git."""
    commit = _ask_git("rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _ask_git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], capture_output=True, timeout=_GIT_SECONDS, check=True, text=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
