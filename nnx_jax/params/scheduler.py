"""The schedule of the rate: its shape, its length, and the clock that advances it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self, get_args

from nnx_jax.core.spec import Spec
from nnx_jax.params.builders import Builder
from nnx_jax.params.fields import Count, Fraction, NonNegative, Whole

SchedulerKind = Literal[
    "constant", "step", "cosine", "one_cycle", "linear_warmup_decay", "warmup_cosine", "reduce_on_plateau"
]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "constant": {},
    "step": {"step_size": None, "factor": 0.1, "min_lr": 0.0},
    "cosine": {"T_max": None, "min_lr": 0.0},
    "one_cycle": {"total_steps": None},
    "linear_warmup_decay": {"total_steps": None, "warmup_steps": None},
    "warmup_cosine": {"total_steps": None, "warmup_steps": None, "min_lr": 0.0},
    "reduce_on_plateau": {"factor": 0.95, "patience": 8, "cooldown": 2, "threshold": 1e-3, "min_lr": 1e-7},
}
_OF_KIND = (
    "min_lr", "factor", "patience", "cooldown", "threshold", "step_size", "T_max", "total_steps", "warmup_steps",
)  # fmt: skip


class NNSchedulerParams(Spec):
    """How the rate moves between 0 and the optimizer's `max_lr`.

    Settings have a default per kind and read None where they mean nothing, or where the planned length of the run
    decides: step_size a third of it, T_max and total_steps all of it, warmup_steps a tenth. Lengths are counted on the
    clock.
    """

    kind: SchedulerKind = "constant"  # type: ignore[assignment]  # a field here: all kinds share one class
    """Shape of the schedule."""
    clock: Literal["epoch", "optimizer_update"] = "epoch"
    """What advances it: a finished epoch, or a committed update (skipped windows do not count)."""
    min_lr: NonNegative | None = None
    """Floor of step, cosine, warmup_cosine (default 0) and reduce_on_plateau (default 1e-7)."""
    factor: Fraction | None = None
    """What the rate is multiplied by: step (default 0.1), reduce_on_plateau (default 0.95)."""
    patience: Whole | None = None
    """Epochs without improvement before reduce_on_plateau acts; default 8."""
    cooldown: Whole | None = None
    """Epochs after a reduction in which nothing is counted; default 2."""
    threshold: NonNegative | None = None
    """Smallest relative improvement that counts, for reduce_on_plateau; default 1e-3."""
    step_size: Count | None = None
    """Length of one step."""
    T_max: Count | None = None
    """Half period of cosine."""
    total_steps: Count | None = None
    """Length of one_cycle, linear_warmup_decay and warmup_cosine."""
    warmup_steps: Whole | None = None
    """Length of the warm-up."""

    def default_of(self, name: str) -> Any:
        """Return the default of a field for this kind."""
        return _DEFAULTS[self.kind].get(name) if name in _OF_KIND else super().default_of(name)

    def _complete(self) -> None:
        for name in _OF_KIND:
            if getattr(self, name) is None:
                self._set(name, self.default_of(name))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings belong to the kind, the plateau to the epoch clock, the warm-up into the total."""
        yield from super().problems()
        legal = _DEFAULTS[self.kind]
        for name in _OF_KIND:
            value = getattr(self, name)
            if value is not None and name not in legal:
                hint = f"it has {', '.join(legal)}" if legal else "it has no settings"
                yield name, f"got {value!r}, which does not apply to {self.kind}; {hint}"
        if self.kind == "reduce_on_plateau" and self.clock != "epoch":
            yield "clock", f"got '{self.clock}'; reduce_on_plateau follows a validation value, write clock: epoch"
        if self.total_steps is not None and self.warmup_steps is not None and self.warmup_steps > self.total_steps:
            yield "warmup_steps", f"got {self.warmup_steps}, more than total_steps={self.total_steps}"

    @classmethod
    def builder(cls) -> SchedulerBuilder:
        """Return an empty builder."""
        return SchedulerBuilder()


class SchedulerBuilder(Builder[NNSchedulerParams]):
    """Builds schedules."""

    target = NNSchedulerParams
    variants = get_args(SchedulerKind)
    modifiers = ("clock",)

    def constant(self) -> Self:
        """Choose the same rate throughout."""
        return self._choose("constant")

    def step(self, *, step_size: int | None = None, factor: float | None = None, min_lr: float | None = None) -> Self:
        """Choose a factor every `step_size` ticks."""
        return self._choose("step", step_size=step_size, factor=factor, min_lr=min_lr)

    def cosine(self, *, T_max: int | None = None, min_lr: float | None = None) -> Self:  # torch's name
        """Choose half a cosine from `max_lr` to `min_lr`."""
        return self._choose("cosine", T_max=T_max, min_lr=min_lr)

    def one_cycle(self, *, total_steps: int | None = None) -> Self:
        """Choose up, then down below the start."""
        return self._choose("one_cycle", total_steps=total_steps)

    def linear_warmup_decay(self, *, total_steps: int | None = None, warmup_steps: int | None = None) -> Self:
        """Choose straight up, then straight to 0."""
        return self._choose("linear_warmup_decay", total_steps=total_steps, warmup_steps=warmup_steps)

    def warmup_cosine(
        self, *, total_steps: int | None = None, warmup_steps: int | None = None, min_lr: float | None = None
    ) -> Self:
        """Choose straight up, then half a cosine."""
        return self._choose("warmup_cosine", total_steps=total_steps, warmup_steps=warmup_steps, min_lr=min_lr)

    def reduce_on_plateau(
        self,
        *,
        factor: float | None = None,
        patience: int | None = None,
        cooldown: int | None = None,
        threshold: float | None = None,
        min_lr: float | None = None,
    ) -> Self:
        """Choose a reduction when the monitored value stops improving."""
        return self._choose(
            "reduce_on_plateau",
            factor=factor,
            patience=patience,
            cooldown=cooldown,
            threshold=threshold,
            min_lr=min_lr,
        )

    def clock(self, name: str) -> Self:
        """Set what advances the schedule."""
        return self._modify(clock=name)
