"""An Equinox module as a pure function of named leaves: called row by row under vmap, its State as model_state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ModelError
from nnx_jax.core.precision import in_full_precision
from nnx_jax.engines import double
from nnx_jax.engines.equinox_net import Arrays, EquinoxNet, load_equinox
from nnx_jax.engines.equinox_norm import with_rows
from nnx_jax.engines.nnx_forward import matching


class PureEquinox:
    """The parts of an Equinox module that a step needs; the interface of `nnx_forward.PureModule`.

    A module is called with one row x [...], under `jax.vmap` over the rows of the batch. Where its `__call__` has a
    parameter `key`, every row gets a key of its own, which depends on the row's place in the global batch alone. One
    with state is called as `module(x, state)` and returns (output, state). The mapped axis has the name its BatchNorms
    have, else "batch". One whose class says `takes_batch = True` is called once, with the whole batch.

    Leaves of floats are trained. All others (integers, bools, random keys, what `freeze` matches) are in `frozen`.

    Args:
        net: the module and its State.
        freeze: glob patterns of leaves that are not trained.
        compute_dtype: what float leaves and inputs are cast to for the forward pass, but inside `full_precision()`
            around a call of the whole module. BatchNorms compute in float32 at least. With float64 all leaves and state
            are float64.
        keep_float32: glob patterns of leaves that are not cast.
        mask_rows: batches may hold padded rows, so BatchNorm statistics must leave them out.

    Attributes:
        params, frozen, model_state: name -> array.
        held: all of them as the module holds them.
        batch_norms: names of the BatchNorms.
        row_axes: axes of one row x, once the data is known; with as many, an opened net is called with one row.

    Raises:
        ModelError: nothing is left to train, a pattern matches nothing, a complex leaf would be trained, or BatchNorms
            have different axes.
        ConfigError: float64 in a process whose JAX has no 64-bit numbers.
    """

    def __init__(
        self,
        net: EquinoxNet,
        *,
        freeze: Sequence[str] = (),
        compute_dtype: Any = jnp.float32,
        keep_float32: Sequence[str] = (),
        mask_rows: bool = False,
    ) -> None:
        self.compute_dtype, self.mask_rows = jnp.dtype(compute_dtype), mask_rows
        double.check_enabled(self.compute_dtype)
        self._like = EquinoxNet.of(net)
        named, self.model_state = net.arrays(), net.state_arrays()
        self.held = {**named, **self.model_state}
        if self.compute_dtype == jnp.float64:
            named, self.model_state = double.widened(named), double.widened(self.model_state)
        chosen = matching(freeze, named)
        self._trains = {name: _is_float(value) and name not in chosen for name, value in named.items()}
        self._check(named, chosen)
        self.params = {name: value for name, value in named.items() if self._trains[name]}
        self.frozen = {name: value for name, value in named.items() if not self._trains[name]}
        norms = net.layers(load_equinox().nn.BatchNorm)
        self.batch_norms = list(norms)
        self.row_axes: int | None = None
        self.takes_batch = bool(getattr(type(net.module), "takes_batch", False))
        self.takes_key = "key" in inspect.signature(type(net.module).__call__).parameters
        self.axis = self._axis(norms)
        self._kept = matching((*keep_float32, *(f"{name}.*" for name in norms if _has_leaves(name, named))), named)

    def forward(
        self, params: Mapping[str, Any], model_state: Mapping[str, Any], batch: Mapping[str, Any], key: Any, train: bool
    ) -> tuple[Any, Arrays]:
        """Return (outputs, new model_state) for `batch["x"]`; `params` holds trained and frozen leaves.

        Outputs of 16 bits become float32. `key` None is a fixed one, for an evaluation, where layers draw nothing.
        """
        net = self.opened(params, model_state, key, train=train)
        with self.masked(net, batch.get("mask"), train=train):
            outputs = net(batch if self.takes_batch else batch["x"])
        return outputs, self.closed(net, model_state)[1]

    def opened(self, params: Mapping[str, Any], model_state: Mapping[str, Any], key: Any, *, train: bool) -> OpenedNet:
        """The module with these leaves, to be called with rows; for this trace alone."""
        kind = OpenedForBatches if self.takes_batch else OpenedNet
        return kind(self, {**params, **model_state}, key, train=train)

    def closed(self, net: OpenedNet, like: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        """(leaves of the module, model_state) of a net from `opened`, the state in the dtypes of `like`."""
        state = EquinoxNet(self._like.module, net.state).state_arrays()
        return net.leaves, {name: state[name].astype(old.dtype) for name, old in like.items()}

    @contextmanager
    def masked(self, net: OpenedNet, mask: Any, *, train: bool) -> Iterator[None]:
        """While it is open, the net's BatchNorms leave out the rows that `mask` (float32 [B]) leaves out."""
        before, net.rows = net.rows, mask if train and self.mask_rows else None
        try:
            yield
        finally:
            net.rows = before

    def narrowed(self, batch: Mapping[str, Any]) -> Arrays:
        """The batch's columns in the type the model computes in; the mask as it is."""
        return {name: column if name == "mask" else self.narrow(column) for name, column in batch.items()}

    def narrow(self, x: Any) -> Any:
        """An input in the type the model computes in."""
        plain = self.compute_dtype == jnp.float32 or (self.compute_dtype != jnp.float64 and in_full_precision())
        return x if plain or not _is_float(x) else x.astype(self.compute_dtype)

    def write(self, net: EquinoxNet, params: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
        """Give `net`, which has this structure, copies of these leaves.

        Raises:
            ConfigError: a leaf is float64, in a process whose JAX has no 64-bit numbers.
        """
        leaves = {**{n: params[n] for n in self._trains}, **{n: model_state[n] for n in self.model_state}}
        for leaf in leaves.values():
            double.check_enabled(leaf.dtype)
        net.put(leaves)

    def assembled(self, leaves: Mapping[str, Any], *, train: bool) -> tuple[Any, Any]:
        """(module, state) of these leaves in its mode, with float leaves in the type the model computes in."""
        if self.compute_dtype in (jnp.bfloat16, jnp.float16):
            leaves = {**leaves, **{n: self.narrow(leaves[n]) for n in self._trains if n not in self._kept}}
        module, state = self._like.rebuilt(leaves)
        return load_equinox().nn.inference_mode(module, value=not train), state

    def _check(self, named: Mapping[str, Any], chosen: frozenset[str]) -> None:
        for name, value in named.items():
            if jnp.issubdtype(value.dtype, jnp.complexfloating) and name not in chosen:
                raise ModelError(
                    f"leaf '{name}' is complex, which optimizers do not train as it is meant; hold real and imaginary "
                    "part as two leaves, or freeze it"
                )
        if not any(self._trains.values()):
            raise ModelError("no parameter is left to train: every one is frozen; unfreeze some or add a layer")

    def _axis(self, norms: Mapping[str, Any]) -> Any:
        """The name of the axis that rows are mapped over."""
        given = [norm.axis_name for norm in norms.values()]
        names = {tuple(name) if isinstance(name, list | tuple) else (name,) for name in given}
        plain = {name[0] if len(name) == 1 else name for name in names}
        if self.takes_batch or not plain:
            return "batch"
        if len(plain) > 1 or isinstance(next(iter(plain)), tuple):
            raise ModelError(
                f"the BatchNorms of {self._like.called} are over the axes {sorted(map(str, plain))}; rows have one "
                "axis: give them all the same axis_name"
            )
        return plain.pop()


class OpenedNet:
    """An Equinox module within one trace: called with the rows of a batch, it keeps the state that comes out.

    It has the attributes of the module, so a penalty may read `net.layers[0].weight`.

    Attributes:
        module: the module itself, as it is called, with these weights.
        state: its State as it is by now; None without one.
        leaves: its arrays by name.
        rows: float32 [B], 0 on rows that its BatchNorms leave out; None: every row counts.
    """

    takes_batch = False

    def __init__(self, pure: PureEquinox, leaves: Arrays, key: Any, *, train: bool) -> None:
        self._pure, self._train, self._calls = pure, train, 0
        self.leaves = leaves
        self.state = pure.assembled(leaves, train=train)[1]
        self._key = jax.random.key(0) if key is None else key
        self.rows: Any = None

    @property
    def module(self) -> Any:
        return with_rows(self._pure.assembled(self.leaves, train=self._train)[0], self.rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def holding(self, leaves: Arrays) -> OpenedNet:
        """One like this with other leaves."""
        return type(self)(self._pure, leaves, self._key, train=self._train)

    def __call__(self, x: Any, key: Any = None) -> Any:
        """Return the outputs [B, ...] for rows x [B, ...]; outputs of 16 bits become float32.

        Every call draws noise of its own, from `key` where one is given. Where the data says how many axes a row has,
        one row may be given alone, so that `jax.vmap(net)(x)` is the same as `net(x)`; its noise is drawn from `key`,
        as the module itself would.

        Raises:
            ModelError: a module with state is called with one row, or does not return a pair (output, state).
        """
        pure, module, x = self._pure, self.module, self._pure.narrow(jnp.asarray(x))
        if x.ndim == pure.row_axes:
            return jax.tree.map(_to_float32, self._alone(module, x, key))
        keys = jax.random.split(self._next_key() if key is None else key, x.shape[0]) if pure.takes_key else None
        row = lambda x, key, state: self._one(module, x, key, state)  # noqa: E731
        mapped = jax.vmap(row, in_axes=(0, 0, None), out_axes=(0, None), axis_name=pure.axis)
        outputs, self.state = mapped(x, keys, self.state)
        return jax.tree.map(_to_float32, outputs)

    def _alone(self, module: Any, x: Any, key: Any) -> Any:
        """The output of one row."""
        if self.state is not None and self._train:
            raise ModelError(
                f"{type(module).__name__} has state, which is made of all rows of a batch; call the model with x "
                "[B, ...] instead of mapping it over rows"
            )
        return self._one(module, x, key, self.state)[0]

    def _next_key(self) -> jax.Array:
        self._calls += 1
        return self._key if self._calls == 1 else jax.random.fold_in(self._key, self._calls - 1)

    def _one(self, module: Any, x: Any, key: Any, state: Any) -> tuple[Any, Any]:
        """(output, state) of one call of the module."""
        named = {"key": key} if self._pure.takes_key else {}
        if state is None:
            return module(x, **named), None
        found = module(x, state, **named)
        if not isinstance(found, tuple) or len(found) != 2 or type(found[1]) is not type(state):
            raise ModelError(
                f"{type(module).__name__} has state, so it returns (output, state), not {type(found).__name__}"
            )
        return found


class OpenedForBatches(OpenedNet):
    """One whose module takes whole batches, a mapping of columns."""

    takes_batch = True

    def __call__(self, x: Any, key: Any = None) -> Any:
        key = self._next_key() if key is None else key
        outputs, self.state = self._one(self.module, self._pure.narrowed(x), key, self.state)
        return jax.tree.map(_to_float32, outputs)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _has_leaves(layer: str, named: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{layer}.") for name in named)


def _to_float32(value: Any) -> Any:
    if isinstance(value, jax.Array) and value.dtype in (jnp.bfloat16, jnp.float16):
        return value.astype(jnp.float32)
    return value
