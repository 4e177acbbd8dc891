"""The session as its hooks see it: exact counters without a read per step, one microbatch at a time where watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nnx_jax.core.errors import HookStateError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.loop.engine import Records, Span
from nnx_jax.loop.hook_context import HookContext
from nnx_jax.loop.memory_store import MemoryStore

if TYPE_CHECKING:
    from nnx_jax.loop.hook_events import HookEvents
    from nnx_jax.loop.lifecycle import Session

INSIDE = tuple(
    stage for stage in Stage if Stage.BEFORE_FORWARD.value <= stage.value <= Stage.AFTER_OPTIMIZER_STEP.value
)
"""Watched after the step, in this order."""

BEFORE_STEP = (Stage.BEFORE_BATCH, *INSIDE)
"""Stages that see the counters as they were before the microbatch."""


class SessionWatch:
    """Fires the events of one session.

    How many updates were made is known at every read of the records; since then there were at most as many as windows
    were closed. A read is made only where that leaves open whether somebody is due.
    """

    def __init__(self, session: Session, events: HookEvents) -> None:
        self.session, self.events, self.world = session, events, events.world
        self.possible = 0
        """Windows closed since the last read: each may have become an update."""
        self.commits: list[str | None] = []
        """What hooks asked to commit, by tag; a commit answers all of them."""
        self.retired: list[str] = []
        """Checkpoint names that hooks give up with the next commit."""
        self.waits = False
        """Somebody wants the next commit on the disk before training goes on."""
        self._mark: int | None = None
        self._before = session.step
        self._before_known = True
        self._inside: Any = None
        self._live: Any = None
        self._place: tuple[int, int] | None = None
        self._vetoer: int | None = None
        self.validation: dict[str, float] | None = None
        events.observe = self._observed

    @property
    def per_batch(self) -> bool:
        """Somebody watches microbatches."""
        return self.events.per_batch

    # -- events around the epochs ------------------------------------------------------------------------------

    def event(self, stage: Stage) -> None:
        """Fire a stage that belongs to no microbatch."""
        self.session.together(f"hooks at {stage.name}", lambda: self._event(stage))

    def _event(self, stage: Stage) -> None:
        ctx = self._context()
        self.events.fire(stage, ctx, lambda hook: self.session.step % _frequency(hook) == 0)
        if stage is Stage.AFTER_EPOCH:
            epoch = self.session.epoch + 1
            self.events.fire_timed("epochs", (stage,), ctx, lambda every: epoch % every == 0)
        ctx.close()

    def at_boundary(self, seen: int) -> None:
        """Fire the hooks whose cadence of updates was reached since `seen`, right after a read."""
        step, due = self.session.step, self.session.cadence.due
        if any(due(every, seen, step) for every in self.events.cadences):
            ctx = self._context(rolled=False)
            stages = (*BEFORE_STEP, Stage.AFTER_BATCH)
            fire = lambda: self.events.fire_timed("steps", stages, ctx, lambda every: due(every, seen, step))  # noqa: E731
            self.session.together("hooks after updates", fire)
            ctx.close()

    def validated(self, values: dict[str, float], count: int) -> None:
        """A validation gave these values."""
        self.validation = {"total_loss": values["loss"], **values, "num_samples": count} if "loss" in values else values
        self._event(Stage.AFTER_VALIDATION)

    def _context(self, *, rolled: bool = True) -> HookContext:
        """A context of the state now; the epoch counts as finished after its last microbatch if `rolled`."""
        session = self.session
        after = rolled and session.batch >= session.engine.n_batches
        return self.events.context(
            self,
            batch_count=session.engine.batch_count(session.state),
            epoch_step_count=0 if after else session.batch,
            epoch=session.epoch + (1 if after else 0),
            validation=self.validation,
            **session.engine.parts(),
        )

    # -- microbatches ------------------------------------------------------------------------------------------

    def span(self, count: int, *, closes: bool) -> None:
        """Run microbatches one by one, with their events; ends early when somebody asks to stop."""
        for place in range(count):
            self.one(closes=closes and place == count - 1)
            if self.session.stop or self.session.ctx.should_stop:
                return

    def one(self, *, closes: bool) -> None:
        """One microbatch from BEFORE_BATCH to AFTER_BATCH; `closes` ends its window here whatever its length."""
        session, engine, events = self.session, self.session.engine, self.events
        ctx = self._context()
        self._begin()
        due = {id(hook) for hook in events.watching(*BEFORE_STEP) if self._due(hook)}
        is_due = lambda hook: id(hook) in due  # noqa: E731
        self._inside = None
        try:
            self._fire(Stage.BEFORE_BATCH, ctx, is_due)
            self.serve()
            full = engine.open_batches(session.state) + 1 == engine.accumulate
            self._live = ctx, is_due
            span = Span(session.epoch, session.batch, 1, closes=closes)
            session.state, _ = engine.run_span(session.state, span, session._poll)
            session.batch += 1
            self.possible += full or closes
            if not engine.in_place:
                for stage in INSIDE:
                    self._fire(stage, ctx, is_due)
            self._mark = None
            if engine.in_place:
                ctx.renew()
            ctx.move(batch_count=engine.batch_count(session.state), epoch_step_count=session.batch)
            self._fire(Stage.AFTER_BATCH, ctx, self._due)
        finally:
            self._mark = self._inside = self._live = self._place = None
            ctx.close()
        self.serve()

    def _fire(self, stage: Stage, ctx: HookContext, due: Callable[[Any], bool]) -> None:
        """Fire a stage of a microbatch; processes agree on it where somebody is due."""
        together = self.session.together
        if together.world.alone:
            self.events.fire(stage, ctx, due)
            return
        chosen = {id(hook) for hook in self.events.watching(stage) if due(hook)}
        if chosen:
            together(f"hooks at {stage.name}", lambda: self.events.fire(stage, ctx, lambda hook: id(hook) in chosen))

    def _observed(self, stage: Stage, inner: Any) -> None:
        """An executor with values in hand is at `stage`: hooks are called there and then."""
        if self._live is not None and stage in INSIDE:
            ctx, due = self._live
            self._inside = inner
            ctx.renew()
            self.events.fire(stage, ctx, due)

    def serve(self) -> None:
        """Commit now if a hook asked for it."""
        if self.commits:
            self.session._read()
            self.session._commit()

    def served(self) -> tuple[tuple[str, ...], bool]:
        """A commit answers everything that was asked: the names it gives up, and whether somebody waits for it."""
        answer = tuple(self.retired), self.waits
        self.commits, self.retired, self.waits = [], [], False
        return answer

    # -- the view of contexts ----------------------------------------------------------------------------------

    @property
    def shows_all(self) -> bool:
        """The engine has every value in hand, so that nobody has to ask for one beforehand."""
        return getattr(self.session.engine, "shows_all", False)

    def step_count(self) -> int:
        """Updates made, exactly; before the microbatch while its stages up to AFTER_OPTIMIZER_STEP are called."""
        if self._mark is None:
            if self.possible:
                self.session._read()
            return self.session.step
        if not self._before_known:
            self.session._read()
        return self._before

    def look(self, name: str) -> Any:
        """A value of the current microbatch or state, copied."""
        session = self.session
        if name == "batch":
            return None if self._place is None else session.engine.batch(*self._place)
        if self._inside is not None and name in ("loss", "losses", "predictions", "gradients", "params"):
            inner = self._inside
            return (
                inner.losses["per_component_unweighted"] if name == "losses" else getattr(inner, _NAMES.get(name, name))
            )
        return session.engine.look(session.state, name)

    def request(self, what: str, tag: str | None = None, *, retired: Sequence[str] = (), wait: bool = False) -> None:
        """Note a hook's wish.

        Raises:
            HookStateError: a commit, where there is nothing to commit to.
        """
        if what == "stop":
            self.session.ctx.should_stop = True
            return
        if isinstance(self.session.plan.store, MemoryStore):
            raise HookStateError(
                "a hook asks for a commit, but this training has no directory; give it a CheckpointHook with one"
            )
        self.commits.append(tag)
        self.retired += retired
        self.waits |= wait
        if tag is not None:
            self.session.ctx.deferred.append(tag)

    # -- counting ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._mark = self.session.engine.batch_count(self.session.state)
        self._before, self._before_known = self.session.step, self.possible == 0
        self._place = self.session.epoch, self.session.batch

    def _due(self, hook: Any) -> bool:
        """Is the count of updates a multiple of the hook's frequency? Reads only if that cannot be told."""
        frequency, low = _frequency(hook), self.session.step
        if frequency == 1:
            return True
        if -(-low // frequency) * frequency > low + self.possible:
            return False
        if self.possible:
            self.session._read()
        return self.session.step % frequency == 0

    def note(self, records: Records) -> None:
        """Records were read: learn the counts, and who vetoed."""
        if self._mark is not None:
            earlier = records.batch < self._mark
            if earlier.any():
                self._before = int(records.step[earlier][-1])
        if (orchestrator := self.events.registry.update) is not None:
            orchestrator.optimizer_step_skipped = not bool(records.committed[-1])  # as of this read
        if records.veto is not None and (said := records.veto[records.veto >= 0]).size:
            self._vetoer = int(said[-1])

    def read(self) -> None:
        """All records are read: the counts are exact."""
        self.possible, self._before_known = 0, True

    @property
    def vetoer(self) -> str | None:
        """Class of the hook that vetoed last; None for none."""
        return None if self._vetoer is None else self.session.engine.hook_name(self._vetoer)


_NAMES = {"gradients": "unscaled_grads"}


def _frequency(hook: Any) -> int:
    return getattr(hook, "frequency", 1)
