"""StepContext: what a hook sees and may change while the step is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import TraceBoundaryError
from nnx_jax.optim.clip import square_sums
from nnx_jax.step.gates import Flag, check_loss, pick
from nnx_jax.step.window import only_if

_WHEN = {
    "predictions": "from AFTER_FORWARD to BEFORE_BACKWARD",
    "loss": "from AFTER_LOSS on",
    "losses": "from AFTER_LOSS on",
    "grads": "from AFTER_BACKWARD on",
    "micro_grads": "at AFTER_BACKWARD",
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


class StepContext:
    """One microbatch inside the step; every array in it is traced.

    Attributes:
        batch: the microbatch's columns by name, "mask" among them; replaceable up to BEFORE_FORWARD.
        params, frozen: arrays by path; after the update from AFTER_OPTIMIZER_STEP on.
        model_state: what the forward pass keeps (BatchNorm statistics).
        predictions: outputs of the forward pass.
        loss: float32 scalar, this microbatch's loss: terms divided by this microbatch's own denominators.
        losses: "total_loss", and by term `per_component_unweighted`, `per_component_weight`.
        weight: float32 [terms], denominators of this microbatch.
        grads: float32 tree; at AFTER_BACKWARD and BEFORE_OPTIMIZER_STEP the window's gradient so far, divided by the
            weight seen so far (the sum of the microbatches' means where the accumulation hook says "mean" or "sum")
            and still multiplied by what DO_BACKWARD multiplied the loss with; at DO_OPTIMIZER_STEP what the update will
            use.
        micro_grads: this microbatch's part alone, same scale.
        unscaled_grads: `grads` divided by the loss scale.
        state: the hook's own slot.
        batch_count, epoch_step_count, step_count, global_step_count, epoch: int32 scalars before this microbatch.
        window_starts, window_closes: whether it is the first, the last microbatch of an accumulation window.
        window_count, window_size: the microbatch's place in its window, int32 from 1, and a full window's length.
        zeroed: whether the accumulator starts from zero with this microbatch: what BEFORE_BATCH decided.
        has_rows: bool; some term of the loss has a valid target in this microbatch. From AFTER_BACKWARD on.
        kept: whether every `keeps_microbatch` let this microbatch into its window. From AFTER_BACKWARD on.
        scaled: whether a hook multiplies the loss with a scale; a Python bool.
        stop: bool; set, it is a veto, the step updates nothing more, and the host raises VetoError.
        metrics: the place to report "grad_norm", the norm before clipping, which the record then shows.
        compute_dtype: dtype of the matrix products.
        rng: a key of this microbatch and this hook.
        xp: the array module, here `jax.numpy`.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
        self.__dict__.setdefault("metrics", {})
        self.__dict__.setdefault("stop", False)
        self.__dict__.update(_stage="", _squares=None)

    xp = jnp

    def enter(self, **values: Any) -> None:
        """Put values in, on the step's own behalf."""
        self.__dict__.update(values)

    def fork(self, **values: Any) -> StepContext:
        """A context of its own for the differentiated function, whose values must not leak."""
        made = StepContext(**{name: value for name, value in self.__dict__.items() if not name.startswith("_")})
        made.__dict__.update(slots=dict(self.__dict__["slots"]), metrics=dict(self.metrics), **values)
        return made

    def carried(self, *names: str) -> dict[str, Any]:
        """The named values, to leave the differentiated function with."""
        return {name: self.__dict__[name] for name in names}

    def slot(self, name: str) -> Any:
        """The state of the hook of this name in `TrainState.slots`."""
        return self.__dict__["slots"].get(name, ())

    def __getattr__(self, name: str) -> Any:
        if name == "rng":
            return self.__dict__["make_rng"](self.__dict__["hook_index"])
        if name == "micro_grads" and "make_micro" in self.__dict__:
            return self.__dict__["make_micro"]()
        if name in _WHEN:
            raise TraceBoundaryError(f"ctx.{name} is there {_WHEN[name]}; this is {self.__dict__.get('_stage')}")
        raise AttributeError(f"the step's context has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ASSIGNABLE:
            raise TraceBoundaryError(f"ctx.{name} is read-only; a hook may replace {', '.join(_ASSIGNABLE)}")
        stages = _ASSIGNABLE[name]
        owned = name == "grads" and self._stage == "DO_BACKWARD" and name in self.__dict__
        if stages is not None and self._stage not in stages and not owned:
            raise TraceBoundaryError(f"ctx.{name} may be replaced at {', '.join(stages)}; this is {self._stage}")
        if name == "params" and not self.__dict__.get("owns"):
            raise TraceBoundaryError("ctx.params may be replaced by the hook that owns DO_OPTIMIZER_STEP alone")
        if name == "loss":
            check_loss(value, self.__dict__.get("hook"), self._stage)
        elif name in ("grads", "params", "batch", "predictions"):
            _check_like(name, value, self.__dict__.get(name))
        self.__dict__[name] = value

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Parameters by model: of a single model under "main"."""
        groups = self.__dict__.get("model_keys") or ()
        if not groups:
            return {"main": {**self.frozen, **self.params}}
        both = {**self.frozen, **self.params}
        return {k: {n.removeprefix(f"{k}."): v for n, v in both.items() if n.startswith(f"{k}.")} for k in groups}

    @property
    def unscaled_grads(self) -> Any:
        """`grads` divided by the loss scale."""
        scale = self.__dict__.get("loss_scale")
        return self.grads if scale is None else jax.tree.map(lambda g: g / scale, self.grads)

    def global_norm(self, tree: Any = None) -> jax.Array:
        """Euclidean norm over every leaf, float32 scalar; of `grads` by default, computed once."""
        if tree is not None:
            return jnp.sqrt(jnp.sum(square_sums(tree)))
        return jnp.sqrt(jnp.sum(self.squares()))

    def squares(self) -> jax.Array:
        """Sums of squares of the leaves of `grads`, float32 [leaves]; computed once for the same gradient."""
        kept = self.__dict__["_squares"]
        if kept is None or kept[0] is not self.grads:
            kept = self.__dict__["_squares"] = (self.grads, square_sums(self.grads))
        return kept[1]

    def all_finite(self, tree: Any = None) -> jax.Array:
        """bool scalar: every element of `grads`, or of `tree`, is finite."""
        leaves = jax.tree.leaves(self.grads if tree is None else tree)
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))

    def constant(self, value: Any) -> Any:
        """`value` without its derivative; where values are concrete, a number that Python can read and print."""
        return jax.lax.stop_gradient(value)

    def tree_map(self, function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """`function` on every leaf."""
        return jax.tree.map(function, tree, *rest)

    def where(self, flag: Flag, new: Any, old: Any) -> Any:
        """`new` where `flag`, else `old`, leaf by leaf; both are computed."""
        return pick(flag, new, old)

    def when(self, flag: Flag, make: Callable[[], Any], old: Any) -> Any:
        """`make()` if `flag`, else `old`; nothing is computed where that can be known, or on a CPU."""
        return only_if(flag, make, old)


def _check_like(name: str, new: Any, old: Any) -> None:
    if old is None or name == "predictions":
        return
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TraceBoundaryError(f"ctx.{name} was replaced by another structure; keep its keys")
    for path, leaf in jax.tree_util.tree_leaves_with_path(old):
        found = new
        for key in path:
            found = found[key.key] if hasattr(key, "key") else found[key.idx]
        if name != "batch" and jnp.shape(found) != leaf.shape:
            where = jax.tree_util.keystr(path)
            raise TraceBoundaryError(f"ctx.{name}{where} became {list(jnp.shape(found))}, it is {list(leaf.shape)}")
