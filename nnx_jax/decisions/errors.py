"""What can go wrong between a question and its answer: the request, the response, the provider's reach, its backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from nnx_jax.core.errors import ConfigError, NnxError


class DecisionError(NnxError):
    """Base of every error about a typed question or its answer."""

    layer = "decision"


class InvalidDecisionRequest(DecisionError, ConfigError):
    """A question, or a provider's set-up, is malformed (a ValueError); carries `path`, `file` and `line`."""

    @classmethod
    def of(cls, error: ConfigError) -> Self:
        """Return the same problem, at the same place, as one of a request."""
        made = cls(error.args[0])
        made.path, made.file, made.line = error.path, error.file, error.line
        return made


class InvalidDecisionResponse(DecisionError, ValueError):
    """An answer does not fit its question: its ids, a probability, or their sum. It is never repaired."""


class UnsupportedCapability(DecisionError):
    """A well-formed request that this provider does not serve; raised before its model is called."""


class ProviderFailure(DecisionError, RuntimeError):
    """The provider's model failed on a valid request; the original error is the `__cause__`."""


@contextmanager
def as_request() -> Iterator[None]:
    """Raise what is wrong with a question inside the block as InvalidDecisionRequest."""
    try:
        yield
    except InvalidDecisionRequest:
        raise
    except ConfigError as error:
        raise InvalidDecisionRequest.of(error) from None


def listed(names: Iterable[object]) -> str:
    """Return the names in quotes, the first 20 of them; those of a set sorted, so that a message is always the same."""
    quoted = [repr(name) for name in names]
    quoted = sorted(quoted) if isinstance(names, frozenset) else quoted
    more = f", and {len(quoted) - 20} more" if len(quoted) > 20 else ""
    return ", ".join(quoted[:20]) + more or "nothing"
