"""A whole run as one specification: the tree of a configuration file, its cross-rules, and the id it gives the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from nnx_jax.core.errors import DataError, nearest
from nnx_jax.core.explain import split_path
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import OneOf
from nnx_jax.core.spec import ENVIRONMENT, Spec
from nnx_jax.params.callbacks import CallbackParams, EarlyStoppingParams
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.fields import Name, Precision, Text
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.metrics import MetricSpec
from nnx_jax.params.model import NNModelParams, metric_name_problems
from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams

RUN_ID_DIGITS = 16
AXES = ("data", "fsdp", "tensor")
"""Axes of a mesh that have a meaning of their own."""
AxisEntry = Name | tuple[Name, ...] | None
"""What splits one dimension: an axis, several, or none."""


class RunSpec(Spec):
    """One run. Environment (imports, mesh, callbacks, checkpoints, dispatch) is kept in files and never counts.

    Exactly one of `train` and `trainer` says how it is trained.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["train"]}, {"required": ["trainer"]}]},
    )

    imports: Annotated[tuple[Text, ...], ENVIRONMENT] = ()
    """Modules whose import registers classes of your own."""
    backend: Name = "flax"
    """The engine."""
    model: NNModelParams = NNModelParams()
    """What is trained."""
    data: NNDataParams | None = None
    """What it is trained on; none when loaders are given from Python."""
    if TYPE_CHECKING:
        train: NNTrainParams = NNTrainParams()  # None where `trainer` is given; code for both reads `training`
    else:
        train: NNTrainParams | None = None
        """How it is trained, by one optimizer."""
    trainer: NNTrainerParams | None = None
    """How it is trained, by several named optimizers."""
    hooks: tuple[Annotated[Any, OneOf("hook")], ...] = ()
    """What takes part in the compiled step."""
    callbacks: Annotated[tuple[CallbackParams, ...], ENVIRONMENT] = ()
    """What watches the run on the host."""
    checkpoint: Annotated[CheckpointParams, ENVIRONMENT] = CheckpointParams()
    """When the run is committed."""
    history: Annotated[HistoryJournal | None, ENVIRONMENT] = None
    """A journal in bounded memory in place of `idps.csv`, for long runs."""
    mesh: Annotated[Mapping[Name, Annotated[int, Field(ge=-1, le=2**16)]], ENVIRONMENT] = {}
    """Devices by axis: rows of a batch are split over `data` and `fsdp`, parameters over `fsdp`, and over `tensor` by
    the rules of a built-in net; -1 is the rest of the devices there are."""
    sharding: Annotated[Mapping[Text, tuple[AxisEntry, ...]], ENVIRONMENT] = {}
    """Rules of your own, the first that matches counts: patterns of parameter paths to the axis of each dimension, as
    in {"head.kernel": [null, tensor]}; null or nothing: not split."""
    elastic: Annotated[bool, ENVIRONMENT] = False
    """Whether a run may go on with another mesh, or another number of processes, than it was committed with."""
    given: tuple[Literal["objective", "step", "validation"], ...] = Field(default=(), exclude=True)
    """Python only: what the call gives in place of built-in parts; it may record values that no configuration names."""

    def _complete(self) -> None:
        if self.data is not None and not (self.train is None and self.trainer is None):
            self._set("data", self.data.widened(self.precision == "float64"))

    @property
    def block(self) -> Literal["train", "trainer"]:
        """The key under which the training is written, for the paths of errors."""
        return "train" if self.trainer is None else "trainer"

    @property
    def training(self) -> NNTrainParams | NNTrainerParams:
        """How it is trained: whichever of `train` and `trainer` is given."""
        return self.train if self.trainer is None else self.trainer

    def with_training(self, training: NNTrainParams | NNTrainerParams) -> Self:
        """Return a copy that is trained so; the block follows the class."""
        several = isinstance(training, NNTrainerParams)
        return self.replace(train=None if several else training, trainer=training if several else None)

    @property
    def precision(self) -> Precision:
        """The number format, from wherever it is written."""
        return self.training.precision or self.model.precision

    @property
    def data_seed(self) -> int:
        """The seed of the order of rows."""
        seed = None if self.data is None else self.data.seed
        return self.training.seed if seed is None else seed

    def identity(
        self,
        *,
        net: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        hooks: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Return the JSON that names the run: model, net, data, train (or trainer) and, when given, salt.

        Args:
            net: description of a module built in Python, in place of `model.net`.
            data: description of data given as a loader, in place of `data`.
            hooks: descriptions of hooks given in Python that are no configuration.
        """
        model = self.model.state()
        own_net = model.pop("net", {})
        model.pop("precision", None)
        if self.precision != "float32":
            model["precision"] = self.precision
        if self.backend != "flax":
            model["backend"] = self.backend
        training = self.training.state()
        training.pop("precision", None)
        salt = training.pop("salt", None)
        # A hook that only watches (`observes = True` in its class) changes no number, so it changes no id.
        named = [hook.state() for hook in self.hooks if not getattr(hook, "observes", False)]
        if named or hooks:
            training["hooks"] = [*named, *hooks]
        own_data = {} if self.data is None else self.data.identity(self.training.seed)
        identity: dict[str, Any] = {
            "model": model,
            "net": own_net if net is None else dict(net),
            "data": own_data if data is None else dict(data),
            self.block: training,
        }
        return identity if salt is None else {**identity, "salt": salt}

    def run_id(
        self,
        *,
        net: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        hooks: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the first 16 hex digits of the hash of `identity(...)`."""
        return content_hash(self.identity(net=net, data=data, hooks=hooks))[:RUN_ID_DIGITS]

    def batches_per_epoch(self) -> int | None:
        """Return the number of microbatches of one pass over the training rows, None when it cannot be known."""
        rows = self.training.train_loader
        if rows is not None:
            return len(rows) if hasattr(rows, "__len__") else None
        if self.data is None or not hasattr(self.data.train, "__len__"):
            return None
        rows, size = len(self.data.train), self.data.batch_size
        if self.data.tail == "straddle":
            return math.lcm(rows, size) // size
        whole, rest = divmod(rows, size)
        return whole + (rest > 0 and self.data.tail != "drop")

    def planned_updates(self) -> int | None:
        """Return the number of updates of the whole run, None when it cannot be known."""
        hook: Any = next((h for h in self.hooks if getattr(h, "exclusive_key", None) == "accumulation"), None)
        batches = self.batches_per_epoch()
        if hook is None:
            return self.training.planned_updates(batches)
        return self.training.planned_updates(batches, window=hook.k, carries=hook.on_partial == "carry")

    def problems(self) -> Iterator[tuple[str, str]]:
        """The rules between the parts."""
        yield from super().problems()
        if self.train is None and self.trainer is None:
            yield "train", "is required (or trainer, with several optimizers)"
            return
        if self.train is not None and self.trainer is not None:
            yield "trainer", "train is given as well; write one of them"
            return
        for axis, size in self.mesh.items():
            if size == 0:
                yield f"mesh.{axis}", "got 0; write a number of devices, or -1 for all there are"
        if sum(size == -1 for size in self.mesh.values()) > 1:
            yield "mesh", "only one axis can be -1, the rest of the devices"
        yield from self._sharding_problems()
        yield from self._precision_problems()
        yield from self._data_problems()
        yield from self._metric_problems()
        if self.training.monitor is not None:
            yield from self._monitor_problems(self.training.monitor, f"{self.block}.monitor")
        for index, callback in enumerate(self.callbacks):
            if isinstance(callback, EarlyStoppingParams) and callback.monitor is not None:
                yield from self._monitor_problems(callback.monitor, f"callbacks[{index}].monitor")
        for name in self.training.optimizers:
            yield from self._schedule_problems(name)

    def _sharding_problems(self) -> Iterator[tuple[str, str]]:
        """Rules name axes that there are, each once."""
        known = [*dict.fromkeys((*self.mesh, *AXES))]
        for pattern, entries in self.sharding.items():
            used = [axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ())]
            for axis in dict.fromkeys(used):
                at = f"sharding.{pattern}"
                if axis not in known:
                    yield at, f"names the axis '{axis}'; the axes are {', '.join(known)}{nearest(axis, known)}"
                elif used.count(axis) > 1:
                    yield at, f"names the axis '{axis}' {used.count(axis)} times; an axis splits one dimension"

    def _precision_problems(self) -> Iterator[tuple[str, str]]:
        given, model = self.training.precision, self.model.precision
        if given is not None and model != "float32" and given != model:
            yield f"{self.block}.precision", f"got '{given}', but model.precision is '{model}'; write it in one place"

    def _data_problems(self) -> Iterator[tuple[str, str]]:
        loaders = {"train": self.training.train_loader, "val": self.training.val_loader}
        for split, loader in loaders.items():
            if loader is not None and self.data is not None and getattr(self.data, split) is not None:
                yield f"{self.block}.{split}_loader", f"data.{split} is given as well; give one of them"

    def _metric_problems(self) -> Iterator[tuple[str, str]]:
        declared = [metric.key for metric in self.model.metrics]
        for path, message in metric_name_problems([*declared, *(self.training.extra_metrics or {})]):
            if split_path(path)[1] >= len(declared):
                yield f"{self.block}.extra_metrics", message

    def _monitor_problems(self, monitor: MonitorSpec, at: str) -> Iterator[tuple[str, str]]:
        training, declared = self.training, {metric.key: metric for metric in self.model.metrics}
        legal = ["loss", *declared, *(training.extra_metrics or {})]
        if monitor.metric not in legal and not self.given:
            yield (
                f"{at}.metric",
                f"got '{monitor.metric}', which this run does not record{nearest(monitor.metric, legal)} "
                "(declare it under model.metrics)",
            )
        elif monitor.mode is None and monitor.metric != "loss" and _direction(declared.get(monitor.metric)) is None:
            yield f"{at}.mode", f"the better direction of '{monitor.metric}' is not known; write min or max"
        has_val = training.val_loader is not None or (self.data is not None and self.data.val is not None)
        if monitor.split == "val" and not has_val and (self.data is not None or training.train_loader is not None):
            yield f"{at}.split", "got 'val', but there is no validation data; give data.val, or split: train"

    def _schedule_problems(self, name: str) -> Iterator[tuple[str, str]]:
        """The schedule of one optimizer fits its rate and the length of the run."""
        scheduler, top = self.training.schedules[name], self.training.optimizers[name].max_lr
        rate_at, at = (f"{self.block}.{place}" for place in self.training.places(name))
        floor = scheduler.min_lr
        if floor is not None and floor != scheduler.default_of("min_lr") and floor > top:
            yield f"{at}.min_lr", f"got {floor}, more than {rate_at}.max_lr={top}"
        if scheduler.total_steps is None:
            return
        on_updates = scheduler.clock == "optimizer_update"
        plan = self._plan_if_readable() if on_updates else self.training.n_epochs
        if plan is not None and scheduler.total_steps < plan:
            unit = "updates" if on_updates else "epochs"
            yield (
                f"{at}.total_steps",
                f"got {scheduler.total_steps}, but {plan} {unit} are planned; write {plan} or more, or leave it out",
            )

    def _plan_if_readable(self) -> int | None:
        if self.trainer is not None or "step" in self.given:
            return None  # a step of one's own may update an optimizer less often than once a window
        try:
            return self.planned_updates()
        except (OSError, ImportError, DataError):
            return None  # reading the data says it better, and does so before the run starts


def _direction(metric: Any) -> str | None:
    """The better direction as far as it is known here; a MetricSpec is only looked up when training starts."""
    return "known later" if isinstance(metric, MetricSpec) else getattr(metric, "mode", None)
