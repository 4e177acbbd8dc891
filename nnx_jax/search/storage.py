"""StudyStore: the trials of a study, in memory or as one strict JSON file each, so that it can stop and go on."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import ConfigError, LeaseHeldError, NnxError
from nnx_jax.runs.lease import guard
from nnx_jax.search.outcomes import TrialOutcome

STUDY_FORMAT, TRIAL_FORMAT = "nnx_jax.study/1", "nnx_jax.trial/1"
_TRIAL_FILE = re.compile(r"([0-9]{5,9})\.json")


class StudyStore:
    """One open study; use `open_study`.

    Attributes:
        name: the study's name.
        key: hex digits that tell it from every other study of that name; part of its trials' attempts.
    """

    def __init__(self, name: str, key: str, directory: Path | None, trials: Mapping[int, TrialOutcome]) -> None:
        self.name, self.key = name, key
        self._directory, self._trials = directory, dict(trials)

    @property
    def trials(self) -> tuple[TrialOutcome, ...]:
        """Every trial, by number."""
        return tuple(self._trials[number] for number in sorted(self._trials))

    def put(self, trial: TrialOutcome) -> None:
        """Keep a trial, in place of what was known of it; on the disk once this returns."""
        if self._directory is not None:
            path = self._directory / "trials" / f"{trial.number:05d}.json"
            state = {"format": TRIAL_FORMAT, **trial.to_state()}
            fsio.atomic_write(path, durable_json(state, source=str(path), people=True))
        self._trials[trial.number] = trial


@contextlib.contextmanager
def open_study(storage: str | Path | None, name: str, identity: Mapping[str, Any]) -> Iterator[StudyStore]:
    """Open a study, new or begun, for one process at a time.

    Args:
        storage: the directory of studies; None keeps this one in memory.
        name: the study's name, its directory below `storage`.
        identity: what all of its trials have in common, as JSON values.

    Raises:
        ConfigError: (a ValueError) the stored study has another identity, or one of its files is damaged.
        UnsafePathError: (a ValueError) a name that cannot be a directory.
        LeaseHeldError: another process has it open.
    """
    fsio.safe_name(name, "a study's name")
    if storage is None:
        yield StudyStore(name, secrets.token_hex(4), None, {})
        return
    fsio.make_dir(storage)
    directory = fsio.make_dir(fsio.safe_join(storage, name))
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(guard(directory / ".lock", 0.0))
        except LeaseHeldError as error:
            held_by = f"study '{name}' in {storage} is open in another process; wait for it, or use another study_name"
            raise LeaseHeldError(held_by) from error
        key = _meet(directory, name, identity)
        fsio.make_dir(directory / "trials")
        yield StudyStore(name, key, directory, _read_trials(directory / "trials"))


def _meet(directory: Path, name: str, identity: Mapping[str, Any]) -> str:
    """Write the study's file, or compare it with what is asked now; return the study's key."""
    path = directory / "study.json"
    if not path.exists():
        key = secrets.token_hex(4)
        state = {"format": STUDY_FORMAT, "name": name, "key": key, "identity": dict(identity)}
        fsio.atomic_write(path, durable_json(state, source=str(path), people=True))
        return key
    stored = _load(path, STUDY_FORMAT, {"name", "key", "identity"})
    # As it would come back: lists for tuples.
    now = codec.parse_json(codec.canonical_json(dict(identity)))
    changes = list(differences(stored["identity"], now))
    if changes:
        raise ConfigError(
            f"study '{name}' was begun with other settings: {'; '.join(changes[:5])}; trials of both cannot be "
            "compared, so give another study_name, or the settings it was begun with",
            file=str(path),
        )
    return str(stored["key"])


def _read_trials(directory: Path) -> dict[int, TrialOutcome]:
    found = {}
    for path in sorted(directory.iterdir()):
        name = _TRIAL_FILE.fullmatch(path.name)
        if name is None:
            continue  # a temporary that a kill left behind
        state = _load(path, TRIAL_FORMAT, set(TrialOutcome.__dataclass_fields__))
        try:
            trial = TrialOutcome.from_state(state)
        except (ValueError, TypeError) as error:
            raise _damaged(path, error) from error
        if trial.number != int(name[1]):
            raise _damaged(path, f"it is of trial {trial.number}")
        found[trial.number] = trial
    return found


def _load(path: Path, form: str, keys: set[str]) -> dict[str, Any]:
    try:
        state = codec.load_json(path)
    except (OSError, NnxError) as error:
        raise _damaged(path, error) from error
    if not isinstance(state, dict) or state.pop("format", None) != form or set(state) != keys:
        raise _damaged(path, f"it is not of the form {form}")
    return state


def _damaged(path: Path, why: object) -> ConfigError:
    lost = "this trial alone" if _TRIAL_FILE.fullmatch(path.name) else "what the study's trials have in common"
    return ConfigError(f"cannot be read ({why}); restore it from a copy, or remove it to lose {lost}", file=str(path))


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield every place where two plain values differ, with both."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*new, *old]):
            place = f"{path}.{name}" if path else name
            if name not in old or name not in new:
                yield f"{place} was {_told(old, name)}, is {_told(new, name)}"
            else:
                yield from differences(old[name], new[name], place)
    elif type(old) is not type(new) or old != new:
        yield f"{path} was {_cut(old)}, is {_cut(new)}"


def _told(values: Mapping[str, Any], name: str) -> str:
    return _cut(values[name]) if name in values else "not given"


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
