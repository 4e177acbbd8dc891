"""How a TrainingLoop trains by gradients: its settings become a run of the one loop, and the run its state."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carried import WEIGHT_NAMES, CarriedPoint
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.checks import GRADIENT, evaluation_rows
from nnx_jax.backends.facts import Stopwatch, about, describe_sharding, peak_memory
from nnx_jax.backends.optimizers import read_optimizer
from nnx_jax.backends.parts import split_callbacks
from nnx_jax.backends.stored import LoopMark, foreign_salt, newest, stage_before, starting_point, structure, writing
from nnx_jax.backends.tasks import Split, task_evaluation, task_objective
from nnx_jax.core.errors import ConfigError, NonFiniteError
from nnx_jax.engines.flax import WEIGHTS
from nnx_jax.fit.call import TrainCall, given_parts
from nnx_jax.loop import callbacks as own
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.progress import make_progress
from nnx_jax.loop.step_callbacks import StepCallbacks
from nnx_jax.model import NNModel
from nnx_jax.objectives.operators import as_loss
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams
from nnx_jax.runs.resume import ResumePoint, find_point
from nnx_jax.spmd.mesh import ShardingSpec
from nnx_jax.spmd.world import World
from nnx_jax.step.state import COUNTERS

STREAM_EPOCH = 2**16
"""Updates that are called an epoch of a stream; no number depends on it."""
SHORT_EPOCH = 2**14
"""Rows that an epoch has at least: many passes over few rows go to the device in one call."""
POLICIES: Mapping[str, Literal["fail", "skip"]] = {"raise": "fail", "skip": "skip", "stop": "fail"}
"""`on_nonfinite` of a loop, and what the run does."""


@dataclass(frozen=True)
class Recipe:
    """What a library's backend has of its own.

    Attributes:
        name: of the backend.
        face: the NNModel of its framework.
        packages: whose versions the artifact names.
        take: (operator, what the data says of sizes) -> a module to train, the caller's own is never touched.
        give: (the loop's operator, trained module, shape of one sample) -> the trained operator.
        load: (module, arrays of a generation, where they are from) writes weights into a module.
        split: takes a model apart for a compiled evaluation, see `tasks.Split`; None where no task of the user's is
            evaluated.
    """

    name: str
    face: type[NNModel]
    packages: Sequence[str]
    take: Callable[[Any, Mapping[str, Any]], Any]
    give: Callable[[Any, Any, tuple[int, ...] | None], Any]
    load: Callable[[Any, Mapping[str, Any], str], None]
    split: Split | None = None


def train(loop: Any, state: TrainerCarryState | None, recipe: Recipe, stage: type[Stage] | None = None) -> Trained:
    """Train as the loop says; see `TrainingLoop`.

    Args:
        stage: what trains, by default a `Stage`; a backend's own is a subclass.

    Raises:
        ConfigError, DataError, ModelError: (ValueErrors) before anything is compiled or written.
        NonFiniteError: (a FloatingPointError) a loss or gradient is not finite and `on_nonfinite` is "raise".
    """
    with contextlib.ExitStack() as stack:
        folder = loop.directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="nnx_jax-"))
        one = (stage or Stage)(loop, state, recipe, folder)
        if loop.directory is not None and one.world.writes:
            stack.enter_context(writing(folder))
        return one.run()


class Last(own.Callback):
    """Remembers the values a run ended with."""

    distributed = "all"

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._ctx: TrainContext | None = None

    def read(self) -> dict[str, float]:
        """The values as of now; none before a run."""
        if self._ctx is None:
            return {}
        update = next((row for row in reversed(self._ctx.records) if row["kind"] == "update"), {})
        found = {n.removeprefix("train_"): v for n, v in update.items() if n.startswith("train_") and v is not None}
        return {**found, **{n: v for n, v in self._ctx.values.items() if n.startswith("val_")}}

    def on_train_begin(self, ctx: TrainContext) -> None:
        self._ctx = ctx

    def on_train_end(self, ctx: TrainContext) -> None:
        self.values = self.read()


class Stage:
    """One training of one loop: from an operator and a state to an operator and a state.

    Attributes:
        world: the processes that train together.
        op: the operator it begins with.
        batch_rows: rows of a microbatch.
        steps: who tells callbacks and the writer.
    """

    def __init__(self, loop: Any, state: TrainerCarryState | None, recipe: Recipe, folder: str | Path) -> None:
        self.loop, self.recipe, self.folder, self.before = loop, recipe, folder, state
        self.world = open_group(loop, recipe.face)
        self.watch, self.val = Stopwatch(), evaluation_rows(loop.val_dataset)
        self.batch_rows = loop.batch_size
        self.whole = state is not None and state.host is not None and self._takes_all(state)
        held = None if state is None else state.model
        self.op = loop.model_op if held is None else held
        info = loop.dataset.info
        self.shape = tuple(info["input_shape"]) if "input_shape" in info else None
        self.optim, self.schedule, self.optimizer = read_optimizer(loop.optimizer_config, loop.accumulate)
        self.model = recipe.face(
            module=recipe.take(self.op, info),
            params=NNModelParams(metrics=loop.metrics),
            loss=None if loop.loss is None else as_loss(loop.loss),
        )
        self.last = Last()
        self.mark = LoopMark(loop, self._structure(), stage_before(loop, state), self._told)
        self.parent: str | None = None
        mine, step_form = split_callbacks(loop.callbacks)
        self.steps = StepCallbacks(
            loop,
            step_form,
            loop.metric_writer,
            loop.log_every_n_steps,
            self._shown,
            steps_per_epoch=loop.steps_per_epoch,
            read_every=loop.log_every_n_steps,
            rates=self.optimizer is None,
            world=self.world,
        )
        self.callbacks = [self.last, *mine, self.steps]

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Trained:
        """Train, or find that there is nothing left to train."""
        point, target = self._beginning()
        done = 0 if point is None else point.step
        ended = None if point is None else self.mark.ended(point.host)
        if target <= done or ended is not None:
            return self._nothing_left(point, ended)
        spec, call = self._spec(point, target - done), self._call(point)
        try:
            found = find_point(self.folder, self.model.train_spec(spec, call).id)
            reason = self.steps.state.stop_reason
        except NonFiniteError:
            stands = newest(self.folder, self.mark)
            if self.loop.on_nonfinite != "stop" or stands is None:
                raise
            found, reason = stands, "nonfinite"
        return self._trained(found, self._final_operator(found, reason), reason, done)

    def _structure(self) -> dict[str, Any] | None:
        """What the commits know of the network; None where the task says it all."""
        if self.loop.backend not in GRADIENT:
            return None
        framework, net = self.recipe.face.framework, self.model.net
        return structure(self.op, framework.describe(net), framework.parameters(net))

    def _told(self) -> tuple[dict[str, float], str | None]:
        """(the values as of now, why a callback asked for the end)."""
        return {**self.steps.state.metrics, **self.last.read()}, self.steps.state.stop_reason

    def _beginning(self) -> tuple[Any, int]:
        """(the moment to go on from, the update of that line to end at)."""
        if self.loop.directory is not None:
            stored, whole = starting_point(self.folder, self.mark, self.loop.resume)
            if stored is not None and whole:
                return stored, self.loop.max_steps
            if stored is not None:
                self.recipe.load(self.model.net, stored.load_all(), stored.run_id)
                self.parent = stored.run_id
                return None, self.loop.max_steps
        if self.whole:
            assert self.before is not None
            point = CarriedPoint.of(self.before, self._weights())
            return point, self.loop.max_steps + (0 if self._same(self.before) else point.step)
        return None, self.loop.max_steps

    def _spec(self, point: Any, steps: int) -> RunSpec:
        loop = self.loop
        mesh, rules = _mesh_of(loop.sharding, self.model)
        return RunSpec(
            backend=self.recipe.face.framework.backend,
            model=self.model.params,
            data=self._data(),
            train=NNTrainParams(
                max_steps=steps,
                steps_per_epoch=self._epoch(),
                seed=loop.seed,
                optim=self.optim,
                precision=loop.precision,
                nonfinite=POLICIES[loop.on_nonfinite],
                log_every_n_steps=loop.log_every_n_steps,
                eval_every_n_steps=loop.eval_every_n_steps if self.val is not None else None,
                eval_every_n_epochs=None,
                monitor=self._monitor(),
                save_phase_checkpoints=False,
                dispatch="eager" if loop.debug else "auto",
                resume_from_run_id=point.run_id if isinstance(point, ResumePoint) else None,
                parent_run_id=self.parent,
                salt=self._salt(point),
            ),
            hooks=tuple(hook for hook in loop.hooks if getattr(hook, "family", "") == "hook"),
            checkpoint=CheckpointParams(every_n_steps=loop.commit_every, every_n_epochs=None, keep=loop.keep),
            mesh=mesh,
            sharding=rules,
            elastic=True,
            given=given_parts(loop.task, None, loop.task),
        )

    def _epoch(self) -> int:
        """Updates of an epoch of the run, about a pass over the rows and not a short one; nobody hears of its end."""
        loop = self.loop
        if not loop.dataset.indexable:
            return STREAM_EPOCH
        return max(1, max(SHORT_EPOCH, len(loop.dataset)) // (self.batch_rows * loop.accumulate))

    def _monitor(self) -> MonitorSpec | None:
        """What tells the best commit; None for the run's own rule.

        Raises:
            ConfigError: (a ValueError) a name without its split.
        """
        if self.loop.monitor is None:
            return None
        name, mode = self.loop.monitor
        split, _, metric = name.partition("_")
        if split not in ("train", "val") or not metric:
            told = f"got {name!r}; name a value with its split, such as 'val_loss' or 'train_loss'"
            raise ConfigError(told, path="Checkpoint.monitor")
        return MonitorSpec(metric=metric, split=split, mode=mode)  # type: ignore[arg-type]

    def _salt(self, point: Any) -> str | None:
        """What tells this start from others of the same settings: a commit before LAST, runs of other machines."""
        earlier = isinstance(point, ResumePoint) and point.pointer is None
        told = [f"from step {point.step}" if earlier else None]
        told.append(None if self.loop.directory is None else foreign_salt(self.folder))
        return "; ".join(text for text in told if text) or None

    def _data(self) -> NNDataParams:
        loop = self.loop
        return NNDataParams(
            train=loop.dataset, val=self.val, batch_size=self.batch_rows, tail="straddle", seed=loop.seed
        )

    def _call(self, point: Any) -> TrainCall:
        loop, is_last = self.loop, isinstance(point, ResumePoint) and point.pointer is not None
        return TrainCall(
            progress=make_progress(loop.quiet),
            callbacks=tuple(self.callbacks),
            hooks=tuple(hook for hook in loop.hooks if getattr(hook, "family", "") != "hook"),
            objective=None if loop.task is None else task_objective(loop.task),
            eval_step_fn=self._evaluation(),
            runs_dir=self.folder,
            distributed=loop.distributed,
            optimizer=self.optimizer,
            schedule=self.schedule,
            components=(self.mark,),
            start=point if loop.distributed is None or not is_last else None,  # LAST is read by a group's writer alone
        )

    def _evaluation(self) -> Any:
        """The validation of a task; None where the built-in one is made."""
        loop, split = self.loop, self.recipe.split
        return None if loop.task is None or split is None else task_evaluation(loop.task, loop.seed, split)

    # -- its end -----------------------------------------------------------------------------------------------

    def _give(self, module: Any) -> Any:
        """The operator of a trained module; it computes as the training did."""
        found, precision = self.recipe.give(self.op, module, self.shape), self.loop.precision
        if getattr(found, "precision", precision) == precision:
            return found
        return found.model_copy(update={"precision": precision})

    def _shown(self, ctx: TrainContext) -> Any:
        """The operator with the weights of this moment."""
        return self._give(ctx.sync())

    def _final_operator(self, point: ResumePoint, reason: str | None) -> Any:
        """The operator that the last callback saw; of the last commit where the run broke off."""
        if reason == "nonfinite":
            return self._operator_of(point)
        found = self.steps.state.model
        return found if found is not None else self._give(self.model.net)

    def _operator_of(self, point: Any) -> Any:
        module = self.recipe.take(self.op, {})
        self.recipe.load(module, point.load_all(), point.run_id)
        return self._give(module)

    def _nothing_left(self, point: Any, reason: str | None) -> Trained:
        """The run is as long as it was to be, or a callback ended it: callbacks begin and end, nothing is trained."""
        operator = self._operator_of(point)
        ctx = TrainContext(point.run_id, self.model, point.epoch, point.step)
        ctx.sync = lambda: operator.module
        callbacks = own.CallbackList(self.callbacks)
        error: BaseException | None = None
        try:
            callbacks.train_begin(ctx)
        except BaseException as failure:
            error = failure
            raise
        finally:
            callbacks.train_end(ctx, error)
        self.last.values = self.mark.values(point.host)
        return self._trained(point, operator, reason, point.step)

    def _trained(self, point: Any, operator: Any, reason: str | None, done: int) -> Trained:
        loop, before = self.loop, self.before
        stages = 0 if before is None or (self.whole and self._same(before)) else before.step
        arrays = point.load_all()
        left = {name: np.asarray(array) for name, array in arrays.items() if not name.startswith(WEIGHTS)}
        metrics = dict(self.steps.state.metrics) | self.last.values
        offset = stages - (before.step if before is not None and self.whole and not self._same(before) else 0)
        epoch = 0 if loop.steps_per_epoch is None else point.step // loop.steps_per_epoch
        state = TrainerCarryState(
            model=operator,
            opt_state=left,
            step=point.step + offset,
            epoch=epoch,
            metrics=metrics,
            rng=left.get("rng"),
            loop=loop.identity(),
            host={**point.host, WEIGHT_NAMES: sorted(name for name in arrays if name.startswith(WEIGHTS))},
        )
        rows = (point.step - done) * self.batch_rows * loop.accumulate
        info = {
            **about(self.recipe.name, self.recipe.packages),
            **self.watch.facts(rows),
            **peak_memory(),
            "final_step": point.step,
            "skipped_updates": int(left["counters"][COUNTERS.index("skipped")]),
            "final_metrics": {name: value if np.isfinite(value) else None for name, value in metrics.items()},
            "sharding": describe_sharding(loop.sharding),
            "stop_reason": reason,
            "seed": loop.seed,
            "run_id": point.run_id if loop.directory is not None else None,
        }
        return Trained(operator, state, info)

    # -- states ------------------------------------------------------------------------------------------------

    def _same(self, state: TrainerCarryState) -> bool:
        """This loop, perhaps with another length, left the state."""
        return state.loop == self.loop.identity()

    def _takes_all(self, state: TrainerCarryState) -> bool:
        return self.loop.resume == "full" or (self.loop.resume == "auto" and self._same(state))

    def _weights(self) -> dict[str, np.ndarray]:
        """Weights and statistics of the operator that goes on, by name."""
        return dict(self.recipe.face.framework.weights(self.model.net))


def open_group(loop: Any, face: type[NNModel]) -> World:
    """The processes that train a loop together; this one alone without a DDP.

    Raises:
        ProcessGroupError: (a RuntimeError) a DDP without a group, or a group without a DDP.
        ConfigError: (a ValueError) several processes have no directory in common.
    """
    world = face.framework.open_world(loop.distributed, "TrainingLoop")
    if not world.alone and loop.directory is None:
        told = f"is None, but {world.size} processes train together, which read what the writer commits; give a "
        raise ConfigError(f"{told}directory that all of them see", path="TrainingLoop.checkpoint_dir")
    return world


def _mesh_of(sharding: Any, model: NNModel) -> tuple[dict[str, int], dict[str, Any]]:
    """(mesh, rules) of a configuration for a ShardingSpec, or for a mesh's sizes by axis.

    Raises:
        ConfigError: (a ValueError) the spec's mesh is of other devices than a run's would be.
    """
    if sharding is None:
        return {}, {}
    if isinstance(sharding, Mapping):
        return dict(sharding), {}
    assert isinstance(sharding, ShardingSpec)
    mesh = {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    if set(sharding.mesh.devices.flat) != set(jax.devices()[: sharding.mesh.size]):
        told = f"its mesh is of {[str(d) for d in sharding.mesh.devices.flat]}; use the first devices of jax.devices()"
        raise ConfigError(told, path="sharding.mesh")
    rules: dict[str, Any] = {pattern: tuple(axes) for pattern, axes in sharding.rules}
    if sharding.model_pspec:
        for name, value in model.framework.parameters(model.net).items():
            if np.ndim(value) == len(sharding.model_pspec) and name not in rules:
                rules[name] = tuple(sharding.model_pspec)
    return mesh, rules
