"""The directory of a TrainingLoop: who may write there now, and which commit in it the loop goes on from."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_jax.core import codec
from nnx_jax.core.errors import ConfigError, LeaseHeldError, NnxError, ResumePointError
from nnx_jax.loop.components import ComponentSpec
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.layout import LAST, RunPaths
from nnx_jax.runs.lease import acquire, is_elsewhere, live_owner
from nnx_jax.runs.manifest import read_manifest
from nnx_jax.runs.resume import ResumePoint, probe, read_generation, read_point
from nnx_jax.runs.retain import take_census

FIELDS = ("dataset", "optimizer_config", "batch_size", "accumulate", "seed", "loss", "task", "precision", "hooks")
"""What makes the updates, besides the model: a commit of a loop that differs in one of these is not gone on from."""
_LEASE = "loop"  # the name under which the whole directory is leased
_MARK = "training_loop"


class LoopMark:
    """Which loop made a commit, kept inside the commit as a component of the run.

    Args:
        config: `TrainingLoop.get_config()`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.fields = {name: codec.canonical_json(config[name]).decode() for name in FIELDS}

    def component_spec(self) -> ComponentSpec:
        """Its name in a generation; a commit without it can be gone on from all the same."""
        return ComponentSpec(_MARK, 1, required=False)

    def component_state(self) -> dict[str, Any]:
        """Return the fields as JSON texts."""
        return {"fields": dict(self.fields)}

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        """Stay as it is: the commits to come are those of this loop."""

    def difference(self, host: Mapping[str, Any]) -> str | None:
        """Say in which field a commit's loop is another one: "batch_size: 32 there, 16 here"; None for none."""
        stored = host["components"].get(_MARK)
        if stored is None:
            return "loop: it was made by another face (NNModel or Trainer) there, by a TrainingLoop here"
        then = stored["state"]["fields"]
        for name, now in self.fields.items():
            if then.get(name) != now:
                return f"{name}: {then.get(name, 'nothing')} there, {now} here"
        return None


@contextlib.contextmanager
def writing(folder: str | Path) -> Iterator[None]:
    """Keep every other loop out of a directory while this one trains there.

    A writer on another machine cannot be seen from here, and a killed one must not block the directory for ever. Its
    place is taken, with the RuntimeWarning of every take-over. Nothing can be mixed by that: each call of a loop
    writes a run of its own.

    Raises:
        LeaseHeldError: another loop of this machine is writing there.
    """
    paths = RunPaths(folder, _LEASE)
    for each in (paths, *(RunPaths(folder, run_id) for run_id in run_ids(paths.root))):
        owner = live_owner(each)
        if owner is not None and not is_elsewhere(owner):
            told = f"checkpoint_dir {paths.root} is being written by {owner.where}"
            raise LeaseHeldError(f"{told}; wait for it, or give another checkpoint_dir")
    gone = live_owner(paths)
    with acquire(paths, force=gone is not None):
        yield


def foreign_salt(folder: str | Path) -> str | None:
    """Return a salt that keeps this start away from runs a machine out of sight may hold; None where there are none."""
    root = RunPaths(folder, _LEASE).root
    owners = [live_owner(RunPaths(root, run_id)) for run_id in run_ids(root)]
    tokens = sorted(owner.token for owner in owners if owner is not None)
    return f"beside {hashlib.sha256(''.join(tokens).encode()).hexdigest()[:12]}" if tokens else None


@dataclass(frozen=True)
class Commit:
    """A commit that lies in a directory, not yet verified.

    Attributes:
        last: LAST of its run names it.
        written: when LAST of its run was replaced, seconds; orders runs of different loops, never those of one.
    """

    step: int
    paths: RunPaths
    generation: int
    last: bool
    written: float


def commits(folder: str | Path) -> list[Commit]:
    """Return every commit below a directory, the furthest update first; reads manifests only.

    Raises:
        ResumePointError: LAST of a run is damaged, so what was committed is not known.
    """
    found = []
    root = RunPaths(folder, _LEASE).root
    for run_id in run_ids(root):
        pointer, paths = probe(root, run_id), RunPaths(root, run_id)
        if pointer is None:
            continue
        written = paths.pointer(LAST).stat().st_mtime
        for number in take_census(paths).complete:
            if number == pointer.generation:
                found.append(Commit(pointer.step, paths, number, True, written))
            elif number < pointer.generation:
                with contextlib.suppress(NnxError, OSError):  # a damaged manifest: the commit cannot be used
                    step = read_manifest(paths.manifest(number)).step
                    found.append(Commit(step, paths, number, False, written))
        if pointer.generation not in take_census(paths).complete:  # its files are gone: said when it is read
            found.append(Commit(pointer.step, paths, pointer.generation, True, written))
    return sorted(found, key=lambda commit: (commit.step, commit.last, commit.generation), reverse=True)


def newest(folder: str | Path, mark: LoopMark) -> ResumePoint | None:
    """Return the furthest whole commit that this loop made in a directory, None when it made none there.

    A damaged commit is left out with a RuntimeWarning, and the one before it is taken.

    Raises:
        ResumePointError: every commit of this loop is damaged.
    """
    return _search(folder, mark)[0]


def starting_point(folder: str | Path, mark: LoopMark, resume: str) -> tuple[ResumePoint | None, bool]:
    """Return (the commit to begin with or None, whether all of it is taken and not its weights alone).

    Raises:
        ConfigError: (a ValueError) there are commits, and all of them are of loops that differ from this one; it names
            the field. `resume` "weights_only" takes the newest one's weights instead, "full" all of it.
        ResumePointError: (a ValueError) every commit of this loop is damaged.
    """
    own, other = _search(folder, mark)
    if own is not None or other is None:
        return own, True
    if resume == "auto":
        told = f"{other.paths.root} holds commits of another loop: {mark.difference(other.host)}"
        raise ConfigError(
            f"{told}; use the same settings, give another checkpoint_dir, or take the weights alone with "
            "resume='weights_only'",
            path=f"TrainingLoop.{(mark.difference(other.host) or '').partition(':')[0]}",
        )
    return other, resume == "full"


def _search(folder: str | Path, mark: LoopMark) -> tuple[ResumePoint | None, ResumePoint | None]:
    """(the furthest whole commit of this loop, the newest whole one of any other)."""
    others: dict[str, tuple[float, ResumePoint]] = {}
    damaged: ResumePointError | None = None
    for commit in commits(folder):
        if commit.paths.run_id in others:
            continue
        try:
            point = read_point(commit.paths) if commit.last else read_generation(commit.paths, commit.generation)
        except ResumePointError as error:
            damaged = damaged or error
            warnings.warn(f"a commit is left out, because it is damaged: {error}", RuntimeWarning, stacklevel=2)
            continue
        if mark.difference(point.host) is None:
            return point, None
        others[point.run_id] = commit.written, point
    if damaged is not None:
        raise damaged
    newest = max(others.values(), key=lambda each: each[0], default=None)
    return None, None if newest is None else newest[1]
