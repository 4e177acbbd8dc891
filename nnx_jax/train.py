"""python -m nnx_jax.train: one configuration becomes one committed, resumable run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.params.run import RunSpec

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The command's options; importing this module imports neither jax nor the project's heavy parts."""
    build = argparse.ArgumentParser(
        prog="python -m nnx_jax.train",
        description="Train from a configuration file. The same command again continues an interrupted run bit for bit.",
        epilog="Exit codes: 0 done, 1 the run failed, 2 the configuration is wrong, 130 Ctrl-C, 143 SIGTERM.",
        allow_abbrev=False,
    )
    add = build.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML configuration")
    add("--set", dest="overrides", action="append", default=[], metavar="A.B=V", help="override one value; repeatable")
    add("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)")
    add("--resume", choices=("auto", "stateful", "weights_only"), help="what to take from a checkpoint")
    add("--from", dest="source", metavar="RUN[@LAST|BEST|STEP]", help="start a new run from an old one")
    add("--salt", help="part of the run id: the same configuration as another run")
    add(
        "--print-config",
        action="store_true",
        help="print the configuration (all that is not a default) and its run id, and stop",
    )
    add("--schema", action="store_true", help="print the JSON Schema of the configuration, and stop")
    add("--dry-run", action="store_true", help="check and compile; print parameters, FLOPs, memory; do not train")
    add("--json", action="store_true", help="end with one line of JSON on standard output, whatever happens")
    add("--quiet", action="store_true", help="no progress")
    return build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = parser().parse_args(argv)
    _fill_standard_files()
    from nnx_jax.core.errors import ConfigError, DataError, ModelError, NnxError
    from nnx_jax.loop.signals import signals_raise

    command = _Command(args)
    try:
        with signals_raise():
            return command.run()
    except (ConfigError, DataError, ModelError) as problem:
        return command.fail("refused", problem, EXIT_CONFIG)
    except KeyboardInterrupt as stopped:
        return command.fail("interrupted", stopped, getattr(stopped, "exit_code", EXIT_INTERRUPTED))
    except NnxError as problem:
        return command.fail("failed", problem, EXIT_FAILED)
    except OSError as problem:
        return command.fail("failed", f"{type(problem).__name__}: {problem}", EXIT_FAILED)
    except Exception as problem:  # a callback's or a dataset's own: its trace is what its author needs
        traceback.print_exc()
        return command.fail("failed", f"{type(problem).__name__}: {problem}", EXIT_FAILED)


class _Command:
    """One call of the command; remembers the configuration once it is known, for the last line of a failure."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.spec: RunSpec | None = None

    def run(self) -> int:
        """Do what the options say; return 0."""
        from nnx_jax.core.errors import ConfigError

        args = self.args
        if args.schema:
            import nnx_jax.data  # noqa: F401  # registers the built-in datasets
            from nnx_jax.hooks import register_builtin
            from nnx_jax.params.schema import json_schema

            register_builtin()
            _say(json.dumps(json_schema(), indent=2))
            return 0
        if args.config is None:
            raise ConfigError("--config FILE is needed; see examples/digits.yaml, or --schema for every key")
        spec = _spec(args)
        if args.print_config:
            _say(f"# run id {spec.run_id()}\n{spec.to_yaml()}".rstrip("\n"))
            return 0
        from nnx_jax.model import dry_run, train_spec

        if args.dry_run:
            report = dry_run(spec)
            _say(json.dumps(report) if args.json else _table(report))
            return 0
        _check_source(args)
        self.spec = spec
        result = train_spec(spec, runs_dir=args.runs_dir, quiet=args.quiet)
        if args.json:
            _say(json.dumps(result))
        elif not args.quiet:
            _say(_summary(result))
        return 0

    def fail(self, status: str, problem: object, code: int) -> int:
        """Say what went wrong on standard error, and with --json what there is of the run; return `code`."""
        _say(f"nnx_jax.train: {str(problem) or type(problem).__name__}", error=True)
        if self.args.json:
            _say(json.dumps({**self._found(), "status": status, "error": str(problem)}))
        return code

    def _found(self) -> dict[str, Any]:
        """Return the last line's keys for a run without a result: what its last commit holds."""
        from nnx_jax.core.errors import NnxError
        from nnx_jax.runs.run import NNRun

        found: dict[str, Any] = dict.fromkeys(("run_id", "status", "epoch", "step"))
        found.update(train={}, val={}, test={}, run_dir=None)
        if self.spec is None:
            return found
        with contextlib.suppress(NnxError, OSError):
            found["run_id"] = self.spec.run_id()
            run = NNRun.load(found["run_id"], self.args.runs_dir)
            if run.last is not None:
                found.update(epoch=run.last.epoch, step=run.last.step, run_dir=os.path.relpath(run.path))
            rows = [row for row in run.records if row["kind"] in ("epoch", "eval")]
            for name, value in rows[-1].items() if rows else ():
                split, _, metric = name.partition("_")
                if split in ("train", "val") and isinstance(value, int | float) and abs(value) < float("inf"):
                    found[split][metric] = value
        return found


def _spec(args: argparse.Namespace) -> RunSpec:
    from nnx_jax.config import load_config

    overrides = list(args.overrides)
    if args.salt is not None:
        overrides.append(f"train.salt={json.dumps(args.salt)}")
    if args.resume is not None:
        overrides.append(f"train.resume_mode={args.resume}")
    if args.source is not None:
        run, _, point = args.source.partition("@")
        overrides.append(f"train.resume_from_run_id={json.dumps(run)}")
        overrides.append(f"train.resume_from_checkpoint={json.dumps(point or 'LAST')}")
    return load_config(args.config, overrides)


def _check_source(args: argparse.Namespace) -> None:
    """A misspelled --from is a wrong configuration; a damaged checkpoint is a failure."""
    if args.source is None:
        return
    from nnx_jax.core.errors import ConfigError, nearest
    from nnx_jax.runs.best import run_ids
    from nnx_jax.runs.layout import RunPaths

    paths = RunPaths(args.runs_dir, args.source.partition("@")[0])
    if not paths.run.is_dir():
        known = nearest(paths.run_id, run_ids(paths.root)) if paths.root.is_dir() else ""
        raise ConfigError(f"there is no run {paths.run_id!r} in {paths.root}{known}", path="--from")


def _table(report: dict[str, Any]) -> str:
    width = max(len(name) for name in report)
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in report.items()}
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def _summary(result: dict[str, Any]) -> str:
    """Return the result for a person; the last line is the run's directory."""
    parts = [f"run {result['run_id']} {result['status']}: epoch {result['epoch']}, step {result['step']}"]
    for split in ("train", "val", "test"):
        values = {name: value for name, value in result[split].items() if value is not None}
        if values:
            parts.append(f"  {split:<5} " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return "\n".join([*parts, result["run_dir"]])


def _say(text: str, *, error: bool = False) -> None:
    from nnx_jax.loop.progress import say

    say(text, sys.stderr if error else sys.stdout)


def _fill_standard_files() -> None:
    """Occupy closed standard file descriptors, so that no file of the run gets a number that libraries print to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
