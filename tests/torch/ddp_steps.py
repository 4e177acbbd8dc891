"""Steps and validations of the user's own by any number of torch processes; `test_ddp_steps.py` compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nnx_jax.torch import default_train_step, finalize_step
from tests.torch.ddp_beyond import Named, by_trainer, own, trained
from tests.torch.ddp_law import labelled
from tests.torch.group_runs import error, rank, validation_rows

ALLOW: dict[str, Any] = {"settings": {"allow": ["step", "validation"]}}


def losses(net: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")


def by_default(ctx: Any) -> Any:
    return default_train_step(ctx)


def as_for_jax(ctx: Any) -> Any:
    loss, grads = ctx.value_and_grad(lambda net: ctx.mean(losses(net, ctx.batch)))
    ctx.update(grads)
    ctx.report_update()
    rows = ctx.mask.sum()
    return {"loss": loss, "labels": (ctx.batch["y"].sum(), rows), "twice": 2 * loss}


def as_for_torch(ctx: Any) -> Any:
    loss = ctx.mean(losses(ctx.model, ctx.batch))
    ctx.backward(loss)
    ctx.optimizer.step()
    ctx.report_update()
    return {"loss": loss.detach()}


def spoiled(ctx: Any) -> Any:
    """Not finite for rows that are too large, which one process has."""
    loss = ctx.mean(losses(ctx.model, ctx.batch) / (ctx.batch["x"][:, 0] < 100.0))
    ctx.backward(loss)
    ctx.optimizer.step()
    ctx.report_update()
    return {"loss": loss.detach()}


def by_its_tail(ctx: Any) -> Any:
    return finalize_step(ctx.mean(losses(ctx.model, ctx.batch)), ctx)


def counted(ctx: Any) -> Any:
    """The loss with a weight of its own, and a gradient of the sum that is divided by nobody."""
    values = losses(ctx.model, ctx.batch)
    ctx.backward(ctx.mean(values))
    ctx.update()
    ctx.report_update()
    rows = ctx.mask.sum()
    return {"loss": values.sum().detach() / rows if rows else values.new_zeros(()), "count": rows}


def one_head_now_and_then(ctx: Any) -> Any:
    loss = ctx.mean(losses(ctx.model, ctx.batch))
    ctx.backward(loss)
    ctx.optimizers["b"].step()
    ctx.report_update("b")
    if ctx.batch_idx % 2:
        ctx.optimizers["a"].update()
        ctx.report_update("a")
    return {"loss": loss.detach()}


def validates(ctx: Any) -> dict[str, Any]:
    """The built-in scores, and what a copy of the network gives."""
    [*batches] = ctx.val_loader
    rows = sum(len(batch["x"]) for batch in batches)
    return {**ctx.evaluate(), "positive": bool(rows) or 0.0}


def steps(folder: str, world: int) -> dict[str, Any]:
    root, out = Path(folder), {}
    odd, none = labelled(8 * world + 3), labelled(4 * world + 1)
    clip: dict[str, Any] = {"optim": {"grad_clip_norm": 0.1}, **ALLOW}

    def run(name: str, step: Any, rows: Any, size: int, **more: Any) -> None:
        net = more.pop("net", Named)
        given = {**ALLOW, **more, "call": {"train_step_fn": step, **more.pop("call", {})}}
        out[name] = trained(root / name.replace(" ", "-"), rows, size, world, model=own(net), **given)

    run("default", by_default, odd, 2, window=2, **clip)
    run("jax", as_for_jax, odd, 2, **clip)
    run("torch", as_for_torch, odd, 2)
    run("tail", by_its_tail, odd, 2, **clip)
    run("none", as_for_jax, none, 4)
    run("counted", counted, none, 4)
    sync = {"settings": {"allow": ["step"], "batch_norm": "sync"}}
    run("norms", as_for_torch, none, 4, net=lambda: Named(norm=True), **sync)
    run("default norms", by_default, none, 4, net=lambda: Named(norm=True), **sync)
    out["Trainer"] = by_trainer(root / "trainer", odd, world, trainer_step_fn=one_head_now_and_then)
    scored = {"val_loader": validation_rows({n: v[:5] for n, v in labelled(9).items()})}
    call = {"eval_step_fn": validates}
    out["validation"] = trained(root / "val", odd, 2, world, model=own(Named), call=call, **scored, **ALLOW)
    poisoned = labelled(8 * world)
    poisoned["x"][7] = 1000.0
    run("skipped", spoiled, poisoned, 4, nonfinite="skip", max_consecutive_skips=9)
    out["not finite"] = error(lambda: run("fails", spoiled, poisoned, 4))
    return out


def apart(folder: str) -> dict[str, Any]:
    """Steps that do something else on rank 1."""
    root, out = Path(folder), {}

    def steps_once_more(ctx: Any) -> Any:
        found = as_for_torch(ctx)
        if ctx.batch_idx == 1 and rank() == 1:
            ctx.optimizer.step()
        return found

    def reports_nothing(ctx: Any) -> Any:
        loss = ctx.mean(losses(ctx.model, ctx.batch))
        ctx.backward(loss)
        ctx.update()
        ctx.report_update(when=rank() == 0 or ctx.batch_idx == 0)
        return {"loss": loss.detach()}

    def takes_no_mean(ctx: Any) -> Any:
        if ctx.batch_idx == 1 and rank() == 1:
            loss = losses(ctx.model, ctx.batch).sum()
            ctx.backward(loss)
            ctx.update()
            ctx.report_update()
            return {"loss": loss.detach()}
        return as_for_torch(ctx)

    def records_more(ctx: Any) -> Any:
        return as_for_jax(ctx) if rank() else as_for_torch(ctx)

    for step in (steps_once_more, reports_nothing, takes_no_mean, records_more):
        given = {"call": {"train_step_fn": step}, **ALLOW}
        name = step.__name__
        out[name] = error(lambda: trained(root / name, labelled(16), 2, 2, model=own(Named), **given))  # noqa: B023
    return out
