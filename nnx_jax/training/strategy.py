"""TrainingStrategy: named models, their optimizers, a loss and hooks, trained by the one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from flax import nnx

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.core.stages import TrainingStage
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.loop.callbacks import CallbackList
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.lifecycle import LoopPlan, StartPoint
from nnx_jax.loop.memory_store import MemoryStore
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.training import building, checkpoints, report
from nnx_jax.training.engine import StrategyEngine
from nnx_jax.training.feed import Pushed, StrategyFeed
from nnx_jax.training.losses import as_loss
from nnx_jax.training.models import leaves_of
from nnx_jax.training.optimizers import as_configs, step_lr_schedulers
from nnx_jax.training.passes import Passes
from nnx_jax.training.session import IdleView, LastRow, StrategySession
from nnx_jax.training.validation import ValidationConfig, ValidationError

Dispatch = Literal["auto", "step", "span", "staged", "eager"]


class TrainingStrategy:
    """Trains Flax NNX models with hooks, for a number of updates or of passes over the data.

    The same loop, step and run store as NNModel's stand below; without a CheckpointHook nothing is written. Use it as a
    context to enter the hooks once around several calls; `run` and `train_batch` enter by themselves.

    Args:
        models: a module (then called "main"), or modules by name; in their place, a function that makes one, or a
            network's parameters (`FeedForwardParams(...)`), which a checkpoint can name.
        optimizer_configs: an OptimizerConfig, or one by model; models without are not trained and called as in
            evaluation.
        num_epochs, num_steps: exactly one. Passes over the data; or updates, counted from the strategy's beginning.
        epoch_step_modifier: with `num_epochs`, train for this many times the updates that the passes would give.
        hooks: host, traced and update hooks, in order.
        training_fn: `(model, batch) -> predictions`, of several models `(models, batch)`; or its dotted name. Default,
            for a single model: `model(batch["x"])`.
        loss_fn: a loss's name or parameters, a composition, or a function `(predictions, batch)` that returns a scalar
            or LossTerm objects.
        loss_target_assembler: `batch -> columns` added to the batch before the loss sees it.
        devices: the one device to train on, which is JAX's default device; with a DDPHook those it splits batches over.
        distributed_manager: counts processes in `global_step_count`; without one a DDPHook's devices count.
        validation_config: what to validate on, and when.
        step_count, global_step_count, batch_count, epoch_count, epoch_step_count: where an earlier training ended;
            `epoch` is another name of `epoch_count`; `global_step_count` is `step_count` times the processes.
        seed: of dropout and everything else that is random inside the step.
        dispatch: how updates are sent to the device; "staged" and "eager" run hooks in place, for debugging.

    Raises:
        ConfigError, ModelError, HookError: (ValueErrors) naming what does not fit.
        HookTypeError: (a TypeError) something among `hooks` is no hook.
    """

    def __init__(
        self,
        *,
        models: Any,
        optimizer_configs: Any,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        epoch_step_modifier: float = 1.0,
        hooks: Sequence[Any] = (),
        training_fn: Callable[..., Any] | str | None = None,
        loss_fn: Any,
        loss_target_assembler: Callable[..., Any] | None = None,
        devices: Sequence[Any] | None = None,
        distributed_manager: Any = None,
        validation_config: ValidationConfig | None = None,
        step_count: int = 0,
        global_step_count: int | None = None,
        batch_count: int = 0,
        epoch_count: int = 0,
        epoch: int | None = None,
        epoch_step_count: int | None = None,
        seed: int = 0,
        dispatch: Dispatch = "auto",
    ) -> None:
        if (num_epochs is None) == (num_steps is None):
            given = "neither is given" if num_steps is None else "both are given"
            raise ConfigError(f"num_epochs and num_steps: {given}; give exactly one")
        self.num_epochs = building.count("num_epochs", num_epochs)
        self.num_steps = building.count("num_steps", num_steps)
        if not (isinstance(epoch_step_modifier, int | float) and epoch_step_modifier > 0):
            raise ConfigError(f"epoch_step_modifier is {epoch_step_modifier!r}; give a number above 0")
        if num_steps is not None and epoch_step_modifier != 1.0:
            raise ConfigError("epoch_step_modifier is for num_epochs; with num_steps, give the number of steps itself")
        hooks = building.checked(hooks)
        building.check_devices(devices, hooks)
        self.epoch_step_modifier, self.devices = float(epoch_step_modifier), devices
        self.models, self.single_model, self.sources = checkpoints.build_models(models, seed)
        self.configs = as_configs(optimizer_configs, list(self.models))
        self.training_fn = building.training_function(
            checkpoints.function(training_fn, "training_fn"), self.single_model
        )
        self.loss_fn, self.loss_target_assembler = loss_fn, loss_target_assembler
        self.loss = as_loss(loss_fn, loss_target_assembler)
        if validation_config is not None and not isinstance(validation_config, ValidationConfig):
            raise ConfigError(f"validation_config is {type(validation_config).__name__}; give a ValidationConfig")
        self.validation_config, self.distributed_manager = validation_config, distributed_manager
        self.seed = seed
        self.dispatch: Dispatch = dispatch
        self.last_validation: dict[str, Any] | None = None
        self.inference_models: dict[str, nnx.Module] = {}
        epoch_count = epoch_count if epoch is None else epoch
        self._counts = {"step": step_count, "batch": batch_count, "epoch": epoch_count, "epoch_batch": epoch_step_count}
        self.world = building.workers(building.world_size(self, hooks), step_count, global_step_count)
        self.training_began = False
        self._engine: StrategyEngine | None = None
        self._session: StrategySession | None = None
        self._state: Any = None
        self._loaded: Any = None
        self._set_up = self._stale = False
        self._depth = 0
        self._store: Any = None
        self.own_stores: set[Path] = set()
        """The directories that this strategy has written to, or was loaded from."""
        self.registry = HookRegistry(hooks, owner=self)
        self.events = self._new_events()
        self._passes = Passes(self)

    # -- counters ----------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Updates made; reads the device where an update may have been vetoed since the last read."""
        watch: Any = None if self._session is None else self._session.watch
        return self._counts["step"] if watch is None else watch.step_count()

    @property
    def global_step_count(self) -> int:
        """Updates made by all workers together."""
        return self.step_count * self.world

    @property
    def batch_count(self) -> int:
        """Microbatches seen."""
        return self._counts["batch"] if self._session is None else self._session.engine.batch_count(self._state)

    @property
    def epoch_count(self) -> int:
        """Passes over the data that are done."""
        return self._counts["epoch"] if self._session is None else self._session.finished_epochs

    @property
    def epoch_step_count(self) -> int:
        """Microbatches of the pass that has begun."""
        return (self._counts["epoch_batch"] or 0) if self._session is None else self._session.epoch_batch

    @property
    def last_loss(self) -> float | None:
        """Loss of the last update; reads the device."""
        if self._session is None:
            return None
        self._session._read()
        records: Any = self._session.plan.records
        return records.loss

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rate of every model's next update; reads the device."""
        if self._engine is None:
            return {name: config.rate or 0.0 for name, config in self.configs.items()}
        return self._engine.next_rates(self._state)

    @property
    def precision(self) -> str:
        """What the models compute in: a MixedPrecisionHook's, else float32."""
        found = [hook.precision for hook in self.registry if getattr(hook, "exclusive_key", "") == "mixed_precision"]
        return found[0] if found else "float32"

    # -- training ----------------------------------------------------------------------------------------------

    def run(self, loader: Iterable[Any]) -> None:
        """Train on the loader's batches up to `num_epochs` or `num_steps`, then validate once more.

        Another call goes on: with the same optimizer state, from the same place in the data. A loader is asked for
        `set_epoch(n)` before each pass where it has one, and for `set_epoch_step(n)` where a pass begins later.

        Raises:
            ConfigError: `num_epochs` with a loader without length; counters that fit no place of this loader.
            DataError: (a ValueError) the loader gives no batch.
            HookStateError: (a RuntimeError) hooks veto every update.
        """
        length = building.length(loader)
        if length is None and self.num_epochs is not None:
            raise ConfigError("num_epochs needs a sized loader, one with __len__; or give num_steps")
        epoch, batch = building.place(self._now(), self._known, length)
        end, steps = building.target(self, length)
        if (steps is not None and self.step_count >= steps) or (end is not None and epoch >= end):
            return
        with self:
            feed = StrategyFeed(loader, epoch=epoch, start=batch, pad=self.loss.masked)
            feed.signature()
            self._ready(feed, steps if steps is not None else building.planned(self.registry, end, length))
            session = self._begin(epoch, batch, end, steps)
            try:
                session.run()
            except BaseException as error:
                self._keep(session)
                self._sync_after(error)
                raise
            self._keep(session)
            self.sync_models()
            if self.validation_config is not None:
                self.validate()

    def train_batch(self, batch: Any) -> None:
        """Train on one batch, from BEFORE_BATCH to AFTER_BATCH; no target is looked at.

        The loss scale, an open window and the optimizer go on from call to call. `last_loss` tells the loss.
        """
        with self:
            if isinstance(self._feed, Pushed) and self._session is not None:
                feed = self._feed
            else:
                feed = Pushed(batch, pad=self.loss.masked)
            self._ready(feed, self.num_steps)
            session = self._session
            if session is None or session.plan.end_epoch is not None or session.plan.max_steps is not None:
                session = self._begin(self.epoch_count, self.epoch_step_count, None, None)
            feed.push(batch, session.batch)
            watch: Any = session.watch
            session.plan.store = self._open_store()
            watch.one(closes=False)
            session.reach()
            if session.engine.batch_count(self._state) % 256 == 0:
                session._read()

    def validate(self) -> dict[str, Any]:
        """Score the validation set with the weights as they are, tell the hooks, and return the summary.

        Raises:
            ValidationError: (a RuntimeError) there is no validation_config, or it asks for what is not there.
        """
        if self.validation_config is None:
            raise ValidationError("there is no validation_config; give the strategy one")
        with self:
            self._prepare()
            summary = self._passes.run(self._engine, self._state, self.step_count, self.epoch_count)
            self._note(summary)
            if self._session is not None:
                self._session.plan.store = self._open_store()
                self._session.announce(summary)
                watch: Any = self._session.watch
                watch.serve()
            else:
                known = {"batch_count": self.batch_count, "epoch": self.epoch_count, "validation": summary}
                ctx = self.events.context(IdleView(self.models, self.world, self.step_count), **known)
                self.events.fire(TrainingStage.AFTER_VALIDATION, ctx, lambda hook: True)
                ctx.close()
        return summary

    def validated_in(self, session: StrategySession) -> None:
        """Called by the session where its cadence says so."""
        summary = self._passes.run(self._engine, session.state, session.step, session.finished_epochs)
        self._note(summary)
        session.announce(summary)

    def _note(self, summary: dict[str, Any]) -> None:
        """Remember a summary; a plateau takes it and moves."""
        self.last_validation = summary
        engine = self._engine
        if engine is not None and engine.plateaus:
            train = engine.programs.state(self._state)
            moved = step_lr_schedulers(self.configs, engine.plateaus, summary, train.opt_state)
            engine.put_optimizer(self._state, moved)
            self.last_validation = None

    # -- hooks and models --------------------------------------------------------------------------------------

    def register_hook(self, hook: Any, stage: TrainingStage | None = None) -> None:
        """Register one hook more; `stage` becomes the stage of a host or traced hook.

        Raises:
            HookError, HookTypeError: as at construction; nothing is changed.
        """
        self.registry.add(hook, stage)
        old, self.events = self.events, self._new_events()
        self.events.take_over(old)
        self._stale = self._engine is not None
        if self._session is not None:
            watch: Any = self._session.watch
            watch.events, self.events.observe = self.events, old.observe

    @property
    def hooks(self) -> list[Any]:
        """What is registered, in order, update hooks inside their one orchestrator."""
        return list(self.registry.entries)

    def set_inference_model(self, module: nnx.Module | None, model_key: str = "main") -> None:
        """Let validation use this module's weights for a model; None takes it back."""
        if model_key not in self.models:
            raise KeyError(f"there is no model {model_key!r}; the models are: {', '.join(self.models)}")
        if module is None:
            self.inference_models.pop(model_key, None)
        else:
            leaves_of(model_key, module)
            self.inference_models[model_key] = module

    def sync_models(self) -> None:
        """Put the trained weights into the models' own modules."""
        if self._engine is not None and self._state is not None:
            self._engine.trained(self._state)

    def explain(self) -> str:
        """What runs where: stages and their hooks, slots and their bytes, programs, and where the host waits."""
        return report.explain(self, self._engine, self._state)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(self, root: str | Path, *, tag: str | None = None) -> int:
        """Store everything that continues this training in the run directory `root`; return the checkpoint's number.

        Args:
            tag: name of the checkpoint; default `step_<updates>`.
        """
        return checkpoints.save(self, Path(root), tag)

    @classmethod
    def load_checkpoint(cls, address: str | Path, **given: Any) -> Self:
        """A strategy that continues where a checkpoint was made; see `checkpoints.load`."""
        return checkpoints.load(cls, address, **given)

    def restore_checkpoint(self, address: str | Path) -> None:
        """Put a checkpoint into this strategy, all or nothing: weights, optimizer, counters, hooks."""
        checkpoints.restore(self, address)

    # -- as a context ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._depth == 0:
            self.events.__enter__()
        self._depth += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        failure = self._sync_after(error)
        try:
            self.events.__exit__(kind, error, trace)
        finally:
            self._close_store(kind, error, trace)
        if failure is not None:
            raise failure

    def _sync_after(self, error: BaseException | None) -> BaseException | None:
        """Bring the models up to date; what goes wrong is a note on an error that is on its way, else returned."""
        try:
            self.sync_models()
        except Exception as failure:
            if error is None:
                return failure
            error.add_note(f"then also: the models could not be brought up to date: {failure}")
        return None

    # -- building ----------------------------------------------------------------------------------------------

    def _new_events(self) -> HookEvents:
        rank = 0 if self.distributed_manager is None else int(building.asked(self.distributed_manager, "rank"))
        return HookEvents(self.registry, workflow=self, world=self.world, global_rank=rank)

    def _prepare(self) -> None:
        """SETUP, once, before anything is built from the models; what was done to their weights since is taken over."""
        if self._engine is not None:
            self._engine.take_edits(self._state)
        if not self._set_up:
            enable_compile_cache()
            self._set_up = True
            try:
                self.world = self.events.world = building.world_size(self, self.registry)
                self.events.setup(self.models)
            except BaseException:
                self._set_up = False
                raise

    @property
    def _feed(self) -> Any:
        return None if self._engine is None else self._engine.feed

    def _ready(self, feed: StrategyFeed | Pushed, horizon: int | None) -> None:
        """The engine and its state for these batches; what is trained so far stays."""
        self._prepare()
        if self._engine is not None and not self._stale:
            if self._engine.feed is not feed:
                self._engine.use(feed)
            return
        old = None if self._engine is None else self._engine.programs.named(self._state)
        engine = building.build_engine(self, feed, horizon if self._engine is None else self._engine.horizon)
        if old is None:
            engine.models, engine.recipe = self.models, lambda: checkpoints.recipe(self)
            self._state = self._first_state(engine)
        else:
            plateaus = self._engine.plateaus if self._engine is not None else {}
            engine.models, engine.recipe, engine.plateaus = self.models, lambda: checkpoints.recipe(self), plateaus
            self._state = engine.take_over(old)
            self._counts = self._now()
            self._session = None
        self._engine, self._stale, self.training_began = engine, False, True
        self._passes.forget()
        engine.bind(self._state)

    def _first_state(self, engine: StrategyEngine) -> Any:
        if self._loaded is not None:
            state = checkpoints.revive(engine, self._loaded)
            self._loaded = None
            return state
        at = self._counts
        if not any(at.values()):
            return engine.start()
        batch = at["batch"] or at["step"]
        return engine.start_at(batch=batch, step=at["step"], epoch=at["epoch"], epoch_batch=at["epoch_batch"] or 0)

    def _begin(self, epoch: int, batch: int, end: int | None, steps: int | None) -> StrategySession:
        """A session from where the strategy stands."""
        engine: Any = self._engine
        step = self.step_count
        plan = LoopPlan(
            spec=engine.spec,
            engine=engine,
            state=self._state,
            store=self._open_store(),
            callbacks=CallbackList([]),
            tracker=MonitorTracker(None),
            progress=QuietProgress(),
            start=StartPoint(epoch=epoch, batch=batch, step=step, seen=step),
            end_epoch=end,
            max_steps=steps,
            model=self,
            records=LastRow(),
            hooks=self.events,
        )
        session = StrategySession(plan)
        session.strategy, self._session = self, session
        session.watch.validation = self.last_validation  # type: ignore[union-attr]  # a strategy's session has one
        return session

    def _keep(self, session: StrategySession) -> None:
        """What a session leaves: its state, also when it failed."""
        self._state = session.state
        if session.batch >= session.engine.n_batches:
            session.epoch, session.batch = session.epoch + 1, 0

    @property
    def _known(self) -> bool:
        """Where in the pass training stands is known, and not to be found out."""
        return self._session is not None or self._counts["epoch_batch"] is not None

    def _now(self) -> dict[str, Any]:
        return {
            "step": self.step_count,
            "batch": self.batch_count,
            "epoch": self.epoch_count,
            "epoch_batch": self.epoch_step_count,
        }

    # -- the store ---------------------------------------------------------------------------------------------

    def _open_store(self) -> Any:
        """The store of a CheckpointHook with a directory, open until the context is left; else one without a disk."""
        if self._store is None:
            self._store = checkpoints.open_own_store(self)
        return self._store or MemoryStore()

    def _close_store(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        store, self._store = self._store, None
        if store is not None:
            if self._session is not None:
                self._session.plan.store = MemoryStore()  # type: ignore[assignment]
            store.__exit__(kind, error, trace)
