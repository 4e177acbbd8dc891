"""A run of `max_steps` in which nothing becomes an update would never end; it is stopped with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnx_jax.core.errors import HookStateError, StepError

if TYPE_CHECKING:
    from nnx_jax.loop.lifecycle import Session


def check_idle(session: Session, vetoer: str | None) -> None:
    """Check that a run that only `max_steps` ends still makes updates.

    Allowed without one are ten epochs, but at least 100 windows and at most 10 000; 10 000 microbatches where hooks
    make the windows.

    Args:
        vetoer: class of the hook that vetoes; None for none.

    Raises:
        HookStateError: (a RuntimeError) a hook vetoes every step.
        StepError: nothing was left of any window.
    """
    plan, engine = session.plan, session.engine
    if plan.end_epoch is not None or plan.max_steps is None:
        return
    idle, window = engine.batch_count(session.state) - session.last_update, max(engine.accumulate, 1)
    # Where a hook decides batch by batch what is kept, a window of its own may be of any length.
    least = 10_000 if getattr(engine, "dynamic", False) else max(10 * engine.n_batches, 100 * window)
    if idle < min(least, 10_000 * window):
        return
    told = f"no update in the last {idle} microbatches, so max_steps would never be reached: "
    if vetoer is not None:
        raise HookStateError(f"{told}{vetoer} vetoes every step")
    if not getattr(engine, "owns_windows", True):
        raise StepError(f"{told}the step of your own reports none; call ctx.report_update(), or give n_epochs")
    raise StepError(f"{told}nothing was left of any window; look at masks, weights and ignored labels")
