"""A step with one weight and hand-checkable numbers, driven directly: prediction w x, loss mean((w x - t)^2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.step import build_step
from nnx_jax.step.plan import HookPlan


class Toy:
    """One run of the step: call it with batches, look at its state.

    Args:
        hooks: update hooks.
        accumulate: microbatches of a window; taken from a hook that has `k`.
        w: the weight, or all parameters by name.
        shape: of one row of x and t; that of the weight by default.
        rows: rows of a batch; a shorter batch is padded and masked.
        slope: the loss is mean(w x) instead, whose gradient is mean(x) wherever w is.
    """

    def __init__(
        self,
        *hooks: TrainingUpdateHook,
        accumulate: int | None = None,
        rows: int = 1,
        traced: Sequence[Any] = (),
        optimizer: str = "sgd",
        slope: bool = False,
        rate: Any = 0.1,
        w: Any = 1.0,
        shape: tuple[int, ...] | None = None,
        forward: Any = None,
        terms: Any = None,
        model_state: Any = None,
        nonfinite: str = "ignore",
        executor: str = "compiled",
        plan: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.hooks = TrainingUpdateOrchestrator(*hooks)
        self.rows = rows
        params = dict(w) if isinstance(w, dict) else {"w": jnp.asarray(w, jnp.float32)}
        model_state = {} if model_state is None else model_state
        if shape is None:
            shape = params["w"].shape if "w" in params else ()
        self.columns = {"x": (rows, *shape), "t": (rows, *shape), "mask": (rows,)}
        concrete = {"concrete": True} if executor != "compiled" else {}
        self.plan = HookPlan(update=tuple(self.hooks.iter_hooks()), traced=tuple(traced), **concrete, **(plan or {}))
        windows = [hook.k for hook in hooks if hasattr(hook, "k")]  # type: ignore[attr-defined]
        self.programs = build_step(
            forward or _forward,
            terms or (_slope if slope else _terms),
            make_optimizer(optimizer, params, **({"schedule": rate} if callable(rate) else {"rate": rate})),
            params=params,
            model_state=model_state,
            signature={name: (whole, jnp.float32) for name, whole in self.columns.items()},
            accumulate=accumulate or (windows[0] if windows else 1),
            hooks=self.plan,
            nonfinite=nonfinite,
            executor=executor,
            **options,
        )
        self._given = params, model_state
        self.carry = self.programs.init(params, model_state)

    def fresh(self) -> Toy:
        """Begin again, with the compiled programs."""
        self.carry = self.programs.init(*self._given)
        return self

    def batch(self, x: Any, t: Any = 0.0) -> dict[str, np.ndarray]:
        """A batch of the given inputs and targets (a number is one row), padded with masked rows."""
        made = {name: np.zeros(shape, np.float32) for name, shape in self.columns.items()}
        xs = np.asarray(x, np.float32)
        xs = xs.reshape(1) if xs.ndim == 0 else xs
        made["x"][: len(xs)], made["t"][: len(xs)], made["mask"][: len(xs)] = xs, t, 1.0
        return made

    def step(self, x: Any, t: Any = 0.0) -> Toy:
        """Train on one microbatch."""
        self.programs.step(self.carry, self.batch(x, t))
        return self

    def trace(self, xs: Sequence[Any], t: Any = 0.0) -> list[Any]:
        """The weight after each microbatch."""
        return [self.step(x, t).w for x in xs]

    @property
    def state(self) -> Any:
        """The training state now, on the host."""
        return jax.device_get(self.programs.state(self.carry))

    @property
    def w(self) -> Any:
        """The weight: a float, or a list."""
        return self.state.params["w"].tolist()

    def slot(self, hook: Any) -> Any:
        """The state of a hook."""
        return self.state.slots[self.plan.key(hook)]

    def counters(self) -> dict[str, int]:
        """Counters by name."""
        from nnx_jax.step.state import COUNTERS

        return dict(zip(COUNTERS, self.state.counters.tolist(), strict=True))

    def bind(self, hook: Any) -> None:
        """Connect a hook with its slot, as a run does."""
        hook.bind(_Slot(self, hook))

    def leaves(self) -> dict[str, bytes]:
        """Every stored leaf, as bytes."""
        return {name: np.asarray(leaf).tobytes() for name, leaf in self.programs.named(self.carry).items()}


class _Slot:
    def __init__(self, toy: Toy, hook: Any) -> None:
        self._toy, self._key = toy, toy.plan.key(hook)

    def read(self) -> Any:
        return self._toy.state.slots[self._key]

    def write(self, state: Any) -> None:
        named = dict(self._toy.programs.named(self._toy.carry))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            named[f"slots/{self._key}/{name}"] = np.asarray(leaf)
        self._toy.carry = self._toy.programs.load_named(named)


def _forward(params: Any, model_state: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
    return params["w"] * batch["x"], model_state


def _slope(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    return (LossTerm("slope", jnp.sum(outputs * batch["mask"]), jnp.sum(batch["mask"])),)


def _terms(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    error = jnp.square(outputs - batch["t"])
    rows = error.reshape(error.shape[0], -1).sum(axis=1)
    return (LossTerm("mse", jnp.sum(rows * batch["mask"]), jnp.sum(batch["mask"])),)
