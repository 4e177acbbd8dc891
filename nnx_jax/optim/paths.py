"""Which parameters a rule means: glob patterns over dotted paths, the weight-decay mask, parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from nnx_jax.core.errors import ConfigError, nearest

_NO_DECAY_LEAVES = frozenset({"bias", "scale", "beta", "gamma"})
_NORM_SEGMENT = re.compile(r"norm|^(ln|bn|gn)(_?\d+|_[a-z]+)?$", re.IGNORECASE)


def matches(path: str, patterns: str | Iterable[str]) -> bool:
    """Whether a dotted path matches one of the glob patterns; `*` also spans dots, case counts."""
    wanted = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatchcase(path, pattern) for pattern in wanted)


def check_patterns(patterns: str | Iterable[str], paths: Iterable[str], what: str) -> None:
    """Refuse a pattern that matches no parameter.

    Raises:
        ConfigError: naming the pattern and the nearest path.
    """
    known = list(paths)
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if not any(fnmatchcase(path, pattern) for path in known):
            raise ConfigError(f"{what} pattern {pattern!r} matches no parameter{nearest(pattern, known)}")


def decays(path: str, ndim: int) -> bool:
    """The "auto" rule of weight decay: matrices and larger decay; biases, scales and whatever lies in a norm do not.

    So a kernel and an embedding table decay. The names matter for stacked layers, where a bias has two axes.
    """
    *parents, leaf = path.split(".")
    in_norm = any(_NORM_SEGMENT.search(segment) for segment in (*parents, leaf))
    return ndim >= 2 and leaf not in _NO_DECAY_LEAVES and not in_norm


def decay_mask(rule: str | Sequence[str], params: Mapping[str, Any]) -> dict[str, bool]:
    """Which parameters decay under `rule`: "auto" (see `decays`), "all", or glob patterns of those that do.

    Raises:
        ConfigError: when the rule, or one of its patterns, matches nothing.
    """
    if rule == "all":
        return dict.fromkeys(params, True)
    if rule == "auto":
        mask = {path: decays(path, len(value.shape)) for path, value in params.items()}
        if params and not any(mask.values()):
            raise ConfigError(
                "decay_mask 'auto' matches no parameter (it takes arrays of two or more axes outside of norms); "
                "write decay_mask: all, or weight_decay: 0"
            )
        return mask
    check_patterns(rule, params, "decay_mask")
    return {path: matches(path, rule) for path in params}


def group_of(path: str, groups: Sequence[Sequence[str]]) -> int | None:
    """Index of the first group of patterns that matches; None for the default group."""
    return next((index for index, patterns in enumerate(groups) if matches(path, patterns)), None)
