"""Samples listed in a catalog: one entry a sample, with the file its input lies in, and its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import PrivateAttr

from nnx_jax.core import fsio
from nnx_jax.core.codec import load_yaml_with_lines
from nnx_jax.core.errors import DataError, OperatorTypeError
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import register
from nnx_jax.data.dataset import SPLITS, ColumnInfo, describe_row
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.identity import Part, identity_of
from nnx_jax.data.iterable import stack_rows
from nnx_jax.data.partition import epoch_order
from nnx_jax.data.splits import PartitionedDataset, tenths

_KEYS = {"id", "x", "y", "split"}


@register("catalog")
class CatalogDataset(PartitionedDataset):
    """Samples of a catalog, read from their files when they are asked for.

    An entry is a mapping:

        - id: storm-17            # a name for messages; the entry's number when left out
          x: fields/storm-17.npy  # a file, relative to the catalog; or a number or list of numbers
          y: 2                    # the target, in the same forms (1 beside 2.5 is 1.0); may be left out
          split: train            # train, val or test; in every entry, or in none

    Args:
        catalog: a YAML (or JSON) file with a list of entries, or a mapping of entries by their id; or such a list or
            mapping itself, whose files are relative to the working directory.
        preprocess: applied to what was read as x.
        target_op: applied to what was read as y; for entries without y it makes the target, from x as it was read.
        reader: called with the path of a file and returns an array; `.npy` files are read when left out (no pickle).
        seed: where no entry names a split, the tenths (`splits.tenths`) are cut from a permutation of the entries, a
            function of this seed. A split lists its entries in the order of the catalog.
        split: train, val or test.

    The hash is of the entries of the split, the bytes of their files, and the three operators, not of any path: moving
    the catalog with its files changes nothing, editing a file does. Every file is read once for it.

    Raises:
        OperatorTypeError: (a TypeError) an operator that cannot be called.
        DataError: entries that are none (naming the id), a file that cannot be read, samples of different shapes.
    """

    parts: ClassVar[tuple[str, ...]] = ("preprocess", "target_op", "reader")

    catalog: Any
    preprocess: Part = None
    target_op: Part = None
    reader: Part = None

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    def problems(self) -> Iterator[tuple[str, str]]:
        """A catalog must be one, and operators callable."""
        yield from super().problems()
        if not isinstance(self.catalog, str | tuple | Mapping):
            name = type(self.catalog).__name__
            yield "catalog", f"got a {name}; expected a file, a list of entries, or a mapping of entries by id"
        for name in self.parts:
            part = getattr(self, name)
            if part is not None and not callable(part):
                found = type(part).__name__
                raise OperatorTypeError(f"expected an operator or a function; got a {found}", path=name)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The entries of this split, in the order of the catalog, each with its id."""
        if "entries" not in self._kept:
            every = self._every_entry()
            named = [entry["id"] for entry in every if "split" in entry]
            if named and len(named) < len(every):
                without = next(entry["id"] for entry in every if "split" not in entry)
                raise DataError(
                    f"{self._where}: entry {without!r} has no split, entry {named[0]!r} has; give it in all or in none"
                )
            if named:
                mine = [number for number, entry in enumerate(every) if entry["split"] == self.split]
            else:
                place = tenths(len(every), self.split)
                mine = sorted(epoch_order(len(every), self.seed, 0)[place.start : place.stop].tolist())
            self._kept["entries"] = [every[number] for number in mine]
        return self._kept["entries"]

    def __len__(self) -> int:
        """Return the number of samples of this split."""
        return len(self.entries)

    def take(self, indices: np.ndarray) -> Columns:
        """Return the samples `indices` [B] of this split, each column stacked."""
        numbers = np.arange(len(self))[indices]  # checks the range, and resolves negative ones
        if not len(numbers):
            return {name: np.zeros((0, *info.shape), info.dtype) for name, info in self.columns.items()}
        samples = [self._sample(self.entries[int(number)]) for number in numbers]
        return stack_rows(samples, numbers, f"{self._where} ({self.split})")

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one sample, of the first entry; also of a split without any."""
        if "columns" not in self._kept:
            every = self._every_entry()
            if not every:
                raise DataError(f"{self._where} has no entries")
            first = {name: np.asarray(value) for name, value in self._sample(every[0]).items()}
            self._kept["columns"] = {name: ColumnInfo(value.shape, value.dtype) for name, value in first.items()}
        return dict(self._kept["columns"])

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know, as far as one sample tells; of whole-number targets given in the catalog also
        the number of classes, over all splits."""
        found = describe_row(self.columns)
        labels: list[Any] = [entry.get("y") for entry in self._every_entry()]
        if self.target_op is None and all(type(label) is int and label >= 0 for label in labels):
            found["n_classes"] = found["output_dim"] = max(labels) + 1
        return found

    def content_hash(self) -> str:
        """Return 64 hex digits of the entries of this split, of their files' bytes, and of the operators."""
        if "hash" not in self._kept:
            entries = [
                {name: self._told(entry, name) for name in ("x", "y") if name in entry} for entry in self.entries
            ]
            operators = {name: identity_of(getattr(self, name)) for name in self.parts}
            mixed = {name: dtype.str for name, dtype in self._mixed.items()}
            told = {"catalog": entries, "operators": operators, "wide": self.wide} | ({"mixed": mixed} if mixed else {})
            self._kept["hash"] = content_hash(told)
        return self._kept["hash"]

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return self.catalog if isinstance(self.catalog, str) else "the catalog"

    def _every_entry(self) -> list[dict[str, Any]]:
        """The entries of all splits, checked."""
        if "every" not in self._kept:
            found: Any = self.catalog
            if isinstance(found, str):
                try:
                    found = load_yaml_with_lines(found, follow=True)[0]
                except OSError as error:
                    raise DataError(f"{self.catalog} cannot be read: {error.strerror or error}") from error
            if isinstance(found, Mapping):
                found = [e if not isinstance(e, Mapping) else {"id": name} | dict(e) for name, e in found.items()]
            if not isinstance(found, list | tuple):
                raise DataError(f"{self._where} holds no list of entries, and no mapping of entries by id")
            self._kept["every"] = [self._checked(entry, number) for number, entry in enumerate(found)]
        return self._kept["every"]

    def _checked(self, entry: Any, number: int) -> dict[str, Any]:
        if not isinstance(entry, Mapping):
            raise DataError(f"{self._where}: entry {number} is a {type(entry).__name__}; an entry is a mapping with x")
        checked = {"id": number} | dict(entry)
        name = checked["id"]
        if unknown := sorted(set(map(str, checked)) - _KEYS):
            raise DataError(f"{self._where}: entry {name!r} has the key {unknown[0]!r}; keys are id, x, y and split")
        if "x" not in checked:
            raise DataError(f"{self._where}: entry {name!r} has no x")
        if "split" in checked and checked["split"] not in SPLITS:
            raise DataError(
                f"{self._where}: entry {name!r} has split {checked['split']!r}; expected one of {', '.join(SPLITS)}"
            )
        return checked

    def _sample(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        read = self._value(entry, "x")
        sample = {"x": read if self.preprocess is None else self.preprocess(read)}
        if "y" in entry:
            target = self._value(entry, "y")
            sample["y"] = target if self.target_op is None else self.target_op(target)
        elif self.target_op is not None:
            sample["y"] = self.target_op(read)
        return sample

    def _value(self, entry: Mapping[str, Any], name: str) -> np.ndarray:
        """What an entry says of a column: read from its file, or the numbers themselves."""
        value = entry[name]
        if not isinstance(value, str):
            array = np.asarray(value)
            if array.dtype.kind not in "biuf":
                raise DataError(f"{self._where}: entry {entry['id']!r}: {name} is no file and no numbers: {value!r}")
            return array.astype(self._mixed.get(name, array.dtype))
        path = self._path(value)
        if self.reader is not None:
            return np.asarray(self.reader(str(path)))
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            told = f"{self._where}: entry {entry['id']!r}: {path} is not an .npy of numbers that can be read: {error}"
            raise DataError(f"{told}; other files need a reader") from error
        if not isinstance(found, np.ndarray):
            raise DataError(f"{self._where}: entry {entry['id']!r}: {path} holds several arrays; give one .npy each")
        return found

    @property
    def _mixed(self) -> dict[str, np.dtype[Any]]:
        """The common dtype of columns whose numbers are of several: whole in some entries, broken in others."""
        if "mixed" not in self._kept:
            found: dict[str, np.dtype[Any]] = {}
            for name in ("x", "y"):
                values = [entry[name] for entry in self._every_entry() if name in entry]
                kinds = {np.asarray(value).dtype for value in values if not isinstance(value, str)}
                if len(kinds) > 1 and all(kind.kind in "biuf" for kind in kinds):
                    found[name] = np.result_type(*kinds)
            self._kept["mixed"] = found
        return self._kept["mixed"]

    def _told(self, entry: Mapping[str, Any], name: str) -> Any:
        """What the hash knows of a column: a file's bytes, or the numbers."""
        value = entry[name]
        if not isinstance(value, str):
            return identity_of(value)
        try:
            return {"file": fsio.digest_file(self._path(value), follow=True)[0]}
        except OSError as error:
            told = f"{self._where}: entry {entry['id']!r}: {value} cannot be read"
            raise DataError(f"{told}: {error.strerror or error}") from error

    def _path(self, name: str) -> Path:
        return Path(self.catalog).parent / name if isinstance(self.catalog, str) else Path(name)
