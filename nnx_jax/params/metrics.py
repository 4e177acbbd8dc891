"""Which metrics a model is judged by, under which name, and which direction is better."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import kinds, lookup, register
from nnx_jax.params.fields import Count, Name

RESERVED = ("loss", "error")
"""Names that the trainer records itself."""


class MetricParams(Operator):
    """Family `metric`. A metric of your own: register a subclass, and set `mode` if a monitor shall follow it."""

    family: ClassVar[str] = "metric"
    mode: ClassVar[Literal["min", "max"] | None] = None

    name: Name | None = None
    """Name in records and monitors; none: made from the kind and its options."""

    @property
    def key(self) -> str:
        """The name under which the value is recorded."""
        return self.name or self._default_key()

    def _default_key(self) -> str:
        return getattr(self, "kind", "") or type(self).__name__


@register("accuracy")
class AccuracyParams(MetricParams):
    """Share of rows whose most likely class is the label."""

    mode = "max"


@register("top_k")
class TopKParams(MetricParams):
    """Share of rows whose label is among the k most likely classes; recorded as `top_<k>`."""

    mode = "max"

    k: Count = 5
    """How many classes may hold the label."""

    def _default_key(self) -> str:
        return f"top_{self.k}"


class _AveragedParams(MetricParams):
    """What precision, recall and F1 share."""

    mode = "max"

    average: Literal["macro", "micro"] = "macro"
    """macro: mean over classes; micro: over all rows (recorded as `<kind>_micro`)."""
    zero_division: Literal[0, 1] = 0
    """Value for a class without any row to divide by."""

    def _default_key(self) -> str:
        return super()._default_key() + ("_micro" if self.average == "micro" else "")


@register("precision")
class PrecisionParams(_AveragedParams):
    """Of the rows given a class, the share that has it."""


@register("recall")
class RecallParams(_AveragedParams):
    """Of the rows that have a class, the share given it."""


@register("f1")
class F1Params(_AveragedParams):
    """Harmonic mean of precision and recall."""


@register("nll")
class NLLParams(MetricParams):
    """Mean negative log-likelihood of the labels, in nats."""

    mode = "min"


@register("brier")
class BrierParams(MetricParams):
    """Mean squared distance between probabilities and the label's one-hot vector, summed over classes."""

    mode = "min"


@register("mse")
class MSEMetricParams(MetricParams):
    """Mean squared error over all outputs."""

    mode = "min"


@register("mae")
class MAEMetricParams(MetricParams):
    """Mean absolute error over all outputs."""

    mode = "min"


@register("perplexity")
class PerplexityParams(MetricParams):
    """exp of the mean negative log-likelihood per token."""

    mode = "min"


# -- metrics registered by id and version -----------------------------------------------------------------------

MetricInput = Literal["labels", "probabilities", "continuous"]
"""What a registered metric compares: decided classes, probabilities, or values, each with their targets."""

_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_./@-]{0,63}\Z")


@dataclass(frozen=True)
class MetricDefinition:
    """One registration; see `register_metric`."""

    id: str
    version: int
    factory: Callable[[Mapping[str, Any]], Any]
    input: MetricInput
    mode: Literal["min", "max"]
    check_config: Callable[[Mapping[str, Any]], Any] | None = None


_REGISTERED: dict[tuple[str, int], MetricDefinition] = {}


def register_metric(
    id: str,
    version: int,
    factory: Callable[[Mapping[str, Any]], Any],
    *,
    input: MetricInput,
    mode: Literal["min", "max"],
    check_config: Callable[[Mapping[str, Any]], Any] | None = None,
    replace: bool = False,
) -> None:
    """Register a metric for this process, to be declared as `MetricSpec(id=..., version=...)`.

    Args:
        factory: from the declaration's `config` to an object with `size`, how many sums it keeps;
            `update(predicted, targets, weight) -> float32 [size]`, the sums of one batch, traced; and
            `compute(sums) -> float` of the sums of all batches, float64 [size], on the host.
        input: what `update` is given. "labels": int32 classes, decided and true; "probabilities": float32
            probabilities ([..., C], or [...] of yes) and int32 classes; "continuous": float32 values of one shape.
            `weight` is float32 in the targets' shape, 0 for padding and ignored targets.
        mode: the better direction.
        check_config: raises ValueError for a `config` that makes no sense, before anything is trained.
        replace: whether another registration of this id and version makes way; better is a new version.

    Raises:
        ConfigError: (a ValueError) a wrong id, version, input or mode, or one that is taken.
        TypeError: a factory or check that cannot be called.
    """
    if not isinstance(id, str) or not _ID.match(id):
        raise ConfigError(f"a metric's id is a letter, then letters, digits and _ . / @ -, got {id!r}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(f"the version of metric '{id}' must be a whole number >= 1, got {version!r}")
    for what, given, legal in (("input", input, get_args(MetricInput)), ("mode", mode, ("min", "max"))):
        if given not in legal:
            raise ConfigError(f"{what} of metric '{id}' is {given!r}{nearest(given, legal)}")
    if not callable(factory) or not (check_config is None or callable(check_config)):
        raise TypeError(f"factory and check_config of metric '{id}' must be functions of its config")
    if (id, version) in _REGISTERED and not replace:
        raise ConfigError(f"metric '{id}' version {version} is registered; give another version, or replace=True")
    _REGISTERED[id, version] = MetricDefinition(id, version, factory, input, mode, check_config)


def unregister_metric(id: str, version: int) -> bool:
    """Take a registration back; return whether there was one."""
    return _REGISTERED.pop((id, version), None) is not None


def registered_metrics() -> tuple[tuple[str, int], ...]:
    """Return (id, version) of everything a MetricSpec can name now, sorted; the built-in metrics are version 1."""
    built_in = {(kind, 1) for kind in kinds("metric") if kind != MetricSpec.kind}
    return tuple(sorted({*_REGISTERED, *built_in}))


@register("registered")
class MetricSpec(MetricParams):
    """A metric by id and version: one of `register_metric`, or a built-in kind (version 1, with its options).

    It is only looked up when training starts, so a stored run can be read where nothing is registered.
    """

    id: Name
    """Under which it is registered."""
    version: Count = 1
    """Version of its meaning."""
    config: Mapping[str, Any] = {}
    """What its factory is given."""

    def _default_key(self) -> str:
        return self.id

    def resolve(self) -> MetricDefinition | MetricParams:
        """Return the registration, or the built-in metric.

        Raises:
            ConfigError: (a ValueError) neither is there.
        """
        found = _REGISTERED.get((self.id, self.version))
        if found is not None:
            return found
        if self.version == 1 and self.id in kinds("metric") and self.id != self.kind:
            built_in: Any = lookup("metric", self.id)
            return built_in(name=self.key, **self.config)
        versions = [str(version) for known, version in registered_metrics() if known == self.id]
        ids = {known for known, _ in registered_metrics()}
        hint = f"; known versions: {', '.join(versions)}" if versions else nearest(self.id, ids)
        raise ConfigError(f"metric '{self.id}' version {self.version} is not registered{hint} (register_metric)")
