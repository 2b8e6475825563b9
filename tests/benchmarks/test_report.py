"""The summary: the numbers are those of the file, and wrong answers come first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_results import GPT2, MACHINE, SECONDS, write, write_growing
from rich.console import Console

from benchmarks.summary import summarize
from distmon.bench import formatting
from distmon.bench.contenders import SAMPLED
from distmon.bench.costs import cost_of
from distmon.bench.report import cost_section
from distmon.bench.results import read


def _summary(folder: Path) -> tuple[str, str]:
    """The console and the Markdown."""
    with (folder / "printed").open("w") as file:
        console = Console(width=170, record=True, file=file)
        summarize(folder, console)
    return console.export_text(), (folder / "summary.md").read_text()


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    section = cost_section(read(write(tmp_path, noise=0.0)), GPT2)
    rows = {row[0]: dict(zip(section.headings, row, strict=True)) for row in section.rows}
    columns = ["p50", "/ sampled", "share at 1", "at 100", "memory", "tags"]
    clone = ["500 ms", "250x", "10%", "0.10%", "475 MiB", ""]
    assert [rows["naive clone"][name] for name in columns] == clone
    # 2 ms and 99 steps of 9 us, over 100 steps of 5 s
    sampled = ["2.00 ms", "1.00x", "0.040%", "0.00058%", "1.24 MiB", "29"]
    assert [rows["distmon sampled"][name] for name in columns] == sampled
    assert "launches" not in section.headings, "nobody measured it"
    assert section.title == (
        "gpt2 fp32: 148 tensors with 124M elements, bare training step 5.00 s, 7 rounds"
    )


def test_percentiles_are_over_rounds(tmp_path: Path) -> None:
    folder = write(tmp_path, {"distmon sampled": 1.0}, rounds=5, noise=0.0)
    path = folder / "results.csv"
    text = path.read_text().replace("observation,s,4,1.0", "observation,s,4,9")
    path.write_text(text.replace("observation,s,0,1.0", "observation,s,0,0.5"))
    cost = cost_of(read(folder), GPT2, SAMPLED.name)
    assert cost is not None
    found = cost.observation
    assert (found.p20, found.p50, found.p80) == pytest.approx((0.9, 1.0, 2.6))


def test_console_and_markdown_show_everything(tmp_path: Path) -> None:
    for text in _summary(write_growing(tmp_path)):
        for name in (*SECONDS, "slope", "goals: 13 of 13 reached", "Processor of a test, 2 cores"):
            assert name in text
        assert "commit 0123456, load 0.1 before, 2026-03-01" in text
        assert "wrong" not in text
    _, markdown = _summary(write(tmp_path))
    assert "`python -m benchmarks.overhead --quick`" in markdown
    assert "| naive clone | " in markdown
    assert "- composer skipped: mosaicml is not installed" in markdown


def test_a_wrong_answer_comes_first_and_is_beside_its_times(tmp_path: Path) -> None:
    wrong = {"distmon sampled": "grad_norm of [a] is 2 | not <1>"}
    console, markdown = _summary(write(tmp_path, wrong=wrong))
    headline = "answer wrong: distmon sampled on gpt2 fp32: grad_norm of [a] is 2 | not <1>"
    assert console.splitlines()[0] == headline
    assert "distmon sampled, answer wrong" in console
    assert "distmon exact, answer wrong" not in console
    assert f"**{headline}**".replace("|", "\\|").replace("<", "&lt;") in markdown
    assert "| distmon sampled, answer wrong | " in markdown
    assert "; answer wrong: distmon sampled | missed |" in markdown


@pytest.mark.parametrize(("load", "warned"), [(0.4, False), (0.6, True)])
def test_a_busy_machine_is_reported(tmp_path: Path, load: float, warned: bool) -> None:
    for text in _summary(write(tmp_path, machine=replace(MACHINE, load=load))):
        assert ("the machine was busy before the run" in text) == warned


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (formatting.seconds, 0.0019996, "2.00 ms"),
        (formatting.seconds, 0.9999, "1.00 s"),
        (formatting.seconds, 123.4, "123 s"),
        (formatting.seconds, -0.0123, "-12.3 ms"),
        (formatting.seconds, 5e-8, "50.0 ns"),
        (formatting.seconds, 0.0, "0"),
        (formatting.share, 0.0000031, "0.00031%"),
        (formatting.share, 0.9999, "100%"),
        (formatting.share, 0.0, "0%"),
        (formatting.size, 1536, "1.50 KiB"),
        (formatting.size, 12, "12 B"),
        (formatting.count, 124_439_808, "124M"),
        (formatting.count, 100, "100"),
        (formatting.times, 1.2796, "1.28x"),
        (formatting.times, 1043.0, "1040x"),
    ],
)
def test_numbers_are_readable(function: object, value: float, text: str) -> None:
    assert function(value) == text  # type: ignore[operator]
