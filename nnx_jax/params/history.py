"""How the history of a long run is kept: as a journal, in place of one growing file."""

from __future__ import annotations

from collections.abc import Iterator

from nnx_jax.core.spec import Spec
from nnx_jax.params.fields import Count


class HistoryJournal(Spec):
    """Keep the history in immutable pieces and only its newest records in memory. Never part of a run's identity."""

    retention: Count = 1000
    """How many of the newest records stay in memory; callbacks and `NNRun.records` see these."""
    chunk_size: Count | None = None
    """Records in one piece, at most `retention`; none: 250, or `retention` where that is less."""

    @property
    def chunk(self) -> int:
        """Records in one piece."""
        return min(250, self.retention) if self.chunk_size is None else self.chunk_size

    def problems(self) -> Iterator[tuple[str, str]]:
        """Records that wait for their piece are in memory, so they are among those that stay there."""
        yield from super().problems()
        if self.chunk_size is not None and self.chunk_size > self.retention:
            yield "chunk_size", f"got {self.chunk_size}, more than retention={self.retention}; write that or less"
