"""Text as bytes: windows over any UTF-8 file or folder, each labelled with the byte that comes next.

With no path it reads the Python standard library's own source, so a real language-model job runs offline anywhere.
"""

from __future__ import annotations

import fnmatch
import math
import os
import sysconfig
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from nnx_jax.core.errors import DataError
from nnx_jax.core.hashing import content_hash, hash_array
from nnx_jax.core.registry import register
from nnx_jax.data.dataset import ColumnInfo, TrainingDataset
from nnx_jax.data.dtypes import Columns

VOCAB_SIZE = 256
_SPLIT_PERCENT = {"train": (0, 90), "val": (90, 95), "test": (95, 100)}
# What differs between two installations of one Python release, or is not prose of its authors.
_STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_STDLIB_SKIPPED_FILES = ("_sysconfigdata*", "sitecustomize.py", "usercustomize.py")


@register("text_bytes")
class TextBytesDataset(TrainingDataset):
    """Next-byte prediction over text: `x` int32 [N, T] holds bytes 0..255, `y` int32 [N, T] the byte after each.

    Args:
        path: a UTF-8 file, or a folder whose files are joined in order of their relative path (hidden names and links
            are left out); null reads `*.py` of the Python standard library without its tests and site-packages.
        split: the first 90 % of the bytes are `train`, the next 5 % `val`, the last 5 % `test`.
        context_length: T. Row i covers bytes i*T .. i*T+T of the split (T+1 bytes; the last is only a label), so every
            byte but the first is predicted once; an incomplete window at the end is left out.
        max_bytes: text past this many bytes (of the joined files, before splitting) is not read; the cut falls between
            characters.
        pattern: file names to read in a folder, e.g. `*.md`.

    Raises:
        DataError: nothing to read, a file that is not UTF-8 (named, with the byte), or too few bytes for one window.
    """

    path: str | None = None
    split: Literal["train", "val", "test"] = "train"
    context_length: Annotated[int, Field(ge=1)] = 128
    max_bytes: Annotated[int, Field(ge=1)] = 4_000_000
    pattern: str = "*"

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def tokens(self) -> np.ndarray:
        """The bytes of this split, uint8 [bytes]."""
        if "tokens" not in self._kept:
            self._kept["tokens"] = self._load()
        return self._kept["tokens"]

    def _load(self) -> np.ndarray:
        text = np.frombuffer(_read_text(self.path, self.pattern, self.max_bytes), np.uint8)
        first, last = _SPLIT_PERCENT[self.split]
        part = text[len(text) * first // 100 : len(text) * last // 100]
        if len(part) <= self.context_length:
            raise DataError(
                f"text_bytes: split {self.split!r} of {self.path or 'the standard library'} has {len(part)} bytes of "
                f"{len(text)}; context_length {self.context_length} needs at least {self.context_length + 1}"
            )
        return part

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self.tokens) - 1) // self.context_length

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """`x` and `y`, int32 [T] a row."""
        row = ColumnInfo((self.context_length,), np.dtype(np.int32))
        return {"x": row, "y": row}

    def take(self, indices: np.ndarray) -> Columns:
        """Return the windows `indices` [B]: x and y int32 [B, T]."""
        rows = np.arange(len(self))[indices]  # checks the range, and resolves negative ones
        starts = rows[:, None] * self.context_length
        window = self.tokens[starts + np.arange(self.context_length + 1)].astype(np.int32)
        return {"x": np.ascontiguousarray(window[:, :-1]), "y": np.ascontiguousarray(window[:, 1:])}

    def arrays(self) -> Columns:
        """Return every window: x and y int32 [N, T] (eight times the bytes of the text)."""
        return self.take(np.arange(len(self)))

    @property
    def info(self) -> dict[str, Any]:
        """`vocab_size` and `n_classes` 256, `context_length`, `input_shape`, `output_dim`."""
        return {
            "input_shape": (self.context_length,),
            "target_shape": (self.context_length,),
            "vocab_size": VOCAB_SIZE,
            "n_classes": VOCAB_SIZE,
            "output_dim": VOCAB_SIZE,
            "context_length": self.context_length,
        }

    def content_hash(self) -> str:
        """Return 64 hex digits of the split's bytes and the window length."""
        if "hash" not in self._kept:
            self._kept["hash"] = content_hash({"bytes": hash_array(self.tokens), "context_length": self.context_length})
        return self._kept["hash"]

    def unigram_entropy(self) -> float:
        """Return the entropy of the split's byte frequencies, in nats: the loss of the best context-free model."""
        counts = np.bincount(self.tokens, minlength=VOCAB_SIZE)
        shares = counts[counts > 0] / counts.sum()
        return float(-math.fsum(shares * np.log(shares)))


def _read_text(path: str | None, pattern: str, max_bytes: int) -> bytes:
    if path is None:
        files = _files_below(Path(sysconfig.get_path("stdlib")), "*.py", stdlib=True)
    else:
        root = Path(path)
        if not root.exists():
            raise DataError(f"text_bytes: {path} does not exist; give a UTF-8 file or a folder")
        files = [root] if root.is_file() else _files_below(root, pattern, stdlib=False)
    parts: list[bytes] = []
    size = 0
    for file in files:
        parts.append(_read_utf8(file))
        size += len(parts[-1])
        if size >= max_bytes:
            break
    text = b"".join(parts)
    if not text:
        raise DataError(f"text_bytes: no text in {path or 'the standard library'} (file names {pattern!r})")
    cut = min(max_bytes, len(text))
    while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # a continuation byte: the cut is inside a character
        cut -= 1
    return text[:cut]


def _files_below(root: Path, pattern: str, *, stdlib: bool) -> list[Path]:
    """Return the files to read in the order of their relative path (by code point, `/` between the parts)."""
    skipped_folders = {"__pycache__"} | (_STDLIB_SKIPPED_FOLDERS if stdlib else set())
    skipped_files = (".*", *(_STDLIB_SKIPPED_FILES if stdlib else ()))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped_folders and not name.startswith(".")]
        for name in fnmatch.filter(names, pattern):
            file = Path(folder, name)
            if not any(fnmatch.fnmatchcase(name, skip) for skip in skipped_files) and not file.is_symlink():
                found.append(file)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read_utf8(file: Path) -> bytes:
    try:
        data = file.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise DataError(f"text_bytes: {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"text_bytes: {file} is not UTF-8 at byte {error.start}; leave it out with `pattern` (e.g. '*.txt')"
        ) from error
    return data
