"""Where everything of a run lives: one object that names every path under a runs directory."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nnx_jax.core.codec import JSON_LIMITS, Limits
from nnx_jax.core.errors import UnsafePathError
from nnx_jax.core.fsio import safe_join, safe_name

LAST, BEST = "LAST", "BEST"
PHASES = ("FIRST", "Q1", "Q2", "Q3")
RESERVED = (LAST, BEST, *PHASES)
PARTIAL, TRASH = ".partial-", ".trash-"
HOST = "host.json"  # of a generation: the plain values committed with its arrays
HOST_LIMITS = Limits(64 * 1024**2, JSON_LIMITS.values)

_TAKEN_RUN_IDS = ("best",)
_TAKEN_TAGS = (*RESERVED, "generations", "manifests")


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run; making the object touches no file.

    Args:
        root: the runs directory. `~` is expanded and a relative path is fixed to the working directory of this moment,
            so a later `chdir` moves nothing.
        run_id: name of the run's directory below `root`.

    Raises:
        UnsafePathError: (a ValueError) `run_id` could leave `root`, or is a name the store uses itself.
    """

    root: Path
    run_id: str

    def __init__(self, root: str | Path, run_id: str) -> None:
        name = safe_name(run_id, "run id")
        if name.casefold() in _TAKEN_RUN_IDS or name.startswith("."):
            raise UnsafePathError(f"run id {name!r} is a name the store uses itself; choose another")
        object.__setattr__(self, "root", absolute_root(root))
        object.__setattr__(self, "run_id", name)

    @property
    def run(self) -> Path:
        """The run's own directory; refused when it is a link or lies below one."""
        try:
            if stat.S_ISDIR(os.lstat(self._run).st_mode):  # what it is nearly always, and asked for often
                return self._run
        except OSError:
            pass
        return safe_join(self.root, self.run_id)

    @cached_property
    def _run(self) -> Path:
        return self.root / self.run_id

    @property
    def config(self) -> Path:
        return self.run / "run.yaml"

    @property
    def metadata(self) -> Path:
        return self.run / "metadata.yaml"

    @property
    def history(self) -> Path:
        return self.run / "idps.csv"

    @property
    def journal(self) -> Path:
        """The directory that holds the history of a run with a journal; refused when it is a link."""
        return safe_join(self.run, "history")

    @property
    def artifact(self) -> Path:
        return self.run / "artifact.json"

    @property
    def provenance(self) -> Path:
        """What the run is said to come from, where somebody said it."""
        return self.run / "provenance.json"

    @property
    def attempt(self) -> Path:
        """The newest call of `train` for a run with provenance."""
        return self.run / "attempt.json"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def generations(self) -> Path:
        return self.checkpoints / "generations"

    @property
    def manifests(self) -> Path:
        return self.checkpoints / "manifests"

    @property
    def leases(self) -> Path:
        return self.root / ".leases"

    @property
    def lease_lock(self) -> Path:
        return self.leases / f"{self.run_id}.lock"

    @property
    def lease_owner(self) -> Path:
        return self.leases / f"{self.run_id}.owner.json"

    def generation(self, number: int) -> Path:
        return self.generations / str(number)

    def manifest(self, number: int) -> Path:
        return self.manifests / f"{number}.json"

    def pointer(self, name: str) -> Path:
        """Return the file of pointer `name`; raises UnsafePathError for a name that is no plain, free file name."""
        return self.checkpoints / check_tag(name)


def absolute_root(root: str | Path) -> Path:
    """Return `root` with `~` expanded, made absolute now."""
    return Path(root).expanduser().absolute()


def check_tag(name: str) -> str:
    """Return `name` when it may name a pointer: reserved names exactly as spelled, or any other safe name."""
    tag = safe_name(name, "checkpoint tag")
    taken = {word.casefold() for word in _TAKEN_TAGS}
    if tag not in RESERVED and (tag.casefold() in taken or tag.startswith(".") or tag.isdigit()):
        raise UnsafePathError(f"checkpoint tag {tag!r} is kept for the store ({', '.join(_TAKEN_TAGS)}, .*, numbers)")
    return tag
