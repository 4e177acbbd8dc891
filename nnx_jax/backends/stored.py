"""The directory of a TrainingLoop: who may write there now, and which commit in it the loop goes on from."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_jax.backends.described import described, identified
from nnx_jax.core import codec
from nnx_jax.core.errors import ConfigError, LeaseHeldError, NnxError, ResumePointError
from nnx_jax.core.hashing import content_hash
from nnx_jax.loop.components import ComponentSpec, revived
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.layout import LAST, RunPaths
from nnx_jax.runs.lease import acquire, is_elsewhere, live_owner
from nnx_jax.runs.manifest import read_manifest
from nnx_jax.runs.resume import ResumePoint, probe, read_generation, read_point
from nnx_jax.runs.retain import take_census

SETTINGS = ("batch_size", "accumulate", "seed", "precision", "backend")
PARTS = ("optimizer_config", "loss", "task", "metrics", "hooks")
"""With the dataset, the model and the stages before: what makes the updates. A commit of a loop that differs in one of
these is not gone on from."""
_LEASE = "loop"  # the name under which the whole directory is leased
_MARK = "training_loop"


class LoopMark:
    """Which loop made a commit and what it came to, kept inside the commit as a component of the run.

    Args:
        loop: the TrainingLoop.
        model: what `structure` says of the network it trains; None where there is none.
        stage: what `stage_before` says of the state it begins with.
        tell: () -> (values by name, why a callback asked for the end or None), as of now.
    """

    def __init__(
        self,
        loop: Any,
        model: Mapping[str, Any] | None,
        stage: str | None,
        tell: Callable[[], tuple[Mapping[str, float], str | None]],
    ) -> None:
        known = {name: getattr(loop, name) for name in SETTINGS} | {n: identified(getattr(loop, n)) for n in PARTS}
        known |= {"dataset": described(loop.dataset), "model": model, "state": stage}
        self.fields = {name: codec.canonical_json(value).decode() for name, value in known.items()}
        self.max_steps, self.tell = loop.max_steps, tell
        self.callbacks = codec.canonical_json(described(loop.callbacks)).decode()

    def component_spec(self) -> ComponentSpec:
        """Its name in a generation; a commit without it can be gone on from all the same."""
        return ComponentSpec(_MARK, 1, required=False)

    def component_state(self) -> dict[str, Any]:
        """Return the fields as JSON texts, the values, and the stop with the length and callbacks it was asked in."""
        values, reason = self.tell()
        stop = {"reason": reason, "max_steps": self.max_steps, "callbacks": self.callbacks}
        return {
            "fields": dict(self.fields),
            "values": {name: float(value) for name, value in values.items()},
            "stop": None if reason is None else stop,
        }

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        """Stay as it is: the commits to come are those of this loop."""

    def difference(self, host: Mapping[str, Any]) -> str | None:
        """Say in which field a commit's loop is another one: "batch_size: 32 there, 16 here"; None for none."""
        stored = _stored_mark(host)
        if stored is None:
            return "loop: it was made by another face (NNModel or Trainer) there, by a TrainingLoop here"
        then = stored["fields"]
        for name, now in self.fields.items():
            if then.get(name) == now:
                continue
            if name == "model" and name in then:
                return f"model: {_unlike(codec.parse_json(then[name]), codec.parse_json(now))}"
            if name == "state":
                return "state: it was called after another stage, or after none, than this one"
            return f"{name}: {then.get(name, 'nothing')} there, {now} here"
        return None

    def ended(self, host: Mapping[str, Any]) -> str | None:
        """Why a commit is the end of this loop: a callback asked for it, and the loop is no longer than it was then.

        A loop with other callbacks goes on.
        """
        stop = None if self.difference(host) is not None else (_stored_mark(host) or {}).get("stop")
        final = stop is not None and self.max_steps <= stop["max_steps"] and self.callbacks == stop["callbacks"]
        return stop["reason"] if stop is not None and final else None

    def values(self, host: Mapping[str, Any]) -> dict[str, float]:
        """The values that the loop had come to at a commit, by name."""
        return dict((_stored_mark(host) or {}).get("values", {}))


def structure(operator: Any, layers: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a mark knows of a network: classes, the settings of its layers, and its leaves without their numbers.

    Args:
        layers: name and digest of the layers.
        parameters: arrays by name; their shapes and dtypes are read, and nothing is copied from the device.
    """
    leaves = {name: f"{array.dtype}{list(array.shape)}" for name, array in sorted(parameters.items())}
    return {"class": type(operator).__qualname__, "layers": layers, "leaves": leaves}


def stage_before(loop: Any, state: Any) -> str | None:
    """Return a digest of the stages that a loop is called after; None where it is the first.

    Args:
        state: the TrainerCarryState it is called with, or None. The loop's own is no stage before it.
    """
    if state is None or not state.loop:
        return None
    stored = _stored_mark(state.host or {"components": {}})
    if state.loop == loop.identity():
        return None if stored is None else codec.parse_json(stored["fields"]["state"])  # type: ignore[return-value]
    return state.loop if stored is None else content_hash(stored["fields"])


def _stored_mark(host: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the mark in what the host kept of a commit."""
    entry = host["components"].get(_MARK)
    return None if entry is None else revived(entry["state"])


def _unlike(then: Any, now: Any) -> str:
    """The first leaf, else the class or the layers, in which two networks differ."""
    if then is None or now is None:
        return f"{'none' if then is None else then['class']} there, {'none' if now is None else now['class']} here"
    for name in sorted({*then["leaves"], *now["leaves"]}):
        left, right = (each["leaves"].get(name, "nothing") for each in (then, now))
        if left != right:
            return f"{name} is {left} there, {right} here"
    name = "class" if then["class"] != now["class"] else "layers"
    return f"its {name} {then[name]} there, {now[name]} here"


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
        ResumePointError: (a ValueError) every commit of this loop is damaged; or all are of another network.
    """
    own, other = _search(folder, mark)
    if own is not None or other is None:
        return own, True
    if resume == "auto":
        unlike = mark.difference(other.host) or ""
        field = unlike.partition(":")[0]
        told = (
            f"{other.paths.root} holds commits of another loop: {unlike}; use the same settings, give another "
            "checkpoint_dir, or take the weights alone with resume='weights_only'"
        )
        if field == "model":
            raise ResumePointError(told)
        raise ConfigError(told, path=f"TrainingLoop.{field}")
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
