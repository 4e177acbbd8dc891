"""Retention: after a commit, remove the generations that neither a pointer nor `keep` holds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass

from nnx_jax.core import fsio
from nnx_jax.core.errors import ConfigError, NnxError, ResumePointError
from nnx_jax.runs.layout import LAST, PARTIAL, TRASH, RunPaths
from nnx_jax.runs.manifest import read_manifest
from nnx_jax.runs.pointers import list_pointers

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_MANIFEST = re.compile(r"(0|[1-9][0-9]{0,17})\.json")
_PARTIAL = re.compile(re.escape(PARTIAL) + r"([1-9][0-9]{0,17})-[0-9]+")


@dataclass(frozen=True)
class Census:
    """What lies in `generations/` and `manifests/`.

    Attributes:
        complete: numbers with both a directory and a manifest.
        leftovers: names of directories of the store's own making that are not complete (a commit that did not finish).
        orphans: manifest numbers without a directory.
        junk: names that are not the store's; they are listed, never touched.
        highest: the largest number any of the store's names carries; the next generation is above it.
    """

    complete: frozenset[int]
    leftovers: tuple[str, ...]
    orphans: frozenset[int]
    junk: tuple[str, ...]
    highest: int


def check_keep(keep: int | None) -> int | None:
    """Return `keep`: how many of the newest generations stay besides those with a name; None keeps all."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"is {keep!r}; expected how many newest checkpoints stay, >= 1, or None for all", path="keep")
    return keep


def take_census(paths: RunPaths) -> Census:
    """Look at the directories; reads names only, and orders generations by number, never by text or time."""
    directories: dict[int, str] = {}
    numbers, leftovers, junk = [0], [], []
    for entry in _scan(paths.generations):
        real = entry.is_dir(follow_symlinks=False)
        partial = _PARTIAL.fullmatch(entry.name)
        if real and _NUMBER.fullmatch(entry.name):
            directories[int(entry.name)] = entry.name
        elif real and (partial or entry.name.startswith(TRASH)):
            leftovers.append(entry.name)
            numbers += [int(partial[1])] if partial else []
        else:
            junk.append(entry.name)
    manifests = {int(match[1]) for entry in _scan(paths.manifests) if (match := _MANIFEST.fullmatch(entry.name))}
    numbers += [*directories, *manifests]
    leftovers += [name for number, name in directories.items() if number not in manifests]
    complete = frozenset(directories) & manifests
    orphans = frozenset(manifests - directories.keys())
    return Census(complete, tuple(sorted(leftovers)), orphans, tuple(sorted(junk)), max(numbers))


def prune(paths: RunPaths, keep: int | None) -> list[int]:
    """Remove what may go and return the removed generation numbers.

    Kept: every generation a pointer names (LAST and BEST among them) and the `keep` newest, where two commits of one
    moment (the last update's, before and after the callbacks' ends) count once. A damaged pointer stops
    the removal before it starts, for what it names is unknown.
    """
    pointers = list_pointers(paths)
    last = pointers.get(LAST)
    if last is None:
        raise ResumePointError(f"{paths.pointer(LAST)}: is missing; nothing is removed")
    census = take_census(paths)
    named = {pointer.generation for pointer in pointers.values()}
    committed = sorted(number for number in census.complete if number <= last.generation)
    kept = named | set(committed if keep is None else _newest(paths, committed, keep))
    removed = sorted(census.complete - kept)
    for number in removed:
        fsio.remove_tree(paths.generation(number))
        paths.manifest(number).unlink(missing_ok=True)
    for name in census.leftovers:
        if not (name.isdigit() and int(name) in named):
            _sweep(paths, name)
    for number in census.orphans - named:
        paths.manifest(number).unlink(missing_ok=True)
    return removed


def _newest(paths: RunPaths, committed: list[int], keep: int) -> list[int]:
    """The newest generation of each of the `keep` newest moments; a damaged manifest is a moment of its own."""
    found: dict[tuple[int, int], int] = {}
    for number in reversed(committed):
        try:
            manifest = read_manifest(paths.manifest(number))
            moment = (manifest.step, manifest.batch)
        except (NnxError, OSError):
            moment = (-1, number)
        if moment not in found and len(found) == keep:
            break
        found.setdefault(moment, number)
    return list(found.values())


def _sweep(paths: RunPaths, name: str) -> None:
    path = paths.generations / name
    if name.startswith(TRASH):
        shutil.rmtree(path)
    else:
        fsio.remove_tree(path)


def _scan(directory: os.PathLike[str]) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return list(entries)
    return []
