"""What a commit holds, and how a session ends: callbacks in reverse, LAST refreshed, no error masked by a cleanup's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnx_jax.loop.callbacks import raise_first
from nnx_jax.loop.monitors import as_dict
from nnx_jax.loop.signals import Interrupted
from nnx_jax.runs.commit import CommitPoint
from nnx_jax.runs.transforms import FINAL, NNCheckpointTransform

if TYPE_CHECKING:
    from nnx_jax.loop.lifecycle import Session


def commit(
    session: Session,
    *,
    best: bool = False,
    phases: tuple[str, ...] = (),
    transforms: Sequence[NNCheckpointTransform] = (),
) -> None:
    """Hand one generation to the run store, with everything that continues the run bit for bit.

    Args:
        transforms: what the ends of callbacks did to the network's topology. The network is then stored as it is now
            beside the state that training goes on from.
    """
    committer, watch = session.plan.store.committer, session.watch
    snapshot = session.engine.snapshot(session.state, session.epoch, session.batch)
    host, arrays = _host(session, snapshot.position, snapshot.topology), dict(snapshot.arrays)
    recorded = [*getattr(session.plan.model, "transforms", ()), *transforms]
    if recorded:
        host["transforms"] = [transform.state() for transform in recorded]
    if transforms:
        now = session.engine.weights(session.plan.model)
        arrays |= {f"{FINAL}{name}": array for name, array in now.items()}
    retired, wait = ((), False) if watch is None else watch.served()
    deferred, session.ctx.deferred = tuple(session.ctx.deferred), []
    committer.commit(
        CommitPoint(
            epoch=session.epoch if session.batch else max(session.epoch - 1, 0),
            step=session.step,
            batch=session.epoch * session.engine.n_batches + session.batch,
            arrays=arrays,
            host=host,
            names=phases,
            best=best,
            score=_score(session, best),
            deferred=deferred,
            retired=retired,
        )
    )
    if wait:
        committer.drain()


def _host(session: Session, position: Mapping[str, Any], topology: Mapping[str, Any]) -> dict[str, Any]:
    """What the host keeps beside the arrays, as JSON values."""
    plan, ctx, keeper = session.plan, session.ctx, session.keeper
    host = {
        "position": {"epoch": session.epoch, "batch": session.batch, "data": position},
        "step": session.step,
        "seen": session.seen,
        "stopped": ctx.should_stop or ctx.stop_at_update,
        "totals": storable(keeper.epoch.totals),
        "values": storable(ctx.values),
        "rate": storable(ctx.rate),
        "length": {"end_epoch": plan.end_epoch, "max_steps": plan.max_steps},
        "clock": plan.clock.state() if plan.clock is not None else None,
        "monitor": plan.tracker.state(),
        "decision": storable(as_dict(ctx.decision)) if ctx.decision else None,
        "components": plan.components.state(),
        "topology": topology,
    }
    if len(session.updates.source.names) > 1 or not getattr(session.engine, "owns_windows", True):
        host["updates"] = dict(session.updates.source.counts)
    if plan.geometry is not None:
        host["geometry"] = dict(plan.geometry)
    if open_sums := keeper.open:
        host["open"] = storable(open_sums)
    if session.watch is not None:
        host["components"].update(session.watch.events.state())
    return host


def _score(session: Session, best: bool) -> float | None:
    """Rank in `runs/best`: only runs without a monitor of their own are comparable."""
    decision = session.ctx.decision
    return decision.value if best and decision is not None and session.plan.spec.training.monitor is None else None


def finalize(session: Session, error: BaseException | None) -> None:
    """End callbacks in reverse, refresh LAST after a clean end, wait for the commit in flight, mask nothing.

    A run that `stop_at_update` ended inside an epoch keeps the LAST it has.
    """
    failures: list[BaseException] = []
    try:
        for end in (_end_callbacks, lambda session, _: session.plan.store.committer.drain()):
            try:
                end(session, error)
            except BaseException as failure:  # whatever a cleanup did, the commit in flight is waited for
                failures.append(failure)
    finally:
        session.plan.progress.stop()
    raise_first(failures, error, "while stopping")


def _end_callbacks(session: Session, error: BaseException | None) -> None:
    try:
        if error is None or (isinstance(error, Interrupted) and (error.committed or session.plan.world.alone)):
            session.engine.trained(session.state)
    except BaseException as failure:  # as of an update that a second signal cut off
        session.plan.callbacks.train_end(session.ctx, error or failure)
        raise
    if error is not None:
        session.plan.callbacks.train_end(session.ctx, error)
        return
    session.together("callbacks end", lambda: session.plan.callbacks.train_end(session.ctx, None))
    if not session.cut:
        transforms = session.plan.callbacks.transforms
        if not transforms:
            session.state = session.engine.absorb(session.state)
        session._commit(transforms=transforms)


def storable(value: Any) -> Any:
    """JSON values with non-finite floats spelled as text, since JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {name: storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """The inverse of `storable` for values that hold only numbers."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, Mapping):
        return {name: restored(item) for name, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value
