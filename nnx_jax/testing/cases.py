"""Cases: what one training of a comparison runs on, what all of them share, and the training itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from nnx_jax.step.shards import WholeBatches
from nnx_jax.testing.report import Outcome

LEAST_SHARDS = 8
"""Shards of an update, and of a microbatch of a window that is no power of two."""


@dataclass(frozen=True)
class Case:
    """What one training runs on: processes, devices of all of them together, microbatches of an update, dispatch."""

    processes: int
    devices: int
    window: int
    dispatch: str

    def __str__(self) -> str:
        many = f"{self.processes} processes, " if self.processes > 1 else ""
        plural = "s" if self.devices > 1 else ""
        return f"{many}{self.devices} device{plural}, window {self.window}, {self.dispatch}"


@dataclass(frozen=True)
class Setting:
    """What all trainings share.

    Attributes:
        make: gives a model with its first weights.
        train, val: rows; no val for None.
        params: length, optimizer and all that; window, dispatch and reduction are the cases'.
        rows: of an update, over all devices.
        shards: of an update, with the canonical reduction; None for the fast one.
        hooks: gives the hooks of one training.
    """

    make: Callable[[], NNModel]
    train: TrainingDataset
    val: TrainingDataset | None
    params: NNTrainParams
    rows: int
    shards: int | None
    hooks: Callable[[], Sequence[Any]]

    def of(self, case: Case) -> tuple[NNTrainParams, NNDataParams]:
        """Training and data of one case."""
        reduction: dict[str, Any] = {"reduction": "fast", "reduction_shards": LEAST_SHARDS}
        if self.shards is not None:
            shards = self.shards // case.window if is_power(case.window) else self.shards
            reduction = {"reduction": "canonical", "reduction_shards": shards}
        params = self.params.with_window(case.window).replace(dispatch=case.dispatch, **reduction)
        return params, NNDataParams(
            train=self.train, val=self.val, batch_size=self.rows // case.window, eval_batch_size=self.rows
        )


@dataclass(frozen=True)
class Trained:
    """A training that is over.

    Attributes:
        whole: what it told of microbatches that every device computes whole; nothing where none does.
    """

    model: NNModel
    outcome: Outcome
    whole: str = ""


def train(setting: Setting, case: Case, folder: Path, *, distributed: Any = None) -> Trained:
    """Train one case; its run lies in `place(folder, case)`."""
    model, (params, data) = setting.make(), setting.of(case)
    mesh = {"data": case.devices} if case.devices > 1 else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore", UserWarning)  # of settings that the cases differ in
        warnings.simplefilter("always", WholeBatches)
        model.train(
            params, hooks=setting.hooks(), data=data, mesh=mesh, distributed=distributed,
            runs_dir=place(folder, case), quiet=True,
        )  # fmt: skip
    for other in told:
        if other.category is not WholeBatches:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    whole = next((str(each.message) for each in told if each.category is WholeBatches), "")
    return Trained(model, read(place(folder, case)), whole)


def place(folder: Path, case: Case) -> Path:
    """The runs directory of one case."""
    return folder / f"{case.processes}-{case.devices}-{case.window}-{case.dispatch}"


def read(runs: Path) -> Outcome:
    """What the one run in this directory left behind."""
    (run,) = NNRun.all(runs)
    best = None if run.best is None else (run.best.epoch, run.best.step)
    return Outcome(read_point(RunPaths(runs, run.id)).load_all(), run.records, best)


def fresh(model: Any, loss: Any) -> NNModel:
    """A model with the first weights; what is given stays as it is."""
    made = model if isinstance(model, NNModel | nnx.Module) else model()
    if isinstance(made, nnx.Module):
        return NNModel(module=nnx.clone(made), loss=loss)
    if made is not model:
        return made
    twin = copy.copy(made)
    if made.models:
        twin._module = nnx.clone(made.net)
    return twin


def is_power(number: int) -> bool:
    """Whether it is 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0
