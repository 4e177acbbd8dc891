"""One weight under torch's hooked engine, with hand-checkable numbers: prediction w x, loss mean((w x - t)^2), SGD 0.1.

The same interface as `tests.hooks.toy.Toy`, but the inputs are given when it is made, since an engine reads its data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.engines.feeds import make_feeds
from nnx_jax.engines.hook_plan import window_length
from nnx_jax.fit.schedules import make_schedules
from nnx_jax.loop.engine import Records
from nnx_jax.params.run import RunSpec
from nnx_jax.torch.hooks.engine import HookedEngine
from nnx_jax.torch.hooks.plan import plan_torch
from nnx_jax.torch.losses import build_loss
from tests.torch.engines import advance, spec_of

INFINITE, NOTHING = 1000.0, 1001.0
"""What stands for infinity and NaN in data, which no data set takes as they are."""


class One(torch.nn.Module):
    """x -> w x, for any shape of w."""

    def __init__(self, w: Any = 1.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.as_tensor(w, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(x == INFINITE, torch.inf, torch.where(x == NOTHING, torch.nan, x))
        return self.w * x


def hooked(
    spec: RunSpec,
    module: torch.nn.Module,
    hooks: Sequence[Any],
    loss: Any = "mse",
    *,
    taps: Sequence[str] = (),
    observer: Callable[[Any, Any], None] = lambda stage, ctx: None,
    **options: Any,
) -> HookedEngine:
    """A hooked engine of this configuration, as `prepare` builds it."""
    plan = plan_torch(HookRegistry(hooks), spec, taps=frozenset(taps), observer=observer, world=1)
    assert plan is not None
    spec = spec.with_training(spec.training.with_window(window_length(plan, spec)))
    feeds = make_feeds(spec)
    schedules = make_schedules(spec, feeds["train"].n_batches)
    options = {"schedules": schedules.updates, "schedule_state": schedules.state(spec), **options}
    return HookedEngine(spec, module, build_loss(loss), feeds, hooks=plan, **options)


class TorchToy:
    """One run of one weight over given inputs.

    Args:
        hooks: in any order.
        xs: one input a microbatch, [microbatches, rows] where a microbatch has several.
        t: the target of all.
    """

    def __init__(
        self,
        *hooks: Any,
        xs: Any,
        t: float = 0.0,
        w: Any = 1.0,
        optimizer: str = "sgd",
        nonfinite: str = "ignore",
        taps: Sequence[str] = (),
        observer: Callable[[Any, Any], None] = lambda stage, ctx: None,
        precision: str = "float32",
        optim: dict[str, Any] | None = None,
        **training: Any,
    ) -> None:
        table = np.nan_to_num(np.asarray(xs, np.float32), nan=NOTHING, posinf=INFINITE)
        self.left = len(table)
        table = np.concatenate([table, table[:1]])  # one that is never read: an epoch's end would close a window
        rows = 1 if table.ndim == 1 else table.shape[1]
        x = table.reshape(-1, 1)
        plain = {"momentum": 0.0} if optimizer == "sgd" else {}
        chosen = {"kind": optimizer, "max_lr": 0.1, **plain, **(optim or {})}
        spec = spec_of(
            {"x": x, "y": np.full_like(x, t)}, batch_size=rows, optim=chosen, data={"shuffle": False},
            precision=precision, record_every="batch", **training,
        )  # fmt: skip
        self.engine = hooked(spec, One(w), hooks, taps=taps, observer=observer, nonfinite=nonfinite)
        self.state: Any = self.engine.start()
        self.engine.bind(self.state)
        self.records: list[Records] = []

    def step(self, count: int = 1) -> TorchToy:
        """Train on the next microbatches."""
        self.records += advance(self.engine, self.state, count, closes=False)
        self.left -= count
        return self

    def trace(self, look: Callable[[TorchToy], Any]) -> list[Any]:
        """What `look` sees after each of the microbatches that are left."""
        return [look(self.step()) for _ in range(self.left)]

    @property
    def w(self) -> Any:
        """The weight: a float, or a list."""
        return self.engine.module.w.detach().tolist()  # type: ignore[union-attr]

    def slot(self, hook: Any) -> Any:
        """The state of a hook, on the host."""
        found = self.engine.slot(self.state, hook)
        return () if found is None else found.read()

    def counters(self) -> dict[str, int]:
        """Counters by name."""
        return dict(self.state.counters)

    def leaves(self) -> dict[str, bytes]:
        """Every stored array but the global streams, as bytes."""
        arrays = self.state.arrays()
        return {name: np.asarray(value).tobytes() for name, value in arrays.items() if not name.startswith("rng/")}
