"""Tests of your own model: `assert_exact` trains it on several devices, windows and processes, and compares every bit.

from nnx_jax.testing import assert_exact

print(assert_exact(lambda: NNModel(FeedForwardParams(hidden_dims=[32])), {"x": x, "y": y}, devices=(1, 2, 4)))
"""

from nnx_jax.testing.exact import assert_exact
from nnx_jax.testing.report import ExactReport

__all__ = ["ExactReport", "assert_exact"]
