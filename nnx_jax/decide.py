"""python -m nnx_jax.decide: one typed question to a stored run, one checked answer a row."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.decisions import FixedHeadProvider, Question
    from nnx_jax.model import NNModel

EXIT_FAILED, EXIT_REQUEST, EXIT_INTERRUPTED = 1, 2, 130
_WIDEST = 28  # characters of a description in the table


def parser() -> argparse.ArgumentParser:
    """The command's options; importing this module imports neither jax nor the project's heavy parts."""
    build = argparse.ArgumentParser(
        prog="python -m nnx_jax.decide",
        description="Ask the model of a stored run a typed question about each row of a file.",
        epilog="Exit codes: 0 answered, 1 the model or the stored run failed, 2 the request is wrong, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    add = build.add_argument
    add("run", metavar="RUN[@LAST|BEST|STEP]", help="the run, and which of its checkpoints (default: LAST)")
    add("--question", type=Path, required=True, metavar="FILE", help="YAML: kind, prompt, and options or levels")
    add("--input", type=Path, required=True, metavar="FILE", help=".npz file with the rows, an array [N, ...]")
    add("--column", default="x", metavar="NAME", help="name of that array in the file (default: x)")
    add("--labels", metavar="A,B,...", help="the names of the classes, in order (default: 0,1,...)")
    add("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first; for a run with a network or loss of your own; repeatable",
    )
    add("--json", action="store_true", help="print one line of JSON for each row instead of a table")
    return build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = parser().parse_args(argv)
    from nnx_jax.core.errors import ConfigError, DataError, ModelError, NnxError
    from nnx_jax.decisions import ProviderFailure, UnsupportedCapability

    try:
        _say(_answer(args))
        return 0
    except (ConfigError, DataError, ModelError, UnsupportedCapability) as problem:
        return _fail(problem, EXIT_REQUEST)
    except ProviderFailure as problem:
        cause = problem.__cause__
        wrong_rows = isinstance(cause, DataError | ModelError)  # they are not of the shape the network was built for
        return _fail(cause, EXIT_REQUEST) if wrong_rows else _fail(problem, EXIT_FAILED)
    except NnxError as problem:
        return _fail(problem, EXIT_FAILED)
    except OSError as problem:
        return _fail(f"{type(problem).__name__}: {problem}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)


def _answer(args: argparse.Namespace) -> str:
    """Ask; return what is printed. The files are read, and found right, before the run's weights are."""
    from nnx_jax.core.registry import allow_imports
    from nnx_jax.data.arrays import NpzDataset
    from nnx_jax.data.dtypes import check_finite
    from nnx_jax.decisions import load_question

    allow_imports(args.imports)
    question = load_question(args.question)
    columns = NpzDataset(path=str(args.input), x=args.column, y=None).arrays() or {}
    check_finite(columns, str(args.input))
    _check_run(args)
    provider = _provider(_model(args), question, args.labels)
    results = provider.decide(question, columns["x"])
    if args.json:
        return "\n".join(json.dumps({"row": row, **result.state()}) for row, result in enumerate(results))
    asked = f"run {args.run}, {question.kind} {question.digest()[:16]}, rows: {len(results)}"
    return "\n".join([question.prompt, asked, *_table(question, results)])


def _check_run(args: argparse.Namespace) -> None:
    """A misspelled run or checkpoint is a wrong request; a damaged one is a failure."""
    from nnx_jax.core.errors import ConfigError, UnsafePathError, nearest
    from nnx_jax.runs.best import run_ids
    from nnx_jax.runs.layout import LAST, RunPaths
    from nnx_jax.runs.run import NNRun

    run_id, _, name = args.run.partition("@")
    try:
        paths = RunPaths(args.runs_dir, run_id)
    except UnsafePathError as error:
        raise ConfigError(f"{error.args[0]}; write the id of a run", path="RUN") from None
    if not paths.run.is_dir():
        known = nearest(run_id, run_ids(paths.root)) if paths.root.is_dir() else "; give --runs-dir"
        raise ConfigError(f"there is no run {run_id!r} in {paths.root}{known}", path="RUN")
    names = NNRun.load(run_id, args.runs_dir).checkpoints()
    if not name.isdigit() and (name or LAST) not in names:
        raise ConfigError(f"run {run_id!r} has no checkpoint {name or LAST!r}{nearest(name, names)}", path="RUN")


def _model(args: argparse.Namespace) -> NNModel:
    from nnx_jax.engines.compile_cache import enable_compile_cache
    from nnx_jax.model import NNModel

    enable_compile_cache()
    return NNModel.from_checkpoint(args.run, runs_dir=args.runs_dir)


def _provider(model: NNModel, question: Question, labels: str | None) -> FixedHeadProvider:
    """Return the head: asking a `Score` says that its classes are in order, a `Boolean` that it was trained for it."""
    from nnx_jax.decisions import Boolean, FixedHeadProvider, Score

    return FixedHeadProvider(
        model,
        labels=None if labels is None else [label.strip() for label in labels.split(",")],
        ordinal=isinstance(question, Score),
        question=question if isinstance(question, Boolean) else None,
    )


def _table(question: Question, results: Sequence[Any]) -> list[str]:
    """Return aligned lines: the row, its answer and probability, and what stands next to it."""
    shown = {option.id: f"{option.id} {_short(option.description)}" for option in question.answers}
    if question.kind == "boolean":
        lines = [("row", "answer", "p(yes)")]
        lines += [(str(row), "yes" if r.p_true >= 0.5 else "no", f"{r.p_true:.4f}") for row, r in enumerate(results)]
    elif question.kind == "score":
        lines = [("row", "level", "p", "expected index")]
        for row, r in enumerate(results):
            p = r.probabilities()[r.top]
            lines.append((str(row), shown[r.top], f"{p:.4f}", f"{r.expected_index:.4f}"))
    else:
        lines = [("row", "answer", "p", "next", "p")]
        for row, r in enumerate(results):
            first, second = sorted(r.distribution, key=lambda pair: -pair[1])[:2]
            lines.append((str(row), shown[first[0]], f"{first[1]:.4f}", shown[second[0]], f"{second[1]:.4f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _short(text: str) -> str:
    """Return the words on one line, cut where they are many."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 3] + "..."


def _fail(problem: object, code: int) -> int:
    _say(f"nnx_jax.decide: {problem}", error=True)
    return code


def _say(text: str, *, error: bool = False) -> None:
    from nnx_jax.loop.progress import say

    if text:
        say(text, sys.stderr if error else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
