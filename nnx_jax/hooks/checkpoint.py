"""CheckpointHook: keep a checkpoint every so many updates or epochs, as a tag on the run store's own commit."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, PrivateAttr

from nnx_jax.core.errors import HookError, HookStateError
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import HookSpec
from nnx_jax.params.fields import Count, Text

Folder = Annotated[
    Text | None, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]


@register("checkpoint")
class CheckpointHook(HookSpec):
    """Commit the run every `step_interval` updates or every `epoch_interval` epochs, and name what was committed.

    The names are `step_<updates>` and `epoch_<finished epochs>`. A vetoed batch makes no update, so it makes no
    checkpoint, and no update makes two. One store holds everything: weights, optimizer, accumulated gradients, hook
    slots, random state, the position in the data, and the state of every hook that has one. Give the same hook when you
    continue, and it goes on counting and keeping where it was.
    """

    observes: ClassVar[bool] = True
    frequency: ClassVar[int] = 1

    checkpoint_dir: Folder = None
    """Directory of a TrainingStrategy's run; none (an NNModel's run has a directory): that one."""
    step_interval: Count | None = None
    """Updates between checkpoints; give this or `epoch_interval`."""
    epoch_interval: Count | None = None
    """Epochs between checkpoints."""
    keep_last: Count | None = None
    """How many of the newest of this hook's checkpoints stay; none: all, unless `keep_best` says otherwise."""
    keep_best: Count | None = None
    """How many with the lowest validation loss stay, besides the newest; none: the loss does not count."""
    async_save: bool = True
    """Whether training goes on while the files are written."""
    rank_zero_only: bool = True
    """Whether only the first process writes `checkpoint_dir`. For a run every process asks, and one writes."""

    _index: int = PrivateAttr(default=-1)
    _at: tuple[int, int] | None = PrivateAttr(default=None)
    _kept: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _retired: list[str] = PrivateAttr(default_factory=list)
    _scored: tuple[int, float] | None = PrivateAttr(default=None)
    _owner: weakref.ref[Any] | None = PrivateAttr(default=None)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Exactly one interval."""
        yield from super().problems()
        if (self.step_interval is None) == (self.epoch_interval is None):
            given = "neither is given" if self.step_interval is None else "both are given"
            yield "step_interval", f"{given}; give exactly one of step_interval and epoch_interval"

    def on_register(self, owner: Any) -> None:
        """Check that there is one place to write to.

        Raises:
            HookError: (a ValueError) a directory for a run that has one, or none for a strategy.
        """
        if owner is None:
            return
        name, chooses = type(owner).__name__, hasattr(owner, "own_stores")
        if chooses and self.checkpoint_dir is None:
            raise HookError(
                f"CheckpointHook has no checkpoint_dir, and {name} writes nowhere else; give it a directory"
            )
        if not chooses and self.checkpoint_dir is not None:
            raise HookError(
                f"CheckpointHook has checkpoint_dir {self.checkpoint_dir!r}, but {name} keeps its checkpoints in the "
                "run's own directory (runs_dir); leave checkpoint_dir out"
            )

    # -- when ------------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> TrainingStage:
        """AFTER_BATCH for updates, AFTER_EPOCH for epochs."""
        return TrainingStage.AFTER_BATCH if self.step_interval is not None else TrainingStage.AFTER_EPOCH

    @property
    def cadence_steps(self) -> int | None:
        """Updates between calls at AFTER_BATCH."""
        return self.step_interval

    @property
    def cadence_epochs(self) -> int | None:
        """Epochs between calls at AFTER_EPOCH."""
        return self.epoch_interval

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage is self.stage or (self.keep_best is not None and stage is TrainingStage.AFTER_VALIDATION)

    # -- what ------------------------------------------------------------------------------------------------------

    @property
    def last_checkpoint_index(self) -> int | None:
        """Number of this hook's last checkpoint, counted from 0; None before the first."""
        return self._index if self._index >= 0 else None

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Names of this hook's checkpoints that are kept, oldest first."""
        return tuple(entry["tag"] for entry in self._kept)

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Ask for a commit where one is due; at AFTER_VALIDATION note the loss of the update it belongs to."""
        if ctx.workflow is None:
            raise HookStateError("CheckpointHook has no run to checkpoint; give it to one: train(..., hooks=[hook])")
        self._follow(ctx.workflow)
        if stage is TrainingStage.AFTER_VALIDATION:
            self._score(ctx.step_count, ctx.validation)
            return
        # Checkpoints of a run are written by whoever writes the run, and all processes remember the same of them.
        elsewhere = self.rank_zero_only and self.checkpoint_dir is not None and ctx.global_rank != 0
        if stage is not self.stage or elsewhere:
            return
        if self.step_interval is not None:
            due, tag = ctx.step_count % self.step_interval == 0, f"step_{ctx.step_count}"
        else:
            due, tag = ctx.epoch % (self.epoch_interval or 1) == 0, f"epoch_{ctx.epoch}"
        here = (ctx.step_count, ctx.epoch if self.epoch_interval is not None else 0)
        if not due or here == self._at or max(here) == 0:
            return
        self._at, self._index = here, self._index + 1
        self._kept = [entry for entry in self._kept if entry["tag"] != tag]
        self._kept.append({"tag": tag, "step": ctx.step_count, "score": None})
        self._score(*(self._scored or (-1, 0.0)))
        retired = self._retire()
        options = {"retired": retired} if retired else {}
        ctx.request_commit(tag, **options, **({} if self.async_save else {"wait": True}))

    def _follow(self, owner: Any) -> None:
        """Another run than the last: what this hook remembers of that one does not count, unless it was loaded."""
        if self._owner is not None and self._owner() is not owner:
            self._index, self._at, self._kept, self._retired, self._scored = -1, None, [], [], None
        self._owner = weakref.ref(owner)

    def _score(self, step: int, validation: Any) -> None:
        """Give the checkpoint of update `step` its loss, or remember it for the one that comes right after."""
        value = validation if isinstance(validation, float) else _loss(validation)
        if value is None:
            return
        self._scored = (step, value)
        for entry in self._kept:
            if entry["step"] == step:
                entry["score"] = value

    def _retire(self) -> tuple[str, ...]:
        """Names to give up with the commit that is asked for now.

        Those of the commit before are given once more: a kill between that commit and its clean-up would leave them.
        """
        if self.keep_last is None and self.keep_best is None:
            return ()
        newest = self._kept[-(self.keep_last or 1) :]
        scored = sorted((entry for entry in self._kept if entry["score"] is not None), key=lambda e: e["score"])
        held = {entry["tag"] for entry in [*newest, *scored[: self.keep_best or 0]]}
        gone = [entry["tag"] for entry in self._kept if entry["tag"] not in held]
        again = [tag for tag in self._retired if tag not in held]
        self._kept = [entry for entry in self._kept if entry["tag"] in held]
        self._retired = gone
        return (*again, *gone)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was saved last, and which names are kept."""
        return {
            "last_checkpoint_index": self._index,
            "at": None if self._at is None else list(self._at),
            "kept": [dict(entry) for entry in self._kept],
            "retired": list(self._retired),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            HookError: (a ValueError) the state is not one of this hook's.
        """
        try:
            index, at = int(state["last_checkpoint_index"]), state["at"]
            kept = [{name: entry[name] for name in ("tag", "step", "score")} for entry in state["kept"]]
            retired = [str(tag) for tag in state["retired"]]
            where = None if at is None else (int(at[0]), int(at[1]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise HookError(
                f"this is no state of a CheckpointHook ({error!r}); load one that state_dict gave"
            ) from error
        self._index, self._at, self._kept, self._retired = index, where, kept, retired
        self._owner = self._scored = None


def _loss(validation: Any) -> float | None:
    """The number a validation is ranked by, lower is better; None where there is none that can be ranked."""
    value = validation.get("total_loss") if isinstance(validation, Mapping) else None
    return float(value) if value is not None and value == value else None
