"""The plot of a run: error of the total norm by family, and coverage by kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .goals import COVERAGE, SAMPLED_RMS
from .summary import Summary
from .tensor_kinds import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
"""Those of Okabe and Ito, which people with any kind of color vision tell apart."""
FLOOR: Final = 1e-5
"""Smaller errors are drawn as this one: a log axis has no zero."""


def write_plot(path: Path, summary: Summary) -> None:
    """Draw both panels into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    upper, lower = figure.subplots(2)
    totals = summary.total_errors("mode", "family")
    upper.set_yscale("log")
    upper.set_ylim(FLOOR / 2, 10)
    _grouped_bars(
        upper,
        summary.modes,
        summary.families,
        lambda mode, family: max(totals[mode, family].rms, FLOOR),
    )
    _goal(upper, SAMPLED_RMS, f"goal for sampled: {SAMPLED_RMS:.0%}")
    upper.set_title("Total gradient norm: rms relative error", loc="left")
    kinds = summary.parameter_errors("mode", "kind", "quantity")
    seen = [kind for kind in KINDS if any(kind == k for _, k, _ in kinds)]
    lower.set_ylim(0, 1.2)  # room for the legend
    _grouped_bars(
        lower, summary.modes, seen, lambda mode, kind: kinds[mode, kind, "grad_norm"].coverage
    )
    lower.set_yticks([i / 5 for i in range(6)])
    _goal(lower, COVERAGE, f"goal: {COVERAGE:.0%}")
    lower.set_title(
        "Gradient norms within 2 standard errors of the truth (no bar: read in full)", loc="left"
    )
    for axes in (upper, lower):
        axes.legend(frameon=False, ncols=len(summary.modes) + 1, loc="upper right", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _grouped_bars(
    axes: Axes, modes: Sequence[str], names: Sequence[str], value: Callable[[str, str], float]
) -> None:
    """Draw one group of bars per name, one bar per mode in each."""
    width = 0.8 / max(len(modes), 1)
    for i, mode in enumerate(modes):
        places = [at - 0.4 + width * (i + 0.5) for at in range(len(names))]
        heights: Any = [value(mode, name) for name in names]
        axes.bar(places, heights, width * 0.9, color=COLORS[i % len(COLORS)], label=mode)
    axes.set_xticks(range(len(names)), names)


def _goal(axes: Axes, height: float, label: str) -> None:
    axes.axhline(height, color="#444444", lw=1, ls="--", label=label)
