"""From a model and a specification to a finished run; every face calls `fit`."""

from nnx_jax.fit.call import TrainCall, given_parts, listed
from nnx_jax.fit.job import Job, prepare, register_hooks
from nnx_jax.fit.session import fit

__all__ = ["Job", "TrainCall", "fit", "given_parts", "listed", "prepare", "register_hooks"]
