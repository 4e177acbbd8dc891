"""A Flax NNX module as a pure function of named leaves: split once, merged inside the program."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_jax.core.errors import ModelError, nearest
from nnx_jax.engines import autocast, double

Arrays = dict[str, jax.Array]

_ROW_MASK: ContextVar[jax.Array | None] = ContextVar("row_mask", default=None)


class PureModule:
    """The parts of a module that a step needs: names, leaves, and `forward`.

    Args:
        module: any Flax NNX module called as `module(x)`, or as `module(x, mask=mask)` when its `__call__` has a
            parameter of that name (float32 [B], 0 on padded rows); it is read, never changed. One whose class says
            `takes_batch = True` is called with the whole batch instead of x.
        freeze: glob patterns of parameter names that are not trained.
        compute_dtype: what layers compute in (`engines/autocast.py`). With float64 all parameters and state are
            float64, whatever the module holds; else they are as they are, and norms compute in float32.
        keep_float32: glob patterns of parameter names whose layers compute in float32 all the same.
        mask_rows: batches may hold padded rows, so BatchNorm statistics must leave them out.

    Attributes:
        params, frozen, model_state: name -> array; names are the module paths joined by dots.
        held: all of them as the module holds them.

    Raises:
        ModelError: no parameter is left to train, or a pattern matches nothing.
        ConfigError: float64 in a process whose JAX has no 64-bit numbers.
    """

    def __init__(
        self,
        module: nnx.Module,
        *,
        freeze: Sequence[str] = (),
        compute_dtype: Any = jnp.float32,
        keep_float32: Sequence[str] = (),
        mask_rows: bool = False,
    ) -> None:
        self.compute_dtype, self.mask_rows = jnp.dtype(compute_dtype), mask_rows
        double.check_enabled(self.compute_dtype)
        self._train_def, params, rng, rest = _split(_view(module, train=True))
        self._eval_def = _split(_view(module, train=False))[0]
        self._param_tree, named = _named(params)
        self._rng_tree, self._rng = _named(rng)
        self._rest_tree, self.model_state = _named(rest)
        self.held = {**named, **self.model_state}
        if self.compute_dtype == jnp.float64:
            named, self.model_state = double.widened(named), double.widened(self.model_state)
        self._param_names = tuple(named)
        frozen = matching(freeze, named)
        self.params = {name: value for name, value in named.items() if name not in frozen}
        self.frozen = {name: value for name, value in named.items() if name in frozen}
        if not self.params:
            raise ModelError("no parameter is left to train: every one is frozen; unfreeze some or add a layer")
        self._takes_batch = bool(getattr(type(module), "takes_batch", False))
        self._takes_mask = "mask" in inspect.signature(type(module).__call__).parameters
        self._kept = matching(keep_float32, named)
        self.batch_norms = [_name(path) for path, part in nnx.iter_modules(module) if isinstance(part, nnx.BatchNorm)]

    def forward(
        self, params: Arrays, model_state: Arrays, batch: Mapping[str, jax.Array], key: jax.Array | None, train: bool
    ) -> tuple[Any, Arrays]:
        """Return (outputs, new model_state) for `batch["x"]`; `params` holds trained and frozen leaves.

        Outputs of 16 bits become float32. `key` seeds every stream of the module for this call alone, so nothing
        depends on how often it was called.
        """
        module = self.opened(params, model_state, key, train=train)
        seen: Any = self.narrowed(batch) if self._takes_batch else self._narrow(batch["x"])
        outputs = self._call(module, seen, batch.get("mask"), train)
        return jax.tree.map(_to_float32, outputs), self.closed(module, model_state)[1]

    def opened(self, params: Arrays, model_state: Arrays, key: jax.Array | None, *, train: bool) -> nnx.Module:
        """A module of these leaves, for this trace alone; `key` seeds its streams."""
        module = nnx.merge(
            self._train_def if train else self._eval_def,
            _tree(self._param_tree, [params[name] for name in self._param_names]),
            _tree(self._rng_tree, self._streams(key)),
            _tree(self._rest_tree, [model_state[name] for name in self.model_state]),
            copy=True,
        )
        if self.compute_dtype == jnp.float64:
            autocast.widen(module)
        elif self.compute_dtype != jnp.float32:
            autocast.lower(module, self.compute_dtype, self._kept)
        return module

    def closed(self, module: nnx.Module, like: Arrays) -> tuple[Arrays, Arrays]:
        """(parameters, model_state) of a module from `opened`, the state in the dtypes of `like`.

        What a forward pass adds (`sow`) is not state of the model and is left behind.
        """
        _, params, _, rest = _split(module)
        found, new_state = _named(params)[1], _named(rest)[1]
        state = {name: new_state[name].astype(old.dtype) for name, old in like.items()}
        return {name: found[name] for name in self._param_names}, state

    def narrowed(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch's columns in the type the model computes in; the mask as it is."""
        return {name: column if name == "mask" else self._narrow(column) for name, column in batch.items()}

    def masked(self, module: nnx.Module, mask: jax.Array | None, *, train: bool) -> AbstractContextManager[None]:
        """While it is open, the module's BatchNorms leave out the rows that `mask` (float32 [B]) leaves out."""
        return _masking(module, mask if train and self.mask_rows and self.batch_norms else None)

    def _narrow(self, x: jax.Array) -> jax.Array:
        """An input in the type the model computes in."""
        if self.compute_dtype != jnp.float32 and jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(self.compute_dtype)
        return x

    def _call(self, module: nnx.Module, x: Any, mask: jax.Array | None, train: bool) -> Any:
        """A module that takes the row mask gets it; of any other, the BatchNorms leave masked rows out."""
        if self._takes_mask:
            return module(x, mask=mask)  # pyright: ignore[reportCallIssue]
        with self.masked(module, mask, train=train):
            return module(x)  # pyright: ignore[reportCallIssue]

    def write(self, module: nnx.Module, params: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
        """Put copies of these leaves into `module`, which has this module's structure.

        Raises:
            ConfigError: a leaf is float64, in a process whose JAX has no 64-bit numbers.
        """
        leaves = {**{name: params[name] for name in self._param_names}, **{n: model_state[n] for n in self.model_state}}
        for leaf in leaves.values():
            double.check_enabled(leaf.dtype)
        _write(module, leaves)

    def _streams(self, key: jax.Array | None) -> list[jax.Array]:
        leaves = []
        for index, (_, like) in enumerate(self._rng.items()):
            if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
                leaves.append(jnp.zeros(like.shape, like.dtype))
            elif key is None:
                leaves.append(like)
            else:
                stream = jax.random.fold_in(key, index)
                leaves.append(jax.random.split(stream, like.shape) if like.shape else stream)
        return leaves


class ModuleCopies:
    """Copies of one module that hold other weights: what `EMAHook.attach` takes."""

    def __init__(self, module: nnx.Module) -> None:
        self.module = module

    def copy(self, key: str) -> nnx.Module:
        """A copy that shares no array with the module."""
        return nnx.clone(self.module)

    def write(self, key: str, module: nnx.Module, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Put copies of these arrays into a copy; what is not named keeps its value."""
        _write(module, {**params, **buffers})


def matching(patterns: Sequence[str], names: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that a glob pattern matches; a pattern without a wildcard also takes everything below it.

    Raises:
        ModelError: a pattern that matches nothing, with the nearest name.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = {n for n in names if fnmatch.fnmatchcase(n, pattern) or n.startswith(f"{pattern}.")}
        if not hits:
            raise ModelError(f"pattern {pattern!r} matches no parameter{nearest(pattern, names)}")
        found |= hits
    return frozenset(found)


def copy_leaves(named: Mapping[str, jax.Array]) -> Arrays:
    """Copies of the leaves, so that donating them never deletes the user's arrays."""
    return {name: jnp.array(value, copy=True) for name, value in named.items()}


def variables_of(module: nnx.Module) -> dict[str, nnx.Variable[Any]]:
    """The module's own variables by name, parameters and model_state; not its random streams."""
    return {_name(path): variable for path, variable in nnx.to_flat_state(nnx.state(module, (nnx.Param, _not_rng)))}


def _write(module: nnx.Module, named: Mapping[str, Any]) -> None:
    for name, variable in variables_of(module).items():
        if name in named:
            variable.set_value(jnp.array(named[name], copy=True))


def evaluating(module: nnx.Module) -> nnx.Module:
    """A view of the module in evaluation mode: no dropout, BatchNorm by its running statistics."""
    return _view(module, train=False)


def _view(module: nnx.Module, *, train: bool) -> nnx.Module:
    flags = {"deterministic": not train, "use_running_average": not train}
    return nnx.view(module, raise_if_not_found=False, **flags)


def _split(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    graphdef, params, rng, *rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return graphdef, params, rng, rest[0]


def _not_rng(path: Any, variable: Any) -> bool:
    return not isinstance(variable, nnx.RngState)


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in path)


def _named(state: Any) -> tuple[Any, Arrays]:
    """Return the state's treedef and its leaves by name, in the treedef's order."""
    leaves, tree = jax.tree.flatten(state)
    names = [_name(path) for path, _ in nnx.to_flat_state(state)]
    if len(names) != len(leaves):
        raise ModelError("every nnx.Variable of the module must hold exactly one array")
    return tree, dict(zip(names, (leaf if _is_kept(leaf) else jnp.asarray(leaf) for leaf in leaves), strict=True))


def _is_kept(leaf: Any) -> bool:
    """A key, or the shape of what a dry run does not make."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _tree(tree: Any, leaves: list[Any]) -> Any:
    return jax.tree.unflatten(tree, leaves)


def _to_float32(value: Any) -> Any:
    if isinstance(value, jax.Array) and value.dtype in (jnp.bfloat16, jnp.float16):
        return value.astype(jnp.float32)
    return value


@cache
def _masked(norm: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """A subclass whose statistics leave out the rows the current batch masks (case E03)."""

    named = list(inspect.signature(norm.__call__).parameters)[2:]  # after self and x; a norm may take its mask by place

    class MaskedBatchNorm(norm):
        def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            rows, given = _ROW_MASK.get(), {**dict(zip(named, args, strict=False)), **kwargs}
            if given.pop("mask", None) is not None or rows is None:
                return super().__call__(x, *args, **kwargs)
            if x.shape[0] != rows.shape[0]:
                raise ModelError(
                    f"BatchNorm sees {x.shape[0]} leading rows but the batch has {rows.shape[0]}, so padded rows "
                    "cannot be left out; use data.tail: drop, keep the batch axis first, or call the model view by view"
                )
            some, before = jnp.any(rows > 0), (self.mean[...], self.var[...])
            real = ((rows > 0) | ~some).reshape((-1,) + (1,) * (x.ndim - 1))
            outputs = super().__call__(x, mask=real, **given)
            for variable, old in zip((self.mean, self.var), before, strict=True):
                variable[...] = jnp.where(some, variable[...], old)  # a batch without a row leaves them as they are
            return outputs

    return MaskedBatchNorm


@contextmanager
def _masking(module: nnx.Module, mask: jax.Array | None) -> Iterator[None]:
    """Let the BatchNorms of a freshly merged module leave out masked rows."""
    if mask is None:
        yield
        return
    norms = [part for _, part in nnx.iter_modules(module) if isinstance(part, nnx.BatchNorm)]
    classes = [type(norm) for norm in norms]
    token = _ROW_MASK.set(mask)
    try:
        for norm, own in zip(norms, classes, strict=True):
            norm.__class__ = _masked(own)
        yield
    finally:
        _ROW_MASK.reset(token)
        for norm, own in zip(norms, classes, strict=True):
            norm.__class__ = own
