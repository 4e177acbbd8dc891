"""HookedEngine: the torch engine whose microbatches have eighteen stages, with hooks called at each in its place.

The rules are those of the JAX step (`step/hooked.py`); here values are concrete, so decisions are bools.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from nnx_jax.core.errors import HookError, StepError, VetoError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.engines.hook_plan import carries, described, float32_layers, window_length
from nnx_jax.loop.engine import Snapshot
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch.batches import Batch
from nnx_jax.torch.engine import TorchEngine
from nnx_jax.torch.halts import find_fault
from nnx_jax.torch.hooks.begin import Begins
from nnx_jax.torch.hooks.calls import TorchCalls
from nnx_jax.torch.hooks.context import TorchContext
from nnx_jax.torch.hooks.loss import ChangedLoss
from nnx_jax.torch.hooks.net import StagedNet
from nnx_jax.torch.hooks.objective import StagedObjective
from nnx_jax.torch.hooks.plan import TorchHooks
from nnx_jax.torch.hooks.state import HookedState
from nnx_jax.torch.hooks.trees import tree_map
from nnx_jax.torch.hooks.views import SeenByUpdateHooks
from nnx_jax.torch.hooks.window import Grads, HookWindow
from nnx_jax.torch.records import Ledger, Row
from nnx_jax.torch.state import TorchState
from nnx_jax.torch.window import Plan, sums_of
from nnx_jax.torch.work import Measured, Work


class HookedEngine(Begins, SeenByUpdateHooks, TorchEngine):
    """A TorchEngine with hooks.

    Args:
        hooks: from `plan_torch`; decides the window and the precision.

    The other arguments are those of TorchEngine.
    """

    make_net, make_window, make_state = StagedNet, HookWindow, HookedState

    def __init__(self, *args: Any, hooks: TorchHooks, **options: Any) -> None:
        self.hooks = hooks
        self.carries = carries(hooks)
        self.length = window_length(hooks, args[0])
        self.ctx: TorchContext | None = None
        super().__init__(*args, **options)
        self.calls = TorchCalls(hooks, list(self.net.params.values()), self._agreed)
        self.changed = ChangedLoss(self.plan, self.calls)
        self.ledger = Ledger(self.plan, self.metrics, every=self.spec.training.record_every, vetoes=True)
        for part in self.optimizers.parts.values():
            part.torch.register_step_pre_hook(self._steps)

    # -- building ----------------------------------------------------------------------------------------------

    @property
    def staged(self) -> StagedNet:
        """The net."""
        return cast(StagedNet, self.net)

    def _build(self) -> tuple[Work, Work, Plan]:
        self.net.precision = self.hooks.precision
        self.staged.keep_float32(float32_layers(self.hooks))
        if self.objective is not None:
            self.objective = StagedObjective(self.objective, self._forwarded)
        work, score, plan = super()._build()
        self.staged.forwarded = self._forwarded
        self.dynamic = self._is_dynamic()
        if self.hooks.adds_means:
            plan = dataclasses.replace(plan, groups=(tuple(range(len(plan.terms))),), fused=True)
        elif self.dynamic and len(plan.terms) == 1:
            plan = dataclasses.replace(plan, fused=False)
        if self.dynamic:
            self.accumulate = 1
        return work, score, plan

    def start(self) -> HookedState:
        """The first state: the module's weights, empty moments, first slots."""
        state = cast(HookedState, super().start())
        state.make_slots = lambda: self.hooks.slots(self.net.params, self.net.state(), self.device)
        state.window.joined = self.dynamic
        state.capacity = 2 if self.dynamic else self.length
        state.reset()
        return state

    # -- what the loop asks ------------------------------------------------------------------------------------

    def open_batches(self, state: TorchState) -> int:
        """Microbatches in the open window; 0 where hooks decide what is kept."""
        return 0 if self.dynamic else super().open_batches(state)

    @cached_property
    def topology(self) -> dict[str, Any]:
        """What a stored state fits; of hooks those that take part."""
        found = described(self.hooks)
        return super().topology | ({"hooks": found} if found else {})

    def snapshot(self, state: TorchState, epoch: int, batch: int) -> Snapshot:
        """See `TorchEngine.snapshot`; where hooks decide what is kept, a window is open whatever its count says."""
        if not self.dynamic:
            return super().snapshot(state, epoch, batch)
        arrays = state.arrays()
        count = {"counters/micro": arrays["counters/micro"]}
        stored = self.sync.stored({**arrays, "counters/micro": np.asarray(len(state.window), np.int64)})
        return Snapshot({**stored, **count}, {"epoch": epoch, "next": batch}, self.topology)

    # -- one microbatch ----------------------------------------------------------------------------------------

    def _microbatch(self, state: TorchState, batch: Batch, *, last: bool) -> None:
        """One microbatch from BEFORE_BATCH to AFTER_OPTIMIZER_STEP."""
        held = cast(HookedState, state)
        ctx = self.ctx = self._begin(held, batch, closes=last)
        try:
            self._run(held, ctx, closes=last)
        finally:
            self.ctx = None

    def _close(self, state: TorchState) -> None:
        """The microbatch has closed the window itself."""

    def _run(self, state: HookedState, ctx: TorchContext, *, closes: bool) -> None:
        window = state.window
        with self.sync.backward(last=closes, rows=bool(len(ctx.batch["mask"]))):
            with self.net.autocast():
                zeroed, _ = self.calls.fold(ctx, Stage.BEFORE_BATCH)
                self._entered(state, ctx, zeroed)
                self.calls.at(ctx, Stage.BEFORE_FORWARD)
                before = {n: v.clone() for n, v in self.net.state().items()} if self.hooks.screens else {}
                measured, num, den = self._measured(ctx)
                values, times = self.changed.values(ctx, num, den, measured.terms, window)
            micro = self._differentiated(ctx, window, values, times)
        micro, row = self._screened(ctx, state, measured, num, den, micro, before)
        ctx.offer(micro_grads=lambda: self._named(window.divided(micro, self._factors(ctx.weight))))
        window.add(micro, row[len(num) : 2 * len(num)].detach())
        window.noted(row, scaled=ctx.scaled)
        for name in ("batch", "micro", "epoch_batch"):
            state.counters[name] += 1
        if closes:
            self._finish(state, ctx)
        else:
            self._left_open(state, ctx)

    def _entered(self, state: HookedState, ctx: TorchContext, zeroed: bool) -> None:
        """What hooks decided to keep; where they decide, what a dropped window left in the model is undone first."""
        window = state.window
        if not self.dynamic:
            ctx.enter(zeroed=zeroed)
            return
        # A tensor, even though its value is known: a Python True says that nothing is ever accumulated.
        ctx.enter(zeroed=torch.tensor(zeroed, device=self.device))
        if zeroed:
            if window.pending:
                self.net.put_state(window.entry)
            window.clear()
            self._opens(state)
            ctx.enter(model_state=self.net.state())
        else:
            window.table()
            window.settle()

    def _measured(self, ctx: TorchContext) -> tuple[Measured, list[torch.Tensor], torch.Tensor]:
        """The forward pass, the loss's sums and the metrics; of a batch without a row zeros."""
        if len(ctx.batch["mask"]):
            if self.sync.joins:
                self.stand_in.seen = ctx.batch
            measured = self.work.measure(ctx.batch, True)
            return measured, *sums_of(measured.terms, self.plan, self.device, self._dtype)
        self._forwarded(None)
        zero = torch.zeros((), dtype=self._dtype, device=self.device)
        num = [zero] * len(self.plan.terms)
        if self.sync.joins:
            num, _ = self.stand_in.sums(self.work, self.plan, self._dtype)
        parts = zip(self.plan.terms, self.plan.weights, self.plan.additive, strict=True)
        terms = tuple(
            LossTerm(name, zero, None, "sum", weight) if free else LossTerm(name, zero, zero, "mean", weight)
            for name, weight, free in parts
        )
        sums = [torch.zeros(metric.size, device=self.device) for metric in self.metrics]
        return Measured(terms, sums, None), num, torch.zeros(len(terms), dtype=self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        assert self._state is not None
        return self._state.window.dtype

    def _forwarded(self, outputs: Any) -> Any:
        """AFTER_FORWARD and BEFORE_LOSS: the outputs as traced hooks left them."""
        ctx = self.ctx
        if ctx is None or "predictions" in ctx.__dict__:
            return outputs
        ctx.enter(predictions=outputs)
        self.calls.at(ctx, Stage.AFTER_FORWARD)
        self.calls.at(ctx, Stage.BEFORE_LOSS)
        return ctx.predictions

    def _differentiated(self, ctx: TorchContext, window: HookWindow, values: list[torch.Tensor], times: int) -> Grads:
        """The gradient of one microbatch, or what an owner of DO_BACKWARD puts in its place."""
        owner = self.hooks.owner(Stage.DO_BACKWARD)
        if owner is None:
            micro = window.differentiate(values, times)
        else:
            micro = self._no_grads(window)
            ctx.offer(grads=lambda: self._named(window._filled(micro[0])))
            self.calls.call_one(ctx, owner, Stage.DO_BACKWARD)
            factor = self._undivided(ctx.weight)
            micro[0] = [ctx.grads[name].detach() * factor for name in window.names]
        raw = ctx.__dict__["raw_loss"].detach()
        ctx.enter(loss=raw, predictions=tree_map(_detached, ctx.predictions))
        ctx.losses["total_loss"] = raw
        return micro

    def _no_grads(self, window: HookWindow) -> Grads:
        return [[None for _ in window.params] for _ in self.plan.groups]

    def _screened(
        self, ctx: TorchContext, state: HookedState, measured: Measured, num: Any, den: torch.Tensor, micro: Grads,
        before: dict[str, torch.Tensor],
    ) -> tuple[Grads, torch.Tensor]:  # fmt: skip
        """The microbatch as it goes into its window: left out where a hook says so, as if it had no valid target."""
        window = state.window
        invalid = torch.zeros((), device=self.device) if measured.invalid is None else measured.invalid
        parts = [torch.stack([value.detach() for value in num]), den.to(self.device), *measured.sums]
        row = torch.cat([part.to(window.dtype) for part in parts])
        invalid = invalid.reshape(1).to(window.dtype)
        if self.sync.size != 1:
            ctx.enter(loss=self._everyones_loss(row))
        has_rows = any(self.plan.additive) or bool((den > 0).any())
        ctx.enter(has_rows=has_rows, kept=True)
        if self.hooks.screens:
            ctx.offer(micro_grads=lambda: self._named(window.divided(micro, self._factors(ctx.weight))))
            ctx.enter(kept=self.calls.screen(ctx))
            window.kept += ctx.kept
            if not ctx.kept:
                self.net.put_state(before)
                micro, row = self._no_grads(window), torch.zeros_like(row)
        return micro, torch.cat([row, invalid])

    def _everyones_loss(self, row: torch.Tensor) -> torch.Tensor:
        """This microbatch's loss over the rows of all processes, so that all decide alike."""
        n = len(self.plan.terms)
        total = self.sync.total(row[None])[0].to(self._dtype)
        return (total[:n] * self._factors(total[n : 2 * n])).sum()

    # -- its gradient ------------------------------------------------------------------------------------------

    def _factors(self, den: torch.Tensor) -> torch.Tensor:
        return self.changed.factors(den)

    def _undivided(self, den: torch.Tensor) -> torch.Tensor | float:
        """What a gradient is multiplied with to become a sum in the first buffer."""
        first = self.plan.groups[0][0]
        if self.plan.fused or self.plan.additive[first]:
            return 1.0
        return den[first] / (self.plan.weights[first] or 1.0)

    def _named(self, grads: Any) -> dict[str, torch.Tensor]:
        return dict(zip(self.net.params, grads, strict=True))

    def _after_backward(self, ctx: TorchContext, window: HookWindow, *, closes: bool) -> None:
        """AFTER_BACKWARD and BEFORE_OPTIMIZER_STEP: traced hooks read or replace the accumulated gradient."""
        ctx.enter(loss_scale=next((scale for _, scale in self.calls.scales(ctx)), None))
        self.calls.at(ctx, Stage.AFTER_BACKWARD)
        self.calls.at(ctx, Stage.BEFORE_OPTIMIZER_STEP)
        if not ctx.replaced("grads"):
            return
        ctx.enter(unscaled=ctx.grads)
        if closes and not self.dynamic:
            return
        if len(self.plan.groups) > 1:
            raise StepError(
                f"a hook replaced ctx.grads in an open window, but the loss terms {', '.join(self.plan.terms)} have "
                "denominators of their own, which divide it at its end; replace it at DO_OPTIMIZER_STEP"
            )
        window.replace(list(ctx.grads.values()), self._undivided(window.den))

    # -- its end -----------------------------------------------------------------------------------------------

    def _left_open(self, state: HookedState, ctx: TorchContext) -> None:
        window = state.window
        ctx.offer(grads=lambda: self._named(window.divided(window.held, self._factors(window.den))))
        self._after_backward(ctx, window, closes=False)
        run, _ = self.calls.fold(ctx, Stage.DO_OPTIMIZER_STEP)
        if run:
            raise StepError("a hook let the optimizer step inside an accumulation window; veto before it closes")
        self._after(ctx, keep=False)
        if bool(ctx.stop):
            self._halt(state, self._vetoed(state, ctx))

    def _finish(self, state: HookedState, ctx: TorchContext) -> None:
        """The window's gradient, the hooks' decision, the update or none, and the record."""
        window, counters, n = state.window, state.counters, len(self.plan.terms)
        table = window.table()
        if self._invalid(state, table):
            return
        sums = [sum(column) for column in zip(*table, strict=True)] if len(table) > 1 else table[0]
        grads, factor, norm = window.gradient(self.plan.factors(sums[n : 2 * n]))
        ctx.offer(grads=lambda: self._named(grads if factor == 1.0 else [grad * factor for grad in grads]))
        ctx.enter(known_norm=None if ctx.scaled else norm)
        self._after_backward(ctx, window, closes=True)
        run, veto = self.calls.fold(ctx, Stage.DO_OPTIMIZER_STEP)
        run = run and not bool(ctx.stop)
        norm = self._norm(ctx, norm)
        fault = find_fault(self.plan, window, table, counters["batch"] - len(table), norm)
        bad = self._is_bad(ctx, fault, run, veto)
        empty = self.plan.is_empty(sums[n : 2 * n]) or (self.hooks.screens and not window.kept)
        keep = run and not bad and not empty
        if keep:
            self._update(ctx, grads, factor, norm)
            self.wrote = True
        elif not self.dynamic:
            self.net.put_state(window.entry)
        self._after(ctx, keep=keep)
        if not self._counted(state, ctx, fault, keep=keep, bad=bad):
            return
        if bool(ctx.stop):
            self._halt(state, self._vetoed(state, ctx))
            return
        rates = self.optimizers.rates()
        row = Row(
            counters["batch"] - 1, counters["step"], True, keep, self.optimizers.first.used, norm, (), rates, veto=veto
        )
        if self.dynamic:
            self.ledger.add(row._replace(sums=table[-1]))
            window.pending, window.told = not keep, len(window)
            return
        self.ledger.close(row, table, sums, window.told)
        window.clear()

    def _norm(self, ctx: TorchContext, norm: float) -> float:
        """The gradient's norm before clipping, which the record shows."""
        said = ctx.metrics.get("grad_norm")
        if said is not None:
            return float(said)
        seen = ctx.__dict__.get("unscaled")
        return norm if seen is None else float(ctx.global_norm(seen))

    def _is_bad(self, ctx: TorchContext, fault: Any, run: bool, veto: int) -> bool:
        """Whether the window counts as not finite.

        A vetoed window is not at fault, unless its loss is not finite and only the loss scale objected, which no scale
        can mend.
        """
        if self.nonfinite == "ignore" or fault is None:
            return False
        return run or (fault.term is not None and any(veto == index for index, _ in self.calls.scales(ctx)))

    def _update(self, ctx: TorchContext, grads: list[torch.Tensor], factor: float, norm: float) -> None:
        """The optimizers' step, or the owner's."""
        owner = self.hooks.owner(Stage.DO_OPTIMIZER_STEP)
        if owner is not None:
            self.calls.call_one(ctx, owner, Stage.DO_OPTIMIZER_STEP)
            with torch.no_grad():
                for name, value in self.net.params.items():
                    value.copy_(ctx.params[name])
            ctx.enter(params=dict(self.net.params))
            return
        if ctx.replaced("grads"):
            grads, factor, norm = list(ctx.grads.values()), 1.0, float(ctx.global_norm())
        if self.hooks.observer is not None or self.hooks.own:
            grads = [grad.clone() for grad in grads]  # clipping changes them, and somebody may look later
        self.optimizers.update(self._named(grads), factor, norm)
        for value in self.net.params.values():
            value.grad = None

    def _after(self, ctx: TorchContext, *, keep: bool) -> None:
        """AFTER_OPTIMIZER_STEP."""
        ctx.enter(model_state=self.net.state())
        with torch.no_grad():
            for hook in self.hooks.update:
                self.calls.ask(ctx, hook, Stage.AFTER_OPTIMIZER_STEP, not keep)
            self.calls.at(ctx, Stage.AFTER_OPTIMIZER_STEP)

    def _counted(self, state: HookedState, ctx: TorchContext, fault: Any, *, keep: bool, bad: bool) -> bool:
        """Move the counters; False where training ends here."""
        counters = state.counters
        if keep:
            counters["step"] += 1
            counters["epoch_step"] += 1
            counters["consecutive"] = 0
        elif bad:
            if self._gives_up(state, fault):
                return False
        elif ctx.window_closes:
            counters["skipped"] += 1
        if ctx.window_closes:
            counters["micro"] = 0
        return True

    def _vetoed(self, state: HookedState, ctx: TorchContext) -> VetoError:
        """What to say where a hook stops the run."""
        name, at = type(ctx.__dict__["stopper"]).__name__, state.counters
        return VetoError(
            f"{name} rejected update {at['step'] + 1} (microbatch {at['batch'] - 1}), too many in a row; the state is "
            "as before it; look at the data and the rate, or raise the hook's max_consecutive"
        )

    def _agreed(self, go: bool) -> bool:
        """What all processes make of a decision: no, where one says no."""
        if self.sync.size == 1:
            return go
        return int(self.sync.total(torch.tensor([[float(go)]], device=self.device))[0, 0]) == self.sync.size

    def _steps(self, *_: Any) -> None:
        """An optimizer is about to step: not while a hook is called.

        Raises:
            HookError: a hook steps it.
        """
        if self.calls.calling is not None:
            raise HookError(
                f"{type(self.calls.calling).__name__} called the optimizer's step(); the run does that, once, where no "
                "hook vetoes it: return whether to proceed at DO_OPTIMIZER_STEP"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
