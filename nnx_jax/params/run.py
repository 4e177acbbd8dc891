"""A whole run as one specification: the tree of a configuration file, its cross-rules, and the id it gives the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from nnx_jax.core.errors import DataError, nearest
from nnx_jax.core.explain import split_path
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import OneOf
from nnx_jax.core.spec import ENVIRONMENT, Spec
from nnx_jax.params.callbacks import CallbackParams, EarlyStoppingParams
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.fields import Name, Precision, Text
from nnx_jax.params.model import NNModelParams, metric_name_problems
from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams

RUN_ID_DIGITS = 16


class RunSpec(Spec):
    """One run. Environment (imports, mesh, callbacks, checkpoints, dispatch) is kept in files and never counts."""

    imports: Annotated[tuple[Text, ...], ENVIRONMENT] = ()
    """Modules whose import registers classes of your own."""
    backend: Name = "flax"
    """The engine."""
    model: NNModelParams = NNModelParams()
    """What is trained."""
    data: NNDataParams | None = None
    """What it is trained on; none when loaders are given from Python."""
    train: NNTrainParams
    """How it is trained."""
    hooks: tuple[Annotated[Any, OneOf("hook")], ...] = ()
    """What takes part in the compiled step."""
    callbacks: Annotated[tuple[CallbackParams, ...], ENVIRONMENT] = ()
    """What watches the run on the host."""
    checkpoint: Annotated[CheckpointParams, ENVIRONMENT] = CheckpointParams()
    """When the run is committed."""
    mesh: Annotated[Mapping[Name, Annotated[int, Field(ge=1, le=2**16)]], ENVIRONMENT] = {}
    """Devices by axis, as in {data: 2}."""

    @property
    def precision(self) -> Precision:
        """The number format, from wherever it is written."""
        return self.train.precision or self.model.precision

    @property
    def data_seed(self) -> int:
        """The seed of the order of rows."""
        seed = None if self.data is None else self.data.seed
        return self.train.seed if seed is None else seed

    def identity(
        self,
        *,
        net: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        hooks: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Return the JSON that names the run: model, net, data, train and, when given, salt.

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
        train = self.train.state()
        train.pop("precision", None)
        salt = train.pop("salt", None)
        # A hook that only watches (`observes = True` in its class) changes no number, so it changes no id.
        named = [hook.state() for hook in self.hooks if not getattr(hook, "observes", False)]
        if named or hooks:
            train["hooks"] = [*named, *hooks]
        own_data = {} if self.data is None else self.data.identity(self.train.seed)
        identity: dict[str, Any] = {
            "model": model,
            "net": own_net if net is None else dict(net),
            "data": own_data if data is None else dict(data),
            "train": train,
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
        rows = self.train.train_loader
        if rows is not None:
            return len(rows) if hasattr(rows, "__len__") else None
        if self.data is None or not hasattr(self.data.train, "__len__"):
            return None
        whole, rest = divmod(len(self.data.train), self.data.batch_size)
        return whole + (rest > 0 and self.data.tail != "drop")

    def planned_updates(self) -> int | None:
        """Return the number of updates of the whole run, None when it cannot be known."""
        hook: Any = next((h for h in self.hooks if getattr(h, "exclusive_key", None) == "accumulation"), None)
        batches = self.batches_per_epoch()
        if hook is None:
            return self.train.planned_updates(batches)
        return self.train.planned_updates(batches, window=hook.k, carries=hook.on_partial == "carry")

    def problems(self) -> Iterator[tuple[str, str]]:
        """The rules between the parts."""
        yield from super().problems()
        yield from self._precision_problems()
        yield from self._data_problems()
        yield from self._metric_problems()
        if self.train.monitor is not None:
            yield from self._monitor_problems(self.train.monitor, "train.monitor")
        for index, callback in enumerate(self.callbacks):
            if isinstance(callback, EarlyStoppingParams) and callback.monitor is not None:
                yield from self._monitor_problems(callback.monitor, f"callbacks[{index}].monitor")
        yield from self._schedule_problems()

    def _precision_problems(self) -> Iterator[tuple[str, str]]:
        given, model = self.train.precision, self.model.precision
        if given is not None and model != "float32" and given != model:
            yield "train.precision", f"got '{given}', but model.precision is '{model}'; write it in one place"

    def _data_problems(self) -> Iterator[tuple[str, str]]:
        loaders = {"train": self.train.train_loader, "val": self.train.val_loader}
        for split, loader in loaders.items():
            if loader is not None and self.data is not None and getattr(self.data, split) is not None:
                yield f"train.{split}_loader", f"data.{split} is given as well; give one of them"

    def _metric_problems(self) -> Iterator[tuple[str, str]]:
        declared = [metric.key for metric in self.model.metrics]
        for path, message in metric_name_problems([*declared, *(self.train.extra_metrics or {})]):
            if split_path(path)[1] >= len(declared):
                yield "train.extra_metrics", message

    def _monitor_problems(self, monitor: MonitorSpec, at: str) -> Iterator[tuple[str, str]]:
        declared = {metric.key: metric for metric in self.model.metrics}
        legal = ["loss", *declared, *(self.train.extra_metrics or {})]
        if monitor.metric not in legal:
            yield (
                f"{at}.metric",
                f"got '{monitor.metric}', which this run does not record{nearest(monitor.metric, legal)} "
                "(declare it under model.metrics)",
            )
        elif monitor.mode is None and monitor.metric != "loss" and _direction(declared.get(monitor.metric)) is None:
            yield f"{at}.mode", f"the better direction of '{monitor.metric}' is not known; write min or max"
        has_val = self.train.val_loader is not None or (self.data is not None and self.data.val is not None)
        if monitor.split == "val" and not has_val and (self.data is not None or self.train.train_loader is not None):
            yield f"{at}.split", "got 'val', but there is no validation data; give data.val, or split: train"

    def _schedule_problems(self) -> Iterator[tuple[str, str]]:
        scheduler = self.train.scheduler
        floor, top = scheduler.min_lr, self.train.optim.max_lr
        if floor is not None and floor != scheduler.default_of("min_lr") and floor > top:
            yield "train.scheduler.min_lr", f"got {floor}, more than train.optim.max_lr={top}"
        if scheduler.total_steps is None:
            return
        on_updates = scheduler.clock == "optimizer_update"
        plan = self._plan_if_readable() if on_updates else self.train.n_epochs
        if plan is not None and scheduler.total_steps < plan:
            unit = "updates" if on_updates else "epochs"
            yield (
                "train.scheduler.total_steps",
                f"got {scheduler.total_steps}, but {plan} {unit} are planned; write {plan} or more, or leave it out",
            )

    def _plan_if_readable(self) -> int | None:
        try:
            return self.planned_updates()
        except (OSError, ImportError, DataError):
            return None  # reading the data says it better, and does so before the run starts


def _direction(metric: Any) -> str | None:
    return getattr(metric, "mode", None)
