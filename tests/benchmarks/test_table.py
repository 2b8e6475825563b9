"""Tables: the numbers are those of the files, and the README's block is rewritten alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_results import CONTEXT, GPT2, SECONDS, write, write_growing
from rich.console import Console

from distmon_benchmarks import wording
from distmon_benchmarks.contenders.registry import CONTENDERS
from distmon_benchmarks.summary import (
    ALL_NORMS,
    BARE,
    EXACT,
    GRADIENT_NORMS,
    HEADLINE,
    NAIVE,
    SAMPLED,
    WANDB,
    load,
)
from distmon_benchmarks.table import BEGIN, END, cost_rows, main, readme_block, show
from distmon_benchmarks.workloads import WORKLOADS


def test_names_are_those_of_the_registry() -> None:
    names = {contender.name for contender in CONTENDERS}
    assert {BARE, SAMPLED, EXACT, NAIVE, WANDB, GRADIENT_NORMS, ALL_NORMS} <= names
    assert HEADLINE[0] in {workload.name for workload in WORKLOADS}


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    summary = load(write(tmp_path, noise=0.0))
    columns = ["p50", "/ sampled", "share at 1", "at 100", "memory", "tags"]
    rows = {name: cells for name, *cells in cost_rows(summary, GPT2, columns)}
    assert rows["naive clone"] == ["500 ms", "250x", "10%", "0.10%", "475 MiB", ""]
    # 2 ms and 99 steps of 9 us, over 100 steps of 5 s
    assert rows["distmon sampled"] == ["2.00 ms", "1.00x", "0.040%", "0.00058%", "1.24 MiB", "29"]


def test_percentiles_are_over_rounds(tmp_path: Path) -> None:
    folder = write(tmp_path, {"distmon sampled": 1.0}, rounds=5, noise=0.0)
    lines = (folder / "rounds.csv").read_text().replace("observation,s,4,1.0", "observation,s,4,9")
    (folder / "rounds.csv").write_text(lines.replace("observation,s,0,1.0", "observation,s,0,0.5"))
    cost = load(folder).cost(GPT2, SAMPLED)
    assert cost is not None
    found = cost.observation
    assert (found.p20, found.p50, found.p80) == pytest.approx((0.9, 1.0, 2.6))


def test_the_console_shows_everything(tmp_path: Path) -> None:
    context = replace(CONTEXT, wrong={"olmo style": "grad_norm of [a] is 2, not 1"})
    console = Console(width=150, record=True, file=(tmp_path / "out").open("w"))
    show(write(tmp_path, context=context), console)
    text = console.export_text()
    for name in (*SECONDS, "mosaicml is not installed", "grad_norm of [a] is 2", "Processor of"):
        assert name in text
    assert "reached" in text


@pytest.mark.parametrize(("load_before", "told"), [(0.4, False), (0.6, True)])
def test_a_busy_machine_is_told_everywhere(tmp_path: Path, load_before: float, told: bool) -> None:
    folder = write(tmp_path, context=replace(CONTEXT, load_before=load_before))
    console = Console(width=150, record=True, file=(tmp_path / "out").open("w"))
    show(folder, console)
    for text in (console.export_text(), readme_block(load(folder), folder)):
        assert ("the machine was busy before the run began" in text) == told


README = f"# Project\r\n\r\nBefore | it\r\n{BEGIN}\r\nold\r\n{END}\r\nAfter it."


def test_the_block_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    folder, readme = write_growing(tmp_path / "run"), tmp_path / "README.md"
    readme.write_bytes(README.encode())
    arguments = [str(folder), "--readme", str(readme)]
    assert main([*arguments, "--check"]) == 1
    assert readme.read_bytes() == README.encode(), "a check writes nothing"
    assert main(arguments) == 0
    text = readme.read_bytes().decode()
    assert text.startswith(README[: README.index("old")])
    assert text.endswith(README[README.index(f"\r\n{END}") :])
    assert "old" not in text
    assert "`python benchmarks/overhead.py --quick`" in text
    assert "Processor of a test, 2 cores, 2 threads, torch 2.13.0" in text
    assert "commit 0123456789ab, load 0.1 before and 1.9 after, 2026-03-01" in text
    assert "| naive clone | " in text
    assert "- composer: skipped: mosaicml is not installed" in text
    assert main([*arguments, "--check"]) == 0
    readme.write_bytes(text.replace("naive clone | ", "naive clone | 1", 1).encode())
    assert main([*arguments, "--check"]) == 1


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, BEGIN + END + BEGIN + END])
def test_a_file_without_markers_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder, readme = write(tmp_path / "run"), tmp_path / "README.md"
    readme.write_text(text)
    assert main([str(folder), "--readme", str(readme)]) == 2
    assert readme.read_text() == text
    assert "must hold" in capsys.readouterr().err


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(folder), "--check"]) == 2
    assert main([str(folder), "--readme", str(tmp_path / "none.md")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("table.py: ") for line in lines)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (wording.seconds, 0.0019996, "2.00 ms"),
        (wording.seconds, 0.9999, "1.00 s"),
        (wording.seconds, 123.4, "123 s"),
        (wording.seconds, -0.0123, "-12.3 ms"),
        (wording.seconds, 5e-8, "50.0 ns"),
        (wording.seconds, 0.0, "0"),
        (wording.share, 0.0000031, "0.00031%"),
        (wording.share, 0.9999, "100%"),
        (wording.share, 0.0, "0%"),
        (wording.size, 1536, "1.50 KiB"),
        (wording.size, 12, "12 B"),
        (wording.count, 124_439_808, "124M"),
        (wording.count, 100, "100"),
        (wording.times, 1.2796, "1.28x"),
        (wording.times, 1043.0, "1040x"),
    ],
)
def test_numbers_are_readable(function: object, value: float, text: str) -> None:
    assert function(value) == text  # type: ignore[operator]
