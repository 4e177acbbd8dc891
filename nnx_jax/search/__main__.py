"""python -m nnx_jax.search: a configuration, a space of values for its fields, and a table of what they came to."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.plan import ExperimentPlan
    from nnx_jax.search.outcomes import SearchResult

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The command's options; importing this module imports neither jax nor the project's heavy parts."""
    build = argparse.ArgumentParser(
        prog="python -m nnx_jax.search",
        description="Try values of a configuration's fields, one run each. The same command goes on where it stopped.",
        epilog="Exit codes: 0 done, 1 the search failed, 2 a file or option is wrong, 130 Ctrl-C, 143 SIGTERM.",
        allow_abbrev=False,
    )
    add = build.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="YAML configuration of one run")
    add("--space", type=Path, required=True, metavar="FILE", help="YAML: path of a field -> {kind: float, low: ...}")
    add("--trials", type=int, required=True, metavar="N", help="trials of the whole study")
    add("--set", dest="overrides", action="append", default=[], metavar="A.B=V", help="override one value; repeatable")
    add("--sampler", choices=("random", "grid", "optuna"), default="random", help="where values come from")
    add("--seed", type=int, default=0, metavar="S", help="seed of the sampler (default: 0)")
    add("--points", type=int, default=5, metavar="N", help="grid: values of a continuous range (default: 5)")
    add("--monitor", metavar="val_NAME", help="what is compared (default: train.monitor, else val_loss)")
    add("--updates", type=int, metavar="N", help="updates after which a trial ends")
    add("--deadline", type=float, metavar="SECONDS", help="start no trial after so long")
    add("--study", metavar="NAME", help="name of the study (default: the configuration's)")
    add("--storage", type=Path, default=Path("studies"), metavar="DIR", help="where studies live (default: studies)")
    add("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)")
    add("--vmapped", action="store_true", help="all trials as one program; they differ in rate and seed, leave no runs")
    add("--json", action="store_true", help="end with one line of JSON in place of the table")
    add("--quiet", action="store_true", help="no line for each trial")
    return build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = parser().parse_args(argv)
    from nnx_jax.core.errors import ConfigError, DataError, ModelError, NnxError
    from nnx_jax.loop.signals import signals_raise

    try:
        with signals_raise():
            result = _search(args)
    except (ConfigError, DataError, ModelError, ImportError) as problem:
        return _fail(problem, EXIT_CONFIG)
    except KeyboardInterrupt as stopped:
        return _fail(stopped, getattr(stopped, "exit_code", EXIT_INTERRUPTED))
    except (NnxError, OSError) as problem:
        return _fail(problem, EXIT_FAILED)
    except Exception as problem:  # a callback's or a dataset's own: its trace is what its author needs
        traceback.print_exc()
        return _fail(problem, EXIT_FAILED)
    _say(_line(result) if args.json else _report(result, args))
    return 0


def _search(args: argparse.Namespace) -> SearchResult:
    from nnx_jax.config import load_config
    from nnx_jax.params.train import MonitorSpec
    from nnx_jax.plan import ExperimentPlan
    from nnx_jax.search.outcomes import SearchBudget
    from nnx_jax.search.study import search

    space = _space(args.space)
    spec = load_config(args.config, args.overrides, enable=True)
    monitor = _monitor(args.monitor) if args.monitor else spec.training.monitor or MonitorSpec()

    def apply(plan: ExperimentPlan, values: Mapping[str, Any]) -> ExperimentPlan:
        found = load_config(args.config, [*args.overrides, *words(values)])
        return ExperimentPlan.from_spec(found).with_monitor(monitor)

    return search(
        ExperimentPlan.from_spec(spec).with_monitor(monitor),
        space,
        apply=apply,
        monitor=monitor,
        budget=SearchBudget(trials=args.trials, updates_per_trial=args.updates, deadline_seconds=args.deadline),
        study_name=args.study or args.config.stem,
        storage=args.storage,
        sampler=_sampler(args),
        runs_dir=args.runs_dir,
        quiet=args.quiet,
        vmapped=args.vmapped,
    )


def words(values: Mapping[str, Any]) -> list[str]:
    """Return values by path as `--set` words of the training command."""
    from nnx_jax.core.codec import canonical_json

    return [f"{n}={v if isinstance(v, str) else canonical_json(v).decode()}" for n, v in values.items()]


def _space(path: Path) -> Any:
    from nnx_jax.core.codec import load_yaml_with_lines
    from nnx_jax.core.errors import ConfigError
    from nnx_jax.search.space import SearchSpace

    try:
        state, _ = load_yaml_with_lines(path, follow=True)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}); give the path of a YAML file", file=str(path)) from error
    return SearchSpace.from_state(state, source=str(path))


def _monitor(name: str) -> Any:
    from nnx_jax.core.errors import ConfigError
    from nnx_jax.params.train import MonitorSpec

    split, _, metric = name.partition("_")
    if split not in ("val", "train") or not metric:
        raise ConfigError(f"got {name!r}; expected a value of the history such as val_loss", path="--monitor")
    return MonitorSpec(metric=metric, split=split)


def _sampler(args: argparse.Namespace) -> Any:
    from nnx_jax.search.optuna_adapter import OptunaSampler
    from nnx_jax.search.samplers import GridSampler, RandomSampler

    if args.sampler == "grid":
        return GridSampler(args.points)
    return OptunaSampler(seed=args.seed) if args.sampler == "optuna" else RandomSampler(args.seed)


def _report(result: SearchResult, args: argparse.Namespace) -> str:
    """Return the table, and how to train the best trial again."""
    lines = [result.table()]
    if any(trial.state == "complete" for trial in result.trials):
        best = result.best
        sets = "".join(f" --set '{word}'" for word in [*args.overrides, *words(best.values)])
        lines += ["", f"best: trial {best.number}" + (f", run {best.run_id}" if best.run_id else "")]
        lines.append(f"python -m nnx_jax.train --config {args.config}{sets}")
    return "\n".join(lines)


def _line(result: SearchResult) -> str:
    from nnx_jax.core.codec import canonical_json

    complete = any(trial.state == "complete" for trial in result.trials)
    best = result.best.number if complete else None
    trials = [trial.to_state() for trial in result.trials]
    found = {"study": result.study_name, "monitor": result.monitor, "direction": result.direction}
    return canonical_json({**found, "reason": result.reason, "best": best, "trials": trials}).decode()


def _fail(problem: BaseException, code: int) -> int:
    _say(f"nnx_jax.search: {str(problem) or type(problem).__name__}", error=True)
    return code


def _say(text: str, *, error: bool = False) -> None:
    from nnx_jax.loop.progress import say

    say(text, sys.stderr if error else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
