"""The scenario of the crash tests with a journal: an epoch of three records is a full chunk and a rest."""

from __future__ import annotations

from nnx_jax.params.history import HistoryJournal
from tests.fault import scenario
from tests.fault.scenario import check, serve  # noqa: F401  what server and tests look for here

scenario.JOURNAL = HistoryJournal(retention=4, chunk_size=2)
