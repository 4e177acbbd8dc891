"""A dataset from a CSV file with a header: numeric cells only, and every complaint names file:line:column."""

from __future__ import annotations

import csv
import math
import re
from typing import Literal

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.core.registry import register
from nnx_jax.data.arrays import Classes
from nnx_jax.data.dataset import InMemoryDataset, require_columns
from nnx_jax.data.dtypes import Columns

_WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


@register("csv")
class CsvDataset(InMemoryDataset):
    """Rows of a CSV file (UTF-8, first line the column names).

    Args:
        path: the file.
        target: name of the target column, or null for data without targets.
        features: names of the input columns in the order wanted; every column but the target when left out.
        delimiter: one character.
        target_type: `int` for class labels, `float` for values, `auto`: labels when every target is a whole number.
        n_classes: number of classes; `max + 1` of integer targets when left out.

    `x` is float32 [N, features]; `y` is int32 [N] or float32 [N]. Empty cells, text, `nan` and `inf` are errors: a
    missing value is for you to fill in or leave out.
    """

    path: str
    target: str | None = None
    features: tuple[str, ...] | None = None
    delimiter: str = ","
    target_type: Literal["auto", "int", "float"] = "auto"
    n_classes: Classes = None

    def load(self) -> Columns:
        """Read the columns."""
        header, lines, rows = self._read()
        targets = () if self.target is None else (self.target,)
        features = tuple(n for n in header if n not in targets) if self.features is None else self.features
        require_columns((*targets, *features), tuple(header), self.path)
        if not features:
            raise DataError(f"{self.path} has no feature column beside the target {self.target!r}")
        cells = [(header.index(name), name) for name in features]
        x = [[self._number(row, at, name, line) for at, name in cells] for row, line in zip(rows, lines, strict=True)]
        columns = {"x": np.array(x, np.float64).reshape(len(rows), len(features))}
        if self.target is not None:
            columns["y"] = self._targets(rows, lines, header.index(self.target), self.target)
        return columns

    def _read(self) -> tuple[list[str], list[int], list[list[str]]]:
        """Return the header, and the cells of every row with the line each ended on."""
        lines: list[int] = []
        rows: list[list[str]] = []
        try:
            with open(self.path, encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=self.delimiter, strict=True)
                try:
                    header = [name.strip() for name in next(reader, [])]
                    self._check_header(header)
                    for row in reader:
                        if not row:
                            continue  # a blank line
                        if len(row) != len(header):
                            raise DataError(
                                f"{self.path}:{reader.line_num}: {len(row)} cells, but the header has {len(header)}"
                            )
                        lines.append(reader.line_num)
                        rows.append(row)
                except csv.Error as error:
                    raise DataError(f"{self.path}:{reader.line_num}: not readable as CSV: {error}") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} is not UTF-8: {error}") from error
        return header, lines, rows

    def _check_header(self, header: list[str]) -> None:
        if not any(header):
            raise DataError(f"{self.path}:1: there is no header; the first line names the columns")
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{self.path}:1: the column name {twice!r} appears more than once")

    def _number(self, row: list[str], at: int, name: str, line: int) -> float:
        cell = row[at]
        value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
        if math.isfinite(value):
            return value
        found = f"{cell!r} is not a finite number" if cell.strip() else "the cell is empty"
        raise DataError(f"{self.path}:{line}:{at + 1}: column {name!r}: {found}")

    def _targets(self, rows: list[list[str]], lines: list[int], at: int, name: str) -> np.ndarray:
        values = [self._number(row, at, name, line) for row, line in zip(rows, lines, strict=True)]
        odd = next((i for i, row in enumerate(rows) if not _WHOLE.fullmatch(row[at])), None)
        if self.target_type == "float" or (self.target_type == "auto" and odd is not None):
            return np.array(values, np.float64)
        if odd is not None:
            place = f"{self.path}:{lines[odd]}:{at + 1}"
            raise DataError(f"{place}: column {name!r}: {rows[odd][at]!r} is not a whole number")
        return np.array([int(row[at]) for row in rows], np.int64)
