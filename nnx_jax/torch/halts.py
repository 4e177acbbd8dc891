"""Why a torch training ends early: labels that no class has, values that are not finite; found in what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nnx_jax.core.errors import DataError, NonFiniteError
from nnx_jax.torch.window import Plan, Window

Table = Sequence[Sequence[float]]
"""What the microbatches of a window measured: numerators, denominators, metrics, invalid labels, gradient length."""


class Fault(NamedTuple):
    """The first value that is not finite: its microbatch, loss term and parameter, as far as they are known."""

    micro: int
    term: str | None
    leaf: str | None


def invalid_labels(table: Table, first: int, step: int) -> DataError | None:
    """What to say of labels that no class has; None without any.

    Args:
        first: number of the window's first microbatch.
        step: updates so far.
    """
    for place, row in enumerate(table):
        if row[-2] > 0:
            return DataError(
                f"microbatch {first + place} has {round(row[-2])} labels that no class has (update {step + 1}); "
                "nothing of its window was applied; correct the labels, or give the loss an ignore_index"
            )
    return None


def find_fault(plan: Plan, window: Window, table: Table, first: int, norm: float) -> Fault | None:
    """The first value of a window that is not finite; `norm` is that of its whole gradient."""
    n = len(plan.terms)
    if math.isfinite(sum(sum(row[: 2 * n]) + row[-1] for row in table) + norm):
        return None
    for place, row in enumerate(table):
        bad = next((name for i, name in enumerate(plan.terms) if not math.isfinite(row[i] + row[n + i])), None)
        if bad is not None or not math.isfinite(row[-1]):
            return Fault(first + place, bad, window.first_bad())
    return None if math.isfinite(norm) else Fault(first + len(table) - 1, None, window.first_bad())


def not_finite(fault: Fault, step: int, bad_in_a_row: int | None) -> NonFiniteError:
    """What to say of a fault; `bad_in_a_row`: windows that were skipped before it counted, None where one is enough."""
    what = [f"loss term {fault.term!r}"] if fault.term is not None else []
    what += [f"the gradient of 'params/{fault.leaf}'"] if fault.leaf is not None else []
    told = " and ".join(what) or "the gradient norm"
    after = "" if bad_in_a_row is None else f" after {bad_in_a_row} bad windows in a row"
    return NonFiniteError(
        f"update {step + 1}, microbatch {fault.micro}: {told} is not finite{after}; "
        "the state is as before that update; lower the rate, clip, or set nonfinite to 'skip'"
    )
