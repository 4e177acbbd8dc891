"""python -m nnx_jax.train: one configuration becomes one committed, resumable run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.core.errors import DistributedFailure
    from nnx_jax.params.run import RunSpec

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
_FACES = {"flax": "nnx_jax.model", "torch": "nnx_jax.torch.model"}
_GROUPS = {"flax": "nnx_jax.distributed", "torch": "nnx_jax.torch.distributed"}


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
    add("--devices", type=int, metavar="N", help="with --dry-run: for a mesh of N devices that need not be there")
    add("--device", metavar="NAME", help="engine torch: cpu, cuda, cuda:1 or mps, where the model is (default: cpu)")
    add("--json", action="store_true", help="end with one line of JSON on standard output, whatever happens")
    add("--quiet", action="store_true", help="no progress")
    _add_group(build)
    return build


def _add_group(build: argparse.ArgumentParser) -> None:
    """Options of a command that is one of several processes."""
    add = build.add_argument_group(
        "several processes",
        "started by `python -m nnx_jax.launch`, srun, mpirun or as pods, each with the same command; their environment "
        "says which is which, or these options do",
    ).add_argument
    add("--distributed", action="store_true", help="this command is one of a group that trains one model")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 is reached")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")
    add("--process-id", type=int, metavar="I", help="which one this is, from 0")
    add("--timeout-seconds", type=float, metavar="T", help="bound of every wait for another process (default: 120)")
    add("--writer-rank", type=int, default=0, metavar="R", help="the process that writes the run (default: 0)")
    add("--allow", action="append", metavar="NAME", help="engine torch: journal or autocast in a group; repeatable")
    add("--batch-norm", choices=("refuse", "sync"), help="engine torch: sync is over the rows of all processes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = parser().parse_args(argv)
    fill_standard_files()
    from nnx_jax.core.errors import ConfigError, DataError, DistributedFailure, ModelError, NnxError
    from nnx_jax.loop.signals import signals_raise

    group = _Group(args)
    command = _Command(args, group)
    try:
        with signals_raise(), group.told():
            return command.run()
    except (ConfigError, DataError, ModelError) as problem:
        code = command.fail("refused", problem, EXIT_CONFIG)
    except KeyboardInterrupt as stopped:
        code = command.fail("interrupted", stopped, getattr(stopped, "exit_code", EXIT_INTERRUPTED))
    except DistributedFailure as problem:
        code = command.fail("failed", problem, _code_of(problem))
    except NnxError as problem:
        code = command.fail("failed", problem, EXIT_FAILED)
    except OSError as problem:
        code = command.fail("failed", f"{type(problem).__name__}: {problem}", EXIT_FAILED)
    except Exception as problem:  # a callback's or a dataset's own: its trace is what its author needs
        traceback.print_exc()
        code = command.fail("failed", f"{type(problem).__name__}: {problem}", EXIT_FAILED)
    return group.abandon(code)


class _Group:
    """The group of processes that this command is one of; without --distributed it is alone and does nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.size = 0, 1
        self.joined = False

    @property
    def writes(self) -> bool:
        """This process writes the run and speaks for all."""
        return self.rank == self.args.writer_rank or self.size == 1

    @property
    def name(self) -> str:
        """What messages of this process begin with."""
        return "nnx_jax.train" if self.size == 1 else f"nnx_jax.train, rank {self.rank}"

    def join(self) -> Any:
        """Join it; return what `train_spec` takes as `distributed`. Nothing may have started JAX before."""
        from nnx_jax.core.errors import ConfigError

        args = self.args
        given = {
            name: value
            for name in ("coordinator", "num_processes", "process_id", "timeout_seconds")
            if (value := getattr(args, name)) is not None
        }
        more = {name: value for name in ("allow", "batch_norm") if (value := getattr(args, name)) is not None}
        if not args.distributed:
            if given or more or args.writer_rank:
                name = next(iter({**given, **more}), "writer_rank").replace("_", "-")
                raise ConfigError("it is an option of a group of processes; add --distributed", path=f"--{name}")
            return None
        if more and self.module.__name__ != _GROUPS["torch"]:
            message = "it is an option of the engine 'torch'; a group of the engine 'flax' needs none"
            raise ConfigError(message, path=f"--{next(iter(more)).replace('_', '-')}")
        chosen = self.module.DDP(writer_rank=args.writer_rank, **more)
        told = [name for name in given if name != "timeout_seconds"]
        if told and self.module.__name__ == _GROUPS["torch"]:
            message = "the engine 'torch' takes its group from torchrun's environment"
            raise ConfigError(message, path=f"--{told[0].replace('_', '-')}")
        self.rank, self.size = self.module.init_process_group(**given)
        self.joined = True
        return chosen

    @functools.cached_property
    def module(self) -> Any:
        """How processes of this configuration's engine go together."""
        from nnx_jax.config import backend_of

        return _module(_GROUPS, backend_of(self.args.config, self.args.overrides))

    def prints(self) -> bool:
        """Whether this process prints what needs no group: the one that would write, as far as is known."""
        from nnx_jax.core.errors import ProcessGroupError
        from nnx_jax.spmd.launched import launched

        if self.args.distributed:
            with contextlib.suppress(ProcessGroupError):
                return launched(os.environ, process_id=self.args.process_id).rank == self.args.writer_rank
        return True

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Leave together; or tell the others of an error here, before anything waits for them."""
        try:
            yield
            if self.args.distributed:
                self.module.shutdown()
        except BaseException as error:
            if self.size > 1:
                with contextlib.suppress(Exception):
                    self.module.tell_failure("the command", error)
            raise

    def abandon(self, code: int) -> int:
        """End after a failure: a process of a group ends here and now, since no other one will help it to."""
        if not self.joined:
            return code
        if self.size > 1:
            self.module.leave(code)
        self.module.shutdown()
        return code


def _code_of(failure: DistributedFailure) -> int:
    """The exit code that another process's error has there; so all processes end with the same one."""
    from nnx_jax.core import errors

    if failure.kind in ("Interrupted", "KeyboardInterrupt"):
        return 143 if "SIGTERM" in failure.message else EXIT_INTERRUPTED
    kind = getattr(errors, failure.kind, None)
    wrong = (errors.ConfigError, errors.DataError, errors.ModelError)
    return EXIT_CONFIG if isinstance(kind, type) and issubclass(kind, wrong) else EXIT_FAILED


class _Command:
    """One call of the command; remembers the configuration once it is known, for the last line of a failure."""

    def __init__(self, args: argparse.Namespace, group: _Group) -> None:
        self.args, self.group = args, group
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
            if self.group.prints():
                _say(json.dumps(json_schema(), indent=2))
            return 0
        if args.config is None:
            raise ConfigError("--config FILE is needed; see examples/digits.yaml, or --schema for every key")
        if args.print_config:
            spec = _spec(args)
            if self.group.prints():
                _say(f"# run id {spec.run_id()}\n{spec.to_yaml()}".rstrip("\n"))
            return 0
        self._pretend()
        distributed = self.group.join()  # before modules of the user's, which may start JAX, are imported
        self._train(_spec(args), distributed)
        return 0

    def _pretend(self) -> None:
        """With --devices: let JAX see so many, before anything starts it."""
        from nnx_jax.core.errors import ConfigError

        if self.args.devices is None:
            return
        if not self.args.dry_run or self.args.distributed:
            raise ConfigError("it is an option of a dry run in one process; add --dry-run", path="--devices")
        from nnx_jax.spmd.virtual import pretend_devices

        pretend_devices(self.args.devices)

    def _train(self, spec: RunSpec, distributed: Any) -> None:
        args, writes = self.args, self.group.writes
        face, place = _module(_FACES, spec.backend), _place(args, spec)
        if args.dry_run:
            if args.devices is not None and not spec.mesh:
                from nnx_jax.core.errors import ConfigError

                message = f"--devices {args.devices} needs a mesh; add --set mesh={{data: -1}}, or fsdp: -1"
                raise ConfigError(message, path="mesh")
            if distributed is not None and not spec.mesh:
                spec = spec.replace(mesh={"data": -1})  # as training has it
            report = face.dry_run(spec, **place)
            if writes:
                _say(json.dumps(report) if args.json else _table(report))
            return
        _check_source(args)
        self.spec = spec
        quiet = args.quiet or not writes
        result = face.train_spec(spec, runs_dir=args.runs_dir, quiet=quiet, distributed=distributed, **place)
        if args.json and writes:
            _say(json.dumps(result))
        elif not quiet:
            _say(_summary(result))

    def fail(self, status: str, problem: object, code: int) -> int:
        """Say what went wrong on standard error, and with --json what there is of the run; return `code`."""
        _say(f"{self.group.name}: {str(problem) or type(problem).__name__}", error=True)
        if self.args.json and self.group.writes:
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
            for name, value in run.summaries[-1].items() if run.summaries else ():
                split, _, metric = name.partition("_")
                if split in ("train", "val") and isinstance(value, int | float) and abs(value) < float("inf"):
                    found[split][metric] = value
        return found


def _spec(args: argparse.Namespace) -> RunSpec:
    from nnx_jax.config import load_config, training_block

    options: dict[str, str | None] = {"salt": args.salt, "resume_mode": args.resume}
    if args.source is not None:
        run, _, point = args.source.partition("@")
        options |= {"resume_from_run_id": run, "resume_from_checkpoint": point or "LAST"}
    given = {name: value for name, value in options.items() if value is not None}
    block = training_block(args.config) if given else ""
    words = [f"{block}.{name}={json.dumps(value)}" for name, value in given.items()]
    return load_config(args.config, [*args.overrides, *words], enable=True)


def _module(places: Mapping[str, str], backend: str) -> Any:
    """The module for the engine that a configuration asks for.

    Raises:
        ConfigError: there is no such engine, or torch is not installed.
    """
    from importlib import import_module

    from nnx_jax.core.errors import ConfigError, nearest

    if backend not in places:
        told = f"got '{backend}'; the engines are {', '.join(places)}{nearest(backend, places)}"
        raise ConfigError(told, path="backend")
    try:
        return import_module(places[backend])
    except ImportError as error:
        if error.name != "torch":
            raise
        raise ConfigError(f"got '{backend}': {error}", path="backend") from error


def _place(args: argparse.Namespace, spec: RunSpec) -> dict[str, str]:
    """With --device: where the model shall be, for the engine that has a choice."""
    from nnx_jax.core.errors import ConfigError

    if args.device is None:
        return {}
    if spec.backend != "torch":
        message = f"it is an option of the engine 'torch'; '{spec.backend}' uses the devices that JAX_PLATFORMS names"
        raise ConfigError(message, path="--device")
    return {"device": args.device}


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
    mesh = report.get("mesh")
    report = {name: value for name, value in report.items() if name != "mesh"}
    width = max(len(name) for name in report)
    shown = {name: f"{value:,}" if isinstance(value, int) else value for name, value in report.items()}
    lines = [f"{name:<{width}}  {value}" for name, value in shown.items()]
    if mesh is not None:
        from nnx_jax.spmd.report import mesh_text

        lines += ["", mesh_text(mesh)]
    return "\n".join(lines)


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


def fill_standard_files() -> None:
    """Occupy closed standard file descriptors, so that no file of the run gets a number that libraries print to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
