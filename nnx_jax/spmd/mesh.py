"""ShardingSpec: a mesh of devices and what lies where on it; and the mesh that a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.spmd.rules import (
    AXES,
    DATA,
    FSDP,
    Rules,
    Shapes,
    as_rules,
    check_rules,
    parameter_of,
    resolve,
    without,
)

ROW_AXES = (DATA, FSDP)
"""The axes over which the rows of a batch are split, all of them together."""


@dataclass(frozen=True)
class ShardingSpec:
    """Where the arrays of a step lie. Equal values place equally.

    Attributes:
        mesh: devices by named axis; its axes become automatic, which is what the compiler places collectives for.
        model_pspec: of parameters that no rule matches and that have as many dimensions, and of everything that has
            such a parameter's path and shape.
        data_pspec: of a batch's leading axis.
        rules: glob patterns of parameter paths to the axes of each dimension, `{"*.kernel": [None, "tensor"]}` or
            pairs; the first that matches counts. What neither they nor `model_pspec` split is split over an axis `fsdp`
            of the mesh, or else whole on every device.
        net_rules: of a built-in net, for an axis `tensor` of the mesh; they come after `rules`.

    Raises:
        ConfigError: a rule names an axis that the mesh does not have, or one twice.
    """

    mesh: Mesh
    model_pspec: PartitionSpec = PartitionSpec()
    data_pspec: PartitionSpec = PartitionSpec(DATA)
    rules: Rules = ()
    net_rules: Rules = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if set(self.mesh.axis_types) != {AxisType.Auto}:
            auto = (AxisType.Auto,) * len(self.mesh.axis_names)
            object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=auto))
        for name in ("rules", "net_rules"):
            object.__setattr__(self, name, as_rules(getattr(self, name)))
            check_rules(getattr(self, name), self.mesh.shape)
        for name in ("model_pspec", "data_pspec"):
            check_rules(((name, getattr(self, name)),), self.mesh.shape, path=name)
        missing = [axis for axis in AXES if axis not in self.mesh.shape]
        object.__setattr__(self, "data_pspec", without(self.data_pspec, missing))

    @property
    def parts(self) -> int:
        """Parts that a batch is cut into."""
        return math.prod(self.mesh.shape[name] for name in self.row_axes)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes over which a batch's rows are split."""
        names = self.data_pspec[0] if len(self.data_pspec) else ()
        return (names,) if isinstance(names, str) else tuple(names or ())

    @property
    def replicates(self) -> bool:
        """Every device holds the whole model, and rows are all that is split."""
        return not (self.rules or self.model_pspec) and set(self.mesh.axis_names) == set(self.row_axes) <= {DATA}

    @property
    def whole(self) -> NamedSharding:
        """Of what every device holds all of: counters, records, sums."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Of a batch: [B, ...]."""
        return NamedSharding(self.mesh, self.data_pspec)

    @property
    def stacked(self) -> NamedSharding:
        """Of several batches in one array: [n, B, ...]."""
        return NamedSharding(self.mesh, PartitionSpec(None, *self.data_pspec))

    def padded(self, rows: int) -> int:
        """The next number of rows that can be cut into equal parts."""
        return -(-rows // self.parts) * self.parts

    def params(self, shapes: Shapes) -> dict[str, NamedSharding]:
        """Of parameters of these shapes, by path; see `rules.resolve`.

        Raises:
            ConfigError: a rule does not fit.
        """
        found = resolve(shapes, self.mesh.shape, rules=self.rules, net=self.net_rules, fallback=self.model_pspec)
        return {path: NamedSharding(self.mesh, entries) for path, entries in found.items()}

    def leaves(
        self, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], spread: Sequence[str] = ()
    ) -> list[NamedSharding]:
        """Of the leaves of a training state, by their names such as `params/w` and `opt_state/inner/0/mu/w`.

        Args:
            spread: prefixes of the names of leaves that have a part of their own on each device.
        """
        owned = {
            path.partition("/")[2]: tuple(shape)
            for path, shape in zip(paths, shapes, strict=True)
            if path.startswith(("params/", "frozen/"))
        }
        found = self.params(owned)

        def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
            if spread and path.startswith(tuple(spread)):
                return self.rows
            owner = parameter_of(path, tuple(shape), owned, "/")
            return self.whole if owner is None else found[owner]

        return [place(path, shape) for path, shape in zip(paths, shapes, strict=True)]

    def gathered(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Traced parameters as a forward pass uses them: put together over the axes that split rows.

        Each device then multiplies its own rows with whole weights, as if the model were on every device; the gradient
        goes back to where the parameter lies.
        """
        places = self.params({name: tuple(value.shape) for name, value in params.items()})
        found = dict(params)
        for name, place in places.items():
            used = without(place.spec, self.row_axes)
            if used != place.spec:
                # Twice, because the gradient runs through it backwards: it is reduced, then cut.
                held = jax.lax.with_sharding_constraint(params[name], place)
                found[name] = jax.lax.with_sharding_constraint(held, NamedSharding(self.mesh, used))
        return found

    def geometry(self) -> dict[str, Any]:
        """What a run's state was split over, as JSON: the sizes of the axes."""
        return {"axes": {str(name): int(size) for name, size in self.mesh.shape.items()}}

    def placing(self) -> list[Any]:
        """The rules as JSON, (pattern, axes) in their order: what splits the parameters, beside the sizes of axes."""
        pairs = [*self.rules, *([("*", self.model_pspec)] if self.model_pspec else [])]
        return [
            [pattern, [list(each) if isinstance(each, tuple) else each for each in axes]] for pattern, axes in pairs
        ]


def make_sharding(
    sizes: Mapping[str, int],
    devices: Sequence[Any] | None = None,
    *,
    rules: Mapping[str, Any] | None = None,
) -> ShardingSpec | None:
    """The sharding of a configuration's `mesh` and `sharding`; None for one device of one process.

    Rows are split over `data` and `fsdp` together, parameters over `fsdp` and `tensor`; other axes are for rules. Each
    process's devices follow each other along the first axes.

    Args:
        sizes: devices by axis; -1 is the rest of those there are.
        devices: those to choose from, the first ones first; default: those of all processes, equally many of each.
        rules: see ShardingSpec.

    Raises:
        ConfigError: more devices than there are, a number that leaves a process without its share, or an axis that
            splits nothing.
    """
    if not sizes:
        return None
    found = _ordered(jax.devices() if devices is None else devices)
    given = "{" + ", ".join(f"{axis}: {size}" for axis, size in sizes.items()) + "}"
    sizes = _settled(sizes, len(found), given)
    used = {axis for _, entries in as_rules(rules) for entry in entries for axis in _axes(entry)}
    for axis, size in sizes.items():
        if size > 1 and axis not in AXES and axis not in used:
            raise ConfigError(
                f"got {given}; nothing is split over '{axis}': rows are over {DATA} and {FSDP}, parameters over "
                f"{' and '.join(AXES[1:])}, or over axes that a rule under sharding names{nearest(axis, AXES)}",
                path="mesh",
            )
    check_rules(as_rules(rules), sizes)
    count = math.prod(sizes.values())
    if count > len(found):
        raise ConfigError(f"got {given}, but {_there_are(found)}; {_more(found, count)}", path="mesh")
    chosen = _share(found, count, given)
    if len(chosen) == 1:
        return None
    axes = {axis: sizes[axis] for axis in _in_order(sizes) if sizes[axis] > 1}
    rows = tuple(axis for axis in ROW_AXES if axis in axes)
    mesh = _mesh(chosen, axes)
    kept = {pattern: _without_ones(entries, sizes) for pattern, entries in as_rules(rules)}
    return ShardingSpec(mesh, data_pspec=without(PartitionSpec(rows), ()), rules=as_rules(kept))


def _axes(entry: Any) -> Iterable[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _without_ones(entries: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    return without(entries, [axis for axis, size in sizes.items() if size == 1 and axis not in AXES])


def _ordered(devices: Sequence[Any]) -> list[Any]:
    return sorted(devices, key=lambda device: device.process_index)


def _in_order(sizes: Mapping[str, int]) -> list[str]:
    """Rows first, so that a process has rows of its own; `tensor` last, where devices talk most."""
    own = [axis for axis in sizes if axis not in AXES]
    return [axis for axis in (*ROW_AXES, *own, *AXES[2:]) if axis in sizes]


def _mesh(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    names, shape = tuple(axes), tuple(axes.values())
    auto = (AxisType.Auto,) * len(names)
    if len({device.process_index for device in devices}) == 1:  # may follow how the devices are wired
        return jax.make_mesh(shape, names, devices=list(devices), axis_types=auto)
    return Mesh(np.array(devices, dtype=object).reshape(shape), names, axis_types=auto)


def _settled(sizes: Mapping[str, int], there: int, given: str) -> dict[str, int]:
    """The sizes with -1 replaced by what the others leave."""
    open_ = [axis for axis, size in sizes.items() if size == -1]
    if len(open_) > 1:
        raise ConfigError(f"got {given}; only one axis can be -1, the rest of the devices", path="mesh")
    if not open_:
        return dict(sizes)
    others = math.prod(size for size in sizes.values() if size != -1)
    if others > there:
        return {axis: max(size, 1) for axis, size in sizes.items()}  # too many, which is told with both numbers
    rest, left = divmod(there, others)
    if left:
        raise ConfigError(
            f"got {given}; {there} devices do not split over the other axes ({there} = {others} x {rest} + {left}), so "
            f"{open_[0]} cannot be -1; write its size",
            path="mesh",
        )
    return {**sizes, open_[0]: rest}


def _share(devices: list[Any], count: int, given: str) -> list[Any]:
    """The first `count` devices, equally many of each process."""
    ranks = sorted({device.process_index for device in devices})
    if len(ranks) == 1:
        return devices[:count]
    per, left = divmod(count, len(ranks))
    own = [[device for device in devices if device.process_index == rank] for rank in ranks]
    if left or per > min(map(len, own)):
        have = ", ".join(str(len(part)) for part in own)
        raise ConfigError(
            f"got {given}, {count} in all, in {len(ranks)} processes of {have} devices; every process takes an equal "
            f"part: write sizes whose product is a multiple of {len(ranks)}, or -1 for all there are",
            path="mesh",
        )
    return [device for part in own for device in part[:per]]


def _there_are(devices: Sequence[Any]) -> str:
    kind, processes = devices[0].platform, _processes(devices)
    within = f", in {processes} processes" if processes > 1 else ""
    return f"there is 1 device ({kind})" if len(devices) == 1 else f"there are {len(devices)} devices ({kind}){within}"


def _more(devices: Sequence[Any], count: int) -> str:
    """What to do where there are fewer devices; each process of a group makes as many as every other one."""
    processes = _processes(devices)
    multiple = f", and a multiple of {processes}" if processes > 1 else ""
    less = f"write sizes whose product is {len(devices)} or less{multiple}, or -1 for the rest"
    fewer = "leave mesh out" if len(devices) == 1 else less
    each, left = divmod(count, processes)
    if devices[0].platform != "cpu" or left:
        return fewer
    if processes == 1:
        return f"{fewer}, or set JAX_NUM_CPU_DEVICES={count} in the environment"
    return (
        f"{fewer}, or set JAX_NUM_CPU_DEVICES={each} in the environment of every process, which is "
        f"--devices-per-process {each} of nnx_jax.launch"
    )


def _processes(devices: Sequence[Any]) -> int:
    return len({device.process_index for device in devices})
