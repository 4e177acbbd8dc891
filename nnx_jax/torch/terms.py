"""Loss terms of torch: plain numbers in them become tensors, and a window's sums become a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnx_jax.objectives.terms import LossTerm, check_terms
from nnx_jax.torch.targets import constant, widened


def settled(terms: Any) -> tuple[LossTerm, ...]:
    """Terms as an engine adds them up: scalars, float32 or float64, on the device of the first tensor among them.

    Raises:
        ConfigError: for no terms, something that is not a LossTerm, or a repeated name.
    """
    found = check_terms(terms)
    parts = [part for term in found for part in (term.numerator, term.denominator)]
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    scalars = [(scalar(term.numerator, device), scalar(term.denominator, device)) for term in found]
    return tuple(
        replace(term, numerator=numerator, denominator=denominator)
        for term, (numerator, denominator) in zip(found, scalars, strict=True)
    )


class Whole(NamedTuple):
    """The sum of a loss over items that count once each, and how many they are; the sum is as wide as sums are."""

    numerator: Tensor
    items: int

    def term(self, name: str) -> LossTerm:
        """It as a term."""
        return known_term(name, self.numerator, constant(float(self.items), self.numerator))


def known_term(name: str, numerator: Tensor, denominator: Tensor) -> LossTerm:
    """A mean term of a built-in loss, whose parts are what they must be and are not looked at again."""
    term = object.__new__(LossTerm)
    term.__dict__.update(
        name=name, numerator=numerator, denominator=denominator, reduction="mean", weight=1.0, scale=None
    )
    return term


def scalar(value: Any, device: torch.device | None) -> Any:
    """A number as a float32 tensor on the device, a tensor as wide as sums are; None stays."""
    if isinstance(value, Tensor):
        return widened(value)
    return None if value is None else torch.as_tensor(value, dtype=torch.float32, device=device)


def term_value(term: LossTerm) -> Tensor:
    """The unweighted value of a term, without scale: a scalar; 0 when nothing was valid, never 0/0."""
    (term,) = settled(term)
    if term.denominator is None:
        return term.numerator
    valid = term.denominator > 0
    return torch.where(valid, term.numerator / torch.where(valid, term.denominator, 1.0), 0.0)


def total_value(terms: Sequence[LossTerm]) -> Tensor:
    """The value of a loss: the weighted sum of its terms, a scalar."""
    parts = [term.weight * term_value(term) * (1.0 if term.scale is None else term.scale) for term in terms]
    return sum(parts[1:], start=parts[0])
