"""TorchContext: what a hook sees and may change inside a microbatch under torch; the names are those of JAX's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nnx_jax.core.errors import HookTypeError, TraceBoundaryError
from nnx_jax.core.hooks import describe
from nnx_jax.torch import foreach
from nnx_jax.torch.hooks.space import Space
from nnx_jax.torch.hooks.trees import leaves, structure, tree_map
from nnx_jax.torch.hooks.window import all_finite

_WHEN = {
    "predictions": "from AFTER_FORWARD on",
    "loss": "from AFTER_LOSS on",
    "losses": "from AFTER_LOSS on",
    "weight": "from AFTER_LOSS on",
    "grads": "from AFTER_BACKWARD on",
    "micro_grads": "from AFTER_BACKWARD on",
    "zeroed": "from BEFORE_FORWARD on",
    "kept": "from AFTER_BACKWARD on",
    "has_rows": "from AFTER_BACKWARD on",
}
_ASSIGNABLE = {
    "batch": ("BEFORE_BATCH", "BEFORE_FORWARD"),
    "predictions": ("AFTER_FORWARD", "BEFORE_LOSS"),
    "loss": ("AFTER_LOSS", "BEFORE_BACKWARD", "DO_BACKWARD"),
    "grads": ("AFTER_BACKWARD", "BEFORE_OPTIMIZER_STEP", "DO_OPTIMIZER_STEP"),
    "params": ("DO_OPTIMIZER_STEP",),
    "state": None,
    "metrics": None,
    "stop": ("DO_OPTIMIZER_STEP",),
}


class TorchContext:
    """One microbatch; every value is there to be looked at.

    Attributes:
        batch: the microbatch's real rows by column, "mask" among them; replaceable up to BEFORE_FORWARD.
        params, frozen: the module's own parameters by name; a loss may be made of them.
        model_state: its buffers by name.
        predictions: outputs of the forward pass; with an objective, the outputs it gave.
        loss: float32 scalar, this microbatch's loss; with its derivative up to DO_BACKWARD, without it afterwards.
        losses: "total_loss", and by term `per_component_unweighted`, `per_component_weight`.
        weight: [terms], denominators of this microbatch.
        grads: tensors by parameter, see `step.context.StepContext`; None of them is the module's `.grad`.
        micro_grads: this microbatch's part alone.
        unscaled_grads: `grads` divided by the loss scale.
        state: the hook's own slot.
        batch_count, epoch_step_count, step_count, global_step_count, epoch: ints, before this microbatch.
        window_starts, window_closes, window_count, window_size, zeroed, has_rows, kept, scaled, stop, metrics: see
            there; bools and numbers, or scalars of the device.
        compute_dtype: what the model computes in.
        rng: a generator of this microbatch and this hook.
        xp: the array operations of built-in hooks, see `Space`.
    """

    def __init__(self, space: Space, **values: Any) -> None:
        self.__dict__.update(values, xp=space, _stage="", _lazy={}, _norm=None)
        self.__dict__.setdefault("metrics", {})
        self.__dict__.setdefault("stop", False)

    # -- for the executor --------------------------------------------------------------------------------------

    def enter(self, **values: Any) -> None:
        """Put values in."""
        for name in values:
            self.__dict__["_lazy"].pop(name, None)
        self.__dict__.update(values)

    def offer(self, **makers: Callable[[], Any]) -> None:
        """Values that are made when somebody asks for them."""
        for name in makers:
            self.__dict__.pop(name, None)
        self.__dict__["_lazy"].update(makers)

    def replaced(self, name: str) -> bool:
        """Whether a value is another one than what was offered."""
        return name not in self.__dict__["_lazy"]

    def slot(self, name: str) -> Any:
        """The state of the hook of this name."""
        return self.__dict__["slots"].get(name, ())

    # -- for hooks ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        lazy: Mapping[str, Callable[[], Any]] = self.__dict__.get("_lazy", {})
        if name in lazy:
            # It stays in `_lazy`: what was asked for is still what was offered.
            value = self.__dict__[name] = lazy[name]()
            return value
        if name == "rng":
            return self.__dict__["make_rng"](self.__dict__["hook_index"])
        if name in _WHEN:
            raise TraceBoundaryError(f"ctx.{name} is there {_WHEN[name]}; this is {self.__dict__.get('_stage')}")
        raise AttributeError(f"a microbatch's context has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ASSIGNABLE:
            raise TraceBoundaryError(f"ctx.{name} is read-only; a hook may replace {', '.join(_ASSIGNABLE)}")
        stages, stage = _ASSIGNABLE[name], self.__dict__["_stage"]
        owned = name == "grads" and stage == "DO_BACKWARD" and self.__dict__.get("owns")
        if stages is not None and stage not in stages and not owned:
            raise TraceBoundaryError(f"ctx.{name} may be replaced at {', '.join(stages)}; this is {stage}")
        if name == "params" and not self.__dict__.get("owns"):
            raise TraceBoundaryError("ctx.params may be replaced by the hook that owns DO_OPTIMIZER_STEP alone")
        if name == "loss":
            check_loss(value, self.__dict__.get("hook"), stage)
        elif name in ("grads", "params", "batch"):
            _check_like(name, value, getattr(self, name))
        self.enter(**{name: value})

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Parameters by model: of the single one under "main"."""
        return {"main": {**self.frozen, **self.params}}

    @property
    def unscaled_grads(self) -> Any:
        """`grads` divided by the loss scale."""
        scale = self.__dict__.get("loss_scale")
        return self.grads if scale is None else tree_map(lambda g: g / scale, self.grads)

    def global_norm(self, tree: Any = None) -> torch.Tensor:
        """Euclidean norm over every leaf, a scalar; of `grads` by default, computed once."""
        if tree is not None:
            return foreach.length(leaves(tree))
        kept, grads = self.__dict__["_norm"], self.grads
        if kept is None or kept[0] is not grads:
            kept = self.__dict__["_norm"] = (grads, self._length(grads))
        return kept[1]

    def _length(self, grads: Any) -> torch.Tensor:
        known = None if self.replaced("grads") else self.__dict__.get("known_norm")
        return foreach.length(leaves(grads)) if known is None else self.xp.asarray(known, torch.float32)

    def all_finite(self, tree: Any = None) -> torch.Tensor:
        """bool scalar: every element of `grads`, or of `tree`, is finite."""
        return all_finite(leaves(self.grads if tree is None else tree), self.xp.device)

    def constant(self, value: Any) -> Any:
        """`value` without its derivative."""
        return value.detach() if isinstance(value, torch.Tensor) else value

    def tree_map(self, function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """`function` on every leaf."""
        return tree_map(function, tree, *rest)

    def where(self, flag: Any, new: Any, old: Any) -> Any:
        """`new` where `flag`, else `old`, leaf by leaf."""
        return new if bool(flag) else old

    def when(self, flag: Any, make: Callable[[], Any], old: Any) -> Any:
        """`make()` if `flag`, else `old`."""
        return make() if bool(flag) else old


class Shown:
    """A microbatch as hooks that watch see it: copies, without derivatives."""

    def __init__(self, ctx: TorchContext) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return tree_map(_copied, getattr(self._ctx, name))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def check_flag(value: Any, hook: Any, stage: str) -> bool:
    """`value` if it is a bool, or a bool scalar of torch.

    Raises:
        HookTypeError: naming the hook and the stage.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim == 0:
        return bool(value)
    raise HookTypeError(
        f"{type(hook).__name__} returned proceed = {describe(value)} at {stage}; return True, False or a bool scalar "
        "of torch"
    )


def check_loss(value: Any, hook: Any, stage: str = "DO_BACKWARD") -> torch.Tensor:
    """`value` if it is a float scalar of torch.

    Raises:
        HookTypeError: naming the hook and the stage.
    """
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point():
        return value
    found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else describe(value)
    raise HookTypeError(
        f"{type(hook).__name__} returned loss = {found} at {stage}; return ctx.loss, or a float scalar made of it"
    )


def _check_like(name: str, new: Any, old: Any) -> None:
    if structure(new) != structure(old):
        raise TraceBoundaryError(f"ctx.{name} was replaced by another structure; keep its keys")
    for key in old if name != "batch" else ():
        if tuple(new[key].shape) != tuple(old[key].shape):
            told = f"became {list(new[key].shape)}, it is {list(old[key].shape)}"
            raise TraceBoundaryError(f"ctx.{name}[{key!r}] {told}")
