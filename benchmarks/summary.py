"""Print the tables of a run again, and write them to `summary.md` beside it.

python -m benchmarks.summary runs/bench
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.overhead.goals import goal_section
from benchmarks.scale.growth import growth_section
from distmon.bench.report import write_summary
from distmon.bench.results import ResultsError, read


def summarize(folder: Path, console: Console) -> None:
    """Print and write costs, growth and goals; a `ResultsError` when they cannot be read."""
    results = read(folder)
    extra = [growth_section(results), goal_section(results)]
    write_summary(results, folder, console, [section for section in extra if section.rows])


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for the tables in a log."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results of benchmarks.overhead or distmon bench")
    try:
        summarize(parser.parse_args().folder, wide_console())
    except (ResultsError, OSError) as error:
        sys.exit(f"benchmarks.summary: {error}")


if __name__ == "__main__":
    main()
