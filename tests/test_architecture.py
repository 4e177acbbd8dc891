"""The rules of the house, read from the source with `ast`: who may import whom, and what belongs in one file only.

Every rule is a function from a source tree to a list of complaints. The package must give none; a tiny made-up tree
that breaks the rule must give the expected one, so that a rule which sees nothing cannot pass.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nnx_jax"
FLOORS = {
    "core": 1, "params": 2, "data": 3, "nets": 3, "objectives": 3, "optim": 3, "hooks": 3, "step": 4, "spmd": 4,
    "distributed": 7, "runs": 5, "loop": 6, "engines": 7, "fit": 8, "model": 9, "torch": 11, "trainer": 9,
    "backends": 10, "training_loop": 11, "training": 9, "config": 9, "train": 10, "launch": 10, "plan": 10,
    "decisions": 10, "report": 10, "decide": 11, "testing": 11, "search": 12, "sweep": 12, "online": 12, "ops": 13,
}  # fmt: skip
FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "chex", "tensorstore", "torch", "safetensors"}
FRAMEWORK_FREE = {"core", "params", "data", "runs", "loop", "hooks"}
EXTRAS = {
    "equinox", "numpyro", "blackjax", "tensorboardX", "wandb", "sklearn", "scipy", "matplotlib", "torch", "optuna",
    "lightning", "keras", "zarr", "fsspec", "mlflow",
}  # fmt: skip
ONE_IMPORTER = {
    "orbax": "runs/arrays.py",
    "tensorstore": "runs/arrays.py",
    "grain": "data/pipeline.py",
    "jax.distributed": "spmd/processes.py",
    "yaml": "core/codec.py",
    "json.load": "core/codec.py",
    "json.loads": "core/codec.py",
    "json.JSONDecoder": "core/codec.py",
    "tomllib": "core/codec.py",
}
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
PICKLING = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "torch.save", "torch.load",
}  # fmt: skip
"""Calls of torch that pickle what they are given, or unpickle what comes; without a dot, whatever is in front."""
WRITERS = {
    "os.rename", "os.replace", "os.renames", "shutil.move", "shutil.copy", "shutil.copy2", "shutil.copyfile",
    "shutil.copytree", "numpy.save", "numpy.savez", "numpy.savez_compressed", "np.save", "np.savez",
    "np.savez_compressed",
}  # fmt: skip
WRITING_METHODS = {"write_text", "write_bytes", "rename", "save_file"}
COMMANDS = {"train.py", "decide.py", "__main__.py"}  # the files that may print: their standard output is their result
MAX_LINES = 500


@dataclass(frozen=True)
class Import:
    """One import statement: the absolute dotted name it binds from, and whether it runs when the file is imported."""

    name: str
    line: int
    at_import: bool
    for_types: bool = False  # under TYPE_CHECKING: never runs


@dataclass
class Source:
    """One parsed file of the package."""

    path: str  # relative to the package, with slashes
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def module(self) -> str:
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(["nnx_jax", *(parts[:-1] if parts[-1] == "__init__" else parts)])

    @property
    def room(self) -> str:
        """The folder, or the file's own name at the top."""
        return self.path.split("/")[0].removesuffix(".py")

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self._package(), at_import=True))

    def _package(self) -> list[str]:
        parts = self.module.split(".")
        return parts if self.path.endswith("__init__.py") else parts[:-1]


def _imports(node: ast.AST, package: list[str], *, at_import: bool, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            stem = ".".join([*base, *([child.module] if child.module else [])])
            yield from (Import(f"{stem}.{alias.name}", child.lineno, at_import, for_types) for alias in child.names)
        elif isinstance(child, ast.If) and _type_checking(child.test):
            body, rest = (ast.Module(body=list(part), type_ignores=[]) for part in (child.body, child.orelse))
            yield from _imports(body, package, at_import=False, for_types=True)
            yield from _imports(rest, package, at_import=at_import, for_types=for_types)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, at_import=at_import and not inside, for_types=for_types)


def _type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


class Tree:
    """All files of a package."""

    def __init__(self, root: Path) -> None:
        self.sources = [
            Source(path.relative_to(root).as_posix(), text := path.read_text(encoding="utf-8"), ast.parse(text))
            for path in sorted(root.rglob("*.py"))
        ]
        self.modules = {source.module: source for source in self.sources}

    def target(self, name: str) -> str | None:
        """The module of this package that an imported name comes from, or None for names of other packages."""
        if not within(name, "nnx_jax"):
            return None
        while name not in self.modules and name.count(".") > 1:
            name = name.rpartition(".")[0]
        missing = name not in self.modules and name.split(".")[-1] not in FLOORS
        return "nnx_jax" if missing else name

    def nodes(self) -> Iterator[tuple[Source, ast.AST]]:
        for source in self.sources:
            for node in ast.walk(source.tree):
                yield source, node


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(node: ast.expr) -> str:
    """`os.path.join` for that expression, "" for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def floors(tree: Tree) -> list[str]:
    """A file imports lower floors or its own folder. The facade is imported for its version only."""
    bad = []
    for source in tree.sources:
        if source.path == "__init__.py":
            bad += [f"__init__.py:{i.line}: imports {i.name} when imported" for i in source.imports
                    if i.at_import and within(i.name, "nnx_jax")]  # fmt: skip
            continue
        if source.room not in FLOORS:
            bad.append(f"{source.path}: '{source.room}' is on no floor of the map")
            continue
        for found in source.imports:
            target = tree.target(found.name)
            if target is None or found.name == "nnx_jax.__version__":
                continue
            if target == "nnx_jax":
                bad.append(f"{source.path}:{found.line}: imports the public facade")
                continue
            room = target.split(".")[1]
            other = tree.modules.get(target)
            top = "/" not in source.path and other is not None and "/" not in other.path
            if FLOORS.get(room, 99) >= FLOORS[source.room] + (room == source.room or top):
                bad.append(f"{source.path}:{found.line}: floor {FLOORS[source.room]} imports {target}")
    return bad


def circles(tree: Tree) -> list[str]:
    """No module reaches itself through imports, wherever in the file they stand; imports for types never run."""
    edges: dict[str, set[str]] = {}
    for source in tree.sources:
        if source.path != "__init__.py":
            targets = {tree.target(found.name) for found in source.imports if not found.for_types}
            edges[source.module] = {target for target in targets if target} - {"nnx_jax", source.module}
    bad, done = [], set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            bad.append("circle: " + " -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for other in sorted(edges.get(module, ())):
                walk(other, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        walk(module, ())
    return bad


def framework_free(tree: Tree) -> list[str]:
    """The floors shared by both worlds import no framework when they are imported."""
    return [
        f"{source.path}:{found.line}: imports {found.name} at module level"
        for source in tree.sources
        if source.room in FRAMEWORK_FREE or source.path == "__init__.py"
        for found in source.imports
        if found.at_import and any(within(found.name, name) for name in FRAMEWORKS)
    ]


def extras_inside(tree: Tree) -> list[str]:
    """Optional packages are imported where they are used; torch in its own folder only."""
    bad = []
    for source in tree.sources:
        for found in source.imports:
            for extra in EXTRAS:
                home = source.room == "torch" and extra == "torch"
                if not within(found.name, extra) or home:
                    continue
                if found.at_import or extra == "torch":
                    bad.append(f"{source.path}:{found.line}: optional {extra} is imported here")
    return bad


def one_importer(tree: Tree) -> list[str]:
    """A library whose version can break us, or that parses bytes, is named by one file."""
    bad = []
    for package, home in ONE_IMPORTER.items():
        for source in tree.sources:
            if source.path == home:
                continue
            lines = [i.line for i in source.imports if within(i.name, package)]
            if "." in package:
                lines += [n.lineno for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)
                          and within(dotted(n), package)]  # fmt: skip
            bad += [f"{source.path}:{line}: {package} belongs in {home}" for line in lines]
    return bad


def _opens_for_writing(call: ast.Call) -> bool:
    """True for `open(path, mode)` unless a literal mode only reads, and for `path.open("w")` and the like."""
    plain = isinstance(call.func, ast.Name) and call.func.id == "open"
    if not plain and not (isinstance(call.func, ast.Attribute) and call.func.attr == "open"):
        return False
    position = 1 if plain else 0
    modes = [k.value for k in call.keywords if k.arg == "mode"] or call.args[position : position + 1]
    if not modes or not isinstance(modes[0], ast.Constant):
        return plain and bool(modes)
    return bool(re.fullmatch(r"[rwaxbt+]+", str(modes[0].value))) and bool(set("wax+") & set(str(modes[0].value)))


def one_writer(tree: Tree) -> list[str]:
    """Every durable byte goes through core/fsio.py."""
    bad = []
    for source, node in tree.nodes():
        if not isinstance(node, ast.Call) or source.path == "core/fsio.py":
            continue
        name = dotted(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in WRITERS or method in WRITING_METHODS or _opens_for_writing(node):
            bad.append(f"{source.path}:{node.lineno}: {name or method} writes outside core/fsio.py")
    return bad


def no_pickle(tree: Tree) -> list[str]:
    """Nothing that runs code from data."""
    bad = [
        f"{source.path}:{found.line}: imports {found.name}"
        for source in tree.sources
        for found in source.imports
        if found.name.split(".")[0] in UNSAFE
    ]
    for source, node in tree.nodes():
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if (node.arg, node.value.value) in (("allow_pickle", True), ("weights_only", False)):
                bad.append(f"{source.path}:{node.value.lineno}: {node.arg}={node.value.value}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            bad.append(f"{source.path}:{node.lineno}: calls {node.func.id}")
    return bad


def no_objects(tree: Tree) -> list[str]:
    """Nothing of torch that pickles what it is given: its files, and its collectives over objects."""
    bad = []
    for source, node in tree.nodes():
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        name = dotted(node) or (node.attr if isinstance(node, ast.Attribute) else "")  # of `group().gather_object`
        if {name, name.split(".")[-1]} & PICKLING:
            bad.append(f"{source.path}:{node.lineno}: {name} pickles")
    for source in tree.sources:
        named = [found for found in source.imports if {found.name, found.name.split(".")[-1]} & PICKLING]
        bad += [f"{source.path}:{found.line}: {found.name} pickles" for found in named]
    return bad


def one_purpose(tree: Tree) -> list[str]:
    """Every file says its purpose in its first line and is short enough to have one."""
    bad = []
    for source in tree.sources:
        doc = ast.get_docstring(source.tree)
        lines = len(source.text.splitlines())
        if not source.text.strip() and source.path.endswith("__init__.py"):
            continue
        if not doc or not doc.splitlines()[0].strip():
            bad.append(f"{source.path}: has no docstring")
        elif not doc.splitlines()[0].rstrip().endswith((".", ":")):
            bad.append(f"{source.path}: the docstring's first line is not one sentence")
        if lines > MAX_LINES:
            bad.append(f"{source.path}: {lines} lines, more than {MAX_LINES}")
    return bad


def finished(tree: Tree) -> list[str]:
    """No print outside the commands (or to a stream the caller chose), no note of work left to do."""
    bad = []
    for source, node in tree.nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            aimed = any(keyword.arg == "file" for keyword in node.keywords)
            if source.path.split("/")[-1] not in COMMANDS and not aimed:
                bad.append(f"{source.path}:{node.lineno}: prints")
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError":
            bad.append(f"{source.path}:{node.lineno}: not implemented, and does not say what to do")
    for source in tree.sources:
        for number, line in enumerate(source.text.splitlines(), 1):
            if any(word in line for word in ("TODO", "FIXME", "XXX")):
                bad.append(f"{source.path}:{number}: unfinished work")
    return bad


Rule = Callable[[Tree], list[str]]
RULES: list[Rule] = [
    floors, circles, framework_free, extras_inside, one_importer, one_writer, no_pickle, no_objects,
    one_purpose, finished,
]  # fmt: skip


@pytest.fixture(scope="module")
def package() -> Tree:
    return Tree(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Rule, package: Tree) -> None:
    assert rule(package) == []


def test_the_whole_package_is_read(package: Tree) -> None:
    assert {"core", "__init__"} <= {source.room for source in package.sources}
    assert any(found.name == "nnx_jax.core.errors.ConfigError" for s in package.sources for found in s.imports)


BROKEN = [
    (floors, {"core/a.py": "import nnx_jax.loop.b", "loop/b.py": ""}, "core/a.py:1: floor 1 imports nnx_jax.loop.b"),
    (floors, {"nets/a.py": "def f():\n    from nnx_jax.optim import b", "optim/b.py": ""}, "nets/a.py:2: floor 3"),
    (floors, {"data/a.py": "from ..step.b import c", "step/b.py": ""}, "data/a.py:1: floor 3 imports nnx_jax.step.b"),
    (floors, {"data/a.py": "from .. import model", "model.py": "", "__init__.py": ""}, "imports nnx_jax.model"),
    (floors, {"model.py": "import nnx_jax.train", "train.py": ""}, "model.py:1: floor 9 imports nnx_jax.train"),
    (floors, {"core/a.py": "from nnx_jax import NNModel", "__init__.py": ""}, "imports the public facade"),
    (floors, {"__init__.py": "from nnx_jax.core import a", "core/a.py": ""}, "__init__.py:1: imports"),
    (floors, {"misc/a.py": ""}, "misc/a.py: 'misc' is on no floor"),
    (circles, {"core/a.py": "from . import b", "core/b.py": "from .a import x"}, "nnx_jax.core.a -> nnx_jax.core.b"),
    (circles, {"core/a.py": "from . import b", "core/b.py": "def f():\n    from .a import x"}, "circle: "),
    (circles, {"core/a.py": "if TYPE_CHECKING:\n    from . import c\nelse:\n    from . import b",
               "core/b.py": "from .a import x", "core/c.py": ""}, "nnx_jax.core.a -> nnx_jax.core.b"),
    (circles, {"core/a.py": "from .b import b", "core/b.py": "from .c import c", "core/c.py": "import nnx_jax.core.a"},
     "nnx_jax.core.a -> nnx_jax.core.b -> nnx_jax.core.c -> nnx_jax.core.a"),
    (framework_free, {"loop/a.py": "import jax.numpy as jnp"}, "loop/a.py:1: imports jax.numpy"),
    (framework_free, {"runs/a.py": "class A:\n    import orbax.checkpoint"}, "runs/a.py:2"),
    (framework_free, {"core/a.py": "try:\n    from optax import x\nexcept ImportError:\n    pass"}, "core/a.py:2"),
    (extras_inside, {"data/a.py": "from sklearn.datasets import load_digits"}, "optional sklearn"),
    (extras_inside, {"step/a.py": "def f():\n    import torch"}, "optional torch"),
    (one_importer, {"engines/a.py": "def f():\n    import orbax.checkpoint"}, "orbax belongs in runs/arrays.py"),
    (one_importer, {"data/b.py": "from grain import python"}, "grain belongs in data/pipeline.py"),
    (one_importer, {"spmd/b.py": "from jax import distributed"}, "jax.distributed belongs in spmd/processes.py"),
    (one_importer, {"spmd/b.py": "import jax\njax.distributed.initialize()"}, "spmd/b.py:2: jax.distributed"),
    (one_importer, {"runs/a.py": "import json\njson.loads(t)"}, "runs/a.py:2: json.loads belongs in core/codec.py"),
    (one_writer, {"runs/a.py": "open('x', 'w')"}, "runs/a.py:1: open writes"),
    (one_writer, {"runs/a.py": "open('x', mode='ab')"}, "open writes"),
    (one_writer, {"runs/a.py": "open('x', mode)"}, "open writes"),
    (one_writer, {"runs/a.py": "p.open('r+')"}, "p.open writes"),
    (one_writer, {"runs/a.py": "import os\nos.replace(a, b)"}, "os.replace writes"),
    (one_writer, {"runs/a.py": "(p / 'x').write_bytes(b'')"}, "write_bytes writes"),
    (no_pickle, {"core/a.py": "def f():\n    import pickle"}, "core/a.py:2: imports pickle"),
    (no_pickle, {"core/a.py": "from joblib import load"}, "imports joblib"),
    (no_pickle, {"data/a.py": "np.load(p, allow_pickle=True)"}, "allow_pickle=True"),
    (no_pickle, {"data/a.py": "eval('1')"}, "calls eval"),
    (no_objects, {"torch/a.py": "import torch.distributed as dist\ndist.all_gather_object(a, b)"}, "a.py:2: dist.all"),
    (no_objects, {"torch/a.py": "group().broadcast_object_list(a)"}, "broadcast_object_list pickles"),
    (no_objects, {"torch/a.py": "from torch.distributed import gather_object"}, "distributed.gather_object pickles"),
    (no_objects, {"torch/a.py": "import torch\ntorch.save(a, p)"}, "torch/a.py:2: torch.save pickles"),
    (no_objects, {"torch/a.py": "from torch import load"}, "torch.load pickles"),
    (finished, {"core/a.py": "print(1)"}, "core/a.py:1: prints"),
    (finished, {"core/a.py": "# TODO: later"}, "unfinished work"),
    (finished, {"core/a.py": "def f():\n    raise NotImplementedError"}, "not implemented"),
]  # fmt: skip
ALLOWED = [
    {"core/a.py": "", "params/b.py": "from nnx_jax.core.a import x", "params/c.py": "from .b import x"},
    {"model.py": "from nnx_jax.config import load", "config.py": "from nnx_jax import __version__", "__init__.py": ""},
    {"loop/a.py": "def f():\n    import jax", "step/b.py": "import jax"},
    {"runs/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax"},
    {"runs/a.py": "from . import b", "runs/b.py": "if TYPE_CHECKING:\n    from . import a"},
    {"torch/a.py": "import torch\nfrom safetensors.torch import load, save\nload(p)\ndist.all_gather(a, b)"},
    {"runs/arrays.py": "def f():\n    import orbax.checkpoint", "core/codec.py": "import json, yaml"},
    {"core/fsio.py": "import os\nos.replace(a, b)\nopen(p, 'wb')"},
    {"runs/a.py": "open(p)\nopen(p, 'rb')\np.open()\nos.open(p, flags)\nStore.open(root, run)\ntext.replace('a', 'w')"},
    {
        "train.py": "print(1)",
        "runs/__main__.py": "print(1)",
        "loop/p.py": "print(1, file=stream)",
        "torch/a.py": "import torch",
    },
]


def grow(root: Path, files: dict[str, str]) -> Tree:
    """Write a small tree of files, each with a docstring on its first line, after the given code's own line numbers."""
    for name, code in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""One idea."""; {code}' if code and "\n" not in code else code, encoding="utf-8")
    return Tree(root)


@pytest.mark.parametrize("rule, files, expected", BROKEN)
def test_rule_sees_what_breaks_it(rule: Rule, files: dict[str, str], expected: str, tmp_path: Path) -> None:
    assert any(expected in complaint for complaint in rule(grow(tmp_path, files)))


@pytest.mark.parametrize("files", ALLOWED)
@pytest.mark.parametrize("rule", [r for r in RULES if r is not one_purpose], ids=lambda rule: rule.__name__)
def test_rule_allows_what_is_right(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    assert rule(grow(tmp_path, files)) == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x = 1\n", "core/a.py: has no docstring"),
        ('"""Two ideas\nin two lines."""\n', "not one sentence"),
        ('"""Long."""\n' + "x = 1\n" * MAX_LINES, "501 lines, more than 500"),
    ],
)
def test_one_purpose_sees_what_breaks_it(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text(text, encoding="utf-8")
    assert any(expected in complaint for complaint in one_purpose(Tree(tmp_path)))


def _modules_of(statement: str) -> set[str]:
    """The modules that a fresh interpreter loads for one statement."""
    code = f"import sys; old = set(sys.modules); {statement}; print('\\n'.join(set(sys.modules) - old))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_framework() -> None:
    """The package itself and a handful of the standard library; counted, since time depends on the machine."""
    loaded = _modules_of("import nnx_jax")
    assert {name for name in loaded if name.startswith("nnx_jax")} == {"nnx_jax"}
    assert all(name.split(".")[0] in sys.stdlib_module_names | {"nnx_jax"} for name in loaded)
    assert len(loaded) < 20


@pytest.mark.parametrize("room", ["core", "params", "data", "hooks", "runs", "loop"])
def test_shared_floors_load_no_framework(room: str) -> None:
    """Every module of the floors shared by both worlds, imported in one fresh interpreter."""
    names = [source.module for source in Tree(PACKAGE).sources if source.room == room and "__main__" not in source.path]
    if not names:
        pytest.skip(f"{room} has no module")
    loaded = {name.split(".")[0] for name in _modules_of("import " + ", ".join(names))}
    assert loaded & FRAMEWORKS == set()
