"""The 1797 handwritten digits that scikit-learn carries: real images for examples and tests, offline."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from nnx_jax.core.registry import register
from nnx_jax.data.dataset import InMemoryDataset
from nnx_jax.data.dtypes import Columns

SPLIT_ROWS = {"train": 1444, "val": 177, "test": 176}
_BRIGHTEST = 16.0


@register("digits")
class DigitsDataset(InMemoryDataset):
    """Handwritten digits 0..9 (UCI "Optical Recognition of Handwritten Digits", the copy in scikit-learn).

    The split is fixed and stratified, and no generator takes part: of every ten images of one digit, in file order, the
    first eight are `train`, the ninth is `val`, the tenth is `test`. That gives 1444, 177 and 176 rows.

    `x` is float32 [N, 64] in 0..1 (the stored 0..16 divided by 16), or [N, 8, 8, 1] with `image`; `y` int32 [N].

    Raises:
        ImportError: scikit-learn is not installed; names the extra.
    """

    split: Literal["train", "val", "test"] = "train"
    image: bool = False

    n_classes: ClassVar[int] = 10

    def load(self) -> Columns:
        """Read the images of this split."""
        pixels, labels = _stored_digits()
        rows = split_rows(labels, self.split)
        x = (pixels[rows] / _BRIGHTEST).astype(np.float32)
        return {"x": x.reshape(-1, 8, 8, 1) if self.image else x, "y": labels[rows]}


def split_rows(labels: np.ndarray, split: str) -> np.ndarray:
    """Return the row numbers of `split`: by each row's rank among the rows of its own label, modulo 10."""
    rank = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        mine = labels == label
        rank[mine] = np.arange(mine.sum())
    tenth = rank % 10
    return np.flatnonzero({"train": tenth < 8, "val": tenth == 8, "test": tenth == 9}[split])


def _stored_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the dataset kind 'digits' reads scikit-learn's copy of the images: pip install 'nnx_jax[examples]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels), np.asarray(labels)
