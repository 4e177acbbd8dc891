"""The arithmetic of one window: sums of numerator gradients, divided once, checked, clipped, applied or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import StepError
from nnx_jax.objectives.terms import LossTerm, check_terms
from nnx_jax.optim.clip import square_sums
from nnx_jax.step.gates import Flag, pick


class Sums(NamedTuple):
    """What one microbatch, or the open window, adds up to; all sums are in `Plan.dtype`.

    Attributes:
        grads: one tree of gradient sums for each group of `Plan.groups`.
        num: [terms], numerators.
        den: [terms], denominators (0 for additive terms).
        metrics: [sum of metric sizes].
        fault: int32 [3], (microbatch, term, leaf) of the first non-finite value; -1 where there is none.
    """

    grads: tuple[Any, ...]
    num: Any
    den: Any
    metrics: Any
    fault: Any

    @property
    def flat(self) -> jax.Array:
        """Every loss and metric sum as one vector, in the order of the record columns."""
        return jnp.concatenate([self.num, self.den, self.metrics])


@dataclass(frozen=True)
class Plan:
    """How the terms of a loss share gradient buffers.

    A gradient buffer may hold several terms only while they are divided by the same number: one term alone, all
    additive terms together (their weights already in), and, when a window is a single microbatch, everything (each
    term divided inside that microbatch, where its denominator is the window's).

    Attributes:
        terms: names of the terms.
        weights: their weights.
        additive: whether each has no denominator.
        groups: indices of the terms of each buffer.
        fused: every microbatch is divided by its own denominators before the backward pass: where a window is one
            microbatch with several terms, or the window adds up the microbatches' means.
        norm_divided: the norm is that of the divided gradient, bit for bit, as hooks see it; else it may be computed
            from the sums and divided itself, which saves a pass.
        dtype: what sums are kept in: float32, or float64 where parameters are.
    """

    terms: tuple[str, ...]
    weights: tuple[float, ...]
    additive: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]
    fused: bool
    norm_divided: bool = False
    dtype: Any = np.dtype(np.float32)

    @property
    def zero(self) -> jax.Array:
        """0 as a scalar of `dtype`."""
        return jnp.asarray(0, self.dtype)

    def wide(self, tree: Any) -> Any:
        """Arrays in `dtype`."""
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype), tree)

    def metrics(self, found: Sequence[Any]) -> jax.Array:
        """Metric sums one after the other, in `dtype`."""
        sums = [jnp.asarray(each, self.dtype).reshape(-1) for each in found]
        return jnp.concatenate([jnp.zeros(0, self.dtype), *sums])

    def scalars(self, num: jax.Array, den: jax.Array) -> jax.Array:
        """The values to differentiate, [groups]."""
        if self.fused:
            return jnp.sum(num * self.factors(den))[None]
        return jnp.stack(
            [
                num[group[0]]
                if len(group) == 1 and not self.additive[group[0]]
                else sum((self.weights[i] * num[i] for i in group), start=self.zero)
                for group in self.groups
            ]
        )

    def factors(self, den: jax.Array) -> jax.Array:
        """weight / denominator of each term, [terms]; the weight alone if additive, 0 if nothing was valid."""
        weights = jnp.asarray(self.weights, self.dtype)
        additive = jnp.asarray(self.additive)
        valid = den > 0
        return jnp.where(additive, weights, jnp.where(valid, weights / jnp.where(valid, den, 1.0), 0.0))

    def measure(self, grads: Sequence[Any], den: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Look at the window's gradient.

        Returns:
            Sums of squares that show where it is not finite ([leaves]), and its global norm.
        """
        if len(self.groups) > 1 or self.norm_divided:
            squares = square_sums(self.combine(grads, den))
            return squares, jnp.sqrt(jnp.sum(squares))
        # One pass over the undivided sums: what a window without valid targets left behind is looked at, too.
        squares = square_sums(grads[0])
        norm = jnp.sqrt(jnp.sum(squares))
        return squares, norm if self.fused or any(self.additive) else norm * jnp.abs(self.factors(den)[0])

    def combine(self, grads: Sequence[Any], den: jax.Array) -> Any:
        """The window's gradient from its sums: every term divided by its own denominator, then added."""
        if self.fused:
            return grads[0]
        factors = self.factors(den)
        total: Any = None
        for group, tree in zip(self.groups, grads, strict=True):
            part = tree
            if not self.additive[group[0]]:
                factor = factors[group[0]]
                part = jax.tree.map(lambda g, f=factor: g * f, tree)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    def is_empty(self, den: jax.Array) -> jax.Array:
        """bool scalar: every term is normalised and none had a valid target."""
        return jnp.bool_(False) if any(self.additive) else jnp.all(den <= 0)


def plan_terms(terms: Sequence[LossTerm], accumulate: int, *, means: bool = False, dtype: Any = np.float32) -> Plan:
    """Plan of the terms a loss returned while being traced; with `means`, a window adds up its microbatches' means."""
    terms = check_terms(terms)
    additive = tuple(term.denominator is None for term in terms)
    if all(term.weight == 0 for term in terms):
        raise StepError(f"every loss term has weight 0 ({', '.join(t.name for t in terms)}); give one of them a weight")
    fused = len(terms) > 1 if accumulate == 1 else means
    if fused:
        groups: list[tuple[int, ...]] = [tuple(range(len(terms)))]
    else:
        groups = [(i,) for i, free in enumerate(additive) if not free and terms[i].weight != 0]
        shared = tuple(i for i, free in enumerate(additive) if free and terms[i].weight != 0)
        groups += [shared] if shared else []
    return Plan(
        tuple(term.name for term in terms), tuple(float(term.weight) for term in terms), additive, tuple(groups), fused,
        dtype=np.dtype(dtype),
    )  # fmt: skip


def stack_terms(terms: Sequence[LossTerm], plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Numerators and denominators, [terms] each.

    Raises:
        StepError: the loss returned other terms than when the step was built.
    """
    terms = check_terms(terms)
    found = tuple((term.name, float(term.weight), term.denominator is None) for term in terms)
    if found != tuple(zip(plan.terms, plan.weights, plan.additive, strict=True)):
        raise StepError(f"the loss returned terms {[t.layout for t in terms]}, but the step was built for {plan.terms}")
    # A term of weight 0 is recorded; nothing is differentiated for it, so its gradient cannot be 0 times infinity.
    sums = [jax.lax.stop_gradient(term.scaled) if term.weight == 0 else term.scaled for term in terms]
    num = jnp.stack([jnp.asarray(value, plan.dtype) for value in sums])
    den = jnp.stack([jnp.asarray(0 if t.denominator is None else t.denominator, plan.dtype) for t in terms])
    return num, jax.lax.stop_gradient(den)


def forward_at(forward: Forward, counters: Any) -> Forward:
    """The forward pass as it is at these counters: the same function, unless it looks at them."""
    return forward.at(counters) if hasattr(forward, "at") else forward  # type: ignore[attr-defined]


def terms_at(terms: Terms, step: Any, epoch: Any) -> Terms:
    """The loss as it is at an update and an epoch (int32 scalars): the same function, unless its weights change."""
    return terms.at(step, epoch) if hasattr(terms, "at") else terms  # type: ignore[attr-defined]


_FEW = 16
"""So many selects fuse into what uses them; a reduction is an instruction of its own, and so is the vector it reads."""


def first_bad(values: jax.Array) -> jax.Array:
    """Index of the first non-finite element, int32; -1 when all are finite."""
    if len(values) <= _FEW:
        found = jnp.int32(-1)
        for place in reversed(range(len(values))):
            found = jnp.where(jnp.isfinite(values[place]), found, jnp.int32(place))
        return found
    bad = ~jnp.isfinite(values)
    return jnp.where(jnp.any(bad), jnp.argmax(bad).astype(jnp.int32), jnp.int32(-1))


def only_if(keep: Flag, new: Callable[[], Any], old: Any) -> Any:
    """`new()` if `keep`, else `old`.

    On a CPU a branch: a select would read both, and XLA then copies every moment first (measured, 20 million parameters
    under Adam: 385 ms against 1044 ms). Elsewhere a select: there a branch makes the device wait for the host.
    """
    if isinstance(keep, bool):
        return new() if keep else old
    if jax.default_backend() == "cpu":
        return jax.lax.cond(keep, new, lambda: old)
    return pick(keep, new(), old)


Forward = Callable[[dict[str, Any], Any, Any, Any, bool], tuple[Any, Any]]
"""(params, model_state, batch, key, train) -> (outputs, new model_state)."""
Terms = Callable[[Any, Any], tuple[LossTerm, ...]]
"""(outputs, batch) -> loss terms."""
