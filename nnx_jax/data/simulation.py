"""Pairs made by a simulation: parameters drawn from a prior, and what a forward model makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from pydantic import PrivateAttr, field_validator

from nnx_jax.core.errors import OperatorTypeError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.data.dataset import ColumnInfo, describe_row
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.identity import Part
from nnx_jax.data.iterable import stack_rows
from nnx_jax.data.splits import PartitionedDataset, tenths


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of base seed `seed`, in 0 .. 2**63 - 1.

    Both numbers go through numpy's SeedSequence (as seed and spawn key), so that samples of neighbouring base seeds
    have nothing in common; sums would make sample 1 of seed 0 the sample 0 of seed 1.
    """
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@register("simulation")
class SimulationDataset(PartitionedDataset):
    """Samples `(x, y)`: x is drawn from `prior`, y is what the forward model makes of it.

    Sample i is a function of (`seed`, i) alone: the same at every pass, in every process and in any order. It is
    computed when it is asked for; put a `CachedDataset` around it where that is slow.

    Args:
        forward_model: an object with `step(state, dt)` and `dt`.
        prior: an operator called with `prior(seed=s)`, s a whole number below 2**63, that returns the parameters x, an
            array or number. All of s counts: `numpy.random.default_rng(s)` uses it, `jax.random.key` takes the lower 32
            bits only, so use `jax.random.fold_in(jax.random.key(s >> 32), s & 0xFFFFFFFF)`.
        n_samples: samples of the three parts together: eight tenths are train, one val, one test (`splits.tenths`).
        cycle: called instead of one step: y = cycle(x).
        obs_op: what is seen of y: y = obs_op(y).
        seed: base seed of the samples. No two samples share a seed, within a split, between splits, or between base
            seeds.
        split: train, val or test.

    The hash is of all that is computed with: class and parameters of the model, the prior, the cycle and the
    observation (see `identity.identity_of`). Nothing is simulated for it.

    Raises:
        OperatorTypeError: (a TypeError) a part of another kind.
        ConfigError: (a ValueError) `n_samples` below 1, another split.
        DataError: samples of different shapes, naming the sample. What a part itself raises is not caught.
    """

    parts: ClassVar[tuple[str, ...]] = ("forward_model", "prior", "cycle", "obs_op")

    forward_model: Part
    prior: Part
    n_samples: int
    cycle: Part = None
    obs_op: Part = None

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @field_validator("n_samples")
    @classmethod
    def _check_samples(cls, n_samples: int) -> int:
        if n_samples < 1:
            raise ValueError(f"n_samples must be positive, found {n_samples}")
        return n_samples

    def problems(self) -> Iterator[tuple[str, str]]:
        """Every part must do what it is called for."""
        yield from super().problems()
        if not callable(getattr(self.forward_model, "step", None)) or not hasattr(self.forward_model, "dt"):
            name = type(self.forward_model).__name__
            raise OperatorTypeError(
                f"a ForwardModel has step(state, dt) and dt; {name} lacks one", path="forward_model"
            )
        if not isinstance(self.prior, Operator):
            raise OperatorTypeError(f"expected an Operator called with seed=; got {_name(self.prior)}", path="prior")
        for name in ("cycle", "obs_op"):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise OperatorTypeError(f"expected an operator or a function; got {_name(part)}", path=name)

    def __len__(self) -> int:
        """Return the number of samples of this split."""
        return len(tenths(self.n_samples, self.split))

    def take(self, indices: np.ndarray) -> Columns:
        """Return the samples `indices` [B] of this split, x and y stacked."""
        place = tenths(self.n_samples, self.split)
        numbers = np.arange(place.start, place.stop)[indices]  # checks the range, and resolves negative ones
        found = stack_rows([self._sample(int(number)) for number in numbers], numbers, type(self).__name__)
        return found or {name: np.zeros((0, *info.shape), info.dtype) for name, info in self.columns.items()}

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one sample, of the very first one; also of a split without samples."""
        if "columns" not in self._kept:
            first = {name: np.asarray(value) for name, value in self._sample(0).items()}
            self._kept["columns"] = {name: ColumnInfo(value.shape, value.dtype) for name, value in first.items()}
        return dict(self._kept["columns"])

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know, as far as one sample tells."""
        return describe_row(self.columns)

    def sample_seeds(self) -> list[int]:
        """Return the seed of every sample of this split, in order."""
        return [sample_seed(self.seed, number) for number in tenths(self.n_samples, self.split)]

    def _sample(self, number: int) -> dict[str, Any]:
        """Sample `number` of all three splits."""
        x = self.prior(seed=sample_seed(self.seed, number))
        model = self.forward_model
        y = model.step(x, model.dt) if self.cycle is None else self.cycle(x)
        return {"x": x, "y": y if self.obs_op is None else self.obs_op(y)}


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", f"a {type(value).__name__}")
