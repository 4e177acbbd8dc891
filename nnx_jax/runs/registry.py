"""Registries of trained models: content-addressed, weights in the hash, and nothing in them that runs code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import secrets
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field, PlainValidator

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import CheckpointError, UnsafePathError
from nnx_jax.core.operator import Operator
from nnx_jax.core.positional import PositionalOperator
from nnx_jax.core.registry import full_kind, register
from nnx_jax.runs.lease import guard

OPERATOR, WEIGHTS, METADATA, TAGS = "operator.json", "weights.bin", "metadata.json", "_tags"
_LIMIT = 64 * 2**30
_PARTIAL = ".partial-"


@runtime_checkable
class ModelRegistry(Protocol):
    """Where trained models are kept; any object with these methods is one."""

    def store(self, model: Any, *, name: str | None = None, tags: Any = (), weights: bytes | None = None) -> str:
        """Keep a model; return its hash."""
        ...

    def load(self, ref: str) -> Any:
        """Return the model of a hash or name."""
        ...

    def list(self, *, tags: Any = ()) -> Any:
        """Return the hashes of the models that have all these tags."""
        ...

    def tag(self, ref: str, name: str, *, force: bool = False) -> None:
        """Give a model a name."""
        ...


class _Registry(PositionalOperator):
    """What registries do, whatever keeps their files.

    A model is kept under the SHA-256 of its configuration (canonical JSON), one NUL byte and its weights:
    `<hash>/operator.json`, `<hash>/weights.bin` where it has any, `<hash>/metadata.json`; `_tags/<name>` holds the hash
    a name stands for. Storing the same model again changes nothing but its tags.
    """

    family: ClassVar[str] = "model_registry"
    never_called: ClassVar[str] = "a model registry is asked with store(...) and load(...)"

    # -- writing -----------------------------------------------------------------------------------------------

    def digest(self, model: Any, *, weights: bytes | None = None) -> str:
        """Return the hash that `store` would give the model, without storing it."""
        return _entry(model, weights)[0]

    def store(
        self,
        model: Any,
        *,
        name: str | None = None,
        tags: Mapping[str, str] | Iterable[str] = (),
        weights: bytes | None = None,
        force: bool = False,
    ) -> str:
        """Keep a model; return its hash.

        Args:
            model: an operator that can be written to a file.
            name: what to call it; see `tag`.
            tags: names with values, or names alone; added to those it has.
            weights: its weights as bytes; None for what its `serialize_weights()` gives, b"" for none.
            force: the name may be another model's so far.

        Raises:
            TypeError: no operator, or weights that are no bytes.
            FileExistsError: the name is another model's.
            ConfigError: the operator holds something a file cannot.
        """
        digest, files = _entry(model, weights)
        if name is not None:  # before anything is written
            self._check_name(name, digest, force)
        if self._read(digest, METADATA) is None:
            known = {"hash": digest, "module": type(model).__module__, "created": datetime.now(UTC).isoformat()}
            self._create(digest, {**files, METADATA: _json({**known, "tags": _tags(tags)}, METADATA)})
        with self._alone():
            self._merge(digest, _tags(tags))
        if name is not None:
            self._name(name, digest, force)
        return digest

    def tag(self, ref: str, name: str, *, force: bool = False) -> None:
        """Let `name` stand for a model.

        Raises:
            KeyError: there is no such model.
            FileExistsError: the name is another model's; `force=True` takes it.
            ValueError: a name that is no plain file name.
        """
        self._name(name, self.resolve(ref), force)

    def _name(self, name: str, digest: str, force: bool) -> None:
        _segment(name)
        with self._alone():
            self._check_name(name, digest, force)
            self._replace(TAGS, name, digest.encode() + b"\n")

    def _check_name(self, name: str, digest: str, force: bool) -> None:
        known = self._read(TAGS, _segment(name))
        if known is not None and known.decode().strip() != digest and not force:
            raise FileExistsError(f"the name {name!r} is that of {known.decode()[:12]}...; force=True takes it")

    def _merge(self, digest: str, tags: Mapping[str, str]) -> None:
        known = self.metadata(digest)
        if not tags.items() <= known["tags"].items():
            self._replace(digest, METADATA, _json({**known, "tags": {**known["tags"], **tags}}, METADATA))

    # -- reading -----------------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> str:
        """Return the hash of a hash, a name, or `registry://<either>`.

        Raises:
            KeyError: there is no such model.
            ValueError: a reference that is no plain file name.
        """
        ref = _segment(ref.removeprefix("registry://") if isinstance(ref, str) else ref)
        if self._read(ref, METADATA) is not None:
            return ref
        named = self._read(TAGS, ref)
        if named is None:
            raise KeyError(f"the registry has no model {ref!r}")
        return named.decode().strip()

    def resolve_tag(self, name: str) -> str:
        """Return the hash that a name stands for; KeyError for none."""
        named = self._read(TAGS, _segment(name))
        if named is None:
            raise KeyError(f"the registry has no name {name!r}")
        return named.decode().strip()

    def load(self, ref: str, *, template: Any = None) -> Any:
        """Return the model of a hash or name, with its weights.

        Args:
            template: an operator of the same structure, for a model whose class no file can rebuild (a module of your
                own); its weights are not used and it stays as it is.

        Raises:
            KeyError: there is no such model.
            ValueError: a template for a model without weights.
            CheckpointError: the files are damaged.
            UnregisteredError: (a PermissionError) the class is not registered here; import its module first.
        """
        digest = self.resolve(ref)
        record, weights = self._checked(digest)
        if template is not None:
            if not weights:
                raise ValueError(f"{ref} was stored without weights: there is no weights blob for the template")
            return template.with_weights(weights)
        module = self.metadata(digest)["module"]
        if module.startswith("nnx_jax."):  # of this package: importing it registers the class
            importlib.import_module(module)
        model = Operator.from_state({**record["state"], "kind": record["class"]})
        return model.with_weights(weights) if weights else model  # type: ignore[attr-defined]

    def load_weights(self, ref: str) -> bytes | None:
        """Return the weights of a model as they were stored, None for one without; raises as `load`."""
        return self._checked(self.resolve(ref))[1] or None

    def metadata(self, ref: str) -> dict[str, Any]:
        """Return hash, module of the class, time and tags of a model; KeyError for none."""
        digest = self.resolve(ref)
        return codec.parse_json(self._read(digest, METADATA) or b"", source=f"{digest}/{METADATA}")

    def list(self, *, tags: Mapping[str, str] | Iterable[str] = ()) -> tuple[str, ...]:
        """Return the hashes of the models with all these tags, oldest first; a name alone asks for any value."""
        wanted = {name: value if isinstance(tags, Mapping) else None for name, value in _tags(tags).items()}
        found = [self.metadata(digest) for digest in self._names() if self._read(digest, METADATA) is not None]
        fits = [m for m in found if all(n in m["tags"] and v in (None, m["tags"][n]) for n, v in wanted.items())]
        return tuple(m["hash"] for m in sorted(fits, key=lambda m: (m["created"], m["hash"])))

    def _checked(self, digest: str) -> tuple[dict[str, Any], bytes]:
        """The configuration and the weights, once they are what the hash says."""
        config, weights = self._read(digest, OPERATOR), self._read(digest, WEIGHTS) or b""
        if config is None or _hash(config, weights) != digest:
            raise CheckpointError(f"the model {digest[:12]}... of the registry is damaged: its files have another hash")
        return codec.parse_json(config, source=f"{digest}/{OPERATOR}"), weights

    # -- files -------------------------------------------------------------------------------------------------

    def _read(self, folder: str, file: str) -> bytes | None:
        """The bytes of a file, None where there is none."""
        raise AssertionError("a registry says how files are read")

    def _names(self) -> Iterable[str]:
        """The names of the folders."""
        raise AssertionError("a registry says what it holds")

    def _create(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Make a folder with these files, whole or not at all; metadata comes last."""
        raise AssertionError("a registry says how files are written")

    def _replace(self, folder: str, file: str, data: bytes) -> None:
        """Write one file anew."""
        raise AssertionError("a registry says how files are written")

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep other writers out while something is read and written anew, where the files allow it."""
        return contextlib.nullcontext()


def _directory(value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("expected the path of a directory")
    return str(value)


Directory = Annotated[str, PlainValidator(_directory)]
"""Path of a directory, as text."""


@register("local")
class LocalModelRegistry(_Registry):
    """A registry in a directory: `LocalModelRegistry("models")`.

    A model comes into its place by one rename of a finished, synced folder, so a reader never sees half of one; what
    was copied there by halves, without its metadata, is replaced. Writers take turns at `.lock`, so no tag is lost.
    """

    root: Directory
    """The directory; made at the first model."""

    if TYPE_CHECKING:

        def __init__(self, root: str | Path, **data: Any) -> None: ...

    def _read(self, folder: str, file: str) -> bytes | None:
        try:
            return fsio.read_bytes(fsio.safe_join(self.root, folder, file), _LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _names(self) -> Iterable[str]:
        root = Path(self.root)
        folders = (each for each in root.iterdir() if each.is_dir()) if root.is_dir() else ()
        return sorted(each.name for each in folders if each.name != TAGS and not each.name.startswith("."))

    def _create(self, folder: str, files: Mapping[str, bytes]) -> None:
        final = fsio.safe_join(fsio.make_dir(self.root), folder)
        partial = fsio.make_dir(Path(self.root, f"{_PARTIAL}{secrets.token_hex(6)}"))
        try:
            for name, data in files.items():
                fsio.create_file(partial / name, data)
            fsio.sync_tree(partial)
            with self._alone():
                if self._read(folder, METADATA) is None:  # else somebody stored the same model meanwhile
                    fsio.remove_tree(final)
                    fsio.replace_dir(partial, final)
        finally:
            if partial.exists():
                shutil.rmtree(partial)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return guard(Path(fsio.make_dir(self.root), ".lock"))

    def _replace(self, folder: str, file: str, data: bytes) -> None:
        directory = fsio.make_dir(fsio.safe_join(fsio.make_dir(self.root), folder))
        fsio.atomic_write(fsio.safe_join(directory, file), data)


@register("remote")
class RemoteModelRegistry(_Registry):
    """A registry at a URI that fsspec knows: `RemoteModelRegistry("s3://bucket/models")`.

    Such stores have no rename: metadata is written last, and a folder without it is no model. Nor have they a lock: of
    tags that two processes add to one model at the same moment, those of one may be lost.

    Raises:
        ImportError: fsspec, or what it needs for this URI, is not installed; at first use.
    """

    uri: str
    """Where, with its scheme."""
    storage_options: Mapping[str, Any] = Field(default_factory=dict)
    """For the file system, as {"anon": True}. Better not a secret: it is written wherever the loop is."""

    if TYPE_CHECKING:

        def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None, **data: Any) -> None: ...

    def _place(self, *parts: str) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs  # pyright: ignore[reportMissingImports]

            system, root = url_to_fs(self.uri, **self.storage_options)
        except ImportError as error:
            raise ImportError(f"a registry at {self.uri} needs fsspec: pip install 'nnx_jax[s3]' ({error})") from error
        return system, "/".join((root.rstrip("/"), *parts))

    def _read(self, folder: str, file: str) -> bytes | None:
        system, path = self._place(folder, file)
        try:
            return system.cat_file(path)
        except FileNotFoundError:
            return None

    def _names(self) -> Iterable[str]:
        system, root = self._place()
        try:
            found = system.ls(root, detail=False)
        except FileNotFoundError:
            return ()
        return sorted(name for each in found if (name := each.rstrip("/").rpartition("/")[2]) != TAGS)

    def _create(self, folder: str, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():  # metadata is the last of them
            self._replace(folder, name, data)

    def _replace(self, folder: str, file: str, data: bytes) -> None:
        system, directory = self._place(folder)
        system.makedirs(directory, exist_ok=True)
        system.pipe_file(f"{directory}/{file}", data)


def _entry(model: Any, weights: bytes | None) -> tuple[str, dict[str, bytes]]:
    """The hash of a model, and the files that it is made of."""
    if not isinstance(model, Operator):
        raise TypeError(f"a model registry keeps operators, got {type(model).__name__}")
    serialize: Any = getattr(model, "serialize_weights", bytes)
    blob = serialize() if weights is None else weights
    if not isinstance(blob, bytes):
        raise TypeError(f"weights are bytes, as serialize_weights() gives them; got {type(blob).__name__}")
    files = {OPERATOR: _json({"class": full_kind(type(model)), "state": model.state()}, OPERATOR)}
    return _hash(files[OPERATOR], blob), files | ({WEIGHTS: blob} if blob else {})


def _hash(config: bytes, weights: bytes) -> str:
    digest = hashlib.sha256(config.rstrip(b"\n") + b"\0")
    digest.update(weights)
    return digest.hexdigest()


def _json(value: Any, source: str) -> bytes:
    return durable_json(value, source=source)


def _tags(tags: Any) -> dict[str, str]:
    if not isinstance(tags, Mapping | str):
        tags = dict.fromkeys(tags, "")
    if isinstance(tags, str) or not all(isinstance(part, str) for pair in tags.items() for part in pair):
        raise TypeError(f"tags are names, or names with text as values; got {tags!r}")
    return dict(tags)


def _segment(name: Any) -> str:
    """A reference as one part of a path.

    Raises:
        UnsafePathError: (a ValueError) anything else.
    """
    if name == TAGS:
        raise UnsafePathError(f"{TAGS!r} is where a registry keeps its names; use another name")
    return fsio.safe_name(name, "model reference")
