"""assert_exact: a training for each number of devices, processes, window and dispatch, compared with the plain one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_jax.core.errors import ConfigError
from nnx_jax.data.arrays import as_dataset
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.model import NNModel
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.step.shard_noise import draws_bits
from nnx_jax.testing import group
from nnx_jax.testing.cases import LEAST_SHARDS, Case, Setting, fresh, is_power, place, read, train
from nnx_jax.testing.report import ExactReport, Outcome, Row, compare

_FAST_RTOL = 1e-3


def assert_exact(
    model: NNModel | nnx.Module | Callable[[], NNModel | nnx.Module],
    data: Any,
    params: NNTrainParams | None = None,
    *,
    val: Any = None,
    batch_size: int | None = None,
    loss: Any = None,
    hooks: Callable[[], Sequence[Any]] = tuple,
    devices: Sequence[int] = (1, 2, 4),
    windows: Sequence[int] = (1, 4),
    processes: Sequence[int] = (1,),
    dispatch: Sequence[str] = ("step", "span"),
    reduction: str = "canonical",
    rtol: float | None = None,
    timeout_seconds: float = 600.0,
) -> ExactReport:
    """Train one model on every combination, and compare with one device, one batch an update, one call an update.

    A training is compared with one of the same window where its windows cannot give the same numbers: where the model
    draws noise (each microbatch has its own), keeps statistics of batches, or compares their rows.

    Args:
        model: a model, or a function that gives one with the same weights at every call. For several processes a
            function at the top of a module, which each of them imports.
        data: rows to train on: a dataset, or arrays by name, {"x": ..., "y": ...}, each [N, ...].
        params: how to train; default: two epochs of AdamW. Its window, dispatch and reduction are not used.
        val: rows to validate on, as `data`.
        batch_size: rows of an update on all devices together; default: twice the shards of an update.
        loss: of a module; see NNModel.
        hooks: gives the hooks of one training, each time new ones.
        devices: numbers of devices of all processes together. What cannot be dealt evenly to the
            processes is left out.
        windows: numbers of microbatches that make an update.
        processes: numbers of processes on this machine; more than one start as commands of their own.
        dispatch: modes, "step" and "span".
        reduction: "canonical", or "fast", which is compared by a tolerance.
        rtol: largest relative difference allowed, of arrays relative to the largest value of their kind, as of all
            parameters; None: equal bits, with the fast reduction 1e-3. Adam turns the rounding of a gradient near zero
            into a step of its rate, so give it more or train by SGD.
        timeout_seconds: for all trainings of one number of processes.

    Returns:
        A report; `print` it for the table.

    Raises:
        AssertionError: something differs by more than is allowed; its message is the table.
        ConfigError: (a ValueError) fewer devices than asked for, or numbers that do not fit together.
    """
    setting = Setting(
        make=lambda: fresh(model, loss),
        train=as_dataset(data),
        val=None if val is None else as_dataset(val),
        params=params or NNTrainParams(n_epochs=2, optim=NNOptimParams(kind="adamw", max_lr=1e-3)),
        rows=batch_size or 2 * _shards(devices, windows),
        shards=_shards(devices, windows) if reduction == "canonical" else None,
        hooks=hooks,
    )
    _check(setting, devices, windows, processes, dispatch, reduction)
    cases = [Case(*case) for case in product(processes, devices, windows, dispatch) if case[1] % case[0] == 0]
    with tempfile.TemporaryDirectory(prefix="nnx-jax-exact-") as folder:
        report = _Trainings(setting, Path(folder), given=(model, hooks), timeout=timeout_seconds).report(cases, rtol)
    if not report.passed:
        raise AssertionError(f"not every training gives the same:\n{report}")
    return report


class _Trainings:
    """Trains the cases, each in a folder of its own, and keeps what they are compared with."""

    def __init__(self, setting: Setting, folder: Path, *, given: tuple[Any, Any], timeout: float) -> None:
        self.setting, self.folder, self._given, self._timeout = setting, folder, given, timeout
        self.notes: list[str] = []
        self._known: dict[Case, Outcome] = {}
        self._alike = True
        """Windows of several microbatches give the numbers of one."""

    def report(self, cases: Sequence[Case], rtol: float | None) -> ExactReport:
        """Train everything, and compare."""
        plain = Case(1, 1, 1, "step")
        self._known[plain] = self._first(plain)
        if self.setting.shards is None and rtol is None:
            rtol = _FAST_RTOL
        self._together([case for case in cases if case.processes > 1])
        rows = []
        for case in cases:
            reference = plain if self._alike and (self.setting.shards is None or is_power(case.window)) else None
            reference = reference or Case(1, 1, case.window, "step")
            if case != reference:
                same = case.window == reference.window
                found = compare(self._one(case), self._one(reference), same_window=same)
                rows.append(Row(str(case), str(reference), found))
        return ExactReport(tuple(rows), rtol, tuple(self.notes))

    def _first(self, plain: Case) -> Outcome:
        """The plain training, and whether its windows give the numbers of one batch."""
        found = train(self.setting, plain, self.folder)
        if found.whole:
            self.notes.append(found.whole)
        why = _unlike(found.model, self.setting) or ("computes its batches whole" if found.whole else "")
        if why:
            self._alike = False
            self.notes.append(f"the model {why}, so a training is compared with one of the same window")
        return found.outcome

    def _one(self, case: Case) -> Outcome:
        if case not in self._known:
            self._known[case] = train(self.setting, case, self.folder).outcome
        return self._known[case]

    def _together(self, cases: Sequence[Case]) -> None:
        """Train the cases of several processes."""
        for size, devices in dict.fromkeys((case.processes, case.devices) for case in cases):
            mine = [case for case in cases if (case.processes, case.devices) == (size, devices)]
            group.train_in_processes(self.setting, self._given, mine, self.folder, timeout=self._timeout)
            self._known |= {case: read(place(self.folder, case)) for case in mine}


def _unlike(model: NNModel, setting: Setting) -> str:
    """Why windows of several microbatches give other numbers than one; nothing where they do not."""
    pure = PureModule(model.net, mask_rows=True)
    if pure.model_state:
        return "keeps statistics of its batches"
    row = setting.train.take(np.arange(1))
    signature = {name: jax.ShapeDtypeStruct((setting.rows, *c.shape[1:]), c.dtype) for name, c in row.items()}
    signature["mask"] = jax.ShapeDtypeStruct((setting.rows,), np.float32)
    named = {**pure.params, **pure.frozen}
    draws = draws_bits(lambda key, batch: pure.forward(named, pure.model_state, batch, key, True)[0], signature)
    return "draws noise for every microbatch" if draws else ""


def _shards(devices: Sequence[int], windows: Sequence[int]) -> int:
    """Shards of an update: a power of two, enough for the most devices and the longest window."""
    most = max(devices, default=1) * max(windows, default=1)
    return max(LEAST_SHARDS, 1 << (most - 1).bit_length())


def _check(
    setting: Setting, devices: Sequence[int], windows: Sequence[int], processes: Sequence[int],
    dispatch: Sequence[str], reduction: str,
) -> None:  # fmt: skip
    """Refuse what cannot be run, before anything is.

    Raises:
        ConfigError: naming the argument.
    """
    if reduction not in ("canonical", "fast"):
        raise ConfigError(f"got {reduction!r}; write 'canonical' or 'fast'", path="reduction")
    for name, values in (("devices", devices), ("windows", windows), ("processes", processes)):
        if not values or any(value < 1 for value in values):
            raise ConfigError(f"got {tuple(values)}; give numbers from 1 on", path=name)
    if not dispatch or not set(dispatch) <= {"step", "span"}:
        raise ConfigError(f"got {tuple(dispatch)}; give 'step', 'span' or both", path="dispatch")
    powers = setting.shards is not None
    most, there = max(devices, default=1) if 1 in processes else 1, len(jax.local_devices())
    if most > there:
        raise ConfigError(
            f"got {most}, but this process has {there}; on a CPU set JAX_NUM_CPU_DEVICES={most} in the environment "
            "before Python starts, or os.environ['JAX_NUM_CPU_DEVICES'] before anything imports jax (in a conftest.py)",
            path="devices",
        )
    for window in windows:
        unit = window * max(1, setting.of(Case(1, 1, window, "step"))[0].reduction_shards if powers else 1)
        if setting.rows % unit:
            raise ConfigError(
                f"got {setting.rows}; for a window of {window} the rows of an update are a multiple of {unit}: write "
                f"{-(-setting.rows // unit) * unit}",
                path="batch_size",
            )
