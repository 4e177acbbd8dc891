"""Which form a run's history has, and what the loop and the callbacks see of it."""

from __future__ import annotations

from nnx_jax.fit.call import TrainCall
from nnx_jax.loop.callbacks import CallbackList
from nnx_jax.loop.history_access import JournalRecords
from nnx_jax.loop.records import Rows
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.replica import UnwrittenJournal
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore


def with_journal(spec: RunSpec, call: TrainCall, callbacks: CallbackList) -> RunSpec:
    """Return the specification with the journal that the call gives, if it gives one, after checking the callbacks.

    Raises:
        TypeError: `history` is no HistoryJournal.
        ConfigError: (a ValueError) a callback needs what a journal does not keep.
    """
    if call.history is not None:
        if not isinstance(call.history, HistoryJournal):
            raise TypeError(f"history must be a HistoryJournal, got {type(call.history).__name__}")
        spec = spec.replace(history=call.history)
    if spec.history is not None:
        callbacks.check_history()
    return spec


def open_records(store: RunStore, callbacks: CallbackList) -> Rows | JournalRecords:
    """Return what the loop keeps of the history in memory: all rows so far, or the window of the run's journal.

    Raises:
        ConfigError: (a ValueError) the run has a journal since it began, and a callback needs what that does not keep.
    """
    if isinstance(store.history, JournalWriter | UnwrittenJournal):
        callbacks.check_history()
        callbacks.read_back = store.history.read_back
        return JournalRecords(store.history)
    committed = store.point is not None
    return Rows(NNRun.load(store.paths.run_id, store.paths.root).records if committed else ())
