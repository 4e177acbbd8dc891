"""Callbacks of a run with a journal: the window for most, everything for those that ask, read once per dispatch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError, HistoryCorruptionError
from nnx_jax.loop.callbacks import Callback, CallbackList
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.records import Rows

WINDOW = [{"epoch": 1}]
EVERYTHING = ({"epoch": 0}, {"epoch": 1})


class Seen(Callback):
    def __init__(self, access: str = "window") -> None:
        self.history_access = access
        self.epochs: list[Any] = []
        self.ends: list[Any] = []

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.epochs.append(ctx.records)

    def on_train_end(self, ctx: TrainContext) -> None:
        self.ends.append(ctx.records)


class Reader:
    """Counts how often everything is read; fails when told."""

    def __init__(self) -> None:
        self.count, self.broken = 0, False

    def __call__(self) -> Sequence[Mapping[str, Any]]:
        self.count += 1
        if self.broken:
            raise HistoryCorruptionError("chunk-00000000.jsonl: altered")
        return EVERYTHING


def dispatched(*callbacks: Callback) -> tuple[CallbackList, TrainContext, Reader]:
    every, reader = CallbackList(callbacks), Reader()
    every.read_back = reader
    ctx = TrainContext("0123456789abcdef", records=WINDOW)
    every.train_begin(ctx)
    return every, ctx, reader


def test_everything_is_read_once_per_dispatch() -> None:
    """nnx:S39 two callbacks that ask share one read; the others, and the loop itself, keep the window."""
    plain, full, other = Seen(), Seen("full"), Seen("full")
    every, ctx, reader = dispatched(full, plain, other)
    every.epoch_end(ctx)
    every.epoch_end(ctx)
    assert reader.count == 2
    assert (full.epochs, other.epochs, plain.epochs) == ([EVERYTHING] * 2, [EVERYTHING] * 2, [WINDOW] * 2)
    assert ctx.records is WINDOW
    every.train_end(ctx, None)
    assert reader.count == 3
    assert (full.ends, other.ends, plain.ends) == ([EVERYTHING], [EVERYTHING], [WINDOW])
    assert ctx.records is WINDOW


def test_nothing_is_read_for_nobody() -> None:
    every, ctx, reader = dispatched(Seen(), Seen())
    every.epoch_end(ctx)
    every.train_end(ctx, None)
    assert reader.count == 0


def test_a_read_that_fails_stops_an_epoch_and_only_warns_at_the_end() -> None:
    """nnx:B158 at the end one RuntimeWarning, the window in its place, and every cleanup runs."""
    plain, full, other = Seen(), Seen("full"), Seen("full")
    every, ctx, reader = dispatched(plain, full, other)
    reader.broken = True
    with pytest.raises(HistoryCorruptionError):
        every.epoch_end(ctx)
    assert ctx.records is WINDOW
    with pytest.warns(RuntimeWarning, match=r"cannot be read back.*chunk-00000000") as caught:
        every.train_end(ctx, None)
    assert len(caught) == 1
    assert (plain.ends, full.ends, other.ends) == ([WINDOW], [WINDOW], [WINDOW])
    assert reader.count == 2


def test_without_a_journal_everything_is_there() -> None:
    rows = Rows([{"epoch": 0}])
    full = Seen("full")
    every = CallbackList([full])
    every.epoch_end(TrainContext("0123456789abcdef", records=rows))
    assert full.epochs == [rows]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda rows: None, 'a plain function.*history_access = "full"'),
        (Seen("ful"), "Seen.history_access is 'ful'; did you mean 'full'"),
        (Seen(None), "Seen.history_access is None"),  # type: ignore[arg-type]
    ],
)
def test_callbacks_that_need_what_a_journal_does_not_have(callback: Any, message: str) -> None:
    """nnx:B147 a ValueError that says what to do."""
    with pytest.raises(ConfigError, match=message):
        CallbackList([Seen(), callback]).check_history()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CallbackList([Seen(), Seen("full")]).check_history()
