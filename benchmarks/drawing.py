"""How pictures of results look: colours, rows of bars, and numbers at an axis.

Colours are those of Okabe and Ito, which people with any kind of colour vision tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from distmon_benchmarks.summary import SAMPLED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE: Final = "#0072B2"
LIGHT_BLUE: Final = "#56B4E9"
GREY: Final = "#8c8c8c"
INK: Final = "#222222"
WIDTH: Final = 6.4
"""Inches; with letters of 11 points a picture stays readable across a telephone."""
STYLE: Final[Any] = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#bbbbbb",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def canvas(height: float) -> tuple[Figure, Axes]:
    """An empty picture of this height in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(WIDTH, height), layout=layout)
    return figure, figure.add_subplot()


def height_of(rows: int) -> float:
    """Inches for so many rows."""
    return 1.25 + 0.36 * max(rows, 1)


def bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    labels: Sequence[str],
    whiskers: Sequence[tuple[float, float]] | None = None,
) -> None:
    """Horizontal bars on a log axis, each with its label behind it."""
    rows = range(len(names))
    ends = [*values] if whiskers is None else [high for _, high in whiskers]
    axes.set_xscale("log")
    if names:
        # Bars on a log scale begin somewhere; room on the right is for the labels.
        low, high = min(values) / 4, max(ends)
        axes.set_xlim(low, high * (high / low) ** 0.42)
    axes.barh(rows, values, height=0.62, color=[colour_of(name) for name in names])
    if whiskers is not None:
        pairs = zip(values, whiskers, strict=True)
        lengths = [(value - low, high - value) for value, (low, high) in pairs]
        axes.errorbar(
            values,
            rows,
            xerr=[*zip(*lengths, strict=True)],
            fmt="none",
            ecolor=INK,
            capsize=3,
            lw=1,
        )
    for row, (end, label) in enumerate(zip(ends, labels, strict=True)):
        axes.annotate(
            label,
            (end, row),
            xytext=(6, -1),
            textcoords="offset points",
            va="center",
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the grid
        )
    label_rows(axes, names)


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write who a row is, the first on top."""
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("distmon"):
            label.set_color(BLUE)
            label.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(True, axis="x", which="major")
    axes.minorticks_off()


def colour_of(contender: str) -> str:
    """Blue for distmon, grey for others."""
    if contender == SAMPLED:
        return BLUE
    return LIGHT_BLUE if contender.startswith("distmon") else GREY


def axis_formatter(text: Callable[[float], str]) -> Any:
    """Of the numbers at an axis."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: short(text(value)))


def short(text: str) -> str:
    """Round numbers without zeros that say nothing: `10 ms`, not `10.0 ms`."""
    return re.sub(r"\.0+(?= )", "", text)
