"""The regression check: what it must see, what it must not, and what it cannot read."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from made_results import SECONDS, write

from benchmarks.compare import main

WORSE = {**SECONDS, "distmon sampled": 1.5 * SECONDS["distmon sampled"]}


def test_the_same_data_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run")
    assert main([str(folder), str(folder)]) == 0
    assert "no regression over 20% in 6 comparisons" in capsys.readouterr().out


def test_a_contender_half_as_slow_again_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write(tmp_path / "old"), write(tmp_path / "new", WORSE, seed=1)
    assert main([str(old), str(new)]) == 1
    lines = [s for s in capsys.readouterr().out.splitlines() if s.startswith("regression: ")]
    assert len(lines) == 2
    assert all("distmon sampled against " in line for line in lines)
    assert all(" on gpt2 fp32 takes 1." in line for line in lines)
    assert main([str(new), str(old)]) == 0, "faster is no regression"
    assert main([str(old), str(new), "--limit", "0.7"]) == 0


def test_a_slower_machine_is_no_regression(tmp_path: Path) -> None:
    slower = {name: 3 * value for name, value in SECONDS.items()}
    old, new = write(tmp_path / "old"), write(tmp_path / "new", slower, seed=1)
    assert main([str(old), str(new)]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_regression(tmp_path: Path, seed: int) -> None:
    old = write(tmp_path / "old", noise=0.3, seed=2 * seed)
    new = write(tmp_path / "new", noise=0.3, seed=2 * seed + 1)
    assert main([str(old), str(new)]) == 0


def test_an_answer_that_became_wrong_is_a_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"distmon exact": "grad_norm of a is 2, not 1"}
    old, new = write(tmp_path / "old"), write(tmp_path / "new", wrong=wrong)
    assert main([str(old), str(new)]) == 1
    printed = capsys.readouterr().out
    assert "distmon exact on gpt2 fp32 gives a wrong answer: grad_norm of a is 2" in printed
    assert main([str(new), str(new)]) == 0, "it was wrong before"
    assert "distmon exact, answer wrong" in capsys.readouterr().out


def test_results_of_the_first_version_can_be_compared(tmp_path: Path) -> None:
    """Its file has fewer columns, and no row about answers."""
    old, new = write(tmp_path / "old"), write(tmp_path / "new", WORSE, seed=1)
    with (old / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["measure"] in ("observation", "step")]
    known = ("workload", "dtype", "parallel", "ranks", "tensors", "elements", "contender")
    with (old / "rounds.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*known, "measure", "unit", "round", "value"), "", "ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert main([str(old / "rounds.csv"), str(old)]) == 0
    assert main([str(old / "rounds.csv"), str(new)]) == 1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes().rstrip().rpartition(b"\n")[0] + b"\ngpt2,fp32,none")


def _nan(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace(",s,0,", ",s,0,nan,", 1)
    path.write_text("\n".join(lines))


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _nan, lambda path: path.write_text("")])
def test_a_broken_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: object
) -> None:
    old, new = write(tmp_path / "old"), write(tmp_path / "new")
    damage(new / "results.csv")  # type: ignore[operator]
    assert main([str(old), str(new)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("benchmarks.compare: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limit", "-1"], "--limit must be 0 or more"),
        (["--limit", "nan"], "--limit must be 0 or more"),
        (["--confidence", "2"], "--confidence must be between 0 and 1"),
        (["--references", "nobody"], "nothing to compare"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    folder = str(write(tmp_path / "run"))
    assert main([folder, folder, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_too_few_rounds_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write(tmp_path / "old"), write(tmp_path / "new", rounds=4)
    assert main([str(old), str(new)]) == 2
    assert "4 rounds, fewer than 5" in capsys.readouterr().err
