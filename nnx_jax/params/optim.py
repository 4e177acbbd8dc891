"""The optimizer of a run: its kind, its rate, its decay, and rules for groups of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, PlainValidator, field_validator

from nnx_jax.core.errors import nearest
from nnx_jax.core.spec import Spec
from nnx_jax.params.builders import Builder
from nnx_jax.params.fields import Count, Fraction, NonNegative, Patterns, Positive

_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"weight_decay": 0.0, "momentum": 0.9, "nesterov": False},
    "adam": {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8},
    "lion": {"weight_decay": 1e-3, "betas": (0.9, 0.99)},
}
_OF_KIND = ("weight_decay", "momentum", "nesterov", "betas", "eps", "options")
OPTAX_NAMES = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adamax", "adamaxw", "adan", "amsgrad", "fromage", "lamb", "lars",
    "nadam", "nadamw", "novograd", "radam", "rmsprop", "rprop", "sign_sgd", "signum", "sm3", "yogi",
)  # fmt: skip
"""Further optimizers of optax by name; each takes its own options."""
OWN_KINDS = tuple(_DEFAULTS)
_FURTHER: set[str] = set(OPTAX_NAMES)


def optimizer_kinds() -> list[str]:
    """Return every name `NNOptimParams(kind=...)` takes, sorted."""
    return sorted([*OWN_KINDS, *_FURTHER])


def add_optimizer_kind(name: str) -> None:
    """Let `kind: name` pass validation; called where the factory of that name is registered."""
    _FURTHER.add(name)


def _decay_rule(value: Any) -> str | tuple[str, ...]:
    if value in ("auto", "all"):
        return value
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, tuple) or not patterns or not all(isinstance(p, str) and p.strip() for p in patterns):
        raise ValueError("expected auto, all, or a list of patterns such as '*.kernel'")
    return patterns


def _scalar(value: Any) -> Any:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError("expected a number, text, true, false or none")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


class NNParamGroupSpec(Spec):
    """Other settings for the parameters whose path matches; the first matching group wins, groups never merge."""

    patterns: Patterns
    """Glob patterns over dotted parameter paths."""
    max_lr: NonNegative | None = None
    """Rate of the group; none: the optimizer's."""
    lr_scale: NonNegative | None = None
    """Factor on the optimizer's rate, instead of `max_lr`."""
    weight_decay: NonNegative | None = None
    """Decay of every parameter of the group, whatever the mask says; none: the optimizer's, by the mask."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A rate is given one way."""
        yield from super().problems()
        if self.max_lr is not None and self.lr_scale is not None:
            yield "lr_scale", "both max_lr and lr_scale are given; write one of them"

    def matches(self, path: str) -> bool:
        """Return whether a dotted parameter path matches; `*` also spans dots, case counts."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)


class NNOptimParams(Spec):
    """An optimizer and what happens to the gradient before it.

    `weight_decay`, `momentum`, `nesterov`, `betas` and `eps` have a default per kind (see `default_of`) and read None
    where they mean nothing. Decay is coupled (L2) for sgd and adam, decoupled for adamw and lion.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "lr": "max_lr",
        "learning_rate": "max_lr",
        "clip": "grad_clip_norm",
        "clip_norm": "grad_clip_norm",
        "gradient_clip_val": "grad_clip_norm",
        "max_grad_norm": "grad_clip_norm",
        "accumulate": "accumulate_grad_batches",
        "gradient_accumulation_steps": "accumulate_grad_batches",
        "name": "kind",
    }

    kind: str = "adam"  # type: ignore[assignment]  # a field here: all kinds share one class
    """sgd, adam, adamw, lion, or a further optimizer of optax by name."""
    max_lr: NonNegative = 1e-2
    """The rate that schedules scale; 0 trains nothing."""
    weight_decay: NonNegative | None = None
    """Decay; default 0 (sgd, adam), 0.01 (adamw), 0.001 (lion), 0 for the others."""
    momentum: Fraction | None = None
    """sgd only; default 0.9."""
    nesterov: bool | None = None
    """sgd only; default false."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay rates of the moments; default (0.9, 0.999), lion (0.9, 0.99)."""
    eps: Positive | None = None
    """Added to the denominator of adam and adamw; default 1e-8."""
    grad_clip_norm: Positive | None = None
    """Largest global norm of the gradient of a window; none: no clipping."""
    accumulate_grad_batches: Count = 1
    """Microbatches per optimizer update."""
    decay_mask: Annotated[
        str | tuple[str, ...], PlainValidator(_decay_rule, json_schema_input_type=str | list[str])
    ] = "auto"
    """Which parameters decay: auto (arrays of two or more axes outside of norms), all, or glob patterns."""
    param_groups: tuple[NNParamGroupSpec, ...] = ()
    """Other settings for some parameters, in order of precedence."""
    options: Mapping[str, Annotated[Any, AfterValidator(_scalar)]] = {}
    """Options of a further optimizer, by optax's names."""

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in optimizer_kinds():
            raise ValueError(f"there is no optimizer of that name{nearest(value, optimizer_kinds())}")
        return value

    def default_of(self, name: str) -> Any:
        """Return the default of a field for this kind."""
        if name in _OF_KIND and name != "options":
            return _DEFAULTS.get(self.kind, {"weight_decay": 0.0}).get(name)
        return super().default_of(name)

    def _complete(self) -> None:
        for name in _OF_KIND:
            if getattr(self, name) is None:
                self._set(name, self.default_of(name))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings belong to the kind; group rates can be expressed."""
        yield from super().problems()
        own = _DEFAULTS.get(self.kind)
        legal = ("weight_decay", "options") if own is None else tuple(own)
        for name in _OF_KIND:
            if name not in legal and getattr(self, name) not in (None, {}):
                hint = f"{self.kind} has {', '.join(legal)}" if own else "write it under options, by optax's name"
                yield name, f"got {getattr(self, name)!r}, which does not apply to {self.kind}; {hint}"
        if self.nesterov and not self.momentum:
            yield "nesterov", "needs a momentum above 0"
        for index, group in enumerate(self.param_groups):
            if group.max_lr is not None and self.max_lr == 0:
                yield f"param_groups[{index}].max_lr", "a group cannot have a rate of its own when the optimizer's is 0"

    def group_of(self, path: str) -> int | None:
        """Return the index of the first group that matches a parameter path, None for the default group."""
        return next((index for index, group in enumerate(self.param_groups) if group.matches(path)), None)

    def lr_scale_of(self, group: int | None) -> float:
        """Return the factor on the rate for a group's index (None: the default group, factor 1)."""
        if group is None:
            return 1.0
        rule = self.param_groups[group]
        if rule.max_lr is not None:
            return rule.max_lr / self.max_lr
        return 1.0 if rule.lr_scale is None else rule.lr_scale

    @classmethod
    def builder(cls) -> OptimBuilder:
        """Return an empty builder."""
        return OptimBuilder()


class OptimBuilder(Builder[NNOptimParams]):
    """Builds optimizers."""

    target = NNOptimParams
    variants = ("sgd", "adam", "adamw", "lion", "optax")
    modifiers = ("max_lr", "grad_clip_norm", "accumulate_grad_batches", "decay_mask", "param_groups")

    def sgd(
        self, *, momentum: float | None = None, nesterov: bool | None = None, weight_decay: float | None = None
    ) -> Self:
        """Choose stochastic gradient descent with momentum."""
        return self._choose("sgd", momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def adam(
        self,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> Self:
        """Choose Adam; its weight decay is coupled (L2)."""
        return self._choose("adam", betas=betas, eps=eps, weight_decay=weight_decay)

    def adamw(
        self,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> Self:
        """Choose Adam with decoupled weight decay."""
        return self._choose("adamw", betas=betas, eps=eps, weight_decay=weight_decay)

    def lion(self, *, betas: tuple[float, float] | None = None, weight_decay: float | None = None) -> Self:
        """Choose Lion."""
        return self._choose("lion", betas=betas, weight_decay=weight_decay)

    def optax(self, kind: str, *, weight_decay: float | None = None, **options: Any) -> Self:
        """Choose a further optimizer of optax by name, with its own options."""
        return self._choose(kind, weight_decay=weight_decay, options=options or None)

    def max_lr(self, rate: float) -> Self:
        """Set the rate that schedules scale."""
        return self._modify(max_lr=rate)

    def grad_clip_norm(self, norm: float | None) -> Self:
        """Set the largest global gradient norm, None for none."""
        return self._modify(grad_clip_norm=norm)

    def accumulate_grad_batches(self, count: int) -> Self:
        """Set the number of microbatches per update."""
        return self._modify(accumulate_grad_batches=count)

    def decay_mask(self, rule: str | Sequence[str]) -> Self:
        """Set which parameters decay: "auto", "all", or patterns."""
        return self._modify(decay_mask=rule)

    def param_groups(self, *groups: NNParamGroupSpec) -> Self:
        """Set the groups, in order of precedence."""
        return self._modify(param_groups=groups)
