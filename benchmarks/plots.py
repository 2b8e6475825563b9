"""The results of a run as PNG pictures.

    python benchmarks/plots.py runs/bench

distmon is blue everywhere; shapes and labels say once more what colours say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from distmon.errors import DistmonError
from distmon_benchmarks import wording
from distmon_benchmarks.drawing import (
    INK,
    STYLE,
    axis_formatter,
    bars,
    canvas,
    colour_of,
    height_of,
    label_rows,
    short,
)
from distmon_benchmarks.growth import AXES, Axis, Series, series, slope_text
from distmon_benchmarks.results import Case
from distmon_benchmarks.summary import COLLECTIVE, SAMPLED, Cost, Summary, case_name, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES: Final = (
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#000000", "P"),
    ("#8c8c8c", "X"),
)
"""Colour and marker of contenders other than distmon in pictures of growth."""
INTERVALS: Final = {1: ("o", 1.0), 10: ("s", 0.7), 100: ("D", 0.45)}
"""Marker and opacity by interval."""


@dataclass(frozen=True)
class Picture:
    """A PNG that was drawn, with what it shows in words."""

    path: Path
    title: str
    caption: str
    case: Case | None = None
    """Of pictures of one case."""


class NoMatplotlibError(DistmonError):
    """The package that draws is not installed."""


def draw(folder: Path) -> list[Picture]:
    """Draw everything that the results of this folder can show, into the folder.

    A `ResultsError` for results that cannot be read, a `NoMatplotlibError` without matplotlib.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise NoMatplotlibError("pictures need matplotlib: pip install 'distmon[bench]'") from None
    summary = load(folder)
    with mpl.rc_context(STYLE):
        return [*_pictures(summary, folder)]


def _pictures(summary: Summary, folder: Path) -> Iterator[Picture]:
    headline = summary.headline
    cases = sorted(summary.cases, key=lambda case: case != headline)
    for case in cases:
        costs = summary.costs(case)
        if len(costs) > 1 or case == headline:
            yield _observation(folder, case, costs)
    if headline is not None:
        costs = summary.costs(headline)
        if any(cost.share(1) for cost in costs):
            yield _shares(folder, headline, costs)
        if any(cost.memory for cost in costs):
            yield _memory(folder, headline, costs)
    looks = _looks(summary.contenders)
    for axis in AXES:
        for group in _drawn_together(series(summary, axis)):
            yield _growth(folder, axis, group, looks, _collective(summary, group[0]))


def _observation(folder: Path, case: Case, costs: Sequence[Cost]) -> Picture:
    shown = sorted((c for c in costs if c.observation.p50 > 0), key=lambda c: c.observation.p50)
    figure, axes = canvas(height_of(len(shown)))
    ratios = {c.contender: c.over_sampled for c in shown if c.contender != SAMPLED}
    labels = []
    for cost in shown:
        ratio = ratios.get(cost.contender)
        label = "" if ratio is None else f"  ({wording.times(ratio)})"
        labels.append(wording.seconds(cost.observation.p50) + label)
    low = min((c.observation.p50 for c in shown), default=1e-3) / 4
    bars(
        axes,
        [c.contender for c in shown],
        [c.observation.p50 for c in shown],
        labels,
        whiskers=[(max(low, c.observation.p20), c.observation.p80) for c in shown],
    )
    axes.set_xlabel("time added to one observed step (log scale)")
    axes.xaxis.set_major_formatter(axis_formatter(wording.seconds))
    name = case_name(case)
    axes.set_title(f"{name}: one observation")
    brackets = f", numbers in brackets are multiples of {SAMPLED}" if any(ratios.values()) else ""
    return Picture(
        _save(figure, folder, f"observation-{_slug(name)}"),
        f"Time of one observation, {name}",
        "Time that one observed step takes longer, on the training thread. Bars are medians, "
        f"whiskers reach from the 20th to the 80th percentile of the rounds{brackets}."
        f"{_lost_in_noise(costs)}",
        case,
    )


def _lost_in_noise(costs: Sequence[Cost]) -> str:
    lost = [c for c in costs if c.observation.p50 <= 0]
    named = ", ".join(f"{c.contender} ({wording.seconds(c.observation.p50)})" for c in lost)
    return f" Not drawn, because steps differ by more than they take: {named}." if lost else ""


def _memory(folder: Path, case: Case, costs: Sequence[Cost]) -> Picture:
    known = [(c.contender, c.memory) for c in costs if c.memory is not None]
    shown = sorted(((name, max(memory, 1.0)) for name, memory in known), key=lambda x: x[1])
    figure, axes = canvas(height_of(len(shown)))
    labels = [wording.size(memory) if memory > 1 else "none seen" for _, memory in shown]
    bars(axes, [name for name, _ in shown], [memory for _, memory in shown], labels)
    axes.set_xlabel("bytes beyond those of training (log scale)")
    low, high = axes.get_xlim()
    ticks = [2.0**power for power in range(0, 61, 5) if low <= 2.0**power <= high]
    axes.set_xticks(ticks, [short(wording.size(tick)) for tick in ticks])
    axes.set_title(f"{case_name(case)}: extra memory")
    return Picture(
        _save(figure, folder, "memory"),
        f"Extra memory, {case_name(case)}",
        "The most memory that a contender had beyond what training had, kept or for a moment.",
    )


def _shares(folder: Path, case: Case, costs: Sequence[Cost]) -> Picture:
    shown = sorted((c for c in costs if (c.share(1) or 0) > 0), key=lambda c: c.observation.p50)
    figure, axes = canvas(height_of(len(shown)) + 0.35)
    axes.set_xscale("log")
    for row, cost in enumerate(shown):
        percents = {i: 100 * (cost.share(i) or 0.0) for i in INTERVALS}
        colour = colour_of(cost.contender)
        axes.plot([*percents.values()], [row] * len(percents), color=colour, alpha=0.35, lw=2)
        for interval, percent in percents.items():
            marker, alpha = INTERVALS[interval]
            axes.scatter(percent, row, marker=marker, color=colour, alpha=alpha, s=48, zorder=3)
    label_rows(axes, [cost.contender for cost in shown])
    axes.set_xlabel("added to the training time (log scale)")
    axes.xaxis.set_major_formatter(axis_formatter(lambda percent: f"{percent:g}%"))
    axes.set_title(f"{case_name(case)}: share of the training time")
    handles = [
        axes.scatter([], [], marker=marker, color=INK, alpha=alpha, s=48, label=f"1 in {interval}")
        for interval, (marker, alpha) in INTERVALS.items()
    ]
    handles[0].set_label("every step is observed")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handletextpad=0.2)
    return Picture(
        _save(figure, folder, "share"),
        f"Share of the training time, {case_name(case)}",
        "Time that watching takes, over the time of the bare training steps, when one step in 1, "
        "10 or 100 is observed. What a contender does in the steps between counts too.",
    )


def _growth(
    folder: Path,
    axis: Axis,
    lines: Sequence[Series],
    looks: Mapping[str, tuple[str, str]],
    collective: Mapping[int, float],
) -> Picture:
    figure, axes = canvas(3.6 + 0.24 * (len(lines) + bool(collective)))
    for line in sorted(lines, key=lambda line: -line.medians[-1]):  # a legend in their order
        colour, marker = looks[line.contender]
        axes.plot(
            line.x,
            line.medians,
            marker=marker,
            color=colour,
            lw=3 if line.contender == SAMPLED else 1.8,
            ms=7,
            label=f"{line.contender}, slope {slope_text(line.fit())}",
        )
    if collective:
        label = "an all_reduce of the bytes that distmon sends, alone"
        axes.plot([*collective], [*collective.values()], "--", color=INK, lw=1.2, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major")
    sizes = sorted({x for line in lines for x in line.x})
    axes.set_xticks(sizes, [wording.count(x) for x in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(axis_formatter(wording.seconds))
    axes.set_xlabel(f"{axis} (log scale)")
    axes.set_ylabel("one observation (log scale)")
    first = lines[0].cases[0]
    where = {
        "tensors": f"{wording.count(first.elements / first.tensors)} elements each",
        "elements": f"{first.tensors} tensor{'s' if first.tensors > 1 else ''}",
        "ranks": f"{first.workload}, {first.parallel}",
    }[axis]
    ranks = f", {first.ranks} ranks" if axis != "ranks" and first.ranks > 1 else ""
    axes.set_title(f"growth with {axis}: {where}, {first.dtype}{ranks}", x=0)
    figure.legend(loc="outside lower left", ncols=1)
    name = f"growth-{axis}-{_slug(where)}-{first.dtype}{_slug(ranks)}"
    return Picture(
        _save(figure, folder, name),
        f"Growth with {axis}, {where}, {first.dtype}{ranks}",
        "Medians. The slope of a straight line through all rounds in this picture, with its "
        "standard error: 0 is flat, 1 is linear.",
    )


def _looks(contenders: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each contender, the same in all pictures of growth."""
    others = iter(LINES)
    return {
        name: (colour_of(name), "o") if name.startswith("distmon") else next(others, LINES[-1])
        for name in contenders
    }


def _collective(summary: Summary, line: Series) -> dict[int, float]:
    """What a collective alone takes on the ranks of this line, where it was measured."""
    if line.axis != "ranks":
        return {}
    medians = {case.ranks: summary.median(case, COLLECTIVE, "collective") for case in line.cases}
    return {ranks: seconds for ranks, seconds in medians.items() if seconds}


def _drawn_together(lines: Sequence[Series]) -> list[list[Series]]:
    """Lines over the same cases share a picture; a shorter one joins the longest it fits in."""
    groups: list[list[Series]] = []
    for line in lines:
        for group in groups:
            if set(line.cases) <= set(group[0].cases):
                group.append(line)
                break
        else:
            groups.append([line])
    return groups


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _save(figure: Figure, folder: Path, name: str) -> Path:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=160)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="results of overhead.py or distmon bench")
    try:
        pictures = draw(parser.parse_args().folder)
    except DistmonError as error:
        print(f"plots.py: {error}", file=sys.stderr)
        sys.exit(2)
    for picture in pictures:
        print(picture.path)


if __name__ == "__main__":
    main()
