"""The three parts of a dataset, train, val and test: eight tenths, one and one, of the same rows every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr

from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.data.dataset import ColumnInfo, TrainingDataset
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.identity import full_name, identity_of, part_state
from nnx_jax.data.partition import epoch_order

Split = Literal["train", "val", "test"]
Seed = Annotated[int, Field(ge=0)]
_TENTHS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}


def tenths(rows: int, split: str) -> range:
    """Return the positions of `split` among `rows` rows: of n, `n*8//10` for train, up to `n*9//10` val, the rest test.

    The three ranges cover every position once; of few rows, a part may have none.
    """
    first, last = _TENTHS[split]
    return range(rows * first // 10, rows * last // 10)


class PartitionedDataset(TrainingDataset):
    """A dataset that knows which of the three parts it is: `with_split` gives another one.

    Attributes:
        parts: names of the fields that hold objects given in Python; `state()` tells them by class and hash.
    """

    parts: ClassVar[tuple[str, ...]] = ()

    seed: Seed = 0
    """Of whatever is drawn at random."""
    split: Split = "train"
    """Which part this is."""

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """Return the plain values of this dataset (see `Spec.state`); a part given in Python as its class and hash."""
        return Spec.state(self._shown(part_state), environment=environment)

    def content_hash(self) -> str:
        """Return 64 hex digits of the class and everything it was given; of an operator, by its own hash."""
        told = {"class": full_name(type(self)), "fields": Spec.state(self._shown(identity_of)), "wide": self.wide}
        return content_hash(told)

    def _shown(self, told: Callable[[Any], Any]) -> Self:
        shown = self.model_copy()
        for name in self.parts:
            shown._set(name, told(getattr(self, name)))
        return shown


@register("split")
class SplitDataset(TrainingDataset):
    """One of the three parts of another dataset; `dataset.with_split(...)` and `dataset.splits()` make it.

    Args:
        source: the dataset; one whose rows can be asked for by number.
        split: `train` (the first eight tenths of the order), `val` (the ninth) or `test` (the tenth).
        seed: of the order the tenths are cut from; null takes the rows as they stand, which is right for a series in
            time, and wrong for rows that are sorted by class.
    """

    source: TrainingDataset
    split: Split = "train"
    seed: Seed | None = None

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def rows(self) -> np.ndarray:
        """Row numbers of the source, int64 [n], in the order of this part."""
        if "rows" not in self._kept:
            whole = len(self.source)
            place = tenths(whole, self.split)
            order = epoch_order(whole, self.seed or 0, 0, shuffle=self.seed is not None)
            self._kept["rows"] = order[place.start : place.stop]
        return self._kept["rows"]

    def __len__(self) -> int:
        """Return the number of rows of this part."""
        return len(self.rows)

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """As of the source."""
        return self.source.columns

    @property
    def info(self) -> dict[str, Any]:
        """As of the whole source: a class that one part lacks is still a class."""
        return self.source.info

    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B] of this part."""
        return self.source.take(self.rows[indices])

    def arrays(self) -> Columns | None:
        """Return every column of this part, or None when the source is not in memory."""
        if "arrays" not in self._kept:
            whole = self.source.arrays()
            self._kept["arrays"] = whole and {name: column[self.rows] for name, column in whole.items()}
        return self._kept["arrays"] and dict(self._kept["arrays"])

    @property
    def augments(self) -> bool:
        """As of the source."""
        return self.source.augments

    def augment(self, batch: Columns, rng: np.random.Generator) -> Columns:
        """As of the source."""
        return self.source.augment(batch, rng)

    def widened(self, wide: bool = True) -> Self:
        """See `TrainingDataset.widened`."""
        return with_source_widened(self, wide)

    def content_hash(self) -> str:
        """Return 64 hex digits of the source's hash, the part and the seed."""
        told = {"of": self.source.content_hash(), "split": self.split, "seed": self.seed}
        return content_hash({"split": told})


def with_source_widened(dataset: Any, wide: bool) -> Any:
    """Return a dataset made of another one, over that one widened (or narrowed again)."""
    if wide == dataset.wide:
        return dataset
    other = dataset.replace(source=dataset.source.widened(wide))
    other._wide = wide
    return other
