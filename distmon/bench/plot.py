"""Draw what contenders cost in one case: time, share of the training time, memory.

distmon is blue, a wrong answer is hatched. Colors are those of Okabe and Ito, which people with any
kind of color vision can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from distmon.bench import formatting
from distmon.bench.contenders import SAMPLED
from distmon.bench.costs import Cost, costs_of
from distmon.bench.results import Case, Results
from distmon.errors import DistmonError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE: Final = "#0072B2"
LIGHT_BLUE: Final = "#56B4E9"
GRAY: Final = "#8c8c8c"
PANELS: Final[Sequence[tuple[str, Callable[[Cost], float | None], Callable[[float], str]]]] = (
    ("one observation", lambda cost: cost.observation.p50, formatting.seconds),
    ("share at interval 100", lambda cost: cost.share(100), formatting.share),
    ("extra memory", lambda cost: cost.medians.get("extra_memory"), formatting.size),
)
"""Title, value and text of each panel."""


class NoMatplotlibError(DistmonError):
    """The package that draws is not installed."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure in inches; a `NoMatplotlibError` without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise NoMatplotlibError("plots need matplotlib: pip install 'distmon[bench]'") from None
    return figure.Figure(figsize=(width, height), layout="constrained")


def draw_costs(results: Results, case: Case, folder: Path) -> Path:
    """Draw one case and return the PNG."""
    costs = sorted(costs_of(results, case), key=lambda cost: cost.observation.p50)
    panels = [panel for panel in PANELS if any((panel[1](cost) or 0) > 0 for cost in costs)]
    figure = new_figure(4.4 * len(panels) + 1, 1.6 + 0.34 * len(costs))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for each, (title, value, text) in zip(axes, panels, strict=True):
        _bars(each, costs, [value(cost) for cost in costs], text)
        each.set_title(title, fontsize=10, loc="left")
    axes[0].set_yticks(range(len(costs)), [cost.name for cost in costs])
    axes[0].set_ylim(len(costs) - 0.4, -0.6)
    figure.suptitle(f"{case.name} ({results.machine.device})", fontsize=11)
    path = folder / f"costs-{re.sub(r'[^a-z0-9]+', '-', case.name.lower()).strip('-')}.png"
    figure.savefig(path, dpi=140)
    return path


def _bars(
    axes: Axes, costs: Sequence[Cost], values: Sequence[float | None], text: Callable[[float], str]
) -> None:
    """Draw horizontal bars on a log axis; a value of 0 or below has its label alone."""
    drawn = [value for value in values if value is not None and value > 0]
    low, high = min(drawn) / 4, max(drawn)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.4)  # room for the labels
    axes.minorticks_off()
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    for place, (cost, value) in enumerate(zip(costs, values, strict=True)):
        if value is None:
            continue
        end = max(value, low)
        hatch = "////" if cost.wrong else None
        axes.barh(place, end, 0.62, color=color_of(cost.contender), hatch=hatch, edgecolor="white")
        axes.annotate(
            text(value), (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9
        )


def color_of(contender: str) -> str:
    """Return blue for distmon, gray for others."""
    if contender == SAMPLED.name:
        return BLUE
    return LIGHT_BLUE if contender.startswith("distmon") else GRAY
