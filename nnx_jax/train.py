"""python -m nnx_jax.train: one configuration becomes one committed, resumable run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.params.run import RunSpec

EXIT_CONFIG = 2


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
    add("--print-config", action="store_true", help="print the whole configuration and its run id, and stop")
    add("--schema", action="store_true", help="print the JSON Schema of the configuration, and stop")
    add("--dry-run", action="store_true", help="check and compile; print parameters, FLOPs, memory; do not train")
    add("--json", action="store_true", help="end with one line of JSON on standard output")
    add("--quiet", action="store_true", help="no progress")
    return build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = parser().parse_args(argv)
    from nnx_jax.core.errors import ConfigError, DataError, ModelError, NnxError

    try:
        return _run(args)
    except (ConfigError, DataError, ModelError) as problem:
        return _fail(problem, EXIT_CONFIG)
    except NnxError as problem:
        return _fail(problem, 1)
    except KeyboardInterrupt as stopped:
        return _fail(stopped, getattr(stopped, "exit_code", 130))
    except OSError as problem:
        return _fail(f"{type(problem).__name__}: {problem}", 1)


def _fail(problem: object, code: int) -> int:
    print(f"nnx_jax.train: {problem}", file=sys.stderr, flush=True)
    return code


def _run(args: argparse.Namespace) -> int:
    from nnx_jax.core.errors import ConfigError

    if args.schema:
        from nnx_jax.params.schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return 0
    if args.config is None:
        raise ConfigError("--config FILE is needed; see examples/digits.yaml, or --schema for every key")
    spec = _spec(args)
    if args.print_config:
        print(f"# run id {spec.run_id()}\n{spec.to_yaml()}", end="")
        return 0
    from nnx_jax.model import dry_run, train_spec

    if args.dry_run:
        report = dry_run(spec)
        print(json.dumps(report) if args.json else _table(report))
        return 0
    result = train_spec(spec, runs_dir=args.runs_dir, quiet=args.quiet)
    if args.json:
        print(json.dumps(result), flush=True)
    elif not args.quiet:
        print(_summary(result), flush=True)
    return 0


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


def _table(report: dict[str, Any]) -> str:
    width = max(len(name) for name in report)
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in report.items()}
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def _summary(result: dict[str, Any]) -> str:
    parts = [f"run {result['run_id']} {result['status']}: epoch {result['epoch']}, step {result['step']}"]
    for split in ("train", "val", "test"):
        values = result[split]
        if values:
            parts.append(f"  {split:<5} " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
