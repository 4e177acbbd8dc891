"""How a framework plugs into the loop: the Engine protocol and the plain values that cross it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Span:
    """Microbatches `first_batch .. first_batch + n_batches - 1` of one epoch.

    Attributes:
        closes: the last microbatch ends its window, full or not; else a window that is not full stays open.
    """

    epoch: int
    first_batch: int
    n_batches: int
    closes: bool = True


@dataclass(frozen=True)
class Records:
    """What windows measured (or microbatches, when rows are kept per microbatch), by column, oldest first.

    Columns and not objects: a small model makes ten thousand of these a second.

    Attributes:
        batch: int [n], microbatches seen by the run before the record's last one.
        step: int [n], committed updates after it.
        loss: float64 [n], its sums divided, terms weighted and added, in nats or the loss's unit.
        rate: float64 [n], learning rate its update used; means nothing without an update.
        grad_norm: float64 [n], global gradient norm before clipping; means nothing where no window was closed.
        closed: bool [n], it closed a window.
        committed: bool [n], that window became an update; False for an open or a skipped window.
        sums: loss and metric sums to add up, float64 [n, size] by name.
        veto: int [n], number of the update hook that vetoed the window, -1 for none; None without hooks.
        rates: float64 [n] by named optimizer, the rate its update used; None for a single optimizer.
        updates: int [n] by optimizer, updates it made; None where `committed` says it.
    """

    batch: np.ndarray
    step: np.ndarray
    loss: np.ndarray
    rate: np.ndarray
    grad_norm: np.ndarray
    closed: np.ndarray
    committed: np.ndarray
    sums: Mapping[str, np.ndarray]
    veto: np.ndarray | None = None
    rates: Mapping[str, np.ndarray] | None = None
    updates: Mapping[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True)
class Evaluation:
    """Metric values over every row of one split, each row scored once."""

    values: Mapping[str, float]
    count: int


@dataclass(frozen=True)
class Snapshot:
    """What a generation holds of an engine: named arrays, where the data stands, and what both must fit."""

    arrays: Mapping[str, Any]
    position: Mapping[str, Any]
    topology: Mapping[str, Any] = field(default_factory=dict)


Poll = Callable[[int], bool]
"""Called between device calls with the microbatches handed over so far; True asks to stop at this window border."""


class Engine(Protocol):
    """One framework under the loop. The state is opaque to the loop; engines never touch the disk."""

    @property
    def n_batches(self) -> int:
        """Microbatches in one epoch."""
        ...

    @property
    def accumulate(self) -> int:
        """Microbatches in a full window."""
        ...

    @property
    def carries(self) -> bool:
        """A window that is not full at the epoch's end goes on in the next."""
        ...

    @property
    def in_place(self) -> bool:
        """Host hooks at stages inside the step are called by the step itself."""
        ...

    def batch_count(self, state: Any) -> int:
        """Microbatches handed over so far, known without reading the device."""
        ...

    def open_batches(self, state: Any) -> int:
        """Microbatches in the window that is open, known without reading the device."""
        ...

    def start(self) -> Any:
        """Build and place the first state."""
        ...

    def run_span(self, state: Any, span: Span, poll: Poll) -> tuple[Any, int]:
        """Run the span, or its first windows when `poll` says stop; return the new state and the microbatches done."""
        ...

    def read_records(self, state: Any) -> tuple[list[Records], Exception | None]:
        """Fetch the records since the last call: the loop's only read from the device while training.

        When training halted (a value that is not finite, an impossible label), the error comes with the records
        before it, and the state is as before the update it names.
        """
        ...

    def summarize(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Turn added-up record sums into values by name ("loss", then every metric)."""
        ...

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Turn the sums of records, float64 [n, size], into float64 [n] of every metric by name."""
        ...

    def losses(self, sums: Sequence[float]) -> tuple[float, Mapping[str, float]]:
        """Return the loss of added-up `sums["loss"]`, and every term's value, divided and not weighted."""
        ...

    def evaluate(self, state: Any, split: str) -> Evaluation | None:
        """Score every row of a split once; None when the run has no such split."""
        ...

    def set_rate(self, state: Any, rate: Any) -> Any:
        """Set the learning rate of the epoch clock, or those of named optimizers."""
        ...

    def snapshot(self, state: Any, epoch: int, batch: int) -> Snapshot:
        """Return what continues bit for bit from microbatch `batch` of `epoch`."""
        ...

    def abstract(self, state: Any) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arrays a snapshot of this state holds."""
        ...

    def restore(self, state: Any, arrays: Mapping[str, Any], *, weights_only: bool = False) -> Any:
        """Return the state with the arrays put in: all of them, or the weights alone."""
        ...

    def trained(self, state: Any) -> Any:
        """Return the trained model with the state's weights; the state stays usable."""
        ...

    def weights(self, model: Any) -> Mapping[str, Any]:
        """Return every weight and statistic of the model as it is now, under the names a snapshot has for them."""
        ...

    def absorb(self, state: Any) -> Any:
        """Return the state with the weights the model holds now: what callbacks changed at the end."""
        ...

    def bind(self, state: Any) -> None:
        """Give every hook with state its place in this state."""
        ...

    def hook_name(self, number: int) -> str:
        """Class of the update hook with this number in `Records.veto`."""
        ...

    def batch(self, epoch: int, place: int) -> Any:
        """Columns of this microbatch, the one to come or the one just run, for looking at; None when unknown."""
        ...

    def look(self, state: Any, name: str) -> Any:
        """A value for hooks that watch, copied: of the last microbatch, or of the state; None where there is none."""
        ...

    def parts(self) -> dict[str, Any]:
        """What contexts of hooks hold of the engine: `optimizers` and `lr_schedulers`."""
        ...
