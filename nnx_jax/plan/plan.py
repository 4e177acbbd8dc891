"""ExperimentPlan: what an experiment is made of, said step by step; every step gives a new plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.progress import Progress
from nnx_jax.params.losses import LossParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.plan import checks, fitting, probing
from nnx_jax.plan.results import Diagnostic, FitResult
from nnx_jax.plan.settings import Settings

_SAME: Any = object()
"""Stands for an argument that was not given, where None says something."""


class ExperimentPlan:
    """An experiment described in full before anything of it runs; no plan ever changes.

    `validate()` lists every problem by field, `probe(batch)` tries one forward pass, `fit()` trains. A plan is fitted
    any number of times: every fit is a run of its own, and equal plans give equal numbers.

    Each `with_...` returns a new plan in which that is said. What is said later wins over what was said before, and
    fields said one by one (`with_epochs`) stay when a parameter object that does not speak of them follows.
    """

    __slots__ = ("settings",)
    settings: Settings

    def __init__(self) -> None:
        object.__setattr__(self, "settings", Settings())

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a plan never changes; use plan.with_{name}(...), which returns a new one")

    @classmethod
    def from_spec(cls, spec: RunSpec) -> Self:
        """Return the plan of a configuration (`load_config`).

        Raises:
            ConfigError: the configuration needs more than one optimizer, or another engine than flax.
        """
        if spec.trainer is not None:
            raise ConfigError("a plan trains by one optimizer; write train in place of trainer", path="trainer")
        if spec.backend != "flax":
            raise ConfigError(f"a plan trains with the engine 'flax', got '{spec.backend}'", path="backend")
        return cls()._with(
            model=spec.model,
            train=spec.train,
            data=spec.data,
            hooks=spec.hooks,
            callbacks=spec.callbacks,
            checkpoint=spec.checkpoint,
            mesh=spec.mesh or None,
            sharding=spec.sharding or None,
            elastic=spec.elastic,
        )

    # -- saying ------------------------------------------------------------------------------------------------

    def with_net(self, net: NNParams | Callable[..., Any]) -> Self:
        """The network: `NNParams`, or a function (a module class) called as `net(rngs=nnx.Rngs(seed))` in every fit."""
        if isinstance(net, NNParams):
            return self._of(self.settings.changed(module=None).field("model", net=net))
        return self._with(module=net)

    def with_model(self, params: Any, *, loss: Any = _SAME) -> Self:
        """Loss, metrics and precision as `NNModelParams`; `loss` as in `with_loss`."""
        plan = self._of(self.settings.whole("model", params))
        return plan if loss is _SAME else plan.with_loss(loss)

    def with_loss(self, loss: Any) -> Self:
        """The loss: a kind, `LossParams`, or a function `(outputs, batch)` or `(predicted, target)`."""
        if isinstance(loss, str | Mapping | LossParams):
            return self._of(self.settings.changed(loss=None).field("model", loss=loss))
        return self._with(loss=loss)

    def with_metrics(self, *metrics: Any) -> Self:
        """The metrics, in place of those before: kinds or `MetricParams`."""
        return self._of(self.settings.field("model", metrics=_listed(metrics)))

    def with_train(self, params: Any) -> Self:
        """Length, optimizer, schedule, monitor and the rest as `NNTrainParams`."""
        return self._of(self.settings.whole("train", params))

    def with_epochs(self, n_epochs: int) -> Self:
        """The length in epochs."""
        return self._train(n_epochs=n_epochs)

    def with_optim(self, optim: Any) -> Self:
        """The optimizer: `NNOptimParams`."""
        return self._train(optim=optim)

    def with_scheduler(self, scheduler: Any) -> Self:
        """The schedule of the rate: `NNSchedulerParams`."""
        return self._train(scheduler=scheduler)

    def with_monitor(self, monitor: Any) -> Self:
        """What BEST follows: a `MonitorSpec`, or None for the default."""
        return self._train(monitor=monitor)

    def with_extra_metrics(self, extra_metrics: Mapping[str, Callable[..., Any]]) -> Self:
        """Metrics of your own: name -> function(outputs, batch)."""
        return self._train(extra_metrics=dict(extra_metrics) if isinstance(extra_metrics, Mapping) else extra_metrics)

    def with_seed(self, seed: int) -> Self:
        """The seed of everything random: weights, order, dropout, and Python's and NumPy's streams in the factories."""
        return self._train(seed=seed)

    def with_data(
        self, params: Any = None, /, *, train: Any = _SAME, val: Any = _SAME, test: Any = _SAME, **cut: Any
    ) -> Self:
        """The data: `NNDataParams`, or the splits and how they are cut (`batch_size`, `tail`, `shuffle`, ...).

        Args:
            train, val, test: a dataset; or a function without arguments that returns a dataset or a loader, called once
                in every fit; or a loader of batches, which every fit then shares. None takes a split back.
        """
        settings = self.settings if params is None else self.settings.whole("data", params)
        splits = {name: value for name, value in (("train", train), ("val", val), ("test", test)) if value is not _SAME}
        return self._of(settings.field("data", **splits, **cut))

    def with_checkpoint(self, checkpoint: Any) -> Self:
        """When to commit and what to keep: `CheckpointParams`."""
        return self._with(checkpoint=checkpoint)

    def with_mesh(self, mesh: Mapping[str, int] | None, sharding: Mapping[str, Any] | None = None) -> Self:
        """Devices over which rows and parameters are split, as in {"data": 4}; numbers do not depend on it.

        Args:
            sharding: rules of your own, see `NNModel.train`.
        """
        return self._with(mesh=mesh, sharding=sharding)

    def with_callbacks(self, *callbacks: Any) -> Self:
        """What watches every fit, in place of those before: callbacks, functions of the history rows, or their params.

        A callback object is the same in every fit; give a factory for one that must start anew.
        """
        return self._with(callbacks=_listed(callbacks))

    def with_callback_factories(self, *factories: Callable[[], Any]) -> Self:
        """Functions without arguments that return a callback, called once in every fit, after the callbacks."""
        return self._with(callback_factories=_listed(factories))

    def with_hooks(self, *hooks: Any) -> Self:
        """What takes part in the compiled step, in place of those before; see `nnx_jax.hooks`."""
        return self._with(hooks=_listed(hooks))

    def with_step_fns(self, train: Any = None, evaluate: Any = None) -> Self:
        """A training step and a validation of your own; see `NNModel.train`."""
        return self._with(train_step_fn=train, eval_step_fn=evaluate)

    def with_objective(self, objective: Any) -> Self:
        """What makes the loss terms in place of the model's loss."""
        return self._with(objective=objective)

    def with_components(self, *components: Any) -> Self:
        """Objects with state that checkpoints hold."""
        return self._with(components=_listed(components))

    def with_provenance(self, provenance: Any) -> Self:
        """Where the experiment comes from: an `ExperimentManifest`."""
        return self._with(provenance=provenance)

    def with_history(self, history: Any) -> Self:
        """A journal in place of `idps.csv`: a `HistoryJournal`."""
        return self._with(history=history)

    def resuming(
        self, run_id: str, checkpoint: str = "LAST", *, mode: str = "auto", epochs: str = "additional"
    ) -> Self:
        """Start every fit from a checkpoint of another run, which is only read."""
        return self._train(
            resume_from_run_id=run_id, resume_from_checkpoint=checkpoint, resume_mode=mode, resume_epochs=epochs
        )

    def without_resume(self) -> Self:
        """Start afresh, whatever was said before."""
        return self.resuming(None)  # pyright: ignore[reportArgumentType]  # none takes it back

    # -- asking and running ------------------------------------------------------------------------------------

    def validate(self) -> tuple[Diagnostic, ...]:
        """Return every problem with its field path, none for a plan that can be fitted.

        No factory is called, no loader iterated, no directory made.
        """
        return checks.validate(self.settings)

    def probe(self, batch: Any) -> probing.ProbeResult:
        """Run one forward pass on a batch, in evaluation mode and with the first weights; nothing is written.

        Python's and NumPy's random streams are afterwards as before, also when it fails.

        Args:
            batch: `(x, y)`, a mapping of columns, or x alone; [B, ...] each.

        Raises:
            PlanError: the model cannot be built as described.
            ModelError: the network does not take the batch.
        """
        return probing.probe(self.settings, batch)

    def fit(
        self,
        attempt: str | None = None,
        *,
        runs_dir: str | Path = "runs",
        quiet: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> FitResult:
        """Train as planned; the same numbers, bit for bit, as `NNModel(...).train(...)` with the same arguments.

        Args:
            attempt: what tells this fit from others of the plan; a new one by default. An attempt that was interrupted
                goes on where it was committed last.
            runs_dir, quiet, progress, wait_seconds: as for `NNModel.train`.

        Raises:
            ProcessGroupError: (a RuntimeError) this process is one of several; nothing was called.
            PlanError: (a ValueError and a TypeError) with everything that is wrong with the plan, or with what its
                factories returned.
            RunExistsError: (a FileExistsError) the attempt is finished.
        """
        return fitting.fit(
            self.settings, attempt, runs_dir=runs_dir, quiet=quiet, progress=progress, wait_seconds=wait_seconds
        )

    def __repr__(self) -> str:
        said = [name for name in Settings.__dataclass_fields__ if getattr(self.settings, name) not in (None, (), {})]
        return f"ExperimentPlan({', '.join(dict.fromkeys(name.removesuffix('_changes') for name in said))})"

    # -- new plans ---------------------------------------------------------------------------------------------

    def _with(self, **changes: Any) -> Self:
        return self._of(self.settings.changed(**changes))

    def _train(self, **fields: Any) -> Self:
        return self._of(self.settings.field("train", **fields))

    def _of(self, settings: Settings) -> Self:
        plan = object.__new__(type(self))
        object.__setattr__(plan, "settings", settings)
        return plan


def _listed(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """One list stands for its items, so that `f(a, b)` and `f([a, b])` say the same."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
