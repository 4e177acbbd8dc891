"""A validation of the user's own: called on the host with the model as it is, in place of the built-in scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnx_jax.core.errors import StepError, nearest
from nnx_jax.loop.engine import Evaluation
from nnx_jax.spmd.world import World


@dataclass(frozen=True)
class EvalStepContext:
    """What an `eval_step_fn` sees.

    Attributes:
        model: the module with copies of the weights of now, in evaluation mode; nothing it does is kept.
        val_loader: the batches of the validation split, each a dict of numpy columns, read once an iteration.
        epoch_idx: 0-based.
        metrics: names of the declared metrics.
        extra_metrics: functions (outputs, batch) -> value of the configuration.
    """

    model: Any
    val_loader: Any
    epoch_idx: int
    metrics: tuple[str, ...] = ()
    extra_metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    default: Callable[[], Mapping[str, float]] | None = None

    def evaluate(self) -> dict[str, float]:
        """What the built-in validation gives: "loss" and every declared metric.

        Raises:
            StepError: the model's loss and metrics do not apply to its outputs and this data.
        """
        if self.default is None:
            raise StepError("there is no built-in validation: the loss and metrics do not apply to this model and data")
        return dict(self.default())


class Batches:
    """The validation's batches, from the beginning at every iteration."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._feed.batches(0))

    def __len__(self) -> int:
        return self._feed.n_batches


def own_validation(
    function: Callable[..., Any], ctx: EvalStepContext, rows: int, watched: Sequence[str] = ()
) -> Evaluation:
    """Call an `eval_step_fn` and read the record it returns: a mapping of finite or non-finite numbers.

    A mapping under "extra" is spread out beside the other values. None stands for a value that is missing this time.

    Args:
        watched: names that must be returned, because a monitor follows them.

    Raises:
        StepError: something else is returned, two values have one name, or a watched one is not there.
    """
    called = getattr(function, "__name__", type(function).__name__)
    returned = function(ctx)
    if not isinstance(returned, Mapping):
        raise StepError(f"{called} returned {type(returned).__name__}; return a record such as {{'loss': 0.3}}")
    names: list[str] = []
    values: dict[str, float] = {}
    extra = returned.get("extra") or {}
    for name, value in [*((n, v) for n, v in returned.items() if n != "extra"), *extra.items()]:
        if name in names:
            raise StepError(f"{called} returned {name!r} twice, once under 'extra'; give it one name")
        names.append(str(name))
        if value is None:
            continue
        array = np.asarray(value)
        if array.shape != () or array.dtype.kind not in "fiub":
            raise StepError(f"{called} returned {name!r} = {value!r}; a recorded value is one number")
        values[str(name)] = float(array)
    for name in watched:
        if name not in names:
            told = f"{called} returned no {name!r}, which a monitor follows{nearest(name, names)}"
            raise StepError(f"{told}; return it, or {{{name!r}: None}} where it is missing this time")
    return Evaluation(values, rows)


def agreed(world: World, validate: Callable[[], Evaluation]) -> Evaluation:
    """Validate on every process, and go on with the writer's values: decisions are made of them, so they must be equal.

    Raises:
        DistributedFailure: it failed on another process.
    """
    if world.alone:
        return validate()
    own: list[Evaluation] = []
    tell = lambda: {name: repr(value) for name, value in own[0].values.items()}  # noqa: E731  # JSON has no NaN
    _, told = world.agree_telling("validation of your own", lambda: own.append(validate()), tell)
    return Evaluation({name: float(value) for name, value in told[world.writer_rank].items()}, own[0].count)
