"""A trained operator as one file that runs without its code: StableHLO, the weights and the signature."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.core import eval_jaxpr
from pydantic import PrivateAttr

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import DataError, ModelError, NnxError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.engines.blobs import read_about, read_blob, write_blob

FORMAT = "nnx_jax.exported/1"
PROGRAM = "program"
"""Name of the tensor that holds the serialised program, uint8; every other one is a weight."""
_WEIGHT = "weights/"
_BATCH = "batch"  # the symbol of the row axis
_LIMIT = 16 * 1024**3


def export_operator(
    op: Operator, example: Any, path: str | Path | None = None, *, platforms: Sequence[str] | None = None
) -> bytes:
    """Return an operator as the bytes of one safetensors file: a StableHLO program, its weights, its signature.

    The number of rows stays open where the operator allows it: it is traced with a symbolic row axis. One that looks at
    the number of rows is exported for that of the example. `load_exported` needs neither the operator's class nor Flax.

    Args:
        op: an operator that JAX can trace: a trained model, or a Sequential that ends in one.
        example: a batch x [N, ...], of which shape and dtype count.
        path: where to write the file as well; whole or not at all.
        platforms: what it is to run on, as ("cpu", "cuda"); default: where this process computes.

    Raises:
        ModelError: (a ValueError) the operator cannot be traced, or its outputs are no arrays.
        DataError: (a ValueError) an example without a row axis.
        ImportError: flatbuffers, which programs are written with, is not installed; it names the extra.
    """
    _check_extra()
    rows = example if hasattr(example, "dtype") else np.asarray(example)
    if rows.ndim == 0:
        raise DataError("the example is one number; give a batch x [N, ...]")
    program, weights, outputs = _lowered(op, rows, platforms)
    signature = {
        "input": _told(program.in_avals[-1]),
        "outputs": [_told(aval) for aval in program.out_avals],
        "output_names": outputs,
        "platforms": list(program.platforms),
    }
    tensors = {f"{_WEIGHT}{index}": np.asarray(array) for index, array in enumerate(weights)}
    tensors[PROGRAM] = np.frombuffer(bytes(program.serialize()), np.uint8)
    about = {
        "format": FORMAT,
        "signature": codec.canonical_json(signature).decode(),
        "operator": type(op).__name__,
        "source": op.content_hash(),
        "jax": jax.__version__,
        "sha256": _digest(tensors),
    }
    blob = write_blob(tensors, about)
    if path is not None:
        fsio.atomic_write(Path(path), blob)
    return blob


def load_exported(source: bytes | str | Path) -> ExportedOp:
    """Return the operator of `export_operator`, from its bytes or its file.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: (a ValueError) it is no exported operator, is damaged, or was made for another platform.
        ImportError: flatbuffers is not installed; it names the extra.
    """
    _check_extra()
    if isinstance(source, str | Path):
        blob = fsio.read_bytes(Path(source), _LIMIT, follow=True)
        return _opened(blob, str(source))
    return _opened(source, "the bytes")


@register("exported")
class ExportedOp(Operator):
    """An exported operator: `op(x)` for a batch x [N, ...], or for one sample x [...].

    Attributes:
        weights: SHA-256 of program and weights; two exports are equal when theirs are.
        signature: shapes and dtypes of the input and of the outputs; a row axis named "batch" takes any number of rows.
    """

    weights: str
    signature: dict[str, Any] = {}
    _blob: Any = PrivateAttr(default=None)
    _call: Any = PrivateAttr(default=None)

    def __call__(self, x: Any, /) -> Any:
        """Return the outputs [N, ...] for a batch, or those of one sample.

        Raises:
            ModelError: (a ValueError) the program is not here, only its digest; or x is not what the signature says.
        """
        if self._call is None:
            raise ModelError(f"the program {self.weights[:12]}... is not here, only its digest; bring it with "
                             "with_weights(bytes), or load_exported(...)")  # fmt: skip
        x = x if hasattr(x, "dtype") else np.asarray(x)
        wanted = self.signature["input"]
        if np.ndim(x) == len(wanted["shape"]) - 1 and wanted["shape"][0] in (_BATCH, 1):
            self._check(x, wanted["shape"][1:], x.shape)
            return jax.tree.map(lambda output: output[0], self._call(x[None]))
        self._check(x, wanted["shape"][1:], x.shape[1:])
        if np.ndim(x) != len(wanted["shape"]) or wanted["shape"][0] not in (_BATCH, x.shape[0]) or x.shape[0] == 0:
            self._refuse(x)
        return self._call(x)

    def _check(self, x: Any, shape: Sequence[int], given: tuple[int, ...]) -> None:
        if tuple(given) != tuple(shape) or np.dtype(x.dtype).name != self.signature["input"]["dtype"]:
            self._refuse(x)

    def _refuse(self, x: Any) -> None:
        wanted = self.signature["input"]
        told = f"{wanted['dtype']}[{', '.join(map(str, wanted['shape']))}]"
        raise ModelError(f"the exported operator takes x {told}, or one row of it; got {x.dtype}{list(x.shape)}")

    def serialize_weights(self) -> bytes:
        """Return the whole file."""
        if self._blob is None:
            raise ModelError(f"the program {self.weights[:12]}... is not here, only its digest")
        return self._blob

    def with_weights(self, blob: bytes) -> ExportedOp:
        """Return the operator of a file, which must be the very one this one was made of.

        Raises:
            TypeError: something else than bytes.
            ModelError: (a ValueError) another file.
        """
        found = load_exported(blob)
        if found.weights != self.weights:
            raise ModelError(f"this is the file {found.weights[:12]}..., the operator's is {self.weights[:12]}...")
        return found


def _check_extra() -> None:
    try:
        import flatbuffers  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("exported operators need flatbuffers: pip install 'nnx_jax[export]'") from error


# -- making ------------------------------------------------------------------------------------------------------


def _lowered(op: Operator, rows: Any, platforms: Sequence[str] | None) -> tuple[Any, list[Any], Any]:
    """(the exported program of weights and rows, the weights, names of the outputs)."""
    batch = export.symbolic_shape(f"{_BATCH}, ...", like=(None, *rows.shape[1:]))
    failure: Exception | None = None
    for shape in (batch, rows.shape):
        try:
            return _traced(op, jax.ShapeDtypeStruct(shape, rows.dtype), platforms)
        except NnxError:
            raise
        except Exception as error:  # what a program of somebody else's does with a row axis may fail in any way
            failure = error
    told = f"{type(op).__name__} cannot be traced for {rows.dtype}{list(rows.shape)}"
    raise ModelError(f"{told}: {failure}") from failure


def _traced(op: Operator, rows: Any, platforms: Sequence[str] | None) -> tuple[Any, list[Any], Any]:
    """See `_lowered`; the operator's arrays become arguments, so that they are stored as what they are."""
    closed, shapes = jax.make_jaxpr(lambda x: op(x), return_shape=True)(rows)
    leaves, structure = jax.tree.flatten(shapes)
    if not leaves or any(not hasattr(leaf, "dtype") for leaf in leaves):
        raise ModelError(f"{type(op).__name__} returns {structure}; an exported operator returns arrays")
    weights = list(closed.consts)

    def program(held: list[Any], x: Any) -> list[Any]:
        return eval_jaxpr(closed.jaxpr, held, x)

    like = [jax.ShapeDtypeStruct(np.shape(array), array.dtype) for array in weights]
    made = export.export(jax.jit(program), platforms=platforms)(like, rows)
    return made, weights, _names(shapes)


def _names(shapes: Any) -> Any:
    """The structure of outputs as JSON: each leaf is its number.

    Raises:
        ModelError: something else than arrays in lists, tuples and dicts with text keys.
    """
    count = iter(range(len(jax.tree.leaves(shapes))))

    def named(part: Any) -> Any:
        if isinstance(part, dict) and all(isinstance(name, str) for name in part):
            return {name: named(part[name]) for name in sorted(part)}
        if type(part) in (list, tuple):
            return [named(item) for item in part]
        if hasattr(part, "dtype"):
            return next(count)
        raise ModelError(f"outputs hold a {type(part).__name__}; return arrays, or lists and dicts of them")

    return named(shapes)


def _told(aval: Any) -> dict[str, Any]:
    """Shape and dtype as JSON; the row axis that is open by its name."""
    shape = [int(size) if isinstance(size, int) else str(size) for size in aval.shape]
    return {"shape": shape, "dtype": np.dtype(aval.dtype).name}


def _digest(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


# -- loading -----------------------------------------------------------------------------------------------------


def _opened(blob: Any, where: str) -> ExportedOp:
    tensors = read_blob(blob, "an exported operator")
    about = read_about(blob)
    if about.get("format") != FORMAT or PROGRAM not in tensors:
        raise ModelError(f"{where}: holds no exported operator ({FORMAT}), but {about.get('format', 'bare tensors')}")
    if _digest(tensors) != about["sha256"]:
        raise ModelError(f"{where}: is damaged, its content does not have the digest it was written with")
    signature = codec.parse_json(about["signature"].encode(), source=f"the signature in {where}")
    program = export.deserialize(bytearray(tensors[PROGRAM].tobytes()))
    if not _runs_here(program.platforms):
        raise ModelError(
            f"{where}: was made for {', '.join(program.platforms)}, this process computes on {jax.default_backend()}; "
            "export it with platforms=(...)"
        )
    weights = [jax.device_put(tensors[f"{_WEIGHT}{index}"]) for index in range(len(tensors) - 1)]
    compiled = jax.jit(program.call)

    def call(x: Any) -> Any:
        return _shaped(signature["output_names"], compiled(weights, x))

    found = ExportedOp(weights=about["sha256"], signature=signature)
    found._blob, found._call = bytes(blob), call
    return found


def _runs_here(platforms: Sequence[str]) -> bool:
    here = jax.default_backend()
    return here in platforms or (here == "gpu" and {"cuda", "rocm"} & set(platforms) != set())


def _shaped(names: Any, outputs: list[Any]) -> Any:
    """Outputs in the structure they had; tuples have become lists."""
    if isinstance(names, dict):
        return {name: _shaped(each, outputs) for name, each in names.items()}
    if isinstance(names, list):
        return [_shaped(each, outputs) for each in names]
    return outputs[names]
