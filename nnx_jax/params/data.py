"""The data of a run: its datasets and how they are cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from nnx_jax.core.registry import OneOf
from nnx_jax.core.spec import ENVIRONMENT, Spec
from nnx_jax.params.fields import Seed, Size

Dataset = Annotated[Any, OneOf("dataset")]
"""A dataset: an instance, or a mapping with the `kind` of a registered one."""


class NNDataParams(Spec):
    """Datasets and batches."""

    also_called: ClassVar[Mapping[str, str]] = {"batch": "batch_size", "valid": "val", "validation": "val"}

    train: Dataset
    """Rows to train on."""
    val: Dataset | None = None
    """Rows for the evaluation during training."""
    test: Dataset | None = None
    """Rows for the one evaluation at the end."""
    batch_size: Size = 32
    """Rows per microbatch."""
    tail: Literal["pad", "drop", "keep", "straddle"] = "pad"
    """The last, shorter batch of a pass: padded with masked rows, left out, kept shorter, or filled up with the first
    rows of the next pass, so that an epoch is as many passes as end together with a batch."""
    shuffle: bool = True
    """Whether every epoch has its own order, a function of seed + epoch."""
    seed: Seed | None = None
    """Seed of the order; none: the seed of training."""
    eval_batch_size: Size | None = None
    """Rows per batch in evaluation; none: batch_size."""
    prefetch: Annotated[Annotated[int, Field(ge=0, le=1024)] | None, ENVIRONMENT] = None
    """Batches that a thread gathers and brings to the device ahead of the step; none: 2, and 0 on a CPU. No number
    depends on it."""

    def widened(self, wide: bool = True) -> Self:
        """Return the same with columns of float64 as they are, for training in float64; or narrowed again."""
        given = {split: getattr(self, split) for split in ("train", "val", "test")}
        found = {split: dataset.widened(wide) for split, dataset in given.items() if hasattr(dataset, "widened")}
        return self if all(found[split] is given[split] for split in found) else self.replace(**found)

    def identity(self, default_seed: int) -> dict[str, Any]:
        """Return what the run id knows of the data: the rows (not where they lie), and how they are cut.

        Settings that are written out but say the same as leaving them out do not count.

        Args:
            default_seed: the seed that `seed: none` stands for.
        """
        state = self.changed()
        for split in ("train", "val", "test"):
            if (dataset := getattr(self, split)) is not None:
                state[split] = dataset.content_hash()
        if self.seed == default_seed:
            state.pop("seed", None)
        if self.eval_batch_size == self.batch_size:
            state.pop("eval_batch_size", None)
        state.pop("prefetch", None)
        return state
