"""The plot of the check: size against width, one line for each module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distmon.coordcheck.measuring import Sizes
from distmon.coordcheck.verdicts import LIMIT, Verdict
from distmon.errors import ConfigError

_COLORS = {"ok": "#0072B2", "grows": "#D55E00", "shrinks": "#CC79A7", "unclear": "#999999"}


def draw(found: Sequence[Sizes], verdicts: Sequence[Verdict], title: str, path: Path) -> None:
    """Write a PNG: one panel for each step, and one for the slopes."""
    plt = _pyplot()
    steps = len(found[0].moved) - 1
    shown = sorted({1, max(1, steps // 2), steps})
    widths = sorted({each.width for each in found})
    figure, axes = plt.subplots(1, len(shown) + 1, figsize=(4.2 * (len(shown) + 1), 4.4))
    by_name = {each.module: each for each in verdicts}
    for axis, step in zip(axes, shown, strict=False):
        for name, verdict in by_name.items():
            means = [
                np.exp(
                    np.mean(
                        [
                            np.log(max(each.moved[step], 1e-30))
                            for each in found
                            if each.module == name and each.width == width
                        ]
                    )
                )
                for width in widths
            ]
            axis.plot(widths, means, "o-", ms=3, lw=1.2, color=_COLORS[verdict.verdict], alpha=0.8)
        axis.set(xscale="log", yscale="log", xlabel="width", title=f"after step {step}")
        axis.set_xticks(widths, [str(width) for width in widths])
        axis.minorticks_off()
    axes[0].set_ylabel("rms of the change of a module's output")
    _draw_slopes(axes[-1], verdicts)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_slopes(axis: Any, verdicts: Sequence[Verdict]) -> None:
    rows = range(len(verdicts))
    axis.axvspan(-LIMIT, LIMIT, color="0.92", zorder=0)
    for verdict, color in _COLORS.items():
        these = [i for i in rows if verdicts[i].verdict == verdict]
        if these:
            slopes = [verdicts[i].moved for i in these]
            axis.barh(
                these,
                [each.value for each in slopes],
                xerr=[each.margin for each in slopes],
                color=color,
                label=verdict,
                error_kw={"lw": 0.8},
            )
    axis.set_yticks(rows, [v.module[-24:] for v in verdicts], fontsize=6)
    axis.invert_yaxis()
    axis.axvline(0, color="black", lw=0.8)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.set(xlabel="slope (0: independent of width; gray: passes)", title="slopes, 95% confidence")


def _pyplot() -> Any:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ConfigError(
            "the plot needs matplotlib: pip install 'distmon[bench]', or pass --no-plot"
        ) from None
    return plt
