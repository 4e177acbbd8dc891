"""The beginning of a microbatch with hooks: its context, and what the hooks of a run decide at all."""

from __future__ import annotations

from typing import Any

import torch

from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.params.run import RunSpec
from nnx_jax.torch.batches import Batch
from nnx_jax.torch.hooks.calls import TorchCalls
from nnx_jax.torch.hooks.context import TorchContext
from nnx_jax.torch.hooks.plan import TorchHooks, decides
from nnx_jax.torch.hooks.space import Space
from nnx_jax.torch.hooks.state import HookedState
from nnx_jax.torch.module import Net
from nnx_jax.torch.streams import stream_seed

HOOKS = 11
"""Purpose of the streams that hooks draw from; the number of the hook is added."""


class Begins:
    """The part of a HookedEngine that makes contexts; the attributes are its own."""

    hooks: TorchHooks
    calls: TorchCalls
    net: Net
    device: torch.device
    spec: RunSpec
    dynamic: bool
    length: int

    def _is_dynamic(self) -> bool:
        """Whether a hook decides itself, microbatch by microbatch, what is kept."""
        every = (*self.hooks.update, *self.hooks.traced)
        if not self.hooks.own:
            return False
        unknown = torch.zeros((), dtype=torch.int32, device="meta")
        counts = dict.fromkeys(("batch_count", "step_count", "global_step_count", "epoch_step_count", "epoch"), unknown)
        starts = True if self.length == 1 else torch.zeros((), dtype=torch.bool, device="meta")
        ctx = self._new_context({}, window_starts=starts, window_closes=True, window_count=unknown, **counts)
        ctx.enter(slots=self.hooks.slots(self.net.params, self.net.state(), self.device))

        def ask() -> tuple[Any, Any]:
            kept: Any = True
            for hook in self.hooks.update:
                ctx.enter(_stage=Stage.BEFORE_BATCH.name, state=ctx.slot(self.hooks.key(hook)), loss=None, hook_index=0)
                go = hook(ctx, Stage.BEFORE_BATCH, kept is not True)[0]
                kept = kept if go is True else go if kept is True else None
            return kept, starts

        return decides(every, ask)

    def _begin(self, state: HookedState, batch: Batch, *, closes: bool) -> TorchContext:
        """The context of a microbatch, before anything happened."""
        at, window = state.counters, state.window
        if not self.dynamic and not len(window):
            self._opens(state)
        ends = at["micro"] + 1 == self.length if self.dynamic and self.length > 1 else closes
        ctx = self._new_context(
            dict(batch),
            batch_count=at["batch"],
            step_count=at["step"],
            global_step_count=at["step"] * self.hooks.world,
            epoch_step_count=at["epoch_batch"],
            epoch=at["epoch"],
            window_starts=at["micro"] == 0 if self.length > 1 else True,
            window_closes=ends,
            window_count=at["micro"] + 1,
        )
        ctx.enter(slots=state.slots)
        ctx.enter(scaled=bool(self.calls.scales(ctx)))
        ctx.__dict__["make_rng"] = lambda index: self._generator(index, at["batch"])
        return ctx

    def _new_context(self, batch: dict[str, Any], **counts: Any) -> TorchContext:
        return TorchContext(
            Space(self.device),
            batch=batch,
            params=dict(self.net.params),
            frozen=dict(self.net.frozen),
            model_state=self.net.state(),
            window_size=self.length,
            compute_dtype=self.hooks.compute_dtype,
            model_keys=(),
            state=(),
            slots={},
            **counts,
        )

    def _generator(self, index: int, count: int) -> torch.Generator:
        """The same numbers in every process, so that all decide alike."""
        made = torch.Generator(device=self.device)
        made.manual_seed(stream_seed(self.spec.training.seed, HOOKS + index, 0, count))
        return made

    def _opens(self, state: HookedState) -> None:
        """A window begins here; a halt in it goes back to this."""
        state.opened, state.opened_slots = dict(state.counters), dict(state.slots)
        state.window.entry = {name: value.clone() for name, value in self.net.state().items()}
