"""TrainingLoop: train for a number of updates, as an operator that takes a model in and gives the trained one out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator

from nnx_jax.backends.base import Trained, check_backend, load_backend
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.checks import (
    GRADIENT,
    TASK_FIRST,
    check_loss,
    check_metrics,
    check_operator,
    check_types,
    parts_of,
)
from nnx_jax.backends.described import described, identified
from nnx_jax.backends.optimizers import DEFAULT, read_optimizer, settle_optimizer
from nnx_jax.backends.parts import Part, check_writable, import_built_in, noted, split_callbacks
from nnx_jax.core import codec
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.core.spec import ENVIRONMENT, Keywords, Spec
from nnx_jax.core.stateful import StatefulOperator
from nnx_jax.loop.step_callbacks import StepCallbacks
from nnx_jax.params.fields import Count, Precision, Seed, Size

if TYPE_CHECKING:
    from nnx_jax.runs.artifact import TrainingArtifact


class TrainerConfig(Spec):
    """The settings of a TrainingLoop that are plain values, for those who keep them apart (decision D11)."""

    max_steps: Count
    """Length in committed updates."""
    seed: Seed = 0
    """Of everything random: order, dropout."""
    batch_size: Size | None = None
    """Rows of a microbatch, over all processes; none: as the loop's backend has it."""
    accumulate: Count = 1
    """Microbatches of an update."""
    steps_per_epoch: Count | None = None
    """Updates between two `on_epoch_end`; nothing else depends on it."""
    eval_every_n_steps: Count = 500
    """Updates between evaluations, where there is something to evaluate on."""
    log_every_n_steps: Count = 100
    """Updates between two records of the metric writer."""
    checkpoint_every_n_steps: Count | None = None
    """Updates between commits; none: as a Checkpoint callback says, or `eval_every_n_steps`. The last always is one."""
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
    loss: Annotated[Operator | Any, Part("loss")] = None
    """A loss operator, the kind of a built-in loss, or a function (predicted, target)."""
    task: Annotated[Operator | Any, Part("task")] = None
    """A TrainTask, `loss_fn(model, batch, key) -> (scalar, metrics)`, which goes before a loss; or a Bayesian task."""
    metrics: tuple[Any, ...] = ()
    """Further values to measure, as in `NNModelParams.metrics`."""
    optimizer_config: Annotated[Any, PlainValidator(settle_optimizer)] = DEFAULT
    """`{"name": "adamw", "lr": 3e-4, ...}` with optax's arguments, or an optax transformation; see `read_optimizer`."""
    max_steps: Count
    """Length in committed updates."""
    steps_per_epoch: Count | None = None
    """Updates between two `on_epoch_end`; nothing else depends on it."""
    batch_size: Size | None = None
    """Rows of a microbatch, over all processes. Default: 32; None, all rows, for the backend "numpyro-svi"."""
    accumulate: Count = 1
    """Microbatches of an update."""
    backend: str = "nnx"
    """What trains; see `backend_names()`."""
    callbacks: tuple[Annotated[Operator | Any, Part("step_callback", "callback")], ...] = ()
    """Callbacks of either form, in their order."""
    metric_writer: Annotated[Annotated[Operator | Any, Part("metric_writer")], ENVIRONMENT] = None
    """Where values are written to."""
    hooks: tuple[Annotated[Operator | Any, Part("hook")], ...] = ()
    """What takes part in the compiled step; see `nnx_jax.hooks`."""
    eval_every_n_steps: Count = 500
    """Updates between evaluations; the last update is always evaluated."""
    log_every_n_steps: Count = 100
    """Updates between two records of the metric writer."""
    checkpoint_every_n_steps: Count | None = None
    """Updates between commits; none: as a Checkpoint callback says, or `eval_every_n_steps`. The last always is one."""
    max_checkpoints_to_keep: Count = 3
    """How many of the newest commits stay."""
    checkpoint_dir: Annotated[str | Path | None, ENVIRONMENT] = None
    """Where commits are kept; none: nothing stays on the disk."""
    resume: Literal["auto", "full", "weights_only"] = "auto"
    """What is taken from a state it is called with; auto: all of it when this loop left it, else the weights."""
    precision: Precision = "float32"
    """What is computed in; parameters and the optimizer's state stay float32."""
    on_nonfinite: Literal["raise", "skip", "stop"] = "raise"
    """What a loss or gradient that is not finite does: end with an error, be left out, or end the run as it stands."""
    debug: bool = False
    """Whether everything runs operation by operation, for looking at values; slow."""
    sharding: Annotated[Any, ENVIRONMENT] = None
    """Devices by axis, as {"data": 4}, or a ShardingSpec; none: one device."""
    distributed: Annotated[Any, ENVIRONMENT] = None
    """A DDP, where the processes of a group train together."""
    seed: Seed = 0
    """Of everything random: order, dropout."""
    quiet: Annotated[bool, ENVIRONMENT] = False
    """Whether no progress is shown."""

    places: ClassVar[tuple[str, ...]] = ("checkpoint_dir", "quiet", "metric_writer", "sharding", "distributed")
    lengths: ClassVar[tuple[str, ...]] = (
        "max_steps", "steps_per_epoch", "eval_every_n_steps", "log_every_n_steps", "checkpoint_every_n_steps",
        "max_checkpoints_to_keep", "callbacks", "resume", "val_dataset",
    )  # fmt: skip

    def __init__(self, /, *, config: TrainerConfig | None = None, **fields: Any) -> None:
        if config is not None:
            fields = _with_config(config, fields)
        if "max_steps" not in fields:
            raise TypeError("TrainingLoop needs max_steps, its length in updates (epochs * rows // batch_size)")
        check_types(fields)
        if isinstance(fields.get("callbacks"), list):
            fields["callbacks"] = tuple(fields["callbacks"])
        super().__init__(**fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested errors keep their path

    @classmethod
    def _normalised(cls, value: Mapping[Any, Any]) -> dict[Any, Any]:
        if not isinstance(value, Keywords):  # a document: what it names must be registered
            import_built_in()
        return super()._normalised(value)

    def default_of(self, name: str) -> Any:
        """Return the default of a field; that of `batch_size` depends on the backend."""
        if name == "batch_size":
            return None if self.backend == "numpyro-svi" else 32
        return super().default_of(name)

    def _complete(self) -> None:
        if self.batch_size is None:
            self._set("batch_size", self.default_of("batch_size"))

    def problems(self) -> Iterator[tuple[str, str]]:
        """One objective, parts that are what they stand for, one word on where and when commits are made."""
        yield from super().problems()
        check_types({name: getattr(self, name) for name in type(self).model_fields})  # of a document, too
        yield from noted(lambda: check_backend(self.backend))
        yield from noted(lambda: read_optimizer(self.optimizer_config, self.accumulate))
        if self.loss is None and self.task is None:
            yield "loss", "neither loss nor task is given; give a loss or task"
        if self.task is None and self.loss is not None and self.backend in TASK_FIRST:
            yield "task", f"is required by the backend '{self.backend}', which is task-first: a loss has no priors"
        if self.model_op is None and self.backend in GRADIENT:
            yield "model_op", f"is required by the backend '{self.backend}', which trains it"
        if self.loss is not None and self.backend in GRADIENT:
            yield from noted(lambda: check_loss(self.loss))
        yield from noted(lambda: check_metrics(self.metrics))
        check_operator(self.backend, self.model_op)
        step_form = split_callbacks(self.callbacks)[1]
        log_every, writer = self.log_every_n_steps, self.metric_writer
        yield from (("callbacks", told) for _, told in noted(lambda: StepCallbacks(self, step_form, writer, log_every)))
        yield from self._double_commits()
        parts = parts_of(self.sharding)
        if parts is not None and self.batch_size is not None and self.batch_size % parts:
            yield "batch_size", f"is {self.batch_size}, which does not split over {parts} devices; give a multiple"

    def _double_commits(self) -> Iterator[tuple[str, str]]:
        """What the loop and a callback say of commits, both, and differently."""
        said = self._commits
        for name, other in (
            ("checkpoint_dir", "save_dir"),
            ("checkpoint_every_n_steps", "every_n_steps"),
            ("max_checkpoints_to_keep", "keep_last"),
        ):
            mine = getattr(self, name)
            if other in said and mine != self.default_of(name) and str(mine) != str(said[other]):
                yield name, f"is {mine}, but a callback says {other}={said[other]}; give one"

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
    def _cadence(self) -> Any:
        """The first Checkpoint among the callbacks, or None."""
        from nnx_jax.loop.step_builtin import Checkpoint

        return next((each for each in self.callbacks if isinstance(each, Checkpoint)), None)

    @property
    def _commits(self) -> dict[str, Any]:
        """What that callback says of commits on purpose; its defaults stand behind what the loop says."""
        found: dict[str, Any] = {}
        for name in ("every_n_steps", "keep_last", "save_dir"):
            value = getattr(self._cadence, name, None)
            if value is not None and not (isinstance(self._cadence, Spec) and value == self._cadence.default_of(name)):
                found[name] = value
        return found

    @property
    def directory(self) -> str | None:
        """Where commits are kept: `checkpoint_dir`, or what a Checkpoint callback says; None for nowhere."""
        found = self.checkpoint_dir or getattr(self._cadence, "save_dir", None)
        return None if found is None else str(found)

    @property
    def commit_every(self) -> int | None:
        """Updates between commits: of the loop, of a Checkpoint callback, or of evaluations; None without a place."""
        every = self.checkpoint_every_n_steps or getattr(self._cadence, "every_n_steps", None)
        return every or (None if self.directory is None else self.eval_every_n_steps)

    @property
    def monitor(self) -> tuple[str, str] | None:
        """What tells the best commit: (name of a value, "min" or "max") of a Checkpoint callback; None for none."""
        name = getattr(self._cadence, "monitor", None)
        return None if name is None else (name, self._cadence.mode)

    @property
    def keep(self) -> int:
        """How many of the newest commits stay."""
        return self._commits.get("keep_last", self.max_checkpoints_to_keep)

    # -- configuration -----------------------------------------------------------------------------------------

    def identity(self) -> str:
        """Return the hash of what makes the updates: without the length, cadences, callbacks and where files lie."""
        known = {n: v for n, v in self.changed().items() if n not in (*self.lengths, *self.places)}
        return content_hash({name: identified(value) for name, value in known.items()})

    def to_config(self) -> dict[str, Any]:
        """Return `state()` with the fields that say where it runs: plain values that `from_config` makes the same loop
        of, one that trains to the same weights.

        Raises:
            ConfigError: naming the part that only Python can give: a function, an array, an object of a class that is
                not registered, a model whose weights are in no file.
        """
        for name, value in self.changed().items():
            check_writable(type(self).__name__, name, value)
        weights = getattr(self.model_op, "weights", "")
        if weights:
            told = f"its weights {weights[:12]}... are in no configuration; name a built-in network instead, as in "
            raise ConfigError(f"{told}NNXModelOp(net=FeedForwardParams(...), seed=0)", path="TrainingLoop.model_op")
        config = self.state(environment=True)
        self.from_state(config)  # rows that are in no file, say, are refused here rather than where it is loaded
        return config

    def to_yaml(self) -> str:
        """Return `to_config()` as YAML; `from_yaml` gives an equal loop.

        Raises:
            ConfigError: see `to_config`.
        """
        return codec.dump_yaml(self.to_config())

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainingLoop:
        """Return the loop that `to_config` describes."""
        return cls.from_state(config)

    def get_config(self) -> dict[str, Any]:
        """Return every setting as JSON values, for people to read; what no file can hold is told by its class."""
        from nnx_jax.backends.facts import describe_sharding

        found = {name: described(getattr(self, name)) for name in type(self).model_fields}
        sharding = describe_sharding(self.sharding)
        return {**found, "sharding": sharding, "dataset_hash": self.dataset.content_hash()}

    def described(self) -> str:
        """Return the loop as YAML: loadable where every part is, else for people to read."""
        with contextlib.suppress(ConfigError):
            return self.to_yaml()
        return codec.dump_yaml(self.get_config())


def rerun(artifact: TrainingArtifact, **changes: Any) -> tuple[Any, TrainingArtifact]:
    """Train anew as an artifact says, without its commits: on the same machine the hash of the model is the same.

    Args:
        changes: fields of the loop to change, such as `quiet`.

    Raises:
        ConfigError: (a ValueError) the loop held something that no file describes.
    """
    changes = {"checkpoint_dir": None, **changes}
    return TrainingLoop.from_yaml(artifact.training_pipeline_yaml).replace(**changes).run()


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


def _filled(callback: Any) -> dict[str, Any]:
    """What a callback knows for the artifact."""
    uri, digest = getattr(callback, "last_uri", None), getattr(callback, "last_hash", None)
    return {
        "model_registry_uri": uri,
        "trained_model_hash": digest,
        "tracker_run_id": getattr(callback, "run_id", None),
    }
