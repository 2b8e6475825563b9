"""Replay or record the corpus: `python -m benchmarks.alarms`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from benchmarks import alarms
from benchmarks.alarms.recording import record
from benchmarks.alarms.scenarios import SCENARIOS, Scenario
from benchmarks.alarms.score_cases import markdown_table, score_all, summary_table
from benchmarks.alarms.scoring import CORPUS, places_of, score, table_of


def make(scenarios: Sequence[Scenario], corpus: Path, seed: int, console: Console) -> None:
    """Train and record again."""
    begun = time.perf_counter()
    # Each run is a process of its own with one thread.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        folders = pool.map(lambda scenario: record(scenario, corpus, seed), scenarios)
        for scenario, folder in zip(scenarios, folders, strict=True):
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e3
            console.print(f"{scenario.name}: {scenario.about} ({size:.0f} kB)")
    total = sum(file.stat().st_size for file in corpus.glob("*/*")) / 1e6
    console.print(f"{time.perf_counter() - begun:.0f} s; the corpus has {total:.1f} MB")


def main() -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.alarms",
        description=alarms.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; all of them when absent")
    parser.add_argument("--make", action="store_true", help="train and record the runs first")
    parser.add_argument("--verbose", action="store_true", help="list every alert")
    parser.add_argument(
        "--table", action="store_true", help="only the score table of docs/rules.md, in Markdown"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data with --make")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where the recordings are")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no run is called {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a log has no width of its own; the default cuts the table
    if asked.table:
        print(markdown_table(score_all()))
        return 0
    scenarios = [SCENARIOS[name] for name in asked.names] or [*SCENARIOS.values()]
    if asked.make:
        make(scenarios, asked.corpus, asked.seed, console)
    scores = [score(each, asked.corpus) for each in scenarios]
    console.print(table_of(scores))
    if asked.verbose:
        for each in scores:
            for alert in each.alerts:
                places = places_of(alert)
                where = f" [{', '.join(places[:4])}]" if places else ""
                text = f"{each.scenario.name} {alert.step} {alert.severity} {alert.rule}{where}: "
                console.print(text + alert.message, markup=False, highlight=False)
    if asked.names or asked.corpus != CORPUS:
        return 1 if any(each.misses for each in scores) else 0
    others = score_all()
    console.print(summary_table(others))
    if asked.verbose:
        for case in others:
            if case.case.half not in ("tuning", "held_back", "audit"):
                continue
            for alert in case.replay.alerts:
                text = f"{case.case.half} {case.case.name} {alert.step} {alert.severity} "
                console.print(f"{text}{alert.rule}: {alert.message}", markup=False, highlight=False)
    return 1 if any(each.misses for each in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
