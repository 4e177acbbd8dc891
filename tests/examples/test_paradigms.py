"""The examples of paradigms: short, run with small arguments, and (slow) what their first lines say one sees."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "ddpm_2d": ["--epochs", "2"],
    "distill_digits": ["--epochs", "1"],
    "dpo_text": ["--epochs", "2", "--rows", "16"],
    "lora_text": ["--epochs", "1", "--max-bytes", "20000"],
    "mixup_digits": ["--epochs", "1"],
    "simclr_digits": ["--epochs", "1"],
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run an example as `python examples/NAME.py` does; return its numbers and what it printed."""

    def run(name: str, *arguments: str) -> tuple[list[float], str]:
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        text = capsys.readouterr().out
        said = text.partition(", such as")[0]  # what a model wrote may have numbers of its own
        return [float(number) for number in re.findall(r"(?<![\w.])\d+\.\d+(?:e-\d+)?", said)], text

    return run


@pytest.mark.parametrize("name", SMALL)
def test_it_is_short_and_says_what_one_sees(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert "One sees" in text.split('"""')[1]
    assert f"python examples/{name}.py [--out DIR] [--epochs N]" in text


@pytest.mark.slow
def test_distillation(run) -> None:
    numbers, text = run("distill_digits", *SMALL["distill_digits"])
    assert len(numbers) == 3
    assert "60 labels and a teacher" in text


@pytest.mark.slow
def test_simclr(run) -> None:
    numbers, _ = run("simclr_digits", *SMALL["simclr_digits"])
    before, first, last, after = numbers
    assert 0 <= first == last <= 1
    assert min(before, after) > 0.3


@pytest.mark.slow
def test_mixup(run) -> None:
    assert len(run("mixup_digits", *SMALL["mixup_digits"])[0]) == 6


@pytest.mark.slow
def test_diffusion_leaves_its_picture(run, tmp_path: Path) -> None:
    numbers, _ = run("ddpm_2d", *SMALL["ddpm_2d"])
    assert numbers[1] < numbers[0]
    assert (tmp_path / "ddpm_2d.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_lora(run) -> None:
    (before, after, apart), text = run("lora_text", *SMALL["lora_text"])
    assert after < before
    assert apart < 1e-4
    assert "base bit-identical: True" in text


@pytest.mark.slow
def test_preferences(run) -> None:
    numbers, text = run("dpo_text", *SMALL["dpo_text"])
    assert text.count("preference accuracy") == 2
    assert len(numbers) == 6


@pytest.mark.slow
def test_a_student_with_a_teacher_is_better_than_one_alone(run) -> None:
    (teacher, alone, student), _ = run("distill_digits")
    assert student > max(alone + 0.1, teacher - 0.05)


@pytest.mark.slow
def test_features_are_better_after_contrastive_training(run) -> None:
    before, first, last, after = run("simclr_digits")[0]
    assert after > before + 0.1
    assert last > first + 0.2


@pytest.mark.slow
def test_mixup_does_not_learn_wrong_labels_by_heart(run) -> None:
    known, plain, _, mixed_known, mixed, _ = run("mixup_digits")[0]
    assert known > mixed_known + 0.1
    assert mixed > plain + 0.05


@pytest.mark.slow
@pytest.mark.long
def test_samples_lie_on_the_spiral(run) -> None:
    assert run("ddpm_2d")[0][2] < 0.02


@pytest.mark.slow
@pytest.mark.long
def test_additions_learn_english(run) -> None:
    before, after, _ = run("lora_text")[0]
    assert after < before - 0.3


@pytest.mark.slow
@pytest.mark.long
def test_preferences_are_learned(run) -> None:
    numbers = run("dpo_text")[0]
    accuracies = numbers[1:-1:2]
    assert accuracies[-1] > max(accuracies[0] + 0.03, 0.75)
    assert numbers[-1] < numbers[0] / 2
