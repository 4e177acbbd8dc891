"""The arithmetic of one window: gradients of numerators added up, divided once at its end, checked and clipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from nnx_jax.core.errors import StepError
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch import foreach
from nnx_jax.torch.module import Net, sum_dtype

_NARROW = (torch.bfloat16, torch.float16)
FEW = 32
"""Up to so many numbers are read one by one sooner than they are put into one tensor."""


class Sync(Protocol):
    """How several processes make one update of a window; the order of calls is the same in every process."""

    size: int
    """Processes; more than one of them never divide before the window's sums are known."""

    @property
    def joins(self) -> bool:
        """Layers wait for every process, so one without a row passes other rows through them, which count nothing."""
        ...

    def wrap(self, net: Net, *, averages: bool) -> None:
        """A fit of this network begins; `averages`: its gradients are in the parameters' own `.grad`."""
        ...

    def backward(self, *, last: bool, rows: bool = True) -> AbstractContextManager[Any]:
        """What a microbatch's forward and backward pass run in; `last`: it ends the window; `rows`: it has some."""
        ...

    def lent(self, *, rows: bool = True) -> AbstractContextManager[Any]:
        """What layers that are one among all processes run in; `backward` opens it too."""
        ...

    def total(self, rows: torch.Tensor, grads: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Sums over all processes of what microbatches measured, [n, sums].

        Args:
            grads: of the window that ends, where they may go along; `gradients` then gives their sums.
        """
        ...

    def gradients(self, grads: list[torch.Tensor], *, reduced: bool) -> list[torch.Tensor]:
        """The gradient sums of all processes; `reduced`: the backward pass has averaged them over processes already."""
        ...

    def stored(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """What a generation holds of all processes, of what this one has."""
        ...

    def restored(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this process goes on from, of what a generation holds."""
        ...


class Alone:
    """One process: its sums are the sums."""

    size, joins = 1, False

    def wrap(self, net: Net, *, averages: bool) -> None:
        """Nothing to wrap."""

    def backward(self, *, last: bool, rows: bool = True) -> AbstractContextManager[Any]:
        """Nothing to hold back."""
        return nullcontext()

    def lent(self, *, rows: bool = True) -> AbstractContextManager[Any]:
        """Nothing to lend."""
        return nullcontext()

    def total(self, rows: torch.Tensor, grads: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Its own."""
        return rows

    def gradients(self, grads: list[torch.Tensor], *, reduced: bool) -> list[torch.Tensor]:
        """Its own."""
        return grads

    def stored(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """What it has."""
        return arrays

    def restored(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """What it had."""
        return arrays


@dataclass(frozen=True)
class Plan:
    """How the terms of a loss share gradient buffers; see `nnx_jax.step.window.Plan`, whose rules these are.

    Attributes:
        terms, weights, additive: of the loss terms, in order.
        groups: indices of the terms of each buffer: one mean term, or all additive ones.
        fused: a window is one microbatch of this process alone, so each term is divided before the backward pass.
    """

    terms: tuple[str, ...]
    weights: tuple[float, ...]
    additive: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]
    fused: bool

    @cached_property
    def key(self) -> tuple[tuple[str, float, bool], ...]:
        """What must stay equal from microbatch to microbatch."""
        return tuple(zip(self.terms, self.weights, self.additive, strict=True))

    def factors(self, den: Sequence[float]) -> list[float]:
        """weight / denominator of each term; the weight alone if additive, 0 if nothing was valid."""
        parts = zip(self.weights, self.additive, den, strict=True)
        return [weight if free else weight / below if below > 0 else 0.0 for weight, free, below in parts]

    def is_empty(self, den: Sequence[float]) -> bool:
        """Every term is normalised and none had a valid target."""
        return not any(self.additive) and all(below <= 0 for below in den)

    def value(self, row: torch.Tensor) -> torch.Tensor:
        """The loss of one microbatch's sums, divided by its own denominators: a scalar."""
        n = len(self.terms)
        parts = [
            row[i] * weight if free else row[i] * _quotient(weight, row[n + i])
            for i, (_, weight, free) in enumerate(self.key)
        ]
        return sum(parts[1:], start=parts[0])


OWN_PLAN = Plan(("loss",), (1.0,), (False,), ((0,),), True)
"""Of a step of the user's own, which makes its own updates: its loss is recorded, with a weight."""


def plan_terms(terms: Sequence[LossTerm], accumulate: int, *, alone: bool = True) -> Plan:
    """Plan of the terms a loss returned.

    Raises:
        StepError: every term has weight 0.
    """
    names, additive = tuple(term.name for term in terms), tuple(term.denominator is None for term in terms)
    if all(term.weight == 0 for term in terms):
        raise StepError(f"every loss term has weight 0 ({', '.join(names)}); give one of them a weight")
    fused = accumulate == 1 and alone
    groups = [(i,) for i, free in enumerate(additive) if not free and terms[i].weight != 0]
    shared = tuple(i for i, free in enumerate(additive) if free and terms[i].weight != 0)
    groups += [shared] if shared else []
    if fused:
        groups = [tuple(range(len(terms)))]
    return Plan(names, tuple(float(term.weight) for term in terms), additive, tuple(groups), fused)


def sums_of(
    terms: Sequence[LossTerm], plan: Plan, device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(numerators, each a scalar of the type of sums with its derivative; denominators [terms]).

    Raises:
        StepError: the loss returned other terms than when the step was built.
    """
    found = tuple((term.name, float(term.weight), term.denominator is None) for term in terms)
    if found != plan.key:
        told = [(term.name, term.reduction, term.weight) for term in terms]
        raise StepError(f"the loss returned terms {told}, but the step was built for {plan.terms}")
    if len(terms) == 1 and terms[0].reduction == "mean":
        bottom = _scalar(_detached(terms[0].denominator), device, dtype)
        return [_scalar(terms[0].scaled, device, dtype)], bottom.reshape(1)
    # A term of weight 0 is recorded; nothing is differentiated for it, so its gradient cannot be 0 times infinity.
    num = [_scalar(t.scaled if t.weight else _detached(t.scaled), device, dtype) for t in terms]
    den = [_scalar(0.0 if t.denominator is None else _detached(t.denominator), device, dtype) for t in terms]
    return num, den[0].reshape(1) if len(den) == 1 else torch.stack(den)


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.dtype == dtype and value.device == device:
        return value
    return torch.as_tensor(value, dtype=dtype, device=device)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


class Window:
    """The open window: gradient sums of the trained parameters, and what each of its microbatches measured.

    Gradients are in the parameters' own `.grad` where one float32 buffer is all there is, as torch's reducer wants it;
    else in buffers here, one for each group of terms, in float32 for 16-bit parameters too.

    Args:
        plan: how terms share buffers.
        params: the trained parameters by name, each with `requires_grad`.
        n_sums: numbers a microbatch measures.

    Attributes:
        rows: what microbatches measured, not yet read: [n_sums + 1] each, the last number the length of the gradient
            sums so far.
        dtype: of sums: float64 where a parameter is, else float32.
        on_host: sums are numbers of this process at once, since nothing waits for them to be computed.
        takes_whole: `add_whole` may be called.
        read: rows that were read, totals over all processes.
        told: how many of all rows the records have already.
        entry: the buffers of the model as they were when the window opened.
    """

    def __init__(
        self, plan: Plan, params: Mapping[str, torch.nn.Parameter], n_sums: int, sync: Sync, device: torch.device
    ) -> None:
        self.plan, self.sync, self.device = plan, sync, device
        self.names, self.params = tuple(params), list(params.values())
        self.n_sums = n_sums
        self.on_host = device.type == "cpu" and sync.size == 1
        self.dtype = sum_dtype(params)
        narrow = any(value.dtype in _NARROW for value in self.params)
        self.plain = len(plan.groups) == 1 and not narrow
        self.held: list[list[torch.Tensor | None]] = []
        one = len(plan.terms) == 1 and not plan.additive[0]
        self.takes_whole = type(self) is Window and device.type == "cpu" and self.plain and one
        self._last_seed: tuple[float, torch.Tensor] | None = None
        self.entry: dict[str, torch.Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """An empty window."""
        self.rows: list[torch.Tensor] = []
        self.read: list[list[float]] = []
        self.told = 0
        for value in self.params:
            value.grad = None
        self.held = [] if self.plain else [[None] * len(self.params) for _ in self.plan.groups]

    def __len__(self) -> int:
        """Microbatches in it."""
        return len(self.read) + len(self.rows)

    # -- a microbatch ------------------------------------------------------------------------------------------

    def backward(self, num: Sequence[torch.Tensor], den: torch.Tensor) -> None:
        """Add the gradients of a microbatch's numerators."""
        if self.plan.fused and len(num) == 1:
            if num[0].requires_grad:
                num[0].backward(self._seed(num[0], den))
                if not self.plain:
                    self._collect(0)
            return
        scalars = self._scalars(num, den)
        for group, scalar in enumerate(scalars):
            if not scalar.requires_grad:
                continue  # it depends on no trained parameter: its gradient is 0
            scalar.backward(retain_graph=group + 1 < len(scalars))
            if not self.plain:
                self._collect(group)

    def _seed(self, num: torch.Tensor, den: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss by its only numerator: weight / denominator."""
        weight, additive = self.plan.weights[0], self.plan.additive[0]
        if not (additive or self.on_host):
            return _quotient(weight, den[0])
        return self._seed_of(weight if additive else self.plan.factors(den.tolist())[0], num)

    def _seed_of(self, factor: float, num: torch.Tensor) -> torch.Tensor:
        if self._last_seed is None or self._last_seed[0] != factor:
            self._last_seed = factor, torch.full_like(num, factor, requires_grad=False)
        return self._last_seed[1]

    def _scalars(self, num: Sequence[torch.Tensor], den: torch.Tensor) -> list[torch.Tensor]:
        """The values to differentiate, one a group."""
        plan = self.plan
        if plan.fused and self.on_host:
            factors = plan.factors(den.tolist())
            parts = [n * factor for n, factor, weight in zip(num, factors, plan.weights, strict=True) if weight]
            return [sum(parts[1:], start=parts[0])]
        if plan.fused:
            parts = [
                n * plan.weights[i] if plan.additive[i] else n * _quotient(plan.weights[i], den[i])
                for i, n in enumerate(num)
                if plan.weights[i]
            ]
            return [sum(parts[1:], start=parts[0])]
        found = []
        for group in plan.groups:
            if len(group) == 1 and not plan.additive[group[0]]:
                found.append(num[group[0]])
            else:
                parts = [num[i] * plan.weights[i] for i in group]
                found.append(sum(parts[1:], start=parts[0]))
        return found

    def _collect(self, group: int) -> None:
        """Move what the backward pass left in `.grad` to the group's buffer."""
        held = self.held[group]
        for place, value in enumerate(self.params):
            if value.grad is not None:
                own = held[place]
                grad = value.grad.float() if value.grad.dtype in _NARROW else value.grad
                held[place] = grad if own is None else own.add_(grad)
                value.grad = None

    def measured(
        self, num: Sequence[torch.Tensor], den: torch.Tensor, sums: Sequence[torch.Tensor], invalid: Any
    ) -> None:
        """Keep what a microbatch measured, once its gradients are added; on the host as plain numbers.

        Args:
            sums: of the metrics, each [size].
            invalid: impossible labels, a scalar; None where nobody counts them.
        """
        if self.device.type == "cpu":
            row = [value.item() for value in num] + den.tolist()
            for each in sums:
                row += each.tolist()
            row.append(0.0 if invalid is None else float(invalid))
            self._keep(row)
            return
        found = torch.zeros((), device=self.device) if invalid is None else invalid
        parts = [torch.stack([value.detach() for value in num]), den, *sums, found.reshape(1)]
        self.note(torch.cat([part.to(self.dtype) for part in parts]))

    def add_whole(self, num: torch.Tensor, count: int, sums: Sequence[torch.Tensor]) -> None:
        """What `backward` and `measured` do, where the window `takes_whole`, for a term over items that count once."""
        if num.requires_grad:
            num.backward(self._seed_of(self.plan.weights[0] / count if self.plan.fused else 1.0, num))
        row = [num.item(), float(count)]
        for each in sums:
            row += each.tolist()
        row.append(0.0)
        self._keep(row)

    def note(self, sums: torch.Tensor | None) -> None:
        """Keep what a microbatch measured ([n_sums]; None for one without a real row)."""
        if self.device.type == "cpu":
            self._keep([0.0] * self.n_sums if sums is None else sums.tolist())
            return
        if sums is None:
            sums = torch.zeros(self.n_sums, device=self.device, dtype=self.dtype)
        self.rows.append(torch.cat([sums, self.length(self._present()).reshape(1)]))

    def _keep(self, row: list[float]) -> None:
        """Numbers of this process, whose gradients are added."""
        row.append(self.norm(self._present()))
        if self.on_host:
            self.read.append(row)
        else:
            self.rows.append(torch.tensor(row, dtype=torch.float64))

    def _present(self) -> list[torch.Tensor]:
        if self.plain:
            return [grad for value in self.params if (grad := value.grad) is not None]
        return [grad for held in self.held for grad in held if grad is not None]

    def is_full(self) -> bool:
        """Every trained parameter has a gradient."""
        return all(value.grad is not None for value in self.params)

    @property
    def last(self) -> torch.Tensor:
        """What the last microbatch of this process measured."""
        return self.rows[-1].to(self.dtype) if self.rows else torch.tensor(self.read[-1], dtype=self.dtype)

    def length(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Global norm, float32 scalar; not finite where an element is not (or its square is beyond float32)."""
        if not grads:
            return torch.zeros((), device=self.device, dtype=self.dtype)
        return foreach.length(list(grads), self.dtype)

    def norm(self, grads: list[torch.Tensor]) -> float:
        """`length` as a number, read at once."""
        if self.device.type != "cpu" or len(grads) > FEW:
            return self.length(grads).item()
        return math.hypot(*[found.item() for found in foreach.norms(grads, dtype=self.dtype)]) if grads else 0.0

    # -- its end -----------------------------------------------------------------------------------------------

    def table(self, *, ends: bool = False) -> list[list[float]]:
        """What every microbatch so far measured, over all processes; one transfer for those not read before.

        Args:
            ends: the window ends here, and what processes exchange at its end may be exchanged at once.
        """
        if self.rows:
            rows = self.rows[0][None] if len(self.rows) == 1 else torch.stack(self.rows)
            grads = self._filled([value.grad for value in self.params]) if ends and self.plain else None
            self.read += self.sync.total(rows, grads).tolist()
            self.rows = []
        return self.read

    def gradient(self, factors: Sequence[float]) -> tuple[list[torch.Tensor], float, float]:
        """The window's gradient from its sums.

        Args:
            factors: weight / denominator by term, see `Plan.factors`.

        Returns:
            Its tensors in the parameters' order, zeros where nothing came; the factor they still have to be multiplied
            with; and their norm with that factor.
        """
        if self.plain and self.plan.fused and (found := self._present()) and len(found) == len(self.params):
            return found, 1.0, self.read[-1][-1]
        with torch.no_grad():
            if self.plain:
                grads = self.sync.gradients(self._filled([value.grad for value in self.params]), reduced=True)
                group = self.plan.groups[0]
                factor = 1.0 if self.plan.fused or self.plan.additive[group[0]] else factors[group[0]]
                norm = self.read[-1][-1] if self.sync.size == 1 else self.norm(grads)
                return grads, factor, norm * abs(factor)
            total: list[torch.Tensor] | None = None
            for group, held in zip(self.plan.groups, self.held, strict=True):
                grads = self.sync.gradients(self._filled(held), reduced=False)
                if not self.plan.fused and not self.plan.additive[group[0]]:
                    foreach.mul_(grads, factors[group[0]])
                if total is None:
                    total = grads
                else:
                    foreach.add_(total, grads)
            assert total is not None
            return total, 1.0, self.norm(total)

    def _filled(self, grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        filled = []
        for value, grad in zip(self.params, grads, strict=True):
            wide = torch.float32 if value.dtype in _NARROW else value.dtype
            filled.append(torch.zeros_like(value, dtype=wide) if grad is None else grad)
        return filled

    def first_bad(self) -> str | None:
        """Name of the first parameter whose gradient sums are not finite; None without one."""
        sources = [[value.grad for value in self.params]] if self.plain else self.held
        for place, name in enumerate(self.names):
            for held in sources:
                grad = held[place]
                if grad is not None and not math.isfinite(torch.linalg.vector_norm(grad).item()):
                    return name
        return None

    # -- stored ------------------------------------------------------------------------------------------------

    def arrays(self, capacity: int) -> dict[str, torch.Tensor]:
        """The open window by name: gradient sums, what was measured (float64 [capacity, n_sums + 1]), the entry."""
        rows = torch.zeros(capacity, self.n_sums + 1, dtype=torch.float64)
        if table := self.table():
            rows[: len(table)] = torch.tensor(table, dtype=torch.float64)
        found = {"rows": rows, **{f"entry/{name}": value for name, value in self.entry.items()}}
        sources = [[value.grad for value in self.params]] if self.plain else self.held
        for group, held in enumerate(sources):
            for name, grad in zip(self.names, self._filled(held), strict=True):
                found[f"grads/{group}/{name}"] = grad
        return found

    def put(self, arrays: Mapping[str, torch.Tensor], count: int, told: int) -> None:
        """Go on with a stored window of `count` microbatches."""
        self.clear()
        self.entry = {n.removeprefix("entry/"): value for n, value in arrays.items() if n.startswith("entry/")}
        self.told = told
        if not count:
            return
        self.read = arrays["rows"][:count].tolist()
        groups = 1 if self.plain else len(self.plan.groups)
        for group in range(groups):
            for place, (name, value) in enumerate(zip(self.names, self.params, strict=True)):
                grad = arrays[f"grads/{group}/{name}"].to(value.device)
                if self.plain:
                    value.grad = grad
                else:
                    self.held[group][place] = grad


def _quotient(weight: float, den: torch.Tensor) -> torch.Tensor:
    return torch.where(den > 0, weight / den, 0.0)
