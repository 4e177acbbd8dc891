"""HookContext: what a host hook sees; counters are exact, arrays are fetched only when somebody asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nnx_jax.core.errors import HookStateError, TraceBoundaryError
from nnx_jax.core.hook_registry import NEEDS
from nnx_jax.core.stages import TrainingStage

_FROM = {
    "predictions": TrainingStage.AFTER_FORWARD,
    "loss": TrainingStage.AFTER_LOSS,
    "losses": TrainingStage.AFTER_LOSS,
    "gradients": TrainingStage.AFTER_BACKWARD,
}
"""From which stage on a microbatch has this value; up to AFTER_BATCH."""

_LAZY = (
    "batch", "model", "models", "loss", "losses", "predictions", "gradients", "params", "learning_rate", "step_count",
    "global_step_count", "grad_scaler",
)  # fmt: skip


class View(Protocol):
    """Where a context's values come from."""

    world: int

    def step_count(self) -> int:
        """Updates made, exactly, as the stage being called counts them; may read the device."""
        ...

    def look(self, name: str) -> Any:
        """One of `_LAZY`: a copy, or None where there is none."""
        ...

    def request(self, what: str, tag: str | None = None, *, retired: Sequence[str] = (), wait: bool = False) -> None:
        """Note what a hook asks of the loop: "commit" or "stop"."""
        ...


class HookContext:
    """What a host hook is given, read-only; one for all stages of a microbatch, one for each other event.

    Arrays are copies made on the device when they are asked for, so keeping one past its microbatch is safe. Turning
    one into a number (`float(ctx.loss)`) waits for the device.

    Attributes:
        batch: columns of the microbatch by name, read-only; None outside of a microbatch.
        model, models: the trained module, brought up to date when asked; by name, a single one under "main".
        batch_count, epoch_step_count: microbatches of the run, of the epoch; before this one until AFTER_BATCH.
        step_count, global_step_count: updates made, here and by all workers, counted likewise. Where an update may
            have been vetoed since the last read, asking reads the device.
        epoch: epochs finished.
        loss: of the microbatch, a float32 scalar; None before AFTER_LOSS.
        losses: by term, likewise.
        predictions, gradients, params: only for a hook that names them in `needs`, unless the engine is torch's, which
            has them anyway; gradients by path, as accumulated so far and without loss scale.
        learning_rate: of the last update.
        optimizers, lr_schedulers: aligned; a schedule may be None.
        grad_scaler: the loss scale's state as the host sees it; None without one.
        validation: the last validation's values by name, "total_loss" among them; None before the first.
        global_rank: number of this process.
        workflow: what trains: an NNModel, a strategy.
    """

    def __init__(self, view: View, **known: Any) -> None:
        empty = {"batch_count": 0, "epoch_step_count": 0, "epoch": 0, "validation": None, "workflow": None}
        self.__dict__.update(empty | {"global_rank": 0, "optimizers": [], "lr_schedulers": []} | known)
        self.__dict__.update(_view=view, _stage=None, _hook=None, _kept={}, _open=True)

    def request_commit(self, tag: str | None = None, *, retired: Sequence[str] = (), wait: bool = False) -> None:
        """Ask for a commit of the state this event sees: right after it, at AFTER_BATCH after the whole event.

        At a stage inside the step it is made after the microbatch, at AFTER_EPOCH with the epoch's own commit.

        Args:
            tag: name of a checkpoint that is to point there; None for none.
            retired: names of earlier checkpoints that are given up with it.
            wait: whether training waits until the commit is on the disk.
        """
        self._ask("commit", tag, retired=retired, wait=wait)

    def request_stop(self) -> None:
        """Ask the run to end after this microbatch, or this event, as if its length were reached."""
        self._ask("stop", None)

    def _ask(self, what: str, tag: str | None, **options: Any) -> None:
        stage = self.__dict__["_stage"]
        if stage in (None, TrainingStage.SETUP) or not self.__dict__["_open"]:
            raise HookStateError(f"request_{what} is for hooks while they are called, from BEFORE_TRAINING on")
        self.__dict__["_view"].request(what, tag, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"a hook's context has no {name!r}")
        kept = self.__dict__["_kept"]
        if name in kept:
            return kept[name]
        if not self.__dict__["_open"]:
            raise TraceBoundaryError(f"ctx.{name} was asked for after its stage; read it while the hook is called")
        value = self._fetch(name)
        if value is not None and name not in ("step_count", "global_step_count"):
            kept[name] = value
        return value

    def _fetch(self, name: str) -> Any:
        view: View = self.__dict__["_view"]
        hook, stage = self.__dict__["_hook"], self.__dict__["_stage"]
        if name in NEEDS and name not in getattr(hook, "needs", ()) and not getattr(view, "shows_all", False):
            raise TraceBoundaryError(
                f"{type(hook).__name__} asks for ctx.{name}, which the step hands out only when it is declared; write "
                f'needs = ("{name}",) in the class'
            )
        if name in ("step_count", "global_step_count"):
            return view.step_count() * (view.world if name == "global_step_count" else 1)
        if name in _FROM and not _FROM[name].value <= stage.value <= TrainingStage.AFTER_BATCH.value:
            if name in NEEDS:
                raise TraceBoundaryError(f"ctx.{name} is there from {_FROM[name].name} on; this is {stage.name}")
            return None
        if name == "model":
            models: Mapping[str, Any] = self.models
            return models.get("main", next(iter(models.values()), None))
        return view.look(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TraceBoundaryError(
            f"ctx.{name} cannot be assigned by a hook that watches: the step is done; a TracedHook or a "
            "TrainingUpdateHook can replace values inside it"
        )

    # -- for the loop ------------------------------------------------------------------------------------------

    def at(self, stage: TrainingStage, hook: Any) -> HookContext:
        """The context as `hook` sees it at `stage`."""
        self.__dict__.update(_stage=stage, _hook=hook)
        return self

    def renew(self) -> None:
        """Another stage of an executor with values in hand: what was asked for may be another value now."""
        self.__dict__["_kept"].clear()

    def move(self, **known: Any) -> None:
        """Counters after the microbatch."""
        self.__dict__.update(known)

    def close(self) -> None:
        """The event is over: what was not asked for is gone."""
        self.__dict__.update(_open=False, _view=None)
