"""What the command prints: a bar on a terminal, short ASCII lines elsewhere, and no stream whose loss ends a run."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnx_jax.loop.progress import LINE_LENGTH, BarProgress, PlainProgress, QuietProgress, make_progress
from nnx_jax.runs.audit import verify

from .command import PATIENCE, UPDATES, Ready, assert_same_end, environment, epochs_line, runs_of, write_case


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """Processes for this module."""
    server = Ready(tmp_path_factory.mktemp("ready"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def logged(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Folder, standard output and standard error of a run whose output went to files."""
    folder = write_case(tmp_path_factory.mktemp("logged"))
    done = ready.run(folder, "--set", "train.log_every_n_steps=4")
    assert done.code == 0, done.err
    return folder, done.out, done.err


def test_log_file_has_short_plain_lines(logged: tuple[Path, str, str]) -> None:
    """case:L04: no carriage return, no escape code, ASCII, bounded, one line per epoch and per logged update."""
    _, _, err = logged
    assert err.isascii()
    assert "\r" not in err
    assert "\x1b" not in err
    lines = err.splitlines()
    assert max(map(len, lines)) <= LINE_LENGTH
    told = epochs_line(lines)
    ends = [line for line in told if " ... " not in line]
    assert [line.split()[1] for line in ends] == ["1/3", "2/3", "3/3"]
    assert [re.search(r"step (\d+)", line).group(1) for line in told if line not in ends] == ["4", "8", "16"]  # type: ignore[union-attr]
    assert all(f"step {UPDATES * (index + 1)} " in line for index, line in enumerate(ends))
    assert all("train_loss" in line and "val_loss" in line for line in ends)


def test_standard_output_is_the_result(logged: tuple[Path, str, str]) -> None:
    """nnx:B019: progress stays out of standard output, whose last line is the run's directory, relative."""
    folder, out, _ = logged
    (run,) = runs_of(folder)
    lines = out.splitlines()
    assert lines[0] == f"run {run.name} finished: epoch 3, step {3 * UPDATES}"
    assert lines[-1] == f"runs/{run.name}"
    assert str(folder) not in out
    assert out.isascii()
    assert "\r" not in out


BROKEN = "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); os.close(w)"


def test_reader_that_left_does_not_end_the_run(ready: Ready, logged: tuple[Path, str, str], tmp_path: Path) -> None:
    """case:L04: output into a pipe that nobody reads any more: the run is whole and the exit code 0."""
    folder = write_case(tmp_path)
    done = ready.run(folder, "--set", "train.log_every_n_steps=4", prelude=BROKEN)
    assert done.code == 0
    assert_same_end(runs_of(folder)[0], runs_of(logged[0])[0])


def test_closed_streams(tmp_path: Path) -> None:
    """case:L04: with standard input, output and error closed, no file of the run takes their place; exit code 0."""
    folder = write_case(tmp_path)
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", "--json"]
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(line, cwd=folder, env=environment(), timeout=PATIENCE, check=False).returncode == 0
    (run,) = runs_of(folder)
    assert verify(run.parent, run.name) == []
    assert (run / "idps.csv").read_text().startswith("kind,epoch,batch,step")


def test_ascii_streams_and_names_that_are_not(ready: Ready, logged: tuple[Path, str, str], tmp_path: Path) -> None:
    """case:L04 case:I17: PYTHONIOENCODING=ascii and a runs directory with spaces and an umlaut: nothing breaks."""
    folder = tmp_path / "a folder with spaces"
    shutil.copytree(logged[0], folder, symlinks=True)
    (folder / "runs").rename(folder / "meine Läufe")
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", "--runs-dir", "meine Läufe"]
    done = subprocess.run(
        [*command, "--set", "train.log_every_n_steps=4"],
        cwd=folder,
        env=environment(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert b"finished already" in done.stderr
    assert b"Traceback" not in done.stderr


def test_terminal_gets_a_bar(ready: Ready, logged: tuple[Path, str, str], tmp_path: Path) -> None:
    """On a terminal the epochs are one redrawn bar; the run is the same."""
    folder = write_case(tmp_path)
    ours, theirs = pty.openpty()
    seen: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(ours, seen))
    reader.start()
    prelude = "import os; os.environ.update(TERM='xterm', COLUMNS='120')"
    options = ("--set", "train.log_every_n_steps=4")
    process = ready.start(folder, *options, prelude=prelude, stderr=os.ttyname(theirs))
    done = process.wait()
    os.close(theirs)
    reader.join(PATIENCE)
    os.close(ours)
    text = b"".join(seen).decode("utf-8", "replace")
    assert done.code == 0, text
    assert "\x1b[" in text
    assert "epoch 3/3" in text
    assert f"{3 * UPDATES}/{3 * UPDATES}" in text
    assert "train_loss" in text
    assert done.out.splitlines()[-1].startswith("runs/")
    assert_same_end(runs_of(folder)[0], runs_of(logged[0])[0])


def _drain(descriptor: int, seen: list[bytes]) -> None:
    try:
        while chunk := os.read(descriptor, 65536):
            seen.append(chunk)
    except OSError:  # Linux's way of saying that the other side is closed
        return


# -- the displays themselves ----------------------------------------------------------------------------------------


def test_plain_lines_are_bounded_and_printable() -> None:
    """case:L04: long values are cut, the time stays; control characters of a message cannot reach a log."""
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start("ab" * 8, 3, 6)
    progress.values(1, 12, {f"train_{'x' * 90}{index}": 0.5 for index in range(5)}, epoch_end=True)
    progress.message("a\rb\x1b[2Jc\nd \u00e4 [e]")
    progress.stop()
    first, second, third = stream.getvalue().splitlines()
    assert first == "run abababababababab: 3 epochs of 6 batches"
    assert len(second) == LINE_LENGTH
    assert re.search(r"  \d+\.\d s$", second)
    assert third == "a?b?[2Jc?d ? [e]"


def test_plain_progress_survives_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed stream and a missing standard error swallow the lines."""
    stream = io.StringIO()
    stream.close()
    PlainProgress(stream).message("lost")
    monkeypatch.setattr(sys, "stderr", None)
    PlainProgress().message("lost")
    assert isinstance(make_progress(), PlainProgress)


def test_bar_takes_brackets_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A path like `[/tmp]` is no markup."""
    bar = BarProgress()
    bar.start("ab" * 8, 3, 6)
    bar.advance(0, 3)
    bar.values(0, 3, {"train_a[/b]": 0.5}, epoch_end=True)
    bar.message("in [/tmp] and [red]")
    bar.stop()
    text = capsys.readouterr().err
    assert "in [/tmp] and [red]" in text
    assert "train_a[/b] 0.5000" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term, kind", [("xterm", BarProgress), ("dumb", PlainProgress), (None, PlainProgress)])
def test_display_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, term: str | None, kind: type) -> None:
    """A terminal that cannot move its cursor gets lines; quiet gets nothing."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert isinstance(make_progress(), kind)
    assert isinstance(make_progress(quiet=True), QuietProgress)
