"""An operator is a specification that can be called: a dataset, a loss, a trained model, a training loop."""

from __future__ import annotations

from typing import Any

from nnx_jax.core.spec import Spec


class Operator(Spec):
    """Base of everything that is configured like a Spec and used like a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work of the operator.

        Raises:
            TypeError: when the class does not say what calling it means.
        """
        raise TypeError(f"{type(self).__name__} does not say what calling it does; define __call__ in the class")
