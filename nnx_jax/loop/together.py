"""Together: where one session's processes agree, and learn what callbacks of the others asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nnx_jax.spmd.world import World

if TYPE_CHECKING:
    from nnx_jax.loop.lifecycle import Session

T = TypeVar("T")


class Together:
    """Does host work of a session on every process; a process alone does it and nothing else.

    Records are the same on every process, and so are decisions made of them. What may differ is what user code does, so
    after each piece of it every process goes on with what any of them asked for: to stop, to write a checkpoint, to be
    told of every update.
    """

    def __init__(self, session: Session, world: World) -> None:
        self.session, self.world = session, world
        self.listened = False
        """Somebody, on some process, watches every single update."""

    def __call__(self, stage: str, work: Callable[[], T]) -> T:
        """Do `work` everywhere.

        Raises:
            DistributedFailure: it failed on another process; the failing one raises its own error.
        """
        if self.world.alone:
            return work()
        session = self.session
        place = f"{stage} (epoch {session.epoch}, update {session.step})"
        result, wishes = self.world.agree_telling(place, work, self._wishes)
        self._grant(wishes)
        return result

    def _wishes(self) -> dict[str, Any]:
        ctx, watch = self.session.ctx, self.session.watch
        return {
            "stop": bool(ctx.should_stop),
            "cut": bool(ctx.stop_at_update),
            "tags": list(ctx.deferred),
            "commit": watch is not None and bool(watch.commits),
            "listen": bool(ctx.update_listeners),
        }

    def _grant(self, wishes: list[dict[str, Any]]) -> None:
        ctx, watch = self.session.ctx, self.session.watch
        ctx.should_stop = any(wish["stop"] for wish in wishes)
        ctx.stop_at_update = any(wish["cut"] for wish in wishes)
        ctx.deferred[:] = dict.fromkeys(tag for wish in wishes for tag in wish["tags"])
        self.listened = any(wish["listen"] for wish in wishes)
        if watch is not None and not watch.commits and any(wish["commit"] for wish in wishes):
            watch.commits.append(None)
