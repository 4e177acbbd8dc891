"""TrainingLoop: train for a number of updates, as an operator that takes a model in and gives the trained one out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nnx_jax.backends.base import Trained, check_backend, load_backend
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.core.stateful import StatefulOperator
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.params.fields import Count, Precision, Seed, Size

if TYPE_CHECKING:
    from nnx_jax.runs.artifact import TrainingArtifact

TASK_FIRST = ("numpyro-svi", "numpyro-mcmc", "blackjax")
"""Backends that infer a posterior: they take a task, and no operator to begin with."""
GRADIENT = ("nnx", "equinox", "lightning", "keras")
"""Backends that train the operator they are given."""


class TrainerConfig(Spec):
    """The settings of a TrainingLoop that are plain values, for those who keep them apart (decision D11)."""

    max_steps: Count
    """Length in committed updates."""
    seed: Seed = 0
    """Of everything random: order, dropout."""
    batch_size: Size = 32
    """Rows of a microbatch, over all processes."""
    accumulate: Count = 1
    """Microbatches of an update."""
    steps_per_epoch: Count | None = None
    """Updates between two `on_epoch_end`; nothing else depends on it."""
    eval_every_n_steps: Count = 500
    """Updates between evaluations, where there is something to evaluate on."""
    log_every_n_steps: Count = 100
    """Updates between two records of the metric writer."""
    checkpoint_every_n_steps: Count | None = None
    """Updates between commits; none: only the last update is committed."""
    max_checkpoints_to_keep: Count = 3
    """How many of the newest commits stay."""
    precision: Precision = "float32"
    """What is computed in; parameters and the optimizer's state stay float32."""
    on_nonfinite: Literal["raise", "skip", "stop"] = "raise"
    """What a loss or gradient that is not finite does: end with an error, be left out, or end the run as it stands."""


@register("training_loop")
class TrainingLoop(StatefulOperator):
    """Trains an operator on a dataset: `operator, artifact = TrainingLoop(model_op=..., dataset=..., ...).run()`.

    As a stateful operator it is called `loop(carrier, state) -> (trained operator, state)`: a model as the carrier, or
    in the state, is what it begins with, so `Sequential([pretrain, finetune])(None, None)` trains in two stages. A
    state that this very loop left (perhaps with another `max_steps`) is gone on from, bit for bit; of another loop's
    the weights are taken, and `resume="full"` takes its optimizer too.

    The unit is the committed update: "10 epochs" are `max_steps = 10 * rows // batch_size`. Batches are always full:
    the rows are shuffled anew for every pass, and a batch may hold the end of one pass and the beginning of the next.
    With `checkpoint_dir` the run is committed there; the same loop, called again, goes on from the last commit.

    Raises:
        TypeError: naming the field: no operator, no dataset, no task.
        ConfigError: (a ValueError) everything else that is wrong.
    """

    model_op: Operator | None = None
    """What is trained; it is never changed. None for a backend that takes a task."""
    dataset: Operator
    """Rows to train on."""
    val_dataset: Operator | None = None
    """Rows to evaluate on."""
    loss: Any = None
    """A loss operator, the kind of a built-in loss, or a function (predicted, target)."""
    task: Any = None
    """A TrainTask, `loss_fn(model, batch, key) -> (scalar, metrics)`, in place of a loss; or a Bayesian task."""
    metrics: tuple[Any, ...] = ()
    """Further values to measure, as in `NNModelParams.metrics`."""
    optimizer_config: Any = None
    """`{"name": "adamw", "lr": 3e-4, ...}` with optax's arguments, or an optax transformation."""
    max_steps: Count
    """Length in committed updates."""
    steps_per_epoch: Count | None = None
    """Updates between two `on_epoch_end`; nothing else depends on it."""
    batch_size: Size = 32
    """Rows of a microbatch, over all processes."""
    accumulate: Count = 1
    """Microbatches of an update."""
    backend: str = "nnx"
    """What trains; see `backend_names()`."""
    callbacks: tuple[Any, ...] = ()
    """Callbacks of either form, in their order."""
    metric_writer: Any = Field(default=None, exclude=True)
    """Python only: where values are written to."""
    hooks: tuple[Any, ...] = ()
    """What takes part in the compiled step; see `nnx_jax.hooks`."""
    eval_every_n_steps: Count = 500
    """Updates between evaluations; the last update is always evaluated."""
    log_every_n_steps: Count = 100
    """Updates between two records of the metric writer."""
    checkpoint_every_n_steps: Count | None = None
    """Updates between commits; none: only the last update is committed."""
    max_checkpoints_to_keep: Count = 3
    """How many of the newest commits stay."""
    checkpoint_dir: str | Path | None = None
    """Where commits are kept; none: nothing stays on the disk."""
    resume: Literal["auto", "full", "weights_only"] = "auto"
    """What is taken from a state it is called with; auto: all of it when this loop left it, else the weights."""
    precision: Precision = "float32"
    """What is computed in; parameters and the optimizer's state stay float32."""
    on_nonfinite: Literal["raise", "skip", "stop"] = "raise"
    """What a loss or gradient that is not finite does: end with an error, be left out, or end the run as it stands."""
    debug: bool = False
    """Whether everything runs operation by operation, for looking at values; slow."""
    sharding: Any = Field(default=None, exclude=True)
    """Python only: a ShardingSpec, or devices by axis; none: one device."""
    distributed: Any = Field(default=None, exclude=True)
    """Python only: a DDP, where the processes of a group train together."""
    seed: Seed = 0
    """Of everything random: order, dropout."""
    quiet: bool = False
    """Whether no progress is shown."""

    names_of_files: ClassVar[tuple[str, ...]] = ("checkpoint_dir", "quiet")
    lengths: ClassVar[tuple[str, ...]] = (
        "max_steps", "steps_per_epoch", "eval_every_n_steps", "log_every_n_steps", "checkpoint_every_n_steps",
        "max_checkpoints_to_keep", "callbacks", "resume", "val_dataset",
    )  # fmt: skip

    def __init__(self, /, *, config: TrainerConfig | None = None, **fields: Any) -> None:
        if config is not None:
            fields = _with_config(config, fields)
        if "max_steps" not in fields:
            raise TypeError("TrainingLoop needs max_steps, its length in updates (epochs * rows // batch_size)")
        _check_types(fields)
        if isinstance(fields.get("callbacks"), list):
            fields["callbacks"] = tuple(fields["callbacks"])
        super().__init__(**fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested errors keep their path

    def problems(self) -> Iterator[tuple[str, str]]:
        """One objective, an operator where one is trained, one word on where and when commits are made."""
        yield from super().problems()
        check_backend(self.backend)
        if self.loss is None and self.task is None:
            yield "loss", "neither loss nor task is given; give a loss or task"
        if self.model_op is None and self.backend in GRADIENT:
            yield "model_op", f"is required by the backend '{self.backend}', which trains it"
        commits = self._commits
        if self.checkpoint_dir is not None and commits.get("save_dir") not in (None, str(self.checkpoint_dir)):
            yield "checkpoint_dir", f"is {self.checkpoint_dir}, but a callback saves to {commits['save_dir']}; give one"
        every = commits.get("every_n_steps")
        if every is not None and self.checkpoint_every_n_steps not in (None, every):
            yield "checkpoint_every_n_steps", f"is {self.checkpoint_every_n_steps}, a callback says {every}; give one"
        parts = _parts(self.sharding)
        if parts is not None and self.batch_size % parts:
            yield "batch_size", f"is {self.batch_size}, which does not split over {parts} devices; give a multiple"

    # -- training ----------------------------------------------------------------------------------------------

    def run(self) -> tuple[Any, TrainingArtifact]:
        """Train, and return the trained operator with the artifact that says how it came about.

        Raises:
            ImportError: the backend's library is missing; it names the extra.
        """
        trained = self._train(None)
        return trained.operator, self._artifact(trained)

    def _apply(self, carrier: Any = None, state: TrainerCarryState | None = None) -> tuple[Any, TrainerCarryState]:
        """Train from a model, a state, or neither; return the trained operator and the state it is left in.

        Args:
            carrier: an operator to begin with in place of `model_op`; None for none.
            state: what a loop left, or None.
        """
        if state is not None and not isinstance(state, TrainerCarryState):
            raise TypeError(f"a TrainingLoop's state is a TrainerCarryState, got {type(state).__name__}")
        if carrier is not None and not isinstance(carrier, Operator):
            raise TypeError(
                f"a TrainingLoop's carrier is a model as an operator, or None; got {type(carrier).__name__}"
            )
        if carrier is not None:
            state = TrainerCarryState(carrier) if state is None else state.replace(model=carrier)
        trained = self._train(state)
        return trained.operator, trained.state

    def _train(self, state: TrainerCarryState | None) -> Trained:
        return load_backend(self.backend).run(self, state)

    def _artifact(self, trained: Trained) -> TrainingArtifact:
        """What the run leaves for the record; the callback layer fills in what it stored."""
        from nnx_jax.runs.artifact import TrainingArtifact

        stored = {name: value for each in self.callbacks for name, value in _filled(each).items() if value is not None}
        hashed = getattr(trained.operator, "content_hash", lambda: None)()
        return TrainingArtifact(
            training_pipeline_yaml=self.described(),
            dataset_hash=self.dataset.content_hash(),
            backend_info=dict(trained.info),
            metadata={"seed": self.seed, "loop": self.identity()},
            **{"trained_model_hash": hashed, **stored},
        )

    # -- where and when commits are made -----------------------------------------------------------------------

    @property
    def _commits(self) -> dict[str, Any]:
        """What the first callback with a cadence of commits says of them."""
        for each in self.callbacks:
            if hasattr(each, "every_n_steps") and hasattr(each, "keep_last"):
                save_dir = getattr(each, "save_dir", None)
                found = {"every_n_steps": each.every_n_steps, "keep_last": each.keep_last}
                return found | {"save_dir": None if save_dir is None else str(save_dir)}
        return {}

    @property
    def directory(self) -> str | None:
        """Where commits are kept: `checkpoint_dir`, or what a Checkpoint callback says; None for nowhere."""
        return str(self.checkpoint_dir) if self.checkpoint_dir is not None else self._commits.get("save_dir")

    @property
    def commit_every(self) -> int | None:
        """Updates between commits: of the loop, or of a Checkpoint callback; None for the last update only."""
        return self.checkpoint_every_n_steps or self._commits.get("every_n_steps")

    @property
    def keep(self) -> int:
        """How many of the newest commits stay."""
        return self._commits.get("keep_last", self.max_checkpoints_to_keep)

    # -- configuration -----------------------------------------------------------------------------------------

    def identity(self) -> str:
        """Return the hash of what makes the updates: without the length, cadences, callbacks and where files lie."""
        known = {n: v for n, v in self.changed().items() if n not in (*self.lengths, *self.names_of_files)}
        return content_hash({name: _described(value) for name, value in known.items()})

    def to_config(self) -> dict[str, Any]:
        """Return `state()`: plain values that `from_config` makes the same loop of.

        Raises:
            ConfigError: naming the part that only Python can give (a function, an array).
        """
        return self.state(environment=True)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainingLoop:
        """Return the loop that `to_config` describes."""
        return cls.from_state(config)

    def get_config(self) -> dict[str, Any]:
        """Return every setting as JSON values, for people to read; what no file can hold is told by its class."""
        found = {name: _described(getattr(self, name)) for name in type(self).model_fields}
        return {**found, "dataset_hash": self.dataset.content_hash()}

    def described(self) -> str:
        """Return the loop as YAML: loadable where every part is, else for people to read."""
        from nnx_jax.core import codec

        with contextlib.suppress(ConfigError):
            return self.to_yaml()
        return codec.dump_yaml(self.get_config())


def _with_config(config: TrainerConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a loop, with those of a TrainerConfig.

    Raises:
        TypeError: something else than a TrainerConfig.
        ConfigError: (a ValueError) a setting is given twice.
    """
    if not isinstance(config, TrainerConfig):
        raise TypeError(f"config is {type(config).__name__}; give a TrainerConfig")
    told = {name: getattr(config, name) for name in type(config).model_fields}
    for name, value in fields.items():
        if name in told and value != told[name] and told[name] != config.default_of(name):
            raise ConfigError(f"is {value!r} here and {told[name]!r} in config; give one", path=f"TrainingLoop.{name}")
    return {**told, **fields}


def _check_types(fields: Mapping[str, Any]) -> None:
    """Check what the parts of a loop are.

    Raises:
        TypeError: naming the field.
    """
    for name in ("model_op", "dataset", "val_dataset"):
        value = fields.get(name)
        if value is None and name != "dataset":
            continue
        wanted = Operator if name == "model_op" else TrainingDataset
        if not isinstance(value, wanted | Mapping | str):
            kind = "an Operator, such as NNXModelOp(module)" if name == "model_op" else "a TrainingDataset"
            raise TypeError(f"TrainingLoop.{name} is {type(value).__name__}; give {kind}")
    sharding = fields.get("sharding")
    if sharding is not None and not isinstance(sharding, Mapping) and _parts(sharding) is None:
        raise TypeError(f"TrainingLoop.sharding is {type(sharding).__name__}; give a ShardingSpec, or devices by axis")
    task, backend = fields.get("task"), fields.get("backend", "nnx")
    if task is not None and backend in GRADIENT and not callable(getattr(task, "loss_fn", None)):
        told = "a TrainTask has loss_fn(model, batch, key) -> (scalar, metrics)"
        raise TypeError(f"TrainingLoop.task is {type(task).__name__}; {told}")


def _parts(sharding: Any) -> int | None:
    """Parts that a batch is cut into by a ShardingSpec or a mesh; None for neither, or when it is not known."""
    if isinstance(sharding, Mapping):
        sizes = [size for axis, size in sharding.items() if axis in ("data", "fsdp")]
        found = 1
        for size in sizes:
            found *= size
        return found if all(size > 0 for size in sizes) else None
    parts = getattr(sharding, "parts", None)
    return parts if isinstance(parts, int) and hasattr(sharding, "mesh") else None


def _filled(callback: Any) -> dict[str, Any]:
    """What a callback knows for the artifact."""
    uri, digest = getattr(callback, "last_uri", None), getattr(callback, "last_hash", None)
    return {
        "model_registry_uri": uri,
        "trained_model_hash": digest,
        "tracker_run_id": getattr(callback, "run_id", None),
    }


def _described(value: Any) -> Any:
    """A value as JSON: specs by their state, sets of them likewise, anything else by its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Operator):
        return {"class": type(value).__qualname__, "hash": value.content_hash()}
    if isinstance(value, Spec):
        with contextlib.suppress(ConfigError):
            return value.state()
    if isinstance(value, Mapping):
        return {str(name): _described(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
