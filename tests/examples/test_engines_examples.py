"""Examples and notebook of operators and engines: small forms always, what their first lines promise in slow tests.

Those that need an extra are collected only where it is installed, as are the snippets of docs/engines.md.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from nnx_jax.backends import blackjax, numpyro_mcmc, outside
from nnx_jax.core import errors, registry
from nnx_jax.training_loop import TrainingLoop

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "notebook_engines.ipynb"
SMALL = ["--steps", "20", "--samples", "200"]
EXTRAS = ("equinox", "numpyro", "blackjax", "torch", "lightning", "keras")


def there(*packages: str) -> bool:
    return all(find_spec(package) for package in packages)


bayes = there("numpyro", "blackjax")
if there("numpyro"):
    import numpyro  # noqa: F401  # the warnings of its own import are not the examples'

Run = Callable[..., tuple[list[float], str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run an example as `python examples/NAME.py` does; return its numbers and what it printed.

    Other tests do not see the kinds that it registers.
    """

    def run(name: str, *arguments: str) -> tuple[list[float], str]:
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        text = capsys.readouterr().out
        return [float(number) for number in re.findall(r"(?<![\w.])-?\d+\.\d+(?:e[-+]\d+)?", text)], text

    yield run
    for key, cls in list(registry._CLASSES.items()):
        if cls.__module__ == "__main__":
            del registry._CLASSES[key]


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# -- small forms ---------------------------------------------------------------------------------------------------


def test_emulator(run: Run, tmp_path: Path) -> None:
    """A simulation becomes a dataset, and a trained operator takes the simulator's place in a rollout (pipekit:I13)."""
    (one_step, rollout), text = run("emulator", *SMALL)
    assert 0 < one_step < 10
    assert rollout > 0
    assert "from the simulator" in text
    assert is_picture(tmp_path / "emulator.png")
    assert len(list((tmp_path / "cache").iterdir())) == 2  # train and val, each simulated once


def test_amortised_inference(run: Run, tmp_path: Path) -> None:
    """Pairs turned round and a network that returns a distribution, by the negative log-likelihood."""
    _, text = run("amortised_inference", *SMALL)
    assert text.count("in the 90 % intervals") == 2
    assert is_picture(tmp_path / "amortised_inference.png")


@pytest.mark.skipif(not there("flatbuffers"), reason="needs the extra export")
def test_serve_swap(run: Run, tmp_path: Path) -> None:
    """Loaded from the registry by the artifact, and exported: the same answers as the operator that was trained."""
    (_, after, apart), text = run("serve_swap", "--steps", "60")
    assert after > 0.5
    assert "bit-identical: True" in text
    assert apart < 1e-4
    assert (tmp_path / "digits.stablehlo").is_file()


if bayes:

    @pytest.mark.slow  # three engines are compiled
    def test_three_posteriors(run: Run, tmp_path: Path) -> None:
        """The same task under three names of backends: both samplers agree with the closed form, and independent
        normals have its centre and no tilt (pipekit:K21)."""
        numbers, text = run("three_posteriors")
        assert [line.split()[0] for line in text.splitlines()] == ["exact", "numpyro-svi", "numpyro-mcmc", "blackjax"]
        assert is_picture(tmp_path / "three_posteriors.png")
        exact, svi, mcmc, blackjax = (numbers[start : start + 5] for start in range(0, 20, 5))
        for found in (mcmc, blackjax):
            assert abs(found[0] - exact[0]) < 0.2 * exact[1]
            assert abs(found[2] - exact[2]) < 0.2 * exact[3]
            assert found[1] == pytest.approx(exact[1], rel=0.2)
            assert found[4] == pytest.approx(exact[4], abs=0.05)
        assert abs(svi[0] - exact[0]) < 0.5 * exact[1]
        independent = exact[1] * (1 - exact[4] ** 2) ** 0.5  # the best of independent normals: the conditional's sd
        assert svi[1] == pytest.approx(independent, rel=0.25)
        assert abs(svi[4]) < 0.1


# -- what one sees -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_emulator_swings_as_the_simulator(run: Run) -> None:
    (one_step, rollout), _ = run("emulator")
    assert one_step < 0.01
    assert rollout < 0.3


@pytest.mark.slow
def test_intervals_hold_what_they_promise(run: Run) -> None:
    _, text = run("amortised_inference")
    shares = [float(share) for share in re.findall(r"([\d.]+) of the truths", text)]
    assert len(shares) == 2
    assert all(0.84 < share < 0.95 for share in shares)


@pytest.mark.slow
@pytest.mark.skipif(not there("flatbuffers"), reason="needs the extra export")
def test_the_served_model_reads_digits(run: Run) -> None:
    (before, after, _), _ = run("serve_swap")
    assert before < 0.3
    assert after > 0.95


# -- the notebook and the page -------------------------------------------------------------------------------------


def test_notebook_is_stored_without_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


if bayes and there("equinox", "flatbuffers"):

    @pytest.mark.slow
    def test_notebook_runs(tmp_path: Path) -> None:
        """Every cell, in a kernel of its own, from a folder where only the installed package can be found."""
        import nbclient
        import nbformat

        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
        said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
        assert said.rstrip().endswith("True")
        kinds = [
            kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())
        ]
        assert "image/png" in kinds


def needs(code: str) -> list[str]:
    """The extras of a snippet: what it imports, or names as a backend; an exported file is written by flatbuffers."""
    named = [name for name in EXTRAS if re.search(rf'(?:import|from) {name}\b|backend="{name}', code)]
    return [*named, *(["flatbuffers"] if "engines.exported" in code else [])]


def snippets() -> list[object]:
    """Every Python block of docs/engines.md whose extras are there, named by its line."""
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        pytest.param(each[1], id=f"line {text.count(chr(10), 0, each.start()) + 1}")
        for each in found
        if there(*needs(each[1]))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("code", snippets())
def test_snippet_of_the_engines_runs(code: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


# -- what the pages say --------------------------------------------------------------------------------------------


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """Text by heading of the second level, up to a colon."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return {heading.partition(":")[0]: body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_decision_is_answered() -> None:
    """D1-D14 and Q1-Q5 have a section each, with what differs and where it is; the change log has them (pipekit:CH)."""
    found, log = sections(page("decisions.md")), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert list(found) == [f"D{number}" for number in range(1, 15)] + [f"Q{number}" for number in range(1, 6)]
    for name, text in found.items():
        if name.startswith("D"):
            assert all(f"**{part}.**" in text for part in ("Here", "What differs", "Where")), name
            assert re.search(rf"^- {name}: ", log, re.MULTILINE), name
        for path in re.findall(r"`(nnx_jax/[\w/.]+)`", text):
            assert (ROOT / path).exists(), (name, path)


def test_every_engine_says_what_to_do_when_it_fails() -> None:
    """A debugging list for each, of messages that there are, and one of the layers that errors name (pipekit:D1.3)."""
    source = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "nnx_jax").rglob("*.py"))
    found = sections(page("engines.md"))
    for name in ("Equinox", "NumPyro", "BlackJAX", "Lightning", "Keras"):
        text = " ".join(found[name].partition("**If it fails.**")[2].split())
        assert text, name
        messages = [
            quoted for quoted in re.findall(r"`([^`]*)`", text) if re.fullmatch("[A-Za-z]+( [A-Za-z]+){2,}", quoted)
        ]
        assert [message for message in messages if message not in source] == []
    layers = re.findall(r"^\| `(\w+):`", sections(page("training-loop.md"))["When something fails"], re.MULTILINE)
    assert (
        {"config", "data", "model", "step", "checkpoint"}
        == set(layers)
        <= {getattr(each, "layer", None) for each in vars(errors).values()}
    )


def test_the_table_of_fields_is_what_the_backends_do() -> None:
    """Fields that a backend warns of, or refuses, are those that the page says."""
    rows = {
        name: [cell.strip() for cell in line.split("|")[2:-1]]
        for line in re.findall(r"^\| `.*$", sections(page("training-loop.md"))["Backends"], re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
        if line.count("|") == 8
    }
    alike = {"model_op", "dataset", "seed", "quiet", "backend"}
    inside = {"checkpoint_every_n_steps", "max_checkpoints_to_keep"}  # the cadence of checkpoint_dir
    assert set(rows) | alike | inside == set(TrainingLoop.model_fields)
    for name, (_, _, mcmc, sampled, lightning, keras) in rows.items():
        assert ("warned" in mcmc) == (name in numpyro_mcmc.UNUSED or name == "max_steps"), name
        assert ("warned" in sampled) == (name in (*blackjax.UNUSED, "batch_size")), name
        refused = name in (*outside._REFUSED, "checkpoint_dir")
        assert lightning.startswith("no") == refused, name
        assert keras.startswith("no") == (refused or name == "task"), name


def test_names_of_the_api_page_are_where_it_says() -> None:
    for names, where in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `([\w.]+)` \|", page("api.md"), re.MULTILINE):
        if where.startswith("torch") and not there("torch"):
            continue
        module = import_module(f"nnx_jax.{where}")
        assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(module, name)] == []
