"""`python -m nnx_jax.runs`: list, show, verify and remove stored runs, without importing jax."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from nnx_jax.core import codec
from nnx_jax.core.errors import NnxError, ResumePointError, nearest
from nnx_jax.runs import audit, best, lease, store
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.run import NNRun

_TAIL_ROWS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 faults found or refused, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except NnxError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"checkpoint: {error}", file=sys.stderr)
    return 1


def _list(arguments: argparse.Namespace) -> int:
    root = RunPaths(arguments.runs_dir, "_").root
    holder = best.read_best(root)
    summaries = []
    for run_id in best.run_ids(root):
        try:
            summaries.append(_summary(NNRun.load(run_id, root)))
        except (NnxError, OSError) as error:
            summaries.append({"id": run_id, "status": "damaged", "error": str(error)})
    if arguments.json:
        print(codec.canonical_json({"runs": summaries, "best": holder}).decode())
        return 0
    if not summaries:
        print(f"no runs in {root}")
    for summary in summaries:
        mark = "*" if summary["id"] == holder else " "
        place = "" if summary.get("step") is None else f"  epoch {summary['epoch']}  step {summary['step']}"
        print(f"{mark} {summary['id']}  {summary['status']:<11}{place}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    run = NNRun.load(arguments.id, arguments.runs_dir)
    summary = _summary(run)
    if arguments.json:
        details = {"config": run.state, "metadata": run.metadata, "artifact": run.artifact}
        try:
            if (known := run.provenance) is not None:
                details["provenance"] = {**known.manifest.document(), "fingerprint": known.fingerprint}
                details["attempt"] = known.attempt.state() if known.attempt else None
        except ResumePointError as error:
            details["provenance"] = {"error": str(error)}
        print(codec.canonical_json({**summary, **details}).decode())
        return 0
    print(f"{run.id}  {run.status}  {run.path}")
    for name, pointer in run.pointers.items():
        place = f"epoch {pointer.epoch}  step {pointer.step}  batch {pointer.batch}"
        print(f"  {name:<12} generation {pointer.generation}  {place}")
    print(f"  {run.committed_rows} rows of history in {run.history.name}")
    for record in _newest(run):
        print("    " + "  ".join(f"{name}={value}" for name, value in record.items() if value is not None))
    for line in _provenance(run):
        print(line)
    print("configuration:")
    print("  " + codec.dump_yaml(run.state).rstrip().replace("\n", "\n  "))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    faults = audit.verify(arguments.runs_dir, arguments.id)
    if arguments.json:
        print(codec.canonical_json({"id": arguments.id, "faults": faults}).decode())
    else:
        for fault in faults:
            print(fault)
    return 1 if faults else 0


def _remove(arguments: argparse.Namespace) -> int:
    paths = RunPaths(arguments.runs_dir, arguments.id)
    if not paths.run.is_dir():
        known = nearest(arguments.id, best.run_ids(paths.root))
        raise ResumePointError(f"there is no run {arguments.id!r} in {paths.root}{known}")
    with lease.acquire(paths):
        store.remove(paths)
    if arguments.json:
        print(codec.canonical_json({"removed": arguments.id}).decode())
    else:
        print(f"removed {arguments.id}")
    return 0


def _newest(run: NNRun) -> list[dict[str, Any]]:
    """Return the last rows; a journal has the last epoch's row elsewhere than the records before it."""
    apart = run.epochs[-1:] if run.history.is_dir() else []
    return [*run.records[len(apart) - _TAIL_ROWS :], *apart]


def _provenance(run: NNRun) -> Iterator[str]:
    """Yield what the run is said to come from, and how the newest attempt at it went."""
    try:
        known = run.provenance
    except ResumePointError as error:
        yield f"provenance: {error}"
        return
    if known is None:
        return
    attempt = known.attempt
    if attempt is not None:
        killed = attempt.status == "running" and run.status != "running"
        yield f"attempt {attempt.attempt_id}: {'running when it was killed' if killed else attempt.status}"
        for name in ("started_at", "finished_at", "parent", "last_committed", "error"):
            value = getattr(attempt, name)
            if value is not None:
                text = value if isinstance(value, str) else "  ".join(f"{key}={part}" for key, part in value.items())
                yield f"  {name}: {text}"
    yield f"experiment {known.fingerprint}:"
    yield "  " + codec.dump_yaml(known.manifest.state()).rstrip().replace("\n", "\n  ")


def _summary(run: NNRun) -> dict[str, Any]:
    last = run.last
    return {
        "id": run.id,
        "status": run.status,
        "run_dir": str(run.path),
        "epoch": last.epoch if last else None,
        "step": last.step if last else None,
        "batch": last.batch if last else None,
        "rows": run.committed_rows,
        "history": run.history.name,
        "checkpoints": {name: pointer.step for name, pointer in run.pointers.items()},
    }


def _parser() -> argparse.ArgumentParser:
    options = _options("runs", False)
    parser = argparse.ArgumentParser(prog="python -m nnx_jax.runs", description=__doc__, parents=[options])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("list", _list, "one line per run; * marks runs/best"),
        ("show", _show, "checkpoints, newest rows, provenance and configuration of a run"),
        ("verify", _verify, "check every byte of a run; exit 0, or 1 with a line per fault"),
        ("rm", _remove, "remove a run nobody is writing"),
    ):
        sub = commands.add_parser(name, help=text, description=text, parents=[_options()])
        sub.set_defaults(command=command)
        if command is not _list:
            sub.add_argument("id", help="the run id")
    return parser


def _options(runs_dir: str = argparse.SUPPRESS, json: bool | str = argparse.SUPPRESS) -> argparse.ArgumentParser:
    """Return the options that may stand before or after the command; only those before carry the defaults."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--runs-dir", default=runs_dir, metavar="D", help="the runs directory (default: runs)")
    options.add_argument("--json", action="store_true", default=json, help="print one line of JSON")
    return options


if __name__ == "__main__":
    sys.exit(main())
