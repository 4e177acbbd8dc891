"""Every hook by its public name, under the name the training documents use."""

from nnx_jax.hooks import *  # noqa: F403
from nnx_jax.hooks import __all__ as __all__
