"""Draw a run as PNGs: the costs of each case, and how they grow.

python -m benchmarks.plot runs/bench
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.scale.growth import AXES, Series, series
from distmon.bench import formatting
from distmon.bench.contenders import SAMPLED
from distmon.bench.costs import COLLECTIVE
from distmon.bench.plot import color_of, draw_costs, new_figure
from distmon.bench.results import Results, read
from distmon.errors import DistmonError

MARKERS = "s^DvPX"
GROWTH_FILE = "growth.png"


def draw(folder: Path) -> list[Path]:
    """Draw everything that the results can show, into their folder."""
    results = read(folder)
    paths = [draw_costs(results, case, folder) for case in results.cases]
    panels = [longest for axis in AXES if (longest := _longest(results, axis))]
    return [*paths, draw_growth(results, panels, folder)] if panels else paths


def _longest(results: Results, axis: str) -> list[Series]:
    """Return the lines over the most cases along this axis; shorter ones over the same cases."""
    lines = series(results, axis)
    return [line for line in lines if set(line.cases) <= set(lines[0].cases)]


def draw_growth(results: Results, panels: list[list[Series]], folder: Path) -> Path:
    """Draw one panel per axis, with the slope of each line in its legend."""
    figure = new_figure(4.8 * len(panels), 5)
    markers = dict(zip(results.contenders, MARKERS * 3, strict=False))
    for axes, lines in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in sorted(lines, key=lambda line: -line.medians[-1]):
            name = f"{line.contender}{', answer wrong' if line.wrong else ''}"
            axes.plot(
                line.x,
                line.medians,
                marker=markers[line.contender],
                color=color_of(line.contender),
                lw=3 if line.contender == SAMPLED.name else 1.6,
                linestyle=":" if line.wrong else "-",
                label=f"{name}, slope {line.slope_text}",
            )
        alone = [results.median(case, COLLECTIVE, "collective") for case in lines[0].cases]
        if any(alone):
            axes.plot(lines[0].x, alone, "k--", lw=1.2, label="all_reduce of as many bytes, alone")
        axes.set(xscale="log", yscale="log", xlabel=lines[0].axis, ylabel="one observation")
        axes.set_title(lines[0].where, fontsize=10)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(lines[0].x, [formatting.count(x) for x in lines[0].x])
        axes.yaxis.set_major_formatter(lambda value, _: formatting.seconds(value))
        axes.grid(True, color="#e6e6e6")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8, frameon=False)
    path = folder / GROWTH_FILE
    figure.savefig(path, dpi=140)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results of benchmarks.overhead or distmon bench")
    try:
        print(*draw(parser.parse_args().folder), sep="\n")
    except DistmonError as error:
        sys.exit(f"benchmarks.plot: {error}")


if __name__ == "__main__":
    main()
