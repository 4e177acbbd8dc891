"""How a model is trained by several optimizers, each with a name, a schedule and parameters of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from nnx_jax.core.spec import FrozenDict
from nnx_jax.params.builders import Builder
from nnx_jax.params.fields import Identifier, Precision
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec, TrainingParams


class NNTrainerParams(TrainingParams):
    """The training of one model by named optimizers. Give exactly one of `n_epochs` and `max_steps`.

    An optimizer owns the parameters that the patterns of its `param_groups` match; one optimizer alone may leave them
    out and owns all. No parameter has two owners.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        **TrainingParams.also_called,
        "optimizers": "optims",
        "optimizer": "optims",
        "optim": "optims",
        "scheduler": "schedulers",
        "schedules": "schedulers",
        "lr_schedulers": "schedulers",
    }

    optims: Mapping[Identifier, NNOptimParams]
    """The optimizers by name; each owns what the patterns of its `param_groups` match, one alone may own everything."""
    schedulers: Mapping[Identifier, NNSchedulerParams] = {}
    """Schedules of their rates, by the optimizer's name; an optimizer without one keeps its rate."""
    auto_step_schedulers: bool = True
    """Whether the clocks move the schedules; false: every rate stays at its optimizer's `max_lr`."""

    def _complete(self) -> None:
        for name in ("optims", "schedulers"):
            self._set(name, FrozenDict(sorted(getattr(self, name).items())))

    def problems(self) -> Iterator[tuple[str, str]]:
        """There is an optimizer, every schedule has one, and ownership can be told."""
        yield from super().problems()
        known = ", ".join(self.optims)
        if not self.optims:
            yield "optims", "got {}; name at least one optimizer, as in optims: {main: {kind: adam}}"
        for name in self.schedulers:
            if name not in self.optims:
                yield f"schedulers.{name}", f"there is no optimizer '{name}'; the optimizers are {known or 'none'}"
        for name, optim in self.optims.items():
            if len(self.optims) > 1 and not optim.param_groups:
                yield (
                    f"optims.{name}.param_groups",
                    f"is empty, but there are several optimizers ({known}); give '{name}' the patterns of its "
                    "parameters, as in param_groups: [{patterns: encoder.*}]",
                )

    @property
    def optimizers(self) -> Mapping[str, NNOptimParams]:
        """The same as `optims`."""
        return self.optims

    @property
    def schedules(self) -> Mapping[str, NNSchedulerParams]:
        """The schedule of every optimizer: its own, or a constant."""
        return {name: self.schedulers.get(name, NNSchedulerParams()) for name in self.optims}

    def places(self, name: str) -> tuple[str, str]:
        """Return ("optims.NAME", "schedulers.NAME")."""
        return f"optims.{name}", f"schedulers.{name}"

    def with_window(self, window: int) -> Self:
        """Return a copy whose every optimizer makes an update of `window` microbatches."""
        changed = {name: optim.replace(accumulate_grad_batches=window) for name, optim in self.optims.items()}
        return self.replace(optims=changed)

    @classmethod
    def builder(cls) -> TrainerBuilder:
        """Return an empty builder."""
        return TrainerBuilder()


class TrainerBuilder(Builder[NNTrainerParams]):
    """Builds trainings by named optimizers: `.optimizer("a", ...).scheduler("a", ...).n_epochs(3).build()`.

    Every call sets one thing and returns the builder; the last call wins. What is wrong is told by `build()`.
    """

    target = NNTrainerParams
    modifiers = tuple(NNTrainerParams.model_fields)

    def optimizer(self, name: str, params: NNOptimParams) -> Self:
        """Add an optimizer, or replace the one of that name."""
        return self._modify(optims={**self._modifiers.get("optims", {}), name: params})

    def scheduler(self, name: str, params: NNSchedulerParams) -> Self:
        """Give the optimizer of that name a schedule, in place of the one it has; the optimizer may follow later."""
        return self._modify(schedulers={**self._modifiers.get("schedulers", {}), name: params})

    def n_epochs(self, count: int) -> Self:
        """Set the length in epochs, in place of one in updates."""
        return self._modify(n_epochs=count, max_steps=None)

    def max_steps(self, count: int) -> Self:
        """Set the length in updates, in place of one in epochs."""
        return self._modify(max_steps=count, n_epochs=None)

    def seed(self, value: int) -> Self:
        """Set the seed of everything random."""
        return self._modify(seed=value)

    def salt(self, text: str | None) -> Self:
        """Set the text that makes this another run of the same configuration, None for none."""
        return self._modify(salt=text)

    def data_id(self, text: str | None) -> Self:
        """Set the name of data that comes from a loader."""
        return self._modify(data_id=text)

    def precision(self, name: Precision | None) -> Self:
        """Set the number format, None for the model's."""
        return self._modify(precision=name)

    def monitor(self, monitor: MonitorSpec | None) -> Self:
        """Set what BEST and plateau schedules follow."""
        return self._modify(monitor=monitor)

    def resume_from(
        self,
        run_id: str | None,
        checkpoint: str = "LAST",
        *,
        epochs: Literal["additional", "planned"] = "additional",
        mode: Literal["auto", "stateful", "weights_only"] = "auto",
    ) -> Self:
        """Set the run and checkpoint to start from, what the length counts and what is taken; None for a new start."""
        return self._modify(
            resume_from_run_id=run_id, resume_from_checkpoint=checkpoint, resume_epochs=epochs, resume_mode=mode
        )

    def overwrite_existing(self, value: bool = True) -> Self:
        """Set whether a finished run of the same configuration is replaced."""
        return self._modify(overwrite_existing=value)

    def save_phase_checkpoints(self, value: bool = True) -> Self:
        """Set whether FIRST, Q1, Q2 and Q3 are kept."""
        return self._modify(save_phase_checkpoints=value)

    def auto_step_schedulers(self, value: bool = True) -> Self:
        """Set whether the clocks move the schedules."""
        return self._modify(auto_step_schedulers=value)

    def train_loader(self, loader: Any) -> Self:
        """Set the batches to train on."""
        return self._modify(train_loader=loader)

    def val_loader(self, loader: Any) -> Self:
        """Set the batches to evaluate on."""
        return self._modify(val_loader=loader)

    def extra_metrics(self, functions: Mapping[str, Any] | None) -> Self:
        """Set the functions (outputs, batch) -> value that are recorded besides the model's metrics."""
        return self._modify(extra_metrics=None if functions is None else dict(functions))
