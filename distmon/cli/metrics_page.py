"""`docs/metrics.md`, from the table of metrics."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.metrics import (
    INSIDE_METRICS,
    NAMED_METRICS,
    PARAM_METRICS,
    PERCENTILE_METRICS,
    RANK_METRICS,
    RENAMED,
    RUN_METRICS,
    Metric,
)


def page() -> str:
    """Return `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Printed by `distmon metrics` from `distmon/metrics.py`. A metric that was not measured is",
        "absent, or NaN. Elements are those of the whole parameter on all ranks. Times",
        "and counts are those since the last record.",
    ]
    for title, where, metrics in (
        ("Run", "`metrics` of a record", RUN_METRICS),
        ("Run, by name", "`metrics` of a record, one for each name", NAMED_METRICS),
        ("Parameter", "`params` of a record", (*PARAM_METRICS, *PERCENTILE_METRICS)),
        ("Rank", "`ranks` of a record", RANK_METRICS),
        *(
            (f"Inside: {kind}", f"`inside[{kind!r}]` of a record, with `inside` set", metrics)
            for kind, metrics in INSIDE_METRICS.items()
        ),
    ):
        lines += ["", f"## {title}", "", f"In {where}.", "", *_markdown(metrics)]
    lines += ["", "## Renamed", "", "Old names are still read in run folders and in rules.", ""]
    lines += ["| version 0.1 | now |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    return "\n".join(lines) + "\n"


def _markdown(metrics: Iterable[Metric]) -> list[str]:
    rows = (f"| `{m.name}` | {m.unit} | {m.reduction} | {m.help} |" for m in metrics)
    return ["| name | unit | reduction | help |", "|---|---|---|---|", *rows]
