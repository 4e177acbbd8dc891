"""Rules: over which axes of a mesh each parameter is split, and every array that has a parameter's path and shape.

For each parameter the first of these that applies: a rule of the user's, a rule of the net for the axis `tensor`, the
one split that was given for the whole model, the largest dimension that the axis `fsdp` divides; else it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import PartitionSpec

from nnx_jax.core.errors import ConfigError, nearest

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
"""Axes that a rule may name on any mesh: on one without such an axis they split nothing."""

NOTHING = PartitionSpec()
"""Whole on every device."""
Rules = tuple[tuple[str, PartitionSpec], ...]
"""Glob patterns of parameter paths, and the axes of each dimension; the first that matches counts."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters by path."""


def as_rules(rules: Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> Rules:
    """Rules from a mapping of patterns to lists such as `[None, "tensor"]`, or from pairs of them."""
    pairs: Any = rules.items() if isinstance(rules, Mapping) else rules or ()
    return tuple((pattern, _pspec(entries)) for pattern, entries in pairs)


def _pspec(entries: Any) -> PartitionSpec:
    if isinstance(entries, PartitionSpec):
        return entries
    found = (entries,) if isinstance(entries, str) or entries is None else entries
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list | tuple) else entry for entry in found))


def check_rules(rules: Rules, axes: Mapping[str, int], *, path: str = "sharding") -> None:
    """Refuse a rule that no mesh of these axes can follow, whatever the parameters are.

    Raises:
        ConfigError: an axis that is not there, or one that is named twice.
    """
    known = [*dict.fromkeys((*axes, *AXES))]
    for pattern, entries in rules:
        used = [axis for entry in entries for axis in _axes_of(entry)]
        for axis in used:
            if axis not in known:
                told = f"the axes are {', '.join(known)}"
                raise ConfigError(f"'{pattern}' names the axis '{axis}'; {told}{nearest(axis, known)}", path=path)
            if used.count(axis) > 1:
                message = f"'{pattern}' names the axis '{axis}' {used.count(axis)} times; an axis splits one dimension"
                raise ConfigError(message, path=path)


def resolve(
    shapes: Shapes,
    axes: Mapping[str, int],
    *,
    rules: Rules = (),
    net: Rules = (),
    fallback: PartitionSpec = NOTHING,
) -> dict[str, PartitionSpec]:
    """Over which axes each parameter is split, by path.

    Args:
        shapes: of all parameters, trained and frozen.
        axes: sizes of the mesh's axes.
        rules: the user's.
        net: those of the net, for the axis `tensor`; with an axis `fsdp` the largest of the other dimensions that it
            divides is split too.
        fallback: of what no rule matches, if it is not empty; not of arrays with fewer dimensions.

    Raises:
        ConfigError: a size that an axis does not divide, more entries than dimensions, a pattern of the user's that
            matches nothing, or an axis `tensor` that splits nothing.
    """
    for pattern, _ in rules:
        if not any(fnmatchcase(path, pattern) for path in shapes):
            raise ConfigError(f"'{pattern}' matches no parameter{nearest(pattern, list(shapes))}", path="sharding")
    found = {path: _of(path, tuple(shape), axes, rules, net, fallback) for path, shape in shapes.items()}
    if axes.get(TENSOR, 1) > 1 and not any(TENSOR in _named(entries) for entries in found.values()):
        raise ConfigError(
            f"{TENSOR}: {axes[TENSOR]} splits nothing, since the net has no rule for that axis; name the parameters it "
            f'splits, as in sharding: {{"{_example(shapes)}": [null, {TENSOR}]}}, or write {FSDP}: {axes[TENSOR]}',
            path="mesh",
        )
    return found


def _of(
    path: str, shape: tuple[int, ...], axes: Mapping[str, int], rules: Rules, net: Rules, fallback: PartitionSpec
) -> PartitionSpec:
    for pattern, entries in rules:
        if fnmatchcase(path, pattern):
            _check(path, shape, entries, axes, f"the rule '{pattern}'", "write null there")
            return _trimmed(entries, axes)
    taken = NOTHING
    for pattern, entries in net if axes.get(TENSOR, 1) > 1 else ():
        if fnmatchcase(path, pattern):
            keep = f'keep it whole by sharding: {{"{path}": []}}'
            _check(path, shape, entries, axes, "the net's rule", f"change the net's size, or {keep}")
            taken = _trimmed(entries, axes)
            break
    if fallback and not taken and len(shape) >= len(fallback):
        _check(path, shape, fallback, axes, "model_pspec", "give rules")
        return _trimmed(fallback, axes)
    return _with_fsdp(shape, taken, axes[FSDP]) if axes.get(FSDP, 1) > 1 else taken


def _with_fsdp(shape: tuple[int, ...], taken: PartitionSpec, size: int) -> PartitionSpec:
    """The same with the largest free dimension that `size` divides split over `fsdp`; the first of equal ones."""
    entries = [*taken, *[None] * (len(shape) - len(taken))]
    free = [at for at, length in enumerate(shape) if entries[at] is None and length and length % size == 0]
    if not free:
        return taken
    entries[max(free, key=lambda at: (shape[at], -at))] = FSDP
    return _trimmed(entries, {FSDP: size, TENSOR: 2})


def _check(
    path: str, shape: tuple[int, ...], entries: PartitionSpec, axes: Mapping[str, int], whose: str, instead: str
) -> None:
    if len(entries) > len(shape):
        raise ConfigError(
            f"{whose} has {len(entries)} entries, but '{path}' has shape {list(shape)}; write {len(shape)} or fewer",
            path="sharding",
        )
    for at, entry in enumerate(entries):
        size = math.prod(axes.get(axis, 1) for axis in _axes_of(entry))
        whole, rest = divmod(shape[at], size)
        if rest:
            over = " and ".join(f"'{axis}'" for axis in _axes_of(entry))
            raise ConfigError(
                f"{whose} splits dimension {at} of '{path}', shape {list(shape)}, over {over}, and {size} does not "
                f"divide {shape[at]} ({shape[at]} = {size} x {whole} + {rest}); choose sizes that do, or {instead}",
                path="sharding",
            )


def _trimmed(entries: Iterable[Any], axes: Mapping[str, int]) -> PartitionSpec:
    """Without axes of one device and without what stands at the end for nothing: equal splits are equal values."""
    kept: list[Any] = []
    for entry in entries:
        names = tuple(axis for axis in _axes_of(entry) if axes.get(axis, 1) > 1)
        kept.append(None if not names else names[0] if len(names) == 1 else names)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def without(entries: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """The same split without these axes."""
    gone = set(axes)
    kept = {axis: 2 for entry in entries for axis in _axes_of(entry) if axis not in gone}
    return _trimmed(entries, kept)


def _axes_of(entry: Any) -> tuple[str, ...]:
    """Axes of one dimension."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _named(entries: PartitionSpec) -> set[str]:
    return {axis for entry in entries for axis in _axes_of(entry)}


def _example(shapes: Shapes) -> str:
    matrices = [path for path, shape in shapes.items() if len(shape) > 1]
    return next(iter(matrices or shapes), "*.kernel")


# -- arrays that have a parameter's path and shape ------------------------------------------------------------------


def parameter_of(path: str, shape: tuple[int, ...], shapes: Shapes, separator: str) -> str | None:
    """The parameter that the end of a path names, where the shape is its too: `opt_state/0/mu/w` is of `w`."""
    for end in _ends(path, separator):
        if shapes.get(end) == shape:
            return end
    return None


def _ends(path: str, separator: str) -> Iterator[str]:
    """The path, and each part of it that follows a separator; the longest first."""
    yield path
    at = path.find(separator)
    while at >= 0:
        yield path[at + 1 :]
        at = path.find(separator, at + 1)


def tree_shapes(tree: Any, separator: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a tree by path; what has no shape is left out."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    shaped = [(path, leaf) for path, leaf in named if hasattr(leaf, "shape")]
    key = jax.tree_util.keystr
    return {key(path, simple=True, separator=separator): tuple(leaf.shape) for path, leaf in shaped}


def shardings_for(tree: Any, spec: Any, *, params: Any = None) -> Any:
    """A NamedSharding for every array of a tree, such as a model of dataclasses, lists and mappings, or its optimizer.

    An array of `tree` that has the path's end and the shape of a parameter (`0.mu.layers.1.weight` of
    `layers.1.weight`) lies like it; every other one is whole on every device.

    Args:
        tree: arrays, or anything with their shapes; leaves without a shape get None.
        spec: a ShardingSpec.
        params: the tree of the parameters; default: `tree` itself.

    Returns:
        A tree of the same structure, for `jax.device_put`, `jax.jit(out_shardings=)` or a restore.

    Raises:
        ConfigError: see `resolve`.
    """
    shapes = tree_shapes(tree if params is None else params, ".")
    found = spec.params(shapes)

    def place(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return None
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        owner = parameter_of(name, tuple(leaf.shape), shapes, ".")
        return spec.whole if owner is None else found[owner]

    return jax.tree_util.tree_map_with_path(place, tree)
