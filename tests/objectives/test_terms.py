"""Loss terms: what is refused, and that sums added over a window give the union's value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives import LossTerm, check_terms, merge_terms, term_value, total_value


def test_window_value_is_sum_over_sum() -> None:
    """nnx:B081 - numerators 8 and 1 over counts 2 and 1 give 3.0 as a mean, 9.0 as a sum."""
    means = merge_terms([LossTerm("a", 8.0, 2.0)], [LossTerm("a", 1.0, 1.0)])
    sums = merge_terms([LossTerm("a", 8.0, reduction="sum")], [LossTerm("a", 1.0, reduction="sum")])
    assert float(term_value(means[0])) == 3.0
    assert float(term_value(sums[0])) == 9.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("a", 1.0), "is a mean and needs its denominator"),
        (("a", 1.0, -2.0), r"denominator is negative \(-2.0\)"),
        (("a", np.ones(3), 3.0), r"numerator must be one number, got shape \(3,\)"),
        (("a", 1.0, np.ones(3)), r"denominator must be one number, got shape \(3,\)"),
        (("a", 1.0, 1.0, "sum"), "is a sum and takes no denominator"),
        (("a", 1.0, 1.0, "median"), "reduction is 'median'; write 'mean' or 'sum'"),
        (("", 1.0, 1.0), "needs a name"),
        (("a", 1.0, 1.0, "mean", float("nan")), "weight must be a finite number, got nan"),
        (("a", 1.0, 1.0, "mean", True), "weight must be a finite number, got True"),
    ],
)
def test_wrong_terms_are_refused(arguments: tuple, message: str) -> None:
    """nnx:B086 - no denominator, a negative one, a vector numerator, a denominator on a sum: ValueError."""
    with pytest.raises(ConfigError, match=message) as caught:
        LossTerm(*arguments)
    assert isinstance(caught.value, ValueError)


def test_vector_numerator_is_refused_while_tracing() -> None:
    with pytest.raises(ConfigError, match="numerator must be one number"):
        jax.jit(lambda x: LossTerm("a", x, 1.0).numerator)(jnp.ones(3))


@pytest.mark.parametrize(
    "second",
    [
        LossTerm("a", 1.0, reduction="sum"),
        LossTerm("a", 1.0, 1.0, weight=2.0),
        LossTerm("b", 1.0, 1.0),
    ],
)
def test_a_term_keeps_its_layout_within_a_window(second: LossTerm) -> None:
    """nnx:B085 - mean in one microbatch and sum in the next is a ValueError; so is another weight or name."""
    with pytest.raises(ConfigError, match="changed within a window"):
        merge_terms([LossTerm("a", 1.0, 1.0)], [second])


def test_a_list_of_terms_is_checked() -> None:
    term = LossTerm("a", 1.0, 1.0)
    assert check_terms(term) == (term,)
    with pytest.raises(ConfigError, match="at least one LossTerm"):
        check_terms([])
    with pytest.raises(ConfigError, match="'a' is used 2 times"):
        check_terms([term, LossTerm("a", 2.0, 1.0)])
    with pytest.raises(ConfigError, match="LossTerm objects, got float"):
        check_terms([term, 1.0])


def test_an_empty_window_is_worth_nothing_not_nan() -> None:
    value, gradient = jax.value_and_grad(lambda n, d: term_value(LossTerm("a", n, d)))(jnp.float32(0), jnp.float32(0))
    assert float(value) == 0.0
    assert float(gradient) == 0.0


def test_total_weighs_terms() -> None:
    terms = (LossTerm("a", 6.0, 2.0, weight=0.5), LossTerm("b", 4.0, reduction="sum", weight=2.0))
    assert float(total_value(terms)) == 9.5


def test_terms_cross_jit() -> None:
    term = jax.jit(lambda x: LossTerm("a", x * 2, x, weight=3.0))(jnp.float32(2))
    assert (term.name, float(term.numerator), float(term.denominator), term.weight) == ("a", 4.0, 2.0, 3.0)
    assert jax.tree.leaves(LossTerm("s", 1.0, reduction="sum")) == [1.0]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 5)), min_size=1, max_size=6))
def test_merging_is_adding(parts: list[tuple[int, int]]) -> None:
    merged = [LossTerm("a", 0.0, 0.0)]
    for numerator, count in parts:
        merged = merge_terms(merged, [LossTerm("a", float(numerator), float(count))])
    top, bottom = sum(n for n, _ in parts), sum(c for _, c in parts)
    assert float(term_value(merged[0])) == pytest.approx(top / bottom if bottom else 0.0, rel=1e-6)
